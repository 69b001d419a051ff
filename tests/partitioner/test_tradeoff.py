"""The curve behind a plan: it agrees with the plan's own predictions, and says what other bytes would bring."""

from __future__ import annotations

import pytest

from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.plan import make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.partitioner.tradeoff import slo_curve, tradeoff_of
from tests.partitioner.synthetic import make_profile

MIB = 1 << 20


@pytest.mark.parametrize("rate_qps", [None, 200.0])
@pytest.mark.parametrize("coverage", [0.0, 0.2, None])
def test_the_chosen_point_has_the_plans_own_numbers(rate_qps, coverage):
    plan = make_plan(
        make_profile(),
        PlanRequest.resolve(
            slo_ms=2.0, device_budget_bytes=(32 * MIB, 16 * MIB), n_devices=2, rate_qps=rate_qps, coverage=coverage
        ),
    )
    curve = tradeoff_of(plan)
    chosen = curve.chosen
    assert chosen.coverage == plan.coverage
    assert chosen.device_bytes == plan.device_bytes
    assert chosen.hit_rate == plan.predicted_hit_rate
    assert chosen.median_ms == pytest.approx(plan.predicted_latency_ms(plan.batch))
    assert chosen.latency_ms == pytest.approx(plan.predicted_latency_ms(plan.batch, plan.request.percentile))
    assert chosen.max_qps == pytest.approx(plan.max_sustainable_qps)
    assert (curve.slo_ms, curve.budget_bytes, curve.batch) == (2.0, 48 * MIB, plan.batch)
    assert curve.target_ms == pytest.approx(plan.tau_s * 1e3)


def test_the_curve_goes_from_nothing_to_every_useful_list():
    profile = make_profile()
    plan = make_plan(profile, PlanRequest.resolve(slo_ms=2.0, device_budget_bytes=64 * MIB))
    points = tradeoff_of(plan, points=16).points
    assert 8 <= len(points) <= 17
    assert (points[0].coverage, points[0].device_bytes, points[0].hit_rate) == (0, 0, 0)
    assert points[-1].hit_rate == pytest.approx(1)
    for name in ("coverage", "device_bytes", "hit_rate"):
        values = [getattr(point, name) for point in points]
        assert values == sorted(values), name
    assert all(point.median_ms <= point.latency_ms for point in points)
    assert points[-1].latency_ms < points[0].latency_ms


def test_slo_curve_falls_and_agrees_with_the_plan(analysis: Analysis) -> None:
    plan = make_plan(analysis.profile, PlanRequest.resolve(slo_ms=1.2, device_budget_bytes=64 << 20), analysis=analysis)
    slos = [0.05, 0.8, 1.2, 2.0, 50.0]
    points = slo_curve(analysis, plan.request, slos)
    assert [p.slo_ms for p in points] == slos
    assert points[0].verdict == "infeasible"
    met = [p.device_bytes for p in points if p.verdict == "feasible"]
    assert met == sorted(met, reverse=True)
    assert (points[2].coverage, points[2].device_bytes) == (plan.coverage, plan.device_bytes)
