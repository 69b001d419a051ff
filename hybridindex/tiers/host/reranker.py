"""Exact distances of candidates that a scan of codes found, from their rows: the second half of a search by codes.

The extension computes them with the kernels of the scan of rows, so that they are equal to the bit. Where it is
missing, rows are decoded by faiss and compared in double precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hybridindex.errors import InvalidInputError, UnsupportedIndexError
from hybridindex.extension import native
from hybridindex.index.faiss_model import decode
from hybridindex.index.rabitq.estimate import LARGEST_ESTIMATE
from hybridindex.index.rabitq.faiss_codes import FAISS_CODEC, FaissCodes
from hybridindex.tiers.contract.positions import POSITION_BITS, ids_of_positions
from hybridindex.tiers.host.rows_on_disk import RowsOnDisk
from hybridindex.types import F32, F64, I64

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex

__all__ = ["FaissCodeReranker", "Reranker", "open_reranker"]

_ROW_MASK = (1 << POSITION_BITS) - 1
#: Of faiss's codes, that are decoded together: 8 bytes a dimension, several times over.
_CODES_AT_ONCE = 2048


class Reranker:
    """Compares queries with the rows at given positions. Thread-safe."""

    def __init__(self, index: IVFIndex, pool: Any, *, kernels: str = "", on_disk: RowsOnDisk | None = None) -> None:
        """
        Args:
            pool: the threads that help the calling one, a ``native.ThreadPool``; None: the reference in numpy.
            kernels: as :class:`hybridindex.tiers.host.native_scanner.HostNativeScanner` takes them.
            on_disk: asks for rows before they are read; None: they are in memory.
        """
        self._index = index = index.rows
        self._on_disk = on_disk
        #: Whether larger distances are nearer.
        self.keep_max = index.metric == "ip"
        self._pool = pool
        self._native: Any = None
        codec = index.device_codec()
        if pool is not None:
            assert native is not None
            assert codec is not None, "codes are made of these codecs alone"
            try:
                self._native = native.RowReranker(
                    index.mapped_lists(),
                    index.extents(),
                    codec.kind,
                    codec.dim,
                    codec.scale,
                    codec.offset,
                    index.centroids if codec.by_residual else np.empty((0, codec.dim), np.float32),
                    self.keep_max,
                    kernels,
                )
            except ValueError as error:
                raise InvalidInputError(str(error)) from error

    @property
    def is_fast(self) -> bool:
        """Whether the extension compares; the reference takes many times as long."""
        return self._native is not None

    def rerank(self, queries: F32, positions: I64, k: int) -> tuple[F32, I64]:
        """The ``k`` nearest candidates of each query.

        Args:
            queries: (n, scan_dim) float32, contiguous, behind the pre-transforms.
            positions: (n, r) int64, in any order; see :mod:`hybridindex.tiers.contract.positions`. -1: none.
            k: at most r.

        Returns:
            distances (n, k) float32 and ids (n, k) int64 as a search answers them: best first, ties by id; empty places
            infinitely far with id -1. What a query gets does not depend on the others.
        """
        distances = np.empty((len(queries), k), dtype=np.float32)
        ids = np.empty((len(queries), k), dtype=np.int64)
        positions = np.ascontiguousarray(positions)
        if self._on_disk is not None:
            self._on_disk.ask_for(positions)
        if self._native is not None:
            self._native.rerank(queries, positions, distances, ids, self._pool)
        else:
            distances.fill(-np.inf if self.keep_max else np.inf)
            ids.fill(-1)
            for row, query in enumerate(queries):
                self._rerank_one(query, positions[row], distances[row], ids[row])
        return distances, ids

    def ids_of(self, positions: I64) -> I64:
        """Ids at positions (n, r), same shape; -1 stays -1."""
        if self._on_disk is not None:
            self._on_disk.ask_for(np.ascontiguousarray(positions), rows=False)
        return ids_of_positions(self._index, positions)

    def _rerank_one(self, query: F32, positions: I64, distances: F32, ids: I64) -> None:
        """The reference: fills the (k,) places of one query."""
        found = np.sort(positions[positions >= 0])
        if not len(found):
            return
        lists, rows = found >> POSITION_BITS, found & _ROW_MASK
        with np.errstate(over="ignore"):
            shown = self._exact(query, lists, rows).astype(np.float32)
        own, far = self._index.ids_at(lists, rows), -shown if self.keep_max else shown
        # As in a scan of rows: what is not a number, or infinitely far, is no candidate.
        kept = np.flatnonzero(far <= LARGEST_ESTIMATE)
        order = kept[np.lexsort((own[kept], far[kept]))][: len(ids)]
        distances[: len(order)], ids[: len(order)] = shown[order], own[order]

    def _exact(self, query: F32, lists: I64, rows: I64) -> F64:
        """(n,) float64 distances of rows of lists, (n,) int64 each; ``lists`` ascend."""
        changes = np.flatnonzero(np.diff(lists)) + 1
        codes = np.concatenate(
            [
                self._index.list_codes(int(lists[part[0]]))[rows[part]]
                for part in np.split(np.arange(len(lists)), changes)
            ]
        )
        decoded = decode(self._index.open_faiss(), codes, lists).astype(np.float64)
        # Sums of rows that lie one behind the other: numpy adds each up in one order, however many there are. A
        # product of matrices would add up in another one for another number.
        exact: F64 = (decoded * query).sum(axis=1) if self.keep_max else ((decoded - query) ** 2).sum(axis=1)
        return exact

    def close(self) -> None:
        """Lets go of the threads. Reranking afterwards is not possible."""
        self._pool = None


class FaissCodeReranker(Reranker):
    """Of an index whose rows are codes of faiss's own: distances are faiss's, of queries that are not rounded."""

    def __init__(self, index: IVFIndex, on_disk: RowsOnDisk | None = None) -> None:
        super().__init__(index, None, on_disk=on_disk)
        rows = self._index
        self._data, self._starts, self._code_size = rows.mapped_lists(), rows.extents()[:, 2], rows.code_size

    def _exact(self, query: F32, lists: I64, rows: I64) -> F64:
        at = self._starts[lists] + rows * self._code_size
        exact = np.empty(len(at), dtype=np.float64)
        for start in range(0, len(at), _CODES_AT_ONCE):
            own = slice(start, start + _CODES_AT_ONCE)
            codes = FaissCodes.of(self._data[at[own, None] + np.arange(self._code_size)], self._index.scan_dim)
            exact[own] = codes.distances(query, self._index.centroids[lists[own]], self._index.metric)
        return exact


def open_reranker(index: IVFIndex, pool: Any) -> Reranker:
    """Of an index whose rows are in memory; ``pool``: as of :class:`Reranker`.

    Raises:
        UnsupportedIndexError: its rows cannot be compared one by one.
    """
    rows = index.rows
    if rows.codec == FAISS_CODEC:
        return FaissCodeReranker(rows)
    if rows.device_codec() is None or rows.pq_form is not None:
        raise UnsupportedIndexError(f"rows of codec {rows.codec!r} cannot be compared one by one")
    return Reranker(rows, pool)
