"""Designs: what limits each, and that a split agrees with the plan that would be made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridindex.partitioner.plan import make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.studies.what_if.designs import designs_of
from hybridindex.studies.what_if.residents import best_split, curve_of, least_split, split_residents


@pytest.fixture(scope="module")
def residents(setting):
    return split_residents(setting)


def test_more_lists_speed_search_up_and_slow_the_llm_down(residents):
    curve = curve_of(residents)
    assert (np.diff([p.search_qps for p in curve]) > -1e-9).all()
    assert (np.diff([p.llm_qps for p in curve]) <= 0).all()
    assert curve[0].llm_qps > curve[-1].llm_qps
    ttft = [p.ttft_ms for p in curve if p.ttft_ms is not None]
    assert ttft[-1] < ttft[0]


def test_the_best_split_is_where_search_and_llm_meet(residents):
    best = best_split(residents)
    assert all(best.compliant_qps >= p.compliant_qps for p in curve_of(residents))
    assert best.search_qps == pytest.approx(best.llm_qps, rel=0.05)


def test_the_least_split_meets_the_goal_and_one_list_less_does_not(residents, setting):
    least = least_split(residents)
    assert least is not None
    assert least.compliant_qps >= setting.rate_qps
    assert residents.point(least.count - 1).compliant_qps < setting.rate_qps
    assert least.ttft_ms <= setting.slo_ms


def test_a_plan_for_the_same_goal_takes_about_the_same_bytes(residents, setting):
    plan = make_plan(
        setting.analysis.profile,
        PlanRequest.resolve(
            slo_ms=setting.slo_ms,
            device_budget_bytes=setting.budget_bytes,
            rate_qps=setting.rate_qps,
            llm=setting.llm,
            n_devices=8,
            slo_stage="ttft",
        ),
        analysis=setting.analysis,
    )
    assert plan.feasible
    assert plan.device_bytes == pytest.approx(least_split(residents).device_bytes, rel=0.1)


def test_without_load_there_is_nothing_to_keep_where_the_host_is_fast_enough(setting):
    easy = replace(setting, slo_ms=1e5, rate_qps=0.5)
    assert least_split(split_residents(easy)).device_bytes == 0


def test_a_dedicated_gpu_costs_the_llm_whole_engines(setting):
    rates = {}
    for needed in (1, 2, 4):
        dedicated = designs_of(replace(setting, llm_devices=needed, slo_ms=1e4))[1]
        rates[needed] = dedicated.point.llm_qps / setting.llm.throughput_rps
    assert rates == pytest.approx({1: 7 / 8, 2: 3 / 4, 4: 1 / 2})
    alone = designs_of(replace(setting, llm_devices=8))[1]
    assert "hold no engine of the LLM, which needs 8" in alone.refused


def test_all_gpu_holds_every_list_or_says_why_not(setting):
    everything = designs_of(setting)[2]
    assert everything.point.hit_rate == pytest.approx(1.0)
    refused = designs_of(replace(setting, budget_bytes=1 << 30))[2]
    assert "8 devices hold" in refused.refused
    assert refused.point is None
