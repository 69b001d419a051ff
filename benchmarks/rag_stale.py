"""Stale query windows, and searches with deadlines, on documents of the corpus; no LLM is needed.

- **staleness**: what a window finds that ended s tokens ago, moved on by s, against what the newest one finds: cosine
  of the first passages' embeddings. PipeRAG's Table 2 has it with another embedder, other corpora, and without a shift.
- **deadlines**: for windows of several lengths, the share of searches that end in time, and the nprobe they took
  against the largest whose 95th percentile fits, from timed searches in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.rag_periodic import Reference
from hybridindex.rag.documents import DocumentStore, TokenStarts
from hybridindex.rag.retriever import Embedder, Retriever
from hybridindex.rag.shift import shift_passage, tail_of

__all__ = ["PIPERAG", "STALENESS", "deadlines", "similarities"]

STALENESS = (1, 2, 4, 8, 16, 32, 64)
#: PipeRAG's Table 2, Wikipedia.
PIPERAG = (0.9262, 0.9204, 0.9138, 0.9062, 0.8990, 0.8921, 0.8875)
_WINDOW = 64
#: Part of a window that is given as deadline: PeriodicRetrieval's.
_MARGIN = 0.9


def windows_of(text: str, starts: TokenStarts, stale: int, step: int = 64) -> list[tuple[str, str]]:
    """(newest, stale) windows at every ``step`` tokens of a text."""
    places = starts([text])[0].tolist()
    found = []
    for end in range(_WINDOW + STALENESS[-1], len(places), step):
        fresh = tail_of(text[: places[end]], places[:end], _WINDOW)
        old = tail_of(text[: places[end - stale]], places[: end - stale], _WINDOW)
        found.append((fresh.strip(), old.strip()))
    return found


def similarities(
    open_retriever: Callable[[frozenset[int]], Retriever], documents: DocumentStore, texts: Sequence[Reference],
    starts: TokenStarts, uncentred: Embedder,
) -> dict[str, Any]:  # fmt: skip
    """Mean cosines per staleness, with shift and without, and how often the same passage was found."""
    rows = []
    for stale, theirs in zip(STALENESS, PIPERAG, strict=True):
        plain, shifted, raw, same, empty = [], [], [], [], 0
        for reference in texts:
            retriever = open_retriever(reference.ids)
            session = retriever.open()
            for fresh, old in windows_of(reference.text, starts, stale):
                found = session.search(retriever.embed([fresh, old]), 1, retriever.nprobe)
                new, before = found.ids[:, 0].tolist()
                moved = shift_passage(documents, before, stale)
                texts_of = documents.read([new, before])
                shown = [texts_of[new].document.text, texts_of[before].document.text, moved or "."]
                vectors = retriever.embed(shown)
                plain.append(float(vectors[0] @ vectors[1]))
                raw_new, raw_old = uncentred.embed(shown[:2])
                raw.append(float(raw_new @ raw_old))
                empty += not moved
                if moved:
                    shifted.append(float(vectors[0] @ vectors[2]))
                same.append(new == before)
            session.close()
        rows.append(
            {
                "staleness": stale, "cosine": float(np.mean(plain)), "cosine_shifted": float(np.mean(shifted)),
                "cosine_uncentred": float(np.mean(raw)),
                "same_passage": float(np.mean(same)), "nothing_left": empty, "windows": len(plain), "piperag": theirs,
            }
        )  # fmt: skip
    return {"rows": rows}


def deadlines(
    retriever: Retriever, queries: Sequence[str], nprobes: Sequence[int], fits: Sequence[float]
) -> dict[str, Any]:
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
            with_deadline[fit].append(timed(vector, nprobes[-1], _MARGIN * fit * whole * 1e3))
            n = int(rng.choice(nprobes))
            free[n].append(timed(vector, n)[0])
    session.close()
    p95 = {n: float(np.quantile(values, 0.95)) for n, values in free.items() if len(values) > 10}
    rows = []
    for fit, values in with_deadline.items():
        best = max((n for n, seconds in p95.items() if seconds <= fit * whole), default=0)
        used = float(np.median([n for _, n in values]))
        rows.append(
            {
                "window_ms": fit * whole * 1e3, "part": fit,
                "in_time": float(np.mean([s <= fit * whole for s, _ in values])),
                "nprobe_used": used, "largest_fitting_p95": best, "over_largest": used / best if best else None,
            }
        )  # fmt: skip
    return {"whole_ms": whole * 1e3, "p95_ms": {n: s * 1e3 for n, s in p95.items()}, "rows": rows}
