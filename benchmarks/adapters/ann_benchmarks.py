"""hybridindex for ann-benchmarks, where it is ``ann_benchmarks/algorithms/hybridindex/module.py``."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
from ann_benchmarks.algorithms.base.module import BaseANN

import hybridindex as hx
from hybridindex.types import Metric

__all__ = ["HybridIndex"]

#: Of one search.
_MOST_QUERIES = 4096


class HybridIndex(BaseANN):
    """An index on the host, with one thread, as the framework gives it one core."""

    def __init__(self, metric: str, codec: str, nlist: int) -> None:
        """``metric``: "angular" or "euclidean". ``codec``: as of :func:`hybridindex.build`."""
        if metric not in ("angular", "euclidean"):
            raise ValueError(f"metric is {metric!r}; expected 'angular' or 'euclidean'")
        self._metric, self._codec, self._nlist = metric, codec, nlist
        self._nprobe = 1
        self._folder = tempfile.TemporaryDirectory(prefix="hybridindex")
        self._index: Any = None
        self._router: Any = None
        self.res: Any = None

    def fit(self, X: Any) -> None:
        metric: Metric = "ip" if self._metric == "angular" else "l2"
        self._index = hx.build(
            self._rows(X), f"{self._folder.name}/index", nlist=self._nlist, metric=metric, codec=self._codec
        )
        self._router = self._index.router(threads=1)

    def _rows(self, X: Any) -> Any:
        rows: Any = np.ascontiguousarray(X, dtype=np.float32)
        if self._metric == "angular":
            lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
            rows = rows / np.where(lengths > 0, lengths, 1)
        return rows

    def set_query_arguments(self, nprobe: int) -> None:
        self._nprobe = nprobe

    def query(self, q: Any, n: int) -> Any:
        ids = self._router.search(self._rows(q), n, self._nprobe).ids[0]
        return ids[ids >= 0]

    def batch_query(self, X: Any, n: int) -> None:
        rows = self._rows(X)
        parts = (rows[at : at + _MOST_QUERIES] for at in range(0, len(rows), _MOST_QUERIES))
        self.res = np.concatenate([self._router.search(part, n, self._nprobe).ids for part in parts])

    def done(self) -> None:
        self._router.close()
        self._index.close()
        self._folder.cleanup()

    def __str__(self) -> str:
        return f"hybridindex({self._codec}, nlist={self._nlist}, nprobe={self._nprobe})"
