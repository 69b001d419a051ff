"""Plans of several devices: who shares the work, and what one without room leaves to the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from hybridindex.partitioner.analysis import analyse
from hybridindex.partitioner.placement import place_round_robin
from hybridindex.partitioner.plan import Plan, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.partitioner.solver import problem_of, solve
from hybridindex.types import AccessSample, LLMProfile
from tests.partitioner.synthetic import make_profile, plan_for

MIB = 1 << 20


def test_work_not_bytes_is_shared_out_over_devices() -> None:
    """Queries probe every other list, of those in order of size: devices in turn would give all work to one."""
    nlist, rng = 32, np.random.default_rng(0)
    profile = make_profile(nlist=nlist, nprobe=4, list_sizes=np.arange(800, 800 - 8 * nlist, -8))
    chance = np.where(np.arange(nlist) % 2 == 0, 1.0 / (1 + np.arange(nlist)), 0.0)
    probes = np.array([rng.choice(nlist, 4, replace=False, p=chance / chance.sum()) for _ in range(200)], np.int32)
    accesses = np.bincount(probes.ravel(), minlength=nlist).astype(np.float64)
    access = AccessSample(fit_probes=probes, held_probes=probes, list_accesses=accesses)
    profile = dataclasses.replace(profile, access=access)
    # Pages of 8 vectors: no two lists take equally many.
    arguments: dict[str, Any] = {"device_budget_bytes": 64 * MIB, "n_devices": 2, "page_bytes": 4096}
    plan = make_plan(profile, PlanRequest.resolve(slo_ms=2.0, coverage=1.0, **arguments))
    assert (plan.list_device >= 0).all()

    def most_loaded(device: np.ndarray) -> float:
        work = np.bincount(device, weights=accesses * profile.list_bytes, minlength=2)
        return float(work.max() / work.mean())

    in_turn = place_round_robin(accesses, profile.list_sizes // 8, [nlist * 100] * 2)
    assert most_loaded(in_turn.device) > 1.9
    assert plan.imbalance == pytest.approx(most_loaded(plan.list_device))
    assert plan.imbalance < 1.05


def test_device_time_is_shared_by_devices() -> None:
    slow = analyse(make_profile(noise=0.02, device_per_byte_s=1.2e-9))
    one, four = (plan_for(slow, coverage=0.8, n_devices=n) for n in (1, 4))
    assert four.predicted_latency_ms(16) < one.predicted_latency_ms(16)


def test_a_device_without_room_takes_no_time_from_others() -> None:
    slow = analyse(make_profile(noise=0.02, device_per_byte_s=1.2e-9))
    one = plan_for(slow, coverage=0.8, device_budget_bytes=64 * MIB)
    two = plan_for(slow, coverage=0.8, device_budget_bytes=[64 * MIB, 0], n_devices=2)
    assert two.list_device.tolist() == one.list_device.tolist()
    assert two.predicted_latency_ms(16) == one.predicted_latency_ms(16)


def test_a_device_that_is_full_leaves_its_part_to_others() -> None:
    slow = analyse(make_profile(noise=0.02, device_per_byte_s=1.2e-9))
    one = plan_for(slow, coverage=0.8, device_budget_bytes=64 * MIB)
    even = plan_for(slow, coverage=0.8, device_budget_bytes=64 * MIB, n_devices=2)
    small = plan_for(slow, coverage=0.8, device_budget_bytes=[64 * MIB, 4 * MIB], n_devices=2)
    told = [plan.predicted_latency_ms(16) for plan in (even, small, one)]
    assert told == sorted(told)
    assert told[1] > 1.3 * told[0]
    # Of the work that was placed, the large one has about as much as was predicted with.
    part = small.analysis.latency.largest_part(slow.curve, slow.curve.of_lists(small.resident_lists))
    assert part == pytest.approx(small.imbalance / 2, rel=0.1)
    again = Plan.from_record(small.to_record(), slow.profile, analysis=slow)
    assert again.predicted_latency_ms(16) == told[1]


def test_a_device_with_less_room_than_a_page_of_one_row_takes_no_part() -> None:
    slow = analyse(make_profile(noise=0.02, device_per_byte_s=1.2e-9))
    asked: dict[str, Any] = {"coverage": 0.8, "page_bytes": 100}
    one = plan_for(slow, device_budget_bytes=64 * MIB, **asked)
    two = plan_for(
        slow, device_budget_bytes=[64 * MIB, 300], n_devices=2, scratch_bytes=[one.request.scratch[0], 0], **asked
    )
    assert two.list_device.tolist() == one.list_device.tolist()
    assert two.predicted_latency_ms(16) == one.predicted_latency_ms(16)


@pytest.mark.parametrize("budget", [3 * MIB, 4 * MIB, 5 * MIB])
def test_the_nearest_slo_can_be_met_where_a_list_fits_no_device(budget: int) -> None:
    """The solver adds up the pages of all devices."""
    sizes = np.full(64, 300)
    sizes[:2] = 9000
    analysis = analyse(make_profile(nlist=64, list_sizes=sizes, skew=2.0, noise=0.01))
    asked: dict[str, Any] = {"device_budget_bytes": budget, "n_devices": 4, "page_bytes": 4096}
    plans = [plan_for(analysis, slo_ms=slo_ms, **asked) for slo_ms in (0.4, 0.6, 0.8, 1.0, 1.2, 1.6)]
    named = [plan.nearest_slo_ms for plan in plans if plan.n_unplaced]
    assert named
    for nearest_ms in named:
        assert nearest_ms is not None
        assert plan_for(analysis, slo_ms=nearest_ms, **asked).feasible


@pytest.mark.parametrize("slo_ms", [3.4, 4.4, 7.0, 10.0])
def test_fewer_lists_than_devices_keep_the_verdict_of_the_solver(slo_ms: float) -> None:
    """Devices without a list take no scratch, and the LLM has it: that must not ask more of search than was decided."""
    analysis, budget = analyse(make_profile(noise=0.05)), MIB // 2
    llm = LLMProfile(kv_cache_bytes=24 * budget, throughput_rps=4000.0)
    request = PlanRequest.resolve(slo_ms=slo_ms, device_budget_bytes=budget, n_devices=8, llm=llm)
    decided = solve(problem_of(analysis.configured(page_bytes=request.page_bytes, n_devices=8), request), slo_ms / 1e3)
    assert decided.feasible
    assert 0 < decided.count < 8
    assert make_plan(analysis.profile, request, analysis=analysis).feasible
