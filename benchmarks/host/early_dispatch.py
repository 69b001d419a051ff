"""What answering each request as soon as its own queries are done gains over answering a batch as a whole.

Closed rounds: 16 or 64 single-query requests, submitted one after another without waiting, with nprobe drawn
log-uniformly from 8 to 256, to a router with early_dispatch and to one without. The engine takes what waits, so the
first request of a round is often a batch of its own and most others share the next ones; both sides live with that.
Latency runs from just before a request's submit to its future's done callback; throughput is requests over the time
from the first submit to the last answer. Both routers get the same rounds in turns; ratios are paired by round. A
second router without early dispatch gives the A/A noise. Targets: mean or p95 latency 16 % lower; throughput at least
0.98 of the other side's.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.data import benchmark_dataset
from benchmarks.common.measure import Timing, arguments, ratio_of_medians, show, write
from hybridindex.types import F32, F64, I64

SIZES = (16, 64)
NPROBE = (8, 256)
LATENCY_TARGET = -16.0
THROUGHPUT_TARGET = 0.98
MEASURES = ("mean", "p95", "wall")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", default="demo", help="demo or full")
    parser.add_argument("--codec", default="flat")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)


def run_round(router: Any, queries: F32, nprobes: I64) -> tuple[F64, float]:
    """One closed round: every request's latency (n,), and the time from the first submit to the last answer."""
    n = len(queries)
    submitted, answered = np.zeros(n), np.zeros(n)
    left, lock, last = [n], threading.Lock(), threading.Event()

    def done(number: int, future: Future[Any]) -> None:
        answered[number] = time.perf_counter()
        assert future.exception() is None, "a request failed"
        with lock:
            left[0] -= 1
            if not left[0]:
                last.set()

    for number in range(n):
        submitted[number] = time.perf_counter()
        future = router.submit(queries[number], 10, int(nprobes[number]))
        future.add_done_callback(lambda future, number=number: done(number, future))
    assert last.wait(60), "a round was not answered within a minute"
    return answered - submitted, float(answered.max() - submitted[0])


def measure(routers: dict[str, Any], log: F32, size: int, rounds: int) -> dict[str, Any]:
    """The row of one round size."""
    rng = np.random.default_rng(size)
    taken: dict[tuple[str, str], list[float]] = {(side, measure): [] for side in routers for measure in MEASURES}
    all_latencies: dict[str, list[float]] = {side: [] for side in routers}
    low, high = np.log(NPROBE)
    for number in range(-3, rounds):
        queries = np.ascontiguousarray(log[rng.integers(0, len(log), size)])
        nprobes = np.exp(rng.uniform(low, high, size)).round().astype(np.int64)
        for side in rng.permutation(list(routers)).tolist():
            latencies, wall = run_round(routers[side], queries, nprobes)
            if number < 0:  # warming up
                continue
            all_latencies[side].extend(latencies.tolist())
            for name, value in zip(MEASURES, (latencies.mean(), np.percentile(latencies, 95), wall), strict=True):
                taken[side, name].append(float(value))
    row: dict[str, Any] = {"requests": size, "rounds": rounds}
    for side, values in all_latencies.items():
        row[f"{side} ms"] = {"mean": 1e3 * float(np.mean(values)), "p95": 1e3 * float(np.percentile(values, 95))}
        row[f"{side} requests/s"] = size / Timing(tuple(taken[side, "wall"])).median
    for name in MEASURES:
        timings = {side: Timing(tuple(taken[side, name])) for side in routers}
        row[name] = ratio_of_medians(timings["early"], timings["whole"])
        row[f"{name} A/A"] = ratio_of_medians(timings["whole again"], timings["whole"])
    row["mean %"], row["p95 %"] = 100 * (row["mean"][0] - 1), 100 * (row["p95"][0] - 1)
    row["throughput"] = 1 / row["wall"][0]
    row["latency_met"] = min(row["mean %"], row["p95 %"]) <= LATENCY_TARGET
    row["throughput_met"] = row["throughput"] >= THROUGHPUT_TARGET
    return row


def main() -> None:
    args = arguments(__doc__, _options)
    import hybridindex as hx

    data = benchmark_dataset(args.dataset)
    vectors = data.centered(np.asarray(data.vectors()))
    log = data.centered(np.asarray(data.log_queries))
    nlist = int(4 * np.sqrt(len(vectors)))
    with (
        tempfile.TemporaryDirectory() as folder,
        hx.build(vectors, Path(folder) / "idx", nlist=nlist, metric="ip", codec=args.codec) as index,
        index.router(threads=args.threads, early_dispatch=True) as early,
        index.router(threads=args.threads, early_dispatch=False) as whole,
        index.router(threads=args.threads, early_dispatch=False) as again,
    ):
        routers = {"early": early, "whole": whole, "whole again": again}
        rows = [measure(routers, log, size, args.rounds) for size in SIZES]
    show(
        f"early dispatch against whole batches ({data.name}, {args.codec}, nlist {nlist}, {args.threads} threads, "
        f"nprobe {NPROBE[0]} to {NPROBE[1]})",
        ("requests", "mean (A/A)", "p95 (A/A)", f"{LATENCY_TARGET:g} %", "req/s (A/A)", f"{THROUGHPUT_TARGET:g} x"),
        [
            (
                r["requests"],
                f"{r['mean %']:+.1f} % ({100 * (r['mean A/A'][0] - 1):+.1f})",
                f"{r['p95 %']:+.1f} % ({100 * (r['p95 A/A'][0] - 1):+.1f})",
                "yes" if r["latency_met"] else "NO",
                f"{r['throughput']:.3f} x ({1 / r['wall A/A'][0]:.3f})",
                "yes" if r["throughput_met"] else "NO",
            )
            for r in rows
        ],
    )
    write(
        args.json,
        "early_dispatch",
        {
            "latency_target_percent": LATENCY_TARGET,
            "throughput_target": THROUGHPUT_TARGET,
            "nlist": nlist,
            "codec": args.codec,
            "threads": args.threads,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
