from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError, ProfileError, ProfileMismatchError
from hybridindex.paging import scratch_for_budget
from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.partitioner.plan import Plan, Verdict, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.plans.replan import PlanChanges, replan
from hybridindex.types import AccessSample, LLMProfile
from tests.examples import examples
from tests.partitioner.synthetic import make_profile, plan_for

MIB = 1 << 20


def check_invariants(plan: Plan) -> None:
    request, curve = plan.request, plan.analysis.curve
    assert plan.verdict in ("feasible", "infeasible")
    assert np.unique(plan.resident_lists).size == plan.resident_lists.size
    assert set(np.flatnonzero(plan.list_device >= 0)) == set(plan.resident_lists)
    assert plan.list_device.dtype == np.int16
    assert plan.list_device.max(initial=-1) < plan.n_devices
    assert (np.diff(curve.rank[plan.resident_lists]) > 0).all()
    total = 0
    for device, (budget, scratch) in enumerate(zip(request.budgets, request.scratch, strict=True)):
        rows = plan.analysis.profile.list_sizes[plan.list_device == device]
        pages = int(curve.geometry.pages_for(rows).sum())
        nbytes = pages * curve.geometry.page_bytes + scratch if pages else 0
        assert nbytes == plan.device_bytes_each[device]
        assert nbytes <= budget
        total += nbytes
    assert plan.device_bytes == total
    assert plan.coverage == plan.resident_lists.size / plan.nlist
    assert 0.0 <= plan.predicted_hit_rate <= 1.0 + 1e-12
    minima = [plan.predicted_min_hit_rate(batch) for batch in (1, 4, 64)]
    assert minima == sorted(minima, reverse=True)
    assert minima[0] <= plan.predicted_hit_rate
    assert plan.predicted_latency_ms(4) <= plan.predicted_latency_ms(4, 99)
    assert math.isfinite(plan.max_sustainable_qps)


@examples(60)
@given(
    slo_ms=st.floats(0.01, 100),
    budget=st.one_of(st.integers(0, 200_000), st.integers(0, 60 * MIB), st.integers(1 << 40, 1 << 50)),
    n_devices=st.integers(1, 4),
    rate=st.one_of(st.none(), st.floats(0.1, 1e5)),
    coverage=st.one_of(st.none(), st.floats(0, 1)),
    kv=st.one_of(st.none(), st.integers(0, 100 * MIB)),
    percentile=st.floats(1, 99),
    epsilon=st.floats(0, 3),
)
def test_every_plan_keeps_its_promises(
    analysis: Analysis, kv: int | None, rate: float | None, **arguments: Any
) -> None:
    llm = None if kv is None else LLMProfile(kv_cache_bytes=kv, throughput_rps=800.0)
    arguments["device_budget_bytes"] = arguments.pop("budget")
    plan = plan_for(analysis, llm=llm, rate_qps=rate, **arguments)
    check_invariants(plan)
    if kv is not None and plan.device_bytes:
        assert plan.device_bytes < kv


@examples(25)
@given(
    nlist=st.integers(1, 40),
    seed=st.integers(0, 99),
    empty=st.sampled_from([0.0, 0.5, 1.0]),
    skew=st.sampled_from([0.0, 1.0, 3.0]),
    budget=st.integers(0, 20 * MIB),
    slo_ms=st.floats(0.05, 5),
)
def test_odd_indexes_are_planned(nlist: int, seed: int, empty: float, skew: float, budget: int, slo_ms: float) -> None:
    profile = make_profile(
        nlist=nlist, n=60, nprobe=4, seed=seed, skew=skew, empty_share=empty, batches=(1, 4), repeats=2
    )
    plan = make_plan(profile, PlanRequest.resolve(slo_ms=slo_ms, device_budget_bytes=budget, rate_qps=100.0))
    check_invariants(plan)
    assert len(plan.explain().splitlines()) == 11


