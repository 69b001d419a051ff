"""HNSW graphs of hnswlib and usearch. One query alone is one thread's work."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import numpy as np

from benchmarks.rivals.system import Answer, Collection, K, System
from hybridindex.types import F32, I64

__all__ = ["EFS", "EF_CONSTRUCTION", "M", "hnswlib_graph", "usearch_graph"]

#: Neighbours per node (twice that on the lowest level) and candidates while building, for all graphs.
M = 32
EF_CONSTRUCTION = 200
EFS = (10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)


def hnswlib_graph(data: Collection) -> System:
    import hnswlib

    def build(part: Path) -> None:
        graph = hnswlib.Index(space="ip", dim=data.vectors.shape[1])
        graph.init_index(max_elements=len(data.vectors), M=M, ef_construction=EF_CONSTRUCTION, random_seed=0)
        graph.add_items(data.vectors, np.arange(len(data.vectors)), num_threads=os.cpu_count() or 1)
        graph.save_index(str(part))

    index = hnswlib.Index(space="ip", dim=data.vectors.shape[1])
    index.load_index(str(data.kept(_name("hnswlib"), build)), max_elements=len(data.vectors))

    def at(ef: int, second: int, threads: int) -> Answer:
        def answer(x: F32) -> I64:
            index.set_ef(ef)
            ids: I64 = index.knn_query(x, K, num_threads=threads if len(x) > 1 else 1)[0].astype(np.int64)
            return ids

        return answer

    return System(name="hnswlib HNSW", dials=("ef",), grid=EFS, at=at)


def usearch_graph(data: Collection) -> System:
    from usearch.index import Index as Graph

    def empty() -> Graph:
        return Graph(
            ndim=data.vectors.shape[1],
            metric="ip",
            dtype="f32",
            connectivity=M,
            expansion_add=EF_CONSTRUCTION,
            multi=False,
        )

    def build(part: Path) -> None:
        graph = empty()
        graph.add(np.arange(len(data.vectors)), data.vectors, threads=os.cpu_count() or 1)
        graph.save(str(part))

    index = empty()
    index.load(str(data.kept(_name("usearch"), build)))

    def at(ef: int, second: int, threads: int) -> Answer:
        def answer(x: F32) -> I64:
            index.expansion_search = ef
            one = len(x) == 1
            found = index.search(x[0] if one else x, K, threads=1 if one else threads)
            ids: I64 = found.keys.astype(np.int64)
            return ids[None] if one else ids

        return answer

    return System(name="usearch HNSW", dials=("ef",), grid=EFS, at=at)


def _name(package: str) -> str:
    return f"{package}{version(package)}-M{M}-ef{EF_CONSTRUCTION}"
