"""The simulator against the real router: the same arrivals, predicted and measured latencies side by side.

An index is built and profiled, then the router serves open-loop Poisson loads at multiples of the rate that single
queries could be served at, on the host alone and with the hottest lists on a device. What a profile of whole batches
cannot know, what a request costs the engine and its answer's way to the caller, is fitted to the mean batch and the
median of one load, which is not compared. Each load is measured several times, in turns, and simulated with the very
same arrival times; medians are compared, and the spread of the measurements says what a comparison can show.

Targets: attainment within 5 points, p90 within 20 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import arguments, show, write
from benchmarks.data import benchmark_dataset
from benchmarks.serving import sorted_clusters

ATTAINMENT_TARGET, P90_TARGET = 0.05, 0.20
#: Of the rate of single queries: the load that calibrates an answer's way.
CALIBRATING = 0.45


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", default="synthetic", help="synthetic, demo or full")
    parser.add_argument("--vectors", type=int, default=200_000, help="of the synthetic dataset")
    parser.add_argument("--device", default="cpu", help="cuda:N, or cpu for the stand-in")
    parser.add_argument("--coverage", type=float, action="append", help="repeat; default 0 and 0.2")
    parser.add_argument("--load", type=float, action="append", help="multiple of the rate of single queries; repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-rate", type=float, default=1000.0, help="requests/s that the sender keeps up with")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--profile-seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=1, help="of the host scan: one core stays for the sender")


def _data(args: argparse.Namespace) -> tuple[Any, Any, int, int]:
    """Vectors, queries, nlist, nprobe."""
    if args.dataset == "synthetic":
        rng = np.random.default_rng(0)
        queries = sorted_clusters(6000, 128, n_centres=50, seed=2)
        return sorted_clusters(args.vectors, 128, n_centres=200, seed=1), rng.permutation(queries), 512, 64
    data = benchmark_dataset(args.dataset)
    log = data.centered(np.asarray(data.log_queries))
    log = np.ascontiguousarray(log[np.random.default_rng(0).permutation(len(log))])
    return data.centered(np.asarray(data.vectors())), log, 2975 if data.count > 300_000 else 1300, 64


def main() -> None:
    args = arguments(__doc__, _options)
    import hybridindex as hx
    from hybridindex.loadgen import poisson_arrivals, run_open_loop
    from hybridindex.simulator import Inputs, Workload, build_system, poisson, simulate

    vectors, queries, nlist, nprobe = _data(args)
    calibration, test = queries[: len(queries) * 2 // 3], np.ascontiguousarray(queries[len(queries) * 2 // 3 :])
    loads = args.load or [0.3, 0.6, 0.9, 1.2]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        index = hx.build(vectors, Path(folder) / "idx", nlist=nlist, metric="ip", nprobe=nprobe)
        profile = index.profile(
            np.ascontiguousarray(calibration),
            nprobe,
            devices=[args.device],
            threads=args.threads,
            max_seconds=args.profile_seconds,
            save=False,
        )
        for coverage in args.coverage or [0.0, 0.2]:
            plan = index.plan(1e6, 1 << 30, profile, coverage=coverage)
            inputs = Inputs(analysis=plan.analysis, slo_s=1.0, rate=1.0, plan=plan, budget_bytes=1 << 30)
            system = build_system("ours", inputs)
            assert not hasattr(system, "reason")
            sustained = system.table.capacity((1,))
            router = index.router(plan=plan, devices=[args.device] if coverage else [], threads=args.threads)
            with router:
                router.search(test[:256])

                def measured(load: float, seed: int, slo_s: float | None) -> tuple[Any, Workload]:
                    rate = min(load * sustained, args.max_rate)  # noqa: B023 - called in this round only
                    sys.stderr.write(f"coverage {coverage:g}, {rate:.0f} requests/s ...\n")  # noqa: B023
                    arrivals = poisson_arrivals(rate, args.seconds, seed)
                    found = run_open_loop(
                        router,  # noqa: B023
                        test,
                        rate=rate,
                        duration_s=args.seconds,
                        slo_ms=None if slo_s is None else slo_s * 1e3,
                        seed=seed,
                    )
                    return found, Workload(arrivals=arrivals)

                found, workload = measured(CALIBRATING, 100, None)
                rules = _calibrated(system, workload, found)
                system = replace(system, rules=rules)
                # Of a middling load: then attainment is neither 0 nor 1 at all rates.
                slo_s = simulate(system, poisson(min(0.8 * sustained, args.max_rate), 20_000, seed=1)).search.p90
                taken: list[list[Any]] = [[] for _ in loads]
                for _ in range(args.repeats):
                    for number, load in enumerate(loads):
                        found, workload = measured(load, number, slo_s)
                        taken[number].append((found, workload))
                for load, runs in zip(loads, taken, strict=True):
                    started = time.perf_counter()
                    told = simulate(system, runs[0][1], slo_s=slo_s)
                    seconds = time.perf_counter() - started
                    rows.append(_row(coverage, load, [found for found, _ in runs], told, rules, seconds))
        index.close()
    show(
        "simulator / router",
        ("coverage", "rate", "batch", "p50 ms", "p90 ms", "p99 ms", "attained", "p90 error", "p90 spread"),
        [
            (
                r["coverage"],
                r["rate"],
                *(
                    f"{r['predicted'][n]:.3g} / {r['measured'][n]:.3g}"
                    for n in ("mean_batch", "p50_ms", "p90_ms", "p99_ms", "attainment")
                ),
                f"{r['p90_error']:+.0%}",
                f"{r['p90_spread']:.0%}",
            )
            for r in rows
        ],
    )
    worst = {name: max(abs(r[name]) for r in rows) for name in ("p90_error", "attainment_error")}
    print(
        f"worst p90 error {worst['p90_error']:.1%} (target {P90_TARGET:.0%}), "
        f"worst attainment error {worst['attainment_error']:.3f} (target {ATTAINMENT_TARGET})"
    )
    write(
        args.json,
        "simulator_check",
        {"targets": {"p90_error": P90_TARGET, "attainment_error": ATTAINMENT_TARGET}, "worst": worst, "rows": rows},
    )


def _calibrated(system: Any, workload: Any, found: Any) -> Any:
    """Rules under which the simulated batches are as large, and the median as long, as those measured."""
    from hybridindex.simulator import EngineRules, simulate

    low, high = 0.0, found.p50_ms / 1e3
    for _ in range(10):
        middle = (low + high) / 2
        told = simulate(replace(system, rules=EngineRules(per_request_s=middle)), workload)
        low, high = (middle, high) if told.mean_batch < found.mean_batch else (low, middle)
    told = simulate(replace(system, rules=EngineRules(per_request_s=low)), workload)
    return EngineRules(per_request_s=low, answer_s=max(0.0, found.p50_ms / 1e3 - told.search.p50))


def _row(coverage: float, load: float, runs: list[Any], told: Any, rules: Any, seconds: float) -> dict[str, Any]:
    predicted = {f"p{p}_ms": getattr(told.search, f"p{p}") * 1e3 for p in (50, 90, 99)}
    predicted |= {"attainment": told.attainment, "hit_rate": told.hit_rate, "mean_batch": told.mean_batch}
    measured = {name: float(np.median([getattr(found, name) for found in runs])) for name in predicted}
    p90 = [found.p90_ms for found in runs]
    return {
        "coverage": coverage,
        "load": load,
        "rate": runs[0].rate,
        "requests": runs[0].n_requests,
        "slo_ms": told.slo_s * 1e3,
        "answer_ms": rules.answer_s * 1e3,
        "per_request_ms": rules.per_request_s * 1e3,
        "predicted": predicted,
        "measured": measured,
        "p90_error": predicted["p90_ms"] / measured["p90_ms"] - 1,
        "p90_spread": max(p90) / min(p90) - 1,
        "attainment_error": told.attainment - measured["attainment"],
        "simulated_per_s": runs[0].n_requests / seconds,
    }


if __name__ == "__main__":
    main()
