"""Ids of a generation whose rows were deleted, and how answers do without them. Nothing is moved where lists lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.extension import native
from hybridindex.types import F32, I64

__all__ = ["Deleted"]

#: Places of an answer that are spare at least, while rows are deleted.
_FEWEST_SPARE = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Deleted:
    """Deleted ids at one moment. Immutable."""

    #: (m,) int64, ascending; m >= 1.
    ids: I64
    #: Whether larger distances are nearer.
    keep_max: bool

    def contains(self, ids: I64) -> npt.NDArray[np.bool_]:
        """Of which ids, of any shape, it holds."""
        at = np.searchsorted(self.ids, ids)
        found: npt.NDArray[np.bool_] = self.ids[np.minimum(at, len(self.ids) - 1)] == ids
        return found

    def spare(self, k: int, count: int) -> int:
        """How many more places an answer needs, so that ``k`` nearly always stay; of an index of ``count`` rows."""
        return _FEWEST_SPARE + math.ceil(2 * k * self.share(count))

    def share(self, count: int) -> float:
        """Of the rows of an index of ``count``; of one with repeated ids, about."""
        return min(1.0, len(self.ids) / max(count, 1))

    def leave_out(self, distances: F32, ids: I64, k: int) -> tuple[F32, I64] | None:
        """The first ``k`` of each row of an answer (n, k + spare) that were not deleted; None where a row has fewer of
        them and might have had more."""
        if native is None or not ids.size:
            return self.leave_out_reference(distances, ids, k)
        nearest, their_ids = np.empty((len(ids), k), dtype=np.float32), np.empty((len(ids), k), dtype=np.int64)
        answer = (np.ascontiguousarray(distances), np.ascontiguousarray(ids))
        return (nearest, their_ids) if native.leave_out(nearest, their_ids, *answer, self.ids, self.keep_max) else None

    def leave_out_reference(self, distances: F32, ids: I64, k: int) -> tuple[F32, I64] | None:
        """:meth:`leave_out` in numpy."""
        gone = self.contains(ids)
        if not gone[:, :k].any():
            return distances[:, :k].copy(), ids[:, :k].copy()
        left = ids.shape[1] - gone.sum(axis=1)
        if ((left < k) & (ids[:, -1] >= 0)).any():
            return None
        # What was deleted comes behind all others, and leaves empty places.
        order = np.argsort(gone, axis=1, kind="stable")[:, :k]
        nearest: F32 = np.take_along_axis(distances, order, axis=1)
        their_ids: I64 = np.take_along_axis(ids, order, axis=1)
        beyond = np.arange(k) >= left[:, None]
        nearest[beyond], their_ids[beyond] = -np.inf if self.keep_max else np.inf, -1
        return nearest, their_ids
