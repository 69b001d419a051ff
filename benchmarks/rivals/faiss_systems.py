"""faiss: IVF with float32 rows, with 4-bit PQ and with RaBitQ (both refined from float32 rows), and its HNSW graph.

How many threads work is faiss's own switch, which who calls sets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.clusters import faiss_ivf
from benchmarks.rivals.graphs import EF_CONSTRUCTION, EFS, M
from benchmarks.rivals.system import Answer, Collection, K, System
from hybridindex.types import F32, I64

__all__ = ["K_FACTORS", "NPROBES", "fast_scan", "flat", "hnsw", "rabitq_fast_scan"]

#: Of all systems with lists, ours too.
NPROBES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
#: Candidates compared exactly for each of the K.
K_FACTORS = (2, 3, 4, 6, 8, 12, 16, 32, 64)
MODES = (0, 1, 2, 3)


def flat(data: Collection) -> System:
    import faiss

    ivf = faiss_ivf(data.vectors, data.lists, data.centres, "flat", "ip")

    def at(nprobe: int, second: int, threads: int) -> Answer:
        params = faiss.SearchParametersIVF(nprobe=nprobe)  # type: ignore[call-arg]
        return lambda x: ivf.search(x, K, params=params)[1]

    return System(
        name="faiss IVF,Flat",
        dials=("nprobe",),
        grid=tuple(p for p in NPROBES if p <= ivf.nlist),
        at=at,
        modes=MODES,
        set_mode=lambda mode: setattr(ivf, "parallel_mode", mode),
    )


def fast_scan(data: Collection, dims: int = 2) -> System:
    """4-bit PQ over ``dims`` dimensions each, the best K * k_factor of it compared exactly."""
    m = data.vectors.shape[1] // dims
    ivf = faiss_ivf(data.vectors, data.lists, data.centres, f"pqfs{m}", "ip")
    return _refined(f"faiss IVF,PQ{m}x4fs,RFlat", ivf, data.vectors)


def rabitq_fast_scan(data: Collection, bits: int) -> System:
    """RaBitQ codes of ``bits``, the best K * k_factor of them compared exactly."""
    import faiss

    dim, metric = data.vectors.shape[1], faiss.METRIC_INNER_PRODUCT
    quantizer = faiss.IndexFlat(dim, metric)
    quantizer.add(data.centres)
    # Blocks of 32 rows; the index owns its lists.
    ivf: Any = faiss.IndexIVFRaBitQFastScan(quantizer, dim, len(data.centres), metric, 32, True, bits)
    ivf.train(data.vectors)
    ivf.add(data.vectors)
    return _refined(f"faiss IVF,RaBitQ{bits}fs,RFlat", ivf, data.vectors)


def _refined(name: str, ivf: Any, vectors: F32) -> System:
    import faiss

    refined = faiss.IndexRefineFlat(ivf, faiss.swig_ptr(vectors))

    def at(nprobe: int, factor: int, threads: int) -> Answer:
        inner = faiss.SearchParametersIVF(nprobe=nprobe)  # type: ignore[call-arg]
        params = faiss.IndexRefineSearchParameters(k_factor=factor, base_index_params=inner)  # type: ignore[call-arg]

        def answer(x: F32) -> I64:
            ids: I64 = refined.search(x, K, params=params)[1]
            return ids

        return answer

    return System(
        name=name,
        dials=("nprobe", "k_factor"),
        grid=tuple(p for p in NPROBES if p <= ivf.nlist),
        finer=K_FACTORS,
        at=at,
        modes=MODES,
        set_mode=lambda mode: setattr(ivf, "parallel_mode", mode),
    )


def hnsw(data: Collection) -> System:
    import faiss

    def build(part: Path) -> None:
        graph = faiss.IndexHNSWFlat(data.vectors.shape[1], M, faiss.METRIC_INNER_PRODUCT)
        graph.hnsw.efConstruction = EF_CONSTRUCTION
        graph.add(data.vectors)
        faiss.write_index(graph, str(part))

    index = faiss.read_index(str(data.kept(f"faiss-hnsw{faiss.__version__}-M{M}-ef{EF_CONSTRUCTION}", build)))

    def at(ef: int, second: int, threads: int) -> Answer:
        params = faiss.SearchParametersHNSW(efSearch=ef)  # type: ignore[attr-defined]
        return lambda x: index.search(x, K, params=params)[1]

    return System(name=f"faiss HNSW{M}", dials=("ef",), grid=EFS, at=at)
