"""Exact distances from rows in the stand-in device's RAM, with the kernels of the host."""

from __future__ import annotations

import numpy as np

from hybridindex.errors import OutOfBudgetError
from hybridindex.extension import native
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.codes.row_pages import RowPages
from hybridindex.types import F32, I64

__all__ = ["NativeRowPages"]


class NativeRowPages(RowPages):
    """Compares on the CPU, on the calling thread alone."""

    name = "native"

    @staticmethod
    def supports(arena: PageArena) -> bool:
        return native is not None and arena.device.type == "cpu"

    def _compare(self, queries: F32, positions: I64, distances: F32) -> None:
        assert native is not None
        index, codec, residency = self._index, self._codec, self._residency
        needed = native.distances_in_pages_need(codec.kind, codec.dim)
        if needed > self._scratch_bytes:
            raise OutOfBudgetError(f"scratch of {self._scratch_bytes:,} bytes is too small: rows need {needed:,}")
        native.distances_in_pages(
            self._arena.data.numpy(),
            codec.kind,
            codec.scale,
            codec.offset,
            index.centroids if codec.by_residual else np.empty((0, codec.dim), np.float32),
            index.list_sizes,
            residency.list_log,
            residency.page_counts,
            residency.page_log,
            queries,
            positions,
            index.metric == "ip",
            distances,
        )
