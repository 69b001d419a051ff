"""Rows that came since a generation was written: in memory, list by list, in extents like those of ``lists.bin``, so
that the scanners of these scan them.

A row is never changed where it lies, and none takes its place while a snapshot may read it: a list that grows beyond
its extent, or loses a row, is copied into another one.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hybridindex.index.attributes.added import AddedAttributes
from hybridindex.index.live.extents import move_extents, put_rows, touch_ahead
from hybridindex.index.storage.huge_pages import empty_in_huge_pages, reserves
from hybridindex.index.storage.layout import ALIGNMENT, id_slots
from hybridindex.index.storage.lists import ExtentReader
from hybridindex.types import I64, U8

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AddedLists", "AddedRows"]

#: Of the first extent of a list, and of an arena.
_FEWEST_ROWS, _FEWEST_BYTES = 8, 1 << 20
#: Bytes of an arena for each byte of its lists, and at least, where those that are never written to cost nothing; and
#: where they do.
_RESERVED, _RESERVED_BYTES, _ROOM = 16, 1 << 30, 2
#: Of an arena that has so many bytes in use, others are asked of the system before they are needed: half as many, and
#: so many at most.
_BUSY_BYTES, _MOST_AHEAD = 4 << 20, 32 << 20
#: So many bytes are used for each that is held before lists are copied: one that grows leaves as much behind as it has.
_USED = 3
#: Beside each row's code: its id, and its number among all that were ever added.
_BESIDE_BYTES = 16


@dataclass(frozen=True, eq=False)
class AddedLists:
    """The rows at one moment. Immutable."""

    #: All extents, and more.
    data: U8
    #: (nlist, 3) int64 size, capacity, byte offset; as of a generation.
    table: I64
    code_size: int
    #: How many there are.
    count: int
    #: Of these, and of others that are gone.
    attributes: AddedAttributes
    #: Whose snapshot it is; and (nlist,) int64, how often each list has lost rows. Where two snapshots have both in
    #: common, the rows of one are the first of the other's, in the same order.
    origin: object
    losses: I64

    @property
    def sizes(self) -> I64:
        """(nlist,) int64 rows of each list."""
        return self.table[:, 0]

    @cached_property
    def reader(self) -> ExtentReader:
        """Rows and ids of each list."""
        return ExtentReader(self.data, self.table, code_size=self.code_size, layout="rows", element=None)

    @cached_property
    def lists(self) -> I64:
        """(count,) int64, the list of each row, ascending."""
        return np.repeat(np.arange(len(self.table)), self.sizes)

    @cached_property
    def ids(self) -> I64:
        """(count,) int64, of each row, in the order of the lists."""
        ids: I64 = self.data.view(np.int64)[self._slots]
        return ids

    @cached_property
    def numbers(self) -> I64:
        """(count,) int64, of each row among all that were ever added."""
        numbers: I64 = self.data.view(np.int64)[self._slots + self.table[self.lists, 1]]
        return numbers

    @cached_property
    def _slots(self) -> I64:
        first: I64 = id_slots(self.table, self.code_size) - (np.cumsum(self.sizes) - self.sizes)
        return np.repeat(first, self.sizes) + np.arange(self.count)

    def codes(self) -> U8:
        """(count, code_size) uint8, of each row, in the order of the lists; a copy."""
        parts = [self.reader.rows(each, 0, self.reader.size(each)) for each in np.flatnonzero(self.sizes).tolist()]
        return np.concatenate(parts) if parts else np.empty((0, self.code_size), dtype=np.uint8)


class AddedRows:
    """One writer. :meth:`snapshot` is what others read."""

    def __init__(self, nlist: int, code_size: int) -> None:
        self._code_size = code_size
        self._row_bytes = code_size + _BESIDE_BYTES
        self._granule = 8 // math.gcd(8, code_size)
        self._table: I64 = np.zeros((nlist, 3), dtype=np.int64)
        self._origin, self._losses = object(), np.zeros(nlist, dtype=np.int64)
        self._data: U8 = np.empty(0, dtype=np.uint8)
        self._free = 0
        #: Where bytes begin that the system may not have given yet.
        self._untouched = 0
        #: Bytes that may be used before somebody looks what of them is held.
        self._most = 0
        #: The list of each id.
        self._list_of: dict[int, int] = {}
        #: Rows that were ever added, and the largest of their ids; -1: none.
        self._n_ever = 0
        self.largest_id = -1
        self._attributes = AddedAttributes()

    def __len__(self) -> int:
        return len(self._list_of)

    def __contains__(self, row_id: int) -> bool:
        return row_id in self._list_of

    @property
    def nbytes(self) -> int:
        """Of extents and attributes, those of rows that are gone included."""
        return self._free + self._attributes.nbytes

    @property
    def is_short(self) -> bool:
        """Whether :meth:`touch_ahead` should be called soon: who writes would wait for the system's memory."""
        if self._free <= _BUSY_BYTES or max(self._untouched, self._free) >= len(self._data):
            return False
        return self._untouched - self._free < self._ahead() // 2

    def touch_ahead(self) -> None:
        """Asks the system for the memory of rows to come. By one thread, beside the writer."""
        if self.is_short:
            data = self._data
            start = min(max(self._untouched, self._free), len(data))
            end = min(self._free + self._ahead(), len(data))
            self._untouched = max(start, end)
            touch_ahead(data, start, max(0, end - start))

    def _ahead(self) -> int:
        return min(self._free // 2, _MOST_AHEAD)

    def snapshot(self) -> AddedLists | None:
        """The rows that are there now; None: none."""
        if not self._list_of:
            return None
        table = self._table.copy()
        table.setflags(write=False)
        attributes = self._attributes.first(self._n_ever)
        losses = self._losses.copy()
        return AddedLists(self._data, table, self._code_size, len(self._list_of), attributes, self._origin, losses)

    def insert(self, lists: I64, ids: I64, codes: U8, attributes: bytes) -> None:
        """Adds rows; none of the ids is there."""
        if not len(ids):
            return
        order = np.argsort(lists, kind="stable")
        touched, starts, counts = np.unique(lists[order], return_index=True, return_counts=True)
        needed = self._table[touched, 0] + counts
        short = np.flatnonzero(needed > self._table[touched, 1])
        capacity = self._whole(np.maximum(2 * needed[short], _FEWEST_ROWS))
        self._make_room(int((capacity * self._row_bytes + ALIGNMENT).sum()))
        self._move(touched[short], capacity, self._data)
        size, rows, offset = self._table[touched].T
        behind = np.arange(len(ids)) - np.repeat(starts, counts)
        slots = np.repeat((offset + rows * self._code_size) // 8 + size, counts) + behind
        words = self._data.view(np.int64)
        words[slots] = ids[order]
        words[slots + np.repeat(rows, counts)] = self._n_ever + order
        first = offset + size * self._code_size
        put_rows(self._data, codes, order, np.repeat(first, counts) + behind * self._code_size)
        self._table[touched, 0] = needed
        self._list_of.update(zip(ids.tolist(), lists.tolist(), strict=True))
        self._attributes.append(attributes, len(ids))
        self._n_ever += len(ids)
        self.largest_id = max(self.largest_id, int(ids.max()))

    def remove(self, ids: Sequence[int]) -> None:
        """Takes rows out; all of the ids are there."""
        touched = np.unique([self._list_of.pop(each) for each in ids])
        self._losses[touched] += 1
        sizes = self._table[touched, 0]
        capacity = self._whole(np.maximum(sizes + sizes // 8, _FEWEST_ROWS))
        self._make_room(int((capacity * self._row_bytes + ALIGNMENT).sum()))
        first, words = id_slots(self._table[touched], self._code_size), self._data.view(np.int64)
        ends = np.cumsum(sizes)
        slots = np.repeat(first - (ends - sizes), sizes) + np.arange(int(sizes.sum()))
        going = np.flatnonzero(_is_in(words[slots], np.sort(ids)))
        # Of each list, the positions of rows that go.
        starts = np.searchsorted(going, np.concatenate([[0], ends]))
        positions = going - np.repeat(ends - sizes, np.diff(starts))
        self._move(touched, capacity, self._data, (starts, positions))
        # Of a list that is empty now, nothing is left.
        self._table[touched[self._table[touched, 0] == 0]] = 0

    def _whole(self, rows: I64) -> I64:
        """Capacities behind which ids begin at a multiple of 8 bytes."""
        return -(-rows // self._granule) * self._granule

    def _make_room(self, nbytes: int) -> None:
        """Copies all lists into a new arena where this one has no ``nbytes`` left, or holds little else than what lists
        have left behind."""
        used = self._free + nbytes
        if used <= min(self._most, len(self._data)):
            return
        there = np.flatnonzero(self._table[:, 0])
        live = int((self._table[there, 1] * self._row_bytes + ALIGNMENT).sum()) + nbytes
        self._most = max(_USED * live, _FEWEST_BYTES)
        if used <= min(self._most, len(self._data)):
            return
        old, self._data, self._free, self._untouched = self._data, _arena(live), 0, 0
        self._move(there, self._table[there, 1], old)
        self._table[self._table[:, 0] == 0] = 0

    def _move(self, lists: I64, capacity: I64, old: U8, gone: tuple[I64, I64] | None = None) -> None:
        """Copies lists from the arena ``old`` into new extents.

        Args:
            gone: where the rows that go begin for each list, (m + 1,), and their positions, ascending; None: all stay.
        """
        starts, positions = gone or (np.zeros(len(lists) + 1, dtype=np.int64), np.empty(0, dtype=np.int64))
        before = self._table[lists]
        after = before.copy()
        after[:, 0] -= np.diff(starts)
        after[:, 1] = capacity
        nbytes = -(-capacity * self._row_bytes // ALIGNMENT) * ALIGNMENT
        ends = self._free + np.cumsum(nbytes)
        after[:, 2] = ends - nbytes
        move_extents(old, self._data, self._code_size, before, after, starts, positions)
        self._table[lists] = after
        self._free = int(ends[-1]) if len(lists) else self._free


def _is_in(ids: I64, ascending: I64) -> npt.NDArray[np.bool_]:
    at = np.minimum(np.searchsorted(ascending, ids), len(ascending) - 1)
    found: npt.NDArray[np.bool_] = ascending[at] == ids
    return found


def _arena(nbytes: int) -> U8:
    """New memory for so many bytes and what they become, taken where it is written to."""
    whole = -(-nbytes // ALIGNMENT) * ALIGNMENT
    if reserves():
        with suppress(MemoryError):  # addresses may be limited
            return empty_in_huge_pages(max(_RESERVED * whole, _RESERVED_BYTES), reserve=True)
    return empty_in_huge_pages(max(_ROOM * whole, _FEWEST_BYTES))
