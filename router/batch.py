"""A batch in flight: requests side by side, their running top-k, and who is still waited for.

Parts of the batch finish on different threads. A request is answered the moment the last part of its last query is
merged; nobody waits for the batch. Scanning and threads are :mod:`hybridindex.router.engine`'s business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from hybridindex.router.merge import empty_topk, merge_topk
from hybridindex.types import F32, I32, I64, SearchResult

__all__ = ["Batch", "Request"]


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One search call, checked and transformed, on its way through the engine."""

    #: (n, scan_dim) float32.
    queries: F32
    k: int
    nprobe: int
    #: Monotonic time by which the answer should be there, or None: nprobe is then never lowered.
    deadline_s: float | None = None
    #: Floor that a deadline may lower nprobe to.
    min_nprobe: int = 1
    #: When given, receives the (n, nprobe) lists that were probed, before the answer is set.
    on_probes: Callable[[I64], None] | None = None
    future: Future[SearchResult] = field(default_factory=Future)


class Batch:
    """Requests taken together. :meth:`begin` once, then :meth:`complete` from any thread."""

    def __init__(self, requests: Sequence[Request], *, keep_max: bool) -> None:
        self.requests = requests
        self.keep_max = keep_max
        sizes = [len(r.queries) for r in requests]
        self._starts = np.cumsum([0, *sizes])
        self.queries: F32 = requests[0].queries if len(requests) == 1 else np.concatenate([r.queries for r in requests])
        self.k = max(r.k for r in requests)
        self.nprobe = max(r.nprobe for r in requests)
        self._lock = threading.Lock()
        self._best_distances, self._best_ids = empty_topk(len(self.queries), self.k, keep_max=keep_max)
        self._request_of: I64 = np.repeat(np.arange(len(requests)), sizes)
        #: Queries per request that still wait for a part.
        self._open_queries = list(sizes)
        self._failed = False

    def __len__(self) -> int:
        return len(self.queries)

    def rows_of(self, request: int) -> slice:
        """Batch rows of one request."""
        return slice(int(self._starts[request]), int(self._starts[request + 1]))

    def begin(
        self, n_parts: I32, nprobe_used: I32, hit_rate: F32, n_scans: int, on_finished: Callable[[], None]
    ) -> None:
        """Says what the batch waits for.

        Args:
            n_parts: (n,) int32 scans that hold work of each query.
            nprobe_used: (n,) int32, goes into the results.
            hit_rate: (n,) float32, goes into the results.
            n_scans: scans that will report by :meth:`end_scan`.
            on_finished: called once when all scans ended: from then on nobody reads the leased pages for this batch.
        """
        self._n_parts = n_parts.copy()
        self._nprobe_used = nprobe_used
        self._hit_rate = hit_rate
        self._n_scans = n_scans
        self._on_finished = on_finished
        idle = np.flatnonzero(n_parts == 0)
        if len(idle):
            with self._lock:
                answered = self._close_rows(idle)
            self._answer(answered)
        if n_scans == 0:
            on_finished()

    def end_scan(self) -> None:
        """One scan, successful or not, will not touch the batch any more."""
        with self._lock:
            self._n_scans -= 1
            finished = self._n_scans == 0
        if finished:
            self._on_finished()

    def complete(self, rows: I32, distances: F32, ids: I64) -> None:
        """Merges one tier's answer for ``rows`` (m,) and answers the requests that became complete."""
        with self._lock:
            if self._failed:
                return
            merge_topk(self._best_distances, self._best_ids, rows, distances, ids, keep_max=self.keep_max)
            self._n_parts[rows] -= 1
            done = rows[self._n_parts[rows] == 0]
            answered = self._close_rows(done) if len(done) else []
        self._answer(answered)

    def _close_rows(self, rows: I32 | I64) -> list[int]:
        answered = []
        counts = np.bincount(self._request_of[rows], minlength=len(self.requests))
        for number in np.flatnonzero(counts):
            self._open_queries[number] -= int(counts[number])
            assert self._open_queries[number] >= 0, "a query was completed twice"
            if self._open_queries[number] == 0:
                answered.append(int(number))
        return answered

    def _answer(self, answered: list[int]) -> None:
        for number in answered:
            request, rows = self.requests[number], self.rows_of(number)
            alone = len(self.requests) == 1
            distances, ids = self._best_distances[rows, : request.k], self._best_ids[rows, : request.k]
            result = SearchResult(
                ids=ids if alone else ids.copy(),
                distances=distances if alone else distances.copy(),
                nprobe_used=self._nprobe_used[rows],
                hit_rate=self._hit_rate[rows],
            )
            if request.future.set_running_or_notify_cancel():
                request.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Gives ``error`` to every request that has no answer yet."""
        with self._lock:
            if self._failed:
                return
            self._failed = True
            open_requests = [i for i, left in enumerate(self._open_queries) if left]
        for number in open_requests:
            future = self.requests[number].future
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
