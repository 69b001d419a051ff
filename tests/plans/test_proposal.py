"""What a proposal says of a change: against a plan, against the host alone, and against empty devices."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from hybridindex.partitioner.analysis import analyse
from hybridindex.partitioner.plan import make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.plans.placed import Held
from hybridindex.plans.proposal import Served, propose
from hybridindex.service.http.openapi_answers import REPARTITIONED
from hybridindex.types import TransferSample
from tests.partitioner.synthetic import make_profile

MIB = 1 << 20


@pytest.fixture(scope="module")
def plans():
    """The same but for its coverage: a fifth and a half of the lists."""
    analysis = analyse(make_profile())
    return [
        make_plan(
            analysis.profile,
            PlanRequest.resolve(slo_ms=2, device_budget_bytes=512 * MIB, coverage=coverage),
            analysis=analysis,
        )
        for coverage in (0.2, 0.5)
    ]


def test_against_a_plan_the_difference_moves(plans):
    small, large = plans
    grows = propose(large, small, Served.by(small, small.list_device), reason="more", bandwidth_share=0.5).to_data()
    shrinks = propose(small, large, Served.by(large, large.list_device), reason="less", bandwidth_share=0.5).to_data()
    sizes = large.analysis.profile.list_sizes
    wanted = [i for i in large.resident_lists if small.list_device[i] < 0 and sizes[i]]
    assert (grows["lists_to_move"], grows["lists_to_drop"]) == (len(wanted), 0)
    assert (shrinks["lists_to_move"], shrinks["bytes_to_move"]) == (0, 0)
    assert shrinks["lists_to_drop"] == len(large.resident_lists) - len(small.resident_lists)
    assert grows["hit_rate_before"] == shrinks["hit_rate_after"] == pytest.approx(small.predicted_hit_rate)
    for name in ("hit_rate", "device_bytes"):
        assert grows["gain"][name] == pytest.approx(-shrinks["gain"][name])
    assert grows["gain"]["hit_rate"] > 0 > grows["gain"]["device_bytes"]
    assert grows["gain"]["latency_ms"] == pytest.approx(grows["latency_ms_before"] - grows["latency_ms_after"])


def test_without_a_plan_the_host_alone_is_compared_with(plans):
    plan = plans[0]
    alone = propose(plan, None, Served.by(None, np.full(plan.nlist, -1)), reason="first", bandwidth_share=1).to_data()
    assert alone["current"] is None
    assert alone["hit_rate_before"] == 0
    assert alone["gain"]["device_bytes"] == -plan.device_bytes
    assert alone["lists_to_drop"] == 0


def test_empty_devices_take_every_list_and_drop_none(plans):
    small, large = plans
    offline = propose(small, large, Served.nowhere(large, large.nlist), reason="next", bandwidth_share=1).to_data()
    sizes = small.analysis.profile.list_sizes
    assert offline["lists_to_move"] == np.count_nonzero(sizes[small.resident_lists])
    assert offline["lists_to_drop"] == 0
    assert offline["hit_rate_before"] == pytest.approx(large.predicted_hit_rate)


def timed(*bandwidths):
    """Copies of two sizes from ordinary memory and, where a second one is given, from page-locked memory, bytes/s."""
    return tuple(
        TransferSample(device="cuda:0", pinned=pinned, nbytes=nbytes, seconds=nbytes / bandwidth)
        for pinned, bandwidth in zip((False, True), bandwidths, strict=False)
        for nbytes in (MIB, 64 * MIB)
    )


@pytest.mark.parametrize(("bandwidths", "faster"), [((1e9, 4e9), 4), ((1e9,), 1)])
def test_lists_in_page_locked_memory_come_at_its_own_bandwidth(plans, bandwidths, faster):
    small, large = plans
    analysis = large.analysis
    profile = dataclasses.replace(analysis.profile, transfers=timed(*bandwidths))
    large = dataclasses.replace(large, analysis=dataclasses.replace(analysis, profile=profile))
    [_, fresh, _] = np.array_split(np.setdiff1d(large.resident_lists, small.resident_lists), 3)

    def move_s(page_locked):
        served = Served.by(small, small.list_device, page_locked)
        return propose(large, small, served, reason="more", bandwidth_share=0.5).to_data()

    plain, some, every = move_s([]), move_s(fresh), move_s(np.arange(large.nlist))
    assert plain["move_s"] == pytest.approx(plain["bytes_to_move"] / 1e9 / 0.5)
    assert every["move_s"] == pytest.approx(plain["move_s"] / faster)
    locked = Held.of(analysis.curve, fresh).bytes
    assert some["move_s"] == pytest.approx((plain["bytes_to_move"] - locked + locked / faster) / 1e9 / 0.5)
    assert plain["bytes_to_move"] == some["bytes_to_move"] > locked > 0


def test_it_is_what_the_openapi_document_says(plans):
    small, large = plans
    data = propose(large, small, Served.by(small, small.list_device), reason="more", bandwidth_share=1).to_data()
    json.dumps(data)
    said = REPARTITIONED["content"]["application/json"]["schema"]["properties"]
    assert set(data) | {"applied", "plan_id", "unplaced_lists", "placed", "update", "shares"} == set(said)
