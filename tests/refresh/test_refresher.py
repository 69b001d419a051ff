"""A router whose plan follows its load: real index, real queries, the stand-in device."""

from __future__ import annotations

import dataclasses
import json

import pytest

import hybridindex as hx
from hybridindex.errors import (
    InvalidInputError,
    ProfileMismatchError,
    RefreshError,
)
from hybridindex.paging import DEFAULT_PAGE_BYTES, PageGeometry
from hybridindex.partitioner.plan import make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.plans.current import PLAN_CURRENT, current_plan, current_plan_id, same_decision
from hybridindex.plans.replan import PlanChanges
from hybridindex.refresh.drift import DriftState
from hybridindex.refresh.update_cycle import CycleStage, Outcome
from hybridindex.store import ControlStore
from tests.clustered import clustered, plan_in_pages
from tests.moving_load import moving_queries
from tests.refresh.world import BUDGET, CONFIG, FAST_S, LATE_S, NLIST, NPROBE, World, fresh_hit_rate


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
    stages = {"profiling", "solving", "weighing", "saving", "moving", "verifying", "committing"}
    assert set(status.last_update.stage_seconds) == stages

    fresh_profile = dataclasses.replace(
        profile, access=index_access(index, moving_queries(800, seed=6, moved=True)), id=None
    )
    fresh = make_plan(fresh_profile, PlanRequest.resolve(slo_ms=50, device_budget_bytes=BUDGET, coverage=0.2))
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
    assert proposal["gain"]["hit_rate"] > 0.2
    (ended,) = world.events("refresh_ended")
    assert ended["outcome"] == "committed"
    first, second = world.events(PLAN_CURRENT)
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
    assert current_plan(world.store, index) is None
    world.serve(2, seed=4, moved=True, latency_s=LATE_S)
    uncommitted = world.router.plan
    assert uncommitted is not plan
    assert same_decision(current_plan(world.store, index), plan), "it has not proved itself"
    world.serve(2, seed=5, moved=True)
    resumed = current_plan(world.store, index)
    assert same_decision(resumed, uncommitted)
    assert resumed.predicted_latency_ms(4) == uncommitted.predicted_latency_ms(4)

    again = make_world(plan=resumed)
    again.refresher.start()
    assert len(again.events(PLAN_CURRENT)) == 2, "the same plan is not committed twice"
    assert again.refresher.status().plan_id == world.refresher.status().plan_id
    again.answers_are_right()


def test_a_plan_of_another_machine_is_not_resumed_with(make_world, index, plan, monkeypatch):
    world = make_world()
    world.refresher.start()
    elsewhere = dataclasses.replace(plan.analysis.profile.hardware, fingerprint="elsewhere")
    monkeypatch.setattr("hybridindex.plans.current.hardware_info", lambda: elsewhere)
    with pytest.raises(ProfileMismatchError, match="elsewhere"):
        current_plan(world.store, index)


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
    assert same_decision(current_plan(world.store, index), plan)
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
    proposal = world.refresher.propose("fewer lists", PlanChanges(coverage=0.1, percentile=80.0))
    assert proposal.plan.coverage < proposal.base.coverage
    assert proposal.plan.request.percentile == 80.0
    assert proposal.plan.request.budgets == proposal.base.request.budgets
    assert not proposal.worthwhile
    world.refresher.apply(proposal)
    world.serve(2, seed=13)
    assert world.refresher.status().updates == {"committed": 1}, "less was promised, and less was kept"
    with pytest.raises(InvalidInputError, match="percentile"):
        world.refresher.propose("never", PlanChanges(percentile=-1))


def test_a_new_target_is_solved_for_and_a_fixed_coverage_has_to_be_given_up_for_it(make_world):
    world = make_world(store=False)
    world.serve(1, seed=12)
    with pytest.raises(InvalidInputError, match=r"coverage is 0\.2, fixed by the plan in force, so slo_ms 0\.01"):
        world.refresher.propose("faster", PlanChanges(slo_ms=0.01))
    proposal = world.refresher.propose("slower", PlanChanges(slo_ms=5000.0, coverage="solve"))
    assert proposal.plan.request.coverage is None
    assert proposal.plan.request.slo_ms == 5000.0
    assert proposal.plan.coverage == 0, "the host alone meets it"


