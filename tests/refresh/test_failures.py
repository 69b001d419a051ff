"""Whatever fails in a refresh, the old plan serves; and what it starts, it joins."""

from __future__ import annotations

import dataclasses
import sqlite3
import sys
import threading
from contextlib import closing
from datetime import datetime, timedelta
from queue import SimpleQueue

import numpy as np
import pytest

from hybridindex.errors import (
    DeviceError,
    InvalidInputError,
    MissingDependencyError,
    ProfileError,
    RouterClosedError,
    StoreError,
)
from hybridindex.plans.current import current_plan, current_plan_id, same_decision
from hybridindex.refresh import updater
from hybridindex.refresh.refresher import RefreshConfig, Refresher
from hybridindex.refresh.update_cycle import CycleStage, Outcome
from tests.moving_load import moving_queries
from tests.refresh.world import CONFIG, FAST_S, LATE_S


def breaking(monkeypatch, target, error, *, times=1):
    """``target`` raises ``error`` for its first ``times`` calls."""
    module, name = target.rsplit(".", 1)
    import importlib

    try:
        owner = importlib.import_module(module)
    except ImportError:
        room, kind = module.rsplit(".", 1)
        owner = getattr(importlib.import_module(room), kind)
    real, calls = getattr(owner, name), []

    def broken(*args, **kwargs):
        calls.append(name)
        if len(calls) <= times:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)
    return calls


@pytest.mark.parametrize(
    ("target", "stage", "outcome"),
    [
        ("hybridindex.refresh.planner.renew_profile", "profiling", Outcome.FAILED),
        ("hybridindex.refresh.planner.plan_again", "solving", Outcome.FAILED),
        ("hybridindex.refresh.planner.weigh_plan", "weighing", Outcome.FAILED),
        ("hybridindex.router.router.Router.apply_plan", "moving", Outcome.ROLLED_BACK),
        ("hybridindex.router.devices.placement.Placement._place", "moving", Outcome.ROLLED_BACK),
    ],
)
def test_a_stage_that_fails_leaves_the_old_plan_serving(make_world, index, plan, monkeypatch, target, stage, outcome):
    world = make_world()
    world.serve(1, seed=3)
    world.refresher._updates.commit_served()
    breaking(monkeypatch, target, RuntimeError("injected"))
    world.serve(2, seed=4, moved=True, latency_s=LATE_S)
    status = world.refresher.status()
    assert status.updates == {str(outcome): 1}
    assert f"{stage} failed: RuntimeError: injected" in status.last_update.why
    assert world.events("refresh_ended")[0]["why"] == status.last_update.why
    assert world.router.plan is plan
    assert status.back_off_s > 0
    assert world.router.stats().unplaced_lists == 0
    assert set(world.router.residency.resident_lists()) == {i for i in plan.resident_lists if index.list_sizes[i]}
    assert same_decision(current_plan(world.store, index), plan)
    world.answers_are_right()

    world.now += 1000.0
    world.refresher.step()
    world.serve(2, seed=5, moved=True, latency_s=LATE_S)
    world.serve(2, seed=6, moved=True)
    assert world.refresher.status().updates == {str(outcome): 1, "committed": 1}


@pytest.mark.parametrize(("call", "stage"), [(2, "moving"), (3, "committing")])
def test_a_store_that_fails_keeps_the_old_plan(make_world, index, plan, monkeypatch, call, stage):
    """Saving the served plan, the new one, and the commit, in turn."""
    world = make_world()
    world.refresher._updates.commit_served()
    name = "save_plan" if stage == "moving" else "make_current"
    breaking(monkeypatch, f"hybridindex.refresh.updater.{name}", StoreError("injected"))
    world.serve(2, seed=4, moved=True, latency_s=LATE_S)
    world.serve(2, seed=5, moved=True)
    status = world.refresher.status()
    assert status.updates == {"rolled_back": 1}
    assert f"{stage} failed: StoreError: injected" in status.last_update.why
    assert world.router.plan is plan
    assert same_decision(current_plan(world.store, index), plan)


