"""Recall and NDCG against nprobe, and the smallest nprobe that reaches a target.

The reference is the same index searched at nprobe = nlist, so loss by the codec does not count. A vector is found at an
nprobe exactly when its list is probed, so one exhaustive search gives the figures of every nprobe. For fast-scan codecs
of residuals, whose distances change by up to 2 % with the probed set, they are close approximations.

Searches by codes may miss a row that they probe, so they are carried out, at each nprobe, and compared with the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.errors import ProfileError
from hybridindex.index.ivf import IVFIndex
from hybridindex.profiler.searching import Searching
from hybridindex.tiers.host.host_scanner import HostScanner
from hybridindex.types import F32, F64, I64, RecallPoint

__all__ = ["Reference", "recall_at", "recall_by_codes", "recall_grid", "recommend_nprobe", "search_exhaustively"]

#: Queries to choose nprobe by: fewer leave the second digit open, more than ``MAX_QUERIES`` add little.
MIN_QUERIES = 32
MAX_QUERIES = 512
_CHUNK_BYTES = 64 << 20
_CHUNK_IDS = 1 << 20
#: Queries of one search by codes.
_SEARCHED = 64
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """Answers at nprobe = nlist, and where their vectors lie."""

    #: (n, scan_dim) float32, transformed.
    queries: F32
    k: int
    #: (n, k) int64; -1: nothing.
    ids: I64
    #: (n, k) bool: places that hold a result.
    filled: _Flags
    #: (m,) int64 each: query ``rows[i]``'s result at place ``places[i]`` lies in list ``lists[i]``.
    rows: I64
    places: I64
    lists: I64


def search_exhaustively(
    index: IVFIndex,
    scanner: HostScanner,
    queries: F32,
    k: int,
    *,
    max_seconds: float,
    min_queries: int = MIN_QUERIES,
    tick: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Reference:
    """Searches all lists for the first of ``queries`` (n, scan_dim).

    ``MAX_QUERIES`` of them, or as many as ``max_seconds`` allows, ``min_queries`` at least. ``tick`` is told queries.
    """
    started = clock()
    total = min(len(queries), MAX_QUERIES)
    # 12 bytes a probe: its list and its coarse distance.
    chunk = max(1, min(16, _CHUNK_BYTES // (12 * index.nlist)))
    parts: list[I64] = []
    done = 0
    while done < total and (done < min_queries or clock() - started < max_seconds):
        x = queries[done : min(done + chunk, total)]
        parts.append(scanner.scan(x, *index.quantize(x, index.nlist), k)[1])
        done += len(x)
        if tick is not None:
            tick(done, total)
    ids = np.concatenate(parts)
    rows, places, lists = _locate(index, ids)
    return Reference(queries=queries[:done], k=k, ids=ids, filled=ids >= 0, rows=rows, places=places, lists=lists)


def _locate(index: IVFIndex, ids: I64) -> tuple[I64, I64, I64]:
    """Lists that hold each id of (n, k): rows, places, lists. An id that was imported twice has two entries."""
    rows, places = np.nonzero(ids >= 0)
    wanted = ids[rows, places]
    known = np.unique(wanted)
    found_ids: list[I64] = [np.empty(0, np.int64)]
    found_lists: list[I64] = [np.empty(0, np.int64)]
    ends = np.cumsum(index.list_sizes)
    start = 0
    while start < index.nlist and len(known):
        base = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, base + _CHUNK_IDS)))
        stop = min(stop, index.nlist)
        held = np.concatenate([index.list_ids(i) for i in range(start, stop)])
        owner = np.repeat(np.arange(start, stop), index.list_sizes[start:stop])
        at = np.minimum(np.searchsorted(known, held), len(known) - 1)
        match = known[at] == held
        found_ids.append(held[match])
        found_lists.append(owner[match])
        start = stop
    all_ids, all_lists = np.concatenate(found_ids), np.concatenate(found_lists)
    by_id = np.argsort(all_ids, kind="stable")
    all_ids, all_lists = all_ids[by_id], all_lists[by_id]
    first, last = np.searchsorted(all_ids, wanted, "left"), np.searchsorted(all_ids, wanted, "right")
    copies = last - first
    entry = np.repeat(np.arange(len(wanted)), copies)
    within = np.arange(len(entry)) - np.repeat(np.cumsum(copies) - copies, copies)
    return rows[entry], places[entry], all_lists[np.repeat(first, copies) + within]


def recall_at(index: IVFIndex, reference: Reference, nprobe: int) -> RecallPoint:
    """Quality at one nprobe: mean recall@k, and mean NDCG@k with gains k, k-1, .. 1 in the reference's order."""
    found = np.zeros(reference.filled.shape, dtype=bool)
    chunk = max(1, _CHUNK_BYTES // index.nlist)
    for start in range(0, len(reference.queries), chunk):
        x = reference.queries[start : start + chunk]
        probes, _ = index.quantize(x, nprobe)
        probed = np.zeros((len(x), index.nlist + 1), dtype=bool)
        # -1 (nothing found by a graph quantizer) lands in the last, unused column.
        np.put_along_axis(probed, probes, True, axis=1)
        mine = (reference.rows >= start) & (reference.rows < start + len(x))
        rows, places = reference.rows[mine], reference.places[mine]
        hit = probed[rows - start, reference.lists[mine]]
        found[rows[hit], places[hit]] = True
    return _point(reference, nprobe, found)


def recall_by_codes(searching: Searching, reference: Reference, nprobe: int) -> RecallPoint:
    """As :func:`recall_at`, of searches by codes: what their candidates miss counts, too."""
    found = np.zeros(reference.filled.shape, dtype=bool)
    for start in range(0, len(found), _SEARCHED):
        part = slice(start, start + _SEARCHED)
        answers = searching.search(np.ascontiguousarray(reference.queries[part]), reference.k, nprobe)
        for row, (wanted, got) in enumerate(zip(reference.ids[part], answers, strict=True), start):
            found[row] = np.isin(wanted, got)
    return _point(reference, nprobe, found & reference.filled)


def _point(reference: Reference, nprobe: int, found: _Flags) -> RecallPoint:
    """``found`` (n, k) bool: which results of the reference a search at ``nprobe`` finds."""
    filled = reference.filled
    wanted = filled.sum(axis=1)
    busy = wanted > 0
    recall = found[busy].sum(axis=1) / wanted[busy]
    gains = np.arange(reference.k, 0, -1, dtype=np.float64)
    ndcg = _dcg(found[busy], gains) / _dcg(filled[busy], gains)
    return RecallPoint(
        nprobe=nprobe,
        recall=float(recall.mean()) if len(recall) else 1.0,
        ndcg=float(ndcg.mean()) if len(ndcg) else 1.0,
        k=reference.k,
        n_queries=len(reference.queries),
    )


def _dcg(found: _Flags, gains: F64) -> F64:
    """What is found moves up in order; what takes the places behind it has no gain."""
    place = np.cumsum(found, axis=1)
    return np.asarray((found * gains / np.log2(np.maximum(place, 1) + 1.0)).sum(axis=1))


def recall_grid(nlist: int) -> list[int]:
    """1, 2, 4, .. nlist."""
    return [*(1 << i for i in range((nlist - 1).bit_length())), nlist]


def recommend_nprobe(
    points: Sequence[RecallPoint],
    target: float,
    measure: Callable[[int], RecallPoint],
    cure: str = "build the index anew with another nlist or codec",
) -> tuple[int, tuple[RecallPoint, ...]]:
    """The smallest nprobe with recall of at least ``target``, by bisection between measured points.

    Args:
        points: measured, any order.
        target: recall in (0, 1].
        measure: gives the point of any nprobe between those of ``points``.
        cure: what to do, beside asking for less, where no nprobe reaches it.

    Returns:
        The nprobe, and all points by nprobe, those measured on the way included.

    Raises:
        ProfileError: no point reaches the target; names the best.
    """
    known = {point.nprobe: point for point in points}
    reached = [p for p in known.values() if p.recall >= target]
    if not reached:
        best = max(known.values(), key=lambda p: p.recall)
        raise ProfileError(
            f"recall {target} is not reached: the best is {best.recall:.4f} at nprobe {best.nprobe}; ask for less, or "
            f"{cure}"
        )
    high = min(p.nprobe for p in reached)
    low = max((n for n in known if n < high), default=0)
    while high - low > 1:
        middle = (low + high) // 2
        known[middle] = measure(middle)
        if known[middle].recall >= target:
            high = middle
        else:
            low = middle
    return high, tuple(known[n] for n in sorted(known))
