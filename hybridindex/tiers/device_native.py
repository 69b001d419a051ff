"""Scan of resident lists in the stand-in device's RAM with our native kernel: each page is read once per batch.

Answers what :class:`hybridindex.tiers.device_torch.TorchScanner` answers; filtered scans are left to it.
"""

from __future__ import annotations

import numpy as np

from hybridindex.extension import native
from hybridindex.index.codec import DeviceCodec
from hybridindex.index.ivf import IVFIndex
from hybridindex.tiers.arena import PageArena
from hybridindex.tiers.device_torch import TorchScanner, ids_of_positions, queries_by_list
from hybridindex.tiers.protocol import IdFilter, OnDone
from hybridindex.tiers.residency import Residency
from hybridindex.types import F32, I64

__all__ = ["NativePageScanner"]

_KINDS = {"f32": 0, "f16": 1, "sq8": 2}


class NativePageScanner(TorchScanner):
    """Scans one snapshot's lists on the CPU, on the calling thread alone. Thread-safe as long as the lease lives."""

    name = "native"

    @staticmethod
    def supports(codec: DeviceCodec, arena: PageArena) -> bool:
        """Whether the kernel is built and can decode this codec where the arena is."""
        return native is not None and arena.device.type == "cpu" and codec.kind in _KINDS

    def __init__(
        self,
        index: IVFIndex,
        codec: DeviceCodec,
        arena: PageArena,
        residency: Residency,
        ordinal: int,
        scratch_bytes: int,
    ) -> None:
        super().__init__(index, codec, arena, residency, ordinal, scratch_bytes)
        none = np.empty(0, np.float32)
        scale, offset = none, none
        if codec.kind == "sq8":
            assert codec.vmin is not None
            assert codec.vdiff is not None
            scale = codec.vdiff / np.float32(255)
            offset = codec.vmin + codec.vdiff * np.float32(0.5 / 255)
        self._scale, self._offset = scale, offset

    def scan(
        self,
        queries: F32,
        probes: I64,
        coarse_distances: F32,
        k: int,
        *,
        filter_ids: IdFilter | None = None,
        on_done: OnDone | None = None,
    ) -> tuple[F32, I64]:
        """See :meth:`hybridindex.tiers.protocol.Scanner.scan`."""
        if filter_ids is not None:
            return super().scan(queries, probes, coarse_distances, k, filter_ids=filter_ids, on_done=on_done)
        self._check(queries, probes, coarse_distances, k)
        n = len(queries)
        distances = np.empty((n, k), dtype=np.float32)
        ids = np.empty((n, k), dtype=np.int64)
        # What the kernel allocates: 16 bytes a place of each query's heap, 8 a query, and the rows being decoded.
        decoded = 0 if self._codec.kind == "f32" and not self._codec.by_residual else 16 * self._index.scan_dim * 4
        step = self._at_least_one((self._scratch_bytes - decoded) // (16 * k + 8), 16 * k + 8 + decoded, k)
        for start in range(0, n, step):
            rows = slice(start, start + step)
            found, positions = distances[rows], ids[rows]
            self._scan_rows(np.ascontiguousarray(queries[rows]), probes[rows], found, positions)
            ids[rows] = ids_of_positions(self._index, positions)
        if on_done is not None and n:
            on_done(np.arange(n, dtype=np.int32), distances, ids)
        return distances, ids

    def _scan_rows(self, queries: F32, probes: I64, distances: F32, positions: I64) -> None:
        lists, members, member_starts = queries_by_list(probes)
        pages = [self._residency.list_pages[i] for i in lists]
        kept = [p if p is not None else np.empty(0, np.int32) for p in pages]
        page_starts = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum([len(p) for p in kept], out=page_starts[1:])
        centroids = self._index.centroids[lists] if self._codec.by_residual else np.empty((0, 0), np.float32)
        assert native is not None
        native.scan_pages(
            self._arena.data.numpy(),
            self._arena.geometry.rows_per_page,
            self._arena.geometry.code_size,
            _KINDS[self._codec.kind],
            self._scale,
            self._offset,
            lists,
            self._index.list_sizes[lists],
            page_starts,
            np.concatenate(kept) if kept else np.empty(0, np.int32),
            member_starts,
            members,
            centroids,
            queries,
            self._index.metric == "ip",
            distances,
            positions,
        )
