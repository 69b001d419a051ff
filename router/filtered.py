"""Requests with a filter: answered one after the other, on the host, by the thread that has the engine's turn."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from hybridindex.index.filters.row_filter import AddedFilter, RowFilter, RowFilters
from hybridindex.router.batch.batch import Request
from hybridindex.router.batch.deadline import PaceEstimator, nprobe_for_deadline
from hybridindex.router.batch.merge import finish_topk, merge_added
from hybridindex.router.batch.parts import RouterParts
from hybridindex.router.batch.stages import COARSE, BatchClock
from hybridindex.tiers.host.added_scanner import AddedScanner
from hybridindex.tiers.host.filtered_scanner import ChosenLists, FilteredScanner
from hybridindex.types import F32, I64, SearchResult

__all__ = ["FilteredSearches"]


#: Queries times lists that may be ranked at a time.
_MOST_CELLS = 1 << 22


class _Part(NamedTuple):
    """The answer of some queries."""

    chosen: ChosenLists
    distances: F32
    ids: I64


def _stacked(parts: list[I64]) -> I64:
    """Rows of all parts, each as wide as the widest."""
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=-1) for part in parts])


class FilteredSearches:
    """One call at a time."""

    def __init__(self, parts: RouterParts, filters: RowFilters, added: AddedScanner) -> None:
        self._index = parts.index
        self._integrity = parts.index.integrity
        self._stats = parts.stats
        self._filters = filters
        self._added = added
        self._parts = parts
        #: Made for the first request.
        self._scanner: FilteredScanner | None = None
        #: What nearly all comparisons of so many rows end within.
        self._pace = PaceEstimator()

    def search(self, request: Request, clock: BatchClock) -> int:
        """Answers one request; returns how many rows were compared.

        Raises:
            DamagedListsError: it probes lists in quarantine.
        """
        scanner, n = self._opened(), len(request.queries)
        step = max(1, _MOST_CELLS // self._index.nlist)
        parts = [self._search(scanner, request, slice(at, at + step), clock) for at in range(0, n, step)]
        n_rows = int(sum(part.chosen.n_rows.sum() for part in parts))
        self._stats.add(
            requests=int(not request.again),
            queries=0 if request.again else n,
            batches=1,
            largest_batch=n,
            host_work_bytes=n_rows * scanner.row_bytes,
            filtered_requests=1,
            filtered_rows=n_rows,
        )
        if request.on_probes is not None:
            request.tell_probes(_stacked([part.chosen.of_each(len(part.ids))[0] for part in parts]))
        result = SearchResult(
            ids=np.concatenate([part.ids for part in parts]),
            distances=np.concatenate([part.distances for part in parts]),
            nprobe_used=np.concatenate([part.chosen.n_probes for part in parts]),
            # Of one that a batch could not answer, that of the batch.
            hit_rate=np.zeros(n, dtype=np.float32) if request.hit_rate is None else request.hit_rate,
        )
        request.reply.settle(result)
        request.reply.announce()
        return n_rows

    def _search(self, scanner: FilteredScanner, request: Request, rows: slice, clock: BatchClock) -> _Part:
        """Answers some of a request's queries."""
        integrity, queries = self._integrity, request.queries[rows]
        while True:
            seen, damaged = integrity.seen, integrity.quarantined
            chosen, wanted, added = self._choose(scanner, request, queries, clock)
            if damaged is not None:
                found = np.unique(chosen.probes[(chosen.probes >= 0) & damaged[chosen.probes]])
                if len(found):
                    raise integrity.error(found.tolist())
            started = time.perf_counter()
            distances, ids = scanner.compare(queries, wanted, chosen, request.params.k)
            came = None
            if added is not None:
                probes = chosen.of_each(len(queries))[0]
                came = self._added.scan(added.rows, queries, probes, request.params.k, filter_ids=added.ids)
            if integrity.marks[0] == seen:
                break
            integrity.catch_up()
        keep_max = self._index.rows.metric == "ip"
        finish_topk(distances, ids, keep_max=keep_max)
        if came is not None:
            merge_added(distances, ids, came, keep_max=keep_max)
        clock.note_rerank(started)
        self._pace.observe(int(chosen.n_rows.sum()), time.perf_counter() - started)
        return _Part(chosen, distances, ids)

    def _opened(self) -> FilteredScanner:
        if self._scanner is None:
            self._scanner = FilteredScanner(self._index, self._parts.host)
        return self._scanner

    def _choose(
        self, scanner: FilteredScanner, request: Request, queries: F32, clock: BatchClock
    ) -> tuple[ChosenLists, RowFilter, AddedFilter | None]:
        started = time.perf_counter()
        every = self._filters.make(None, None) if request.filter is None else self._filters.renewed(request.filter)
        live = self._index.rows.live.current()
        wanted = self._filters.without(every, None if live is None else live.deleted)
        added, counts, sizes = None, wanted.counts, self._index.list_sizes
        if live is not None and live.added is not None:
            added = self._filters.of_added(every, live.added)
            counts, sizes = counts + added.counts, sizes + live.added.sizes
        hurried = request.deadline_s is not None
        chosen = scanner.choose(queries, counts, sizes, request.nprobe, request.params.k, ranked=hurried)
        if hurried:
            chosen = self._limited(chosen, counts, request)
        clock.note(COARSE, started)
        return chosen, wanted, added

    def _limited(self, chosen: ChosenLists, counts: I64, request: Request) -> ChosenLists:
        """As many of the chosen lists as fit the deadline, ``min_nprobe`` at least."""
        assert request.deadline_s is not None
        width = chosen.probes.shape[1]
        if width <= request.params.min_nprobe:
            return chosen
        rows: I64 = np.where(chosen.probes >= 0, counts[chosen.probes], 0)
        left_s = request.deadline_s - time.monotonic()
        fit = nprobe_for_deadline(rows, 0, left_s, self._pace, request.params.min_nprobe, width)
        if fit == width:
            return chosen
        self._stats.add(nprobe_lowered=1)
        n_probes = np.minimum(chosen.n_probes, fit).astype(np.int32)
        return ChosenLists(chosen.probes[:, :fit], chosen.coarse[:, :fit], n_probes, rows[:, :fit].sum(axis=1))
