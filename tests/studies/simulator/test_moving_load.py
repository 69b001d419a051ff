"""A hot set that moves, followed by the router's own monitor and state machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.plan import make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.refresh.drift import DriftPolicy
from hybridindex.refresh.update_cycle import UpdatePolicy
from hybridindex.studies.simulator import Inputs, poisson, simulate
from hybridindex.studies.simulator.moving_load import DriftRules, MovingLoad
from hybridindex.studies.simulator.query_pool import move_hot_set
from tests.studies.simulator.conftest import system_of

RATE, MOVES_AT = 1500.0, 4.0
POLICIES = {
    "drift": DriftPolicy(window_requests=500, window_s=1.0, cool_down_s=1.0),
    "update": UpdatePolicy(verify_windows=1),
}


@pytest.fixture(scope="module")
def inputs(analysis) -> Inputs:
    plan = make_plan(
        analysis.profile, PlanRequest.resolve(slo_ms=1, device_budget_bytes=64 << 20, coverage=0.3), analysis=analysis
    )
    return Inputs(analysis=analysis, slo_s=0.001, rate=RATE, budget_bytes=64 << 20, plan=plan)


def run(inputs: Inputs, **rules):
    load = MovingLoad(inputs, DriftRules(**({"at_s": MOVES_AT} | POLICIES | rules)))
    workload = poisson(RATE, 30_000, seed=1)
    outcome = simulate(system_of("ours", inputs), workload, slo_s=inputs.slo_s, watch=load)
    load.check_invariants()
    late = workload.arrivals > workload.arrivals[-1] - 4
    return load, outcome, float((outcome.search_s[late] <= inputs.slo_s).mean())


def test_a_refresher_brings_attainment_back(inputs):
    followed, outcome, recovered = run(inputs)
    ignored, worse, lost = run(inputs, refresh=False)
    assert recovered > lost + 0.1
    assert outcome.hit_rate > worse.hit_rate
    said = [what for _, what in followed.history]
    stages = ["idle -> profiling", "solving -> weighing", "moving -> verifying", "verifying -> committing", "committed"]
    places = [next(i for i, what in enumerate(said) if what.startswith(stage)) for stage in stages]
    assert places == sorted(places)
    assert followed.history[0][0] > MOVES_AT, "nothing triggers before the hot set moves"
    assert any(what.startswith("2 windows were off") for _, what in ignored.history)


def test_nothing_happens_while_nothing_moves(inputs):
    load, _, _ = run(inputs, at_s=1e6)
    assert not load.history


def test_a_slow_move_takes_its_time(inputs):
    fast, _, _ = run(inputs)
    slow, _, _ = run(inputs, bytes_per_s=8e6)

    def moved(load: MovingLoad) -> float:
        times = {what.split(":")[0]: at for at, what in load.history}
        return times["moving -> verifying"] - times["weighing -> moving"]

    assert moved(slow) > 10 * moved(fast)


def test_a_moved_hot_set_is_as_skewed_as_before(analysis):
    moved = move_hot_set(analysis.profile, 0.5)
    before, after = analysis.profile.access, moved.access
    assert np.array_equal(np.sort(before.list_accesses), np.sort(after.list_accesses))
    assert before.list_accesses.argmax() != after.list_accesses.argmax()
    counts = np.bincount(after.fit_probes.ravel(), minlength=moved.nlist)
    assert np.array_equal(counts, after.list_accesses)


def test_rules_name_what_is_wrong():
    with pytest.raises(InvalidInputError, match="bytes_per_s is 0"):
        DriftRules(at_s=0.0, bytes_per_s=0)
    with pytest.raises(InvalidInputError, match="shift is 2"):
        replace(DriftRules(at_s=0.0), shift=2)
