"""Plans of codes beside plans of rows: the goals that are asked, and how the results are judged."""

from __future__ import annotations

import math

import pytest

from benchmarks.host import code_plans
from benchmarks.host.code_plans import goal, judged, page_bytes
from benchmarks.host.code_sides import Side
from hybridindex.partitioner.analysis import analyse
from hybridindex.partitioner.request import PlanRequest
from tests.partitioner.synthetic import make_profile


def side(**changes):
    profile = make_profile(nlist=256, n=400, nprobe=16, noise=0.0, **changes)
    analysis = analyse(profile)
    request = PlanRequest.resolve(slo_ms=1e6, device_budget_bytes=1 << 30)
    return Side(
        rows="flat",
        bits=None,
        index=None,
        device="cpu",
        profile=profile,
        here=analysis,
        supposed=analysis,
        assumptions=(),
        request=request,
    )


@pytest.fixture(scope="module")
def rows():
    return side()


@pytest.mark.parametrize("coverage", code_plans.COVERAGES)
def test_a_goal_needs_its_coverage_and_no_more(rows, coverage):
    asked, plan = goal(rows, coverage)
    assert plan.feasible
    assert 0.95 * coverage <= plan.coverage <= coverage + 1 / rows.profile.nlist
    assert plan.rate_qps == pytest.approx(asked["rate_qps"])
    assert page_bytes(plan) == plan.device_bytes - plan.request.scratch[0] > 0
    # What is asked is what this coverage is needed for: a little less time, and more lists are.
    faster = rows.plan(**{**asked, "slo_ms": 0.9 * asked["slo_ms"]})
    assert not faster.feasible or faster.coverage > plan.coverage


def test_no_goal_needs_a_device_that_is_slower_than_the_host():
    assert goal(side(device_per_byte_s=1e-7), 0.5) is None


def row(**changes):
    plan = {"rows": "flat", "which": "fewest", "feasible": True, "bytes_ratio": 0.1, "host_work_ratio": 0.04}
    plan |= {"candidates": 100, "candidates_on_host": 40, "predicted_candidates_on_host": 39}
    return {**plan, **changes}


def test_the_worst_is_judged_and_a_missed_goal_is_counted():
    one = {
        "plans": [row(), row(bytes_ratio=0.2), row(rows="sq8", host_work_ratio=0.06), row(feasible=False)],
        "latency": [{"error": 0.1}, {"error": 0.1}, {"error": 0.3}],
        "predictions": [
            {"predicted_loss": 0.004, "measured_loss": 0.002},
        ],
    }
    said = {target["what"]: (round(target["worst"], 6), target["met"]) for target in judged([one])}
    assert said == {
        "plans of codes that miss the goal": (1, False),
        "device bytes over those of flat rows, fewest": (0.2, False),
        "device bytes over those of sq8 rows, fewest": (0.1, True),
        "host work left over a flat scan, fewest": (0.06, False),
        "host work left over a flat scan, filled": (pytest.approx(math.nan, nan_ok=True), False),  # none was compared
        "recall loss, predicted less measured": (0.002, True),
        "latency, median error": (0.1, True),
        "latency, worst error": (0.3, False),
        "rows compared on the host, error": (0.01, True),
    }
