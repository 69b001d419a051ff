"""Lists that no device holds, or none beside the others: the solver adds up the pages of all devices."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.partitioner.division import divide
from hybridindex.partitioner.plan import Plan, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.partitioner.solver import problem_of, solve
from hybridindex.partitioner.tradeoff import slo_curve
from hybridindex.plans.placed import judge
from tests.partitioner.synthetic import make_profile, with_candidates

MIB = 1 << 20
#: Three devices of 8 MiB / 3, of which none holds the third hottest list.
THREE: dict[str, Any] = {"device_budget_bytes": 8 * MIB // 3, "n_devices": 3, "scratch_bytes": 0, "rate_qps": 300.0}


def plan_of(analysis: Analysis, **asked: Any) -> Plan:
    return make_plan(analysis.profile, PlanRequest.resolve(**asked), analysis=analysis)


@pytest.fixture(scope="module")
def one_giant() -> Analysis:
    sizes = np.random.default_rng(0).integers(100, 500, size=256)
    third = int(analyse(make_profile(list_sizes=sizes)).curve.order[2])
    sizes[third] = 6000
    return analyse(make_profile(list_sizes=sizes))


def test_colder_lists_take_the_place_of_one_that_no_device_holds(one_giant: Analysis) -> None:
    plan = plan_of(one_giant, slo_ms=1.3, **THREE)
    giant = one_giant.curve.order[2]
    everything = plan_of(one_giant, slo_ms=1.3, coverage=1.0, **THREE)
    assert everything.feasible, "without the list on devices the SLO can be met"
    assert plan.feasible
    assert plan.list_device[giant] == -1
    assert 0 < plan.device_bytes < everything.device_bytes
    assert plan.n_unplaced == 0, "nothing is missing that the SLO needs"
    assert "1 hotter lists are larger than a device" in plan.reason
    # What stands beside the verdict says the same.
    assert "empirical infeasible" not in plan.explain()
    assert slo_curve(one_giant, plan.request, [1.3])[0].verdict == "feasible"
    assert judge(plan, plan.resident_pieces) == (True, plan.max_sustainable_qps)
    again = Plan.from_record(plan.to_record(), one_giant.profile)
    assert again.predicted_latency_ms(4) == plan.predicted_latency_ms(4)


def test_an_slo_that_needs_the_list_is_infeasible_for_that_reason(one_giant: Analysis) -> None:
    wide: dict[str, Any] = {**THREE, "device_budget_bytes": 94 * 32768 - 1, "n_devices": 16}
    plan = plan_of(one_giant, slo_ms=0.5, **wide)
    assert not plan.feasible
    assert "1 of 256 lists are larger than a device" in plan.reason
    assert plan.n_unplaced == 1
    assert plan.nearest_slo_ms is not None
    assert plan_of(one_giant, slo_ms=plan.nearest_slo_ms, **wide).feasible
    # A device without a limit would hold it.
    request = PlanRequest.resolve(slo_ms=1.3, **THREE)
    problem = problem_of(one_giant.configured(page_bytes=request.page_bytes, n_devices=3), request)
    assert solve(problem.without_limit(), 1.0e-3).path.list_ranks is None


def test_one_device_steps_over_a_list_that_it_cannot_hold(one_giant: Analysis) -> None:
    """The hottest lists before it are not all that fit, and no more are taken than the SLO needs."""
    alone: dict[str, Any] = {**THREE, "n_devices": 1, "device_budget_bytes": 90 * 32768}
    few, more = (plan_of(one_giant, slo_ms=slo_ms, **alone) for slo_ms in (1.6, 1.5))
    assert few.feasible
    assert more.feasible
    assert 2 < few.resident_lists.size <= more.resident_lists.size < 30


def some_giants(seed: int) -> Analysis:
    """Three lists of the hotter half may be far larger than the others."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(30, 200, size=64)
    sizes[rng.integers(0, 32, size=3)] = rng.integers(400, 6000, size=3)
    device_s = 1e-10 if seed % 2 else None
    profile = make_profile(
        nlist=64, n=200, nprobe=8, seed=seed, list_sizes=sizes, batches=(1, 4), repeats=2, device_per_byte_s=device_s
    )
    return analyse(profile, page_bytes=8192)


def on_devices(analysis: Analysis, pages: int, slo_ms: float, n_devices: int) -> Plan:
    budget = {"device_budget_bytes": pages * 8192, "n_devices": n_devices, "scratch_bytes": 0, "page_bytes": 8192}
    return plan_of(analysis, slo_ms=slo_ms, rate_qps=100.0, **budget)


@pytest.mark.parametrize(
    ("seed", "n_devices", "giant"),
    [(1, 1, 2), (5, 2, 1), (5, 2, 2), (5, 3, 2), (6, 2, 3), (6, 3, 3), (10, 2, 3), (11, 2, 2), (11, 3, 2)],
)
def test_a_budget_that_reaches_a_large_list_keeps_the_verdict(seed: int, n_devices: int, giant: int) -> None:
    """It may take the room of lists that save more together."""
    analysis = some_giants(seed)
    size = int(np.sort(analysis.curve.pages_by_rank)[-giant])
    nearest_ms = on_devices(analysis, size - 1, 1e-3, n_devices).nearest_slo_ms
    assert nearest_ms is not None
    for pages in (size - 1, size, size + 1):
        plan = on_devices(analysis, pages, nearest_ms * 1.0001, n_devices)
        assert plan.feasible
        assert judge(plan, plan.resident_pieces)[0]
    said = plan.reason.split("; ")[1:]
    assert all("larger than a device" in note or "leave too little room beside them" in note for note in said)


