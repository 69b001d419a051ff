"""A published number beside ours, and how such pairs become a table of Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Claim", "replace_section", "table_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One number, or one row of a heat map."""

    figure: str
    what: str
    paper: float | tuple[float, ...] | None
    ours: float | tuple[float, ...]
    unit: str = ""
    #: Of ours: "public", "fitted" or "assumed", and what.
    inputs: str = "public"
    #: Why they differ, where they do.
    note: str = ""

    @property
    def deviation(self) -> str:
        """Of one number the relative one; of a row the largest absolute one."""
        if self.paper is None:
            return ""
        if isinstance(self.paper, tuple) and isinstance(self.ours, tuple):
            return f"at most {max(abs(a - b) for a, b in zip(self.paper, self.ours, strict=True)):.3g}"
        assert isinstance(self.paper, float)
        assert isinstance(self.ours, float)
        return f"{self.ours / self.paper - 1:+.0%}"


def table_of(claims: Sequence[Claim]) -> str:
    """Markdown: one row per claim."""
    lines = ["| figure | what | paper | ours | difference | inputs | remarks |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {c.figure} | {c.what}{f', {c.unit}' if c.unit else ''} | {_shown(c.paper)} | {_shown(c.ours)} | "
        f"{c.deviation} | {c.inputs} | {c.note} |"
        for c in claims
    ]
    return "\n".join(lines) + "\n"


def replace_section(file: Path, name: str, text: str) -> None:
    """Writes ``text`` between the markers ``name: begin`` and ``name: end`` of a Markdown file; elsewhere nothing."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = file.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise SystemExit(f"{file} has no markers {begin} and {end}")
    file.write_text(f"{before}{begin}\n{text}{end}{after}")


def _shown(value: float | tuple[float, ...] | None) -> str:
    if value is None:
        return "not printed"
    if isinstance(value, tuple):
        return " ".join(_shown(one) for one in value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
