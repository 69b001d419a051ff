"""Searches on the host beside processes that keep cores busy: routers of one thread against one of two.

A neighbour is a process of the same priority that only computes. A search with two threads should not wait for the one
that has no core. The sides take turns call by call, so all see the same neighbours, whoever else computes on the
machine included. Two of the three sides are alike, one thread each: the ratio of their 90th percentiles (A/A) is what
the machine's noise makes of nothing.

Per setting: median and 90th percentile of each side, those of coarse quantization and of the scan alone, and the ratio
of two threads to one, over both sides of one thread. flat and sq8 are scanned by us, pq and pqfs by faiss.

Target: the 90th percentile with two threads is at most 1.3 times that with one, beside 0, 1 and 2 neighbours.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import Clusters, import_lists, make_clusters, make_queries
from benchmarks.common.measure import arguments, show, write
from hybridindex.router.batch.stages import COARSE, HOST_SCAN, BatchReport
from hybridindex.router.router import Router
from hybridindex.types import F32, F64

K = 10
MOST_RATIO = 1.3
#: Threads of each side.
SIDES = {"one": 1, "again": 1, "two": 2}
#: What is timed of each call.
STAGES = ("search", COARSE, HOST_SCAN)
#: Stops when its parent is gone, however that ended.
_NEIGHBOUR = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(10_000))"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--quiet-batches", type=int, nargs="+", default=[64], help="without neighbours only")
    parser.add_argument("--codecs", nargs="+", default=["flat", "sq8", "pq96", "pqfs96"])
    parser.add_argument("--seconds", type=float, default=5.5, help="of calls in each setting")
    parser.add_argument("--rounds", type=int, default=3, help="times that all settings take turns")
    parser.add_argument("--megabytes", type=int, default=48, help="float32 size of the dataset")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--nprobe", type=int, default=32)


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """So many processes that compute."""
    started = [subprocess.Popen([sys.executable, "-c", _NEIGHBOUR]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


class TimedRouter:
    """A router of so many threads, and the seconds of its searches by stage."""

    def __init__(self, index: Any, threads: int) -> None:
        self.router = Router(index.ivf, threads=threads)
        self._report: BatchReport | None = None
        self.router.on_batch.append(self._note)

    def _note(self, report: BatchReport) -> None:
        self._report = report

    def search(self, queries: F32, nprobe: int) -> list[float]:
        """Seconds of STAGES."""
        start = time.perf_counter()
        self.router.search(queries, K, nprobe)
        whole = time.perf_counter() - start
        assert self._report is not None
        took = {stage.stage: stage.busy_s for stage in self._report.stages}
        return [whole, *[took.get(stage, 0.0) for stage in STAGES[1:]]]


@dataclass(frozen=True, slots=True)
class Taken:
    """What one setting took: by side, (calls, STAGES) seconds, in runs of calls."""

    runs: dict[str, list[list[float]]] = field(default_factory=lambda: {side: [] for side in SIDES})
    loads: list[float] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """Percentiles in milliseconds; ratios of two threads to one, and of one to one."""
        row: dict[str, Any] = {}
        taken: dict[str, F64] = {side: np.array(runs) * 1e3 for side, runs in self.runs.items()}
        sides = {"1": np.concatenate([taken["one"], taken["again"]]), "2": taken["two"]}
        for at, stage in enumerate(STAGES):
            for threads, values in sides.items():
                p50, p90, p99 = np.percentile(values[:, at], [50, 90, 99])
                found = {"p50": p50, "p90": p90, "p99": p99} if stage == "search" else {"p90": p90}
                row |= {f"{stage}_{name}_ms_{threads}": value for name, value in found.items()}
        p90 = {side: float(np.percentile(values[:, 0], 90)) for side, values in taken.items()}
        row["p50_ratio"] = row["search_p50_ms_2"] / row["search_p50_ms_1"]
        row["p90_ratio"] = row["search_p90_ms_2"] / row["search_p90_ms_1"]
        row["p90_noise"] = p90["again"] / p90["one"]
        return row | {"met": row["p90_ratio"] <= MOST_RATIO, "calls": len(taken["two"]), "load_average": self.loads}


def measure(args: argparse.Namespace, data: Clusters, codec: str, folder: Path) -> list[dict[str, Any]]:
    """All settings of one codec, in turns."""
    rng = np.random.default_rng(0)
    queries = make_queries(data.centres, 2048, "low")
    index = import_lists(data.vectors, data.lists, data.centres, codec, "ip", folder / codec)
    settings = [*product(args.batches, args.neighbours), *product(args.quiet_batches, [0])]
    taken = {setting: Taken() for setting in settings}
    routers = {side: TimedRouter(index, threads) for side, threads in SIDES.items()}

    def call_all(batch: int, seconds: float) -> Iterator[tuple[str, list[float]]]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            at = int(rng.integers(0, len(queries) - batch))
            for side in rng.permutation(list(SIDES)).tolist():
                yield side, routers[side].search(queries[at : at + batch], args.nprobe)

    for _ in range(args.rounds):
        for batch, count in rng.permutation(settings).tolist():
            seconds = args.seconds / args.rounds
            with busy_neighbours(count):
                for _warm in call_all(batch, seconds / 8):
                    pass
                for side, times in call_all(batch, seconds):
                    taken[batch, count].runs[side].append(times)
            taken[batch, count].loads.append(os.getloadavg()[0])
    for timed in routers.values():
        timed.router.close()
    index.close()
    return [
        {"codec": codec, "dim": args.dim, "batch": batch, "neighbours": count, **found.describe()}
        for (batch, count), found in taken.items()
    ]


def main() -> None:
    args = arguments(__doc__, _options)
    data = make_clusters(args.dim, args.megabytes << 20)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for codec in args.codecs for row in measure(args, data, codec, Path(folder))]
    names = ("codec", "batch", "neighbours", "p50_ratio", "p90_ratio", "p90_noise", "met", "calls")
    times = [f"{stage}_{name}" for stage in STAGES for name in ("p90_ms_1", "p90_ms_2")]
    columns = ["search_p50_ms_1", "search_p50_ms_2", *times]
    show(
        "one thread against two beside busy neighbours, ms",
        (*names, *columns),
        [[row[name] for name in (*names, *columns)] for row in rows],
    )
    write(args.json, "busy_neighbours", {"most_ratio": MOST_RATIO, "rows": rows})


if __name__ == "__main__":
    main()
