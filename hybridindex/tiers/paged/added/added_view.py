"""Rows that were added since the lists were written, as scanners of pages see them: lists of an index, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex.index.ivf import IVFIndex
from hybridindex.index.live.added import AddedLists
from hybridindex.index.storage.layout import id_slots
from hybridindex.types import F32, I64

__all__ = ["AddedView"]


class AddedView:
    """What scanners ask of an index."""

    rabitq = None

    def __init__(self, index: IVFIndex, added: AddedLists, lists: npt.NDArray[np.bool_]) -> None:
        """``lists``: (nlist,) which are there."""
        self._index, self._added = index, added
        #: (nlist,) int64 rows of each list.
        self.list_sizes: I64 = np.where(lists, added.sizes, 0)

    @property
    def nlist(self) -> int:
        return self._index.nlist

    @property
    def scan_dim(self) -> int:
        return self._index.scan_dim

    @property
    def code_size(self) -> int:
        return self._index.code_size

    @property
    def metric(self) -> Any:
        return self._index.metric

    @property
    def centroids(self) -> F32:
        return self._index.centroids

    def extents(self) -> I64:
        """(nlist, 3) int64 size, capacity, byte offset."""
        return self._added.table

    def list_ids(self, list_id: int) -> I64:
        ids: I64 = self._added.reader.ids(list_id)
        return ids

    def ids_at(self, lists: I64, rows: I64) -> I64:
        """Ids of rows by list and place."""
        first = id_slots(self._added.table, self._added.code_size)
        ids: I64 = self._added.data.view(np.int64)[first[lists] + rows]
        return ids

    def ids_of_lists(self, lists: Sequence[int] | I64) -> tuple[I64, I64]:
        """Ids of many lists, and where those of each begin; see :meth:`IVFIndex.ids_of_lists`."""
        parts = [self.list_ids(each) for each in np.asarray(lists).tolist()]
        starts = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)[:-1]
        return np.concatenate([np.empty(0, np.int64), *parts]), starts
