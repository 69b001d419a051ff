"""Which rows an index has now."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybridindex.index.filters.row_filter import RowFilters, ids_of
from hybridindex.index.filters.row_numbers import row_numbers
from hybridindex.index.ivf import IVFIndex
from hybridindex.types import I64

__all__ = ["are_there", "ids_where"]


def are_there(index: IVFIndex, ids: I64) -> npt.NDArray[np.bool_]:
    """Which of (n,) int64 ids have rows now, by the index on disk.

    Raises:
        DamagedListsError: ids of some lists cannot be read. IndexFormatError: the log cannot be read.
    """
    index = index.rows
    live = index.live.read_now()
    numbers, _ = row_numbers(index)
    if len(numbers.unknown):
        raise index.integrity.error(numbers.unknown.tolist())
    found: npt.NDArray[np.bool_] = np.diff(numbers.of_each(ids)[1]) > 0
    if live is not None:
        if live.deleted is not None:
            found &= ~live.deleted.contains(ids)
        if live.added is not None:
            found |= np.isin(ids, live.added.ids)
    return found


def ids_where(index: IVFIndex, where: str) -> I64:
    """(m,) int64: ids of the rows of which a condition is true now.

    Raises:
        InvalidInputError: it is none, or names no attribute. DamagedListsError, IndexFormatError: as :func:`are_there`.
    """
    index = index.rows
    live = index.live.read_now()
    filters = RowFilters(index)
    made = filters.make(None, None, where)
    found: I64 = np.unique(ids_of(index, made))
    if live is None:
        return found
    if live.deleted is not None:
        found = found[~live.deleted.contains(found)]
    return found if live.added is None else np.union1d(found, filters.of_added(made, live.added).ids)