@examples(30)
@given(slo_ms=st.floats(0.2, 20), factor=st.floats(1, 5), budget=st.integers(0, 60 * MIB))
def test_coverage_does_not_rise_with_the_slo(analysis: Analysis, slo_ms: float, factor: float, budget: int) -> None:
    tight = plan_for(analysis, slo_ms=slo_ms, rate_qps=1000.0, device_budget_bytes=budget)
    loose = plan_for(analysis, slo_ms=slo_ms * factor, rate_qps=1000.0, device_budget_bytes=budget)
    if tight.feasible:
        assert loose.feasible
        assert loose.coverage <= tight.coverage + 1 / analysis.curve.nlist  # see test_solver


def test_a_feasible_plan_meets_its_target(analysis: Analysis) -> None:
    plan = plan_for(analysis, slo_ms=1.2)
    assert plan.verdict == "feasible"
    assert plan.verdict is Verdict.FEASIBLE
    assert 0 < plan.coverage < 1
    assert plan.predicted_latency_ms(1, 90) <= 0.6
    assert plan.batch == 1
    assert plan.max_sustainable_qps > 0
    assert plan.nearest_slo_ms is None


def test_a_plan_bounds_the_90th_percentile_of_search_with_the_queueing_of_its_rate_unless_told_otherwise() -> None:
    request = PlanRequest.resolve(slo_ms=1.0, device_budget_bytes=0)
    assert (request.percentile, request.epsilon, request.slo_stage, request.n_devices) == (90.0, None, "search", 1)
    assert (request.coverage, request.rate_qps, request.llm, request.scannable) == (None, None, None, True)


def test_the_nearest_slo_can_be_met(analysis: Analysis) -> None:
    plan = plan_for(analysis, slo_ms=0.01, rate_qps=100.0, device_budget_bytes=10 * MIB)
    assert plan.verdict == "infeasible"
    assert plan.nearest_slo_ms is not None
    assert plan_for(analysis, slo_ms=plan.nearest_slo_ms, rate_qps=100.0, device_budget_bytes=10 * MIB).feasible
    assert plan.device_bytes > 9 * MIB
    assert f"{plan.nearest_slo_ms:.4g}" in plan.reason


def test_fixed_coverage_rounds_up_to_lists_and_is_capped_visibly(analysis: Analysis) -> None:
    plan = plan_for(analysis, coverage=0.1001, device_budget_bytes=1 << 40)
    assert plan.resident_lists.size == 26
    assert (plan.resident_lists == analysis.curve.order[:26]).all()
    assert plan_for(analysis, coverage=0.0).device_bytes == 0
    full = plan_for(analysis, coverage=1.0, device_budget_bytes=1 << 40)
    assert full.coverage == 1.0
    assert full.predicted_hit_rate == pytest.approx(1.0)
    capped = plan_for(analysis, coverage=1.0, device_budget_bytes=8 * MIB)
    assert 0 < capped.coverage < 1
    assert "caps it" in capped.reason


def test_budgets_below_one_page_mean_host_only(analysis: Analysis) -> None:
    for budget in (0, 1, 65_536):
        plan = plan_for(analysis, slo_ms=0.3, device_budget_bytes=budget)
        assert plan.device_bytes == 0
        assert plan.resident_lists.size == 0
        assert plan.predicted_hit_rate == 0
        assert "host only" in plan.reason
    barely = 65_536 * 40
    assert barely - scratch_for_budget(barely) >= 65_536
    assert plan_for(analysis, coverage=1.0, device_budget_bytes=barely).device_bytes > 0


def test_budgets_may_differ_per_device(analysis: Analysis) -> None:
    plan = plan_for(analysis, coverage=0.5, device_budget_bytes=[4 * MIB, 0, 40 * MIB], n_devices=3)
    check_invariants(plan)
    assert plan.device_bytes_each[1] == 0
    assert plan.device_bytes_each[2] > plan.device_bytes_each[0] > 0


def test_scratch_can_be_given(analysis: Analysis) -> None:
    plan = plan_for(analysis, coverage=0.05, scratch_bytes=12_345)
    assert plan.device_bytes % 65_536 == 12_345
    nothing = plan_for(analysis, coverage=0.05, scratch_bytes=64 * MIB)
    assert nothing.device_bytes == 0


