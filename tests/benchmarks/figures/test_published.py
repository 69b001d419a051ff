"""What was transcribed: complete, used, and written where it belongs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.papers.figures import draw, piperag, telerag, vectorliterag
from benchmarks.papers.figures.published import beside, number, numbers

FOLDER = Path(draw.__file__).parent
PUBLISHED = json.loads((FOLDER / "published.json").read_text())
ENTRIES = [(paper, key) for paper, found in PUBLISHED.items() for key in found["entries"]]


@pytest.mark.parametrize(("paper", "key"), ENTRIES)
def test_every_published_number_has_a_place_and_a_use(paper, key):
    entry = PUBLISHED[paper]["entries"][key]
    assert set(entry) == {"where", "what", "unit", "value"}
    assert entry["where"]
    values = entry["value"] if isinstance(entry["value"], list) else [entry["value"]]
    assert all(isinstance(value, int | float) for value in values)
    sources = "".join(file.read_text() for file in FOLDER.glob("*.py"))
    stem = key.removesuffix("_h100").removesuffix("_4090").removesuffix("_server").removesuffix("_desktop")
    assert f'"{key}"' in sources or f"{stem}_{{" in sources, f"{key} is transcribed and compared with nothing"


def test_a_claim_stands_beside_its_published_number():
    claim = beside("vectorliterag", "gain", 1.2, inputs="assumed")
    assert (claim.paper, claim.ours, claim.deviation) == (1.5, 1.2, "-20%")
    row = beside("vectorliterag", "table2_index", (3.8, 3.0, 2.5, 2.2), inputs="fitted")
    assert row.paper == numbers("vectorliterag", "table2_index")
    assert number("telerag", "index_gb") == 61


def test_a_figure_without_its_inputs_says_which():
    for module in (vectorliterag, telerag, piperag):
        for one in module.MISSING:
            assert one.figure
            assert one.what
            assert one.printed
            assert len(one.why) > 15
    assert telerag.MISSING[2].printed == "throughput of 4 H200 over one: 3.8"


def test_a_drawing_of_the_same_numbers_has_the_same_bytes(tmp_path):
    pytest.importorskip("matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    before = dict(matplotlib.rcParams)
    panel = draw.Panel(
        title="t", xlabel="x", ylabel="y", lines=[draw.Line(label="ours", x=(1, 2), y=(3, 4), published=True)]
    )
    first = draw.draw(tmp_path / "a.svg", [panel, panel]).read_bytes()
    assert draw.draw(tmp_path / "a.svg", [panel, panel]).read_bytes() == first
    assert first.startswith(b"<?xml")
    assert dict(matplotlib.rcParams) == before
