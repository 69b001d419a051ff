"""Times whole routed batches, on the host alone and with lists on devices; samples of stage ``batch``.

They show what stages timed one by one do not: the cost of routing, and how far host and device scans overlap (a
stand-in device shares the host's cores; a GPU shares its bus).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import cast

import numpy as np

from hybridindex.config import HealthPolicy, RowsName
from hybridindex.errors import InvalidInputError
from hybridindex.index.ivf import IVFIndex
from hybridindex.partitioner.analysis import analyse
from hybridindex.partitioner.plan import Plan, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.profiler.device import room_to_measure
from hybridindex.router.router import Router
from hybridindex.tiers.host.host_scanner import HostScannerName
from hybridindex.tiers.serving import TierChoice, tier_of
from hybridindex.types import F32, Profile, StageSample

__all__ = ["BATCHES", "COVERAGES", "time_routed"]

BATCHES = (1, 4, 16, 64)
#: Fractions of lists, hottest first, on each set of devices.
COVERAGES = (0.05, 0.2, 0.5)
#: Unmeasured searches per router, so that threads and pages are warm.
_WARM_UP = 3
_MIN_ROUNDS = 3


def time_routed(
    index: IVFIndex,
    profile: Profile,
    queries: F32,
    *,
    devices: Sequence[str],
    device_budget_bytes: int | None,
    max_seconds: float,
    rows: RowsName = "resident",
    progress: Callable[[str, int, int | None], None] | None = None,
) -> tuple[StageSample, ...]:
    """Routes fresh random batches in rounds, every (coverage, batch size) once per round in random order.

    Args:
        index: the profiled index, or the view of it that was profiled.
        profile: its stages and accesses; decides which lists are hot.
        queries: (n, dim) float32 as users give them, held back from the choice of hot lists.
        devices: names; none: only the host is timed.
        device_budget_bytes: hard limit per device; coverages that need more than a third of it are left out. None: what
            they need, as far as the devices have room.
        rows: where they are; those on disk that the queries need are read before anything is timed, as far as there is
            time.
        max_seconds: about how long; three rounds are measured whatever they take.
        progress: told after every round.
    """
    batches = [b for b in BATCHES if b <= len(queries)]
    if not batches:
        raise InvalidInputError("queries is empty; expected at least one to route")
    rng = np.random.default_rng(profile.seed)
    samples: list[StageSample] = []
    by_codes = index.rows is not index
    open_router = partial(
        Router,
        index.rows,
        threads=profile.threads,
        # The scanner that the stages were timed with.
        host_scanner="auto" if by_codes else cast("HostScannerName", profile.scanner),
        coarse_quantization="host",
        precision="codes" if by_codes else "rows",
        rows=rows,
        # A slow device shall be seen, not left out.
        health=HealthPolicy(judge="none", retry_open=False),
    )
    with ExitStack() as open_routers:
        routers = {0.0: open_routers.enter_context(open_router())}
        choice = tier_of(index, devices[0]) if devices else None
        if choice is not None and choice.tier != "host":
            # All coverages are there at once, so that they can take turns: they share the budget.
            if device_budget_bytes is None:
                device_budget_bytes = room_to_measure(index, devices, len(COVERAGES))
            share = device_budget_bytes // len(COVERAGES)
            for plan in _plans(profile, len(devices), share, choice):
                router = open_router(plan=plan, devices=devices, lookahead_bytes=0)
                open_routers.enter_context(router)
                if router.stats().unplaced_lists == 0:
                    routers[plan.coverage] = router
        for router in routers.values():
            for _ in range(_WARM_UP):
                router.search(queries[: batches[-1]], profile.k, profile.nprobe)
        started = time.perf_counter()
        for first in range(0, len(queries) if rows == "mapped" else 0, batches[-1]):
            if time.perf_counter() - started >= max_seconds:
                break
            routers[0.0].search(queries[first : first + batches[-1]], profile.k, profile.nprobe)
        tasks = [(coverage, batch) for coverage in routers for batch in batches]
        started, rounds = time.perf_counter(), 0
        while rounds < _MIN_ROUNDS or time.perf_counter() - started < max_seconds:
            for number in rng.permutation(len(tasks)).tolist():
                coverage, batch = tasks[number]
                drawn = np.ascontiguousarray(queries[rng.choice(len(queries), batch, replace=False)])
                label = "+".join(tier.label for tier in routers[coverage].devices)
                before = time.perf_counter()
                routers[coverage].search(drawn, profile.k, profile.nprobe)
                seconds = time.perf_counter() - before
                samples.append(
                    StageSample(stage="batch", batch=batch, seconds=seconds, coverage=coverage, device=label)
                )
            rounds += 1
            if progress is not None:
                progress("routed batches", rounds, None)
        fell_back = {coverage for coverage, router in routers.items() if router.stats().device_fallbacks}
    # Where a device failed meanwhile, the host did its work: those timings say something else than their label.
    return tuple(s for s in samples if s.coverage not in fell_back)


def _plans(profile: Profile, n_devices: int, budget_bytes: int, choice: TierChoice) -> list[Plan]:
    """One plan per coverage that fits the budget whole, hottest lists first."""
    analysis = analyse(profile)
    plans: dict[float, Plan] = {}
    for coverage in COVERAGES:
        plan = make_plan(
            profile,
            PlanRequest.resolve(
                slo_ms=1e6,
                device_budget_bytes=budget_bytes,
                n_devices=n_devices,
                coverage=coverage,
                page_bytes=choice.page_bytes,
                fixed_bytes=choice.fixed_bytes,
                code_bytes=choice.code_bytes,
            ),
            analysis=analysis,
        )
        whole = plan.n_unplaced == 0 and set(plan.resident_lists) == set(
            analysis.curve.order[: len(plan.resident_lists)]
        )
        if whole and plan.coverage > 0:
            plans[plan.coverage] = plan
    return list(plans.values())
