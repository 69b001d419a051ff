"""Requests with a filter: answered one after the other, on the host, by the thread that has the engine's turn."""

from __future__ import annotations

import time

import numpy as np

from hybridindex.index.filters.row_filter import RowFilter, RowFilters
from hybridindex.router.batch.batch import Request
from hybridindex.router.batch.deadline import PaceEstimator, nprobe_for_deadline
from hybridindex.router.batch.merge import finish_topk
from hybridindex.router.batch.parts import RouterParts
from hybridindex.router.batch.stages import COARSE, BatchClock
from hybridindex.tiers.host.filtered_scanner import ChosenLists, FilteredScanner
from hybridindex.types import I64, SearchResult

__all__ = ["FilteredSearches"]


class FilteredSearches:
    """One call at a time."""

    def __init__(self, parts: RouterParts, filters: RowFilters) -> None:
        self._index = parts.index
        self._integrity = parts.index.integrity
        self._stats = parts.stats
        self._filters = filters
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
        scanner, integrity = self._opened(), self._integrity
        while True:
            seen, damaged = integrity.seen, integrity.quarantined
            chosen, wanted = self._choose(scanner, request, clock)
            if damaged is not None:
                found = np.unique(chosen.probes[(chosen.probes >= 0) & damaged[chosen.probes]])
                if len(found):
                    raise integrity.error(found.tolist())
            started = time.perf_counter()
            deleted = self._index.rows.deleted.current()
            alive = None if deleted is None else self._filters.alive(deleted)
            distances, ids = scanner.compare(request.queries, wanted, chosen, request.params.k, deleted, alive)
            if integrity.marks[0] == seen:
                break
            integrity.catch_up()
        finish_topk(distances, ids, keep_max=self._index.rows.metric == "ip")
        clock.note_rerank(started)
        n, n_rows = len(request.queries), int(chosen.n_rows.sum())
        self._pace.observe(n_rows, time.perf_counter() - started)
        self._stats.add(
            requests=int(not request.again),
            queries=0 if request.again else n,
            batches=1,
            largest_batch=n,
            host_work_bytes=n_rows * scanner.row_bytes,
            filtered_requests=1,
            filtered_rows=n_rows,
        )
        request.tell_probes(chosen.of_each(n)[0] if request.on_probes is not None else chosen.probes)
        hit_rate = np.zeros(n, dtype=np.float32)
        request.reply.settle(SearchResult(ids=ids, distances=distances, nprobe_used=chosen.n_probes, hit_rate=hit_rate))
        request.reply.announce()
        return n_rows

    def _opened(self) -> FilteredScanner:
        if self._scanner is None:
            self._scanner = FilteredScanner(self._index, self._parts.host)
        return self._scanner

    def _choose(self, scanner: FilteredScanner, request: Request, clock: BatchClock) -> tuple[ChosenLists, RowFilter]:
        assert request.filter is not None
        wanted = self._filters.renewed(request.filter)
        started = time.perf_counter()
        hurried = request.deadline_s is not None
        chosen = scanner.choose(request.queries, wanted, request.nprobe, request.params.k, ranked=hurried)
        if hurried:
            chosen = self._limited(chosen, wanted, request)
        clock.note(COARSE, started)
        return chosen, wanted

    def _limited(self, chosen: ChosenLists, wanted: RowFilter, request: Request) -> ChosenLists:
        """As many of the chosen lists as fit the deadline, ``min_nprobe`` at least."""
        assert request.deadline_s is not None
        width = chosen.probes.shape[1]
        if width <= request.params.min_nprobe:
            return chosen
        rows: I64 = np.where(chosen.probes >= 0, wanted.counts[chosen.probes], 0)
        left_s = request.deadline_s - time.monotonic()
        fit = nprobe_for_deadline(rows, 0, left_s, self._pace, request.params.min_nprobe, width)
        if fit == width:
            return chosen
        self._stats.add(nprobe_lowered=1)
        n_probes = np.minimum(chosen.n_probes, fit).astype(np.int32)
        return ChosenLists(chosen.probes[:, :fit], chosen.coarse[:, :fit], n_probes, rows[:, :fit].sum(axis=1))