@pytest.mark.parametrize("page_bytes", [8192, DEFAULT_PAGE_BYTES])
def test_plans_stay_within_what_the_devices_may_take(make_world, index, profile, page_bytes):
    """Which is what was configured, whatever the plan at the opening needed, and in pages as that had them."""
    roomy = plan_in_pages(index, profile, page_bytes, 1 << 40, 0.2)
    geometry = PageGeometry.for_code_size(index.ivf.code_size, roomy.request.page_bytes)
    budget = int(geometry.pages_for(index.list_sizes).sum()) * geometry.page_bytes // 2
    world = make_world(store=False, lookahead_bytes=0, plan=roomy, device_budget_bytes=budget)
    world.serve(1, seed=12)
    [tier] = world.router.devices
    before = tier.arena.nbytes
    proposal = world.refresher.propose("everything", PlanChanges(coverage=1.0))
    pages = geometry.pages_for(world.index.list_sizes[proposal.plan.resident_lists]).sum()
    assert 0 < pages * geometry.page_bytes <= budget - tier.scratch_bytes
    assert proposal.plan.coverage < 1
    assert proposal.plan.request.page_bytes == world.router.page_bytes == page_bytes
    assert proposal.plan.request.budgets == (1 << 40,)
    assert f"{budget:,} bytes" in proposal.plan.reason
    world.refresher.apply(proposal)
    assert world.router.stats().unplaced_lists == 0
    assert before < tier.arena.nbytes <= budget - tier.scratch_bytes


def test_without_a_configured_budget_the_plan_s_own_counts(make_world, index, profile):
    world = make_world(store=False, lookahead_bytes=0, plan=index.plan(50, 1 << 40, profile, coverage=0.2))
    world.serve(1, seed=12)
    proposal = world.refresher.propose("everything", PlanChanges(coverage=1.0))
    assert proposal.plan.coverage == 1
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
    with pytest.raises(RefreshError, match="no longer serves"):
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
    assert same_decision(current_plan(world.store, index), other)


def test_an_update_right_after_somebody_applied_a_plan_goes_back_to_that_one(make_world, index, profile):
    world = make_world()
    world.refresher._updates.commit_served()
    world.serve(2, seed=9, moved=True)
    other = index.plan(50, BUDGET, profile, coverage=0.1)
    world.router.apply_plan(other)
    record = world.refresher.apply(world.refresher.propose("a mistake"))
    base = record.base_plan_id
    assert base != 1
    assert world.store.load_plan(base).record["data"]["coverage"] == other.coverage
    world.serve(2, seed=10)
    status = world.refresher.status()
    assert status.last_update.outcome is Outcome.ROLLED_BACK
    assert world.router.plan is other
    assert status.plan_id == current_plan_id(world.store, index.fingerprint) == base


def test_a_plan_that_somebody_applies_meanwhile_ends_the_update(make_world, index, profile):
    world = make_world()
    world.serve(2, seed=9, moved=True)
    world.refresher.apply(world.refresher.propose("a mistake"))
    other = index.plan(50, BUDGET, profile, coverage=0.1)
    world.router.apply_plan(other)
    world.serve(3, seed=10)
    status = world.refresher.status()
    assert (status.stage, status.last_update.outcome) == (CycleStage.IDLE, Outcome.FAILED)
    assert "another plan meanwhile" in status.last_update.why
    assert world.router.plan is other
    assert same_decision(current_plan(world.store, index), other)


