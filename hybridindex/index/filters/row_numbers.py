"""Where the rows of ids are. A row's number: rows count through all lists, one list after the other."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from hybridindex.index.share.beside import read_ids
from hybridindex.types import I64

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex

__all__ = ["RowNumbers", "row_numbers"]

#: Of open indexes, and how many changes of the quarantine they know of.
_known: WeakKeyDictionary[IVFIndex, tuple[RowNumbers, int]] = WeakKeyDictionary()
_making = threading.Lock()


def _renew_lock() -> None:
    """In a child process, which has the lock as it was, and not the thread that held it."""
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)

#: A table by id has so many places for each row at most; where ids are sparser, they are sorted.
_PLACES_PER_ROW = 4


def row_numbers(index: IVFIndex) -> tuple[RowNumbers, int]:
    """Those of an open index, kept for it, and the changes of its quarantine that they know of: ids that were read
    before may have been damaged, or be good again."""
    index, integrity = index.rows, index.integrity
    with _making:
        while True:
            known = _known.get(index)
            if known is not None and known[1] == integrity.marks[0]:
                return known
            if integrity.marks[0] != integrity.seen:
                integrity.catch_up()
            seen = integrity.seen
            # A share knows them all, whatever it holds.
            numbers = RowNumbers(index) if known is None or index.share is None else known[0]
            _known[index] = numbers, seen


def _known_ids(index: IVFIndex, unknown: I64) -> I64:
    """(m,) int64 ids of the rows of all lists but some, in their order."""
    lists = np.setdiff1d(np.arange(index.nlist), unknown).tolist()
    ids: I64 = np.empty(int(index.list_sizes[lists].sum()), dtype=np.int64)
    end = 0
    # One by one: pages that nobody has touched take long, and one call for all would keep the GIL meanwhile.
    for part in map(index.list_ids, lists):
        ids[end : end + len(part)] = part
        end += len(part)
    return ids


class RowNumbers:
    """Rows of one index by id, of a share those of the whole index. Immutable, from any thread. An id may have several
    rows: imported indexes repeat some.

    Takes 8 to 32 bytes a row.
    """

    def __init__(self, index: IVFIndex) -> None:
        """Reads the ids of all rows, but of lists in quarantine; of a share, of all.

        Raises:
            CorruptIndexError, UnreadableIndexError: the ids that a share has are damaged, or cannot be read.
        """
        index, integrity = index.rows, index.rows.integrity
        of_all = None
        if index.share is not None:
            assert integrity.digests is not None
            of_all = read_ids(integrity.folder, integrity.spans, integrity.digests)
        #: Lists whose ids nobody knows: (m,) int64.
        self.unknown: I64 = np.array([] if of_all is not None else integrity.lists_in_quarantine(), dtype=np.int64)
        #: (nlist + 1,) int64: number of the first row of each list; the last: how many rows there are.
        self.first: I64 = np.concatenate([[0], np.cumsum(index.list_sizes)]).astype(np.int64)
        ids = _known_ids(index, self.unknown) if of_all is None else of_all
        #: -1: there is none.
        self.largest_id = int(ids.max(initial=-1))
        rows = np.arange(self.count)
        if len(self.unknown):
            rows = rows[np.repeat(~np.isin(np.arange(index.nlist), self.unknown), index.list_sizes)]
        #: (largest id + 1,) int64: the row of each id, or -1. Or None, and ids in order beside their rows.
        self._table: I64 | None = None
        self._ids = self._rows = np.empty(0, dtype=np.int64)
        if len(ids) and ids.min() >= 0 and self.largest_id < _PLACES_PER_ROW * len(ids):
            table = np.full(self.largest_id + 1, -1, dtype=np.int64)
            table[ids] = rows
            if (table[ids] == rows).all():  # else an id has several rows
                self._table = table
                return
        order = np.argsort(ids, kind="stable")
        self._ids, self._rows = ids[order], rows[order]

    @property
    def count(self) -> int:
        """How many rows there are."""
        return int(self.first[-1])

    def of_ids(self, ids: I64) -> I64:
        """Numbers of the rows of (m,) int64 ids; ids that no row has are left out."""
        return self.of_each(ids)[0]

    def of_each(self, ids: I64) -> tuple[I64, I64]:
        """Numbers of the rows of (m,) int64 ids, one id after the other; and (m + 1,) where those of each begin."""
        if self._table is not None:
            rows = np.full(len(ids), -1, dtype=np.int64)
            known = (ids >= 0) & (ids < len(self._table))
            rows[known] = self._table[ids[known]]
            there = rows >= 0
            return rows[there], np.concatenate([[0], np.cumsum(there)])
        starts, stops = np.searchsorted(self._ids, ids, "left"), np.searchsorted(self._ids, ids, "right")
        counts = stops - starts
        before = np.cumsum(counts) - counts
        at = np.repeat(starts - before, counts) + np.arange(int(counts.sum()))
        return self._rows[at], np.concatenate([[0], np.cumsum(counts)])
