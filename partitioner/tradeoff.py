"""What other device bytes, or another SLO, would bring under one plan's request: curves for people to look at.

:mod:`hybridindex.partitioner.solver` chooses a point on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.decision import Decision, Verdict
from hybridindex.partitioner.request import PlanRequest
from hybridindex.partitioner.solver import problem_of, solve

__all__ = ["SloPoint", "Tradeoff", "TradeoffPoint", "slo_curve", "tradeoff_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SloPoint:
    """What one SLO would take."""

    slo_ms: float
    verdict: Verdict
    coverage: float
    #: Pages and scratch of all devices.
    device_bytes: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeoffPoint:
    """One resident set."""

    #: Fraction of lists.
    coverage: float
    #: Pages and scratch of all devices.
    device_bytes: int
    #: Mean, by bytes.
    hit_rate: float
    #: One routed batch of the plan's size: the median, and at the SLO's percentile.
    median_ms: float
    latency_ms: float
    #: Highest requests/s served within the SLO, with the plan's headroom; 0 when none is.
    max_qps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tradeoff:
    """The curve, by ascending coverage, and what the plan chose on it."""

    points: tuple[TradeoffPoint, ...]
    chosen: TradeoffPoint
    batch: int
    percentile: float
    #: The plan's latency target without queueing, its SLO, and the bytes of all devices.
    target_ms: float
    slo_ms: float
    budget_bytes: int
    rate_qps: float | None


def slo_curve(analysis: Analysis, request: PlanRequest, slos_ms: Sequence[float]) -> list[SloPoint]:
    """Solve ``request`` again for each SLO; everything else stays."""
    problem = problem_of(analysis.configured_for(request), request)
    spent_s = request.slo_ms / 1e3 - request.search_slo_s
    points = []
    for slo_ms in slos_ms:
        solution = solve(problem, max(slo_ms / 1e3 - spent_s, 1e-12))
        met = solution.feasible and slo_ms / 1e3 > spent_s
        points.append(
            SloPoint(
                slo_ms=float(slo_ms),
                verdict=Verdict.FEASIBLE if met else Verdict.INFEASIBLE,
                coverage=solution.count / analysis.curve.nlist,
                device_bytes=solution.device_bytes,
                batch=solution.batch,
            )
        )
    return points


def tradeoff_of(plan: Decision, *, points: int = 20) -> Tradeoff:
    """About ``points`` prefixes of the hot order, from none to all that are ever probed, whether they fit or not. Of a
    plan with rows beside codes, of the order in which both came.

    Takes about ten predictions per point.
    """
    curve = plan.analysis.curve
    problem = problem_of(plan.analysis, plan.request)
    if plan.resident_rows.size:
        problem = problem.along(solve(problem, max(plan.request.search_slo_s, 1e-12)).path)
    batch = max(1, plan.batch)

    def point(place: int | None) -> TradeoffPoint:
        own = plan.resident_lists, plan.resident_rows
        work = problem.work_of(*own) if place is None else problem.work_at(place)
        lists = own[0]
        if place is not None:
            lists = curve.order[problem.path.pieces(np.arange(place, dtype=np.int64))[0]]
        nbytes = plan.device_bytes if place is None else problem.prefix_bytes(place)
        return TradeoffPoint(
            coverage=lists.size / curve.nlist,
            device_bytes=nbytes,
            hit_rate=float(curve.of_lists(lists).hit_rate.mean()),
            median_ms=plan.analysis.latency.predict(curve, work, batch).seconds * 1e3,
            latency_ms=problem.timing(work, batch)[0] * 1e3,
            max_qps=problem.max_qps(work, nbytes, max(plan.request.search_slo_s, 1e-12)),
        )

    most = problem.path.useful
    counts = np.concatenate((np.linspace(0, most, points // 2), np.geomspace(1, max(most, 1), points // 2)))
    return Tradeoff(
        points=tuple(point(place) for place in np.unique(np.round(counts).astype(int)).tolist()),
        chosen=point(None),
        batch=batch,
        percentile=plan.request.percentile,
        target_ms=plan.tau_s * 1e3,
        slo_ms=plan.request.slo_ms,
        budget_bytes=sum(plan.request.budgets),
        rate_qps=plan.rate_qps,
    )
