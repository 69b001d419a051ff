"""Four days of a real RAG trace with the plan of the first day: kept, refreshed on drift, or every night.

Arrivals and what was retrieved are RAGPulse's (:mod:`benchmarks.common.trace` says how passages become queries); the
clock is
the trace's own, so three days pass in seconds, and an update takes none of that time. Searches are real, on the
stand-in device; nothing here is a timing. Every request counts as late, so that the hit rate alone decides.

Whether a trigger should have fired is answered twice: each window beside the interval that the trigger holds it to, and
what the best lists of the day before, and of the day's own queries, would have served.

Both sides serve the same queries, so a window's difference is paired: it counts as worse where it lies below zero by
more than three standard errors of its requests' differences. Skipped, saying so, where the trace is not there.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common.clusters import import_lists, make_clusters
from benchmarks.common.measure import arguments, environment, show, write
from benchmarks.common.replay import hit_rates
from benchmarks.common.trace import DAY_S, TRACE, Arrival, queries_of_arrival, read_trace
from hybridindex.api import Index
from hybridindex.partitioner.plan import Plan
from hybridindex.refresh.drift import DriftPolicy, HitRatePrediction, predict_hit_rate
from hybridindex.refresh.refresher import RefreshConfig, Refresher
from hybridindex.refresh.update_cycle import UpdatePolicy
from hybridindex.types import F32, F64, I64

DIM, NPROBE, K = 64, 8, 10
WINDOW = 100
#: "nightly": also at midnight; "any gain": whatever a plan brings it is applied, else it must bring 0.02.
SIDES = ("static", "on drift", "nightly", "nightly, any gain")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE.jsonl", help="RAGPulse, days 0 to 3")
    parser.add_argument("--mib", type=int, default=64, help="size of the vectors")
    parser.add_argument("--nlist", type=int, default=8384, help="lists: about one per passage")
    parser.add_argument("--coverage", type=float, default=0.1, help="fraction of lists on the device")
    parser.add_argument("--noise", type=float, default=0.25, help="how far queries lie from their passages")


def config(side: str) -> RefreshConfig:
    return RefreshConfig(
        # Two windows of requests take hours here.
        update=UpdatePolicy(min_hit_rate_gain=0.0 if "any gain" in side else 0.02, verify_timeout_s=DAY_S / 2),
        # Queries of one request are about one thing: six of them count as one.
        drift=DriftPolicy(window_requests=WINDOW, window_s=2 * DAY_S, design_effect=6.0, cool_down_s=3600.0),
        slo_ms=1e-3,
        reservoir_queries=8192,
        retention_s=DAY_S,
        planning="here",
    )


def replay(index: Index, plan: Plan, load: list[tuple[Arrival, F32]], side: str) -> dict[str, Any]:
    """Hit rate of each request (n,), and what the refresh did."""
    now = load[0][0].at_s
    hits: F64 = np.empty(len(load))
    updates: list[dict[str, Any]] = []
    with (
        index.router(plan, ["cpu"], threads=1) as router,
        Refresher(index, router, None, config(side), clock=lambda: now) as refresher,
    ):
        for number, (arrival, queries) in enumerate(load):
            midnight = arrival.at_s // DAY_S > now // DAY_S
            now = arrival.at_s
            if side != "static" and midnight and "nightly" in side:
                refresher.step("nightly")
            result = router.search(queries, K)
            hits[number] = float(result.hit_rate.mean())
            if side != "static":
                refresher.observe(queries, 1.0, result.hit_rate)
                refresher.step()
            last = refresher.status().last_update
            if last is not None and last.outcome is not None and (not updates or updates[-1]["number"] != last.number):
                kept = {"number": last.number, "reason": last.reason, "outcome": str(last.outcome), "why": last.why}
                updates.append({**kept, "at_request": number, "day": now / DAY_S})
        status = refresher.status()
    return {"hits": hits, "triggers": status.triggers, "outcomes": dict(status.updates), "updates": updates}


def nearest(centres: F32, queries: F32) -> I64:
    """(n, NPROBE) lists that the queries probe."""
    found = np.argpartition(-(queries @ centres.T), NPROBE, axis=1)[:, :NPROBE]
    return np.asarray(found, dtype=np.int64)


def windows_of(hits: F64 | I64) -> npt.NDArray[Any]:
    """(w, WINDOW); the last, short window is left out."""
    return hits[: len(hits) // WINDOW * WINDOW].reshape(-1, WINDOW)


def compare(hits: F64, static: F64) -> dict[str, Any]:
    """Paired differences by window, with three standard errors as their noise."""
    difference = windows_of(hits) - windows_of(static)
    mean = difference.mean(axis=1)
    noise = 3 * difference.std(axis=1, ddof=1) / np.sqrt(WINDOW)
    overall = hits - static
    return {
        "difference": mean,
        "noise": noise,
        "worse_windows": int((mean < -noise).sum()),
        "better_windows": int((mean > noise).sum()),
        "worst_difference": float(mean.min()),
        "noise_of_worst": float(noise[int(mean.argmin())]),
        "mean_difference": float(overall.mean()),
        "noise_of_mean": float(3 * overall.std(ddof=1) / np.sqrt(len(overall))),
    }


def should_have_fired(hits: F64, queries: I64, predicted: HitRatePrediction) -> list[dict[str, Any]]:
    """Each window against the interval that the trigger holds it to. ``hits`` and ``queries`` are (n,) by request."""
    rows = []
    policy = config("on drift").drift
    for rates, counts in zip(windows_of(hits), windows_of(queries), strict=True):
        low, high = predicted.interval(int(counts.sum()), policy)
        rate = float((rates * counts).sum() / counts.sum())
        rows.append({"queries": int(counts.sum()), "hit_rate": rate, "low": low, "high": high})
    return rows


def with_hindsight(probes: Mapping[int, I64], list_bytes: I64, coverage: float) -> list[dict[str, Any]]:
    """Hit rate of each day's queries when the hottest lists are those of the first day, of the day before, or its own.

    ``probes``: day -> (n, nprobe) lists. The order is that of plans, by accesses. A day's own queries are known to no
    refresh: more than they bring, none can. Counted, not searched.
    """
    chosen = round(coverage * len(list_bytes))

    def hottest(seen: I64) -> npt.NDArray[np.bool_]:
        resident = np.zeros(len(list_bytes), dtype=np.bool_)
        accesses = np.bincount(seen.ravel(), minlength=len(list_bytes))
        resident[np.argsort(-accesses, kind="stable")[:chosen]] = True
        return resident

    rows = []
    for day in sorted(probes)[1:]:
        plans = {"first day": probes[min(probes)], "day before": probes[day - 1], "own queries": probes[day]}
        rates = {name: hit_rates(probes[day], hottest(seen), list_bytes)[0].mean() for name, seen in plans.items()}
        rows.append({"day": day, "queries": len(probes[day]), **rates})
    return rows


def main() -> None:
    args = arguments(__doc__ or "", _options)
    if not args.trace.exists():
        print(f"skipped: there is no trace at {args.trace}; give one with --trace")
        return
    arrivals = read_trace(args.trace)
    clusters = make_clusters(DIM, args.mib << 20, nlist=args.nlist)
    load = [(arrival, queries_of_arrival(arrival, clusters.centres, noise=args.noise)) for arrival in arrivals]
    first = np.concatenate([queries for arrival, queries in load if arrival.at_s < DAY_S])
    later = [pair for pair in load if pair[0].at_s >= DAY_S]
    with tempfile.TemporaryDirectory() as name:
        index = import_lists(clusters.vectors, clusters.lists, clusters.centres, "flat", "ip", Path(name) / "i")
        with index:
            profile = index.profile(first, nprobe=NPROBE, devices=["cpu"], max_seconds=4, save=False, threads=1)
            plan = index.plan(50, 8 * (args.mib << 20), profile, coverage=args.coverage)
            predicted = predict_hit_rate(plan.analysis.curve, plan.resident_lists)
            list_bytes = np.asarray(profile.list_bytes)
            runs = {side: replay(index, plan, later, side) for side in SIDES}

    static = runs["static"]["hits"]
    held_to = should_have_fired(static, np.array([len(queries) for _, queries in later]), predicted)
    by_day: dict[int, list[F32]] = {}
    for arrival, queries in load:
        by_day.setdefault(int(arrival.at_s // DAY_S), []).append(queries)
    probes = {day: nearest(clusters.centres, np.concatenate(parts)) for day, parts in by_day.items()}
    hindsight = with_hindsight(probes, list_bytes, args.coverage)
    compared = {side: compare(runs[side]["hits"], static) for side in SIDES[1:]}
    show(
        f"hit rate by bytes of each {WINDOW} requests; days 1 to 3 with the plan of day 0",
        ("window", "day", *SIDES, *(f"{side} - static" for side in SIDES[1:])),
        [
            (
                i + 1,
                f"{later[i * WINDOW][0].at_s / DAY_S:.2f}",
                *(float(windows_of(runs[side]["hits"])[i].mean()) for side in SIDES),
                *(f"{compared[s]['difference'][i]:+.3f} ± {compared[s]['noise'][i]:.3f}" for s in SIDES[1:]),
            )
            for i in range(len(windows_of(static)))
        ],
    )
    scalars = [key for key, value in compared[SIDES[1]].items() if not isinstance(value, np.ndarray)]
    show(
        "against the static plan",
        ("what", *SIDES[1:]),
        [
            *((key, *(compared[side][key] for side in SIDES[1:])) for key in scalars),
            ("hit rate", *(float(runs[side]["hits"].mean()) for side in SIDES[1:])),
            ("hit rate, static", *(float(static.mean()) for _ in SIDES[1:])),
            ("triggers", *(runs[side]["triggers"] for side in SIDES[1:])),
            ("updates", *(runs[side]["outcomes"] for side in SIDES[1:])),
        ],
    )
    show(
        "each window of the static plan against the interval of the trigger",
        ("window", *held_to[0]),
        [(i + 1, *row.values()) for i, row in enumerate(held_to)],
    )
    show("hit rate of a day by whose queries chose the lists", tuple(hindsight[0]), [(*r.values(),) for r in hindsight])
    show("environment", ("what", "value"), list(environment().items()))
    write(
        args.json,
        "drift_trace",
        {
            "trace": args.trace.name,
            "requests": len(later),
            "queries": sum(len(queries) for _, queries in later),
            "calibration_queries": len(first),
            "nlist": args.nlist,
            "nprobe": NPROBE,
            "coverage": args.coverage,
            "noise": args.noise,
            "predicted": plan.predicted_hit_rate,
            "window": WINDOW,
            "hit_rate_by_window": {side: windows_of(runs[side]["hits"]).mean(axis=1) for side in SIDES},
            "against_static": compared,
            "held_to": held_to,
            "outside": sum(not row["low"] <= row["hit_rate"] <= row["high"] for row in held_to),
            "hindsight": hindsight,
            "triggers": {side: runs[side]["triggers"] for side in SIDES},
            "updates": {side: runs[side]["updates"] for side in SIDES},
        },
    )


if __name__ == "__main__":
    main()
