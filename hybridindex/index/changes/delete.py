"""Deleting rows of an index by their ids. Nothing is moved: searches leave them out from then on."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridindex.config import check_ids
from hybridindex.errors import BuildError, InvalidInputError
from hybridindex.index.attributes.stored import find_attributes
from hybridindex.index.filters.row_filter import RowFilters, ids_of
from hybridindex.index.filters.row_numbers import row_numbers
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.storage.generation import read_current, writers_lock
from hybridindex.types import I64

__all__ = ["delete"]

#: How long another process may write before a deletion is refused.
_WAIT_S = 10.0


def delete(index: IVFIndex, ids: Any = None, where: str | None = None) -> int:
    """Deletes rows; durable when it returns, and seen by every search of this process that begins then. Other processes
    see it within :data:`hybridindex.index.log.deleted.LOOK_AGAIN_S`.

    Args:
        ids: (m,) integers; those that are not there, or no longer, change nothing. An id of several rows loses all.
        where: or a condition on attributes: the rows of which it is true now.

    Returns:
        How many ids were deleted.

    Raises:
        InvalidInputError: neither or both are given, they are no integers, or the condition is none.
        BuildError: another process is writing, or the generation was replaced.
        DamagedListsError: ids of some lists cannot be read.
        FileError, DiskFullError, NotWritableError: nothing was deleted.
    """
    index = index.rows
    index.mapped_model()  # is it open?
    if (ids is None) == (where is None):
        raise InvalidInputError("ids and where are both given, or missing; expected one of them")
    given = None if ids is None else np.unique(check_ids("ids", ids))
    folder = index.integrity.folder
    with writers_lock(index.path, timeout_s=_WAIT_S):
        if read_current(index.path) != folder:
            raise BuildError(f"{folder.name} of {index.path} was replaced; open the index again, and delete there")
        there = _ids_there(index, given, where)
        with index.deleted.appending() as (before, append):
            fresh = there if before is None else there[~before.contains(there)]
            if len(fresh):
                append(fresh)
    return len(fresh)


def _ids_there(index: IVFIndex, given: I64 | None, where: str | None) -> I64:
    """(m,) int64: those of the given ids that have rows; or those of which the condition is true, by the attributes on
    disk. With the writers' lock held."""
    while True:
        numbers, seen = row_numbers(index)
        if len(numbers.unknown):
            raise index.integrity.error(numbers.unknown.tolist())
        if given is not None:
            return given[np.diff(numbers.of_each(given)[1]) > 0]
        index.attributes, index.attributes_problem = find_attributes(index.integrity.folder, index.manifest)
        made = RowFilters(index).make(None, None, where)
        there: I64 = np.unique(ids_of(index, made))
        # Else ids may have been read from damaged bytes.
        if seen == made.seen == index.integrity.marks[0]:
            return there
