"""PipeRAG's Figures 4 to 8, 10 and Tables 1, 2: its model of generation time (C.2), and what was measured here.

Perplexities belong to RETRO checkpoints and three billion chunks that are not at hand: one line each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.claims import Claim
from benchmarks.papers.figures.draw import Line, Panel, draw
from benchmarks.papers.figures.published import beside, measured_here, missing, numbers

__all__ = ["MISSING", "Timing", "claims", "figures", "fitted"]

PAPER = "piperag"
TOKENS = 1024
_MEASURED = "measured here: Gemma 3 270M on a core, 512 tokens, two answers"
_FITTED = "fitted on Table 1, Wikipedia: 9.35 s to generate, the rest of RETRO's in 16 searches, 0.99 s of attention"

MISSING = (
    missing("4", "perplexity by database size", "the RETRO checkpoint and its database are not at hand"),
    missing(
        "5",
        "perplexity by interval and nprobe",
        "the same; ours, with another model, is in rag.md (benchmarks.rag --only quality)",
    ),
    missing(
        "6",
        "frontier of latency and perplexity",
        "perplexities; the latency half is in the table",
        paper=PAPER,
        keys=("perplexity_gain",),
    ),
    missing(
        "Table 1",
        "perplexities",
        "the same checkpoint",
        paper=PAPER,
        keys=("perplexity_none", "perplexity_retro", "perplexity_model"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one answer is made of. Seconds."""

    #: Of 1024 tokens, and of the cross attention to what was retrieved in them.
    generate_s: float
    attend_s: float
    #: Of one search.
    search_s: float

    def synchronous_s(self, interval: int = 64) -> float:
        """RETRO: every search is waited for."""
        return self.generate_s + self.attend_s + math.ceil(TOKENS / interval) * self.search_s

    def pipelined_s(self, interval: int = 64) -> float:
        """PipeRAG: the first search is waited for; each later one runs beside a chunk."""
        chunks = math.ceil(TOKENS / interval)
        chunk_s = (self.generate_s + self.attend_s) / chunks
        return self.search_s + chunk_s + (chunks - 1) * max(chunk_s, self.search_s)

    def faster(self, *, inference: float = 1.0, retrieval: float = 1.0) -> Timing:
        """On other hardware (Figure 7)."""
        return Timing(
            generate_s=self.generate_s / inference,
            attend_s=self.attend_s / inference,
            search_s=self.search_s / retrieval,
        )


def fitted(data_set: int = 0) -> Timing:
    """From one row of Table 1. Attention is what driven retrieval, which hides its searches, takes beyond none."""
    none, retro, hidden = (numbers(PAPER, key)[data_set] for key in ("none_s", "retro_s", "model_s"))
    attend = hidden - none
    return Timing(generate_s=none, attend_s=attend, search_s=(retro - none - attend) / 16)


def claims(*, quick: bool = False) -> Iterator[Claim]:
    """Every number that the paper prints and we have. All of them are quick."""
    for part in (_table_1, _figure_6, _figure_7, _figure_8, _table_2):
        yield from part()


def _table_1() -> Iterator[Claim]:
    wikipedia = fitted()
    predicted = []
    for index in range(3):
        # Of the other two rows only RETRO's time is used: it says how long their searches are.
        search = (numbers(PAPER, "retro_s")[index] - wikipedia.generate_s - wikipedia.attend_s) / 16
        own = Timing(generate_s=wikipedia.generate_s, attend_s=wikipedia.attend_s, search_s=search)
        predicted.append(own.pipelined_s())
    yield beside(
        PAPER,
        "model_s",
        tuple(predicted),
        inputs=_FITTED,
        note="intervals of 64 tokens; ours counts the first search, which nothing hides",
    )
    run = measured_here("rag")["piperag"]
    times = {name: _seconds(side) for name, side in run["schedules"].items()}
    yield Claim(
        figure="Table 1",
        what="pipelined over no retrieval",
        paper=numbers(PAPER, "model_s")[0] / numbers(PAPER, "none_s")[0],
        ours=times["pipelined"] / times["none"],
        inputs=_MEASURED,
        note=_stretched(run),
    )
    yield beside(
        PAPER,
        "model_error",
        100.0 * float(run["projected"]["median_error"]),
        inputs="measured here: whole answers, foretold",
        note=f"single chunks, as they begin: {100.0 * run['deadlines']['chunk_time_error']['median']:.1f} %",
    )


def _seconds(side: dict[str, Any]) -> float:
    """Median of one schedule's answers."""
    return float(np.median(side["seconds"]))


def _stretched(run: dict[str, Any]) -> str:
    """What was done to searches, so that they take about as long as a chunk."""
    part = run["factor"] * run["search_s"] / run["chunk_s"]
    return f"every search is repeated {run['factor']:,} times inside the host's scan: {part:.1f} of a chunk"


