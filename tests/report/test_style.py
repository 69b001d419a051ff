from __future__ import annotations

import subprocess
import sys

import pytest

from hybridindex.report.style import byte_unit, canvas, plain_label, readable_seconds


def test_importing_the_report_imports_no_matplotlib() -> None:
    code = "import sys, hybridindex.report; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_drawing_leaves_global_settings_and_pyplot_alone() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    with canvas() as drawing:
        drawing.panels()[0].plot([1, 2], [1, 2])
        first = drawing.png()
    assert dict(matplotlib.rcParams) == before
    with canvas() as drawing:
        drawing.panels()[0].plot([1, 2], [1, 2])
        assert drawing.png() == first


@pytest.mark.parametrize("text", ["$\\frac{$", "_hidden", "a" * 200, "漢字\n\x00", ""])
def test_any_text_is_a_drawable_label(text: str) -> None:
    with canvas() as drawing:
        (axes,) = drawing.panels()
        axes.plot([1, 2], [1, 2], label=plain_label(text))
        axes.set_xlabel(plain_label(text))
        if text:
            assert [t.get_text() for t in axes.legend().get_texts()] == [plain_label(text)]
        drawing.png()


def test_units_read_well() -> None:
    assert readable_seconds(1.234e-3) == "1.23 ms"
    assert readable_seconds(2e-9) == "0.002 µs"
    assert readable_seconds(float("nan")) == "-"
    assert byte_unit(3 << 20) == (1 << 20, "MiB")
    assert byte_unit(10) == (1, "bytes")
