"""A published number beside ours, and how such pairs become a table of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Claim", "claim_of", "table_of"]


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


def claim_of(row: Mapping[str, Any]) -> Claim:
    """What ``dataclasses.asdict`` and JSON made of a claim."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Claim(**fields)


def table_of(claims: Sequence[Claim]) -> str:
    """Markdown: one row per claim."""
    lines = ["| figure | what | paper | ours | difference | inputs | remarks |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {c.figure} | {c.what}{f', {c.unit}' if c.unit else ''} | {_shown(c.paper)} | {_shown(c.ours)} | "
        f"{c.deviation} | {c.inputs} | {c.note} |"
        for c in claims
    ]
    return "\n".join(lines) + "\n"


def _shown(value: float | tuple[float, ...] | None) -> str:
    if value is None:
        return "not printed"
    if isinstance(value, tuple):
        return " ".join(_shown(one) for one in value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
