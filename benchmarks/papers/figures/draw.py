"""Drawing: one look for all figures, the same bytes for the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Line", "Panel", "draw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points of one curve. ``published``: the paper's, dashed and grey."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    published: bool = False
    marker: str = "o"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One set of axes."""

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[Line]
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Draws what lines cannot.
    also: Callable[[Any], None] | None = None


def draw(file: Path, panels: Sequence[Panel], *, columns: int = 3) -> Path:
    """Writes the panels as SVG, row by row, with one legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # Text as text, and the same bytes for the same numbers.
    look: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": file.stem, "font.size": 8}
    with plt.rc_context(look):
        _write(file, panels, columns, plt)
    # Trailing blanks of the writer are none of the picture's business.
    file.write_text("\n".join(line.rstrip() for line in file.read_text().splitlines()) + "\n")
    return file


def _write(file: Path, panels: Sequence[Panel], columns: int, plt: Any) -> None:
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.2 * columns, 2.4 * rows + 0.4), layout="constrained", squeeze=False
    )
    shown: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, panels, strict=False):
        for line in panel.lines:
            style = {"color": "0.45", "linestyle": "--"} if line.published else {}
            (drawn,) = axis.plot(line.x, line.y, marker=line.marker, markersize=3, label=line.label, **style)
            shown.setdefault(line.label, drawn)
        if panel.also is not None:
            panel.also(axis)
        axis.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel, **panel.options)
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=min(len(shown), 6), frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
