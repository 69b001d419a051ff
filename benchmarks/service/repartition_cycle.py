"""One whole update of the served plan, stage by stage: renew the profile, plan, compare, move, verify, commit.

Clustered vectors in many lists; the load moves, so that nearly every list of the plan is another. Lists are swapped in
by buffers as they land, which is part of moving. Verifying is the time in which two windows of requests are served.
The device is the stand-in: its timings say nothing of a GPU. No request runs beside the stages before verification.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import import_lists, make_clusters
from benchmarks.common.measure import arguments, environment, show, write
from benchmarks.service.drift import DIM, queries_of
from hybridindex.api import Index
from hybridindex.paging import PageGeometry
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.planner import Arenas
from hybridindex.refresh.drift import DriftPolicy
from hybridindex.refresh.planner import RenewOptions
from hybridindex.refresh.planner_process import PlanningProcess
from hybridindex.refresh.refresher import RefreshConfig, Refresher
from hybridindex.tiers.serving import page_bytes_of
from hybridindex.types import F32

NPROBE, K = 32, 10
WINDOW = 200
QUERIES = 4096
TARGET_S = 10.0
STAGES = ("profiling", "solving", "weighing", "saving", "moving", "verifying", "committing")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nlist", type=int, default=16_384, help="lists of the index")
    parser.add_argument("--mib", type=int, default=512, help="size of the vectors")
    parser.add_argument("--move-mib", type=int, default=64, help="about so much is to be moved")
    parser.add_argument("--rounds", type=int, default=3, help="updates on each side")
    parser.add_argument("--bandwidth-share", type=float, default=0.25, help="part of the time for copying")


def config(planning: Any, share: float) -> RefreshConfig:
    return RefreshConfig(
        drift=DriftPolicy(window_requests=WINDOW, window_s=3600),
        planning=planning,
        slo_ms=1e4,
        bandwidth_share=share,
        reservoir_queries=QUERIES,
    )


def cycle(index: Index, plan: Plan, recent: F32, served: F32, folder: Path, settings: RefreshConfig) -> dict[str, Any]:
    """Seconds of each stage of one update, of the whole, and of this process's own work for it."""
    with (
        index.router(plan, ["cpu"], threads=1) as router,
        index.store(str(folder / "control.sqlite")) as store,
        Refresher(index, router, store, settings) as refresher,
    ):
        rate = np.zeros(1, dtype=np.float32)
        for query in recent:
            refresher.observe(query, 0.001, rate)
        refresher.step()  # closes the windows of the load so far
        began, own = time.perf_counter(), time.thread_time()
        refresher.step("a benchmark")
        own = time.thread_time() - own
        for query in served:
            start = time.perf_counter()
            found = router.search(query, K)
            refresher.observe(query, time.perf_counter() - start, found.hit_rate)
        refresher.step()
        total = time.perf_counter() - began
        last = refresher.status().last_update
    assert last is not None
    assert last.outcome == "committed", last.why
    assert last.proposal is not None
    return {
        "seconds": {name: last.stage_seconds[name] for name in STAGES},
        "total": total,
        "own_cpu": own,
        "bytes": last.proposal["bytes_to_move"],
        "lists": last.proposal["lists_to_move"],
        "hit_rate": (last.proposal["hit_rate_before"], last.proposal["hit_rate_after"]),
    }


def cost_of_process(index: Index, plan: Plan, recent: F32) -> tuple[float, float]:
    """Seconds until a process that plans is prepared, and its peak memory in MiB when it has planned."""
    began = time.perf_counter()
    process = PlanningProcess(index.ivf, timeout_s=300, nice=19)
    try:
        process.prepare()
        start_s = time.perf_counter() - began
        options = RenewOptions(n_hot=plan.resident_lists.size, decay=None, seed=0, min_queries=64, notes={})
        profile = process.renew(plan.analysis.profile, recent, options)
        process.solve(profile, plan.request, Arenas(scratch=plan.request.scratch, room=plan.request.budgets))
        status = Path(f"/proc/{process.pid}/status").read_text()
    finally:
        process.close()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return start_s, int(peak.split()[1]) / 1024


def main() -> None:
    args = arguments(__doc__ or "", _options)
    clusters = make_clusters(DIM, args.mib << 20, nlist=args.nlist)
    recent = queries_of(clusters, QUERIES, 1, moved=True)
    served = queries_of(clusters, 2 * WINDOW, 2, moved=True)
    sides: dict[str, list[dict[str, Any]]] = {"process": [], "here": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        index = import_lists(clusters.vectors, clusters.lists, clusters.centres, "flat", "ip", folder / "i")
        with index:
            calibration = queries_of(clusters, 2000, 3, moved=False)
            profile = index.profile(calibration, nprobe=NPROBE, devices=["cpu"], max_seconds=6, save=False, threads=1)
            geometry = PageGeometry.for_code_size(index.ivf.code_size, page_bytes_of(index.ivf))
            pages = geometry.pages_for(index.list_sizes)
            coverage = (args.move_mib << 20) / (float(pages.mean()) * geometry.page_bytes) / index.nlist
            plan = index.plan(1e4, 2 * (args.mib << 20), profile, coverage=min(coverage, 1.0))
            for number in range(args.rounds):
                for side in sides if number % 2 == 0 else reversed(sides):
                    where = folder / f"{side}-{number}"
                    where.mkdir()
                    settings = config(side, args.bandwidth_share)
                    sides[side].append(cycle(index, plan, recent, served, where, settings))
            start_s, worker_mib = cost_of_process(index, plan, recent)

    medians = {
        side: {
            **{stage: float(np.median([run["seconds"][stage] for run in runs])) for stage in STAGES},
            "whole cycle": float(np.median([run["total"] for run in runs])),
            "of that, work of the serving process before verifying": float(np.median([run["own_cpu"] for run in runs])),
        }
        for side, runs in sides.items()
    }
    first = sides["process"][0]
    show(
        f"seconds of an update, median of {args.rounds}; {args.nlist} lists, {first['bytes'] / 2**20:.1f} MiB in "
        f"{first['lists']} lists to move; stand-in device",
        ("stage", "planned in a process", "planned here"),
        [(name, medians["process"][name], medians["here"][name]) for name in medians["process"]],
    )
    worst = max(run["total"] for run in sides["process"])
    summary = {
        "slowest cycle, s": worst,
        f"below {TARGET_S:g} s": worst < TARGET_S,
        "start of the process that plans, s": start_s,
        "its peak memory, MiB": worker_mib,
        "hit rate before and after": first["hit_rate"],
    }
    show("summary", ("what", "value"), [*summary.items(), *environment().items()])
    write(
        args.json,
        "repartition_cycle",
        {
            "device": "cpu (stand-in)",
            "nlist": args.nlist,
            "nprobe": NPROBE,
            "vectors": len(clusters.vectors),
            "config": dataclasses.asdict(config("process", args.bandwidth_share)),
            "rounds": sides,
            "medians": medians,
            "summary": summary,
        },
    )


if __name__ == "__main__":
    main()