@pytest.mark.parametrize("before", ["verified", "rolled back"])
def test_a_compaction_ends_the_update_and_its_heir_is_the_current_plan(tmp_path, before):
    with hx.build(clustered(6000, seed=1), tmp_path / "idx", nlist=NLIST, metric="l2", codec="flat") as index:
        load = moving_queries(800, seed=2, moved=False)
        profile = index.profile(load, nprobe=NPROBE, devices=["cpu"], max_seconds=1, save=True)
        store = ControlStore.open(tmp_path / "idx" / "control.sqlite")
        world = World(index, index.plan(50, BUDGET, profile, coverage=0.2), store, CONFIG)
        with store, world.router, world.refresher:
            world.serve(2, seed=9, moved=True)
            world.refresher.apply(world.refresher.propose("the load moved"), force=True)
            index.add(clustered(500, seed=20))
            if before == "rolled back":  # it begins before the step that sees the compaction
                world.serve(1, seed=10, latency_s=LATE_S)
                follow = world.refresher._updates.follow_router
                world.refresher._updates.follow_router = lambda: None
                index.compact()
                world.serve(1, seed=11, latency_s=LATE_S)
                assert world.refresher.status().stage is CycleStage.ROLLING_BACK
                world.refresher._updates.follow_router = follow
            else:
                index.compact()
            world.serve(1, seed=12)
            status = world.refresher.status()
            assert (status.stage, status.last_update.outcome) == (CycleStage.IDLE, Outcome.FAILED)
            assert "compacted" in status.last_update.why
            assert current_plan_id(store, world.router.index.fingerprint) == status.plan_id is not None
            assert world.refresher.propose().plan.index_fingerprint == world.router.index.fingerprint


def test_the_old_name_of_the_current_plan_works_and_warns():
    import hybridindex.refresh

    with pytest.warns(DeprecationWarning, match="current_plan"):
        found = hybridindex.refresh.last_committed_plan
    assert found is current_plan
    with pytest.raises(AttributeError, match="nothing"):
        hybridindex.refresh.nothing  # noqa: B018


def test_a_plan_whose_rows_are_newer_than_its_profile_is_measured_anew(make_world, profile, plan):
    notes = {**profile.notes, "inherited": {"from": "before", "profile": 1, "share_newer": 0.7}}
    analysis = dataclasses.replace(plan.analysis, profile=dataclasses.replace(profile, notes=notes))
    heir = dataclasses.replace(plan, analysis=analysis)
    world = make_world(plan=heir)
    world.serve(1, seed=3)
    assert world.refresher.status().triggers == 0
    assert world.refresher.status().last_update is not None
    assert "70% of the rows came since" in world.events("refresh_ended")[0]["reason"]
    world.serve(4, seed=4)
    # Once, as it did not fail; and what an update measured is not inherited.
    assert len(world.events("refresh_ended")) == 1
    assert "inherited" not in world.refresher.propose().plan.analysis.profile.notes


def test_the_fewest_queries_that_a_reservoir_may_keep_make_a_plan(make_world):
    """Its sample of all is thinned; the newest are enough."""
    world = make_world(dataclasses.replace(CONFIG, reservoir_queries=128), store=False)
    for turn in range(12):
        world.refresher.offer(moving_queries(37, seed=turn, moved=True))
        if turn >= 3:
            assert world.refresher.propose().n_queries >= CONFIG.min_queries


def test_after_a_plan_of_other_pages_the_next_one_is_for_the_open_devices(make_world, index, profile):
    """Whose pages stay as large as they are; where they are opened with that plan, they have its pages."""
    budget = 2 * int(index.list_bytes.sum())
    early = plan_in_pages(index, profile, DEFAULT_PAGE_BYTES, budget, 0.3)
    fitting = index.plan(50, budget, profile, coverage=0.3)
    assert fitting.request.page_bytes < early.request.page_bytes
    world = make_world(store=False, plan=early, lookahead_bytes=0)
    world.router.apply_plan(fitting, force=True)
    world.serve(1, seed=12)
    proposal = world.refresher.propose("everything", PlanChanges(coverage=1.0))
    assert proposal.plan.request.page_bytes == world.router.page_bytes == DEFAULT_PAGE_BYTES
    world.refresher.apply(proposal, force=True)
    assert 0 < len(proposal.plan.resident_lists) < (index.list_sizes > 0).sum()
    assert world.router.stats().unplaced_lists == 0
    world.answers_are_right()
    with index.router(fitting, ["cpu"]) as router:
        assert router.page_bytes == fitting.request.page_bytes
        assert router.devices[0].geometry.page_bytes == fitting.page_bytes
