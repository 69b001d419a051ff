"""Lists of a share of one generation that have the same bytes in another: a node that goes on to that one has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from hybridindex.errors import NotHeldError
from hybridindex.index.ivf import IVFIndex
from hybridindex.types import I64

__all__ = ["SameLists"]


class SameLists:
    """A source of lists (:class:`hybridindex.index.share.source.ListSource`, without files)."""

    def __init__(self, index: IVFIndex, other: IVFIndex) -> None:
        """
        Args:
            index: whose lists are wanted.
            other: a share of another generation, which stays open.
        """
        assert other.share is not None
        self._share = other.share
        was = index.manifest.lists_in(other.manifest)
        #: (nlist,) int64 list of ``other``, -1: none is known.
        self._was: I64 = np.full(index.nlist, -1, dtype=np.int64) if was is None else was
        #: (nlist,) bool: lists that it gives.
        self.has = self._was >= 0
        now, then = index.integrity.digests, other.integrity.digests
        if now is None or then is None:
            self.has[:] = False
            return
        self.has[self.has] = (now[self.has] == then[self._was[self.has]]).all(axis=1)
        self.has[self.has] = other.share.held[self._was[self.has]]

    def read(self, lists: Sequence[int]) -> Iterator[tuple[int, bytes, bytes]]:
        """As :meth:`hybridindex.index.share.source.ListSource.read`; those that went meanwhile are left out."""
        for list_id in lists:
            with suppress(NotHeldError):
                for _, codes, ids in self._share.read([int(self._was[list_id])]):
                    yield list_id, codes, ids
