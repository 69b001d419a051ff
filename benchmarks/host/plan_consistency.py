"""Do plans contradict one another, or themselves? 2,000 random profiles, each planned for a lattice of goals.

Violations that are counted:

- a larger SLO, a larger budget or a lower rate turns a feasible plan infeasible, or takes more bytes;
- the verdict is not the comparison of the rate with the highest sustainable rate.

The profiles are those of ``plan_calibration`` and, for every second one, step times that are as noisy as a busy
machine's. Devices, hit-rate model, and an LLM beside the index are drawn too. Nothing is timed: the same arguments
give the same figures on every machine. Target: no violation.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks.common.measure import arguments, show, write

#: Most violations that are written one by one.
_SHOWN = 20


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profiles", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)


def violations(plans: dict[tuple[int, int, int], dict[str, Any]]) -> list[dict[str, Any]]:
    """What contradicts what.

    Args:
        plans: by the places of SLO, budget and rate, each from the harder goal to the easier one; with ``feasible``,
            ``bytes``, ``rate_qps`` and ``max_qps``.
    """
    found: list[dict[str, Any]] = []
    for place, plan in plans.items():
        if plan["feasible"] != (plan["rate_qps"] > 0 and plan["rate_qps"] <= plan["max_qps"]):
            found.append({"what": "verdict against rate", "at": place, "plan": plan})
        for axis, name in enumerate(("SLO", "budget", "rate")):
            easier = plans.get(tuple(at + (of == axis) for of, at in enumerate(place)))  # type: ignore[arg-type]
            if easier is None or not plan["feasible"]:
                continue
            if not easier["feasible"]:
                found.append({"what": f"an easier {name} is infeasible", "at": place, "plan": plan, "easier": easier})
            elif easier["bytes"] > plan["bytes"]:
                found.append(
                    {"what": f"an easier {name} takes more bytes", "at": place, "plan": plan, "easier": easier}
                )
    return found


def _one(seed: tuple[int, int]) -> tuple[int, int, list[dict[str, Any]]]:
    """(plans, feasible ones, violations) of one random profile."""
    from benchmarks.host.plan_calibration import Setting
    from hybridindex.partitioner import make_plan
    from hybridindex.partitioner.request import PlanRequest
    from hybridindex.types import LLMProfile

    rng = np.random.default_rng(seed)
    setting = Setting(rng, noise=None if seed[1] % 2 else 0.5)
    fixed: dict[str, Any] = {
        "n_devices": int(rng.integers(1, 5)),
        "hit_rate_model": str(rng.choice(["best", "beta", "beta_binomial", "empirical"])),
    }
    slos = sorted(setting.slo_ms * np.exp(rng.uniform(-1.0, 1.0, 3)))
    budgets = sorted(int(setting.budget * factor) for factor in (1.0, rng.uniform(0.1, 1.0)))
    if rng.random() < 0.25:
        # The budget is a part of what the KV cache takes without an index.
        kv = int(budgets[-1] * fixed["n_devices"] * rng.uniform(1.0, 5.0))
        fixed["llm"] = LLMProfile(kv_cache_bytes=kv, throughput_rps=float(setting.rate_qps * rng.uniform(0.3, 3.0)))
    rates = sorted(setting.rate_qps * np.exp(rng.uniform(-1.0, 1.0, 3)), reverse=True)
    plans: dict[tuple[int, int, int], dict[str, Any]] = {}
    for place in itertools.product(range(len(slos)), range(len(budgets)), range(len(rates))):
        request = PlanRequest.resolve(
            slo_ms=float(slos[place[0]]),
            device_budget_bytes=budgets[place[1]],
            rate_qps=float(rates[place[2]]),
            page_bytes=setting.analysis.curve.geometry.page_bytes,
            **fixed,
        )
        plan = make_plan(setting.profile, request, analysis=setting.analysis)
        assert plan.rate_qps is not None
        plans[place] = {
            "slo_ms": float(slos[place[0]]),
            "budget": budgets[place[1]],
            "rate_qps": plan.rate_qps,
            "feasible": plan.feasible,
            "bytes": int(setting.analysis.curve.device_bytes(len(plan.resident_lists))),
            "max_qps": plan.max_sustainable_qps if math.isfinite(plan.max_sustainable_qps) else 0.0,
        }
    found = [{"profile": seed[1], **violation} for violation in violations(plans)]
    return len(plans), sum(plan["feasible"] for plan in plans.values()), found


def main() -> None:
    args = arguments(__doc__, _options)
    seeds = [(args.seed, number) for number in range(args.profiles)]
    plans = feasible = 0
    found: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.processes) as pool:
        for made, good, wrong in track(pool.map(_one, seeds, chunksize=4), "profiles", total=len(seeds)):
            plans, feasible = plans + made, feasible + good
            found.extend(wrong)
    kinds = ["verdict against rate"] + [
        f"an easier {name} {what}"
        for name in ("SLO", "budget", "rate")
        for what in ("is infeasible", "takes more bytes")
    ]
    counts = {kind: sum(violation["what"] == kind for violation in found) for kind in kinds}
    show(
        f"{plans:,} plans of {len(seeds):,} random profiles, {feasible:,} feasible",
        ("violation", "times"),
        [(kind, f"{count:,}") for kind, count in counts.items()],
    )
    write(
        args.json,
        "plan_consistency",
        {"profiles": len(seeds), "plans": plans, "feasible": feasible, "violations": counts, "shown": found[:_SHOWN]},
    )


if __name__ == "__main__":
    main()
