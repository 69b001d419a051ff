"""A batch in flight: its requests, their running top-k, and which parts have not reported.

Parts of the batch finish on different threads. A request is answered as soon as the last part of its last query is
merged; it does not wait for the batch. :mod:`hybridindex.router.engine` scans.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hybridindex.errors import IncompleteAnswerError
from hybridindex.index.filters.row_masks import RowMasks
from hybridindex.index.integrity import Integrity
from hybridindex.index.live.added import AddedLists
from hybridindex.index.live.state import LiveRows
from hybridindex.router.batch.added_there import AddedThere
from hybridindex.router.batch.comparison import Comparison, split_positions
from hybridindex.router.batch.merge import empty_topk, finish_topk, merge_added, merge_topk
from hybridindex.router.batch.request import Request
from hybridindex.router.batch.split import ProbePart, ProbeSplit
from hybridindex.router.batch.stages import BatchClock
from hybridindex.tiers.host.reranker import Reranker
from hybridindex.types import F32, F64, I32, I64, SearchResult

__all__ = ["Batch", "RowsAt", "given_probes"]

_log = logging.getLogger(__name__)

#: Of the work of a query, where it is not counted in bytes.
_PARTS = 1 << 20


class RowsAt(NamedTuple):
    """Where devices hold rows of candidates."""

    #: (nlist,) int16 the device of each list's rows, -1: none.
    device: npt.NDArray[np.int16]
    #: Hands a device its part of a comparison: positions (n, r). False where it takes none any more. What it takes ends
    #: with :meth:`Batch.end_scan`, as a scan does.
    put: Callable[[int, Batch, Comparison, I64], bool]


class CompareElsewhere(Protocol):
    """As :meth:`hybridindex.router.remote.remote_lists.RemoteLists.compare`."""

    def __call__(
        self, batch: Batch, comparison: Comparison, rows: I64, positions: I64, until_s: float | None = None, /
    ) -> I64: ...


class Batch:
    """Requests taken together. :meth:`begin` once, then :meth:`complete` and :meth:`end_scan` from any thread."""

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        keep_max: bool,
        integrity: Integrity,
        larger_is_nearer: bool | None = None,
        on_short: Callable[[Request], None] | None = None,
        reranker: Reranker | None = None,
    ) -> None:
        """To be made before it is asked which lists are in quarantine.

        Args:
            keep_max: whether larger distances are nearer, of what scans answer.
            larger_is_nearer: the same of the answer's; None: as of scans.
            on_short: told a request that has too few rows that were not deleted, and no answer; None: no request leaves
                out any.
            reranker: where scans answer (estimates, positions) of candidates, whose distances are still to be computed;
                ``keep_max`` is then of the estimates.
        """
        self.clock = BatchClock()
        self._marks, self._seen = integrity.marks, integrity.seen
        #: Bytes turned out to be damaged while they were scanned: nothing more is answered, and the rest has to be
        #: searched again.
        self.stale = False
        self._when_stale: list[Callable[[], None]] = []
        self.requests = requests
        self.keep_max = keep_max
        self._larger_is_nearer = keep_max if larger_is_nearer is None else larger_is_nearer
        known = [request.live for request in requests if request.live is not None]
        #: What was deleted and added, for all requests: no one gets less than it was made with. None: nothing.
        self.live = max(known, key=lambda live: live.number) if known else None
        #: Of the rows that were added, the nearest of each query so far; None: there are none in the probed lists.
        self._added: tuple[F32, I64] | None = None
        #: What devices scan of these rows; None: nothing. Released at the end.
        self.added_there: AddedThere | None = None
        alone = len(requests) == 1
        self.queries: F32 = requests[0].queries if alone else np.concatenate([r.queries for r in requests])
        #: Rows that scans keep of each query.
        self.k = max(r.kept for r in requests)
        self.nprobe = max(r.nprobe for r in requests)
        self._starts = [0, *accumulate(len(r.queries) for r in requests)]
        #: (n,) request of each row; None in a batch of one request.
        self._request_of = None if alone else np.repeat(np.arange(len(requests)), np.diff(self._starts))
        self._lock = threading.Lock()
        self._found: tuple[F32, I64] | None = None
        self._reranker = reranker
        self._on_short = on_short
        #: Candidates that were reranked.
        self.candidates = 0
        #: Which rows each query may be answered with; None: all.
        self.masks: RowMasks | None = None
        #: Rows that are compared for filters.
        self.filtered_rows = 0
        #: (n,) int64 bytes that each query's scans read, and of these what nobody could scan; None: all is scanned.
        self._work: I64 | None = None
        self._lost: I64 | None = None
        #: Where devices hold rows of candidates; None: nowhere. Set before :meth:`begin`.
        self.rows_at: RowsAt | None = None
        self._compare_elsewhere: CompareElsewhere | None = None
        #: Candidates that devices compared, and parts of comparisons that the host took over from them.
        self.device_candidates = self.rerank_fallbacks = 0
        #: Per request: (query, scan) pairs that still have to report.
        self._open_parts: list[int] = []
        self._failed = False
        #: What it failed with.
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def by_rows(self) -> bool:
        """Whether scans answer rows with their distances, and not candidates."""
        return self._reranker is None

    @property
    def asks_others(self) -> bool:
        """Whether other nodes may scan or compare a part of it, or nobody does."""
        return self._lost is not None

    @property
    def added_lists(self) -> AddedLists | None:
        """Rows that came since the lists were written."""
        return None if self.live is None else self.live.added

    def begin_as(self, whole: Batch) -> None:
        """This is a part of a batch that was begun before, and of which the lists in quarantine are known."""
        self.clock, self._seen = whole.clock, whole._seen

    def begin_masked(
        self, masks: RowMasks, live: LiveRows | None, clock: BatchClock, *, seen: int, n_rows: int
    ) -> None:
        """Its rows were chosen before, among those of some filters.

        Args:
            masks: which rows each query may be answered with, deleted ones left out.
            live: what was added; None: nothing.
            clock: of the choice.
            seen: changes of the quarantine that the choice knew of.
            n_rows: that are compared.
        """
        self.mask(masks, n_rows)
        self.live, self.clock, self._seen = live, clock, seen

    def mask(self, masks: RowMasks, n_rows: int) -> None:
        """Queries are answered with rows that these leave, of which ``n_rows`` are compared. Before :meth:`begin`."""
        self.masks, self.filtered_rows = masks, n_rows

    def compare_beside(self, compare: CompareElsewhere) -> None:
        """``compare`` has other nodes compare candidates whose rows are not here. Before :meth:`begin`."""
        if self._lost is None:
            self.expect(np.full(len(self), _PARTS, dtype=np.int64))
        self._compare_elsewhere = compare

    def expect(self, work: I64) -> None:
        """Other nodes do a part of it; ``work`` (n,) int64: bytes of all. Before :meth:`begin`."""
        self._work, self._lost = work, np.zeros(len(self), dtype=np.int64)

    def search_again(self) -> None:
        """What is not answered yet will be searched again: its lists have moved meanwhile."""
        with self._lock:
            self._set_stale()

    def when_stale(self, call: Callable[[], None]) -> None:
        """``call``: made at once or later, once, if what is not answered will be searched again; must not block."""
        with self._lock:
            self._when_stale.append(call)
            if self.stale:
                call()

    def lose(self, rows: I32 | I64, nbytes: I64) -> None:
        """Nobody reads so many bytes (m,) for ``rows`` (m,). Before they are completed."""
        with self._lock:
            assert self._lost is not None, "nothing was expected of other nodes"
            self._lost[rows] += nbytes

    def lose_candidates(self, rows: I64, share: F64) -> None:
        """Nobody compares such a share (m,) of the candidates of ``rows`` (m,). Before they are completed."""
        with self._lock:
            assert self._work is not None, "nothing was expected of other nodes"
            assert self._lost is not None
            # However few; and all together no more than all.
            lost = self._lost[rows] + np.ceil(share * self._work[rows]).astype(np.int64)
            self._lost[rows] = np.minimum(lost, self._work[rows])

    def rows_of(self, request: int) -> slice:
        """Batch rows of one request."""
        return slice(self._starts[request], self._starts[request + 1])

    def begin(self, split: ProbeSplit, on_finished: Callable[[Batch], None]) -> None:
        """Says what the batch waits for: one scan per part of ``split``, each of which ends with :meth:`end_scan`; and
        where there are :attr:`added_lists`, one more of these that calls :meth:`complete_added` before.

        ``on_finished`` is called once when all scans ended: from then on nobody reads leased pages for this batch.
        """
        with_added = self.added_lists is not None
        #: Who scans what, for those who are told about the batch.
        self.parts = split.parts
        self._nprobe_used = split.n_probes
        self._hit_rate = split.hit_rate
        self._n_scans = len(split.parts) + with_added
        self._on_finished = on_finished
        self._alone = len(split.parts) == 1 and not with_added
        if self._request_of is None:
            self._open_parts = [sum(len(part.rows) for part in split.parts)]
        else:
            self._open_parts = np.add.reduceat(split.n_parts, self._starts[:-1]).tolist()
        if with_added:
            self._open_parts = [n + len(r.queries) for n, r in zip(self._open_parts, self.requests, strict=True)]
        if 0 in self._open_parts:
            self._answer([i for i, open_parts in enumerate(self._open_parts) if open_parts == 0])
        if not self._n_scans:
            on_finished(self)

    def complete(self, rows: I32, distances: F32, ids: I64) -> None:
        """Merges the answer of one scan for ``rows`` (m,), each once per scan, and answers what is complete."""
        with self._lock:
            if self._failed or self._is_stale():
                return
            started = time.perf_counter()
            best_distances, best_ids = self._best()
            merge_topk(best_distances, best_ids, rows, distances, ids, keep_max=self.keep_max)
            self.clock.note_merge(started)
            answered = self._count_down(rows)
        self._answer(answered)

    def complete_added(self, found: tuple[F32, I64] | None) -> None:
        """The answer of the scan of added rows, for all queries; None: it found none. Answers what is complete."""
        with self._lock:
            if self._failed or self._is_stale():
                return
            if found is not None:
                self._take_added(np.arange(len(self), dtype=np.int32), found)
            answered = self._count_down(np.arange(len(self), dtype=np.int32))
        self._answer(answered)

    def _take_added(self, rows: I32, found: tuple[F32, I64]) -> None:
        keep_max = self._larger_is_nearer
        if self._added is None:
            self._added = empty_topk(len(self), found[1].shape[1], keep_max=keep_max)
        merge_topk(*self._added, rows, *map(np.ascontiguousarray, found), keep_max=keep_max)

    @property
    def k_of_added(self) -> int:
        """Places of each query's answer among the rows that were added."""
        return max(request.params.k for request in self.requests)

    def complete_part(self, part: ProbePart, distances: F32, ids: I64, added: tuple[F32, I64] | None = None) -> None:
        """:meth:`complete` for all rows of one part; keeps the arrays where they are the whole answer.

        ``added``: what was found for them among the rows that were added.
        """
        if added is not None:
            with self._lock:
                self._take_added(part.rows, added)
        if not self._alone or len(part.rows) < len(self):
            self.complete(part.rows, distances, ids)
            return
        started = time.perf_counter()
        finish_topk(distances, ids, keep_max=self.keep_max)
        self.clock.note_merge(started)
        with self._lock:
            if self._failed or self._is_stale():
                return
            self._found = (distances, ids)
            self._open_parts = [0] * len(self.requests)
        self._answer(list(range(len(self.requests))))

    def _is_stale(self) -> bool:
        if self._marks[0] != self._seen:
            self._set_stale()
        return self.stale

    def _set_stale(self) -> None:
        if not self.stale:
            self.stale = True
            for call in self._when_stale:
                call()

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
        if self._reranker is None:
            self._settle(numbers, None)
        elif numbers:
            alone = self._compare_elsewhere is not None and any(
                self.requests[number].partial_from_s is not None for number in numbers
            )
            # Each may give up what other nodes compare, at a time of its own.
            for some in [[number] for number in numbers] if alone else [numbers]:
                self._rerank(self._reranker, some)

    def _settle(self, numbers: list[int], exact: tuple[F32, I64] | None) -> None:
        """Gives the answers of requests; ``exact``: (m, k) distances and ids of their queries, one request after the
        other, of a search by codes."""
        n_exact, answered = 0, []
        for number in numbers:
            request, (distances, ids) = self.requests[number], exact or self._best()
            nprobe_used, hit_rate = self._nprobe_used, self._hit_rate
            rows = own = self.rows_of(number)
            if exact is not None:  # whether or not it is answered from these
                own = slice(n_exact, n_exact + len(request.queries))
                n_exact = own.stop
            coverage = None
            if self._lost is not None and self._lost[rows].any():
                try:
                    coverage = self._coverage(number)
                except IncompleteAnswerError as error:
                    request.reply.fail(error)
                    continue
            if self._request_of is not None:
                # Copies: views would keep the whole batch alive.
                k = request.places
                distances, ids = distances[own, :k].copy(), ids[own, :k].copy()
                nprobe_used, hit_rate = nprobe_used[rows].copy(), hit_rate[rows].copy()
            if self.live is not None:
                try:
                    left = self._brought_up(self.live, number, distances, ids)
                except BaseException as error:  # noqa: BLE001 - nobody else would tell who waits
                    request.reply.fail(error)
                    continue
                if left is None:
                    assert self._on_short is not None
                    request.hit_rate = hit_rate
                    self._on_short(request)
                    continue
                distances, ids = left
            answered.append(request)
            request.reply.settle(
                SearchResult(
                    ids=ids, distances=distances, nprobe_used=nprobe_used, hit_rate=hit_rate, coverage=coverage
                )
            )
        for request in answered:
            request.reply.announce()

    def _coverage(self, number: int) -> F32:
        """(n,) fraction of its work that was done for each query of a request.

        Raises:
            IncompleteAnswerError: it is less than the request allows.
        """
        assert self._work is not None
        assert self._lost is not None
        rows, allowed = self.rows_of(number), self.requests[number].params.allow_partial
        lost, work = self._lost[rows], np.maximum(self._work[rows], 1)
        coverage = (1.0 - lost / work).astype(np.float32)
        # Rounding must not say that nothing is missing.
        coverage[(lost > 0) & (coverage >= 1)] = np.nextafter(np.float32(1), np.float32(0))
        least = float(coverage.min())
        if allowed is None:
            raise IncompleteAnswerError(
                f"the nodes that answer scanned {least:.3f} of what a query needs; expected all of it, or "
                "allow_partial where an answer from a part of it is of use",
                coverage=least,
            )
        if least < allowed:
            raise IncompleteAnswerError(
                f"the nodes that answer scanned {least:.3f} of what a query needs; allow_partial is {allowed:g}",
                coverage=least,
            )
        return coverage

    def _brought_up(self, live: LiveRows, number: int, distances: F32, ids: I64) -> tuple[F32, I64] | None:
        """A request's answer, without the rows that were deleted, with those that were added; None: it is too short."""
        added, k = self._added, self.requests[number].params.k
        if live.deleted is not None:
            left = live.deleted.leave_out(distances, ids, k)
            if left is None:
                return None
            distances, ids = left
        if added is not None:
            rows = self.rows_of(number)
            merge_added(distances, ids, (added[0][rows], added[1][rows]), keep_max=self._larger_is_nearer)
        return distances[:, :k], ids[:, :k]

    def _rerank(self, reranker: Reranker, numbers: list[int]) -> None:
        """Computes the answers of requests from their candidates, all together, and gives them, maybe later from a
        device's thread. Never raises.

        Each request has as many candidates as if it were alone.
        """
        started, comparison = time.perf_counter(), None
        try:
            positions, queries = self._best()[1], self.queries
            rows: I64 = np.arange(len(self))
            if self._request_of is not None:
                for number in numbers:
                    positions[self.rows_of(number), self.requests[number].kept :] = -1
                rows = np.concatenate([np.arange(self._starts[i], self._starts[i + 1]) for i in numbers])
                positions, queries = positions[rows], queries[rows]
            k = max(request.places for request in self.requests)
            n_candidates = int(np.count_nonzero(positions >= 0))

            def done(comparison: Comparison) -> None:
                with self._lock:
                    self.device_candidates += comparison.n_on_devices
                    self.rerank_fallbacks += comparison.n_fallbacks
                self._reranked(numbers, comparison.found, n_candidates, started)

            if self.rows_at is not None or self._compare_elsewhere is not None:
                failed = partial(self._fail_all, numbers)
                comparison = Comparison(reranker, queries, k, self.clock, done, failed)
                self._compare(comparison, positions, rows, self.requests[numbers[0]].partial_from_s)
                return
            exact = reranker.rerank(queries, positions, k)
            self.clock.note_host_rerank(n_candidates, started)
        except BaseException as error:  # noqa: BLE001 - handed to those who wait
            if comparison is None:
                self._fail_all(numbers, error)
            else:  # parts of it may be under way
                comparison.fail(error)
        else:
            self._reranked(numbers, exact, n_candidates, started)

    def _fail_all(self, numbers: list[int], error: BaseException) -> None:
        _log.error("the exact distances of %d requests failed", len(numbers), exc_info=error)
        for number in numbers:
            self.requests[number].reply.fail(error)

    def _compare(self, comparison: Comparison, positions: I64, rows: I64, until_s: float | None) -> None:
        """Other nodes compare what is not here; where devices hold rows, they compare those of their own; the host the
        others, meanwhile. ``rows``: (n,) of the batch; ``until_s``: as of :class:`CompareElsewhere`."""
        rows_at = self.rows_at

        def put(device: int, own: I64) -> bool:
            assert rows_at is not None
            comparison.add()
            # Before the scan ends that found the candidates: the lease stays.
            self.add_scan()
            taken = rows_at.put(device, self, comparison, own)
            if not taken:
                comparison.drop()
                self.end_scan()
            return taken

        # Before the scan ends that found the candidates, as for devices.
        if self._compare_elsewhere is not None:
            positions = self._compare_elsewhere(self, comparison, rows, positions, until_s)
        if rows_at is not None:
            positions = split_positions(positions, rows_at.device, put)
        comparison.compare_here(positions)

    def _reranked(self, numbers: list[int], exact: tuple[F32, I64], n_candidates: int, started: float) -> None:
        """Gives the answers of requests, unless a list turned out to be damaged: then they are open again, or fail with
        the others, after whom nobody will search these again."""
        with self._lock:
            self.candidates += n_candidates
            self.clock.note_rerank(started)
            stale, failure = self._is_stale(), self._error
            if stale and failure is None:
                for number in numbers:
                    self._open_parts[number] = 1
                return
        if not stale:
            self._settle(numbers, exact)
            return
        for number in numbers:
            assert failure is not None
            self.requests[number].reply.fail(failure)

    def add_scan(self) -> None:
        """One more scan, to be ended with :meth:`end_scan`; while another has not ended."""
        with self._lock:
            self._n_scans += 1

    def end_scan(self) -> None:
        """One scan, successful or not, will not touch the batch any more."""
        with self._lock:
            self._n_scans -= 1
            finished = self._n_scans == 0
            if finished:
                self._when_stale = []
        if finished:
            self._on_finished(self)

    def fail(self, error: BaseException) -> None:
        """Gives ``error`` to every request that has no answer yet."""
        for request in self.take_open(error):
            request.reply.fail(error)

    def take_open(self, error: BaseException | None = None) -> list[Request]:
        """The requests that have no answer yet, which get none from this batch; the first time.

        ``error``: what becomes of those that are reranked just now and cannot be answered; None: nobody is.
        """
        with self._lock:
            if self._failed:
                return []
            self._failed, self._error = True, error
            # Before begin(), nobody has an answer.
            return [r for i, r in enumerate(self.requests) if not self._open_parts or self._open_parts[i]]


def given_probes(batch: Batch) -> tuple[I64, F32]:
    """(n, p) lists and coarse distances of a batch whose requests all say theirs."""
    n = len(batch)
    probes, coarse = np.full((n, batch.nprobe), -1, dtype=np.int64), np.zeros((n, batch.nprobe), dtype=np.float32)
    for number, request in enumerate(batch.requests):
        assert request.given is not None
        rows, width = batch.rows_of(number), request.given.probes.shape[1]
        probes[rows, :width], coarse[rows, :width] = request.given.probes, request.given.coarse_distances
    return probes, coarse
