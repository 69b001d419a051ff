"""Clustered vectors whose lists are known without k-means, other ones in the lists of a build, queries, and indexes.

Centres come in families of 64, as topics come in fields, so that the lists a query probes are mostly its family's.
List sizes vary as those of real indexes do. Everything follows from the seed.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.common.data import benchmark_dataset
from benchmarks.common.dataset import DatasetName
from hybridindex.api import Index, build, from_faiss
from hybridindex.types import F32, I64, Metric

__all__ = [
    "Clusters",
    "Reuse",
    "built_lists",
    "faiss_ivf",
    "import_lists",
    "make_clusters",
    "make_queries",
    "make_spectrum",
    "real_clusters",
]

#: "low": queries spread evenly over all centres. "high": queries about 16 popular centres, the first the most.
Reuse = Literal["low", "high"]

_FAMILY = 64
_POPULAR = 16
_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class Clusters:
    """Unit vectors, the list of each, and the centres."""

    vectors: F32
    lists: I64
    centres: F32


def make_clusters(dim: int, nbytes: int, seed: int = 0, *, nlist: int | None = None) -> Clusters:
    """As many vectors as take ``nbytes`` in float32, in ``nlist`` lists, by default 4*sqrt(n)."""
    n = nbytes // (4 * dim)
    nlist = int(4 * np.sqrt(n)) if nlist is None else nlist
    rng = np.random.default_rng(seed)
    families = _unit(rng.standard_normal((-(-nlist // _FAMILY), dim), dtype=np.float32))
    centres = _around(families, np.arange(nlist) // _FAMILY, rng)
    share = rng.lognormal(0.0, 0.4, nlist)
    lists = rng.choice(nlist, n, p=share / share.sum())
    vectors = np.empty((n, dim), dtype=np.float32)
    for start in range(0, n, _ROWS):
        vectors[start : start + _ROWS] = _around(centres, lists[start : start + _ROWS], rng)
    return Clusters(vectors=vectors, lists=lists, centres=centres)


def real_clusters(name: DatasetName) -> tuple[Clusters, F32]:
    """The real embeddings in the lists that our own build gives them; and the real query log."""
    data = benchmark_dataset(name)
    return built_lists(data.centered(np.asarray(data.vectors()))), data.centered(np.asarray(data.log_queries))


def built_lists(vectors: F32) -> Clusters:
    """``vectors`` in the 4*sqrt(n) lists that our own build gives them."""
    with (
        tempfile.TemporaryDirectory() as folder,
        build(vectors, Path(folder) / "idx", nlist=int(4 * np.sqrt(len(vectors))), metric="ip") as index,
    ):
        blocks = range(0, len(vectors), _ROWS)
        lists = np.concatenate([index.ivf.quantize(vectors[at : at + _ROWS], 1)[0][:, 0] for at in blocks])
        return Clusters(vectors=vectors, lists=lists, centres=np.array(index.centroids))


def make_spectrum(dim: int, count: int, seed: int = 0) -> F32:
    """(count, dim) unit vectors without clusters; their variance falls as 1/i over turned dimensions.

    Their neighbours lie in many lists, those of :func:`make_clusters` in one.
    """
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.standard_normal((dim, dim)))[0] / np.sqrt(np.arange(1, dim + 1))[:, None]
    return _unit(rng.standard_normal((count, dim), dtype=np.float32) @ turn.astype(np.float32))


def make_queries(centres: F32, count: int, reuse: Reuse, seed: int = 1) -> F32:
    """Unit queries about centres, in an order that keeps any run of them alike."""
    rng = np.random.default_rng(seed)
    if reuse == "low":
        return _around(centres, rng.integers(0, len(centres), count), rng)
    popular = rng.permutation(len(centres))[:_POPULAR]
    weight = 1.0 / np.arange(1, len(popular) + 1)
    return _around(centres, rng.choice(popular, count, p=weight / weight.sum()), rng)


def import_lists(vectors: F32, lists: I64, centres: F32, codec: str, metric: Metric, path: Path) -> Index:
    """An index of ``codec`` as :func:`faiss_ivf` makes it, through a faiss file that is removed again."""
    import faiss

    ivf = faiss_ivf(vectors, lists, centres, codec, metric)
    file = path.with_suffix(".faiss")
    try:
        faiss.write_index(ivf, str(file))
        del ivf
        return from_faiss(file, path)
    finally:
        file.unlink(missing_ok=True)


def faiss_ivf(vectors: F32, lists: I64, centres: F32, codec: str, metric: Metric) -> Any:
    """faiss's own index in memory; ``codec`` flat, fp16, sq8, pqM or pqfsM, none by residual; lists of pqfsM are those
    of the nearest centres."""
    import faiss

    dim, nlist, ptr = vectors.shape[1], len(centres), faiss.swig_ptr
    code = faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2
    quantizer = faiss.IndexFlat(dim, code)
    quantizer.add(centres)
    ivf: Any
    if codec == "flat":
        ivf = faiss.IndexIVFFlat(quantizer, dim, nlist, code)
    elif codec in ("fp16", "sq8"):
        kind = faiss.ScalarQuantizer.QT_8bit if codec == "sq8" else faiss.ScalarQuantizer.QT_fp16
        ivf = faiss.IndexIVFScalarQuantizer(quantizer, dim, nlist, kind, code)
    elif codec.startswith("pqfs"):
        ivf = faiss.IndexIVFPQFastScan(quantizer, dim, nlist, int(codec.removeprefix("pqfs")), 4, code)
    else:
        ivf = faiss.IndexIVFPQ(quantizer, dim, nlist, int(codec.removeprefix("pq")), 8, code)
        # The defaults take minutes; nobody asks for the recall.
        ivf.pq.cp.max_points_per_centroid, ivf.pq.cp.niter = 40, 5
    ivf.by_residual = False
    # The quantizer has its centroids: only the codec is trained.
    ivf.train(vectors[:: -(-len(vectors) // _ROWS)].copy())
    if codec.startswith("pqfs"):
        ivf.add(vectors)
    else:
        lists = np.ascontiguousarray(lists, dtype=np.int64)
        ivf.add_core(len(vectors), ptr(vectors), None, ptr(lists))
    return ivf


def _around(centres: F32, which: I64, rng: np.random.Generator) -> F32:
    """Points at about 45 degrees from the centres ``which``."""
    dim = centres.shape[1]
    noise = rng.standard_normal((len(which), dim), dtype=np.float32)
    noise *= np.float32(1 / np.sqrt(dim))
    noise += centres[which]
    return _unit(noise)


def _unit(x: F32) -> F32:
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x
