"""Product-quantized lists on the host: our scan against faiss's own, of the same index, at the same nprobe.

"pqfs" is faiss's IVFPQFastScan (4 bits, whole vectors), "pq" its IVFPQ (8 bits, residuals). Both sides have the same
lists, queries, nprobe, k and threads, so recall is equal but for what faiss's rounded tables lose; it is measured
against brute force and told. "scan": the lists of given probes alone. "search": coarse quantization too, ours through
``router.search``, faiss's through ``index.search``. faiss runs in the fastest of its parallel modes 0 to 3, found for
each row: mode 0, the default, runs search_preassigned of "pq" on one thread.

Times are per call; sides take turns in every round. Ratio: faiss's time over ours, median over rounds with quartiles;
"again": ours over itself; the floor of a row is how far its quartiles lie from 1. Targets for
"pqfs": 1.5 at batch 1, 3 at batch 64.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.common.clusters import make_spectrum
from benchmarks.common.measure import arguments, interleave, ratio_of_medians, show, write
from hybridindex.index import build
from hybridindex.index.ivf import IVFIndex
from hybridindex.router import Router
from hybridindex.tiers.host.native_scanner import HostNativeScanner
from hybridindex.types import F32, I64, Metric

K = 10
BATCHES = (1, 64)
TARGETS = {1: 1.5, 64: 3.0}
#: faiss's parallel modes: its default, over probes, over both, over queries.
MODES = (0, 1, 2, 3)
Search = Callable[[F32], I64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Vectors, queries and their true neighbours."""

    name: str
    vectors: F32
    queries: F32
    truth: I64


