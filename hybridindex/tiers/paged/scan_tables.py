"""The tables of a list-major device scan: which page is compared with which queries, and where the distances go.

Pure numpy over whole arrays; nothing here knows a device. Words:

*Pair*: one query and one list that it probes, with rows to scan. *Stretch*: consecutive pages of one list, all of them
unless the list is too long for the scratch. *Members* of a stretch: the queries that probe it. *Item*: one page and up
to ``GROUP`` members, the work of one program. Items of one page follow each other, so that the second finds the page
in the cache. *Slot*: number of a (query, row) pair in its tile, query by query; its distance lies there.
*Tile*: as many pairs as fit the scratch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hybridindex.errors import OutOfBudgetError
from hybridindex.types import I32, I64

__all__ = ["GROUP", "Cutting", "ItemTables", "Pairs", "Selection", "make_tables", "pairs_of_probes"]

#: Queries of one item; also the narrowest tile of the matrix units.
GROUP = 16
#: Bytes that aligning the sections may take.
_SLACK = 3072
#: Bytes of a pair's tables at most: two numbers of the member, five of its stretch. And of an item's.
_PER_PAIR, _PER_ITEM = 4 * 7, 4 * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """How the best k of many are found: each ``chunk`` of candidates keeps ``kept``, until one chunk is left.

    ``kept`` is the power of two from k, 16 at least.
    """

    chunk: int
    kept: int

    @classmethod
    def of(cls, k: int) -> Selection:
        kept = max(16, 1 << (k - 1).bit_length())
        return cls(chunk=max(2048, 4 * kept), kept=kept)

    def starts(self, slots: I64) -> list[I64]:
        """Where each query's candidates start, level by level: (n + 1,) each, the slots first, the answer last."""
        levels = [slots]
        while True:
            chunks = np.maximum(1, -((levels[-1][:-1] - levels[-1][1:]) // self.chunk))
            levels.append(_ends_from_zero(chunks * self.kept))
            if chunks.max(initial=1) == 1:
                return levels


def _ends_from_zero(counts: I64) -> I64:
    """0 and where each of n runs ends: (n + 1,)."""
    ends = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """(query, stretch) pairs with rows, query by query in the order of the probes; (t,) int64 each."""

    query: I64
    list: I64
    #: Its place in the flat probes.
    probe: I64
    #: The stretch: its first page and row within the list, and how many rows.
    first_page: I64
    first_row: I64
    rows: I64

    def __len__(self) -> int:
        return len(self.query)

    def part(self, start: int, end: int) -> Pairs:
        at = slice(start, end)
        return Pairs(
            query=self.query[at],
            list=self.list[at],
            probe=self.probe[at],
            first_page=self.first_page[at],
            first_row=self.first_row[at],
            rows=self.rows[at],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """What a tile costs of the scratch, and how pairs are cut into tiles that fit."""

    selection: Selection
    #: Bytes of scratch for what grows with a tile.
    room: int
    #: Bytes that kernels read of one query, and of one pair, beside the tables.
    query_bytes: int
    pair_bytes: int
    rows_per_page: int
    #: Rows of the longest list of all.
    longest_list: int

    @property
    def _per_query(self) -> int:
        # Places on two levels at least one chunk each, and where the candidates start on each level.
        return 20 * self.selection.kept + self.query_bytes + 4 * 16

    @property
    def _per_row(self) -> float:
        # The distance, 8 bytes a place of the first level, and no more than half of that for the second.
        return 4 + 12 * self.selection.kept / self.selection.chunk

    def longest_stretch(self, k: int) -> int:
        """Pages of the longest stretch that one query can scan.

        Raises:
            OutOfBudgetError: not even one page.
        """
        fixed = _SLACK + self._per_query + _PER_PAIR + self.pair_bytes + 1
        page = min(self.rows_per_page, self.longest_list) * self._per_row + _PER_ITEM
        pages = int((self.room - fixed) // page)
        if pages < 1:
            raise OutOfBudgetError(
                f"scratch of {self.room:,} bytes is too small for k {k}: one page takes {int(fixed + page) + 1:,}"
            )
        return pages

    def tiles(self, pairs: Pairs) -> Iterator[tuple[int, int]]:
        """Ranges of pairs that fit, as long as can be: all at once where they do."""
        items = -(-pairs.rows // self.rows_per_page)
        cost = np.ceil(pairs.rows * self._per_row).astype(np.int64)
        cost += items * _PER_ITEM + _PER_PAIR + self.pair_bytes
        reach = np.diff(pairs.query, prepend=pairs.query[:1]) * self._per_query
        total = np.cumsum(cost + reach)
        start, limit = 0, self.room - _SLACK - self._per_query
        while start < len(pairs):
            # The first query of a tile is in the limit.
            before = int(total[start] - cost[start])
            end = int(np.searchsorted(total, before + limit, side="right"))
            assert end > start, "a stretch is too long for the scratch"
            yield start, end
            start = end


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemTables:
    """One tile. i items, s stretches, t members, n queries from ``first_query``. All int32 on the device."""

    first_query: int
    n_queries: int
    #: (i,) page in the arena, and stretch.
    page: I32
    stretch: I32
    #: Items from here on belong to stretches with many members.
    n_light: int
    #: (s,) list; first item; items per page; rows; first member and the end of members.
    list: I64
    first_item: I64
    groups: I64
    rows: I64
    member: I64
    member_end: I64
    #: (t,) pair, query, from 0, and first slot of each member.
    pair: I64
    query: I64
    slot: I64
    #: (p,) first slot of each pair of the tile, ascending: finds the pair of a slot.
    pair_slot: I64
    #: (n + 1,) first slot of each query.
    query_slot: I64

    @property
    def n_slots(self) -> int:
        return int(self.query_slot[-1])


def pairs_of_probes(probes: I64, list_sizes: I64, rows_per_page: int, max_pages: int) -> Pairs:
    """Pairs of (n, p) probes, without -1 and empty lists; lists of more than ``max_pages`` pages in several stretches.

    ``list_sizes`` (nlist,) rows.
    """
    flat = probes.ravel()
    # The last size answers for -1, and is masked out.
    sizes = np.where(flat >= 0, list_sizes[flat], 0)
    at = np.flatnonzero(sizes)
    query, lists, rows = at // max(1, probes.shape[1]), flat[at], sizes[at]
    first_page = np.zeros(len(at), dtype=np.int64)
    longest = max_pages * rows_per_page
    if rows.max(initial=0) > longest:
        parts = -(-rows // longest)
        which = np.repeat(np.arange(len(rows)), parts)
        number = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)
        query, lists, at, first_page = query[which], lists[which], at[which], number * max_pages
        rows = np.minimum(rows[which] - number * longest, longest)
    first_row = first_page * rows_per_page
    return Pairs(query=query, list=lists, probe=at, first_page=first_page, first_row=first_row, rows=rows)


def make_tables(pairs: Pairs, list_log: I64, page_log: I32, rows_per_page: int, heavy_from: int) -> ItemTables:
    """Tables of one tile.

    Args:
        list_log, page_log: of the residency snapshot.
        heavy_from: members from which a stretch is heavy; its items come last.
    """
    # Every search waits for this: what numpy's own diff, append and concatenate take, plain slices spare.
    t = len(pairs)
    first_query = int(pairs.query[0])
    query = pairs.query - first_query
    ends = _ends_from_zero(pairs.rows)
    slot = ends[:-1]
    n_queries = int(query[-1]) + 1
    query_slot = ends.take(query.searchsorted(np.arange(n_queries + 1)))

    # Sorting whole keys is many times faster than argsort; the low bits say which pair it was.
    stretch_key = pairs.list
    n_parts = 1
    if (longest := int(pairs.first_page.max())) > 0:
        n_parts = longest + 1
        stretch_key = pairs.list * n_parts + pairs.first_page
    bits = max(1, (t - 1).bit_length())
    key = stretch_key << bits | np.arange(t)
    key.sort()
    order = key & ((1 << bits) - 1)
    key >>= bits
    is_first = np.ones(t, dtype=np.bool_)
    np.not_equal(key[1:], key[:-1], out=is_first[1:])
    member = is_first.nonzero()[0]
    count = np.empty_like(member)
    np.subtract(member[1:], member[:-1], out=count[:-1])
    count[-1] = t - member[-1]
    if heavy_from <= GROUP * n_queries:
        heavy = count >= heavy_from
        sorted_by_weight = np.concatenate((np.flatnonzero(~heavy), np.flatnonzero(heavy)))
        member, count = member[sorted_by_weight], count[sorted_by_weight]
        n_light_stretches = len(heavy) - int(heavy.sum())
    else:
        n_light_stretches = len(member)
    one = order.take(member)
    lists, rows = pairs.list.take(one), pairs.rows.take(one)
    groups = -(-count // GROUP)
    n_pages = -(-rows // rows_per_page)
    n_items = n_pages * groups
    item_ends = n_items.cumsum()
    # Half as many bytes: these arrays are the long ones.
    stretch = np.repeat(np.arange(len(member), dtype=np.int32), n_pages)
    in_log = list_log[lists] + pairs.first_page[one] - (n_pages.cumsum() - n_pages)
    # Many times faster than indexing with int32.
    page = page_log.take(in_log.take(stretch) + np.arange(len(stretch)))
    if groups.max() > 1:
        repeats = groups.take(stretch)
        stretch, page = np.repeat(stretch, repeats), np.repeat(page, repeats)
    return ItemTables(
        first_query=first_query,
        n_queries=n_queries,
        page=page,
        stretch=stretch,
        n_light=int(item_ends[n_light_stretches - 1]) if n_light_stretches else 0,
        list=lists,
        first_item=item_ends - n_items,
        groups=groups,
        rows=rows,
        member=member,
        member_end=member + count,
        pair=order,
        query=query.take(order),
        slot=slot.take(order),
        pair_slot=slot,
        query_slot=query_slot,
    )
