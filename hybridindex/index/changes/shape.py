"""The rows that are left, read at a pace, and which lists they shall have."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from hybridindex.errors import BuildError
from hybridindex.index.build import default_nlist
from hybridindex.index.changes.reshape import Shape, Thresholds, reshape
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.live.convert import keeps_lists
from hybridindex.index.live.left_rows import LeftRows
from hybridindex.index.live.state import LiveRows
from hybridindex.index.storage.commit import Progress, no_progress
from hybridindex.processes import usual_switch_interval
from hybridindex.types import F32

__all__ = ["CHUNK_BYTES", "LeftRowsAtPace", "Pace", "nlist_ratio", "reshapes", "shape_of"]

#: Rows are read and written so many bytes at a time.
CHUNK_BYTES = 16 << 20
#: Lists stay as they are where so few rows came or went, in parts of those that are there.
_LITTLE = 0.01


class Pace:
    """Sleeps, so that work takes no more than a share of the time."""

    def __init__(self, share: float, stopping: Callable[[], bool]) -> None:
        self._share, self._stopping = share, stopping
        self._began = time.monotonic()

    def rest(self) -> None:
        """After some work.

        Raises:
            BuildError: it shall stop.
        """
        if self._stopping():
            raise BuildError("the compaction was stopped; everything is as it was")
        now = time.monotonic()
        if self._share < 1:
            with usual_switch_interval():
                time.sleep(min(5.0, (now - self._began) * (1 / self._share - 1)))
        self._began = time.monotonic()


class LeftRowsAtPace(LeftRows):
    """The rows that are left, read at a pace."""

    def __init__(self, index: IVFIndex, live: LiveRows | None, pace: Pace) -> None:
        super().__init__(index, live)
        self.pace = pace

    def decoded(self) -> Iterator[tuple[int, F32]]:
        """(list, (n, d) float32) of each."""
        codec, nbytes = self.index.device_codec(), 0
        assert codec is not None
        for list_id in range(self.index.nlist):
            codes = self.of(list_id)[0]
            yield list_id, codec.decode(codes, self.index.centroids[list_id])
            nbytes += codes.nbytes
            if nbytes > CHUNK_BYTES:
                nbytes = 0
                self.pace.rest()


def reshapes(rows: LeftRows) -> bool:
    """Whether lists may be others afterwards."""
    return not keeps_lists(rows.index) and rows.changed.sum() > _LITTLE * max(int(rows.sizes.sum()), 1)


def shape_of(rows: LeftRowsAtPace, thresholds: Thresholds, report: Progress = no_progress) -> Shape | None:
    """The lists to come; None: they stay as they are."""
    index = rows.index
    if not reshapes(rows):
        return None
    report("reshape", 0, 3)
    # An import may choose lists by another metric than it compares rows by.
    by_products = index.coarse.inner_product
    unit = (by_products or index.metric == "ip") and np.allclose(np.linalg.norm(index.centroids, axis=1), 1, atol=1e-3)
    passes = 0

    def decoded() -> Iterator[tuple[int, F32]]:
        nonlocal passes
        passes = min(passes + 1, 3)
        yield from rows.decoded()
        report("reshape", passes, 3)

    return reshape(
        decoded,
        np.array(index.centroids),
        rows.sizes,
        rows.changed,
        rows.sizes > 1.5 * index.list_sizes,
        mean=_rows_per_list(index, max(1, int(rows.sizes.sum()))),
        inner_product=by_products,
        unit=bool(unit),
        thresholds=thresholds,
        seed=index.generation,
    )


def nlist_ratio(index: IVFIndex) -> float:
    """How many lists it was built with, in multiples of the usual number."""
    return float(index.manifest.notes.get("nlist_ratio", index.nlist / default_nlist(max(index.count, 1))))


def _rows_per_list(index: IVFIndex, n: int) -> float:
    """That lists of ``n`` rows should have: an index that grows has longer lists, as one that is built of as many."""
    return max(1.0, n / max(1.0, nlist_ratio(index) * default_nlist(n)))