@dataclass(slots=True, kw_only=True)
class Sides:
    """Ours, ours again and faiss's, and the parallel mode that faiss's runs in."""

    searches: dict[str, Search] = field(default_factory=dict)
    mode: int = 3


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", choices=("demo", "full", "none"), default="demo", help="none: only --dims")
    parser.add_argument("--dims", type=int, nargs="*", default=[], help="of synthetic vectors, 100,000 each")
    parser.add_argument("--codecs", nargs="+", default=["pqfs", "pq"])
    parser.add_argument("--metrics", nargs="+", default=["ip", "l2"], choices=("ip", "l2"))
    parser.add_argument("--nprobes", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--queries", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=31)


def with_truth(name: str, vectors: F32, queries: F32, metric: Metric) -> Data:
    import faiss

    exact = faiss.IndexFlat(vectors.shape[1], faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT)
    exact.add(vectors)
    return Data(name=name, vectors=vectors, queries=queries, truth=exact.search(queries, K)[1])


def real(name: Any, count: int) -> tuple[F32, F32]:
    """Embeddings and the query log."""
    from benchmarks.common.data import benchmark_dataset

    data = benchmark_dataset(name)
    queries = np.ascontiguousarray(data.centered(np.asarray(data.log_queries))[:count])
    return data.centered(np.asarray(data.vectors())), queries


@contextmanager
def sides(index: IVFIndex, nprobe: int, threads: int, what: Literal["scan", "search"]) -> Iterator[Sides]:
    """What is compared."""
    import faiss

    ivf = index.open_faiss()
    made = Sides()
    if what == "scan":
        with closing(HostNativeScanner(index, threads=threads)) as own:

            def native(queries: F32) -> I64:
                return own.scan_checked(queries, *_probes(index, queries, nprobe), K)[1]

            def theirs(queries: F32) -> I64:
                probes, coarse = _probes(index, queries, nprobe)
                faiss.omp_set_num_threads(threads)
                ivf.nprobe = nprobe
                ivf.parallel_mode = made.mode
                found = np.empty((len(queries), K), np.float32), np.empty((len(queries), K), np.int64)
                given = (faiss.swig_ptr(each) for each in (probes, coarse, *found))
                ivf.search_preassigned_c(len(queries), faiss.swig_ptr(queries), K, *given, False, None)
                return found[1]

            made.searches |= {"ours": native, "again": native, "faiss": theirs}
            yield made
        return
    with Router(index, threads=threads) as router:

        def routed(queries: F32) -> I64:
            return router.search(queries, K, nprobe).ids

        def whole(queries: F32) -> I64:
            faiss.omp_set_num_threads(threads)
            ivf.nprobe = nprobe
            ivf.parallel_mode = made.mode
            found: I64 = ivf.search(queries, K)[1]
            return found

        made.searches |= {"ours": routed, "again": routed, "faiss": whole}
        yield made


def fastest(made: Sides, run: Callable[[], object], calls: int) -> int:
    """The parallel mode in which ``run`` takes least; the best of three tries each, in turns."""

    def in_mode(mode: int) -> Callable[[], object]:
        def once() -> object:
            made.mode = mode
            return run()

        return once

    timed = interleave({str(mode): in_mode(mode) for mode in MODES}, repeats=3, warmup=1, calls=calls)
    return min(MODES, key=lambda mode: min(timed[str(mode)].seconds))


_KNOWN: dict[tuple[int, int, int], tuple[I64, F32]] = {}


def _probes(index: IVFIndex, queries: F32, nprobe: int) -> tuple[I64, F32]:
    """Computed once for each batch: they are not what is timed."""
    key = (queries.__array_interface__["data"][0], len(queries), nprobe)
    if key not in _KNOWN:
        _KNOWN[key] = index.quantize(queries, nprobe)
    return _KNOWN[key]


def recall(search: Search, data: Data) -> float:
    """Over all queries, in batches of 64."""
    found = np.concatenate([search(data.queries[at : at + 64]) for at in range(0, len(data.queries), 64)])
    return float(np.mean([np.isin(a, b).mean() for a, b in zip(found, data.truth, strict=True)]))


def measure(index: IVFIndex, data: Data, nprobe: int, threads: int, repeats: int) -> Iterator[dict[str, Any]]:
    for what in ("scan", "search"):
        with sides(index, nprobe, threads, what) as compared:
            searches = compared.searches
            recalls = {name: recall(search, data) for name, search in searches.items() if name != "again"}
            for batch in BATCHES:
                pool = [data.queries[at : at + batch] for at in range(0, len(data.queries) - batch + 1, batch)]
                calls = max(1, 32 // batch)

                def over(search: Search, pool: list[F32] = pool) -> Callable[[], object]:
                    turns = itertools.cycle(pool)
                    return lambda: search(next(turns))

                compared.mode = fastest(compared, over(searches["faiss"]), 4 * calls)
                timed = interleave(
                    {name: over(search) for name, search in searches.items()}, repeats=repeats, calls=calls
                )
                yield {
                    "what": what,
                    "nprobe": nprobe,
                    "threads": threads,
                    "batch": batch,
                    "faiss_mode": compared.mode,
                    "recall": recalls,
                    "us": {name: timing.median * 1e6 for name, timing in timed.items()},
                    "least_us": {name: min(timing.seconds) * 1e6 for name, timing in timed.items()},
                    "ratio": ratio_of_medians(timed["faiss"], timed["ours"]),
                    "noise": ratio_of_medians(timed["again"], timed["ours"]),
                }


def main() -> None:
    args = arguments(__doc__, _options)
    sources = {} if args.dataset == "none" else {args.dataset: real(args.dataset, args.queries)}
    for dim in args.dims:
        drawn = make_spectrum(dim, 100_000 + args.queries)
        sources[f"synthetic {dim}"] = (drawn[: -args.queries].copy(), drawn[-args.queries :].copy())
    rows: list[dict[str, Any]] = []
    for (name, (vectors, queries)), metric in itertools.product(sources.items(), args.metrics):
        data = with_truth(name, vectors, queries, metric)
        for codec in args.codecs:
            nlist = int(4 * np.sqrt(len(vectors)))
            with (
                tempfile.TemporaryDirectory() as folder,
                build(vectors, Path(folder) / "i", nlist=nlist, metric=metric, codec=codec) as index,
            ):
                about = {"data": name, "count": len(vectors), "nlist": nlist, "metric": metric, "codec": index.codec}
                for nprobe, threads in itertools.product(args.nprobes, args.threads):
                    rows += [about | row for row in measure(index, data, nprobe, threads, args.repeats)]
            _KNOWN.clear()
    keys = ("data", "metric", "codec", "what", "nprobe", "threads", "batch")
    show(
        "product-quantized lists on the host: our scan and faiss's",
        (*keys, "mode", "recall", "faiss's", "ours us", "faiss us", "faiss/ours", "quartiles", "again"),
        [
            (
                *(row[key] for key in keys),
                row["faiss_mode"],
                f"{row['recall']['ours']:.4f}",
                f"{row['recall']['faiss']:.4f}",
                row["us"]["ours"],
                row["us"]["faiss"],
                row["ratio"][0],
                f"{row['ratio'][1]:.2f}-{row['ratio'][2]:.2f}",
                row["noise"][0],
            )
            for row in rows
        ],
    )
    write(args.json, "pq", {"targets": {str(batch): target for batch, target in TARGETS.items()}, "rows": rows})


if __name__ == "__main__":
    main()
