"""Deadline nprobe: how many retrievals end inside their window, and how far nprobe is from the largest that would.

- **beside_llm**: answers whose searches have PipeRAG's deadlines take turns with answers whose searches take a fixed
  nprobe, one of a ladder. From the latter comes what an oracle knows: a line from nprobe to seconds beside the running
  LLM, and the 95th percentile of what searches took over it. Given how long a chunk really took, its choice is the
  largest nprobe whose 95th percentile fits.
- **stated**: windows of several lengths and no LLM; the percentile is taken at each nprobe by itself.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.rag.periodic import in_time
from hybridindex.rag.chunk_time import ChunkTimeModel
from hybridindex.rag.generator import OpenAIGenerator
from hybridindex.rag.periodic import PeriodicAnswer, PeriodicRetrieval
from hybridindex.rag.retriever import RetrievalSession, Retriever
from hybridindex.rag.steps import Steps
from hybridindex.types import SearchResult

__all__ = ["Ladder", "beside_llm", "stated"]

Rows = dict[str, Any]


@dataclass(slots=True)
class Ladder:
    """A source, and its sessions, that takes the next of ``nprobes`` wherever there is a deadline."""

    source: Any
    nprobes: itertools.cycle[int]

    def session(self, **options: Any) -> RetrievalSession:
        return Ladder(self.source.session(**options), self.nprobes)

    def lookahead(self, drafts: Any, /, *, nprobe: int | None = None, window_ms: float | None = None) -> object:
        return self.source.lookahead(drafts, nprobe=nprobe, window_ms=window_ms)

    def search(
        self, queries: Any, /, k: int = 10, nprobe: int | None = None, *, deadline_ms: float | None = None,
        min_nprobe: int = 1,
    ) -> SearchResult:  # fmt: skip
        wanted = nprobe if deadline_ms is None else next(self.nprobes)
        found: SearchResult = self.source.search(queries, k, wanted)
        return found

    def close(self) -> None:
        self.source.close()


def beside_llm(
    ours: Retriever, ladder: Retriever, generator: OpenAIGenerator, plan: PeriodicRetrieval, asked: Sequence[str],
    progress: Callable[[str], object],
) -> Rows:  # fmt: skip
    """``ours`` and ``ladder`` have routers of their own: neither learns from the other's searches."""
    answers: dict[str, list[PeriodicAnswer]] = {"ours": [], "ladder": []}
    sides = {"ours": (ours, ChunkTimeModel()), "ladder": (ladder, ChunkTimeModel())}
    for number, question in enumerate(asked):
        for name in sorted(sides, reverse=number % 2 == 0):
            retriever, model = sides[name]
            with Steps(question, retriever, generator) as steps:
                answers[name].append(plan.run(steps, model))
            progress(f"{name}: {answers[name][-1].answer.seconds:.1f} s")
    found, free = in_time(answers["ours"]), in_time(answers["ladder"])
    nprobes, seconds = np.array(free["nprobe_used"], float), np.array(free["retrieval_s"])
    slope, start = np.polyfit(nprobes, seconds, 1)
    beyond = float(np.quantile(seconds / (start + slope * nprobes), 0.95))
    windows = np.array(found["generation_s"])
    most = int(ours.nprobe or 1)
    best = np.clip((windows / beyond - start) / slope, plan.min_nprobe, most)
    used = np.array(found["nprobe_used"], float)
    return {
        **found,
        "ladder": {"nprobe": free["nprobe_used"], "retrieval_s": free["retrieval_s"], "slope_s": float(slope),
                   "start_s": float(start), "p95_over_line": beyond},
        "largest_nprobe": most,
        "oracle_nprobe": best.tolist(),
        "used_over_oracle": {"mean": float(used.mean() / best.mean()), "median": float(np.median(used / best)),
                             "p10": float(np.quantile(used / best, 0.1))},
    }  # fmt: skip


def stated(retriever: Retriever, queries: Sequence[str], nprobes: Sequence[int], fits: Sequence[float]) -> Rows:
    """``fits``: windows, as parts of the median time at the largest nprobe. Sides are interleaved."""
    session = retriever.open()
    vectors = [retriever.embed([query]) for query in queries]

    def timed(vector: Any, nprobe: int, deadline_ms: float | None = None) -> tuple[float, int]:
        started = time.perf_counter()
        found = session.search(vector, retriever.k, nprobe, deadline_ms=deadline_ms)
        return time.perf_counter() - started, int(found.nprobe_used[0])

    free: dict[int, list[float]] = {n: [] for n in nprobes}
    # The first half warms up.
    whole = float(np.median([timed(vector, nprobes[-1])[0] for vector in vectors[:40]][20:]))
    with_deadline: dict[float, list[tuple[float, int]]] = {fit: [] for fit in fits}
    rng = np.random.default_rng(4)
    for vector in vectors:
        for fit in rng.permutation(fits).tolist():
            with_deadline[fit].append(timed(vector, nprobes[-1], fit * whole * 1e3))
            n = int(rng.choice(nprobes))
            free[n].append(timed(vector, n)[0])
    session.close()
    p95 = {n: float(np.quantile(values, 0.95)) for n, values in free.items() if len(values) > 10}
    rows = []
    for fit, values in with_deadline.items():
        best = max((n for n, seconds in p95.items() if seconds <= fit * whole), default=0)
        used = float(np.mean([n for _, n in values]))
        rows.append(
            {
                "window_ms": fit * whole * 1e3, "part": fit, "searches": len(values),
                "in_time": float(np.mean([s <= fit * whole for s, _ in values])),
                "nprobe_used": used, "largest_fitting_p95": best, "over_largest": used / best if best else None,
            }
        )  # fmt: skip
    return {"whole_ms": whole * 1e3, "p95_ms": {n: s * 1e3 for n, s in p95.items()}, "rows": rows}
