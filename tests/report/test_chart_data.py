from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from hybridindex.partitioner.plan import Plan, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.report.chart_data import access_shares, batch_check, hit_rate_check, scan_check, slo_need, stage_fit
from hybridindex.types import Profile, StageSample
from tests.partitioner.synthetic import with_candidates, with_row_faults


def test_access_shares_rise_from_zero_to_one_and_fall_in_slope_where_the_order_was_chosen(bare_plan: Plan) -> None:
    shares = access_shares(bare_plan.analysis)
    for values in (shares.fit_accesses, shares.held_accesses, shares.fit_work, shares.held_work):
        assert values[0] == 0
        assert values[-1] == pytest.approx(1)
        assert (np.diff(values) >= 0).all()
    assert (np.diff(shares.fit_accesses, 2) <= 1e-12).all()
    assert not (np.diff(shares.held_accesses, 2) <= 1e-12).all()


def test_access_shares_count_what_the_hottest_lists_take(bare_profile: Profile, bare_plan: Plan) -> None:
    hottest = bare_plan.analysis.curve.order[:32]
    held = bare_profile.access.held_probes
    assert access_shares(bare_plan.analysis).held_accesses[32] == pytest.approx(np.isin(held, hottest).mean())


def test_hit_rates_are_measured_on_queries_that_predicted_nothing(bare_plan: Plan) -> None:
    check = hit_rate_check(bare_plan.analysis)
    assert check is not None
    assert check.n_predict + check.n_measure == 300
    assert check.left_out == ()
    errors = check.errors(check.predicted_at_marks)
    assert 0 < float(np.median(errors)) < 0.05
    batches = sorted(check.measured)
    for small, large in itertools.pairwise(batches):
        assert (check.measured[large] < check.measured[small]).all()


def test_batches_that_the_sample_is_too_small_for_are_left_out(bare_profile: Profile) -> None:
    access = dataclasses.replace(bare_profile.access, held_probes=bare_profile.access.held_probes[:60])
    plan = make_plan(
        dataclasses.replace(bare_profile, access=access), PlanRequest.resolve(slo_ms=1.0, device_budget_bytes=8 << 20)
    )
    check = hit_rate_check(plan.analysis)
    assert check is not None
    assert list(check.measured) == [1, 4]
    assert check.left_out == (16, 64)


def test_fit_goes_on_beyond_the_largest_batch_and_says_where(bare_plan: Plan) -> None:
    for stage in ("coarse", "host_scan"):
        fit = stage_fit(bare_plan.analysis, stage)
        assert fit is not None
        assert fit.measured_to == 64
        assert fit.batch[-1] == 256
        assert fit.fit_s[-1] > 2 * fit.fit_s[fit.batch == 64][0]
    assert stage_fit(bare_plan.analysis, "embed") is None


def test_exact_distances_of_devices_are_no_samples_of_the_host(bare_profile: Profile) -> None:
    profile = with_candidates(bare_profile, 512)
    plan = make_plan(profile, PlanRequest.resolve(slo_ms=1.0, device_budget_bytes=8 << 20))
    fit = stage_fit(plan.analysis, "rerank")
    assert fit is not None
    host = [s.seconds for s in profile.stages if s.stage == "rerank" and s.coverage == 0 and not s.device]
    np.testing.assert_array_equal(fit.sample_s, host)


def test_exact_distances_are_fitted_without_reads_of_rows_on_disk(bare_profile: Profile) -> None:
    codes = dataclasses.replace(bare_profile, codec="rabitq1", scanner="rabitq")
    profile = with_row_faults(with_candidates(codes, 512))
    asked = {"slo_ms": 1000.0, "device_budget_bytes": 8 << 20}
    warm, cold = (make_plan(profile, PlanRequest.resolve(row_cache_bytes=nbytes, **asked)) for nbytes in (None, 0))
    found = [stage_fit(plan.analysis, "rerank") for plan in (warm, cold)]
    assert found[0] is not None
    assert found[1] is not None
    np.testing.assert_array_equal(found[0].fit_s, found[1].fit_s)


def test_scan_check_compares_masked_runs_only(bare_profile: Profile, bare_plan: Plan) -> None:
    check = scan_check(bare_plan.analysis)
    assert check is not None
    assert (check.coverage > 0).all()
    assert check.measured_s.size == sum(s.stage == "host_scan" and s.coverage > 0 for s in bare_profile.stages)
    assert check.within_band > 0.8
    assert batch_check(bare_plan.analysis) is None


def test_batch_check_sees_a_routed_batch_that_took_twice_as_long(bare_profile: Profile, bare_plan: Plan) -> None:
    latency = bare_plan.analysis.latency
    curve = bare_plan.analysis.curve
    seconds = latency.quantile(curve, curve.at(26), 8, 50.0)
    sample = StageSample(stage="batch", batch=8, seconds=2 * seconds, coverage=26 / 128, device="cuda:0")
    analysis = dataclasses.replace(
        bare_plan.analysis, profile=dataclasses.replace(bare_profile, stages=(*bare_profile.stages, sample))
    )
    check = batch_check(analysis)
    assert check is not None
    assert check.relative_errors.tolist() == pytest.approx([0.5])
    assert check.within_band == 0


def test_slo_need_falls_with_the_slo_and_meets_the_plan(bare_plan: Plan) -> None:
    need = slo_need(bare_plan)
    met = need.points
    assert all(a.device_bytes >= b.device_bytes for a, b in itertools.pairwise(met))
    assert met[-1].device_bytes == 0
    at = next(p for p in need.points if p.slo_ms == bare_plan.request.slo_ms)
    assert at.device_bytes == bare_plan.device_bytes
    assert need.smallest_slo_ms is not None
    assert need.smallest_slo_ms <= bare_plan.request.slo_ms


def test_budget_cuts_the_slo_curve(bare_profile: Profile, bare_plan: Plan) -> None:
    little = make_plan(bare_profile, PlanRequest.resolve(slo_ms=0.8, device_budget_bytes=1 << 20, rate_qps=300.0))
    generous, small = slo_need(bare_plan), slo_need(little)
    assert small.limit_bytes <= 1 << 20
    assert generous.smallest_slo_ms is not None
    assert small.smallest_slo_ms is not None
    assert small.smallest_slo_ms > generous.smallest_slo_ms


def test_no_slo_in_view_leaves_an_empty_curve(bare_profile: Profile) -> None:
    plan = make_plan(bare_profile, PlanRequest.resolve(slo_ms=0.8, device_budget_bytes=12 << 20, rate_qps=1e7))
    need = slo_need(plan)
    assert need.points == ()
    assert need.smallest_slo_ms is None
    assert need.low_ms < 0.8 < need.high_ms