def _figure_6() -> Iterator[Claim]:
    timing = fitted()
    at_64 = timing.synchronous_s() / timing.pipelined_s()
    # Hiding can halve the time at most, where search and chunk take equally long; beyond that RETRO searches more.
    yield beside(
        PAPER,
        "speedup",
        at_64,
        inputs=_FITTED,
        note="at equal searches; 2 is the most that hiding gives, the rest is fewer lists at equal perplexity, which "
        "is not at hand",
    )
    # The paper's own comparison: RETRO's interval of 64 tokens against PipeRAG's 32.
    for part in ("piperag", "larger"):
        run = measured_here("rag")[part]
        times = {name: _seconds(side) for name, side in run["schedules"].items()}
        pipelined = times["pipelined"]
        yield Claim(
            figure="abstract, Figure 6",
            what="synchronous every 32 and every 64 tokens over pipelined every 32, a search of "
            f"{run['factor'] * run['search_s'] / run['chunk_s']:.1f} chunks",
            paper=None,
            ours=(times["synchronous"] / pipelined, times["synchronous, every 64"] / pipelined),
            inputs=_MEASURED,
            note=_stretched(run),
        )


def _figure_7() -> Iterator[Claim]:
    timing = fitted()
    for name in ("inference", "retrieval"):
        ratios = []
        for factor in (1.0, *numbers(PAPER, "faster")):
            other = timing.faster(**{name: factor})
            ratios.append(other.synchronous_s() / other.pipelined_s())
        yield Claim(
            figure="Figure 7",
            what=f"RETRO over PipeRAG, {name} 1 4 16 times as fast",
            paper=None,
            ours=tuple(ratios),
            inputs=_FITTED,
            note="text: always ahead, and less so at 16",
        )


def _figure_8() -> Iterator[Claim]:
    timing = fitted()
    intervals = [int(tokens) for tokens in numbers(PAPER, "intervals")]
    for name, seconds in (("RETRO+", timing.synchronous_s), ("PipeRAG", timing.pipelined_s)):
        yield Claim(
            figure="Figures 8 and 10",
            what=f"1024 tokens, {name}, intervals {' '.join(map(str, intervals))}",
            paper=None,
            ours=tuple(seconds(interval) for interval in intervals),
            unit="s",
            inputs=_FITTED,
            note="text: PipeRAG is faster at each interval",
        )


def _table_2() -> Iterator[Claim]:
    found, rows = measured_here("rag")["staleness"], _stale_rows()
    yield beside(
        PAPER,
        "cosine",
        tuple(row["cosine"] for row in rows),
        inputs=f"measured here: {found['windows']} windows, {found['corpora'][-1]['passages']:,} passages, "
        "all-MiniLM-L6-v2",
        note=f"{' '.join(str(row['staleness']) for row in rows)} tokens stale; of three billion passages some are near",
    )


def _stale_rows() -> list[dict[str, Any]]:
    """By all-MiniLM-L6-v2: the embedder of PipeRAG's database."""
    rows: list[dict[str, Any]] = measured_here("rag")["staleness"]["views"]["sentences"]["rows"]
    return rows


def _doubling(axis: Any) -> None:
    axis.set_xscale("log", base=2)


def figures(folder: Path) -> list[Path]:
    """Times by interval, gains on other hardware, staleness."""
    timing = fitted()
    intervals = [int(tokens) for tokens in numbers(PAPER, "intervals")]
    by_interval = Panel(
        title="Figures 8, 10: 1024 tokens",
        xlabel="retrieval interval, tokens",
        ylabel="s",
        lines=[
            Line(label="RETRO+", x=intervals, y=[timing.synchronous_s(i) for i in intervals]),
            Line(label="PipeRAG", x=intervals, y=[timing.pipelined_s(i) for i in intervals]),
        ],
        also=_doubling,
    )
    factors = [2.0**i for i in range(7)]
    gains = []
    for name in ("inference", "retrieval"):
        others = [timing.faster(**{name: factor}) for factor in factors]
        gains.append(Line(label=f"faster {name}", x=factors, y=[o.synchronous_s() / o.pipelined_s() for o in others]))
    by_hardware = Panel(
        title="Figure 7: RETRO over PipeRAG",
        xlabel="times as fast",
        ylabel="ratio of times",
        lines=gains,
        also=_doubling,
    )
    rows = _stale_rows()
    stale = Panel(
        title="Table 2: Wikipedia",
        xlabel="tokens stale",
        ylabel="cosine",
        lines=[
            Line(
                label="published", x=numbers(PAPER, "staleness"), y=numbers(PAPER, "cosine"), published=True, marker="s"
            ),
            Line(label="ours", x=[row["staleness"] for row in rows], y=[row["cosine"] for row in rows]),
        ],
        options={"ylim": (0, 1)},
        also=_doubling,
    )
    return [draw(folder / "piperag-times.svg", [by_interval, by_hardware, stale])]
