"""A load whose hot set moves, with and without a refresher."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.studies.simulator import Inputs, poisson
from hybridindex.studies.simulator.follow_drift import follow_drift
from hybridindex.studies.simulator.lookahead_replay import LookaheadRules
from hybridindex.studies.simulator.moving_load import DriftRules
from tests.studies.simulator.conftest import LLM
from tests.studies.simulator.test_moving_load import POLICIES

RATE = 1500.0


@pytest.fixture(scope="module")
def inputs(analysis) -> Inputs:
    return Inputs(analysis=analysis, slo_s=0.001, rate=RATE, budget_bytes=20 << 20)


def test_the_same_requests_are_served_with_and_without_a_refresher(inputs):
    followed, ignored = follow_drift(inputs, poisson(RATE, 24_000, seed=1), DriftRules(at_s=4.0, **POLICIES))
    assert followed.refreshed
    assert not ignored.refreshed
    assert followed.before == ignored.before
    assert followed.at_end > followed.after
    assert followed.at_end > ignored.at_end + 0.1
    assert any(what.startswith("committed") for _, what in followed.history)
    assert followed.to_data()["attainment"]["at_end"] == followed.at_end


@pytest.mark.parametrize(
    ("changed", "at_s", "named"),
    [
        ({}, 1e6, "at_s is 1e[+]06"),
        ({"llm": LLM}, 1.0, "neither an LLM"),
        ({"lookahead": LookaheadRules(window_s=0.1, bytes_per_s=1e9)}, 1.0, "nor a lookahead"),
    ],
)
def test_what_drift_does_not_model_is_named(inputs, changed, at_s, named):
    with pytest.raises(InvalidInputError, match=named):
        follow_drift(replace(inputs, **changed), poisson(RATE, 2_000, seed=1), DriftRules(at_s=at_s))
