"""Numbers transcribed from the papers, with where they stand; and results that were measured here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common.claims import Claim

__all__ = ["Missing", "beside", "measured_here", "missing", "number", "numbers"]

_HERE = Path(__file__).parent


@cache
def _all() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_HERE / "published.json").read_text())
    return found


def _entry(paper: str, key: str) -> dict[str, Any]:
    entry: dict[str, Any] = _all()[paper]["entries"][key]
    return entry


def numbers(paper: str, key: str) -> tuple[float, ...]:
    """A row of published numbers."""
    return tuple(float(value) for value in _entry(paper, key)["value"])


def number(paper: str, key: str) -> float:
    """One published number."""
    return float(_entry(paper, key)["value"])


def beside(
    paper: str, key: str, ours: float | tuple[float, ...], *, inputs: str, note: str = "", what: str = ""
) -> Claim:
    """The published number beside ours."""
    entry = _entry(paper, key)
    row = isinstance(entry["value"], list)
    return Claim(
        figure=entry["where"],
        what=what or entry["what"],
        paper=numbers(paper, key) if row else number(paper, key),
        ours=ours,
        unit=entry["unit"],
        inputs=inputs,
        note=note,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A figure that rests on what is not public: one line instead of an invented curve."""

    figure: str
    what: str
    #: Which input is missing.
    why: str
    #: What the paper prints of it.
    printed: str


def missing(figure: str, what: str, why: str, *, paper: str = "", keys: Sequence[str] = ()) -> Missing:
    """``keys`` of ``paper``: published numbers that nothing of ours stands beside."""
    said = []
    for key in keys:
        entry = _entry(paper, key)
        values = entry["value"] if isinstance(entry["value"], list) else [entry["value"]]
        said.append(f"{entry['what']}: {' '.join(f'{value:g}' for value in values)} {entry['unit']}".strip())
    return Missing(figure=figure, what=what, why=why, printed="; ".join(said) or "nothing")


def measured_here(name: str) -> Any:
    """The results of another benchmark, as it wrote them."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
