"""The plan of a served index goes from 0.1 to 0.6 to 0.2 of the lists while requests come, and the arena follows.

After each change: lists that the plan wants against lists that are on the device, and the arena's bytes against the
budget, which are read all the time. Every answer is compared with the host's. Latencies of requests that were under way
during a change, planning included, stand beside those of the quiet time before it, and quiet times beside each other
(A/A). Plans are made in a process of their own, from recent queries, or with --no-refresh from the stored profile. The
device is the stand-in: its copies and scans take the host's cores.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import import_lists, make_clusters
from benchmarks.common.measure import arguments, environment, show, write
from benchmarks.service.drift import DIM, queries_of
from hybridindex.api import Index
from hybridindex.config import RouterConfig
from hybridindex.refresh.config import RefreshConfig
from hybridindex.refresh.drift import DriftPolicy
from hybridindex.refresh.refresher import Refresher
from hybridindex.refresh.update_cycle import UpdatePolicy
from hybridindex.router.router import Router
from hybridindex.service.config import ServiceConfig
from hybridindex.service.core import Service
from hybridindex.store.control import ControlStore
from hybridindex.types import F32, F64

NPROBE, K = 32, 10
COVERAGES = (0.6, 0.2, 0.1)
_LOOK_S = 0.002


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nlist", type=int, default=2048, help="lists of the index")
    parser.add_argument("--mib", type=int, default=256, help="size of the vectors")
    parser.add_argument("--rate", type=float, default=60.0, help="requests a second")
    parser.add_argument("--quiet", type=float, default=6.0, help="seconds before each change")
    parser.add_argument("--rounds", type=int, default=3, help="times 0.1 -> 0.6 -> 0.2 -> 0.1")
    parser.add_argument("--refresh", action=argparse.BooleanOptionalAction, default=True, help="with a refresher")
    parser.add_argument("--planning", choices=("process", "here"), default="process", help="where plans are made")
    parser.add_argument("--bandwidth-share", type=float, default=0.1, help="part of the time for copying")


class Load:
    """Requests at a constant rate from one thread, and what became of them."""

    def __init__(self, service: Service, queries: F32, ids: Any, distances: F32, rate: float) -> None:
        self._router, self._queries, self._ids, self._distances = service.router, queries, ids, distances
        self._rate = rate
        #: (came, done) of each answered request, seconds.
        self.times: list[tuple[float, float]] = []
        self.failed: list[str] = []
        self.wrong = 0
        #: Most bytes of arena and scratch that were seen, and samples.
        self.most_bytes, self.looks = 0, 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send), threading.Thread(target=self._look)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        number, due = 0, time.perf_counter()
        while not self._stop.is_set():
            due += 1 / self._rate
            time.sleep(max(0.0, due - time.perf_counter()))
            row = number % len(self._queries)
            number += 1
            came = time.perf_counter()
            future = self._router.submit(self._queries[row], K)
            future.add_done_callback(lambda told, row=row, came=came: self._note(told, row, came))  # type: ignore[misc]

    def _note(self, future: Any, row: int, came: float) -> None:
        error = future.exception()
        if error is not None:
            self.failed.append(repr(error))
            return
        self.times.append((came, time.perf_counter()))
        found = future.result()
        same = np.allclose(found.distances[0], self._distances[row], rtol=2e-4, atol=2e-4)
        self.wrong += not (same and set(found.ids[0]) == set(self._ids[row]))

    def _look(self) -> None:
        while not self._stop.wait(_LOOK_S):
            for tier in self._router.devices:
                self.most_bytes = max(self.most_bytes, tier.capacity_bytes + tier.reserved_bytes)
                self.looks += 1

    def latencies_ms(self, began: float, ended: float) -> F64:
        """Of requests that were under way at some time between the two."""
        times = np.array([(came, done) for came, done in list(self.times) if came < ended and done > began])
        return (times[:, 1] - times[:, 0]) * 1e3 if len(times) else np.zeros(0)


def _refresher(index: Index, router: Router, store: ControlStore) -> Refresher:
    """Makes plans in a process of their own; each serves for good as soon as it is there. Nothing else begins one."""
    config = RefreshConfig(
        drift=DriftPolicy(window_s=1e6, window_requests=1 << 30), update=UpdatePolicy(verify_windows=0)
    )
    return Refresher(index, router, store, config)


def _p99(latencies: list[F64]) -> float:
    return float(np.percentile(np.concatenate(latencies), 99))


def main() -> None:
    args = arguments(__doc__ or "", _options)
    clusters = make_clusters(DIM, args.mib << 20, nlist=args.nlist)
    queries = queries_of(clusters, 512, 2, moved=False)
    budget = 2 * (args.mib << 20)
    rows: list[dict[str, Any]] = []
    quiet: list[list[F64]] = []
    moving: list[list[F64]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "i"
        with import_lists(clusters.vectors, clusters.lists, clusters.centres, "flat", "ip", folder) as index:
            calibration = queries_of(clusters, 2000, 3, moved=False)
            profile = index.profile(calibration, nprobe=NPROBE, devices=["cpu"], max_seconds=6, threads=1)
            plan = index.plan(1e4, budget, profile, coverage=0.1)
            index.apply_plan(plan)
            with index.router() as host:
                truth = host.search(queries, K, NPROBE)
        router = RouterConfig(devices=("cpu",), device_budget_bytes=budget, lookahead_bytes=8 << 20, threads=1)
        service = Service.open(
            folder,
            ServiceConfig(router=router),
            make_refresher=_refresher if args.refresh else None,
            planning=RefreshConfig(planning=args.planning),
        )
        try:
            service.warm_up()
            service.start()
            if service.refresher is not None:
                service.refresher.offer(queries)
            with Load(service, queries, truth.ids, truth.distances, args.rate) as load:
                time.sleep(2.0)
                for number in range(args.rounds):
                    for coverage in COVERAGES:
                        rested = time.perf_counter()
                        time.sleep(args.quiet)
                        began = time.perf_counter()
                        answer = service.repartition(
                            apply=True, coverage=coverage, bandwidth_share=args.bandwidth_share
                        )
                        ended = time.perf_counter()
                        time.sleep(0.2)
                        quiet.append([load.latencies_ms(rested, began)])
                        moving.append([load.latencies_ms(began, ended)])
                        [tier] = service.router.devices
                        planned, placed = answer["planned"], answer["placed"]
                        rows.append(
                            {
                                "round": number,
                                "coverage": coverage,
                                "planned_lists": planned["lists"],
                                "resident_lists": placed["lists"],
                                "planned_bytes": planned["bytes"],
                                "resident_bytes": placed["bytes"],
                                "arena_bytes": tier.capacity_bytes,
                                "seconds": ended - began,
                                "requests": len(moving[-1][0]),
                                "p99_ms": _p99(moving[-1]),
                                "p99_ms_quiet": _p99(quiet[-1]),
                            }
                        )
            requests = len(load.times)
        finally:
            service.close()
    before, during = _p99([part for parts in quiet for part in parts]), _p99([p for parts in moving for p in parts])
    halves = _p99([p for parts in quiet[::2] for p in parts]), _p99([p for parts in quiet[1::2] for p in parts])
    summary = {
        "requests": requests,
        "failed": len(load.failed),
        "answers other than the host's": load.wrong,
        "resident = planned each time": all(row["planned_lists"] == row["resident_lists"] for row in rows),
        "p99 quiet, ms": before,
        "p99 during a change, ms": during,
        "ratio": during / before,
        "A/A ratio of quiet times": max(halves) / min(halves),
        "most bytes seen": load.most_bytes,
        "budget": budget,
        "within the budget": load.most_bytes <= budget,
    }
    show(
        f"{args.nlist} lists, {args.mib} MiB, {args.rate:g} requests/s; stand-in device",
        ("coverage", "planned", "resident", "arena MiB", "seconds", "p99 ms", "p99 quiet"),
        [
            (
                row["coverage"], row["planned_lists"], row["resident_lists"], row["arena_bytes"] / 2**20,
                row["seconds"], row["p99_ms"], row["p99_ms_quiet"],
            )
            for row in rows
        ],
    )  # fmt: skip
    show("summary", ("what", "value"), [*summary.items(), *environment().items()])
    write(
        args.json,
        "repartition_load",
        {
            "device": "cpu (stand-in)",
            "nlist": args.nlist,
            "nprobe": NPROBE,
            "mib": args.mib,
            "rate": args.rate,
            "refresh": args.refresh,
            "planning": args.planning,
            "bandwidth_share": args.bandwidth_share,
            "changes": rows,
            "summary": summary,
        },
    )


if __name__ == "__main__":
    main()