def test_a_damaged_record_of_the_plan_that_serves_is_written_again(make_world, index, plan):
    world = make_world()
    world.refresher._updates.commit_served()
    with world.store._opened.writer.begin() as connection:
        connection.exec_driver_sql("UPDATE events SET at = '2031-01-01T00:00:00+00:00'")
    with pytest.raises(StoreError, match="apply the plan again"):
        current_plan(world.store, index)
    assert world.refresher._updates.commit_again()
    assert same_decision(current_plan(world.store, index), plan)


@pytest.mark.parametrize("times", [1, 2])
def test_a_commit_that_the_store_took_and_did_not_acknowledge_is_taken_back(
    make_world, index, plan, monkeypatch, times
):
    """The connection breaks while the store commits; the second time while the old plan is written again, too."""
    world = make_world()
    world.refresher._updates.commit_served()
    real, calls = updater.make_current, []

    def unacknowledged(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            real(*args, **options)
        if len(calls) <= times:
            raise StoreError("injected")
        real(*args, **options)

    monkeypatch.setattr(updater, "make_current", unacknowledged)
    world.serve(2, seed=4, moved=True, latency_s=LATE_S)
    world.serve(2, seed=5, moved=True)
    world.refresher.step()
    assert world.refresher.status().updates == {"rolled_back": 1}
    assert world.router.plan is plan
    assert same_decision(current_plan(world.store, index), plan), "a restart resumes what did not serve"
    assert world.refresher.status().plan_id == current_plan_id(world.store, index.fingerprint)


def test_a_roll_back_that_fails_is_tried_until_it_works(make_world, plan, monkeypatch):
    world = make_world(store=False)
    world.serve(1, seed=9, moved=True)
    proposal = world.refresher.propose("a mistake")
    world.serve(3, seed=16)
    world.refresher.apply(proposal)
    breaking(monkeypatch, "hybridindex.router.router.Router.apply_plan", RuntimeError("injected"), times=2)
    world.serve(2, seed=10)
    assert world.refresher.status().stage is CycleStage.ROLLING_BACK
    for _ in range(2):
        world.now += 1000.0
        world.refresher.step()
    assert world.refresher.status().last_update.outcome is Outcome.ROLLED_BACK
    assert world.router.plan is plan


def test_measuring_anew_is_tried_again_where_it_failed(make_world, profile, plan, monkeypatch):
    notes = {**profile.notes, "inherited": {"from": "before", "profile": 1, "share_newer": 0.7}}
    analysis = dataclasses.replace(plan.analysis, profile=dataclasses.replace(profile, notes=notes))
    world = make_world(plan=dataclasses.replace(plan, analysis=analysis))
    breaking(monkeypatch, "hybridindex.refresh.planner.renew_profile", RuntimeError("injected"))
    world.serve(3, seed=3)
    assert [ended["outcome"] for ended in world.events("refresh_ended")] == ["failed"]  # and the pause is kept
    world.now += CONFIG.update.back_off_s
    world.serve(1, seed=4)
    assert len(world.events("refresh_ended")) == 2
    assert world.events("refresh_ended")[1]["outcome"] != "failed"


def test_a_store_that_takes_no_events_stops_nothing(make_world):
    world = make_world()
    world.refresher._updates.commit_served()
    world.serve(1, seed=9, moved=True)
    proposal = world.refresher.propose()
    with closing(sqlite3.connect(world.store.name.removeprefix("sqlite:///"))) as other, other:
        other.execute("ALTER TABLE events RENAME TO lost")
    world.refresher.propose()
    assert world.refresher.status().store_errors == 1
    record = world.refresher.apply(proposal)
    assert record.stage is CycleStage.VERIFYING
    world.serve(2, seed=10, moved=True)
    assert world.refresher.status().updates == {"rolled_back": 1}, "a commit must be recorded"


def test_a_failed_device_is_no_reason_for_a_new_plan(make_world, plan):
    world = make_world(store=False)
    world.serve(1, seed=9, moved=True)
    world.router.devices[0].fail(RuntimeError("injected"))
    with pytest.raises(DeviceError, match="has failed"):
        world.refresher.propose()
    world.refresher.step("a person")
    last = world.refresher.status().last_update
    assert last.outcome is Outcome.FAILED
    assert "has failed" in last.why
    assert world.router.plan is plan


def test_too_few_queries_make_no_plan(make_world):
    world = make_world(dataclasses.replace(CONFIG, reservoir_queries=0), store=False)
    world.serve(1, seed=9)
    assert world.refresher.status().queries_kept == 0
    with pytest.raises(ProfileError, match="0 recent queries"):
        world.refresher.propose()


def test_observe_never_raises_and_counts_what_it_cannot_use(make_world, caplog):
    world = make_world(store=False)
    query = moving_queries(1, seed=1, moved=False)
    for queries, latency, rates in (
        (None, 0.1, [0.5]),
        (query[:, :3], 0.1, [0.5]),
        (query, 0.1, [0.5, 0.5]),
        (query, 0.1, [np.nan]),
        (query, np.inf, [0.5]),
        (query, "soon", [0.5]),
    ):
        world.refresher.observe(queries, latency, rates)
    status = world.refresher.status()
    assert (status.observe_errors, status.requests, status.queries_kept) == (6, 0, 0)
    assert len(caplog.records) == 1
    world.refresher.observe(query[0], 0.1, 0.5)
    assert world.refresher.status().requests == 1


@pytest.mark.parametrize("stage", ["renew_profile", "plan_again", "weigh_plan", "save_plan"])
def test_closing_begins_no_further_stage(make_world, plan, monkeypatch, stage):
    import hybridindex.refresh.planner
    import hybridindex.refresh.updater

    room = hybridindex.refresh.updater if stage == "save_plan" else hybridindex.refresh.planner

    world = make_world()
    world.refresher._updates.commit_served()
    world.serve(1, seed=9, moved=True)
    real = getattr(room, stage)
    monkeypatch.setattr(room, stage, lambda *a, **k: (world.refresher._updates.closed.set(), real(*a, **k))[1])
    version = world.router.residency.version
    world.refresher.step("a person")
    last = world.refresher._updates.last
    if stage == "save_plan":  # the move itself is one stage
        assert last.stage is CycleStage.VERIFYING
        return
    assert last.outcome in (Outcome.FAILED, Outcome.ROLLED_BACK)
    assert "the refresher is closed" in last.why
    assert world.router.plan is plan
    assert world.router.residency.version == version


def test_threads_observe_while_steps_are_taken(make_world):
    world = make_world(store=False)
    queries = moving_queries(300, seed=17, moved=False)
    rates = world.router.search(queries, 5).hit_rate
    start = threading.Barrier(5)

    def observe():
        start.wait()
        for query, rate in zip(queries, rates, strict=True):
            world.refresher.observe(query, FAST_S, rate)

    threads = [threading.Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads):
        world.refresher.step()
        world.refresher.status()
    for thread in threads:
        thread.join()
    world.refresher.step()
    world.refresher.check_invariants()
    status = world.refresher.status()
    assert (status.requests, status.observe_errors) == (1200, 0)
    assert sum(window.requests for window in status.windows) == 1200
    assert 128 <= status.queries_kept <= 512


# Life


def test_the_schedule_updates_and_close_joins(make_world, plan):
    before = set(threading.enumerate())
    config = dataclasses.replace(CONFIG, tick_s=0.02, drift=dataclasses.replace(CONFIG.drift, of_windows=2))
    world = make_world(config)
    inside = set(threading.enumerate())
    world.refresher.start()
    world.refresher.start()
    moved = threading.Event()
    real = world.router.apply_plan
    world.router.apply_plan = lambda *a, **k: (real(*a, **k), moved.set())
    queries = moving_queries(220, seed=4, moved=True)
    for query in queries:
        world.refresher.observe(query, LATE_S, world.router.search(query, 5).hit_rate)
    assert moved.wait(300), world.refresher.status()
    assert world.refresher.status().running
    world.refresher.close()
    world.refresher.close()
    assert set(threading.enumerate()) - inside == set(), "threads of the schedule"
    assert not world.refresher.status().running
    assert world.refresher.status().stage is CycleStage.VERIFYING
    assert [e["stage"] for e in world.events("refresh_interrupted")] == ["verifying"]
    assert same_decision(current_plan(world.store, world.index), plan), "nothing was verified"
    assert inside >= before
    world.refresher.observe(queries[0], 0.1, 0.5)
    assert world.refresher.status().requests == 220
    for late in (world.refresher.propose, world.refresher.start):
        with pytest.raises(RouterClosedError):
            late()


def test_close_waits_for_a_step_that_goes_on(make_world, monkeypatch):
    world = make_world(dataclasses.replace(CONFIG, tick_s=0.01), store=False)
    entered, release = threading.Event(), threading.Event()
    monkeypatch.setattr(world.refresher, "step", lambda: (entered.set(), release.wait(300)))
    world.refresher.start()
    assert entered.wait(300)
    closer = threading.Thread(target=world.refresher.close)
    closer.start()
    closer.join(0.3)
    assert closer.is_alive()
    release.set()
    closer.join(300)
    assert not closer.is_alive()


def test_the_schedule_asks_without_drift(make_world):
    world = make_world(dataclasses.replace(CONFIG, tick_s=60.0, interval_s=0.02))
    ended = threading.Event()
    real = world.refresher._updates._on_ended
    world.refresher._updates._on_ended = lambda: (real(), ended.set())
    world.refresher.start()
    assert ended.wait(300)
    world.refresher.close()
    assert world.events("refresh_ended")[0]["reason"] == "the schedule"
    assert "0 recent queries" in world.events("refresh_ended")[0]["why"]


def test_a_wall_clock_that_is_set_back_does_not_stop_the_watch(make_world, monkeypatch):
    from apscheduler.schedulers import base

    set_back = timedelta()

    class WallClock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) - set_back

    monkeypatch.setattr(base, "datetime", WallClock)
    refresher = make_world(dataclasses.replace(CONFIG, tick_s=0.01, interval_s=0.1), store=False).refresher
    reasons = SimpleQueue()
    monkeypatch.setattr(refresher, "step", lambda reason=None: reasons.put(reason))
    refresher.start()
    reasons.get(timeout=60)
    set_back = timedelta(hours=1)
    steps = [reasons.get(timeout=5) for _ in range(30)]
    assert None in steps
    assert "the schedule" in steps