def test_a_measured_curve_replaces_the_linear_rule_and_what_lies_below_it_is_said(analysis: Analysis) -> None:
    linear = LLMProfile(kv_cache_bytes=100 * MIB, throughput_rps=800.0)
    steep = LLMProfile(kv_cache_bytes=100 * MIB, throughput_rps=800.0, points=((90 * MIB, 100.0), (95 * MIB, 300.0)))
    line, curve = (plan_for(analysis, llm=llm, coverage=0.5) for llm in (linear, steep))
    assert line.device_bytes == curve.device_bytes > 10 * MIB
    assert line.rate_qps == pytest.approx(800.0 * (1 - line.device_bytes / (100 * MIB)))
    assert curve.rate_qps == pytest.approx(100.0 * (100 * MIB - curve.device_bytes) / (90 * MIB))
    assert "linear rule" in line.explain()
    assert f"less than {90 * MIB} bytes of KV cache" in curve.reason
    assert f"less than {90 * MIB} bytes of KV cache" in curve.explain()
    assert len(curve.explain().splitlines()) == 11
    restored = Plan.from_record(curve.to_record(), analysis.profile)
    assert restored.request.llm == steep


def test_a_ttft_slo_leaves_search_what_the_llm_does_not_take(analysis: Analysis) -> None:
    llm = LLMProfile(kv_cache_bytes=1 << 40, throughput_rps=500.0, ttft_s=0.2)
    plan = plan_for(analysis, slo_ms=203.0, llm=llm, slo_stage="ttft", epsilon=1.0, headroom=0.0)
    assert plan.tau_s == pytest.approx(0.0015)
    late = plan_for(analysis, slo_ms=150.0, llm=llm, slo_stage="ttft")
    assert late.verdict == "infeasible"
    assert "LLM alone" in late.reason
    assert late.nearest_slo_ms is not None
    assert late.nearest_slo_ms > 200


def test_the_rate_is_the_smaller_of_load_and_llm(analysis: Analysis) -> None:
    llm = LLMProfile(kv_cache_bytes=1 << 40, throughput_rps=500.0)
    assert plan_for(analysis, rate_qps=100.0, llm=llm).rate_qps == 100.0
    assert plan_for(analysis, rate_qps=1e6, llm=llm).rate_qps == pytest.approx(500.0, rel=0.01)
    assert plan_for(analysis).rate_qps is None


def test_epsilon_is_also_solved_from_the_batching_model(analysis: Analysis) -> None:
    plan = plan_for(analysis, rate_qps=1500.0, slo_ms=3.0)
    assert plan.epsilon_solved is not None
    assert 0 < plan.epsilon_solved <= 0.9
    assert plan.coverage_at_epsilon_solved is not None
    assert plan.coverage_at_epsilon_solved <= plan.coverage
    assert plan_for(analysis).epsilon_solved is None


def test_a_record_restores_the_plan_exactly(analysis: Analysis) -> None:
    llm = LLMProfile(kv_cache_bytes=1 << 30, throughput_rps=900.0, points=((1 << 29, 300.0),), ttft_s=0.001)
    for plan in (
        plan_for(analysis, rate_qps=900.0, llm=llm, slo_stage="ttft", slo_ms=4.0, n_devices=2),
        plan_for(analysis, slo_ms=0.01, device_budget_bytes=3 * MIB, page_bytes=4096),
    ):
        record = plan.to_record()
        data = json.loads(json.dumps(record["data"], allow_nan=False))
        again = Plan.from_record({"data": data, "arrays": record["arrays"]}, analysis.profile)
        assert again.request == plan.request
        for batch in (1, 7, 64, 500):
            assert again.predicted_latency_ms(batch) == plan.predicted_latency_ms(batch)
            assert again.predicted_latency_ms(batch, 99) == plan.predicted_latency_ms(batch, 99)
            assert again.predicted_min_hit_rate(batch) == plan.predicted_min_hit_rate(batch)
        assert again.explain() == plan.explain()
        assert json.dumps(again.to_record()["data"]) == json.dumps(record["data"])
        assert len(again.trace) == len(plan.trace)


