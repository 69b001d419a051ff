"""Exact distances of candidates for other nodes of a cluster, which found them among codes of all lists and do not hold
their rows. No batch, no turn of the engine: each call compares a few rows on its own thread.
"""

from __future__ import annotations

import threading

import numpy as np

from hybridindex.errors import RouterClosedError
from hybridindex.index.ivf import IVFIndex
from hybridindex.router.batch.merge import empty_topk
from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.tiers.host.host_scanner import HostScanner
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.tiers.host.reranker import Reranker, open_reranker
from hybridindex.types import F32, I64

__all__ = ["Comparisons"]


class Comparisons:
    """Of one index that is served. From any thread; :meth:`close` once."""

    def __init__(self, index: IVFIndex, host: HostScanner, *, reads_disk: bool) -> None:
        """``host``: lends its threads. ``reads_disk``: not all rows are in memory."""
        self._index, self._host, self._reads_disk = index.rows, host, reads_disk
        #: Made for the first call.
        self._reranker: Reranker | None = None
        self._idle = threading.Condition()
        self._n_open = 0
        self._closed = False

    def compare(self, queries: F32, positions: I64, k: int, most_bytes: int | None = None) -> tuple[F32, I64] | None:
        """The ``k`` nearest candidates of each query.

        Args:
            queries: (n, scan_dim) float32, after the index's transforms.
            positions: (n, r) int64; see :mod:`hybridindex.tiers.contract.positions`. -1: none.
            most_bytes: None is returned where more would be read, or from disk, or where reading it takes far longer
                than with the extension; None: whatever it takes.

        Returns:
            distances (n, k) float32 and ids (n, k) int64, best first; empty places hold id -1.

        Raises:
            NotHeldError, DamagedListsError: rows are in lists that are not here, or damaged.
            UnsupportedIndexError: rows of this codec cannot be compared one by one.
            RouterClosedError: after :meth:`close`.
        """
        there = positions >= 0
        if most_bytes is not None:
            nbytes = np.count_nonzero(there) * self._index.code_size
            if self._reads_disk or nbytes > most_bytes or not self._opened().is_fast:
                return None
        lists = np.unique(positions[there] >> POSITION_BITS)
        with self._idle:
            if self._closed:
                raise RouterClosedError("the router is closed")
            self._n_open += 1
        try:
            return self._compare(np.ascontiguousarray(queries), positions, lists, k)
        finally:
            with self._idle:
                self._n_open -= 1
                self._idle.notify_all()

    def _compare(self, queries: F32, positions: I64, lists: I64, k: int) -> tuple[F32, I64]:
        integrity, reranker = self._index.integrity, self._opened()
        found = empty_topk(len(queries), k, keep_max=reranker.keep_max)
        width = min(k, positions.shape[1])
        while True:
            seen, absent = integrity.seen, integrity.quarantined
            if absent is not None and absent[lists].any():
                raise integrity.error(lists[absent[lists]].tolist())
            distances, ids = reranker.rerank(queries, positions, width)
            if integrity.marks[0] == seen:
                found[0][:, :width], found[1][:, :width] = distances, ids
                return found
            integrity.catch_up()

    def _opened(self) -> Reranker:
        if self._reranker is None:
            host = self._host
            if isinstance(host, HostRabitqScanner):
                self._reranker = host.reranker
            else:
                self._reranker = open_reranker(self._index, host.pool)
        return self._reranker

    def close(self) -> None:
        """Waits for calls that are under way."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: not self._n_open)
