"""What the changes of an index have come to: which rows of its generation are gone, and which came."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.index.live.added import AddedLists, AddedRows
from hybridindex.index.live.deleted import Deleted
from hybridindex.index.log.change import Change, no_ids
from hybridindex.types import I64

__all__ = ["LiveRows", "LiveState"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveRows:
    """What differs from the generation at one moment. Immutable."""

    #: Of the last change.
    number: int
    #: Ids whose rows in the generation are gone; None: none.
    deleted: Deleted | None
    #: Rows that came; None: none.
    added: AddedLists | None

    @property
    def differs(self) -> bool:
        """Whether anything does."""
        return self.deleted is not None or self.added is not None


class LiveState:
    """One writer, who publishes a :class:`LiveRows` of it."""

    def __init__(self, nlist: int, code_size: int, *, keep_max: bool) -> None:
        self._keep_max = keep_max
        self._gone: I64 = no_ids()
        #: The same, as it was published.
        self._deleted: Deleted | None = None
        #: Not in :attr:`_gone` yet.
        self._fresh: list[I64] = []
        self.added = AddedRows(nlist, code_size)

    def apply(self, change: Change) -> None:
        """Its ids are gone, then its rows are there."""
        there = np.fromiter((each in self.added for each in change.gone.tolist()), np.bool_, len(change.gone))
        if there.any():
            self.added.remove(change.gone[there].tolist())
        if not there.all():
            self._fresh.append(change.gone[~there])
        self.added.insert(change.lists, change.ids, change.codes, change.attributes)

    @property
    def gone(self) -> I64:
        """Ids whose rows in the generation are gone, ascending, read-only."""
        if self._fresh:
            fresh = np.unique(np.concatenate(self._fresh))
            fresh = fresh[~_holds(self._gone, fresh)]
            self._gone = np.insert(self._gone, np.searchsorted(self._gone, fresh), fresh)
            self._gone.setflags(write=False)
            self._fresh = []
        return self._gone

    def is_gone(self, ids: I64) -> npt.NDArray[np.bool_]:
        """Of which ids the rows in the generation, where there are any, are gone."""
        return _holds(self.gone, ids)

    def rows_at(self, number: int) -> LiveRows:
        """A snapshot, behind change ``number``."""
        added, gone = self.added.snapshot(), self.gone
        if not len(gone):
            self._deleted = None
        elif self._deleted is None or self._deleted.ids is not gone:
            self._deleted = Deleted(ids=gone, keep_max=self._keep_max)
        return LiveRows(number=number, deleted=self._deleted, added=added)


def _holds(ascending: I64, ids: I64) -> npt.NDArray[np.bool_]:
    if not len(ascending):
        return np.zeros(ids.shape, dtype=np.bool_)
    at = np.minimum(np.searchsorted(ascending, ids), len(ascending) - 1)
    found: npt.NDArray[np.bool_] = ascending[at] == ids
    return found
