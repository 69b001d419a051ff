"""What the scanners of pages of product-quantized rows share that run on any device. Their distances are those of the
host's native scan, to the bit: see :mod:`hybridindex.index.pq.distances`.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from hybridindex.errors import OutOfBudgetError
from hybridindex.index.filters.row_masks import RowMasks
from hybridindex.index.pq.form import PqForm
from hybridindex.tiers.contract.positions import ids_of_positions
from hybridindex.tiers.paged.page_scanner import Candidates, PageScanner
from hybridindex.types import F32, I64

__all__ = ["PqPageScanner"]

#: Rows beyond k that are looked at: what is as far as the last answer is ordered by id, which a device does not know.
_SPARE = 8
#: Times as many at most, where more rows are as far. Each time all probed lists are scanned again.
_MOST_WIDENED = 8
#: Of such a row: distance, position, id, and its place in their order.
_PLACE_BYTES = 28


class PqPageScanner(PageScanner):
    """A :class:`PageScanner` of a codec with a :class:`hybridindex.index.pq.form.PqForm`.

    Rows with the same code are as far as each other, so ties are common: (distance, id) orders them as on the host.
    Where there are too many of them the host has to scan.
    """

    @property
    def _form(self) -> PqForm:
        form = self._codec.pq
        assert form is not None
        return form

    def _scan(self, queries: F32, probes: I64, coarse_distances: F32, k: int, wanted: Candidates) -> tuple[F32, I64]:
        return self._best(queries, probes, k, wanted)

    def _best(self, queries: F32, probes: I64, k: int, wanted: Candidates | RowMasks) -> tuple[F32, I64]:
        distances = np.empty((len(queries), k), dtype=np.float32)
        ids = np.empty((len(queries), k), dtype=np.int64)
        rows, places = np.arange(len(queries)), k + _SPARE
        while len(rows):
            own = wanted.take(rows) if isinstance(wanted, RowMasks) else wanted
            found, positions = self._nearest(np.ascontiguousarray(queries[rows]), probes[rows], places, own)
            of_rows = ids_of_positions(self._index, positions)
            order = np.lexsort((of_rows, found), axis=1)[:, :k]
            distances[rows] = np.take_along_axis(found, order, axis=1)
            ids[rows] = np.take_along_axis(of_rows, order, axis=1)
            # More rows as far as the last answer may have been left out.
            rows = rows[(positions[:, -1] >= 0) & (found[:, -1] == distances[rows, -1])]
            places *= 2
            if len(rows) and (
                places > _MOST_WIDENED * (k + _SPARE) or len(rows) * places * _PLACE_BYTES > self._scratch_bytes
            ):
                raise OutOfBudgetError(
                    f"scratch of {self._scratch_bytes:,} bytes is too small for k {k}: {len(rows)} queries have more "
                    f"than {places // 2 - k} rows that are as far as the last answer"
                )
        return (-distances if self._form.metric == "ip" else distances), ids

    @abstractmethod
    def _nearest(self, queries: F32, probes: I64, k: int, wanted: Candidates | RowMasks) -> tuple[F32, I64]:
        """Distances (n, k), smaller is better, ascending, and packed positions; infinite and -1 in empty places."""
