"""A plan told of the lists that have room: nothing changes where all have, and less is never said to be more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridindex.errors import InfeasiblePlanError
from hybridindex.partitioner.analysis import analyse
from hybridindex.partitioner.plan import Verdict, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.plans.placed import Held, as_placed, forecast_placed, in_pages
from hybridindex.plans.proposal import Served, propose
from tests.partitioner.synthetic import make_profile

MIB = 1 << 20


@pytest.fixture(scope="module")
def analysis():
    return analyse(make_profile())


@pytest.fixture(scope="module")
def plan(analysis):
    request = PlanRequest.resolve(slo_ms=50, device_budget_bytes=512 * MIB, coverage=0.5, n_devices=2)
    return make_plan(analysis.profile, request, analysis=analysis)


def test_a_plan_that_has_room_is_itself(plan):
    assert as_placed(plan, plan.list_device) is plan
    assert forecast_placed(plan, plan.request.budgets) is plan


def test_what_has_no_room_is_in_no_number(plan):
    whole = Held.of(plan.analysis.curve, plan.resident_lists)
    placed = forecast_placed(plan, [whole.bytes // 4, 0])
    held = Held.of(plan.analysis.curve, placed.resident_lists)
    assert 0 < held.lists < whole.lists
    assert held.bytes <= whole.bytes // 4
    assert set(placed.list_device[placed.resident_lists].tolist()) == {0}
    assert placed.coverage == placed.resident_lists.size / plan.nlist
    assert placed.predicted_hit_rate < plan.predicted_hit_rate
    assert placed.predicted_latency_ms(8) != plan.predicted_latency_ms(8)
    assert placed.device_bytes_each == (held.bytes + plan.request.scratch[0], 0)
    assert placed.device_bytes == sum(placed.device_bytes_each)
    assert placed.reason.startswith(f"{placed.resident_lists.size} of the {plan.resident_lists.size} planned lists")
    # The hottest ones, in their order.
    on_first = [i for i in plan.resident_lists.tolist() if plan.list_device[i] == 0]
    assert placed.resident_lists.tolist()[:3] == on_first[:3]


def test_too_few_lists_for_the_slo_make_a_feasible_plan_infeasible(analysis):
    def solve(slo_ms, budget):
        request = PlanRequest.resolve(slo_ms=slo_ms, device_budget_bytes=budget, rate_qps=50)
        return make_plan(analysis.profile, request, analysis=analysis)

    alone, all_ = (solve(1e-3, budget).nearest_slo_ms for budget in (0, 512 * MIB))
    plan = solve((alone + all_) / 2, 512 * MIB)
    assert plan.feasible
    assert plan.resident_lists.size
    placed = as_placed(plan, np.full(plan.nlist, -1))
    assert placed.verdict is Verdict.INFEASIBLE
    assert "too few for the SLO" in placed.reason
    assert (placed.resident_lists.size, placed.device_bytes, placed.predicted_hit_rate) == (0, 0, 0)
    tight = propose(plan, None, Served.nowhere(None, plan.nlist), reason="", bandwidth_share=1, room_bytes=[0])
    with pytest.raises(InfeasiblePlanError, match=r"0 of the .* planned lists"):
        tight.refuse_infeasible(force=False)
    tight.refuse_infeasible(force=True)
    assert tight.to_data()["placed"]["verdict"] == "infeasible"
    assert tight.to_data()["planned"]["verdict"] == tight.to_data()["plan"]["verdict"] == "feasible"


def test_what_a_router_holds_replaces_the_forecast(plan):
    served = Served.nowhere(None, plan.nlist)
    hoped = propose(plan, None, served, reason="", bandwidth_share=1, room_bytes=plan.request.budgets)
    half = plan.list_device.copy()
    half[plan.resident_lists[::2]] = -1
    done = hoped.placed_as(half)
    assert done.to_data()["placed"]["lists"] < hoped.to_data()["placed"]["lists"]
    assert done.to_data()["hit_rate_after"] == done.placed.predicted_hit_rate < hoped.comparison.hit_rate_after
    assert done.to_data()["lists_to_move"] == hoped.to_data()["lists_to_move"]


def test_a_plan_in_pages_of_another_size_has_the_same_lists_and_other_bytes(plan):
    assert in_pages(plan, plan.request.page_bytes) is plan
    there = in_pages(plan, 1 << 20)
    geometry = there.analysis.curve.geometry
    assert geometry.page_bytes == there.page_bytes > plan.page_bytes
    assert there.resident_lists is plan.resident_lists
    pages = geometry.pages_for(plan.analysis.profile.list_sizes)
    for device, scratch in enumerate(plan.request.scratch):
        nbytes = int(pages[plan.list_device == device].sum()) * geometry.page_bytes
        assert there.device_bytes_each[device] == nbytes + scratch > plan.device_bytes_each[device]
    assert there.predicted_hit_rate == plan.predicted_hit_rate
    assert there.reason.startswith(plan.reason)
    words = f"made for pages of {plan.page_bytes:,} bytes, and the open devices have {there.page_bytes:,}"
    assert words in there.reason
    assert in_pages(there, plan.request.page_bytes).device_bytes_each == plan.device_bytes_each
    # A proposal tells what has room in them, before and after.
    served = replace(Served.nowhere(None, plan.nlist), page_bytes=1 << 20)
    room = [each - scratch for each, scratch in zip(plan.device_bytes_each, plan.request.scratch, strict=True)]
    found = propose(plan, None, served, reason="", bandwidth_share=1, room_bytes=room)
    assert found.plan is plan
    assert 0 < found.placed.resident_lists.size < plan.resident_lists.size
    assert found.to_data()["placed"] == found.placed_as(found.placed.piece_device).to_data()["placed"]
    assert found.to_data()["placed"]["bytes"] == Held.of(there.analysis.curve, found.placed.resident_lists).bytes


def test_in_other_pages_a_device_without_room_still_shares_no_work():
    slow = analyse(make_profile(noise=0.02, device_per_byte_s=2e-9))

    def there(*budgets: int):
        request = PlanRequest.resolve(slo_ms=50, device_budget_bytes=budgets, coverage=0.8, n_devices=len(budgets))
        return in_pages(make_plan(slow.profile, request, analysis=slow), 1 << 15)

    one, two = there(64 * MIB), there(64 * MIB, 0)
    assert two.predicted_latency_ms(16) == one.predicted_latency_ms(16)
    assert two.max_sustainable_qps == one.max_sustainable_qps
