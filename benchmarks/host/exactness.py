"""Random index, codec, metric, placement, nprobe, k and batch against faiss; then the same while snapshots swap under
load.

An answer differs when an id, a distance or a place disagrees with plain IVF search over the same probes beyond float
rounding and ties (the rule is in ``tests/oracle.py``). Target: 0.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.common.measure import arguments, show, write
from hybridindex.index.ivf import IVFIndex
from hybridindex.types import F32, Metric, SearchResult
from tests.clustered import clustered, hand_made_plan
from tests.oracle import check_answer

METRICS: tuple[Metric, ...] = ("ip", "l2")
CODECS = ("flat", "fp16", "sq8", "pq8", "pqfs16")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=120.0, help="in all")
    parser.add_argument("--seed", type=int, default=0)


def _placement(rng: np.random.Generator, nlist: int, n_devices: int) -> np.ndarray:
    placed = rng.random(nlist) < rng.choice([0.0, 0.1, 0.5, 1.0])
    return np.where(placed, rng.integers(0, n_devices, nlist), -1)


def _compare(index: IVFIndex, queries: F32, k: int, nprobe: int, result: SearchResult) -> int:
    """1 when the answer differs from plain IVF search."""
    transformed = index.transform(queries)
    probes, _ = index.quantize(transformed, nprobe)
    try:
        check_answer(index, transformed, probes, k, result.distances, result.ids)
    except AssertionError as error:
        print(f"difference: {index.codec} {index.metric} k={k} nprobe={nprobe}: {error}")
        return 1
    return 0


def main() -> None:
    args = arguments(__doc__, _options)
    from hybridindex.index import build
    from hybridindex.router import Router

    logging.disable(logging.WARNING)  # host-only codecs say so for every router
    rng = np.random.default_rng(args.seed)
    counts = {"searches": 0, "queries": 0, "differences": 0, "indexes": 0}
    swapping = {"searches": 0, "queries": 0, "differences": 0, "swaps": 0}
    deadline = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < deadline:
            codec, metric = str(rng.choice(CODECS)), METRICS[rng.integers(2)]
            dim, nlist = int(rng.choice([16, 32, 96])), int(rng.choice([1, 7, 64, 200]))
            n = int(rng.integers(1500, 6000))
            x = clustered(n, dim, seed=int(rng.integers(1 << 30)))
            number = counts["indexes"]
            with build(x, Path(folder) / str(number), nlist=nlist, metric=metric, codec=codec) as index:
                counts["indexes"] += 1
                for _ in range(6):
                    n_devices = int(rng.integers(1, 4))
                    plan = hand_made_plan(index, _placement(rng, nlist, n_devices), n_devices=n_devices)
                    with Router(index, plan=plan, devices=["cpu"] * n_devices) as router:
                        for _ in range(4):
                            queries = clustered(int(rng.integers(1, 65)), dim, seed=int(rng.integers(1 << 30)))
                            k, nprobe = int(rng.choice([1, 10, 100, 500])), int(rng.integers(1, nlist + 1))
                            result = router.search(queries, k, nprobe)
                            counts["searches"] += 1
                            counts["queries"] += len(queries)
                            counts["differences"] += _compare(index, queries, k, nprobe, result)
                _swap_under_load(index, rng, swapping)
    show("exactness", ("what", *counts), [("random placements", *counts.values())])
    show("exactness while snapshots swap", tuple(swapping), [tuple(swapping.values())])
    write(args.json, "exactness", {"random": counts, "swapping": swapping, "seconds": args.seconds})
    raise SystemExit(1 if counts["differences"] or swapping["differences"] else 0)


def _swap_under_load(index: IVFIndex, rng: np.random.Generator, counts: dict[str, int]) -> None:
    from hybridindex.router import Router

    plans = [hand_made_plan(index, _placement(rng, index.nlist, 2), n_devices=2) for _ in range(4)]
    stop = threading.Event()
    lock = threading.Lock()

    with Router(index, plan=plans[0], devices=["cpu", "cpu"]) as router:

        def client(seed: int) -> None:
            nprobe = min(8, index.nlist)
            while not stop.is_set():
                queries = clustered(8, index.dim, seed=seed)
                with router.session() as session:
                    session.lookahead(queries)
                    result = session.search(queries, 10, nprobe)
                difference = _compare(index, queries, 10, nprobe, result)
                with lock:
                    counts["searches"] += 1
                    counts["queries"] += len(queries)
                    counts["differences"] += difference
                seed += 100

        clients = [threading.Thread(target=client, args=(i,)) for i in range(3)]
        for thread in clients:
            thread.start()
        for turn in range(30):
            router.apply_plan(plans[turn % 4])
            counts["swaps"] += 1
        stop.set()
        for thread in clients:
            thread.join()
        router.check_invariants()


if __name__ == "__main__":
    main()
