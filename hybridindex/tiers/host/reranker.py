"""Exact distances of candidates that a scan of codes found, from their rows: the second half of a search by codes.

The extension computes them with the kernels of the scan of rows, so that they are equal to the bit. Where it is
missing, rows are decoded by faiss and compared in double precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.extension import native
from hybridindex.index.faiss_model import decode
from hybridindex.index.rabitq.faiss_codes import FaissCodes
from hybridindex.tiers.contract.positions import POSITION_BITS, ids_of_positions
from hybridindex.types import F32, F64, I64

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex

__all__ = ["FaissCodeReranker", "Reranker"]

_ROW_MASK = (1 << POSITION_BITS) - 1
#: Of faiss's codes, that are decoded together: 8 bytes a dimension, several times over.
_CODES_AT_ONCE = 2048


class Reranker:
    """Compares queries with the rows at given positions. Thread-safe."""

    def __init__(self, index: IVFIndex, pool: Any, *, kernels: str = "") -> None:
        """
        Args:
            pool: the threads that help the calling one, a ``native.ThreadPool``; None: the reference in numpy.
            kernels: as :class:`hybridindex.tiers.host.native_scanner.HostNativeScanner` takes them.
        """
        self._index = index = index.rows
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
        if self._native is not None:
            self._native.rerank(queries, np.ascontiguousarray(positions), distances, ids, self._pool)
        else:
            distances.fill(-np.inf if self.keep_max else np.inf)
            ids.fill(-1)
            for row, query in enumerate(queries):
                self._rerank_one(query, positions[row], distances[row], ids[row])
        return distances, ids

    def ids_of(self, positions: I64) -> I64:
        """Ids at positions, same shape; -1 stays -1."""
        return ids_of_positions(self._index, positions)

    def _rerank_one(self, query: F32, positions: I64, distances: F32, ids: I64) -> None:
        """The reference: fills the (k,) places of one query."""
        found = np.sort(positions[positions >= 0])
        if not len(found):
            return
        lists, rows = found >> POSITION_BITS, found & _ROW_MASK
        shown = self._exact(query, lists, rows).astype(np.float32)
        own = self._index.ids_at(lists, rows)
        # As in a scan of rows: what is not a number is no candidate.
        kept = np.flatnonzero(~np.isnan(shown))
        order = kept[np.lexsort((own[kept], -shown[kept] if self.keep_max else shown[kept]))][: len(ids)]
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

    def __init__(self, index: IVFIndex) -> None:
        super().__init__(index, None)
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
