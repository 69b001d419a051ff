"""Times whole routed batches, on the host alone and with lists on devices: what the stages, timed one by one, do not
say.

Two things show only here: what routing itself costs, and how far host and device scans really overlap (a stand-in
device shares the host's cores; a GPU shares its bus). The samples go into the profile as stage ``batch``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from hybridindex.index.ivf import IVFIndex
from hybridindex.partitioner.analysis import analyse
from hybridindex.partitioner.plan import make_plan
from hybridindex.router.router import Router
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
    device_budget_bytes: int,
    max_seconds: float,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> tuple[StageSample, ...]:
    """Routes fresh random batches in rounds, every (coverage, batch size) once per round in random order.

    Args:
        index: the profiled index.
        profile: its stages and accesses; decides which lists are hot.
        queries: (n, dim) float32 as users give them, held back from the choice of hot lists.
        devices: names; none: only the host is timed.
        device_budget_bytes: hard limit per device.
        max_seconds: about how long; three rounds are measured whatever they take.
        progress: told after every round.
    """
    rng = np.random.default_rng(profile.seed)
    batches = [b for b in BATCHES if b <= len(queries)]
    samples: list[StageSample] = []
    with ExitStack() as open_routers:
        routers = {0.0: open_routers.enter_context(Router(index, threads=profile.threads))}
        if devices and index.device_codec() is not None:
            analysis = analyse(profile)
            for coverage in COVERAGES:
                plan = make_plan(
                    profile,
                    slo_ms=1e6,
                    device_budget_bytes=device_budget_bytes,
                    n_devices=len(devices),
                    coverage=coverage,
                    analysis=analysis,
                )
                if plan.coverage > 0 and plan.coverage not in routers:
                    router = Router(index, plan=plan, devices=devices, lookahead_bytes=0, threads=profile.threads)
                    routers[plan.coverage] = open_routers.enter_context(router)
        for router in routers.values():
            for _ in range(_WARM_UP):
                router.search(queries[: max(batches)], profile.k, profile.nprobe)
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
    return tuple(samples)
