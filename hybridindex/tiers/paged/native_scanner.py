"""Scan of resident lists in the stand-in device's RAM with our native kernels: each page is read once per batch.

The inner loops are those of the host scan (:mod:`hybridindex.tiers.host.native_scanner`): a row has the same distance
on both, to the bit. :class:`hybridindex.tiers.paged.torch_scanner.TorchScanner` makes scans that are filtered by ids.
"""

from __future__ import annotations

import numpy as np

from hybridindex.errors import OutOfBudgetError
from hybridindex.extension import native
from hybridindex.index.codec import DeviceCodec
from hybridindex.index.filters.row_filter import RowFilter
from hybridindex.tiers.contract.positions import ids_of_positions
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.page_scanner import Candidates, PageScanner
from hybridindex.tiers.paged.torch_scanner import TorchScanner
from hybridindex.types import F32, I64

__all__ = ["NativePageScanner"]


class NativePageScanner(PageScanner):
    """Scans on the CPU, on the calling thread alone."""

    name = "native"

    @staticmethod
    def supports(codec: DeviceCodec, arena: PageArena) -> bool:
        """Whether the kernels are built and reach the arena; they decode every device codec."""
        return native is not None and arena.device.type == "cpu"

    def _scan(self, queries: F32, probes: I64, coarse_distances: F32, k: int, wanted: Candidates) -> tuple[F32, I64]:
        if wanted is not None and not isinstance(wanted, RowFilter):
            return TorchScanner.beside(self)._scan(queries, probes, coarse_distances, k, wanted)
        n = len(queries)
        distances = np.empty((n, k), dtype=np.float32)
        ids = np.empty((n, k), dtype=np.int64)
        assert native is not None
        fixed, per_query = native.page_scratch_need(self._codec.kind, self._codec.dim, self._codec.by_residual, k)
        step = (self._scratch_bytes - fixed) // per_query
        if step < 1:
            raise OutOfBudgetError(
                f"scratch of {self._scratch_bytes:,} bytes is too small for k {k}: a query needs {fixed + per_query:,}"
            )
        for start in range(0, n, step):
            rows = slice(start, start + step)
            found, positions = distances[rows], ids[rows]
            self._scan_rows(np.ascontiguousarray(queries[rows]), probes[rows], found, positions, wanted)
            ids[rows] = ids_of_positions(self._index, positions)
        return distances, ids

    def _scan_rows(self, queries: F32, probes: I64, distances: F32, positions: I64, wanted: RowFilter | None) -> None:
        assert native is not None
        lists, member_starts, members, _ = native.group_probes(np.ascontiguousarray(probes), self._index.extents())
        page_starts = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum(self._residency.page_counts[lists], out=page_starts[1:])
        native.scan_pages(
            self._arena.data.numpy(),
            self._arena.geometry.rows_per_page,
            self._codec.kind,
            self._codec.scale,
            self._codec.offset,
            lists,
            self._index.list_sizes[lists],
            page_starts,
            self._residency.pages_of(lists),
            member_starts,
            members,
            self._index.centroids[lists] if self._codec.by_residual else np.empty((0, 0), np.float32),
            queries,
            self._index.metric == "ip",
            distances,
            positions,
            mask=None if wanted is None else wanted.mask,
            first_rows=None if wanted is None else wanted.first,
        )
