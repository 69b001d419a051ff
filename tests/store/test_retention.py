"""What goes from a control store and what never does, on SQLite and PostgreSQL."""

from __future__ import annotations

import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError, ProfileError, StoreError
from hybridindex.store import ControlStore
from hybridindex.store.retention import Pruned, Retention
from tests.examples import examples
from tests.store.conftest import make_profile

RECORD = {"data": {"verdict": "feasible"}, "arrays": {}}
SMALL = Retention(plans=1, profiles=1, events=1)


def save(store, index="a", parent=None, *, trial=False):
    """A profile and a plan of it; their ids."""
    notes = {} if parent is None else {"renewed": {"parent": parent}}
    profile = store.save_profile(make_profile(index_fingerprint=index, notes=notes))
    return profile.id, store.save_plan(RECORD, profile.id, trial=trial)


def make_current(store, plan_id, index="a"):
    store.record_event("plan_current", {"plan_id": plan_id, "index_fingerprint": index})


def plans(store):
    return [p.id for p in store.list_plans()]


def profiles(store):
    return [p.id for p in store.list_profiles()]


def test_the_newest_stay(store):
    made = [save(store) for _ in range(6)]
    for number in range(9):
        store.record_event("x", {"n": number})
    assert store.prune(Retention(plans=2, profiles=3, events=4)) == Pruned(plans=4, profiles=3, events=5)
    assert plans(store) == [plan for _, plan in made[4:]]
    assert profiles(store) == [profile for profile, _ in made[3:]]
    assert [e.payload["n"] for e in store.list_events()] == [8, 7, 6, 5]
    for _, plan in made[4:]:
        store.load_profile(store.load_plan(plan).profile_id)
    with pytest.raises(ProfileError):
        store.load_plan(made[0][1])
    store.check_invariants()
    assert not store.prune(Retention(plans=2, profiles=3, events=4))


def test_what_was_measured_does_not_make_room_for_what_happens_all_the_time(store):
    for kind in ("bench", "llm_profiled", "llm_profiled"):
        store.record_event(kind, {})
    for _ in range(9):
        store.record_event("x", {})
    assert store.prune(Retention(events=2)).events == 1 + 7
    assert [e.kind for e in store.list_events()] == ["x", "x", "llm_profiled", "llm_profiled"]


def test_what_a_restart_needs_stays_with_all_it_refers_to(store):
    grandparent, _ = save(store)
    parent, _ = save(store, parent=grandparent)
    current_profile, current = save(store, parent=parent)
    served_profile, served = save(store)
    make_current(store, served)
    make_current(store, current)
    by_hand_profile, by_hand = save(store)
    for _ in range(5):
        newest_profile, newest = save(store, trial=True)
        store.record_event("x", {})
    gone = store.prune(SMALL, keep_plans=(served,))
    assert plans(store) == [current, served, by_hand, newest]
    assert profiles(store) == [
        grandparent, parent, current_profile, served_profile, by_hand_profile, newest_profile,
    ]  # fmt: skip
    assert [(e.kind, e.payload.get("plan_id")) for e in store.list_events()] == [("x", None), ("plan_current", current)]
    assert gone == Pruned(plans=6, profiles=4, events=5)
    store.check_invariants()


def test_each_index_keeps_its_own(store):
    kept = {}
    for index in ("a", "b", "c"):
        _, kept[index] = save(store, index)
        make_current(store, kept[index], index)
        save(store, index)
    for _ in range(4):
        save(store, "a")
    store.prune(SMALL)
    for index, plan in kept.items():
        found = [p.id for p in store.list_plans(index_fingerprint=index)]
        assert found[0] == plan
        assert len(found) == 2


def test_a_dry_run_says_the_same_and_deletes_nothing(store):
    for _ in range(4):
        save(store)
        store.record_event("x", {})
    before = plans(store), profiles(store), store.list_events()
    counted = store.prune(SMALL, dry_run=True)
    assert (plans(store), profiles(store), store.list_events()) == before
    assert store.prune(SMALL) == counted == Pruned(plans=3, profiles=3, events=3)


def test_an_empty_store_and_damaged_events_are_no_trouble(store):
    assert not store.prune(SMALL)
    _, plan = save(store)
    store.record_event("plan_current", {"plan_id": "no number"})
    store.record_event("plan_current", {"plan_id": 999, "index_fingerprint": "a"})
    store.prune(SMALL)
    assert plans(store) == [plan]


def test_a_damaged_event_of_the_current_plan_costs_no_plan(sqlite_path):
    with ControlStore.open(sqlite_path) as store:
        current, *others = (save(store)[1] for _ in range(4))
        make_current(store, current)
        with sqlite3.connect(sqlite_path) as connection:
            connection.execute("UPDATE events SET data = replace(data, '1', '2')")
        connection.close()
        with pytest.raises(StoreError, match=r"event 1 \(plan_current\): damaged, .* or apply the plan again"):
            store.prune(SMALL)
        assert plans(store) == [current, *others]
        make_current(store, current)
        store.prune(SMALL)
        assert plans(store) == [current, others[-1]]


@pytest.mark.parametrize("field", ["plans", "profiles", "events"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, 1 << 31])
def test_wrong_limits_are_named(field, value):
    with pytest.raises(InvalidInputError, match=rf"^{field} is"):
        Retention(**{field: value})


@examples(25)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["save", "renew", "current"])), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_whatever_happened_a_restart_finds_the_same(tmp_path_factory, story, n_plans, n_profiles, n_events):
    with ControlStore.open(tmp_path_factory.mktemp("story") / "c.sqlite") as store:
        last, current = {}, {}
        for index, what in story:
            if what in ("save", "renew") or index not in last:
                last[index] = save(store, index, last[index][0] if what == "renew" and index in last else None)
            else:
                make_current(store, last[index][1], index)
                current[index] = last[index][1]
        store.prune(Retention(plans=n_plans, profiles=n_profiles, events=n_events))
        store.check_invariants()
        for index, plan in current.items():
            (newest, *_) = store.list_events(kind="plan_current", index_fingerprint=index)
            assert newest.payload["plan_id"] == plan
        for index, (_, plan) in last.items():
            assert store.list_plans(index_fingerprint=index)[-1].id == plan
        for plan in set(current.values()) | {plan for _, plan in last.values()}:
            number = store.load_plan(plan).profile_id
            while number is not None:
                number = store.load_profile(number).notes.get("renewed", {}).get("parent")
