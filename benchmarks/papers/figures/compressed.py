"""VectorLiteRAG's Table II and Figure 11 were its lists RaBitQ codes of one bit: the planner and the simulator again.

The paper has no such index, so nothing of it is published. On :mod:`benchmarks.papers.figures.paper_server` all stays
as it was but:

* *bytes*: a row of 1,024 dimensions takes 132 bytes of codes, and not the 256 that its lists are taken to have.
* *scans* of codes take time in proportion to bytes, on host and GPU. Another row says what comes of it if a code takes
  as long as one of the paper's.
* *exact distances*: as many candidates as the demo's search at k = 100 needs for a recall loss of 0.5 %, at the time
  each took here with two threads, spread over 64 cores: both from ``benchmarks/results/code_plans.json``. They stay on
  the host, with rows of which the paper has none.

Rates of the paper's lists are those that :mod:`benchmarks.papers.figures.vectorliterag` wrote last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.common.claims import Claim
from benchmarks.papers.figures.draw import Line, Panel, draw
from benchmarks.papers.figures.paper_runs import compliant, panels
from benchmarks.papers.figures.paper_server import CODE_BYTES, ORCAS_1K_S, PAPER, Codes, coded_profile
from benchmarks.papers.figures.paper_server import Panel as Server
from benchmarks.papers.figures.published import Missing, beside, measured_here, number, numbers
from benchmarks.papers.figures.table_2 import table_2_lists, table_2_plans

__all__ = ["MISSING", "claims", "codes_of", "figures"]

MISSING: tuple[Missing, ...] = ()
#: One bit of 1,024 dimensions, and two factors of 16 bits.
ONE_BIT_BYTES = 1024 // 8 + 4
_CORES = 64
_BASE = "as Figure 11's; assumed: scans in proportion to bytes; measured here: exact distances"


@cache
def codes_of(scan_share: float = ONE_BIT_BYTES / CODE_BYTES) -> Codes:
    """One bit, with the exact distances as they were measured here."""
    run = measured_here("code_plans")["results"][0]
    own = next(side for side in run["sides"] if side["side"] == "1 bit, sq8")
    timed = next(row for row in run["predictions"] if row["side"] == "1 bit, sq8")
    rerank_s = own["candidates_at_100"] * timed["candidate_us"] / 1e6 * timed["threads"] / _CORES
    return Codes(bits=1, code_bytes=ONE_BIT_BYTES, scan_share=scan_share, rerank_s=rerank_s)


def claims(*, quick: bool = False) -> Iterator[Claim]:
    """Both figures; ``quick``: neither, because both are simulated or fitted."""
    if not quick:
        yield from _table_2()
        yield from _figure_11()


@cache
def _lists_gb() -> tuple[float, ...]:
    """GB of the paper's lists on each GPU at Table II's four SLOs, as planned."""
    return table_2_lists(ORCAS_1K_S)


def _fixed_gb() -> float:
    """On each GPU whatever the SLO: of :func:`benchmarks.papers.figures.table_2.fit_table_2`."""
    printed, lists = numbers(PAPER, "table2_index"), _lists_gb()
    return (printed[0] - lists[0] + printed[-1] - lists[-1]) / 2


def _table_2() -> Iterator[Claim]:
    fixed_gb = _fixed_gb()
    for scan_share, said in (
        (codes_of().scan_share, "in proportion to bytes"),
        (1.0, "as long as of the paper's lists"),
    ):
        lists = table_2_gb(codes_of(scan_share))
        yield beside(
            PAPER,
            "table2_index",
            tuple(gb + fixed_gb for gb in lists),
            what=f"index on each GPU, planned with codes of 1 bit; scans take time {said}",
            inputs="as Table II's; " + _BASE.partition("; ")[2],
            note=f"lists and our scratch {_row(lists)} GB, of the paper's codec {_row(_lists_gb())} GB",
        )


def table_2_gb(codes: Codes) -> tuple[float, ...]:
    """GB of codes on each GPU at Table II's four SLOs."""
    return tuple(plan.device_bytes / 8e9 for plan in table_2_plans(coded_profile("ORCAS 1K", codes)))


def _row(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def _figure_11() -> Iterator[Claim]:
    """Codes planned beside lists planned and the best baseline, which searches the paper's lists."""
    gains, over_rows = [], []
    for panel in panels():
        coded = replace(panel, codes=codes_of())
        planned, *baselines = _rates(panel)
        best = max(baselines)
        rates = (compliant(coded, "ours"), planned, best, compliant(coded, "cpu-only"))
        gains.append(rates[0] / best)
        over_rows.append(rates[0] / rates[1])
        yield Claim(
            figure="Figure 11",
            what=f"rate within the SLO, {panel.index}, {panel.llm}: codes planned, lists planned, best baseline, "
            "codes on the CPU alone",
            paper=None,
            ours=rates,
            unit="requests/s",
            inputs=_BASE,
            note=f"codes on {100 * coded.plan().coverage:.0f} % of lists, lists on {100 * panel.plan().coverage:.0f} %",
        )
    yield Claim(
        figure="Figure 11",
        what="codes planned over the best baseline: largest gain, panels in which they are first",
        paper=(number(PAPER, "gain"), 9.0),
        ours=(max(gains), float(sum(gain >= 1 for gain in gains))),
        inputs=_BASE,
        note=f"least gain {min(gains):.2f}; over lists planned {min(over_rows):.2f} to {max(over_rows):.2f}",
    )


def _rates(panel: Server) -> tuple[float, ...]:
    """Within the SLO, of lists: planned, and the baselines."""
    words = f"rate within the SLO, {panel.index}, {panel.llm}: "
    claims = measured_here("figures")["claims"][PAPER]
    return tuple(next(claim["ours"] for claim in claims if claim["what"].startswith(words)))


def figures(folder: Path) -> list[Path]:
    """Table II again."""
    slos, fixed_gb = numbers(PAPER, "table2_slo"), _fixed_gb()
    lines = [
        Line(label="published", x=slos, y=numbers(PAPER, "table2_index"), published=True, marker="s"),
        Line(label="lists planned", x=slos, y=[gb + fixed_gb for gb in _lists_gb()]),
        Line(label="codes planned", x=slos, y=[gb + fixed_gb for gb in table_2_gb(codes_of())]),
        Line(label="fixed bytes", x=slos, y=[fixed_gb] * len(slos), marker=""),
    ]
    panel = Panel(title="Table II", xlabel="search SLO, ms", ylabel="GB on each GPU", lines=lines)
    return [draw(folder / "vectorliterag-codes.svg", [panel])]
