"""The work of probes, and probes under a mask. Pure numpy: it runs between timed runs, where speed does not matter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.types import F32, I64

__all__ = ["MaskedProbes", "ProbeWork", "keep_probes", "resident_counts", "work_of"]

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeWork:
    """Work of a batch of probes; fields of :class:`hybridindex.types.StageSample`."""

    probes: int
    work_bytes: int
    max_work_bytes: int
    unique_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedProbes:
    """The probes that a mask keeps, compacted: only queries with work, their own probes first, in coarse order."""

    #: (m,) int64 rows of the batch.
    rows: I64
    #: (m, w) int64 list ids; short rows end in -1.
    probes: I64
    #: (m, w) float32.
    coarse_distances: F32
    work: ProbeWork
    #: Smallest fraction, by bytes, that the mask takes away from a query that has work.
    min_taken: float


def work_of(probes: I64, list_bytes: I64) -> ProbeWork:
    """Work of (n, p) probes, -1 = none."""
    per_query = np.where(probes >= 0, list_bytes[probes], 0).sum(axis=1)
    return ProbeWork(
        probes=int((probes >= 0).sum()),
        work_bytes=int(per_query.sum()),
        max_work_bytes=int(per_query.max(initial=0)),
        unique_bytes=int(list_bytes[np.unique(probes[probes >= 0])].sum()),
    )


def keep_probes(probes: I64, coarse_distances: F32, keep: Mask, list_bytes: I64) -> MaskedProbes:
    """Keeps the probes of lists where ``keep`` (nlist,) bool is set, as the router's split would."""
    mine = (probes >= 0) & keep[probes]
    all_bytes = np.where(probes >= 0, list_bytes[probes], 0)
    total, kept_bytes = all_bytes.sum(axis=1), np.where(mine, all_bytes, 0).sum(axis=1)
    busy = total > 0
    rows = np.flatnonzero(mine.any(axis=1))
    width = int(mine.sum(axis=1).max(initial=0))
    # A stable sort of "not mine" moves a row's own probes to the front and keeps their order.
    order = np.argsort(~mine[rows], axis=1, kind="stable")[:, :width]
    own = np.take_along_axis(mine[rows], order, axis=1)
    kept = np.where(own, np.take_along_axis(probes[rows], order, axis=1), -1)
    return MaskedProbes(
        rows=rows,
        probes=kept,
        coarse_distances=np.where(own, np.take_along_axis(coarse_distances[rows], order, axis=1), np.float32(0)),
        work=work_of(kept, list_bytes),
        min_taken=float((1.0 - kept_bytes[busy] / total[busy]).min()) if busy.any() else 0.0,
    )


def resident_counts(coverages: tuple[float, ...], nlist: int) -> list[int]:
    """Coverages as numbers of lists: ascending, distinct, neither none nor all."""
    return sorted({n for c in coverages if 0 < (n := round(c * nlist)) < nlist})
