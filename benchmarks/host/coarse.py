"""Coarse quantization: ours against faiss's, over the same centroids, queries and nprobe.

Both with one thread and with two; ours asks for a second one where that pays. Every call takes other queries, so that
no branch is foreseen. Centroids are those of the dataset, by k-means, and drawn ones (``--shapes``, nlist x dim).
Target: at any batch not slower than faiss with as many threads.

Beside it: of 256 queries those that get other lists or other distances alone than among 4,096. Of ours there must be
none.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import make_clusters, make_queries
from benchmarks.common.measure import arguments, interleave, ratio_of_medians, show, write
from hybridindex.extension import native
from hybridindex.index.coarse import CoarseQuantizer
from hybridindex.index.faiss_model import quantize
from hybridindex.types import F32, I64

POOL = 4096
MOST = 256
FEW, MANY_LISTS = 25, 4096
#: Lists and distances of a batch.
Quantize = Callable[[F32], tuple[I64, F32]]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", choices=("demo", "full", "none"), default="demo", help="none: only --shapes")
    parser.add_argument("--shapes", nargs="*", default=["1300x256", "16384x384"], metavar="NLISTxDIM")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--repeats", type=int, default=31)


def centroids_of_dataset(name: Any) -> tuple[F32, F32]:
    """(nlist, dim) centroids and (n, dim) queries."""
    import hybridindex as hx
    from benchmarks.common.data import benchmark_dataset

    data = benchmark_dataset(name)
    vectors = data.centered(np.asarray(data.vectors()))
    with (
        tempfile.TemporaryDirectory() as folder,
        hx.build(vectors, Path(folder) / "i", nlist=int(4 * np.sqrt(len(vectors))), metric="ip", codec="sq8") as index,
    ):
        return index.ivf.centroids.copy(), np.ascontiguousarray(data.centered(np.asarray(data.log_queries)))


def drawn(shape: str) -> tuple[F32, F32]:
    """The same, of ``NLISTxDIM``."""
    nlist, dim = (int(part) for part in shape.split("x"))
    centres = make_clusters(dim, 4 * dim, nlist=nlist).centres
    return centres, make_queries(centres, POOL, "low")


def model(centroids: F32, metric: str) -> Any:
    """A faiss IVF index with these centroids and no vectors."""
    import faiss

    code = faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2
    quantizer = faiss.IndexFlat(centroids.shape[1], code)
    quantizer.add(np.ascontiguousarray(centroids))
    ivf: Any = faiss.IndexIVFFlat(quantizer, centroids.shape[1], len(centroids), code)
    ivf.referenced_objects = [quantizer]
    return ivf


def sides(ivf: Any, nprobe: int) -> dict[str, Quantize]:
    """What is compared; faiss with its threads set, which they stay."""
    import faiss

    assert native is not None
    own, pool = CoarseQuantizer(ivf), native.ThreadPool(1)

    def ours(queries: F32) -> tuple[I64, F32]:
        return own.quantize(queries, nprobe)

    def ours_helped(queries: F32) -> tuple[I64, F32]:
        return own.quantize(queries, nprobe, pool)

    def faiss_with(threads: int) -> Quantize:
        def run(queries: F32) -> tuple[I64, F32]:
            faiss.omp_set_num_threads(threads)
            return quantize(ivf, queries, nprobe)

        return run

    with_one = {"ours": ours, "ours again": ours, "faiss, 1 thread": faiss_with(1)}
    return {**with_one, "ours, 2 threads": ours_helped, "faiss, 2 threads": faiss_with(2)}


def probed(nlist: int) -> list[int]:
    """Few probes, and a share of the lists: lookahead ranks up to half of them. Of many lists 256."""
    if nlist > MANY_LISTS:
        return [FEW, MOST]
    return sorted({min(FEW, nlist), -(-nlist // 8), -(-nlist // 2)})


def changed(run: Quantize, queries: F32) -> tuple[int, int]:
    """Of the first MOST queries, those with other lists, and with other distances, alone than among all."""
    together = run(queries)
    alone = [run(query[None]) for query in queries[:MOST]]
    lists, distances = (
        int((np.concatenate([one[part] for one in alone]) != together[part][:MOST]).any(axis=1).sum())
        for part in (0, 1)
    )
    return lists, distances


def measure(centroids: F32, queries: F32, metric: str, nprobe: int, batch: int, repeats: int) -> dict[str, Any]:
    """One row; microseconds of a call."""
    compared = sides(model(centroids, metric), nprobe)
    pool = [queries[at : at + batch] for at in range(0, max(1, len(queries) - batch + 1), batch)]
    found, expected = compared["ours"](pool[0])[0], compared["faiss, 1 thread"](pool[0])[0]
    same = np.mean([len(set(a) & set(b)) / nprobe for a, b in zip(found.tolist(), expected.tolist(), strict=True)])
    assert same > 0.99, f"only {same:.3f} of the lists are those of faiss"

    def over(run: Quantize) -> Callable[[], object]:
        turns = itertools.cycle(pool)
        return lambda: run(next(turns))

    timed = interleave(
        {name: over(run) for name, run in compared.items()},
        repeats=repeats if batch <= 16 else max(2, repeats // 3),
        calls=max(1, 64 // batch),
    )
    row: dict[str, Any] = {"nlist": len(centroids), "dim": centroids.shape[1], "metric": metric}
    row |= {"nprobe": nprobe, "batch": batch, "us": {name: timing.median * 1e6 for name, timing in timed.items()}}
    row["ratio"] = {name: ratio_of_medians(timed[name], timed["ours"]) for name in list(compared)[1:]}
    row["ratio"]["both 2 threads"] = ratio_of_medians(timed["faiss, 2 threads"], timed["ours, 2 threads"])
    return row


def main() -> None:
    args = arguments(__doc__, _options)
    rows, differ = [], []
    datasets = [] if args.dataset == "none" else [args.dataset]
    for name in [*datasets, *args.shapes]:
        centroids, queries = centroids_of_dataset(name) if name in datasets else drawn(name)
        nlist = len(centroids)
        for metric in ("ip", "l2"):
            for nprobe, batch in itertools.product(probed(nlist), args.batches):
                rows.append({"centroids": name} | measure(centroids, queries, metric, nprobe, batch, args.repeats))
            nprobe = min(FEW, nlist)
            for side, run in sides(model(centroids, metric), nprobe).items():
                lists, distances = changed(run, queries[:POOL])
                assert not side.startswith("ours") or lists == distances == 0, f"{lists} queries differ"
                differ.append({"centroids": name, "metric": metric, "nprobe": nprobe, "side": side})
                differ[-1] |= {"queries": min(MOST, len(queries)), "lists": lists, "distances": distances}
    names = ("ours again", "faiss, 1 thread", "ours, 2 threads", "both 2 threads")
    show(
        "coarse quantization: times ours",
        ("centroids", "metric", "nprobe", "batch", "ours us", *names),
        [
            (
                *(r[key] for key in ("centroids", "metric", "nprobe", "batch")),
                r["us"]["ours"],
                *(r["ratio"][name][0] for name in names),
            )
            for r in rows
        ],
    )
    show(
        f"of {MOST} queries, alone and among {POOL}",
        ("centroids", "metric", "nprobe", "side", "other lists", "other distances"),
        [tuple(d[key] for key in ("centroids", "metric", "nprobe", "side", "lists", "distances")) for d in differ],
    )
    write(args.json, "coarse", {"rows": rows, "differ": differ})


if __name__ == "__main__":
    main()
