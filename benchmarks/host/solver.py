"""Solving and placing at nlist 65,536 over 8 devices. Target: at most 50 ms, or 100 ms where the SLO cannot be met.

The paper: under a minute.

The profile is synthetic (Zipf accesses, 4,000 queries x 128 probes); only time is measured here. Statistics that
depend on the profile alone (coverage curve, model validation, latency fits) are computed once per profile and timed
apart.
"""

from __future__ import annotations

from typing import Any

from benchmarks.common.measure import arguments, interleave, show, write
from tests.partitioner.synthetic import make_profile

TARGET_MS = 50.0


def main() -> None:
    args = arguments(__doc__)
    from hybridindex.partitioner import analyse, make_plan
    from hybridindex.partitioner.request import PlanRequest

    profile = make_profile(nlist=65_536, n=4000, nprobe=128, seed=0)
    analysis = analyse(profile)
    host = make_plan(profile, PlanRequest.resolve(slo_ms=1e6, device_budget_bytes=0, coverage=0.0), analysis=analysis)
    slo_ms = host.predicted_latency_ms(16) * 1.2
    budget = int(profile.nbytes // 8)

    def plan(tighter: float = 1.0, **options: Any) -> object:
        return make_plan(
            profile,
            PlanRequest.resolve(slo_ms=slo_ms / tighter, device_budget_bytes=budget, n_devices=8, **options),
            analysis=analysis,
        )

    rate = 16 / (slo_ms / 2e3)
    solved = plan(rate_qps=rate)
    too_high = solved.max_sustainable_qps * 100  # type: ignore[attr-defined]
    timed = interleave(
        {
            "solve and place, one query at a time": plan,
            "solve and place, at a rate": lambda: plan(rate_qps=rate),
            "infeasible: search a nearest SLO": lambda: plan(rate_qps=rate, tighter=1e3),
            "infeasible: rate 100x too high": lambda: plan(rate_qps=too_high),
            "place every list": lambda: make_plan(
                profile,
                PlanRequest.resolve(slo_ms=slo_ms, device_budget_bytes=1 << 40, n_devices=8, coverage=1.0),
                analysis=analysis,
            ),
            "statistics of the profile": lambda: analyse(profile),
        },
        repeats=11,
    )
    rows = [(name, t.median * 1e3, t.quartiles[0] * 1e3, t.quartiles[1] * 1e3) for name, t in timed.items()]
    show(
        f"partitioner, nlist 65,536, 8 devices ({solved.verdict}, coverage {solved.coverage:.1%})",  # type: ignore[attr-defined]
        ("what", "median ms", "25 %", "75 %"),
        rows,
    )
    write(args.json, "solver", {"target_ms": TARGET_MS, "rows": {name: t.seconds for name, t in timed.items()}})


if __name__ == "__main__":
    main()