def test_the_schedule_waits_for_a_proposal_and_not_for_an_update(make_world, monkeypatch):
    refresher = make_world(store=False).refresher
    asked = []
    monkeypatch.setattr(refresher._updates, "request", asked.append)
    with refresher._work:  # as a proposal holds it
        refresher.step("schedule nightly")
    refresher.step()
    refresher.step()
    assert asked == ["schedule nightly"]
    monkeypatch.setattr(type(refresher._updates), "stage", CycleStage.PROFILING)
    with refresher._work:
        refresher.step("schedule nightly")
    monkeypatch.undo()
    monkeypatch.setattr(refresher._updates, "request", asked.append)
    refresher.step()
    assert asked == ["schedule nightly"]


def test_without_apscheduler_the_error_says_what_to_install(make_world, monkeypatch):
    world = make_world(store=False)
    monkeypatch.setitem(sys.modules, "apscheduler.schedulers.background", None)
    with pytest.raises(MissingDependencyError, match="pip install 'apscheduler"):
        world.refresher.start()
    assert not world.refresher.status().running


def test_a_router_without_lists_to_move_is_refused(index, plan):
    with index.router() as router, pytest.raises(InvalidInputError, match="no plan"):
        Refresher(index, router, None)
    with index.router(plan) as router, pytest.raises(InvalidInputError, match="no devices"):
        Refresher(index, router, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"slo_ms": 0},
        {"attainment": 1.5},
        {"decay": -1},
        {"min_queries": 3},
        {"bandwidth_share": 0},
        {"planning": "there"},
        {"planning_timeout_s": 0},
        {"planning_nice": 20},
        {"tick_s": float("inf")},
        {"interval_s": 1e300},
        {"retention_s": float("nan")},
        {"reservoir_queries": -1},
        {"reservoir_queries": 127, "min_queries": 64},
        {"seed": -1},
    ],
    ids=str,
)
def test_configurations_that_make_no_sense_are_refused(changes):
    with pytest.raises(InvalidInputError, match=next(iter(changes))):
        RefreshConfig(**changes)
