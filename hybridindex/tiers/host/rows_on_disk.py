"""Rows that stay on disk while codes are scanned: those of the candidates are read when they are compared.

The page cache keeps what memory has room for. Nothing is read beside the pages that are asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import PAGESIZE

import numpy as np

from hybridindex.extension import native
from hybridindex.index.ivf import IVFIndex
from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.types import I64

__all__ = ["RowsOnDisk"]

_ROW_MASK = (1 << POSITION_BITS) - 1
#: Their pages are sorted, 16 bytes each at least.
_POSITIONS_AT_ONCE = 1 << 20


class RowsOnDisk:
    """One reader of single rows of an index. Thread-safe; answers never depend on it."""

    def __init__(self, index: IVFIndex) -> None:
        """``index``: by its rows."""
        self._data, self._extents, self._row_bytes = index.mapped_lists(), index.extents(), index.code_size
        self._mapped = index.integrity.mapped
        #: Whether the system says which pages are in memory; where it does not, all of them are asked for.
        self.sees_memory = self._mapped.tells_memory
        self._lock = threading.Lock()
        self._n_pages = 0
        self._mapped.read_single_rows(self)

    def ask_for(self, positions: I64, *, rows: bool = True) -> int:
        """Has the system read what is not in memory, all at once, and does not wait.

        Args:
            positions: (n, r) int64, contiguous; see :mod:`hybridindex.tiers.contract.positions`. -1: none.
            rows: False: of the ids alone.

        Returns:
            The number of pages that were asked for; 0 without the extension, where faults read them one by one.
        """
        if native is None:
            return 0
        step, asked = max(1, _POSITIONS_AT_ONCE // max(1, positions.shape[1])), 0
        for start in range(0, len(positions), step):
            some = positions[start : start + step]
            asked += native.ask_for_rows(self._data, self._extents, self._row_bytes, some, rows, self.sees_memory)
        with self._lock:
            self._n_pages += asked
        return asked

    def take_pages(self) -> int:
        """Pages that were asked for since this was asked last."""
        with self._lock:
            taken, self._n_pages = self._n_pages, 0
        return taken

    def forget(self, positions: I64) -> int:
        """Lets go of the pages of rows and ids at ``positions`` (n, r), as far as the system does: not of those that
        another process has mapped. Never where lists were mended: their good bytes would go.

        Returns:
            The number of these pages.
        """
        found = positions[positions >= 0]
        row, (_, capacity, offset) = found & _ROW_MASK, self._extents[found >> POSITION_BITS].T
        at = offset + row * self._row_bytes
        first, last = at // PAGESIZE, (at + self._row_bytes - 1) // PAGESIZE
        across = int((last - first).max(initial=0)) + 1
        ids = (offset + capacity * self._row_bytes + 8 * row) // PAGESIZE
        pages = np.unique(np.concatenate([*(np.minimum(first + step, last) for step in range(across)), ids]))
        for run in np.split(pages, np.flatnonzero(np.diff(pages) > 1) + 1):
            if run.size:
                self._mapped.read_again(int(run[0]) * PAGESIZE, (int(run[-1]) + 1) * PAGESIZE)
        return pages.size

    def forget_all(self) -> None:
        """As :meth:`forget`, of all rows; those that huge pages brought go only together."""
        self._mapped.read_again(0, len(self._data))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Meanwhile the system reads ahead, for who reads all rows."""
        self.close()
        try:
            yield
        finally:
            self._mapped.read_single_rows(self)

    def close(self) -> None:
        """Pages are read as before. Closing twice is harmless."""
        self._mapped.end_single_rows(self)