def test_a_record_of_another_index_or_machine_is_refused(analysis: Analysis) -> None:
    record = plan_for(analysis).to_record()
    other = dataclasses.replace(analysis.profile, index_fingerprint="index-2")
    with pytest.raises(ProfileMismatchError, match="index_fingerprint"):
        Plan.from_record(record, other)
    elsewhere = dataclasses.replace(
        analysis.profile, hardware=dataclasses.replace(analysis.profile.hardware, fingerprint="hw-2")
    )
    with pytest.raises(ProfileMismatchError, match="hardware_fingerprint"):
        Plan.from_record(record, elsewhere)
    newer = {"data": {**record["data"], "version": 99}, "arrays": record["arrays"]}
    with pytest.raises(InvalidInputError, match="version"):
        Plan.from_record(newer, analysis.profile)


def test_plans_do_not_depend_on_a_shared_analysis(analysis: Analysis) -> None:
    alone = make_plan(
        analysis.profile, PlanRequest.resolve(slo_ms=1.3, device_budget_bytes=64 * MIB, page_bytes=8192, n_devices=2)
    )
    shared = plan_for(analysis, slo_ms=1.3, page_bytes=8192, n_devices=2)
    assert alone.to_record()["data"] == shared.to_record()["data"]


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("slo_ms", {"slo_ms": 0.0}),
        ("slo_ms", {"slo_ms": -1.0}),
        ("slo_ms", {"slo_ms": float("inf")}),
        ("slo_ms", {"slo_ms": float("nan")}),
        ("epsilon", {"epsilon": -0.1}),
        ("percentile", {"percentile": 0}),
        ("percentile", {"percentile": 100}),
        ("device_budget_bytes", {"device_budget_bytes": -1}),
        ("device_budget_bytes", {"device_budget_bytes": [1, 2]}),
        ("device_budget_bytes", {"device_budget_bytes": 1.5}),
        ("n_devices", {"n_devices": 0}),
        ("coverage", {"coverage": 1.1}),
        ("coverage", {"coverage": float("nan")}),
        ("rate_qps", {"rate_qps": 0.0}),
        ("slo_stage", {"slo_stage": "embed"}),
        ("llm is None", {"slo_stage": "ttft"}),
        ("page_bytes", {"page_bytes": 0}),
        ("scratch_bytes", {"scratch_bytes": -5}),
    ],
)
def test_bad_arguments_are_refused_by_name(analysis: Analysis, field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=field):
        plan_for(analysis, **arguments)


def test_a_profile_without_scan_timings_is_refused(analysis: Analysis) -> None:
    bare = dataclasses.replace(analysis.profile, stages=())
    with pytest.raises(ProfileError):
        make_plan(bare, PlanRequest.resolve(slo_ms=1, device_budget_bytes=0))


@pytest.mark.parametrize("nlist", [256, 1000])
def test_of_lists_that_bring_nothing_none_are_taken(nlist: int) -> None:
    """Only the hottest list is one that the held-back queries ask again, as far as memory goes."""
    rng, half = np.random.default_rng(0), nlist // 2

    def probes(first: int, n: int) -> np.ndarray:
        others = first + rng.permuted(np.tile(np.arange(n), (200, 1)), axis=1)[:, :3]
        return np.column_stack((np.zeros(200), others)).astype(np.int32)

    fit, held = probes(1, half - 1), probes(half, half)
    accesses = np.bincount(fit.ravel(), minlength=nlist).astype(np.float64)
    profile = dataclasses.replace(
        make_profile(nlist=nlist, nprobe=4, list_sizes=np.full(nlist, 100)),
        access=AccessSample(fit_probes=fit, held_probes=held, list_accesses=accesses),
    )
    request = PlanRequest.resolve(
        slo_ms=0.05, device_budget_bytes=(half - 10) * 51_200, scratch_bytes=0, page_bytes=51_200, rate_qps=100.0
    )
    assert 0 < make_plan(profile, request).resident_lists.size <= 2


