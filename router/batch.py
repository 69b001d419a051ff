"""A batch in flight: requests side by side, their running top-k, and who is still waited for.

Parts of the batch finish on different threads. A request is answered the moment the last part of its last query is
merged; nobody waits for the batch. Scanning and threads are :mod:`hybridindex.router.engine`'s business.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from hybridindex.router.merge import empty_topk, finish_topk, merge_topk
from hybridindex.router.split import ProbePart, ProbeSplit
from hybridindex.types import F32, I32, I64, SearchResult

__all__ = ["Batch", "Request", "fail_request"]

_log = logging.getLogger(__name__)


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
    """Requests taken together. :meth:`begin` once, then :meth:`complete` and :meth:`end_scan` from any thread."""

    def __init__(self, requests: Sequence[Request], *, keep_max: bool) -> None:
        self.requests = requests
        self.keep_max = keep_max
        alone = len(requests) == 1
        self.queries: F32 = requests[0].queries if alone else np.concatenate([r.queries for r in requests])
        self.k = max(r.k for r in requests)
        self.nprobe = max(r.nprobe for r in requests)
        self._starts = [0, *accumulate(len(r.queries) for r in requests)]
        #: (n,) request of each row; None in a batch of one request.
        self._request_of = None if alone else np.repeat(np.arange(len(requests)), np.diff(self._starts))
        self._lock = threading.Lock()
        self._found: tuple[F32, I64] | None = None
        #: Per request: (query, scan) pairs that still have to report.
        self._open_parts: list[int] = []
        self._failed = False

    def __len__(self) -> int:
        return len(self.queries)

    def rows_of(self, request: int) -> slice:
        """Batch rows of one request."""
        return slice(self._starts[request], self._starts[request + 1])

    def begin(self, split: ProbeSplit, on_finished: Callable[[], None]) -> None:
        """Says what the batch waits for: one scan per part of ``split``, each of which ends with :meth:`end_scan`.

        ``on_finished`` is called once when all scans ended: from then on nobody reads leased pages for this batch.
        """
        self._nprobe_used = split.n_probes
        self._hit_rate = split.hit_rate
        self._n_scans = len(split.parts)
        self._on_finished = on_finished
        self._alone = len(split.parts) == 1
        self._open_parts = [int(split.n_parts[self.rows_of(i)].sum()) for i in range(len(self.requests))]
        self._answer([i for i, open_parts in enumerate(self._open_parts) if open_parts == 0])
        if not split.parts:
            on_finished()

    def complete(self, rows: I32, distances: F32, ids: I64) -> None:
        """Merges the answer of one scan for ``rows`` (m,), each once per scan, and answers what is complete."""
        with self._lock:
            if self._failed:
                return
            best_distances, best_ids = self._best()
            merge_topk(best_distances, best_ids, rows, distances, ids, keep_max=self.keep_max)
            answered = self._count_down(rows)
        self._answer(answered)

    def complete_part(self, part: ProbePart, distances: F32, ids: I64) -> None:
        """:meth:`complete` for all rows of one part; keeps the arrays where they are the whole answer."""
        if not self._alone or len(part.rows) < len(self):
            self.complete(part.rows, distances, ids)
            return
        finish_topk(distances, ids, keep_max=self.keep_max)
        with self._lock:
            if self._failed:
                return
            self._found = (distances, ids)
            self._open_parts = [0] * len(self.requests)
        self._answer(list(range(len(self.requests))))

    def _best(self) -> tuple[F32, I64]:
        """The running (n, k) distances and ids."""
        if self._found is None:
            self._found = empty_topk(len(self.queries), self.k, keep_max=self.keep_max)
        return self._found

    def _count_down(self, rows: I32) -> list[int]:
        counts = [len(rows)] if self._request_of is None else np.bincount(self._request_of[rows]).tolist()
        answered = []
        for number, count in enumerate(counts):
            if count:
                self._open_parts[number] -= count
                assert self._open_parts[number] >= 0, "a query was completed twice"
                if self._open_parts[number] == 0:
                    answered.append(number)
        return answered

    def _answer(self, numbers: list[int]) -> None:
        for number in numbers:
            request, rows = self.requests[number], self.rows_of(number)
            all_distances, all_ids = self._best()
            distances, ids = all_distances[rows, : request.k], all_ids[rows, : request.k]
            if self._request_of is not None:  # a view would keep the whole batch alive
                distances, ids = distances.copy(), ids.copy()
            result = SearchResult(
                ids=ids, distances=distances, nprobe_used=self._nprobe_used[rows], hit_rate=self._hit_rate[rows]
            )
            _settle(request.future, result=result)

    def end_scan(self) -> None:
        """One scan, successful or not, will not touch the batch any more."""
        with self._lock:
            self._n_scans -= 1
            finished = self._n_scans == 0
        if finished:
            self._on_finished()

    def fail(self, error: BaseException) -> None:
        """Gives ``error`` to every request that has no answer yet."""
        with self._lock:
            if self._failed:
                return
            self._failed = True
            # Before begin(), nobody has an answer.
            waiting = [r for i, r in enumerate(self.requests) if not self._open_parts or self._open_parts[i]]
        for request in waiting:
            _settle(request.future, error=error)


def _settle(
    future: Future[SearchResult], *, result: SearchResult | None = None, error: BaseException | None = None
) -> None:
    """Completes a future unless it was cancelled. What its callbacks raise is theirs: it must not stop the engine."""
    try:
        if not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        else:
            assert result is not None
            future.set_result(result)
    except BaseException:  # noqa: BLE001 - even SystemExit from a callback
        _log.exception("a callback of a search future raised")


def fail_request(request: Request, error: BaseException) -> None:
    """Gives ``error`` to one request that never reached a batch."""
    _settle(request.future, error=error)
