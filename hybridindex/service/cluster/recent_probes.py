"""A sample of what clients asked of a node lately, by the lists that it probes: placements are judged by it."""

from __future__ import annotations

import threading

import numpy as np

from hybridindex.index.ivf import IVFIndex
from hybridindex.types import F32, I64

__all__ = ["MOST_PROBES", "RecentProbes"]

#: Queries that are kept; of one search; and lists of each that are told.
_MOST, _OF_ONE = 1024, 4
MOST_PROBES = 512


class RecentProbes:
    """Of one node: the last queries. From any thread."""

    def __init__(self, index: IVFIndex) -> None:
        self._index = index
        self._queries: F32 | None = None
        self._n = 0
        self._lock = threading.Lock()

    def add(self, queries: F32) -> None:
        """(n, dim) float32, checked."""
        some = queries[:_OF_ONE]
        with self._lock:
            if self._queries is None:
                self._queries = np.empty((_MOST, queries.shape[1]), dtype=np.float32)
            self._queries[(self._n + np.arange(len(some))) % _MOST] = some
            self._n += len(some)

    def probes(self, nprobe: int) -> I64:
        """(n, p) int64 lists that the queries probe now, -1 = skip. On no event loop."""
        width = min(nprobe, MOST_PROBES, self._index.nlist)
        with self._lock:
            held = None if self._queries is None else self._queries[: min(self._n, _MOST)].copy()
        if held is None or not len(held):
            return np.empty((0, width), dtype=np.int64)
        found: I64 = self._index.quantize(self._index.transform(held), width)[0]
        return found