def test_a_codec_that_devices_cannot_scan_stays_on_the_host(analysis: Analysis) -> None:
    plan = make_plan(
        analysis.profile,
        PlanRequest.resolve(slo_ms=0.5, device_budget_bytes=1 << 30, scannable=False),
        analysis=analysis,
    )
    assert plan.resident_lists.size == 0
    assert plan.device_bytes == 0
    assert "no device tier scans this codec" in plan.reason
    said = make_plan(
        analysis.profile,
        PlanRequest.resolve(
            slo_ms=0.5, device_budget_bytes=1 << 30, scannable=False, unscannable="faiss-gpu is not installed"
        ),
        analysis=analysis,
    )
    assert "host only: faiss-gpu is not installed" in said.reason
    # Plans that were stored before reasons were.
    data = said.request.to_data()
    del data["unscannable"]
    assert PlanRequest.from_data(data).unscannable == ""


def test_what_a_tier_takes_besides_lists_is_inside_the_budget(analysis: Analysis) -> None:
    budget, fixed = 8 * MIB, 3 * MIB
    with_tables = plan_for(analysis, coverage=1.0, device_budget_bytes=budget, fixed_bytes=fixed)
    without = plan_for(analysis, coverage=1.0, device_budget_bytes=budget)
    assert with_tables.device_bytes <= budget
    assert with_tables.request.scratch[0] == without.request.scratch[0] + fixed
    assert len(with_tables.resident_lists) < len(without.resident_lists)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("slo_ms", v) for v in (None, "50", [50], True, math.nan)),
        *(("device_budget_bytes", v) for v in (None, "1", ["a"], True, math.nan)),
        *(("n_devices", v) for v in (None, math.nan, 1.5, True, "1")),
        ("rate_qps", "1"),
        ("coverage", "a"),
        ("coverage", math.nan),
        ("percentile", "a"),
        ("epsilon", "a"),
        ("llm", {}),
        ("page_bytes", "a"),
    ],
)
def test_values_of_wrong_types_are_named(analysis: Analysis, field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field} is .*; give "):
        plan_for(analysis, **{field: value})


def test_numpy_numbers_and_arrays_are_taken(analysis: Analysis) -> None:
    plan = plan_for(
        analysis,
        slo_ms=np.float32(2),
        device_budget_bytes=np.array([8 * MIB, 4 * MIB]),
        n_devices=np.int64(2),
        rate_qps=np.int64(100),
    )
    assert plan.request.budgets == (8 * MIB, 4 * MIB)
    json.dumps(plan.to_record()["data"])
    assert plan.predicted_latency_ms(np.int64(4)) == plan.predicted_latency_ms(4)


def test_a_profile_must_be_one() -> None:
    with pytest.raises(InvalidInputError, match="profile is 5"):
        make_plan(5, PlanRequest.resolve(slo_ms=1.0, device_budget_bytes=0))  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [math.nan, 1.5, 0, "4", True])
def test_batches_are_whole(analysis: Analysis, batch: Any) -> None:
    plan = plan_for(analysis)
    for predict in (plan.predicted_latency_ms, plan.predicted_min_hit_rate):
        with pytest.raises(InvalidInputError, match="batch is"):
            predict(batch)


def test_the_reason_names_the_batch_that_search_settles_at(analysis: Analysis, monkeypatch: pytest.MonkeyPatch) -> None:
    def both(self: object, curve: object, work: object, batch: int, *rest: object, **options: object) -> object:
        return 3e-3, {1: 2e-3, 3: 2.9e-3, 4: 4.1e-3}.get(batch, batch * 1e-3 + 5e-4)

    monkeypatch.setattr(type(analysis.latency), "both", both)
    plan = plan_for(analysis, slo_ms=7.0, rate_qps=1000.0, percentile=1.0, headroom=0.0)
    assert plan.feasible
    final = plan.trace[-1]
    assert (final.batch, plan.batch) == (2, 2)  # between 2 and 3, rounded down
    assert final.latency_s <= final.bound_s
    assert "sustains 1000 requests/s and answers in 3.48 ms, waiting and headroom included (batches of 2" in plan.reason
    again = Plan.from_record(plan.to_record(), analysis.profile, analysis=analysis)
    assert again.trace[-1].batch == 2
    assert (again.request.hit_rate_model, again.request.headroom) == ("best", 0.0)


