"""Requests with a filter: which lists they probe, and their answers.

Requests with the same filter are answered together. Where a filter leaves enough rows, and devices hold lists that are
probed, these scan them, as a batch of :mod:`hybridindex.router.engine` that requests with different filters share. The
rest is compared on the host, by the thread that has the engine's turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hybridindex.errors import HybridIndexError
from hybridindex.index.filters.row_filter import AddedFilter, RowFilter, RowFilters
from hybridindex.index.filters.row_masks import RowMasks
from hybridindex.index.live.state import LiveRows
from hybridindex.router.batch.batch import Batch
from hybridindex.router.batch.deadline import PaceEstimator, nprobe_for_deadline
from hybridindex.router.batch.merge import empty_topk, finish_topk, merge_added
from hybridindex.router.batch.parts import RouterParts
from hybridindex.router.batch.replies import DividedReply
from hybridindex.router.batch.request import Request
from hybridindex.router.batch.split import ProbePart
from hybridindex.router.batch.stages import COARSE, BatchClock
from hybridindex.tiers.host.added_scanner import AddedScanner
from hybridindex.tiers.host.filtered_scanner import ChosenLists, FilteredScanner, Wish
from hybridindex.types import F32, I64, SearchResult

__all__ = ["FilteredSearches", "Group"]

_log = logging.getLogger(__name__)

#: Queries times lists of one request's piece, and of a batch, at most.
_MOST_CELLS = 1 << 22
#: Share of the rows from which on devices scan whole lists for a filter. They read so many times as many bytes as the
#: host compares, and no more times faster.
_LEAST_ON_DEVICES = 1 / 32


@dataclass(slots=True, kw_only=True)
class Group:
    """Requests that are answered together: with the same filter, as many lists and places."""

    requests: list[Request]
    #: (n, scan_dim) float32, of all of them.
    queries: F32
    #: What the filter leaves, without what was deleted.
    wanted: RowFilter
    #: And of the rows that were added; None: there are none.
    added: AddedFilter | None
    #: (nlist,) int64 rows of each list that may be answered; and all.
    counts: I64
    sizes: I64
    #: What had changed; None: nothing.
    live: LiveRows | None
    #: Changes of the quarantine that were known.
    seen: int
    chosen: ChosenLists

    @property
    def k(self) -> int:
        return self.requests[0].params.k

    def rows(self) -> Iterator[tuple[Request, slice]]:
        """Requests, and which of the queries are theirs."""
        start = 0
        for request in self.requests:
            yield request, slice(start, start + len(request.queries))
            start += len(request.queries)

    def leave_out(self, requests: Sequence[Request]) -> None:
        left = np.concatenate([np.full(len(r.queries), r not in requests) for r in self.requests])
        self.requests = [request for request in self.requests if request not in requests]
        self.queries, self.chosen = self.queries[left], self.chosen.take(left)


def _stacked(groups: Sequence[Group]) -> tuple[I64, F32]:
    """(n, w) lists and coarse distances of all groups, short rows end in -1."""
    parts = [group.chosen.of_each(len(group.queries)) for group in groups]
    width = max(probes.shape[1] for probes, _ in parts)
    pads = [((0, 0), (0, width - probes.shape[1])) for probes, _ in parts]
    probes = [np.pad(probes, pad, constant_values=-1) for (probes, _), pad in zip(parts, pads, strict=True)]
    coarse = [np.pad(coarse, pad) for (_, coarse), pad in zip(parts, pads, strict=True)]
    return np.concatenate(probes), np.concatenate(coarse)


def _packed(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """So many groups at a time as their lists may take together."""
    some, n, width = list[Group](), 0, 0
    for group in groups:
        more, w = len(group.queries), group.chosen.probes.shape[1]
        if some and (n + more) * max(width, w) > _MOST_CELLS:
            yield some
            some, n, width = [], 0, 0
        some, n, width = [*some, group], n + more, max(width, w)
    if some:
        yield some


def _masks_of(groups: Sequence[Group]) -> RowMasks:
    """The filters of all queries of some groups."""
    filters = list({id(group.wanted): group.wanted for group in groups}.values())
    numbers = {id(wanted): number for number, wanted in enumerate(filters)}
    of_group = [np.full(len(group.queries), numbers[id(group.wanted)], dtype=np.int32) for group in groups]
    return RowMasks(tuple(filters), np.concatenate(of_group))


class FilteredSearches:
    """One call at a time, but for :meth:`scan_part`."""

    def __init__(
        self, parts: RouterParts, filters: RowFilters, added: AddedScanner, *, one_of_several: bool = False
    ) -> None:
        """``one_of_several``: other nodes of a cluster may have lists that are not here."""
        self._one_of_several = one_of_several
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
        """Answers one request on the host; returns how many rows were compared."""
        return sum(self.answer(group, clock) for group in self.choose([request], clock))

    # Choosing

    def choose(
        self, requests: Sequence[Request], clock: BatchClock, list_device: npt.NDArray[np.int16] | None = None
    ) -> list[Group]:
        """Groups of requests, and the lists that they probe. Requests that fail, as they probe lists in quarantine, are
        in none, and told. Never raises.

        ``list_device``: who scans each list; None: the host does.
        """
        started = time.perf_counter()
        seen, damaged = self._integrity.seen, self._integrity.quarantined
        live = self._index.rows.live.current()
        groups: dict[object, Group] = {}
        for request in requests:
            try:
                pieces = [self._group_of(piece, live, seen) for piece in self._in_pieces(request)]
            except BaseException as error:  # noqa: BLE001 - handed to who waits
                _fail([request], error)
                continue
            for made in pieces:
                (piece,) = made.requests
                # A deadline is one request's; and batches are made of groups that are not too large.
                alone = piece.deadline_s is not None or self._one_of_several
                key = id(piece) if alone else (id(made.wanted), piece.nprobe, made.k)
                known = groups.setdefault(key, made)
                if known is not made:
                    known.requests.append(piece)
        found = list(groups.values())
        try:
            for group in found:
                if len(group.requests) > 1:
                    group.queries = np.concatenate([request.queries for request in group.requests])
            self._choose_lists(found)
            for group in found:
                if group.requests[0].deadline_s is not None:
                    group.chosen = self._limited(group, list_device)
        except BaseException as error:  # noqa: BLE001 - handed to those who wait
            _fail([request for group in found for request in group.requests], error)
            return []
        clock.note(COARSE, started)
        if damaged is not None and not self._one_of_several:
            for group in found:
                self._refuse_damaged(group, damaged)
        return [group for group in found if group.requests]

    def _in_pieces(self, request: Request) -> Iterator[Request]:
        """Of as many queries as may rank lists at a time."""
        n, most = len(request.queries), max(1, _MOST_CELLS // self._index.nlist)
        if n <= most:
            yield request
            return
        divided = DividedReply(request.reply, n, request.params.k, -(-n // most))
        for start in range(0, n, most):
            rows = slice(start, min(n, start + most))
            hit_rate = None if request.hit_rate is None else request.hit_rate[rows]
            yield replace(request, queries=request.queries[rows], reply=divided.part(rows), hit_rate=hit_rate)

    def _group_of(self, request: Request, live: LiveRows | None, seen: int) -> Group:
        every = self._filters.make(None, None) if request.filter is None else self._filters.renewed(request.filter)
        wanted = self._filters.without(every, None if live is None else live.deleted)
        added, counts, sizes = None, wanted.counts, self._index.list_sizes
        if live is not None and live.added is not None:
            added = self._filters.of_added(every, live.added)
            counts, sizes = counts + added.counts, sizes + live.added.sizes
        return Group(
            requests=[request],
            queries=request.queries,
            wanted=wanted,
            added=added,
            counts=counts,
            sizes=sizes,
            live=live,
            seen=seen,
            chosen=ChosenLists.none(len(request.queries)),
        )

    def _choose_lists(self, groups: Sequence[Group]) -> None:
        wishes = [
            Wish(group.queries, group.counts, group.sizes, first.nprobe, group.k, first.deadline_s is not None)
            for group in groups
            for first in group.requests[:1]
        ]
        for group, chosen in zip(groups, self._opened().choose(wishes), strict=True):
            group.chosen = chosen

    def _limited(self, group: Group, list_device: npt.NDArray[np.int16] | None) -> ChosenLists:
        """As many of the chosen lists as fit the deadline of the group's one request, ``min_nprobe`` at least."""
        (request,), chosen, counts = group.requests, group.chosen, group.counts
        assert request.deadline_s is not None
        width = chosen.probes.shape[1]
        if width <= request.params.min_nprobe:
            return chosen
        there = chosen.probes >= 0
        rows: I64 = np.where(there, counts[chosen.probes], 0)
        here = rows
        if list_device is not None and self._takes_devices(group):
            here = np.where(list_device[chosen.probes] < 0, rows, 0)
        if self._one_of_several and (not_here := self._integrity.quarantined) is not None:
            here = np.where(not_here[chosen.probes], 0, here)
        left_s = request.deadline_s - time.monotonic()
        fit = nprobe_for_deadline(here, 0, left_s, self._pace, request.params.min_nprobe, width)
        if fit == width:
            return chosen
        self._stats.add(nprobe_lowered=1)
        n_probes = np.minimum(chosen.n_probes, fit).astype(np.int32)
        return ChosenLists(chosen.probes[:, :fit], chosen.coarse[:, :fit], n_probes, rows[:, :fit].sum(axis=1))

    def _refuse_damaged(self, group: Group, damaged: npt.NDArray[np.bool_]) -> None:
        """Fails those that probe a list in quarantine."""
        probes, _ = group.chosen.of_each(len(group.queries))
        refused = []
        for request, rows in group.rows():
            found = np.unique(probes[rows][(probes[rows] >= 0) & damaged[probes[rows]]])
            if len(found):
                refused.append(request)
                request.reply.fail(self._integrity.error(found.tolist()))
        if refused:
            group.leave_out(refused)

    def batches(
        self, groups: Sequence[Group], list_device: npt.NDArray[np.int16]
    ) -> tuple[list[tuple[list[Group], bool]], list[Group]]:
        """Groups that share a batch, of which devices or other nodes may scan a part, and whether devices do; and the
        rest, each of which is answered here alone. ``list_device``: who scans each list."""
        shared = self._for_devices(groups, list_device)
        rest = [group for group in groups if group not in shared]
        found = [(some, True) for some in _packed(shared)]
        if not self._one_of_several:
            return found, rest
        return found + [(some, False) for some in _packed(rest)], []

    def _for_devices(self, groups: Sequence[Group], list_device: npt.NDArray[np.int16]) -> list[Group]:
        """Those of which devices scan a part."""
        return [group for group in groups if self._takes_devices(group) and self._any_there(group, list_device)]

    def _takes_devices(self, group: Group) -> bool:
        """Whether devices scan its lists that they hold: not codes, and not shards."""
        if not self._parts.paged or self._index.rows is not self._index:
            return False
        return not group.chosen.same and group.wanted.total >= _LEAST_ON_DEVICES * self._index.count

    def _any_there(self, group: Group, list_device: npt.NDArray[np.int16]) -> bool:
        probes = group.chosen.probes
        return bool((list_device[probes[probes >= 0]] >= 0).any())

    # Answering

    def answer(self, group: Group, clock: BatchClock) -> int:
        """Answers a group on the host; returns how many rows were compared. Never raises."""
        try:
            distances, ids = self._compare(group, clock)
            if self._integrity.marks[0] != group.seen:
                self._integrity.catch_up()
                return sum(self.answer(again, clock) for again in self.choose(group.requests, clock))
        except BaseException as error:  # noqa: BLE001 - handed to those who wait
            _fail(group.requests, error)
            return 0
        n_rows = int(group.chosen.n_rows.sum())
        n_new = sum(len(request.queries) for request in group.requests if not request.again)
        self._stats.add(
            requests=sum(not request.again for request in group.requests),
            queries=n_new,
            batches=1,
            largest_batch=len(group.queries),
            host_work_bytes=n_rows * self._opened().row_bytes,
            filtered_requests=len(group.requests),
            filtered_rows=n_rows,
        )
        probes, _ = group.chosen.of_each(len(group.queries))
        alone = len(group.requests) == 1
        for request, rows in group.rows():
            n = len(request.queries)
            request.tell_probes(probes[rows])
            request.reply.settle(
                SearchResult(
                    # Copies: views would keep all answers alive.
                    ids=ids if alone else ids[rows].copy(),
                    distances=distances if alone else distances[rows].copy(),
                    nprobe_used=group.chosen.n_probes[rows].copy(),
                    # Of one that a batch could not answer, that of the batch.
                    hit_rate=np.zeros(n, dtype=np.float32) if request.hit_rate is None else request.hit_rate,
                )
            )
        for request in group.requests:
            request.reply.announce()
        return n_rows

    def _compare(self, group: Group, clock: BatchClock) -> tuple[F32, I64]:
        started = time.perf_counter()
        n, keep_max = len(group.queries), self._index.rows.metric == "ip"
        distances, ids = self._opened().compare(group.queries, group.wanted, group.chosen, group.k)
        finish_topk(distances, ids, keep_max=keep_max)
        if group.added is not None:
            probes, _ = group.chosen.of_each(n)
            came = self._scan_added(group.added, group.queries, probes, group.k)
            if came is not None:
                merge_added(distances, ids, came, keep_max=keep_max)
        clock.note_rerank(started)
        self._pace.observe(int(group.chosen.n_rows.sum()), time.perf_counter() - started)
        return distances, ids

    def _scan_added(self, added: AddedFilter, queries: F32, probes: I64, k: int) -> tuple[F32, I64] | None:
        return self._added.scan(added.rows, queries, probes, k, filter_ids=added.ids)

    def _opened(self) -> FilteredScanner:
        if self._scanner is None:
            self._scanner = FilteredScanner(self._index, self._parts.host)
        return self._scanner

    # Batches that devices share

    def fill(self, batch: Batch, groups: Sequence[Group], clock: BatchClock) -> tuple[I64, F32]:
        """Makes a batch of the requests of ``groups`` theirs; (n, w) lists and coarse distances, short rows end in -1.

        ``clock``: of the choice of their lists.
        """
        live, n_rows = groups[0].live, int(sum(group.chosen.n_rows.sum() for group in groups))
        # Masks have left out what was deleted.
        live = None if live is None or live.added is None else replace(live, deleted=None)
        batch.begin_masked(_masks_of(groups), live, clock, seen=groups[0].seen, n_rows=n_rows)
        self._stats.add(filtered_requests=len(batch.requests), filtered_rows=n_rows)
        return _stacked(groups)

    def mask_given(self, batch: Batch, probes: I64) -> bool:
        """Gives a batch of requests that say their lists, (n, w) ``probes``, the filters that came with them; False:
        there are none."""
        masks = [request.given.masks for request in batch.requests if request.given is not None]
        told = [each for each in masks if each is not None]
        if not told:
            return False
        assert len(told) == len(batch.requests), "requests with and without filters share a batch"
        joined = RowMasks.joined(told)
        n_rows = 0
        for queries, wanted in joined.groups():
            own = probes[queries]
            n_rows += int(wanted.counts[own[own >= 0]].sum())
        batch.mask(joined, n_rows)
        self._stats.add(filtered_rows=n_rows)
        return True

    def scan_part(self, batch: Batch, part: ProbePart) -> tuple[F32, I64]:
        """Compares a part of a batch on the host, as a scan answers it: with masks the rows that these leave, else all;
        from any thread."""
        masks = batch.masks
        if masks is None:
            masks = RowMasks((self._filters.make(None, None),), np.zeros(len(batch), dtype=np.int32))
        started, n_compared = time.perf_counter(), 0
        distances = np.empty((len(part.rows), batch.k), dtype=np.float32)
        ids = np.empty((len(part.rows), batch.k), dtype=np.int64)
        scanner = self._opened()
        for rows, wanted in masks.take(part.rows).groups():
            probes = part.probes[rows]
            there = probes >= 0
            n_rows = np.where(there, wanted.counts[probes], 0).sum(axis=1)
            chosen = ChosenLists(probes, part.coarse_distances[rows], there.sum(axis=1, dtype=np.int32), n_rows)
            queries = np.ascontiguousarray(batch.queries[part.rows[rows]])
            distances[rows], ids[rows] = scanner.compare(queries, wanted, chosen, batch.k)
            n_compared += int(n_rows.sum())
        if self._one_of_several:  # all of them are compared here
            self._pace.observe(n_compared, time.perf_counter() - started)
        return distances, ids

    def find_added(self, groups: Sequence[Group], batch: Batch, probes: I64) -> tuple[F32, I64]:
        """The nearest added rows that filters leave, for all queries of a batch of ``groups``."""
        found = empty_topk(len(batch), batch.k, keep_max=batch.keep_max)
        start = 0
        for group in groups:
            rows = slice(start, start + len(group.queries))
            start = rows.stop
            assert group.added is not None
            came = self._scan_added(group.added, group.queries, probes[rows], batch.k)
            if came is not None:
                found[0][rows], found[1][rows] = came
        return found


def _fail(requests: Sequence[Request], error: BaseException) -> None:
    """Hands an error to those who wait."""
    if not isinstance(error, HybridIndexError):
        _log.error("a search with a filter failed", exc_info=error)
    for request in requests:
        request.reply.fail(error)
