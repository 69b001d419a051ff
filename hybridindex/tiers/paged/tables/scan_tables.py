"""The tables of a list-major device scan: which page is compared with which queries, and where the distances go.

Numpy over whole arrays; nothing here knows a device. The extension makes the same tables faster
(:mod:`hybridindex.tiers.paged.tables.staged_tables` decides). Words:

*Pair*: one query and one list that it probes, with rows to scan. *Stretch*: consecutive pages of one list, all of them
unless the list is too long for the scratch. *Members* of a stretch: the queries that probe it. *Item*: one page and up
to ``GROUP`` members, the work of one program. Items of one page follow each other, so that the second finds the page
in the cache. *Slot*: number of a (query, row) pair in its tile, query by query; its distance lies there.
*Tile*: as many pairs as fit the scratch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridindex.errors import OutOfBudgetError
from hybridindex.types import F32, I32, I64

__all__ = [
    "ALIGNED",
    "GROUP",
    "Cutting",
    "ItemTables",
    "NumpyTables",
    "Pairs",
    "Selection",
    "Tile",
    "make_tables",
    "pairs_of_probes",
]

#: Queries of one item; also the narrowest tile of the matrix units.
GROUP = 16
#: Words that a section is aligned to; triton then reads it in 16-byte pieces.
ALIGNED = 16
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
        return self.take(slice(start, end))

    def take(self, at: slice | I64) -> Pairs:
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

    @property
    def costs(self) -> tuple[float, int, int, int, int]:
        """Bytes of a row, an item, a pair and a further query of a tile, and of all of them at most."""
        limit = self.room - _SLACK - self._per_query
        return self._per_row, _PER_ITEM, _PER_PAIR + self.pair_bytes, self._per_query, limit


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


def _pack(pairs: Pairs, own: I64, room: int) -> I64:
    """Tiles of pairs, from 0: stretches in the order in which they are met, each as a whole where it fits one. ``own``:
    what each pair takes of ``room``."""
    stretch_key = pairs.list * (int(pairs.first_page.max()) + 1) + pairs.first_page
    _, first, of_key = np.unique(stretch_key, return_index=True, return_inverse=True)
    met = np.argsort(np.argsort(first))[of_key]
    tile_of, tile, used = np.empty(len(own), dtype=np.int64), 0, 0
    for members in np.split(np.argsort(met, kind="stable"), np.cumsum(np.bincount(met))[:-1]):
        whole = int(own[members].sum())
        if whole <= room < used + whole:
            tile, used = tile + 1, 0
        for member in members.tolist():
            if used + own[member] > room:
                tile, used = tile + 1, 0
            used += int(own[member])
            tile_of[member] = tile
    return tile_of


class Tile(NamedTuple):
    """One tile, staged. Places are counted in words of 32 bits."""

    first_query: int
    n_queries: int
    #: Items from here on belong to stretches with many members.
    n_light: int
    n_items: int
    #: Of a stretch.
    most_rows: int
    n_slots: int
    #: Words that the tables take; where they do not fit, nothing was written.
    used: int
    #: Where the tables begin that kernels of distances read: page and stretch of items; first item, groups, rows, first
    #: member and end of the members of stretches; query and slot of members.
    at: tuple[int, ...]
    #: Of each level of the selection: where its candidates' starts lie, (n_queries + 1,); of the answer last.
    starts: tuple[int, ...]
    #: Of each level: programs of the query with the most candidates.
    programs: tuple[int, ...]
    #: Of each level: candidates of all queries; answers last.
    places: tuple[int, ...]


class NumpyTables:
    """Makes the tables of one batch after the other, as ``hybridindex._native.ScanTables`` does. Not thread-safe."""

    def __init__(self, rows_per_page: int, group: int) -> None:
        assert group == GROUP
        self._rows_per_page = rows_per_page
        self._pairs: Pairs
        self._probes: I64
        self._tile: Pairs
        self._tables: ItemTables

    def take(self, probes: I64, list_sizes: I64, max_pages: int) -> int:
        """Takes the pairs of (n, p) probes, see :func:`pairs_of_probes`; how many there are."""
        self._pairs = pairs_of_probes(probes, list_sizes, self._rows_per_page, max_pages)
        self._probes = probes
        return len(self._pairs)

    def tiles(self, per_row: float, per_item: int, per_pair: int, per_query: int, limit: int) -> list[int]:
        """Cuts what was taken into tiles: one behind the last pair of each. Where more than one is needed, all queries
        that probe a list are in one tile, so that it is read once: pairs change places. See :attr:`Cutting.costs`."""
        pairs = self._pairs
        if not len(pairs):
            return []
        own = np.ceil(pairs.rows * per_row).astype(np.int64)
        own += -(-pairs.rows // self._rows_per_page) * per_item + per_pair
        further = int(pairs.query[-1] - pairs.query[0]) * per_query
        # As the extension rounds it.
        rounded = pairs.rows.sum() * per_row + int((own - np.ceil(pairs.rows * per_row)).sum()) + len(pairs) + further
        if rounded < limit:
            return [len(pairs)]
        at_once = min(max(1 + limit // 2 // max(1, per_query), 1), len(self._probes))
        room = limit - (at_once - 1) * per_query
        if own.max() > room:
            return self._as_they_come(own, per_query, limit)
        tile_of = np.empty(len(pairs), dtype=np.int64)
        n_tiles = 0
        for first in range(0, len(self._probes), at_once):
            start, end = np.searchsorted(pairs.query, (first, first + at_once))
            if start < end:
                tile_of[start:end] = n_tiles + _pack(pairs.part(start, end), own[start:end], room)
                n_tiles = int(tile_of[start:end].max()) + 1
        # Within a tile, pairs stay in the order of the queries.
        self._pairs = pairs.take(np.argsort(tile_of, kind="stable"))
        ends: list[int] = np.cumsum(np.bincount(tile_of)).tolist()
        return ends

    def _as_they_come(self, own: I64, per_query: int, limit: int) -> list[int]:
        query, ends = self._pairs.query, [0]
        while ends[-1] < len(own):
            start = ends[-1]
            cost = own[start:] + np.diff(query[start:], prepend=query[start : start + 1]) * per_query
            ends.append(start + int(np.searchsorted(np.cumsum(cost), limit, side="right")))
            assert ends[-1] > start, "a stretch is too long for the scratch"
        return ends[1:]

    def write(
        self,
        start: int,
        end: int,
        list_log: I64,
        page_log: I32,
        heavy_from: int,
        chunk: int,
        kept: int,
        out: I32,
    ) -> Tile:
        """Writes the tables of pairs ``start`` to ``end``; see :func:`make_tables`."""
        self._tile = self._pairs.part(start, end)
        self._tables = made = make_tables(self._tile, list_log, page_log, self._rows_per_page, heavy_from)
        starts = Selection(chunk=chunk, kept=kept).starts(made.query_slot)
        tables = (
            made.page, made.stretch, made.first_item, made.groups, made.rows, made.member, made.member_end,
            made.query, made.slot,
        )  # fmt: skip
        sections: list[npt.NDArray[Any]] = [*tables, *starts]
        ends = _ends_from_zero(np.array([-(-len(each) // ALIGNED) * ALIGNED for each in sections]))
        places, used = ends[:-1].tolist(), int(ends[-1])
        if used <= len(out):
            for at, values in zip(places, sections, strict=True):
                out[at : at + len(values)] = values
        return Tile(
            first_query=made.first_query,
            n_queries=made.n_queries,
            n_light=made.n_light,
            n_items=len(made.page),
            most_rows=int(made.rows.max()),
            n_slots=made.n_slots,
            used=used,
            at=tuple(places[: len(tables)]),
            starts=tuple(places[len(tables) :]),
            programs=tuple(max(1, -(-int(np.diff(each).max()) // chunk)) for each in starts[:-1]),
            places=tuple(int(each[-1]) for each in starts),
        )

    def answers(self, keys: I64, keep_max: bool, distances: F32, positions: I64) -> int:
        """Of the tile that was written last: distances and packed positions (list id << 32 | row in list) of (n, kept)
        keys, best first; -1 in empty places. ``distances`` and ``positions``: (n, k). Sorts the keys. How many places
        are filled."""
        tables, pairs, k = self._tables, self._tile, distances.shape[1]
        keys.sort(axis=1)
        keys = keys[:, :k]
        ordered = (keys >> 32).astype(np.int32)
        values = (ordered ^ ((ordered >> 31) & np.int32(0x7FFFFFFF))).view(np.float32)
        empty = keys == np.iinfo(np.int64).max
        slot = np.where(empty, 0, keys & 0xFFFFFFFF)
        pair = np.searchsorted(tables.pair_slot, slot, side="right") - 1
        row = pairs.first_row[pair] + slot - tables.pair_slot[pair]
        positions[:] = np.where(empty, -1, pairs.list[pair] << 32 | row)
        found = np.where(empty, np.float32(np.inf), values)
        distances[:] = -found if keep_max else found
        return int(empty.size - np.count_nonzero(empty))

    def member_probes(self) -> I64:
        """Of the tile that was written last: each member's place in the flat probes, (t,)."""
        return self._tile.probe.take(self._tables.pair)

    def stretch_lists(self) -> I64:
        """Of the tile that was written last: each stretch's list, (s,)."""
        return self._tables.list

    def pairs(self) -> tuple[I64, I64, I64, I64, I64]:
        """Of the tile that was written last: each pair's query, list, first row in its list, rows and first slot."""
        pairs = self._tile
        return pairs.query, pairs.list, pairs.first_row, pairs.rows, self._tables.pair_slot
