"""What the demo compares the plan with where there is a GPU; here on the stand-in."""

from __future__ import annotations

from dataclasses import asdict

import pytest

import hybridindex as hx
from hybridindex.demo import designs as designs_module
from hybridindex.demo import run
from hybridindex.demo.designs import compared_designs, served_designs
from hybridindex.demo.same_answers import SameAnswers
from hybridindex.report.acts import acts_of_demo
from hybridindex.types import Profile
from tests.clustered import clustered

NLIST = 24


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    path = tmp_path_factory.mktemp("designs") / "idx"
    with hx.build(clustered(2500, seed=1), path, nlist=NLIST, metric="l2", nprobe=6) as made:
        yield made


@pytest.fixture(scope="module")
def plan(index):
    profile = index.profile(clustered(300, seed=2), 6, devices=["cpu"], max_seconds=2)
    assert isinstance(profile, Profile)
    return index.plan(50, 16 << 20, profile, coverage=0.3, rate_qps=100)


def test_a_split_that_places_nothing_is_the_host_and_said(index, plan):
    designs, words = compared_designs(index, plan, "cpu", "h100")
    assert [design.name for design in designs] == ["all on the device"]
    assert designs[0].plan.coverage == 1
    assert "which answers" in words
    assert "the split places nothing and equals the host" in words


def test_all_designs_are_measured_and_shown_as_the_third_act(index, plan, monkeypatch):
    monkeypatch.setattr(run, "SECONDS_PER_RATE", 0.3)
    # No index that a test can build keeps a host busier than an LLM keeps a GPU.
    monkeypatch.setattr(designs_module, "hedrarag_lists", lambda _inputs: NLIST // 2)
    compared, words = compared_designs(index, plan, "cpu", "h100")
    assert f"it places 12 of {NLIST} lists" in words
    designs = [*served_designs(index, plan, "cpu"), *compared]
    load = list(run._serve(index, designs, plan, clustered(400, seed=3), lambda *_: None))
    names = ["host", "hybrid", "all on the device", "HedraRAG's split"]
    assert [one.policy for one in load] == names * len(run.LOADS)
    held = {one.policy: one.device_bytes for one in load}
    assert held["host"] == 0 < held["hybrid"] < held["HedraRAG's split"] < held["all on the device"]
    assert all(one.result.n_failed == 0 < one.result.n_requests for one in load)
    hit_rates = {one.policy: one.result.hit_rate for one in load}
    assert hit_rates["host"] == 0
    assert hit_rates["all on the device"] == pytest.approx(1)

    rows = [
        {"policy": one.policy, "rate": one.result.rate, "attainment": one.result.attainment,
         "device_bytes": one.device_bytes}
        for one in load
    ]  # fmt: skip
    same = SameAnswers(
        queries=10, differences=0, plans=1, lookaheads=0, hit_rates=(0.0, 1.0), recall=1.0, brute_queries=1,
        seconds=1.0, changed_s=(0.5,), answers=(5, 5),
    )  # fmt: skip
    act = acts_of_demo(plan, asdict(same), None, None, rows, "one GPU")[2]
    (picture,) = act.pictures
    assert picture.name == "attainment"
    assert picture.drawn is not None
    page = "".join(block.html for block in act.blocks)
    assert "Measured on one GPU" in page
    for name in ("host", "hybrid", "all on the device"):
        assert name in page
