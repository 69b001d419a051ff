"""What a picture shows, as comma-separated values: lines, dots, bars and areas, read from matplotlib's objects."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["NAMED_PLACES", "csv_of"]

#: ``gid`` of an axis whose ticks name places; what stands beside a place belongs to it.
NAMED_PLACES = "named places"

_HEADER = ("panel", "series", "x_axis", "x", "y_axis", "y", "y_to")


def csv_of(figure: Figure) -> str:
    """One row for each point: ``panel,series,x_axis,x,y_axis,y,y_to``. ``y_to``: the other edge of an area, else empty.

    Panels are named by their title, or by their number; series by their label in the legend, or by their number.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_HEADER)
    for number, axes in enumerate(figure.axes, 1):
        panel = axes.get_title(loc="left") or axes.get_title() or str(number)
        x_axis, y_axis = axes.get_xlabel(), axes.get_ylabel()
        names = _names(axes)
        for series, points in _series(axes):
            for x, y, *to in points:
                if np.isfinite(y):
                    place = _nearest(names, x) if names else _number(x)
                    writer.writerow([panel, series, x_axis, place, y_axis, _number(y), *map(_number, to or ("",))])
    return out.getvalue()


def _number(value: Any) -> str:
    return value if isinstance(value, str) else f"{float(value):.6g}"


def _names(axes: Axes) -> dict[float, str]:
    """Of the places of an axis that has some (:data:`NAMED_PLACES`)."""
    if axes.xaxis.get_gid() != NAMED_PLACES:
        return {}
    texts = (tick.get_text() for tick in axes.get_xticklabels())
    return {float(at): text for at, text in zip(axes.get_xticks(), texts, strict=True)}


def _nearest(names: dict[float, str], x: float) -> str:
    """As policies at one rate do, some stand beside their place."""
    return names[min(names, key=lambda place: abs(place - x))]


def _series(axes: Axes) -> Iterator[tuple[str, Iterable[Any]]]:
    """Name and points of each; what marks a place of an axis, as a line at the SLO does, and what connects points are
    left out."""
    from matplotlib.collections import PathCollection, PolyCollection

    number = 0

    def named(artist: Any) -> str:
        nonlocal number
        number += 1
        label = str(artist.get_label()).replace(r"\$", "$")
        return str(number) if not label or label.startswith("_") else label.strip()

    for line in axes.lines:
        if line.get_transform() == axes.transData:
            yield named(line), np.column_stack([np.asarray(v, dtype=float) for v in line.get_data()])
    for container in axes.containers:
        bars = [patch for patch in container if hasattr(patch, "get_height")]
        if bars:
            yield named(container), [(b.get_x() + b.get_width() / 2, b.get_y() + b.get_height()) for b in bars]
    for collection in axes.collections:
        if isinstance(collection, PathCollection):
            yield named(collection), np.asarray(collection.get_offsets(), dtype=float)
        elif isinstance(collection, PolyCollection) and collection.get_transform() == axes.transData:
            yield named(collection), _edges(collection.get_paths())


def _edges(paths: Any) -> Iterator[tuple[float, float, float]]:
    """(x, lower, upper) of areas between two lines."""
    for path in paths:
        at: dict[float, list[float]] = {}
        for x, y in path.vertices:
            at.setdefault(float(x), []).append(float(y))
        for x in sorted(at):
            yield x, min(at[x]), max(at[x])
