"""A router whose plan follows its load: real index, real queries, the stand-in device."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import sys
import threading

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.committed import COMMITTED, same_decision
from hybridindex.errors import (
    DeviceError,
    InvalidInputError,
    MissingDependencyError,
    ProfileError,
    ProfileMismatchError,
    RefreshError,
    RouterClosedError,
    StoreError,
)
from hybridindex.partitioner.plan import make_plan
from hybridindex.refresh import RefreshConfig, Refresher, last_committed_plan
from hybridindex.router.drift import DriftPolicy, DriftState
from hybridindex.router.update_cycle import CycleStage, Outcome, UpdatePolicy
from tests.clustered import clustered
from tests.moving_load import moving_queries
from tests.oracle import check_answer

NPROBE, NLIST = 4, 48
BUDGET = 8 << 20
CONFIG = RefreshConfig(
    drift=DriftPolicy(window_requests=100, window_s=1e6, min_queries=20, cool_down_s=100.0),
    update=UpdatePolicy(verify_windows=2, back_off_s=50.0, max_back_off_s=500.0),
    slo_ms=50.0,
    reservoir_queries=512,
    retention_s=1e6,
    min_queries=64,
    bandwidth_share=1.0,
)
LATE_S, FAST_S = 0.2, 0.01


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    path = tmp_path_factory.mktemp("refresh") / "idx"
    with hx.build(clustered(6000, seed=1), path=path, nlist=NLIST, metric="l2", codec="flat") as index:
        yield index


@pytest.fixture(scope="module")
def profile(index):
    queries = moving_queries(800, seed=2, moved=False)
    return index.profile(queries, nprobe=NPROBE, devices=["cpu"], max_seconds=1, save=False)


@pytest.fixture(scope="module")
def plan(index, profile):
    return index.plan(50, BUDGET, profile, coverage=0.2)


class World:
    """One router, its refresher and a clock that only the requests move."""

    def __init__(self, index, plan, store, config, **options):
        self.index, self.now = index, 0.0
        self.router = index.router(plan, ["cpu"], threads=1, **options)
        self.store = store
        self.refresher = Refresher(index, self.router, store, config, clock=self.clock)

    def clock(self):
        """No two readings are the same."""
        self.now += 1e-6
        return self.now

    def serve(self, windows=1, *, seed, moved=False, latency_s=FAST_S):
        """Real searches, one query each; a step after each window."""
        queries = moving_queries(100 * windows, seed=seed, moved=moved)
        for number, query in enumerate(queries):
            result = self.router.search(query, 5)
            self.now += 0.01
            self.refresher.observe(query, latency_s, result.hit_rate)
            if number % 100 == 99:
                self.refresher.step()
        self.refresher.check_invariants()

    def events(self, kind=None):
        found = self.store.list_events(kind=kind, limit=1000)
        return [event.payload for event in reversed(found)]

    def answers_are_right(self):
        queries = moving_queries(20, seed=99, moved=True)
        result = self.router.search(queries, 5)
        ivf = self.index.ivf
        probes, _ = ivf.quantize(ivf.transform(queries), NPROBE)
        check_answer(ivf, queries, probes, 5, result.distances, result.ids)


@pytest.fixture
def make_world(index, plan, tmp_path):
    worlds = []

    def make(config=CONFIG, *, store=True, **options):
        opened = hx_store(tmp_path / "control.sqlite") if store else None
        worlds.append(World(index, options.pop("plan", plan), opened, config, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.refresher.close()
        world.router.check_invariants()
        world.router.close()
        if world.store is not None:
            world.store.close()


def hx_store(path):
    from hybridindex.store import ControlStore

    return ControlStore.open(path)


def fresh_hit_rate(index, plan, queries):
    """Mean hit rate by bytes of ``queries`` if the lists of ``plan`` were resident."""
    probes, _ = index.ivf.quantize(index.ivf.transform(queries), NPROBE)
    work = index.list_bytes[probes]
    return float((np.where(plan.list_device[probes] >= 0, work, 0).sum(axis=1) / work.sum(axis=1)).mean())


def test_a_hot_set_that_moves_is_followed(make_world, index, profile, plan):
    world = make_world()
    world.serve(3, seed=3)
    assert world.refresher.status().drift_state is DriftState.STABLE
    world.serve(2, seed=4, moved=True, latency_s=LATE_S)
    status = world.refresher.status()
    assert status.triggers == 1
    assert status.stage is CycleStage.VERIFYING
    assert world.router.plan is not plan
    world.answers_are_right()
    world.serve(2, seed=5, moved=True)
    status = world.refresher.status()
    assert status.stage is CycleStage.IDLE
    assert status.updates == {"committed": 1}
    assert status.drift_state is DriftState.COOLING_DOWN
    assert status.last_update.outcome is Outcome.COMMITTED
    assert status.last_update.verified
    assert set(status.last_update.stage_seconds) == {"profiling", "solving", "weighing", "moving", "verifying"}

    fresh_profile = dataclasses.replace(
        profile, access=index_access(index, moving_queries(800, seed=6, moved=True)), id=None
    )
    fresh = make_plan(fresh_profile, slo_ms=50, device_budget_bytes=BUDGET, coverage=0.2)
    unseen = moving_queries(1000, seed=7, moved=True)
    best, stale = fresh_hit_rate(index, fresh, unseen), fresh_hit_rate(index, plan, unseen)
    followed = fresh_hit_rate(index, world.router.plan, unseen)
    assert followed >= 0.95 * best, (followed, best)
    assert followed > stale + 0.2
    assert world.router.search(unseen, 5).hit_rate.mean() == pytest.approx(followed, abs=0.005)


def index_access(index, queries):
    from hybridindex.profiler.access import sample_access

    half = len(queries) // 2
    return sample_access(index.ivf, queries[:half], queries[half:], NPROBE)


def test_everything_is_recorded(make_world):
    world = make_world()
    world.serve(2, seed=4, moved=True, latency_s=LATE_S)
    world.serve(2, seed=5, moved=True)
    (trigger,) = world.events("refresh_trigger")
    assert [w["off"] for w in trigger["windows"]] == [True, True]
    assert [e["target"] for e in world.events("refresh_stage")] == [
        "profiling", "solving", "weighing", "moving", "verifying", "committing", "idle",
    ]  # fmt: skip
    (proposal,) = world.events("refresh_proposal")
    assert proposal["worthwhile"]
    assert proposal["hit_rate_gain"] > 0.2
    (ended,) = world.events("refresh_ended")
    assert ended["outcome"] == "committed"
    first, second = world.events(COMMITTED)
    assert (first["verified"], second["verified"]) == (False, True)
    assert ended["plan_id"] == second["plan_id"] == world.refresher.status().plan_id
    assert world.store.load_plan(second["plan_id"]).profile_id == second["profile_id"]
    renewed = world.store.load_profile(second["profile_id"]).notes["renewed"]
    assert renewed["parent"] == first["profile_id"]
    assert renewed["queries"]["given"] == renewed["queries"]["fit"] + renewed["queries"]["held"] == 200
    json.dumps(world.refresher.status().to_data())


@pytest.mark.parametrize("latency_s", [FAST_S, LATE_S])
def test_a_stationary_load_never_triggers(make_world, plan, latency_s):
    world = make_world(store=False)
    world.serve(25, seed=8, latency_s=latency_s)
    status = world.refresher.status()
    assert (status.triggers, status.updates, len(status.windows)) == (0, {}, 20)
    assert world.router.plan is plan


def test_a_restart_resumes_with_what_was_committed(make_world, index, plan):
    world = make_world()
    assert last_committed_plan(world.store, index) is None
    world.serve(2, seed=4, moved=True, latency_s=LATE_S)
    uncommitted = world.router.plan
    assert uncommitted is not plan
    assert same_decision(last_committed_plan(world.store, index), plan), "it has not proved itself"
    world.serve(2, seed=5, moved=True)
    resumed = last_committed_plan(world.store, index)
    assert same_decision(resumed, uncommitted)
    assert resumed.predicted_latency_ms(4) == uncommitted.predicted_latency_ms(4)

    again = make_world(plan=resumed)
    again.refresher.start()
    assert len(again.events(COMMITTED)) == 2, "the same plan is not committed twice"
    assert again.refresher.status().plan_id == world.refresher.status().plan_id
    again.answers_are_right()


def test_a_plan_of_another_machine_is_not_resumed_with(make_world, index, plan, monkeypatch):
    world = make_world()
    world.refresher.start()
    elsewhere = dataclasses.replace(plan.analysis.profile.hardware, fingerprint="elsewhere")
    monkeypatch.setattr("hybridindex.committed.hardware_info", lambda: elsewhere)
    with pytest.raises(ProfileMismatchError, match="elsewhere"):
        last_committed_plan(world.store, index)
    assert same_decision(last_committed_plan(world.store, index, allow_other_hardware=True), plan)


def test_a_worse_plan_is_rolled_back(make_world, index, plan):
    """A plan made from a load that is gone when it serves."""
    world = make_world()
    world.serve(2, seed=9, moved=True)
    proposal = world.refresher.propose("a mistake")
    assert proposal.worthwhile
    world.serve(3, seed=16)
    record = world.refresher.apply(proposal)
    assert record.stage is CycleStage.VERIFYING
    assert world.router.plan.list_device.tolist() == proposal.plan.list_device.tolist()
    world.serve(2, seed=10)
    last = world.refresher.status().last_update
    assert (last.number, last.outcome) == (record.number, Outcome.ROLLED_BACK)
    assert "hit rate" in last.why
    assert world.router.plan is plan
    assert not world.router.stats().unplaced_lists
    assert same_decision(last_committed_plan(world.store, index), plan)
    assert world.refresher.status().back_off_s > 0
    world.answers_are_right()


def test_a_proposal_moves_nothing_and_says_what_it_would_bring(make_world, plan):
    world = make_world()
    world.serve(2, seed=11, moved=True)
    before = world.router.residency.version
    proposal = world.refresher.propose("just looking")
    assert world.router.residency.version == before
    assert world.router.plan is plan
    assert proposal.n_queries == 200
    assert set(proposal.stage_seconds) == {"profiling", "solving", "weighing"}
    present = world.router.residency.list_device
    sizes = world.index.list_sizes
    assert (present[proposal.lists_in] < 0).all()
    assert set(proposal.lists_in) == {i for i in proposal.plan.resident_lists if present[i] < 0 and sizes[i]}
    assert set(proposal.lists_out) == set(plan.resident_lists) - set(proposal.plan.resident_lists)
    geometry = world.router.devices[0].geometry
    assert proposal.bytes_to_move == geometry.pages_for(sizes[proposal.lists_in]).sum() * geometry.page_bytes
    assert proposal.comparison.move_s > 0
    copied = world.router.devices[0].copy_stats
    record = world.refresher.apply(proposal)
    assert record.proposal["bytes_to_move"] == proposal.bytes_to_move
    assert world.router.devices[0].copy_stats != copied
    assert set(world.router.residency.resident_lists()) == {i for i in proposal.plan.resident_lists if sizes[i]}
    json.dumps(proposal.to_data())


def test_a_proposal_may_change_the_request_but_not_the_devices(make_world):
    world = make_world(store=False)
    world.serve(1, seed=12)
    proposal = world.refresher.propose("fewer lists", coverage=0.1, slo_ms=80.0)
    assert proposal.plan.coverage < proposal.base.coverage
    assert proposal.plan.request.slo_ms == 80.0
    assert proposal.plan.request.budgets == proposal.base.request.budgets
    assert not proposal.worthwhile
    world.refresher.apply(proposal)
    world.serve(2, seed=13)
    assert world.refresher.status().updates == {"committed": 1}, "less was promised, and less was kept"
    with pytest.raises(InvalidInputError, match="n_devices cannot be changed"):
        world.refresher.propose("more", n_devices=2)
    with pytest.raises(InvalidInputError, match="slo_ms"):
        world.refresher.propose("never", slo_ms=-1)


def test_plans_stay_within_the_open_arenas(make_world):
    world = make_world(store=False, lookahead_bytes=0)
    world.serve(1, seed=12)
    arena = world.router.devices[0].arena.nbytes
    proposal = world.refresher.propose("everything", coverage=1.0, device_budget_bytes=1 << 40)
    geometry = world.router.devices[0].geometry
    pages = geometry.pages_for(world.index.list_sizes[proposal.plan.resident_lists]).sum()
    assert pages * geometry.page_bytes <= arena
    assert proposal.plan.request.budgets == (1 << 40,)
    world.refresher.apply(proposal)
    assert world.router.stats().unplaced_lists == 0


def test_windows_of_the_plan_before_say_nothing_of_the_new_one(make_world):
    world = make_world(store=False)
    world.serve(1, seed=14, moved=True)
    proposal = world.refresher.propose()
    for query in moving_queries(200, seed=15, moved=True):
        world.refresher.observe(query, LATE_S, world.router.search(query, 5).hit_rate)
    world.refresher.apply(proposal)
    world.refresher.step()
    assert len(world.refresher.status().windows) == 3
    assert not world.refresher._updates._windows
    assert world.refresher.status().stage is CycleStage.VERIFYING


def test_a_stale_proposal_is_refused_and_so_is_one_during_an_update(make_world):
    world = make_world(store=False)
    world.serve(1, seed=14, moved=True)
    one, other = world.refresher.propose(), world.refresher.propose()
    world.refresher.apply(one)
    with pytest.raises(RefreshError, match="verifying"):
        world.refresher.apply(other)
    world.serve(2, seed=15, moved=True)
    assert world.refresher.status().stage is CycleStage.IDLE
    with pytest.raises(RefreshError, match="serves no more"):
        world.refresher.apply(other)


def test_what_is_not_worth_its_move_is_left(make_world, plan):
    config = dataclasses.replace(CONFIG, update=dataclasses.replace(CONFIG.update, min_gain_per_gib=1e6))
    config = dataclasses.replace(config, update=dataclasses.replace(config.update, min_latency_gain=0.99))
    world = make_world(config)
    world.serve(2, seed=4, moved=True, latency_s=LATE_S)
    status = world.refresher.status()
    assert status.updates == {"declined": 1}
    assert "is not worth" in status.last_update.why
    assert status.drift_state is DriftState.COOLING_DOWN
    assert world.router.plan is plan


def test_a_plan_that_somebody_else_applied_is_the_one_to_watch(make_world, index, profile):
    world = make_world()
    world.refresher._updates.commit_served()
    other = index.plan(50, BUDGET, profile, coverage=0.1)
    world.router.apply_plan(other)
    world.refresher.step()
    status = world.refresher.status()
    assert status.predicted_hit_rate == pytest.approx(other.predicted_hit_rate)
    assert status.drift_state is DriftState.COOLING_DOWN
    assert same_decision(last_committed_plan(world.store, index), other)


# Failures


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
        ("hybridindex.refresh_update.renew_profile", "profiling", Outcome.FAILED),
        ("hybridindex.refresh_update.plan_again", "solving", Outcome.FAILED),
        ("hybridindex.refresh_update.compare_plans", "weighing", Outcome.FAILED),
        ("hybridindex.router.router.Router.apply_plan", "moving", Outcome.ROLLED_BACK),
        ("hybridindex.router.router.Router._place", "moving", Outcome.ROLLED_BACK),
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
    assert same_decision(last_committed_plan(world.store, index), plan)
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
    target = "hybridindex.refresh_update.save_plan" if stage == "moving" else "hybridindex.refresh_update.commit_plan"
    breaking(monkeypatch, target, StoreError("injected"))
    world.serve(2, seed=4, moved=True, latency_s=LATE_S)
    world.serve(2, seed=5, moved=True)
    status = world.refresher.status()
    assert status.updates == {"rolled_back": 1}
    assert f"{stage} failed: StoreError: injected" in status.last_update.why
    assert world.router.plan is plan
    assert same_decision(last_committed_plan(world.store, index), plan)


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


def test_a_store_that_takes_no_events_stops_nothing(make_world):
    world = make_world()
    world.refresher._updates.commit_served()
    world.serve(1, seed=9, moved=True)
    proposal = world.refresher.propose()
    with sqlite3.connect(world.store.name.removeprefix("sqlite:///")) as other:
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


@pytest.mark.parametrize("stage", ["renew_profile", "plan_again", "compare_plans", "save_plan"])
def test_closing_begins_no_further_stage(make_world, plan, monkeypatch, stage):
    import hybridindex.refresh_update as room

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
    assert moved.wait(60), world.refresher.status()
    assert world.refresher.status().running
    world.refresher.close()
    world.refresher.close()
    assert set(threading.enumerate()) - inside == set(), "threads of the schedule"
    assert not world.refresher.status().running
    assert world.refresher.status().stage is CycleStage.VERIFYING
    assert [e["stage"] for e in world.events("refresh_interrupted")] == ["verifying"]
    assert same_decision(last_committed_plan(world.store, world.index), plan), "nothing was verified"
    assert inside >= before
    world.refresher.observe(queries[0], 0.1, 0.5)
    assert world.refresher.status().requests == 220
    for late in (world.refresher.propose, world.refresher.start):
        with pytest.raises(RouterClosedError):
            late()


def test_close_waits_for_a_step_that_goes_on(make_world, monkeypatch):
    world = make_world(dataclasses.replace(CONFIG, tick_s=0.01), store=False)
    entered, release = threading.Event(), threading.Event()
    monkeypatch.setattr(world.refresher, "step", lambda: (entered.set(), release.wait(60)))
    world.refresher.start()
    assert entered.wait(60)
    closer = threading.Thread(target=world.refresher.close)
    closer.start()
    closer.join(0.3)
    assert closer.is_alive()
    release.set()
    closer.join(60)
    assert not closer.is_alive()


def test_the_schedule_asks_without_drift(make_world):
    world = make_world(dataclasses.replace(CONFIG, tick_s=60.0, interval_s=0.02))
    ended = threading.Event()
    real = world.refresher._updates._on_ended
    world.refresher._updates._on_ended = lambda: (real(), ended.set())
    world.refresher.start()
    assert ended.wait(60)
    world.refresher.close()
    assert world.events("refresh_ended")[0]["reason"] == "the schedule"
    assert "0 recent queries" in world.events("refresh_ended")[0]["why"]


def test_without_apscheduler_the_error_says_what_to_install(make_world, monkeypatch):
    world = make_world(store=False)
    monkeypatch.setitem(sys.modules, "apscheduler.schedulers.background", None)
    with pytest.raises(MissingDependencyError, match=r"hybridindex\[refresh\]"):
        world.refresher.start()
    assert not world.refresher.status().running


def test_a_router_without_lists_to_move_is_refused(index, plan):
    with index.router() as router, pytest.raises(InvalidInputError, match="no plan"):
        Refresher(index, router, None)
    with index.router(plan) as router, pytest.raises(InvalidInputError, match="no devices"):
        Refresher(index, router, None)


@pytest.mark.parametrize(
    "changes", [{"slo_ms": 0}, {"attainment": 1.5}, {"decay": -1}, {"min_queries": 3}, {"bandwidth_share": 0}], ids=str
)
def test_configurations_that_make_no_sense_are_refused(changes):
    with pytest.raises(InvalidInputError, match=next(iter(changes))):
        RefreshConfig(**changes)
