"""LanceDB's IVF index of 4-bit PQ codes, refined from its rows, in a folder on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rivals.faiss_systems import K_FACTORS, NPROBES
from benchmarks.rivals.system import Answer, Collection, K, System
from hybridindex.types import F32, I64

__all__ = ["lance_ivf"]

_TABLE = "vectors"


def lance_ivf(data: Collection) -> System:
    # Deprecation notes, one a query.
    os.environ.setdefault("LANCE_LOG", "error")
    import lancedb
    import pyarrow
    from lancedb.index import IvfPq

    count, dim = data.vectors.shape

    def build(part: Path) -> None:
        rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(data.vectors.ravel()), dim)
        made = lancedb.connect(str(part)).create_table(
            _TABLE, pyarrow.table({"id": np.arange(count), "vector": rows}), mode="overwrite"
        )
        config = IvfPq(distance_type="dot", num_partitions=len(data.centres), num_sub_vectors=dim // 2, num_bits=4)
        made.create_index("vector", config=config)

    folder = data.kept(f"lance{version('lancedb')}-{len(data.centres)}-pq{dim // 2}x4", build)
    table: Any = lancedb.connect(str(folder)).open_table(_TABLE)

    def at(nprobe: int, factor: int, threads: int) -> Answer:
        def answer(x: F32) -> I64:
            asked = table.search(x[0] if len(x) == 1 else x, vector_column_name="vector").distance_type("dot").limit(K)
            found = asked.nprobes(nprobe).refine_factor(factor).select(["id", "_distance"]).to_arrow()
            if len(x) > 1:
                found = found.sort_by([("query_index", "ascending"), ("_distance", "ascending")])
            ids: I64 = found["id"].to_numpy().reshape(len(x), K)
            return ids

        return answer

    return System(
        name=f"LanceDB IVF,PQ{dim // 2}x4",
        dials=("nprobe", "refine"),
        grid=tuple(p for p in NPROBES if p <= len(data.centres)),
        finer=K_FACTORS,
        at=at,
        held_to=_on_cores,
    )


@contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """Keeps every thread of this process on ``count`` cores: LanceDB's own number of threads is fixed when it loads."""
    before = os.sched_getaffinity(0)
    _let_run_on(set(sorted(before)[:count]))
    try:
        yield
    finally:
        _let_run_on(before)


def _let_run_on(cores: set[int]) -> None:
    for task in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(task), cores)
        except ProcessLookupError:
            continue  # ended meanwhile
