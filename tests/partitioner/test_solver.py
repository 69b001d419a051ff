from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.partitioner.models.hitrate import HitRateName
from hybridindex.partitioner.models.throughput import throughput_model
from hybridindex.partitioner.solver import Problem, solve
from hybridindex.types import LLMProfile
from tests.examples import examples
from tests.partitioner.synthetic import make_profile

MS = 1e-3


@pytest.fixture(scope="module")
def rough() -> Analysis:
    """Timings that scatter, and a device whose own time counts."""
    return analyse(make_profile(noise=0.3, seed=5, device_per_byte_s=2e-11, batches=(1, 3, 7, 16, 50)))


def problem_for(analysis: Analysis, **changes: object) -> Problem:
    base = Problem(
        curve=analysis.curve,
        latency=analysis.latency,
        percentile=90.0,
        rate_qps=None,
        llm=None,
        scratch_bytes=0,
        limit_pages=1 << 40,
        epsilon=0.0,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@examples(60)
@given(
    tau_ms=st.floats(0.05, 50),
    factor=st.floats(1.0, 4.0),
    rate=st.one_of(st.none(), st.floats(1, 20_000)),
)
def test_a_looser_target_never_takes_more_coverage(
    analysis: Analysis, tau_ms: float, factor: float, rate: float | None
) -> None:
    problem = problem_for(analysis, rate_qps=rate)
    tight, loose = solve(problem, tau_ms * MS), solve(problem, tau_ms * factor * MS)
    if tight.feasible:
        assert loose.feasible
        assert loose.count <= tight.count


@examples(60)
@given(tau_ms=st.floats(0.3, 20), rate=st.one_of(st.none(), st.floats(1, 10_000)))
def test_the_coverage_is_the_smallest_and_meets_its_bound(
    analysis: Analysis, tau_ms: float, rate: float | None
) -> None:
    problem = problem_for(analysis, rate_qps=rate)
    solution = solve(problem, tau_ms * MS)
    if solution.feasible:
        step = problem.prefix_step(solution.count, tau_ms * MS)
        assert step.accepted
        if solution.count > 0:
            below = problem.prefix_step(solution.count - 1, tau_ms * MS)
            assert not below.accepted
        took = analysis.latency.quantile(analysis.curve, analysis.curve.at(solution.count), solution.batch, 90.0)
        assert took <= tau_ms * MS
    elif solution.nearest_s is not None:
        assert solve(problem, solution.nearest_s).feasible


@examples(40)
@given(
    kv_mib=st.integers(1, 200),
    top=st.floats(0, 20_000),
    bend=st.floats(0, 1),
    tau_ms=st.floats(0.2, 20),
)
def test_the_fixed_point_holds_beside_an_llm(
    analysis: Analysis, kv_mib: int, top: float, bend: float, tau_ms: float
) -> None:
    """infer(mu(rho)) <= rho at the solution, and the index leaves the LLM some KV cache."""
    llm = throughput_model(
        LLMProfile(kv_cache_bytes=kv_mib << 20, throughput_rps=top, points=((kv_mib << 19, bend * top),))
    )
    problem = problem_for(analysis, llm=llm)
    solution = solve(problem, tau_ms * MS)
    nbytes = problem.prefix_bytes(solution.count)
    assert nbytes < kv_mib << 20
    if solution.feasible:
        assert solution.rate_qps == llm.at(nbytes) > 0
        same_rate = problem_for(analysis, rate_qps=solution.rate_qps)
        infer = solve(same_rate, tau_ms * MS)
        assert infer.feasible
        assert infer.count <= solution.count


def test_the_limit_caps_the_prefix(analysis: Analysis) -> None:
    problem = problem_for(analysis, limit_pages=25, rate_qps=100.0)
    solution = solve(problem, 1e-6)
    assert not solution.feasible
    assert analysis.curve.prefix_pages[solution.count] <= 25
    assert "holds" in solution.reason or "coarse" in solution.reason


def test_a_floor_of_zero_uses_the_other_branch_alone(analysis: Analysis) -> None:
    """8 requests/s x 0.1 ms: taking the empty branch for rho = 0 would place nothing."""
    problem = problem_for(analysis, rate_qps=8.0)
    host = analysis.latency.quantile(analysis.curve, analysis.curve.at(0), 1, 90.0)
    solution = solve(problem, host * 0.7)
    assert solution.feasible
    assert solution.count > 0
    assert solution.batch == 1


def test_below_coarse_quantization_nothing_helps(analysis: Analysis) -> None:
    solution = solve(problem_for(analysis), 1e-5)
    assert not solution.feasible
    assert "coarse quantization alone" in solution.reason
    assert solution.nearest_s is not None
    assert solution.nearest_s > 1e-4


def test_a_rate_beyond_the_machine_has_no_nearest_target(analysis: Analysis) -> None:
    solution = solve(problem_for(analysis, rate_qps=1e9), 1e-2)
    assert not solution.feasible
    assert solution.nearest_s is None


def test_no_throughput_is_a_verdict(analysis: Analysis) -> None:
    llm = throughput_model(LLMProfile(kv_cache_bytes=1 << 30, throughput_rps=0.0))
    solution = solve(problem_for(analysis, llm=llm), 1e-2)
    assert not solution.feasible
    assert "no throughput" in solution.reason


@pytest.mark.parametrize("tau_s", [1e-300, 1e-9, 1e5, 1e300])
@pytest.mark.parametrize("rate", [None, 1e-9, 1e3])
def test_extreme_targets_are_answered(analysis: Analysis, tau_s: float, rate: float | None) -> None:
    solution = solve(problem_for(analysis, rate_qps=rate), tau_s)
    assert solution.feasible == (tau_s > 1)


def test_a_slow_device_bounds_coverage_from_above() -> None:
    slow = analyse(make_profile(noise=0.02, device_per_byte_s=1.5e-10))
    problem = problem_for(slow, rate_qps=500.0)
    host_only = dataclasses.replace(problem, latency=dataclasses.replace(slow.latency, device=None))
    assert solve(host_only, 2e-4).feasible
    blocked = solve(problem, 2e-4)
    assert not blocked.feasible
    assert 0 < blocked.count < slow.curve.nlist
    assert "resident lists do not make it faster" in blocked.reason
    assert blocked.nearest_s is not None
    assert solve(problem, blocked.nearest_s).feasible


def test_the_trace_tells_what_was_tried(analysis: Analysis) -> None:
    solution = solve(problem_for(analysis, rate_qps=2000.0), 1.5e-3)
    counts = [step.count for step in solution.trace]
    assert counts[0] == 0
    assert solution.count in counts
    assert all(step.rate_qps == 2000.0 for step in solution.trace)
    assert np.isfinite([step.latency_s for step in solution.trace]).all()


def test_the_batch_is_the_smallest_that_sustains_the_rate(analysis: Analysis, monkeypatch: pytest.MonkeyPatch) -> None:
    rate, tau_s = 1000.0, 3.5e-3
    means = {1: 1.5e-3, 2: 1.9e-3, 3: 2.9e-3, 4: 4.1e-3}

    def both(self: object, curve: object, work: object, batch: int, *rest: object, **options: object) -> object:
        return 2e-3, means.get(batch, batch * 1e-3 + 5e-4)

    monkeypatch.setattr(type(analysis.latency), "both", both)
    wide = {"percentile": 1.0}  # no wait that counts
    # Between 1 (1.5 ms for one) and 2 (1.9 ms for two) lies the size that takes a millisecond for each.
    found = solve(problem_for(analysis, rate_qps=rate, **wide), tau_s)
    assert found.feasible
    assert found.batch == 1
    assert 1e-3 <= found.trace[-1].mean_s <= 2e-3
    means[2] = means[3] = 2.5e-3
    assert solve(problem_for(analysis, rate_qps=rate, **wide), tau_s).batch == 2
    assert not solve(problem_for(analysis, rate_qps=2 * rate, **wide), tau_s).feasible


def test_headroom_holds_back_both_rate_and_time(analysis: Analysis) -> None:
    problem = problem_for(analysis, rate_qps=2000.0, epsilon=None)
    work = problem.work_at(0)
    margin = dataclasses.replace(problem, headroom=0.25)
    assert margin.settle(work, 2000.0).response_s == pytest.approx(1.25 * problem.settle(work, 2500.0).response_s)
    assert margin.max_qps(work, 0, 2.5e-3) == pytest.approx(problem.max_qps(work, 0, 2e-3) / 1.25, rel=1e-5)


@examples(60)
@given(tau_ms=st.floats(0.001, 1.0), rate=st.floats(1, 30_000))
def test_the_nearest_target_is_met_and_just_below_is_not(analysis: Analysis, tau_ms: float, rate: float) -> None:
    problem = problem_for(analysis, rate_qps=rate)
    solution = solve(problem, tau_ms * MS)
    if not solution.feasible and solution.nearest_s is not None:
        assert solution.nearest_s >= tau_ms * MS
        assert solve(problem, solution.nearest_s).feasible
        if solution.nearest_s > tau_ms * MS:
            assert not problem.prefix_step(solution.count, solution.nearest_s * (1 - 1e-9)).accepted


@examples(100)
@given(
    slos=st.tuples(st.floats(0.1, 30), st.floats(0.1, 30)),
    budgets=st.tuples(st.integers(0, 80), st.integers(0, 80)),
    rates=st.tuples(st.floats(1, 20_000), st.floats(1, 20_000)),
    model=st.sampled_from(["empirical", "beta", "beta_binomial"]),
    noisy=st.booleans(),
)
def test_more_never_costs_more(
    analysis: Analysis,
    rough: Analysis,
    slos: tuple[float, float],
    budgets: tuple[int, int],
    rates: tuple[float, float],
    model: HitRateName,
    noisy: bool,
) -> None:
    """A larger SLO, a larger budget and a lower rate together: never more lists, and never the worse verdict."""
    base = problem_for(rough if noisy else analysis, hit_rates=model, headroom=0.1)
    hard, easy = (
        solve(dataclasses.replace(base, limit_pages=choose(budgets), rate_qps=other(rates)), choose(slos) * MS)
        for choose, other in ((min, max), (max, min))
    )
    if hard.feasible:
        assert easy.feasible
        assert easy.count <= hard.count


@examples(100)
@given(tau_ms=st.floats(0.1, 30), rate=st.floats(1, 20_000), budget=st.integers(0, 80))
def test_the_verdict_is_the_rate_against_the_highest_sustainable(
    rough: Analysis, tau_ms: float, rate: float, budget: int
) -> None:
    problem = problem_for(rough, rate_qps=rate, limit_pages=budget, headroom=0.1)
    found = solve(problem, tau_ms * MS)
    most = problem.max_qps(problem.work_at(found.count), problem.prefix_bytes(found.count), tau_ms * MS)
    assert found.feasible == (most >= rate * (1 - 1e-9))


def test_timings_are_predicted_once_and_not_shared_between_problems(analysis: Analysis) -> None:
    problem = problem_for(analysis, rate_qps=1000.0)
    work = problem.work_at(10)
    assert problem.timing(work, 4) is problem.timing(problem.work_at(10), 4)
    other = dataclasses.replace(problem, percentile=99.0)
    assert other.timing(work, 4)[0] > problem.timing(work, 4)[0]


def test_another_rate_keeps_the_timings_and_drops_the_llm(analysis: Analysis) -> None:
    llm = throughput_model(LLMProfile(kv_cache_bytes=1 << 30, throughput_rps=5.0))
    problem = problem_for(analysis, rate_qps=10.0, llm=llm)
    assert problem.rate_at(0) == 5.0
    first = problem.timing(problem.work_at(3), 4)
    other = problem.at_rate(20.0)
    assert other.rate_at(0) == 20.0
    assert problem.rate_at(0) == 5.0
    assert other._timings is problem._timings
    assert other.timing(other.work_at(3), 4) == first
