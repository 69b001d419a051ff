"""Fills the templates with committed results, and puts the passages between the markers of the documents."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks import ROOT
from benchmarks.common.claims import Claim, claim_of, table_of
from benchmarks.texts import say

__all__ = ["DOCUMENTS", "RESULTS", "passages", "replace_passage", "with_passages"]

RESULTS = ROOT / "benchmarks" / "results"
#: Template -> document.
DOCUMENTS = {
    "README.md": ROOT / "README.md",
    **{
        f"{name}.md": ROOT / "docs" / f"{name}.md"
        for name in (
            *("cluster", "compressed", "filters", "lookahead", "numbers", "performance", "reproduction"),
            *("rag", "service", "simulator", "updates", "vllm"),
        )
    },
}


def passages(template: str, results: Path = RESULTS) -> dict[str, str]:
    """Block of the template -> its text, with the numbers of the JSON files in ``results``."""
    env = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    env.filters |= {
        "f": _fixed,
        "pc": _percent,
        "signed": _signed,
        "median": statistics.median,
        "off": off,
        "apart": apart,
        "floor": say.floor,
        "milli": lambda value: value / 1e3,
        "bare": say.bare,
    }
    found = env.get_template(template)
    context = found.new_context(_names(results))
    return {name: "".join(block(context)).strip("\n") + "\n" for name, block in found.blocks.items()}


def with_passages(text: str, found: Mapping[str, str], document: str = "the document") -> str:
    """``text`` of a document with what is ``found`` between its markers."""
    for name, passage in found.items():
        text = replace_passage(text, name, passage, document)
    return text


def replace_passage(text: str, name: str, passage: str, document: str = "the document") -> str:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, has_begin, rest = text.partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise ValueError(f"{document} has no markers {begin} and {end}")
    return f"{before}{begin}\n{passage}{end}{after}"


def _fixed(value: float | Sequence[float], digits: int = 0) -> str:
    """Two decimals for 2; a row of numbers one after another."""
    if isinstance(value, list | tuple):
        return " / ".join(_fixed(one, digits) for one in value)
    assert isinstance(value, int | float), value
    shown = f"{value:,.{digits}f}"
    return shown.removeprefix("-") if float(shown.replace(",", "")) == 0 else shown.replace("-", "\N{MINUS SIGN}")


def _signed(value: float | Sequence[float], digits: int = 0) -> str:
    """With a plus where it is not negative."""
    if isinstance(value, list | tuple):
        return " / ".join(_signed(one, digits) for one in value)
    shown = _fixed(value, digits)
    return shown if shown.startswith("\N{MINUS SIGN}") else f"+{shown}"


def _percent(share: float, digits: int = 0) -> str:
    return _fixed(100 * share, digits)


def _names(results: Path) -> dict[str, Any]:
    """What templates can say."""

    @cache
    def result(name: str) -> Any:
        return json.loads((results / f"{name}.json").read_text())

    def claims(paper: str) -> list[Claim]:
        if paper == "rago":
            return [claim_of(row) for part in result("schedule_figures")["claims"].values() for row in part]
        return [claim_of(row) for row in result("figures")["claims"][paper]]

    def claim(paper: str, words: str, figure: str = "") -> Claim:
        """The one claim whose words contain ``words``."""
        found = [c for c in claims(paper) if words in c.what and figure in c.figure]
        if len(found) != 1:
            raise KeyError(f"{len(found)} claims of {paper} contain {words!r}: {[c.what for c in found]}")
        return found[0]

    names: dict[str, Callable[..., Any]] = {
        "result": result,
        "claims": claims,
        "claim": claim,
        "table": lambda paper: table_of(claims(paper)),
        "table_of": lambda rows: table_of([claim_of(row) for row in rows]),
        "not_drawn": lambda paper: not_drawn(result("figures")["missing"][paper]),
        "off": off,
        "apart": apart,
        "where": lambda name: say.where(result(name)["environment"]),
        "machine": say.where,
        "ahead": lambda batch, level: say.ahead(result("recall_qps")["at_recall"], batch, level),
        "capped": say.capped,
        "at_cap": say.at_cap,
        "parts_of": say.parts_of,
        "not_there": say.not_there,
        "router_met": say.router_met,
        "shares_of_targets": say.shares_of_targets,
    }
    return dict(names)


def _pairs(claim: Claim, rows: Sequence[int]) -> list[tuple[float, float]]:
    """(ours, the paper's) of a claim, or of some numbers of its row."""
    if isinstance(claim.paper, tuple) and isinstance(claim.ours, tuple):
        return [(claim.ours[i], claim.paper[i]) for i in rows or range(len(claim.paper))]
    assert isinstance(claim.paper, float)
    assert isinstance(claim.ours, float)
    return [(claim.ours, claim.paper)]


def off(claim: Claim, *rows: int) -> float:
    """Largest relative difference."""
    return max(abs(ours / paper - 1) for ours, paper in _pairs(claim, rows))


def apart(claim: Claim, *rows: int) -> float:
    """Largest difference."""
    return max(abs(ours - paper) for ours, paper in _pairs(claim, rows))


def not_drawn(missing: Sequence[Mapping[str, str]]) -> str:
    lines = ["| not reproduced | what | the paper prints | which input is missing |", "|---|---|---|---|"]
    lines += [f"| {one['figure']} | {one['what']} | {one['printed']} | {one['why']} |" for one in missing]
    return "\n".join(lines) + "\n"
