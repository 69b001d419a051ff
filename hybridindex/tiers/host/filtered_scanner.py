"""Searches with a filter, on the host: which lists they probe, and exact distances of the rows that the filter leaves
of these.

A search that probes as many lists as one without a filter finds few rows that may be answered; others, in farther
lists, would be nearer. So it goes on, nearest list first, until it has compared as many rows as a search without a
filter. Where a filter leaves few rows, these are all of them, and the answer is exact.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridindex.extension import native
from hybridindex.index.filters.row_filter import RowFilter, ids_of
from hybridindex.index.ivf import IVFIndex
from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.tiers.host.host_scanner import HostScanner
from hybridindex.tiers.host.native_scanner import HostNativeScanner
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.tiers.host.reranker import Reranker
from hybridindex.types import F32, I32, I64, U8

__all__ = ["ChosenLists", "FilteredScanner", "Wish", "choose_lists", "matching_rows", "matching_rows_reference"]

#: Positions that are compared at a time: 8 bytes each.
_MOST_POSITIONS = 4 << 20
#: Lists that are ranked at first, in those that a filter of rows everywhere would take; and so many times more, where
#: these hold too few rows.
_FIRST_LISTS, _MORE_LISTS = 2, 4
#: That are compared in the time in which one list is ranked.
_ROWS_PER_RANKED_LIST = 4
#: Queries times lists that are ranked at a time.
_MOST_CELLS = 1 << 22
#: So many queries share the rows of lists enough to be compared list by list; and from this share of the rows on, whole
#: blocks of them are.
_FEWEST_BY_LIST, _SPARSE = 4, 0.3
#: Bytes of positions, and of their filters, that are kept for searches to come.
_KEPT_BYTES = 16 << 20


class ChosenLists(NamedTuple):
    """What each query probes."""

    #: (n, w) int64: lists that hold rows of the filter, nearest first, then -1. Or (1, w), the same for all.
    probes: I64
    #: As many float32: their coarse distances, where lists were ranked.
    coarse: F32
    #: (n,) int32: how many.
    n_probes: I32
    #: (n,) int64: rows of the filter in them.
    n_rows: I64
    #: Whether farther lists would change nothing.
    suffices: bool = True
    #: Whether they are the same for all, in any order.
    same: bool = False

    def of_each(self, n: int) -> tuple[I64, F32]:
        """(n, w) lists and coarse distances, contiguous."""
        shape = (n, self.probes.shape[1])
        probes, coarse = np.broadcast_to(self.probes, shape), np.broadcast_to(self.coarse, shape)
        return np.ascontiguousarray(probes), np.ascontiguousarray(coarse)

    def take(self, rows: npt.NDArray[np.bool_]) -> ChosenLists:
        """Those of some queries."""
        probes, coarse = (self.probes, self.coarse) if self.same else (self.probes[rows], self.coarse[rows])
        return ChosenLists(probes, coarse, self.n_probes[rows], self.n_rows[rows], self.suffices, self.same)

    @classmethod
    def none(cls, n: int) -> ChosenLists:
        """No lists, for n queries."""
        probes, coarse = np.empty((n, 0), dtype=np.int64), np.empty((n, 0), dtype=np.float32)
        return cls(probes, coarse, np.zeros(n, dtype=np.int32), np.zeros(n, dtype=np.int64))


class Wish(NamedTuple):
    """Queries that need lists."""

    #: (n, scan_dim) float32.
    queries: F32
    #: (nlist,) int64: rows of each list that may be answered, and all.
    counts: I64
    sizes: I64
    nprobe: int
    k: int
    #: Whether the nearest lists have to come first, also where all rows are compared whatever is near.
    ranked: bool


def choose_lists(probes: I64, coarse: F32, counts: I64, sizes: I64, nprobe: int, k: int) -> ChosenLists:
    """The nearest lists that hold as many rows of a filter as the nearest ``nprobe`` have rows, and ``k`` at least.

    Pure.

    Args:
        probes, coarse: (n, p) lists, nearest first, -1: none; and their coarse distances.
        counts: (nlist,) int64 rows of each list that the filter leaves.
        sizes: (nlist,) int64 rows of each list.
    """
    there = probes >= 0
    matches = np.where(there, counts[probes], 0)
    wanted = np.maximum(np.where(there[:, :nprobe], sizes[probes[:, :nprobe]], 0).sum(axis=1), k)
    before = np.cumsum(matches, axis=1) - matches
    taken = (matches > 0) & (before < wanted[:, None])
    n_probes, n_rows = taken.sum(axis=1), np.where(taken, matches, 0).sum(axis=1)
    shape = (len(probes), int(n_probes.max(initial=0)))
    places = np.arange(shape[1]) < n_probes[:, None]
    chosen, distances = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.float32)
    chosen[places], distances[places] = probes[taken], coarse[taken]
    return ChosenLists(chosen, distances, n_probes.astype(np.int32), n_rows, bool((n_rows >= wanted).all()))


def matching_rows(mask: U8, first: I64, probes: I64, positions: I64) -> None:
    """Writes the positions of the rows that a mask leaves of lists: (n, w) int64, in the order of (n, p) ``probes``,
    then -1; see :mod:`hybridindex.tiers.contract.positions`. ``w`` must suffice.

    Args:
        mask, first: as of a :class:`hybridindex.index.filters.row_filter.RowFilter`.
    """
    if native is None:
        matching_rows_reference(mask, first, probes, positions)
    else:
        native.matching_rows(mask, first, probes, positions)


def matching_rows_reference(mask: U8, first: I64, probes: I64, positions: I64) -> None:
    """The same in numpy."""
    bits = np.unpackbits(mask, bitorder="little")
    positions.fill(-1)
    for row, lists in enumerate(probes):
        found = [
            (list_id << POSITION_BITS) + np.flatnonzero(bits[first[list_id] : first[list_id + 1]])
            for list_id in lists[lists >= 0].tolist()
        ]
        own = np.concatenate([np.empty(0, dtype=np.int64), *found])
        positions[row, : len(own)] = own


class FilteredScanner:
    """Searches with filters. Answers depend on nothing but the query, its filter and the lists that are chosen. One
    call at a time, but for :meth:`compare` of lists that are not the same for all."""

    def __init__(self, index: IVFIndex, host: HostScanner) -> None:
        """``host``: quantizes, and lends its threads. Rows that only it knows how to compare, it scans."""
        self._index, self._host = index, host
        rows = index.rows
        #: Bytes of one row.
        self.row_bytes = rows.code_size
        #: Scans rows that a mask chooses.
        self._scanner: HostNativeScanner | None = None
        #: Or compares chosen rows, asking for their pages first. With neither, the host scans lists, by ids.
        self._reranker: Reranker | None = None
        if isinstance(host, HostNativeScanner):
            self._scanner = host
        elif isinstance(host, HostRabitqScanner):
            if host.on_disk is None and host.pool is not None and HostNativeScanner.unsupported(rows) is None:
                self._scanner = HostNativeScanner(rows, threads=host.threads, pool=host.pool)
            else:
                self._reranker = host.reranker
        #: Positions of all rows of filters of late; the last one is the last.
        self._kept: OrderedDict[RowFilter, I64] = OrderedDict()
        #: The last filter that was scanned with, and its ids in ascending order.
        self._last: tuple[RowFilter, I64] | None = None

    def choose(self, wishes: Sequence[Wish]) -> list[ChosenLists]:
        """As :func:`choose_lists`, for each of the wishes, whatever the others are: lists are ranked for all of them
        together. Where all rows of a filter are compared whatever is near, lists come in any order."""
        chosen = [self._all_lists(wish) for wish in wishes]
        open_ones = [number for number, each in enumerate(chosen) if each is None]
        for numbers, p in self._together(wishes, open_ones):
            some = [wishes[number] for number in numbers]
            queries = some[0].queries if len(some) == 1 else np.concatenate([wish.queries for wish in some])
            probes, coarse = self._host.quantize(self._index, queries, p)
            start = 0
            for number, wish in zip(numbers, some, strict=True):
                rows, own = slice(start, start + len(wish.queries)), self._lists_at_first(wish)
                start = rows.stop
                chosen[number] = self._choose(wish, probes[rows, :own], coarse[rows, :own])
        return [each for each in chosen if each is not None]

    def _all_lists(self, wish: Wish) -> ChosenLists | None:
        """All that hold rows of the filter, where these are few."""
        total, count = int(wish.counts.sum()), int(wish.sizes.sum())
        # About as many rows as a search without a filter compares, and those that take as long as ranking lists.
        few = count * wish.nprobe // self._index.nlist + _ROWS_PER_RANKED_LIST * self._index.nlist
        if wish.ranked or total > few or (self._scanner or self._reranker) is None:
            return None
        lists, n = np.flatnonzero(wish.counts), len(wish.queries)
        n_probes, n_rows = np.full(n, len(lists), np.int32), np.full(n, total)
        return ChosenLists(lists[None], np.zeros((1, len(lists)), np.float32), n_probes, n_rows, same=True)

    def _lists_at_first(self, wish: Wish) -> int:
        share = max(int(wish.counts.sum()), 1) / max(int(wish.sizes.sum()), 1)
        return min(self._index.nlist, max(wish.nprobe, int(_FIRST_LISTS * wish.nprobe / share)))

    def _together(self, wishes: Sequence[Wish], numbers: Sequence[int]) -> Iterator[tuple[list[int], int]]:
        """Wishes whose lists are ranked at a time, as far as there is memory, and how many lists."""
        some, n, most = list[int](), 0, 0
        for number in numbers:
            p, more = self._lists_at_first(wishes[number]), len(wishes[number].queries)
            if some and (n + more) * max(most, p) > _MOST_CELLS:
                yield some, most
                some, n, most = [], 0, 0
            some, n, most = [*some, number], n + more, max(most, p)
        if some:
            yield some, most

    def _choose(self, wish: Wish, probes: I64, coarse: F32) -> ChosenLists:
        """Of the nearest (n, p) lists, or more where these hold too few rows."""
        queries, counts, sizes, nprobe, k, _ = wish
        while True:
            chosen = choose_lists(probes, coarse, counts, sizes, nprobe, k)
            if chosen.suffices or probes.shape[1] == self._index.nlist:
                return chosen
            p = min(self._index.nlist, _MORE_LISTS * probes.shape[1])
            probes, coarse = self._host.quantize(self._index, queries, p)

    def compare(self, queries: F32, wanted: RowFilter, chosen: ChosenLists, k: int) -> tuple[F32, I64]:
        """The ``k`` nearest rows of the filter in the chosen lists: distances (n, k) float32 and ids (n, k) int64, best
        first, as a scan answers them."""
        scanner = self._scanner
        if scanner is None and self._reranker is None:
            probes, coarse = chosen.of_each(len(queries))
            return self._host.scan_checked(queries, probes, coarse, k, filter_ids=self._ids_of(wanted))
        if scanner is None:
            return self._rerank(queries, wanted, chosen, k)
        few = len(queries) < _FEWEST_BY_LIST and wanted.total < _SPARSE * self._index.count
        if scanner.scans_scattered_rows and (chosen.same or few):
            return scanner.scan_scattered(queries, self._positions(wanted, chosen), k)
        probes, coarse = chosen.of_each(len(queries))
        return scanner.scan_checked(queries, probes, coarse, k, rows=(wanted.mask, wanted.first))

    def _rerank(self, queries: F32, wanted: RowFilter, chosen: ChosenLists, k: int) -> tuple[F32, I64]:
        """Compares as many queries at a time as their positions have memory for."""
        assert self._reranker is not None
        probes, _ = chosen.of_each(len(queries))
        width = max(k, int(chosen.n_rows.max(initial=0)))
        step = max(1, _MOST_POSITIONS // width)
        found: list[tuple[F32, I64]] = []
        for start in range(0, len(queries), step):
            at = slice(start, start + step)
            positions = np.empty((len(queries[at]), width), dtype=np.int64)
            matching_rows(wanted.mask, wanted.first, probes[at], positions)
            found.append(self._reranker.rerank(queries[at], positions, k))
        if len(found) == 1:
            return found[0]
        return np.concatenate([part[0] for part in found]), np.concatenate([part[1] for part in found])

    def _positions(self, wanted: RowFilter, chosen: ChosenLists) -> I64:
        """Of the rows in the chosen lists: (n, w), or (1, w) where these are the same for all. Those are kept."""
        known = self._kept.get(wanted) if chosen.same else None
        if known is not None:
            self._kept.move_to_end(wanted)
            return known
        probes = np.ascontiguousarray(chosen.probes)
        positions = np.empty((len(probes), int(chosen.n_rows.max(initial=0))), dtype=np.int64)
        matching_rows(wanted.mask, wanted.first, probes, positions)
        if chosen.same and wanted.nbytes + positions.nbytes <= _KEPT_BYTES // 4:
            self._kept[wanted] = positions
            self._kept.move_to_end(wanted)
            # Filters that are held are nobody else's any more.
            while sum(each.nbytes + kept.nbytes for each, kept in self._kept.items()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        return positions

    def _ids_of(self, wanted: RowFilter) -> I64:
        last = self._last
        if last is None or last[0] is not wanted:
            last = self._last = wanted, np.sort(ids_of(self._index, wanted))
        return last[1]
