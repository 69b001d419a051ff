"""The library of RaBitQ's authors: its IVF index, which compares candidates exactly, and SymphonyQG, its graph whose
edges carry codes."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import numpy as np

from benchmarks.rivals.faiss_systems import NPROBES
from benchmarks.rivals.graphs import EF_CONSTRUCTION, EFS
from benchmarks.rivals.system import Answer, Collection, K, System
from hybridindex.types import F32, I64

__all__ = ["rabitq_graph", "rabitq_ivf"]

#: What the library takes for "1-bit codes, and rows that are compared exactly".
_WITH_ROWS = 32
#: Neighbours of a node.
_DEGREE = 32


def rabitq_ivf(data: Collection) -> System:
    from rabitqlib import IvfIndex

    count, dim = data.vectors.shape
    index = IvfIndex(dim=dim, max_elements=count, num_clusters=len(data.centres), nbits=_WITH_ROWS, metric="ip")
    index.build(data.vectors, data.centres, data.lists.astype(np.uint32), num_threads=os.cpu_count() or 1)

    def at(nprobe: int, second: int, threads: int) -> Answer:
        def answer(x: F32) -> I64:
            ids: I64 = index.search(x, K, nprobe, num_threads=threads if len(x) > 1 else 1)[0].astype(np.int64)
            return ids

        return answer

    grid = tuple(p for p in NPROBES if p <= len(data.centres))
    return System(name="RaBitQ library IVF", dials=("nprobe",), grid=grid, at=at)


def rabitq_graph(data: Collection) -> System:
    from rabitqlib import SymqgIndex

    def build(part: Path) -> None:
        graph = SymqgIndex(dim=data.vectors.shape[1], max_degree=_DEGREE, metric="ip")
        graph.build(data.vectors, EF_CONSTRUCTION, num_threads=os.cpu_count() or 1)
        graph.save(str(part))

    name = f"symphonyqg{version('rabitqlib')}-degree{_DEGREE}-ef{EF_CONSTRUCTION}"
    index = SymqgIndex.load(str(data.kept(name, build)))

    def at(ef: int, second: int, threads: int) -> Answer:
        def answer(x: F32) -> I64:
            search = index.search if len(x) == 1 else index.search_batch
            ids: I64 = search(x, K, ef, num_threads=threads if len(x) > 1 else 1)[0].astype(np.int64)
            return ids

        return answer

    return System(name="RaBitQ library SymphonyQG", dials=("ef",), grid=(*EFS, 1024, 1536, 2048), at=at)
