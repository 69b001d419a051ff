"""A hot set that moves at half time, replayed with the refresh on and off; a stationary load; what a refresh costs.

Clustered vectors with topics (:mod:`benchmarks.common.clusters`); queries prefer few topics, and later others. Single
queries at a fixed rate on the caller's thread, on the stand-in device: its timings say nothing of a GPU.

Every request counts as late, so that the hit rate alone decides: the harder case for false triggers. Hit rates are by
bytes. "Fresh" is a plan from 2000 queries of the load after the move, and none from before, on the same windows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import Clusters, import_lists, make_clusters
from benchmarks.common.measure import arguments, show, write
from hybridindex.api import Index
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.planner import Arenas
from hybridindex.refresh.drift import DriftPolicy
from hybridindex.refresh.planner import PlanningHere, PlanningMode, RenewOptions
from hybridindex.refresh.refresher import RefreshConfig, Refresher
from hybridindex.types import F32, F64, I64

DIM, NPROBE, K = 64, 16, 10
FAMILY = 64
COVERAGE = 0.15
WINDOW = 300
#: Requests per second of the replays; the stationary load comes as fast as it is served.
RATE = 1000.0


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=32, help="size of the vectors")
    parser.add_argument("--windows", type=int, default=36, help="of 300 requests per replay; half of them moved")
    parser.add_argument("--rounds", type=int, default=3, help="replays of each side")


def queries_of(clusters: Clusters, n: int, seed: int, *, moved: bool) -> F32:
    """(n, DIM): topics by a Zipf law, their order turned round when it has moved."""
    rng = np.random.default_rng(seed)
    topics = -(-len(clusters.centres) // FAMILY)
    weight = 1 / np.arange(1, topics + 1) ** 1.2
    weight = weight[::-1] if moved else weight
    topic = rng.choice(topics, n, p=weight / weight.sum())
    centre: I64 = np.minimum(topic * FAMILY + rng.integers(0, FAMILY, n), len(clusters.centres) - 1)
    noise = rng.standard_normal((n, DIM)) / np.sqrt(DIM)
    found = clusters.centres[centre] + noise
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True), dtype=np.float32)


def config(planning: PlanningMode = "process") -> RefreshConfig:
    return RefreshConfig(
        planning=planning,
        drift=DriftPolicy(window_requests=WINDOW, window_s=3600, cool_down_s=0.5, off_windows=2, of_windows=3),
        slo_ms=1e-3,
        tick_s=0.1,
    )


def replay(
    index: Index, plan: Plan, queries: F32, *, refresh: PlanningMode | None, rate: float = RATE
) -> dict[str, Any]:
    """Hit rate of each window, latency of each search, and the stage of the update when it began."""
    latency, hits = np.empty(len(queries)), np.empty(len(queries))
    stage = np.full(len(queries), "idle", dtype="U16")
    with index.router(plan, ["cpu"], threads=1) as router, index.store() as store:
        for query in queries[:50]:
            router.search(query, K)
        with Refresher(index, router, store, config(refresh or "here")) as refresher:
            if refresh:
                refresher.start()
            begun = time.perf_counter()
            for number, query in enumerate(queries):
                wait = number / rate - (time.perf_counter() - begun)
                if wait > 0:
                    time.sleep(wait)
                stage[number] = refresher.status().stage
                start = time.perf_counter()
                result = router.search(query, K)
                latency[number] = time.perf_counter() - start
                hits[number] = result.hit_rate[0]
                if refresh:
                    refresher.observe(query, latency[number], result.hit_rate)
            status = refresher.status()
    return {
        "hit_rate": hits.reshape(-1, WINDOW).mean(axis=1),
        "latency_s": latency,
        "stage": stage,
        "triggers": status.triggers,
        "updates": dict(status.updates),
        "stage_seconds": {} if status.last_update is None else dict(status.last_update.stage_seconds),
        "bytes_moved": 0
        if status.last_update is None or status.last_update.proposal is None
        else status.last_update.proposal["bytes_to_move"],
        "observe_errors": status.observe_errors,
    }


def observe_seconds(index: Index, plan: Plan, queries: F32) -> F64:
    """(5,) seconds per call of ``observe``, in runs over all queries."""
    runs = []
    with index.router(plan, ["cpu"], threads=1) as router, Refresher(index, router, None, config()) as refresher:
        rate = np.full(1, 0.5, dtype=np.float32)
        for _ in range(5):
            start = time.perf_counter()
            for query in queries:
                refresher.observe(query, 0.001, rate)
            runs.append((time.perf_counter() - start) / len(queries))
    return np.array(runs)


def percentiles(seconds: F64) -> dict[str, float]:
    p50, p99, most = np.percentile(seconds * 1e3, [50, 99, 100]) if seconds.size else (np.nan,) * 3
    return {"n": int(seconds.size), "p50_ms": float(p50), "p99_ms": float(p99), "max_ms": float(most)}


def main() -> None:
    args = arguments(__doc__ or "", _options)
    clusters = make_clusters(DIM, args.mib << 20)
    half = args.windows // 2 * WINDOW
    steady = queries_of(clusters, half, 1, moved=False)
    moved = queries_of(clusters, half, 2, moved=True)
    load = np.concatenate((steady, moved))
    with tempfile.TemporaryDirectory() as folder:
        index = import_lists(clusters.vectors, clusters.lists, clusters.centres, "flat", "ip", Path(folder) / "i")
        with index:
            calibration = queries_of(clusters, 2000, 3, moved=False)
            profile = index.profile(calibration, nprobe=NPROBE, devices=["cpu"], max_seconds=6, save=False, threads=1)
            budget = 2 * (args.mib << 20)
            plan = index.plan(50, budget, profile, coverage=COVERAGE)
            sides: dict[str, list[dict[str, Any]]] = {"off": [], "on": [], "here": []}
            modes: dict[str, PlanningMode | None] = {"off": None, "on": "process", "here": "here"}
            for number in range(args.rounds):
                for side in sides if number % 2 == 0 else reversed(sides):
                    sides[side].append(replay(index, plan, load, refresh=modes[side]))
            alike = queries_of(clusters, 50 * WINDOW, 4, moved=False)
            stationary = replay(index, plan, alike, refresh="process", rate=np.inf)
            fresh = fresh_plan(index, plan, queries_of(clusters, 2000, 5, moved=True))
            best = hit_rates(index, fresh, load).reshape(-1, WINDOW).mean(axis=1)
            observing = observe_seconds(index, plan, steady)

    first = half // WINDOW
    windows = {side: np.mean([run["hit_rate"] for run in runs], axis=0) for side, runs in sides.items()}
    show(
        "hit rate by bytes, mean of the rounds; the load moves at half time",
        ("windows", "off", "on", "fresh plan"),
        [(f"{i + 1}", windows["off"][i], windows["on"][i], best[i]) for i in range(len(best))],
    )
    last = slice(-first // 2, None)
    # The first whole window that the new plan serves, and all from there on, against the fresh plan's.
    began = [first_after(run["stage"]) for run in sides["on"]]
    of_fresh = [
        (float(run["hit_rate"][w] / best[w]), float(run["hit_rate"][w:].mean() / best[w:].mean()))
        for run, w in zip(sides["on"], began, strict=True)
        if w < len(best)
    ]
    after = [run["hit_rate"][w:].mean() for run, w in zip(sides["on"], began, strict=True) if w < len(best)]
    if len(after) < args.rounds:
        print(f"{args.rounds - len(after)} rounds ended before a new plan served; give more --windows")
    rounds = {side: np.stack([run["latency_s"] for run in runs]) for side, runs in sides.items()}
    late = np.arange(len(load)) >= half
    # Pairs of rows do the same work: the same plan and load.
    tables = {
        "before the move, off": rounds["off"][:, ~late].ravel(),
        "before the move, on": rounds["on"][:, ~late].ravel(),
        "after it, off": rounds["off"][:, late].ravel(),
        "after it, on, with the new plan": np.concatenate(
            [run["latency_s"][w * WINDOW :] for run, w in zip(sides["on"], began, strict=True)]
        ),
    }
    for side, where in (("on", "in a process"), ("here", "here")):
        stage = np.stack([run["stage"] for run in sides[side]])
        made = ~np.isin(stage, ("idle", "verifying"))
        tables[f"while an update is made, planned {where}"] = rounds[side][made]
        for name in np.unique(stage[made]):
            tables[f"  {name}, planned {where}"] = rounds[side][stage == name]
    rows = {name: percentiles(seconds) for name, seconds in tables.items()}
    # What one side differs from itself by: the noise of a p99.
    noise = [percentiles(run)["p99_ms"] for run in rounds["off"]]
    show("searches", ("side", "n", "p50 ms", "p99 ms", "max ms"), [(name, *row.values()) for name, row in rows.items()])
    stages = [run["stage_seconds"] for run in sides["on"]]
    show("seconds of each stage, by round", ("stage", *(f"round {i + 1}" for i in range(args.rounds))),
         [(name, *(s.get(name, float("nan")) for s in stages)) for name in stages[0]])  # fmt: skip
    summary = {
        "predicted": plan.predicted_hit_rate,
        "before_move": float(windows["off"][:first].mean()),
        "after_move_off": float(windows["off"][last].mean()),
        # None: a round has none, and the others would show too much.
        "after_move_on": float(np.mean(after)) if len(after) == args.rounds else None,
        "after_move_fresh": float(best[last].mean()),
        "of_fresh_in_first_window": [one for one, _ in of_fresh],
        "of_fresh_from_then_on": [rest for _, rest in of_fresh],
        "p99_while_updated_over_before": rows["while an update is made, planned in a process"]["p99_ms"]
        / rows["before the move, off"]["p99_ms"],
        "stationary_windows": len(stationary["hit_rate"]),
        "stationary_triggers": stationary["triggers"],
        "triggers_on": [run["triggers"] for run in sides["on"]],
        "updates_on": [run["updates"] for run in sides["on"]],
        "bytes_moved_on": [run["bytes_moved"] for run in sides["on"]],
        "p99_ms_off_by_round": noise,
        "observe_us": (observing * 1e6).tolist(),
    }
    show("summary", ("what", "value"), list(summary.items()))
    write(
        args.json,
        "drift",
        {
            "device": "cpu (stand-in)",
            "vectors": len(clusters.vectors),
            "nlist": len(clusters.centres),
            "nprobe": NPROBE,
            "coverage": COVERAGE,
            "window": WINDOW,
            "rate": RATE,
            "rounds": args.rounds,
            "hit_rate_by_window": {**windows, "fresh": best},
            "latency": rows,
            "stage_seconds": stages,
            "summary": summary,
        },
    )


def first_after(stage: Any) -> int:
    """Number of the first whole window that began when the lists had moved; as many as there are where none did."""
    served = np.flatnonzero(stage == "verifying")
    return -(-int(served[0]) // WINDOW) if served.size else len(stage) // WINDOW


def fresh_plan(index: Index, plan: Plan, queries: F32) -> Plan:
    """What a refresh would plan from these queries alone, for the same request."""
    planner = PlanningHere(index.ivf)
    options = RenewOptions(n_hot=plan.resident_lists.size, decay=0.0, seed=0, min_queries=len(queries), notes={})
    profile = planner.renew(plan.analysis.profile, queries, options)
    arenas = Arenas(scratch=plan.request.scratch, room=plan.request.budgets)
    return planner.solve(profile, plan.request, arenas)


def hit_rates(index: Index, plan: Plan, queries: F32) -> F64:
    """(n,) by bytes, of ``queries`` (n, DIM) where just the lists of ``plan`` are resident."""
    probes, _ = index.ivf.quantize(index.ivf.transform(queries), NPROBE)
    work = index.list_bytes[probes]
    rates: F64 = np.where(plan.list_device[probes] >= 0, work, 0).sum(axis=1) / work.sum(axis=1)
    return rates


if __name__ == "__main__":
    main()
