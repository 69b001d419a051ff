"""Plans that keep rows beside codes: what proposals, placements and stored plans say of both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridindex.paging import CODE_PAGE_BYTES
from hybridindex.partitioner.analysis import analyse
from hybridindex.partitioner.plan import make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.plans.current import same_decision
from hybridindex.plans.division import Wanted, divide_plans
from hybridindex.plans.placed import Held, as_placed, expected_hit_rate, forecast_placed
from hybridindex.plans.proposal import Served, held_now, propose
from hybridindex.plans.stored import plan_summary
from hybridindex.service.http.openapi_answers import REPARTITIONED
from tests.partitioner.synthetic import make_profile, with_candidates

MIB = 1 << 20


@pytest.fixture(scope="module")
def analysis():
    codes = make_profile(nlist=64, n=300, code_size=100, mean_size=400, device_per_byte_s=5e-12)
    blocks = -(-codes.list_sizes // 16)
    codes = replace(codes, codec="rabitq1", scanner="rabitq", list_bytes=blocks * 1600)
    return analyse(with_candidates(codes, 2048, per_candidate_s=2e-6), page_bytes=CODE_PAGE_BYTES)


def planned(analysis, slo_ms, **asked):
    given = {"device_budget_bytes": 64 * MIB, "rate_qps": 200.0, "page_bytes": CODE_PAGE_BYTES, "n_devices": 2, **asked}
    return make_plan(analysis.profile, PlanRequest.resolve(slo_ms=slo_ms, **given), analysis=analysis)


@pytest.fixture(scope="module")
def plan(analysis):
    found = planned(analysis, 0.9 * planned(analysis, 1e-3, coverage=1.0).nearest_slo_ms)
    assert found.feasible
    assert found.resident_lists.size
    assert found.resident_rows.size
    return found


def test_what_is_placed_counts_both(plan):
    held = Held.of(plan.analysis.curve, plan.resident_pieces)
    assert (held.lists, held.rows) == (plan.resident_lists.size, plan.resident_rows.size)
    assert held.bytes == sum(plan.bytes_by_precision.values())
    assert held_now(plan, plan.piece_device) == held
    assert as_placed(plan, plan.piece_device) is plan
    assert forecast_placed(plan, plan.request.budgets) is plan


def test_rows_without_room_leave_their_work_to_the_host(plan):
    # An array of the scanned pieces alone says that no rows are there.
    placed = as_placed(plan, plan.list_device)
    assert placed.resident_rows.size == 0
    assert (placed.row_device == -1).all()
    np.testing.assert_array_equal(placed.resident_lists, plan.resident_lists)
    assert placed.predicted_hit_rate == plan.predicted_hit_rate
    assert placed.predicted_latency_ms(1) > plan.predicted_latency_ms(1)
    assert not placed.feasible
    assert placed.device_bytes == plan.device_bytes - plan.bytes_by_precision["rows"]
    assert f"and the rows of 0 of {plan.resident_rows.size}" in placed.reason
    assert expected_hit_rate(plan, plan.list_device) == plan.predicted_hit_rate
    codes = plan.bytes_by_precision["codes"]
    half = codes // 2 + plan.analysis.curve.geometry.page_bytes
    tight = forecast_placed(plan, [half + plan.bytes_by_precision["rows"] // 4, half])
    assert tight.resident_lists.size == plan.resident_lists.size
    assert 0 < tight.resident_rows.size < plan.resident_rows.size
    assert tight.predicted_row_hit_rate < plan.predicted_row_hit_rate


def test_a_proposal_moves_rows_too(analysis, plan):
    codes = replace(plan, resident_rows=np.empty(0, dtype=np.int64), row_device=np.full(plan.nlist, -1, dtype=np.int16))
    grows = propose(plan, codes, Served.by(codes, codes.piece_device), reason="more", bandwidth_share=1)
    assert set(grows.lists_in) == set(plan.nlist + plan.resident_rows)
    assert grows.bytes_to_move == plan.bytes_by_precision["rows"]
    data = grows.to_data()
    assert (data["resident"]["rows"], data["placed"]["rows"]) == (0, plan.resident_rows.size)
    assert data["latency_ms_before"] > data["latency_ms_after"]
    assert data["hit_rate_before"] == pytest.approx(data["hit_rate_after"])
    assert (data["verdict_before"], data["placed"]["verdict"]) == ("infeasible", "feasible")
    shrinks = propose(codes, plan, Served.by(plan, plan.piece_device), reason="less", bandwidth_share=1)
    assert set(shrinks.lists_out) == set(plan.nlist + plan.resident_rows)
    assert shrinks.bytes_to_move == 0
    # Devices of before, that told of no rows.
    blind = propose(plan, plan, Served.by(plan, plan.list_device), reason="again", bandwidth_share=1)
    assert set(blind.lists_in) == set(plan.nlist + plan.resident_rows)
    assert not same_decision(plan, codes)
    assert same_decision(plan, plan)


@pytest.mark.parametrize("model", ["best", "beta", "beta_binomial", "empirical"])
def test_a_plan_gains_nothing_over_itself(analysis, model):
    """Before and after are of one hit-rate model: the difference of two was once a gain that started moves."""
    rows = analyse(make_profile(nlist=64, n=300, device_per_byte_s=5e-12))
    for each in (analysis, rows):
        plan = planned(each, 1000, coverage=0.3, hit_rate_model=model, page_bytes=each.curve.geometry.page_bytes)
        again = propose(plan, plan, Served.by(plan, plan.piece_device), reason="again", bandwidth_share=1).comparison
        assert (again.latency_gain, again.hit_rate_gain) == (0, 0)
    mixed = planned(analysis, 0.9 * planned(analysis, 1e-3, coverage=1.0).nearest_slo_ms, hit_rate_model=model)
    again = propose(mixed, mixed, Served.by(mixed, mixed.piece_device), reason="again", bandwidth_share=1).comparison
    assert (mixed.resident_rows.size > 0, again.latency_gain, again.hit_rate_gain) == (True, 0, 0)
    fewer = planned(analysis, 1000, coverage=0.2, hit_rate_model=model)
    more = planned(analysis, 1000, coverage=0.3, hit_rate_model=model)
    gain = propose(more, fewer, Served.by(fewer, fewer.piece_device), reason="more", bandwidth_share=1).comparison
    assert gain.latency_ms_before == fewer.predicted_latency_ms(max(1, more.batch), more.request.percentile)


def test_the_summary_says_the_bytes_of_each_precision(plan):
    said = plan_summary(plan)
    assert said["n_resident_rows"] == plan.resident_rows.size
    assert said["page_bytes"] == plan.page_bytes
    assert said["bytes_by_precision"] == plan.bytes_by_precision
    assert set(said["bytes_by_precision"]) == {"codes", "rows"}
    schema = REPARTITIONED["content"]["application/json"]["schema"]["properties"]["plan"]
    assert set(schema["properties"]) == set(said)
    rows = planned(analyse(make_profile()), 50, coverage=0.5)
    assert set(plan_summary(rows)["bytes_by_precision"]) == {"rows"}
    assert sum(rows.bytes_by_precision.values()) + sum(rows.request.scratch) == rows.device_bytes


def test_shares_count_rows(analysis, plan):
    """Two indexes that each need rows get the bytes for both, and neither more than its own."""
    asked = {name: Wanted.by(plan) for name in ("one", "other")}
    room = 2 * sum(plan.request.budgets)
    divided = divide_plans(asked, [room // 2, room // 2])
    for part in divided.values():
        assert part.plan.feasible
        assert part.plan.resident_rows.size
        assert sum(part.plan.device_bytes_each) <= sum(part.share_bytes)
        assert part.needs_bytes is not None
    alone = [max(part.needs_bytes for part in divided.values())] * 2
    few = divide_plans(asked, [alone[0] // 2, alone[1] // 2])
    assert sum(part.plan.feasible for part in few.values()) == 1
