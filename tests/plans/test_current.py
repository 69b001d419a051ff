"""Every row of the ledger's table: what a restart resumes."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError, StoreError
from hybridindex.partitioner.plan import make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.plans.current import PLAN_CURRENT, current_plan_id, latest_plan_id, same_decision
from hybridindex.plans.stored import load_plan
from hybridindex.store import ControlStore, records
from tests.partitioner import synthetic
from tests.store.conftest import make_profile

RECORD = {"data": {"verdict": "feasible"}, "arrays": {}}


@pytest.fixture
def store(tmp_path):
    now = datetime(2026, 1, 1, tzinfo=UTC)

    def clock():
        nonlocal now
        now += timedelta(microseconds=1)
        return now

    with ControlStore.open(tmp_path / "control.sqlite", clock=clock) as store:
        yield store


@pytest.fixture
def stored(store):
    """``stored(trial=False, index="a")``: a new plan's id."""

    def save(*, trial=False, index="a"):
        profile = store.save_profile(make_profile(index_fingerprint=index))
        return store.save_plan(RECORD, profile.id, trial=trial)

    return save


def make_current(store, plan_id, index="a"):
    store.record_event(PLAN_CURRENT, {"plan_id": plan_id, "index_fingerprint": index})


def test_nothing_is_the_latest_of_an_empty_store(store):
    assert latest_plan_id(store, "a") is None
    assert current_plan_id(store, "a") is None


def test_what_became_current_last_is_the_latest_whenever_it_was_stored(store, stored):
    one, other = stored(), stored()
    assert latest_plan_id(store, "a") == other
    for plan in (other, one, other, one):
        make_current(store, plan)
        assert latest_plan_id(store, "a") == current_plan_id(store, "a") == plan


def test_what_is_stored_later_is_the_latest_but_not_current(store, stored):
    make_current(store, one := stored())
    later = stored()
    assert (latest_plan_id(store, "a"), current_plan_id(store, "a")) == (later, one)


def test_a_trial_is_the_latest_only_once_it_was_committed(store, stored):
    first = stored()
    trial = stored(trial=True)
    assert latest_plan_id(store, "a") == first
    make_current(store, first)
    assert latest_plan_id(store, "a") == first
    make_current(store, trial)
    assert latest_plan_id(store, "a") == trial
    make_current(store, first)
    assert latest_plan_id(store, "a") == first, "it was taken back"


def test_each_index_has_its_own(store, stored):
    one, other = stored(), stored(index="b")
    make_current(store, one)
    make_current(store, other, "b")
    store.record_event(PLAN_CURRENT, {"plan_id": 99})
    assert (latest_plan_id(store, "a"), latest_plan_id(store, "b")) == (one, other)


def test_only_the_newest_has_to_be_whole(store, stored):
    one, other = stored(), stored()
    make_current(store, one)
    make_current(store, other)
    with store._opened.writer.begin() as connection:
        connection.exec_driver_sql("UPDATE events SET at = '2031-01-01T00:00:00+00:00' WHERE id = 1")
    assert current_plan_id(store, "a") == latest_plan_id(store, "a") == other
    with store._opened.writer.begin() as connection:
        connection.exec_driver_sql("UPDATE events SET at = '2031-01-01T00:00:00+00:00' WHERE id = 2")
    for ask in (current_plan_id, latest_plan_id):
        with pytest.raises(StoreError, match=r"event 2 .*damaged, .*apply the plan again"):
            ask(store, "a")
    make_current(store, one)
    assert current_plan_id(store, "a") == one
    # It names no index, and no plan of this one: those before it count.
    store.record_event(PLAN_CURRENT, {"plan_id": 99})
    with pytest.raises(StoreError, match=r"event 2 .*damaged"):
        current_plan_id(store, "a")


class Named:
    fingerprint = "a"


def test_a_choice_that_is_no_id_is_named(store):
    with pytest.raises(InvalidInputError, match="'newest'"):
        load_plan(Named(), "newest", store)
    assert load_plan(Named(), "none", store) is None


def test_a_decision_is_the_same_where_request_and_placement_are():
    profile = synthetic.make_profile(nlist=64, nprobe=8, batches=(1, 4), repeats=2)

    def decide(slo_ms):
        return make_plan(profile, PlanRequest.resolve(slo_ms=slo_ms, device_budget_bytes=64 << 20, coverage=0.5))

    one, asked_again, other_slo = decide(2.0), decide(2.0), decide(3.0)
    assert same_decision(one, asked_again)
    assert one.list_device.tolist() == other_slo.list_device.tolist()
    assert not same_decision(one, other_slo)
    assert not same_decision(one, replace(one, list_device=np.full_like(one.list_device, -1)))


def test_the_store_knows_the_events_by_the_same_kind():
    """Two names for it: importing the store's would import SQLAlchemy with every command."""
    assert records.PLAN_CURRENT == PLAN_CURRENT
