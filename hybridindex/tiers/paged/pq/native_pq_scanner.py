"""Scan of resident product-quantized rows in the stand-in device's RAM with the kernels of the host's scan.

Equal distances are ordered by id while rows are compared, as on the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridindex.errors import OutOfBudgetError
from hybridindex.extension import native
from hybridindex.index.filters.row_filter import RowFilter
from hybridindex.index.pq.distances import native_form
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.page_scanner import Candidates, PageScanner
from hybridindex.tiers.paged.pq.torch_pq_scanner import TorchPqScanner
from hybridindex.types import F32, I64

__all__ = ["NativePqScanner"]


class NativePqScanner(PageScanner):
    """Scans on the CPU, on the calling thread alone."""

    name = "native"

    @staticmethod
    def supports(arena: PageArena) -> bool:
        """Whether the kernels are built and reach the arena."""
        return native is not None and arena.device.type == "cpu"

    def _scan(self, queries: F32, probes: I64, coarse_distances: F32, k: int, wanted: Candidates) -> tuple[F32, I64]:
        if wanted is not None and not isinstance(wanted, RowFilter):
            return TorchPqScanner.beside(self)._scan(queries, probes, coarse_distances, k, wanted)
        assert self._codec.pq is not None
        distances = np.empty((len(queries), k), dtype=np.float32)
        ids = np.empty((len(queries), k), dtype=np.int64)
        form = native_form(self._codec.pq)
        fixed, per_query = form.scratch_need(k)
        step = (self._scratch_bytes - fixed) // per_query
        if step < 1:
            raise OutOfBudgetError(
                f"scratch of {self._scratch_bytes:,} bytes is too small for k {k}: a query needs {fixed + per_query:,}"
            )
        for start in range(0, len(queries), step):
            at = slice(start, start + step)
            self._scan_rows(form, np.ascontiguousarray(queries[at]), probes[at], distances[at], ids[at], wanted)
        return distances, ids

    def _scan_rows(
        self, form: Any, queries: F32, probes: I64, distances: F32, ids: I64, wanted: RowFilter | None
    ) -> None:
        assert native is not None
        lists, member_starts, members, _ = native.group_probes(np.ascontiguousarray(probes), self._index.extents())
        page_starts = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum(self._residency.page_counts[lists], out=page_starts[1:])
        form.scan_pages(
            self._arena.data.numpy(),
            self._arena.geometry.rows_per_page,
            lists,
            self._index.list_sizes[lists],
            page_starts,
            self._residency.pages_of(lists),
            member_starts,
            members,
            self._index.centroids[lists] if self._codec.by_residual else np.empty((0, 0), np.float32),
            *self._index.ids_of_lists(lists),
            queries,
            distances,
            ids,
            mask=None if wanted is None else wanted.mask,
            first_rows=None if wanted is None else wanted.first,
        )
