"""Rows that stay on disk while codes are scanned: those of the candidates are read when they are compared.

The page cache keeps what memory has room for. Nothing is read beside the pages that are asked for.
"""

from __future__ import annotations

import threading

from hybridindex.extension import native
from hybridindex.index.ivf import IVFIndex
from hybridindex.types import I64

__all__ = ["RowsOnDisk"]


class RowsOnDisk:
    """One reader of single rows of an index. Thread-safe; answers never depend on it."""

    def __init__(self, index: IVFIndex) -> None:
        """``index``: by its rows."""
        self._data, self._extents, self._row_bytes = index.mapped_lists(), index.extents(), index.code_size
        self._mapped = index.integrity.mapped
        self._seen = self._mapped.tells_memory
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
        asked: int = native.ask_for_rows(self._data, self._extents, self._row_bytes, positions, rows, self._seen)
        with self._lock:
            self._n_pages += asked
        return asked

    def take_pages(self) -> int:
        """Pages that were asked for since this was asked last."""
        with self._lock:
            taken, self._n_pages = self._n_pages, 0
        return taken

    def close(self) -> None:
        """Pages are read as before. Closing twice is harmless."""
        self._mapped.end_single_rows(self)