def test_the_hit_rate_model_decides() -> None:
    """Queries of two kinds: 70 % find everything among the hot lists, the others nothing. No Beta with one variance for
    all coverages is like that."""
    rng, nlist = np.random.default_rng(0), 64
    hot = rng.random((400, 8)).argsort(axis=1)[:, :4]
    cold = 8 + rng.random((400, nlist - 8)).argsort(axis=1)[:, :4]
    probes = np.where((np.arange(400) % 10 < 7)[:, None], hot, cold).astype(np.int32)
    accesses = np.bincount(probes.ravel(), minlength=nlist).astype(np.float64)
    profile = dataclasses.replace(
        make_profile(nlist=nlist, nprobe=4, noise=0.02),
        access=AccessSample(fit_probes=probes, held_probes=probes, list_accesses=accesses),
    )
    analysis = analyse(profile)
    asked: dict[str, Any] = {"slo_ms": 0.55, "percentile": 60.0, "coverage": 8 / nlist}
    plans = {n: plan_for(analysis, hit_rate_model=n, **asked) for n in ("beta", "beta-binomial", "empirical", "best")}
    assert [p.hit_rate_model for p in plans.values()][:3] == ["beta", "beta_binomial", "empirical"]
    assert plans["best"].hit_rate_model == analysis.hit_rates.best
    told = {name: plan.predicted_latency_ms(1, 40.0) for name, plan in plans.items()}
    assert told["beta"] > 1.2 * told["empirical"]
    again = Plan.from_record(plans["beta"].to_record(), profile, analysis=analysis)
    assert again.predicted_latency_ms(1, 40.0) == told["beta"]
    with pytest.raises(InvalidInputError, match="hit_rate_model is 'gamma'; give one of 'best', 'beta'"):
        plan_for(analysis, hit_rate_model="gamma")


def test_a_record_holds_the_rows_beside_codes(analysis: Analysis) -> None:
    plan = plan_for(analysis, n_devices=2)
    assert plan.resident_rows.size == 0
    assert (plan.row_device == -1).all()
    rows = np.array([5, 3], dtype=np.int64)
    device = np.full(plan.nlist, -1, dtype=np.int16)
    device[rows] = [1, 0]
    record = dataclasses.replace(plan, resident_rows=rows, row_device=device).to_record()
    again = Plan.from_record(record, analysis.profile, analysis=analysis)
    np.testing.assert_array_equal(again.resident_rows, rows)
    np.testing.assert_array_equal(again.row_device, device)
    assert again.row_device.dtype == np.int16

    earlier = plan.to_record()
    earlier["data"]["version"] = 4
    for name in ("resident_rows", "row_device"):
        del earlier["arrays"][name]
    before = Plan.from_record(earlier, analysis.profile, analysis=analysis)
    assert before.resident_rows.size == 0
    np.testing.assert_array_equal(before.row_device, np.full(plan.nlist, -1))


def test_an_earlier_record_is_read(analysis: Analysis) -> None:
    plan = plan_for(analysis, hit_rate_model="empirical", headroom=0.0, rate_qps=500.0)
    record = plan.to_record()
    record["data"] |= {"version": 3, "trace": [[0] * 14]}
    record["arrays"] = {name: record["arrays"][name] for name in ("resident_lists", "list_device")}
    for name in ("hit_rate_model", "headroom"):
        del record["data"]["request"][name]
    again = Plan.from_record(record, analysis.profile, analysis=analysis)
    assert again.predicted_latency_ms(8, 90) == plan.predicted_latency_ms(8, 90)
    assert (again.request.headroom, again.request.hit_rate_model, again.trace) == (0.0, "best", ())


