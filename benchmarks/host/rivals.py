"""The systems that recall_qps compares: each answers a batch at one setting of its one or two dials.

Graph indexes take minutes to build and are kept under ``build/cache/rivals``, named by all that they depend on. Those
of a package that is not installed are left out, and said to be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.common.clusters import faiss_ivf
from benchmarks.common.data import benchmark_cache
from benchmarks.common.scanner import close_scanner, host_scanner
from hybridindex.api import Index
from hybridindex.types import F32, I64

__all__ = ["K", "System", "missing_packages", "systems"]

K = 10
#: Neighbours per node (twice that on the lowest level) and candidates while building, for all three graphs.
M = 32
EF_CONSTRUCTION = 200
NPROBES = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
EFS = (10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
FAST_NPROBES = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768)
K_FACTORS = (2, 4, 8, 16)
MODES = (0, 1, 2, 3)
GRAPHS = {"hnswlib": "hnswlib HNSW", "usearch": "usearch HNSW"}

#: (n, d) queries -> (n, K) ids.
Answer = Callable[[F32], I64]


@dataclass(frozen=True, slots=True)
class System:
    """One curve."""

    name: str
    #: Setting, as the results name it -> what answers at that setting.
    points: dict[str, Answer]
    #: Ways of running that change time but not answers: the fastest is chosen for each batch size.
    modes: tuple[int, ...] = ()
    set_mode: Callable[[int], None] = lambda mode: None
    close: Callable[[], None] = lambda: None


def missing_packages() -> list[str]:
    """Names of systems whose package is not installed."""
    return [name for package, name in GRAPHS.items() if find_spec(package) is None]


def systems(vectors: F32, lists: I64, centres: F32, ours: dict[str, Index], threads: int) -> Iterator[System]:
    """All systems that are installed; ``ours`` maps a codec to our index with the same lists."""
    import faiss

    faiss.omp_set_num_threads(threads)
    for codec, index in ours.items():
        yield _ours(codec, index, threads)
    yield _faiss_flat(faiss_ivf(vectors, lists, centres, "flat", "ip"), threads)
    yield _faiss_fast_scan(vectors, lists, centres, threads)
    key = xxhash.xxh3_64_hexdigest(vectors.data)
    yield _faiss_hnsw(vectors, key, threads)
    if find_spec("hnswlib") is not None:
        yield _hnswlib(vectors, key, threads)
    if find_spec("usearch") is not None:
        yield _usearch(vectors, key, threads)


def _ours(codec: str, index: Index, threads: int) -> System:
    scanner, ivf = host_scanner(index.ivf, threads), index.ivf

    def at(nprobe: int) -> Answer:
        return lambda x: scanner.scan(x, *ivf.quantize(x, nprobe), K)[1]

    return System(
        name=f"hybridindex {codec}" + (" (faiss stand-in)" if scanner.name == "faiss" else ""),
        points={f"nprobe={p}": at(p) for p in NPROBES if p <= index.nlist},
        close=lambda: close_scanner(scanner),
    )


def _faiss_flat(ivf: Any, threads: int) -> System:
    import faiss

    def at(nprobe: int) -> Answer:
        params = faiss.SearchParametersIVF(nprobe=nprobe)  # type: ignore[call-arg]
        return lambda x: ivf.search(x, K, params=params)[1]

    return System(
        name="faiss IVF,Flat",
        points={f"nprobe={p}": at(p) for p in NPROBES if p <= ivf.nlist},
        modes=MODES,
        set_mode=lambda mode: setattr(ivf, "parallel_mode", mode),
    )


def _faiss_fast_scan(vectors: F32, lists: I64, centres: F32, threads: int) -> System:
    """4-bit PQ over pairs of dimensions, the best K * k_factor of it compared exactly."""
    import faiss

    m = vectors.shape[1] // 2
    ivf = faiss_ivf(vectors, lists, centres, f"pqfs{m}", "ip")
    refined = faiss.IndexRefineFlat(ivf, faiss.swig_ptr(vectors))

    def at(nprobe: int, factor: int) -> Answer:
        inner = faiss.SearchParametersIVF(nprobe=nprobe)  # type: ignore[call-arg]
        params = faiss.IndexRefineSearchParameters(k_factor=factor, base_index_params=inner)  # type: ignore[call-arg]

        def answer(x: F32) -> I64:
            ids: I64 = refined.search(x, K, params=params)[1]
            return ids

        return answer

    return System(
        name=f"faiss IVF,PQ{m}x4fs,RFlat",
        points={
            f"nprobe={p} k_factor={factor}": at(p, factor)
            for p in FAST_NPROBES
            if p <= len(centres)
            for factor in K_FACTORS
        },
        modes=MODES,
        set_mode=lambda mode: setattr(ivf, "parallel_mode", mode),
    )


def _faiss_hnsw(vectors: F32, key: str, threads: int) -> System:
    import faiss

    file = _file("faiss-hnsw", key, faiss.__version__)
    if file.exists():
        index = faiss.read_index(str(file))
    else:
        index = faiss.IndexHNSWFlat(vectors.shape[1], M, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = EF_CONSTRUCTION
        index.add(vectors)
        _keep(file, lambda part: faiss.write_index(index, str(part)))

    def at(ef: int) -> Answer:
        params = faiss.SearchParametersHNSW(efSearch=ef)  # type: ignore[attr-defined]
        return lambda x: index.search(x, K, params=params)[1]

    return System(name=f"faiss HNSW{M}", points={f"ef={ef}": at(ef) for ef in EFS})


def _hnswlib(vectors: F32, key: str, threads: int) -> System:
    import hnswlib

    file = _file("hnswlib", key)
    index = hnswlib.Index(space="ip", dim=vectors.shape[1])
    if file.exists():
        index.load_index(str(file), max_elements=len(vectors))
    else:
        index.init_index(max_elements=len(vectors), M=M, ef_construction=EF_CONSTRUCTION, random_seed=0)
        index.add_items(vectors, np.arange(len(vectors)), num_threads=threads)
        _keep(file, lambda part: index.save_index(str(part)))

    def at(ef: int) -> Answer:
        def answer(x: F32) -> I64:
            index.set_ef(ef)
            ids: I64 = index.knn_query(x, K, num_threads=threads if len(x) > 1 else 1)[0].astype(np.int64)
            return ids

        return answer

    return System(name=GRAPHS["hnswlib"], points={f"ef={ef}": at(ef) for ef in EFS})


def _usearch(vectors: F32, key: str, threads: int) -> System:
    from usearch.index import Index as Graph

    file = _file("usearch", key)
    index = Graph(
        ndim=vectors.shape[1], metric="ip", dtype="f32", connectivity=M, expansion_add=EF_CONSTRUCTION, multi=False
    )
    if file.exists():
        index.load(str(file))
    else:
        index.add(np.arange(len(vectors)), vectors, threads=threads)
        _keep(file, lambda part: index.save(str(part)))

    def at(ef: int) -> Answer:
        def answer(x: F32) -> I64:
            index.expansion_search = ef
            one = len(x) == 1
            found = index.search(x[0] if one else x, K, threads=1 if one else threads)
            ids: I64 = found.keys.astype(np.int64)
            return ids[None] if one else ids

        return answer

    return System(name=GRAPHS["usearch"], points={f"ef={ef}": at(ef) for ef in EFS})


def _file(name: str, key: str, version: str = "") -> Path:
    folder = benchmark_cache() / "rivals"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}{version}-M{M}-ef{EF_CONSTRUCTION}-{key}.index"


def _keep(file: Path, save: Callable[[Path], object]) -> None:
    """Saves under another name first: a run that is stopped leaves no half file."""
    part = file.with_suffix(".part")
    sys.stderr.write(f"built {file.name}\n")
    save(part)
    part.replace(file)