def test_the_nearest_slo_is_no_more_than_what_the_plan_answers_in() -> None:
    tried = 0
    for seed, pages, n_devices in itertools.product(range(4), (20, 45, 80, 150), (1, 2, 3)):
        analysis = some_giants(seed)
        plan = on_devices(analysis, pages, 0.05, n_devices)
        response_s, nearest_ms = plan.trace[-1].response_s, plan.nearest_slo_ms
        if plan.feasible or response_s is None:
            continue
        tried += 1
        assert nearest_ms is not None
        assert nearest_ms <= response_s * 1e3 * (1 + 1e-8)
        assert on_devices(analysis, pages, nearest_ms, n_devices).feasible
    assert tried > 20


def test_lists_that_fit_by_their_pages_are_all_placed() -> None:
    """Balanced by their work alone, the others would leave the large list no device."""
    sizes = np.full(64, 16)
    cold = analyse(make_profile(nlist=64, n=300, nprobe=8, list_sizes=sizes, seed=1, skew=3.0)).curve.order[-2]
    sizes[cold] = 60 * 16
    analysis = analyse(make_profile(nlist=64, n=300, nprobe=8, list_sizes=sizes, seed=1, skew=3.0), page_bytes=8192)
    budget = {"device_budget_bytes": 62 * 8192, "n_devices": 2, "scratch_bytes": 0, "page_bytes": 8192}
    plan = plan_of(analysis, slo_ms=100.0, coverage=1.0, **budget)
    assert plan.n_unplaced == 0
    assert plan.coverage == 1.0


def test_a_list_that_finds_no_room_beside_others_is_made_up_for() -> None:
    """Each fits on a device, and all of them on all devices by their number of pages."""
    rng = np.random.default_rng(1)
    base = make_profile(nlist=64, n=300, nprobe=8, seed=1, skew=0.5, noise=0.02)
    order = np.argsort(-base.access.list_accesses, kind="stable")
    sizes = np.full(64, 64)
    some = rng.choice(20, 8, replace=False)
    sizes[order[some]] = int(rng.integers(200, 900))
    profile = make_profile(nlist=64, n=300, nprobe=8, list_sizes=sizes, seed=1, skew=0.5, noise=0.02)
    analysis = analyse(profile, page_bytes=8192)
    largest = int(analysis.curve.pages_by_rank.max())
    asked: dict[str, Any] = {
        "device_budget_bytes": int(largest * 1.6) * 8192,
        "n_devices": 4,
        "scratch_bytes": 0,
        "rate_qps": 200.0,
        "page_bytes": 8192,
    }
    filled = plan_of(analysis, slo_ms=0.01, coverage=1.0, **asked)
    assert filled.nearest_slo_ms is not None
    plan = plan_of(analysis, slo_ms=filled.nearest_slo_ms * 1.02, **asked)
    assert plan.feasible
    assert plan.n_unplaced > 0
    assert "share of the bytes" not in plan.reason
    assert plan.predicted_latency_ms(plan.batch, 90) <= filled.nearest_slo_ms * 1.02


def test_indexes_that_share_devices_step_over_it_too(one_giant: Analysis) -> None:
    request = PlanRequest.resolve(slo_ms=1.3, **{**THREE, "scratch_bytes": None})
    share = divide([(one_giant, request)], (8 * MIB // 3,) * 3)[0]
    assert share.choice.keeps
    plan = make_plan(one_giant.profile, share.request, analysis=one_giant)
    assert plan.feasible
    assert plan.predicted_hit_rate == pytest.approx(share.choice.hit_rate)


def test_rows_beside_codes_that_no_device_holds_are_stepped_over() -> None:
    sizes = np.random.default_rng(2).integers(100, 300, size=128)
    sizes[5] = 5000
    profile = with_candidates(
        make_profile(nlist=128, n=300, list_sizes=sizes, code_size=64, seed=2), 1024, per_candidate_s=4e-6
    )
    analysis = analyse(profile, page_bytes=4096)
    asked: dict[str, Any] = {"page_bytes": 4096, "scratch_bytes": 0, "n_devices": 2, "device_budget_bytes": 3 * MIB}
    path = problem_of(analysis, PlanRequest.resolve(slo_ms=1.0, **asked)).paths[-1]
    assert path.row_ranks is not None
    assert np.diff(path.pages).max() * 4096 <= 3 * MIB
    plan = plan_of(analysis, slo_ms=0.9, **asked)
    assert plan.resident_rows.size
    assert plan.row_device[5] == -1
    assert judge(plan, plan.resident_pieces)[0] == plan.feasible
