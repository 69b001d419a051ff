"""What a proposal says on a terminal: what served before, what is placed, and whether it is faster."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hybridindex.cli.proposal_table import proposal_table, proposal_words
from hybridindex.partitioner.plan import make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.plans.proposal import Served, propose
from tests.partitioner.synthetic import make_profile


@pytest.fixture(scope="module")
def proposal():
    plan = make_plan(make_profile(), PlanRequest.resolve(slo_ms=2, device_budget_bytes=512 << 20, coverage=0.5))
    return propose(plan, None, Served.by(None, np.full(plan.nlist, -1)), reason="first", bandwidth_share=1)


def answer_of(proposal, *, applied=False, **changed):
    comparison = dataclasses.replace(proposal.comparison, **changed)
    known = {"applied": applied, "plan_id": 1, "unplaced_lists": 0 if applied else None, "update": None}
    return {**dataclasses.replace(proposal, comparison=comparison).to_data(), **known}


@pytest.mark.parametrize(
    ("applied", "columns"),
    [(False, ["now", "planned", "would be placed"]), (True, ["before", "planned", "placed"])],
)
def test_what_served_stands_beside_what_is_planned_and_placed(proposal, applied, columns):
    table = proposal_table(answer_of(proposal, applied=applied, max_qps_before=17_771.3, max_qps_after=93.456))
    assert [str(column.header) for column in table.columns][1:] == columns
    rows = {row[0]: row[1:] for row in zip(*(column.cells for column in table.columns), strict=True)}
    assert rows["lists on devices"][0] == "0"
    assert rows["most requests/s within the SLO"][::2] == ("17,771", "93.46")


@pytest.mark.parametrize(
    ("before_of_after", "words"),
    [(1.0, "latency unchanged"), (1 + 1e-9, "latency unchanged"), (0.5, "slower"), (2.0, "faster")],
)
def test_a_change_of_latency_has_a_direction_and_no_sign(proposal, before_of_after, words):
    after = proposal.comparison.latency_ms_after
    [gain] = [
        line
        for line in proposal_words(answer_of(proposal, latency_ms_before=after * before_of_after))
        if line.startswith("Gain")
    ]
    assert words in gain.partition(",")[0]
    assert "-" not in gain.partition(",")[0]
