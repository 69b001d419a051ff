"""Scan of resident codes in the stand-in device's RAM with the kernels of the host's scan of codes."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridindex.errors import OutOfBudgetError
from hybridindex.extension import native
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.codes.code_scanner import CodePageScanner
from hybridindex.types import F32, I64

__all__ = ["NativeCodeScanner"]


class NativeCodeScanner(CodePageScanner):
    """Scans on the CPU, on the calling thread alone."""

    name = "native"

    @staticmethod
    def supports(arena: PageArena) -> bool:
        """Whether the kernels are built and reach the arena."""
        return native is not None and arena.device.type == "cpu"

    def _scan_codes(self, queries: F32, probes: I64, products: F32, estimates: F32, positions: I64) -> None:
        assert native is not None
        form = self._form
        pages = native.CodePages(
            self._codes.signs, form.bits, form.dim, form.f_scale, form.g_scale, form.metric == "l2"
        )
        k = estimates.shape[1]
        fixed, per_query = pages.scratch_need(k)
        step = (self._scratch_bytes - fixed) // per_query
        if step < 1:
            raise OutOfBudgetError(
                f"scratch of {self._scratch_bytes:,} bytes is too small for {k} candidates: a query needs "
                f"{fixed + per_query:,}"
            )
        for start in range(0, len(queries), step):
            at = slice(start, start + step)
            self._scan_queries(pages, queries[at], probes[at], products[at], estimates[at], positions[at])

    def _scan_queries(
        self, pages: Any, queries: F32, probes: I64, products: F32, estimates: F32, positions: I64
    ) -> None:
        assert native is not None
        lists, member_starts, members, places = native.group_probes(
            np.ascontiguousarray(probes), self._index.extents(), places=True
        )
        page_starts = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum(self._residency.page_counts[lists], out=page_starts[1:])
        pages.scan(
            self._arena.data.numpy(),
            self._arena.geometry.rows_per_page,
            lists,
            self._index.list_sizes[lists],
            page_starts,
            self._residency.pages_of(lists),
            member_starts,
            members,
            products.ravel()[places],
            self._codes.centroid_sq[lists],
            queries,
            estimates,
            positions,
        )
