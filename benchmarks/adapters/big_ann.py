"""hybridindex for big-ann-benchmarks: the tracks filter, streaming and OOD of NeurIPS 2023.

Copied to ``neurips23/TRACK/hybridindex/hybridindex.py``, each with the configuration beside this file.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from benchmark.algorithms.base import BaseANN
from benchmark.datasets import DATASETS
from neurips23.filter.base import BaseFilterANN
from neurips23.streaming.base import BaseStreamingANN

import hybridindex as hx

__all__ = ["Filter", "OutOfDistribution", "Streaming"]

_METRICS = {"euclidean": "l2", "ip": "ip", "angular": "ip"}
#: Of one search.
_MOST_QUERIES = 4096


class _Searching:
    """What the tracks have alike."""

    def __init__(self, metric: str, index_params: dict[str, Any]) -> None:
        """``index_params``: codec, nlist, threads, folder."""
        if metric not in _METRICS:
            raise ValueError(f"metric is {metric!r}; expected one of {', '.join(_METRICS)}")
        self._metric = _METRICS[metric]
        self._codec = index_params.get("codec", "flat")
        self._nlist = index_params.get("nlist")
        self._threads = index_params.get("threads", 1)
        self._folder = Path(index_params.get("folder", "data/indices/hybridindex"))
        self._nprobe = 1
        self._index: Any = None
        self._router: Any = None
        self.res: Any = None

    def _open(self, index: Any) -> None:
        self._index, self._router = index, index.router(threads=self._threads)

    def _build(self, rows: Any, path: Path, ids: Any = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        vectors = np.ascontiguousarray(rows, dtype=np.float32)
        options = {"nlist": self._nlist, "metric": self._metric, "codec": self._codec}
        self._open(hx.build(vectors, path, ids=ids, replace=path.exists(), **options))

    def set_query_arguments(self, query_args: dict[str, Any]) -> None:
        self._nprobe = query_args["nprobe"]

    def query(self, X: Any, k: int) -> None:
        rows = np.ascontiguousarray(X, dtype=np.float32)
        parts = (rows[at : at + _MOST_QUERIES] for at in range(0, len(rows), _MOST_QUERIES))
        self.res = np.concatenate([self._router.search(part, k, self._nprobe).ids for part in parts])

    def done(self) -> None:
        if self._router is not None:
            self._router.close()
            self._index.close()
        self._router = self._index = None

    def __str__(self) -> str:
        return f"hybridindex({self._codec}, nlist={self._nlist}, nprobe={self._nprobe})"


class _OfDataset(_Searching):
    """A track that builds of a whole data set."""

    def _path(self, dataset: str) -> Path:
        return self._folder / f"{dataset}-{self._codec}-{self._nlist}"

    def fit(self, dataset: str) -> None:
        self._build(DATASETS[dataset]().get_dataset(), self._path(dataset))

    def load_index(self, dataset: str) -> bool:
        path = self._path(dataset)
        if not path.exists():
            return False
        self._open(hx.open(path))
        return True


class OutOfDistribution(_OfDataset, BaseANN):
    def track(self) -> str:
        return "ood"


class Filter(_OfDataset, BaseFilterANN):
    """Rows that have all tags of a query: an intersection of sorted postings, given as ``allow_ids``."""

    def fit(self, dataset: str) -> None:
        super().fit(dataset)
        self._read_tags(dataset)

    def load_index(self, dataset: str) -> bool:
        there = super().load_index(dataset)
        if there:
            self._read_tags(dataset)
        return there

    def _read_tags(self, dataset: str) -> None:
        self._rows_of = DATASETS[dataset]().get_dataset_metadata().tocsc()
        self._rows_of.sort_indices()

    def filtered_query(self, X: Any, filter: Any, k: int) -> None:  # noqa: A002 - their name
        self.res = np.full((len(X), k), -1, dtype=np.int64)
        rows = np.ascontiguousarray(X, dtype=np.float32)
        postings, ends = self._rows_of.indices, self._rows_of.indptr
        for number, row in enumerate(rows):
            tags = filter.indices[filter.indptr[number] : filter.indptr[number + 1]]
            each = [postings[ends[tag] : ends[tag + 1]] for tag in tags]
            allowed = each[0]
            for other in each[1:]:
                allowed = np.intersect1d(allowed, other, assume_unique=True)
            if len(allowed):
                found = self._router.search(row, k, self._nprobe, allow_ids=allowed.astype(np.int64))
                self.res[number] = found.ids[0]


class Streaming(_Searching, BaseStreamingANN):
    """The first rows that come make the lists; what comes and goes later is a change of the index."""

    def setup(self, dtype: str, max_pts: int, ndims: int) -> None:
        self._begin()

    def set_query_arguments(self, query_args: dict[str, Any]) -> None:
        """The framework sets up once, and plays the whole runbook for each group of arguments."""
        self._begin()
        super().set_query_arguments(query_args)

    def _begin(self) -> None:
        self.done()
        shutil.rmtree(self._folder, ignore_errors=True)

    def insert(self, X: Any, ids: Any) -> None:
        rows, ids = np.ascontiguousarray(X, dtype=np.float32), np.asarray(ids, dtype=np.int64)
        if self._index is None:
            self._build(rows, self._folder / "stream", ids)
            self.done()
            self._open(hx.open(self._folder / "stream", write=True))
        else:
            self._index.upsert(rows, ids)

    def delete(self, ids: Any) -> None:
        self._index.delete(np.asarray(ids, dtype=np.int64))
