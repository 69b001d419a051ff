from __future__ import annotations

import numpy as np

from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.plan import make_plan
from hybridindex.partitioner.reportdata import coverage_series, latency_series, slo_curve
from hybridindex.partitioner.request import PlanRequest


def test_slo_curve_falls_and_agrees_with_the_plan(analysis: Analysis) -> None:
    plan = make_plan(analysis.profile, PlanRequest.resolve(slo_ms=1.2, device_budget_bytes=64 << 20), analysis=analysis)
    slos = [0.05, 0.8, 1.2, 2.0, 50.0]
    points = slo_curve(analysis, plan.request, slos)
    assert [p.slo_ms for p in points] == slos
    assert points[0].verdict == "infeasible"
    met = [p.device_bytes for p in points if p.verdict == "feasible"]
    assert met == sorted(met, reverse=True)
    assert (points[2].coverage, points[2].device_bytes) == (plan.coverage, plan.device_bytes)


def test_coverage_series_are_aligned_and_ordered_by_batch(analysis: Analysis) -> None:
    series = coverage_series(analysis, points=9)
    for values in (series.coverage, series.coverage_bytes, series.device_bytes, series.mean, series.mean_by_count):
        assert values.size == series.coverage.size
        assert (np.diff(values) >= 0).all()
    assert (series.expected_min[64] <= series.expected_min[4] + 1e-12).all()
    assert (series.expected_min[1] <= series.mean + 1e-9).all()


def test_latency_series_pass_through_their_samples(analysis: Analysis) -> None:
    stages = {series.stage: series for series in latency_series(analysis)}
    assert set(stages) == {"coarse", "host_scan"}
    for series in stages.values():
        for batch in (1, 64):
            measured = np.median(series.sample_s[series.sample_batch == batch])
            assert abs(series.fit_s[series.batch == batch][0] / measured - 1) < 0.3
