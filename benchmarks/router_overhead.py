"""What the router adds to bare faiss: ``router.search`` against quantization plus ``search_preassigned``, all on the
host.

Same index, queries, probes and threads; both sides take turns. Targets: at batch >= 16 at most 5 % more time; at batch
1 at most 150 microseconds more.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common import Timing, arguments, interleave, show, write
from benchmarks.data import benchmark_dataset


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", default="demo", help="demo or full")
    parser.add_argument("--nprobe", type=int, default=224, help="224 reaches recall@10 0.95 on the log")
    parser.add_argument("--repeats", type=int, default=41)


def difference(a: Timing, b: Timing) -> tuple[float, float, float]:
    """Quartiles of the pairwise differences in seconds."""
    low, middle, high = np.percentile(np.array(a.seconds) - np.array(b.seconds), [25, 50, 75])
    return float(low), float(middle), float(high)


def main() -> None:
    args = arguments(__doc__, _options)
    import faiss

    import hybridindex as hx

    data = benchmark_dataset(args.dataset)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        vectors = data.centered(np.asarray(data.vectors()))
        log = data.centered(np.asarray(data.log_queries))
        nlist = int(4 * np.sqrt(len(vectors)))
        with hx.build(vectors, Path(folder) / "idx", nlist=nlist, metric="ip", codec="flat") as index:
            ivf = index.ivf.open_faiss()
            threads = faiss.omp_get_max_threads()
            params = faiss.SearchParametersIVF(nprobe=args.nprobe)
            with index.router(threads=threads) as router:
                for batch in (1, 4, 16, 64, 256):
                    rng = np.random.default_rng(batch)
                    queries = np.ascontiguousarray(log[rng.integers(0, len(log), batch)])

                    def bare(queries=queries, batch=batch):
                        probes, coarse = index.ivf.quantize(queries, args.nprobe)
                        distances = np.empty((batch, 10), np.float32)
                        ids = np.empty((batch, 10), np.int64)
                        ptr = faiss.swig_ptr
                        ivf.search_preassigned_c(
                            batch, ptr(queries), 10, ptr(probes), ptr(coarse), ptr(distances), ptr(ids), False, params
                        )
                        return ids

                    def routed(queries=queries):
                        return router.search(queries, 10, args.nprobe).ids

                    assert all(set(a) == set(b) for a, b in zip(bare(), routed(), strict=True)), "answers differ"
                    # Short calls are timed many at a time: a scheduling hiccup must not be the median.
                    calls = {1: 64, 4: 24, 16: 8}.get(batch, 2)
                    timed = interleave(
                        {"router": routed, "bare": bare, "bare again": bare},
                        repeats=args.repeats if batch <= 64 else args.repeats // 3,
                        calls=calls,
                    )
                    low, extra, high = difference(timed["router"], timed["bare"])
                    _, noise, _ = difference(timed["bare again"], timed["bare"])
                    base = timed["bare"].median
                    met = extra / base <= 0.05 if batch >= 16 else extra <= 150e-6 if batch == 1 else None
                    rows.append(
                        {
                            "batch": batch,
                            "extra_us": extra * 1e6,
                            "extra_us_quartiles": (low * 1e6, high * 1e6),
                            "extra_percent": 100 * extra / base,
                            "noise_us": noise * 1e6,
                            "noise_percent": 100 * noise / base,
                            "met": met,
                        }
                    )
    show(
        f"router over bare search_preassigned ({data.name}, nlist {nlist}, nprobe {args.nprobe}, {threads} threads)",
        ("batch", "extra us", "extra %", "A/A us", "A/A %", "target met"),
        [(r["batch"], r["extra_us"], r["extra_percent"], r["noise_us"], r["noise_percent"], r["met"]) for r in rows],
    )
    write(args.json, "router_overhead", {"nprobe": args.nprobe, "nlist": nlist, "threads": threads, "rows": rows})


if __name__ == "__main__":
    main()
