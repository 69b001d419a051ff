"""PipeRAG's Figures 4 to 8, 10 and Tables 1, 2: its model of generation time (C.2), and what was measured here.

Perplexities belong to RETRO checkpoints and three billion chunks that are not at hand: one line each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.claims import Claim
from benchmarks.papers.figures.draw import Line, Panel, draw
from benchmarks.papers.figures.published import beside, measured_here, missing, numbers

__all__ = ["MISSING", "Timing", "claims", "figures", "fitted"]

PAPER = "piperag"
TOKENS = 1024
_FITTED = "fitted on Table 1, Wikipedia: 9.35 s to generate, the rest of RETRO's in 16 searches, 0.99 s of attention"

MISSING = (
    missing("4", "perplexity by database size", "the RETRO checkpoint and its database are not at hand"),
    missing(
        "5",
        "perplexity by interval and nprobe",
        "the same; benchmarks.rag --only quality is ours, not run yet",
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


def claims() -> Iterator[Claim]:
    """Every number that the paper prints and we have."""
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
    run = measured_here("rag")["piperag"]["schedules"]
    yield Claim(
        figure="Table 1",
        what="pipelined over no retrieval",
        paper=numbers(PAPER, "model_s")[0] / numbers(PAPER, "none_s")[0],
        ours=run["pipelined"]["seconds"][0] / run["none"]["seconds"][0],
        inputs="measured here: Gemma 3 270M on a CPU, 160 tokens, one run",
        note="the first search of five chunks weighs three times as much as of sixteen",
    )
    yield beside(
        PAPER,
        "model_error",
        100.0 * _median(measured_here("rag")["piperag"]["chunk_time_error"]),
        inputs="measured here: predicted times of chunks",
        note="theirs of whole answers",
    )


def _median(found: object) -> float:
    """Of what the benchmark keeps: a number, its parts, or a summary with the median."""
    if isinstance(found, dict):
        return float(found["median"])
    if isinstance(found, list):
        return abs(float(sorted(found)[len(found) // 2]))
    return abs(float(str(found)))


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
        "is not at hand. Measured here at more lists for the synchronous one: 1.75",
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
    rows = measured_here("rag")["staleness"]["rows"]
    yield beside(
        PAPER,
        "cosine",
        tuple(row["cosine"] for row in rows),
        inputs="measured here: 230 windows, 105,786 passages, a static embedder",
        note=f"{' '.join(str(row['staleness']) for row in rows)} tokens stale; of three billion passages some are near",
    )


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
    rows = measured_here("rag")["staleness"]["rows"]
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
