"""The rows of an index at one moment, list by list: what is left of the generation, then what came since."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hybridindex.index.live.state import LiveRows
from hybridindex.types import I64, U8

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex

__all__ = ["LeftRows"]


class LeftRows:
    """Of an index whose lists hold rows, one after the other."""

    def __init__(self, index: IVFIndex, live: LiveRows | None) -> None:
        """``live``: what has changed; None: nothing."""
        self.index = index
        self.added = None if live is None else live.added
        deleted = None if live is None else live.deleted
        self._stays = [
            None if deleted is None else np.flatnonzero(~deleted.contains(index.list_ids(each)))
            for each in range(index.nlist)
        ]
        sizes = index.list_sizes.tolist()
        left: I64 = np.array([n if at is None else len(at) for n, at in zip(sizes, self._stays, strict=True)])
        came = np.zeros(index.nlist, dtype=np.int64) if self.added is None else self.added.sizes
        #: (nlist,) int64 rows of each list; and how many came to it, or went.
        self.sizes: I64 = left + came
        self.changed: I64 = index.list_sizes - left + came

    def of(self, list_id: int) -> tuple[U8, I64, I64]:
        """Codes and ids of the rows of a list, and where each was: its position in the list of the generation, or, from
        that one's size on, in that of what came."""
        index, stays, added = self.index, self._stays[list_id], self.added
        codes, ids = index.list_codes(list_id), index.list_ids(list_id)
        where = np.arange(len(ids)) if stays is None else stays
        if stays is not None:
            codes, ids = codes[stays], ids[stays]
        if added is None or not added.sizes[list_id]:
            return codes, ids, where
        came = added.reader.rows(list_id, 0, added.reader.size(list_id)), added.reader.ids(list_id)
        where = np.concatenate([where, int(index.list_sizes[list_id]) + np.arange(len(came[1]))])
        return np.concatenate([codes, came[0]]), np.concatenate([ids, came[1]]), where