@examples(100)
@given(
    slo_ms=st.floats(0.1, 30),
    budget=st.integers(0, 80 * MIB),
    rate=st.floats(1, 20_000),
    n_devices=st.integers(1, 3),
    kv=st.one_of(st.none(), st.integers(1, 100 * MIB)),
)
def test_a_plan_is_feasible_exactly_where_its_rate_is_sustainable(
    analysis: Analysis, slo_ms: float, budget: int, rate: float, n_devices: int, kv: int | None
) -> None:
    llm = None if kv is None else LLMProfile(kv_cache_bytes=kv, throughput_rps=800.0)
    plan = plan_for(analysis, slo_ms=slo_ms, device_budget_bytes=budget, rate_qps=rate, n_devices=n_devices, llm=llm)
    assert plan.rate_qps is not None
    assert plan.feasible == (plan.rate_qps > 0 and plan.rate_qps <= plan.max_sustainable_qps)


def test_centroids_are_planned_for_where_a_budget_is_not_small(analysis: Analysis) -> None:
    def beside_scans(request: PlanRequest) -> list[int]:
        pairs = zip(request.scratch, request.budgets, strict=True)
        return [scratch - scratch_for_budget(budget) for scratch, budget in pairs]

    for budgets, wanted in (
        ((16 * MIB, 64 * MIB), [MIB, 0]),
        ((16 * MIB - 1, 64 * MIB), [0, 0]),
        ((64 * MIB, MIB), [MIB, 0]),
    ):
        of = {"n_devices": 2, "device_budget_bytes": budgets, "centroid_bytes": MIB}
        request = plan_for(analysis, coverage=0.5, **of).request
        assert beside_scans(request) == wanted
        assert request.fixed_bytes == 0
        assert request.within(budgets).scratch == request.scratch
        # As indexes that share a device have it, and plans for other budgets.
        assert beside_scans(request.within((8 * MIB, 64 * MIB))) == [0, 0]
        assert beside_scans(request.within((32 * MIB, MIB))) == [MIB, 0]
        assert (
            replan(request, PlanChanges(device_budget_bytes=32 * MIB, coverage="solve"), None).scratch[0]
            == (4 + 1) * MIB
        )
        assert PlanRequest.from_data(request.to_data()) == request
        assert "centroid_bytes" not in plan_for(analysis, coverage=0.5).request.to_data()


@pytest.mark.parametrize("code_bytes", [0, 40 * MIB])
@pytest.mark.parametrize("fixed_bytes", [0, 100_000])
def test_a_larger_budget_never_has_less_room_for_lists_where_the_centroids_come(
    analysis: Analysis, code_bytes: int, fixed_bytes: int
) -> None:
    of: dict[str, Any] = {"centroid_bytes": MIB, "code_bytes": code_bytes, "fixed_bytes": fixed_bytes}
    budgets = sorted({*range(13 * MIB, 20 * MIB, MIB // 16), 16 * MIB - 1})
    requests = [PlanRequest.resolve(slo_ms=1.0, device_budget_bytes=budget, **of) for budget in budgets]
    rooms = [request.capacity_pages(4096) for request in requests]
    assert rooms == sorted(rooms)
    assert rooms[-1] > rooms[0]
    # As several indexes share it.
    assert [requests[0].within((budget,)).capacity_pages(4096) for budget in budgets] == rooms
    for request, budget in zip(requests, budgets, strict=True):
        beside_scans = request.scratch[0] - fixed_bytes - scratch_for_budget(budget, code_bytes)
        assert beside_scans == (MIB if budget >= 16 * MIB else 0)
    nearest_ms = plan_for(analysis, slo_ms=0.01, device_budget_bytes=16 * MIB - 1, **of).nearest_slo_ms
    assert nearest_ms is not None
    for budget in (16 * MIB, 17 * MIB, 20 * MIB):
        plan = plan_for(analysis, slo_ms=nearest_ms, device_budget_bytes=budget, **of)
        check_invariants(plan)
        assert plan.feasible
