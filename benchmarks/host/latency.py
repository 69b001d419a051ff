"""Predicted against measured latency of a routed hybrid batch, on real queries that the profile never saw.

For every batch size and coverage: the plan's prediction (median) against the median of routed batches of fresh test
queries, interleaved so that drift of the machine's speed spreads evenly. Target: median relative error at most 20 %.
Without a GPU the device is the stand-in, profiled like a device.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.common.data import benchmark_dataset
from benchmarks.common.measure import arguments, show, write

BATCHES = (1, 4, 16, 64)
COVERAGES = (0.0, 0.05, 0.1, 0.2, 0.4)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", default="demo", help="demo or full")
    parser.add_argument("--device", default="cpu", help="cuda:N, or cpu for the stand-in")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--profile-seconds", type=float, default=60)


def main() -> None:
    args = arguments(__doc__, _options)
    import hybridindex as hx

    data = benchmark_dataset(args.dataset)
    nlist = 2975 if data.count > 300_000 else 1300
    nprobe = 64
    rng = np.random.default_rng(0)
    log = data.centered(np.asarray(data.log_queries))
    order = rng.permutation(len(log))
    calibration, test = np.ascontiguousarray(log[order[:4000]]), np.ascontiguousarray(log[order[4000:]])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        index = hx.build(data.centered(np.asarray(data.vectors())), Path(folder) / "idx", nlist=nlist, metric="ip")
        profile = index.profile(
            calibration, nprobe, devices=[args.device], max_seconds=args.profile_seconds, save=False
        )
        plans = {c: index.plan(1e6, 1 << 30, profile, coverage=c) for c in COVERAGES}
        routers = {c: index.router(plan=plan, devices=[args.device]) for c, plan in plans.items()}
        label = next(iter(routers.values())).devices[0].label
        taken: dict[tuple[float, int], list[float]] = {(c, b): [] for c in COVERAGES for b in BATCHES}
        for router in routers.values():
            router.search(test[:256])
        for _ in range(args.repeats):
            for key in rng.permutation(list(taken)).tolist():
                coverage, batch = float(key[0]), int(key[1])
                queries = np.ascontiguousarray(test[rng.integers(0, len(test), batch)])
                start = time.perf_counter()
                routers[coverage].search(queries)
                taken[coverage, batch].append(time.perf_counter() - start)
        for (coverage, batch), seconds in taken.items():
            measured = float(np.median(seconds)) * 1e3
            predicted = plans[coverage].predicted_latency_ms(batch)
            halves = [float(np.median(seconds[i::2])) * 1e3 for i in (0, 1)]
            rows.append(
                {
                    "coverage": coverage,
                    "batch": batch,
                    "predicted_ms": predicted,
                    "measured_ms": measured,
                    "error": abs(predicted - measured) / measured,
                    "noise": abs(halves[0] - halves[1]) / measured,
                }
            )
        for router in routers.values():
            router.close()
        plan = plans[0.1]
        index.close()
    error = float(np.median([r["error"] for r in rows]))
    noise = float(np.median([r["noise"] for r in rows]))
    show(
        f"hybrid batch latency, device {label}, host model {plan.host_model}: "
        f"median error {error:.1%} (half against half of the same samples {noise:.1%})",
        ("coverage", "batch", "predicted ms", "measured ms", "error"),
        [(r["coverage"], r["batch"], r["predicted_ms"], r["measured_ms"], r["error"]) for r in rows],
    )
    write(
        args.json,
        "latency",
        {
            "target": 0.20,
            "median_error": error,
            "noise": noise,
            "device": label,
            "host_model": plan.host_model,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
