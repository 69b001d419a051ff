"""The public contract, as the README shows it."""

from __future__ import annotations

import asyncio
import dataclasses
import errno

import numpy as np
import pytest
import torch

import hybridindex as hx
from hybridindex.errors import (
    IndexExistsError,
    InfeasiblePlanError,
    InvalidInputError,
    ProfileError,
    ProfileMismatchError,
    StoreError,
)
from hybridindex.filesystem import watched_by
from hybridindex.index import codec
from hybridindex.partitioner.plan import Plan
from hybridindex.profiler import device as measuring
from hybridindex.profiler import routed as calibrate
from hybridindex.profiler import run
from hybridindex.router import Router
from tests.clustered import clustered, small_index
from tests.faults import FaultyDisk, of
from tests.oracle import check_answer

N, NLIST = 3000, 32


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    path = tmp_path_factory.mktemp("facade") / "idx"
    with hx.build(clustered(N, seed=1), path=path, nlist=NLIST, metric="ip", codec="flat") as index:
        yield index


@pytest.fixture(scope="module")
def profile(index):
    return index.profile(clustered(400, seed=2), nprobe=8, devices=["cpu"], max_seconds=2)


def test_the_snippet(index, profile):
    plan = index.plan(slo_ms=50, device_budget_bytes=2 << 30, profile=profile)
    assert plan.verdict == "feasible"
    queries = clustered(20, seed=3)
    with index.router(plan=plan, devices=["cpu"]) as router:
        result = router.search(queries, k=10, nprobe=8)
        assert result.ids.shape == (20, 10)
        assert result.ids.dtype == np.int64
        assert result.distances.dtype == np.float32
        probes, _ = index.ivf.quantize(queries, 8)
        check_answer(index.ivf, queries, probes, 10, result.distances, result.ids)
        again = asyncio.run(router.asearch(queries, k=10))
        np.testing.assert_array_equal(again.ids, result.ids)
        with router.session() as session:
            session.lookahead(queries[0])
            assert session.search(queries[0], k=3, deadline_ms=4000, min_nprobe=4).ids.shape == (1, 3)


def test_one_search_needs_no_router(index):
    queries = clustered(5, seed=8)
    found = index.search(queries, k=4, nprobe=6)
    with index.router() as router:
        expected = router.search(queries, 4, 6)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.distances, expected.distances)
    assert set(found.nprobe_used.tolist()) == {6}
    assert index.search(queries[0]).ids.shape == (1, 10)
    with pytest.raises(InvalidInputError, match="k is 0"):
        index.search(queries, k=0)


def test_a_session_with_a_window_serves_where_there_is_no_device(index):
    profile = index.profile(clustered(400, seed=2), nprobe=8, max_seconds=1, save=False)
    plan = index.plan(slo_ms=50, device_budget_bytes=2 << 30, profile=profile)
    queries = clustered(2, seed=3)
    with index.router(plan=plan, devices=[]) as router, router.session(window_ms=120) as session:
        session.lookahead(queries[0])
        assert session.search(queries[1], k=3, deadline_ms=4000, min_nprobe=4).ids.shape == (1, 3)


def test_an_interrupted_profile_keeps_its_checkpoint_until_it_is_stored(index, tmp_path):
    path, quick = tmp_path / "checkpoint", {"batches": (1, 4), "repeats": 1, "coverages": (), "devices": ["cpu"]}
    quick["store_url"] = f"sqlite:///{tmp_path / 'store.sqlite'}"

    def interrupt(stage, done, total):
        if stage == "routed batches":
            assert path.exists()
            raise KeyboardInterrupt

    asked = (clustered(128, seed=2), 4)
    with pytest.raises(KeyboardInterrupt):
        index.profile(*asked, max_seconds=1, checkpoint=path, progress=interrupt, **quick)
    assert path.exists()
    told = []
    index.profile(*asked, max_seconds=1, checkpoint=path, progress=lambda *step: told.append(step), **quick)
    assert ("host", 1, 1) in told
    assert [step for step in told if step[0] == "host"] == [("host", 1, 1)]  # taken from the checkpoint
    assert not path.exists()


def test_what_an_index_says(index):
    assert index.centroids.shape == (NLIST, index.dim)
    assert index.list_sizes.sum() == index.count == N
    assert index.list_bytes.sum() == N * index.dim * 4
    assert "3,000" in repr(index)


def test_a_profile_is_shown_in_a_line_with_counts(profile):
    shown = repr(profile)
    assert len(shown) < 300
    for words in ("Profile 1 of", "3,000 x", "nprobe 8", "400 queries", "copy timings"):
        assert words in shown


def test_only_an_applied_plan_is_the_current_one(index, profile):
    first, bad = index.plan(50, 1 << 30, profile, coverage=0.5), index.plan(1e-4, 1 << 30, profile)
    assert index.current_plan() is None
    with pytest.raises(InfeasiblePlanError, match="infeasible"):
        index.apply_plan(bad)
    with index.store() as store:
        assert store.list_plans() == []
    number = index.apply_plan(first)
    assert index.current_plan().resident_lists.tolist() == first.resident_lists.tolist()
    assert index.apply_plan(first) == number, "it is stored once"
    assert index.apply_plan(bad, force=True) == number + 1
    assert index.current_plan().verdict == "infeasible"
    assert index.apply_plan(number) == number
    with pytest.raises(ProfileError, match="no plan 99"):
        index.apply_plan(99)


def test_coverage_fixes_what_is_resident(index, profile):
    plan = index.plan(50, 1 << 30, profile, coverage=0.5)
    assert plan.coverage == 0.5
    with index.router(plan, ["cpu"]) as router:
        resident = router.residency.resident_lists()
        assert set(resident) == set(plan.resident_lists[index.list_sizes[plan.resident_lists] > 0])
        measured = router.search(clustered(300, seed=4), 5, 8).hit_rate.mean()
    assert measured == pytest.approx(plan.predicted_hit_rate, abs=0.08)


def test_an_infeasible_plan_routes_best_effort(index, profile):
    plan = index.plan(1e-4, 1 << 30, profile)
    assert plan.verdict == "infeasible"
    assert plan.nearest_slo_ms > 1e-4
    with index.router(plan, ["cpu"]) as router:
        assert (router.search(clustered(3)).ids >= 0).all()


def test_a_session_moves_what_its_window_allows(index, profile):
    plan = index.plan(50, 4 << 20, profile, coverage=0.1)
    query = clustered(1, seed=9)
    with index.router(plan=plan, devices=["cpu"]) as router:
        spare = router.devices[0].arena.nbytes - router.devices[0].used_bytes
        for window_ms in (1000, 1e-6):
            budget = plan.lookahead_budget(window_ms, share_bytes=spare).nbytes
            with router.session(window_ms=window_ms) as session:
                session.lookahead(query, nprobe=8).result(300)
                assert session.stats.bytes_moved <= budget == session._budgets.in_all
        with pytest.raises(InvalidInputError, match="both"):
            router.session(window_ms=5, lookahead_bytes=1)
        with pytest.raises(InvalidInputError, match="window_ms"):
            router.session(window_ms=-1)
    with index.router() as router, pytest.raises(InvalidInputError, match="plan"):
        router.session(window_ms=5)


def test_several_devices_share_the_lists(index, profile):
    plan = index.plan(50, [4 << 20, 1 << 20], profile, coverage=0.6, n_devices=2)
    assert set(plan.list_device[plan.resident_lists]) == {0, 1}
    with index.router(plan, ["cpu", "cpu"]) as router:
        router.check_invariants()
        assert router.stats().unplaced_lists == 0


def test_the_newest_stored_profile_is_found(index, profile):
    assert profile.id is not None
    assert index.plan(50, 1 << 30).profile_id == profile.id


def test_without_a_profile_the_error_says_what_to_do(tmp_path):
    with hx.build(clustered(500), tmp_path / "i", nlist=4) as fresh, pytest.raises(ProfileError, match="profile"):
        fresh.plan(50, 1 << 30)


def test_a_profile_of_another_index_or_machine_is_refused(index, profile):
    foreign = dataclasses.replace(profile, index_fingerprint="f" * 32)
    with pytest.raises(ProfileMismatchError, match="f" * 32):
        index.plan(50, 1 << 30, foreign)
    elsewhere = dataclasses.replace(
        profile, hardware=dataclasses.replace(profile.hardware, fingerprint="another-machine")
    )
    with pytest.raises(ProfileMismatchError, match="another-machine"):
        index.plan(50, 1 << 30, elsewhere)
    assert index.plan(50, 1 << 30, elsewhere, allow_other_hardware=True).profile_id == profile.id


def test_a_codec_for_the_host_only_is_planned_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(codec, "_MOST_PARTS", 11)
    with hx.build(clustered(1500), tmp_path / "i", nlist=8, codec="pqfs12") as index:
        profile = index.profile(clustered(200, seed=5), nprobe=4, devices=["cpu"], max_seconds=1)
        plan = index.plan(1e-4, 1 << 30, profile)
        assert plan.device_bytes == 0
        assert "host only: codec 'pqfs12'" in plan.reason
        assert "scanned together" in plan.reason
        with index.router(plan, ["cpu"]) as router:
            assert router.search(clustered(2)).hit_rate.max() == 0


def test_scans_of_faiss_are_profiled_without_devices_where_these_differ(tmp_path):
    queries = clustered(200, seed=5)
    with hx.build(clustered(1500), tmp_path / "i", nlist=8, codec="pq8") as index:
        with pytest.raises(InvalidInputError, match="host_scanner is 'faiss', whose distances of codec pq8"):
            index.profile(queries, nprobe=4, devices=["cpu"], max_seconds=1, host_scanner="faiss")
        profile = index.profile(queries, nprobe=4, max_seconds=1, host_scanner="faiss")
        assert {s.device for s in profile.stages} == {""}


def test_a_codec_that_lies_in_shards_is_timed_planned_and_served_within_its_budget(tmp_path, monkeypatch):
    # Plans for the stand-in are made where there is no GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    small_index(tmp_path / "i", codec="faiss:PQ6x6np", n=1500, nlist=8).close()
    with hx.open(tmp_path / "i") as index:
        profile = index.profile(clustered(200, seed=5), nprobe=4, devices=["cpu"], max_seconds=1)
        assert {s.device for s in profile.stages if s.stage == "device_scan"} == {"cpu (stand-in)"}
        assert any(s.coverage > 0 for s in profile.stages if s.stage == "batch")
        budget = 20_000
        plan = index.plan(50, budget, profile, coverage=1.0)
        assert "memory caps it" in plan.reason
        assert 0 < len(plan.resident_lists) < 8
        with index.router(plan, ["cpu"]) as router:
            # Plan and tier reckon alike: everything planned found its place.
            assert router.stats().unplaced_lists == 0
            assert router.devices[0].used_bytes == plan.device_bytes <= budget
            queries = clustered(9, seed=6)
            found = router.search(queries, 5)
            probes, _ = index.ivf.quantize(queries, 4)
            check_answer(index.ivf, queries, probes, 5, found.distances, found.ids)
            assert found.hit_rate.max() > 0


def test_recall_and_nprobe_together_are_refused(index):
    with pytest.raises(InvalidInputError, match="recall"):
        index.profile(clustered(200), nprobe=4, recall=0.9)


def test_the_devices_that_are_there_are_measured_unless_none_is_wanted(index, monkeypatch):
    asked = []

    class EnoughError(Exception):
        """What comes after is tested elsewhere."""

    def measure(_index, _queries, request, **_options):
        asked.append(request.devices)
        raise EnoughError

    monkeypatch.setattr(run, "profile_index", measure)
    for options in ({}, {"devices": 0}, {"devices": []}, {"devices": ["cpu", "cpu"]}):
        with pytest.raises(EnoughError):
            index.profile(clustered(200), nprobe=4, **options)
    assert asked == [("cpu",), (), (), ("cpu", "cpu")]
    monkeypatch.setattr(measuring, "kind_here", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert measuring.devices_to_time(index.ivf, None) == ("cuda:0", "cuda:1")


def test_routed_batches_are_part_of_the_profile(profile):
    routed = [s for s in profile.stages if s.stage == "batch"]
    assert {s.device for s in routed} == {"", "cpu (stand-in)"}
    assert {s.batch for s in routed} >= {1, 4, 16, 64}


def test_a_slow_device_is_timed_and_not_left_out(index, profile, monkeypatch):
    policies = []

    class Told(Router):
        def __init__(self, *args, health, **options):
            policies.append(health)
            super().__init__(*args, health=health, **options)

    monkeypatch.setattr(calibrate, "Router", Told)
    options = {"devices": ["cpu"], "device_budget_bytes": 1 << 30, "max_seconds": 0}
    assert calibrate.time_routed(index.ivf, profile, clustered(4, seed=8), **options)
    assert {policy.judge for policy in policies} == {"none"}


def test_the_hottest_host_lists_of_a_plan_are_pinned(index, profile):
    plan = index.plan(50, 1 << 30, profile, coverage=0.2)
    # Half of them have room.
    limit = int(index.list_bytes[plan.list_device < 0].sum()) // 2
    with index.router(plan, ["cpu"], pin_host_lists=limit) as router:
        [tier] = router.devices
        accesses = profile.access.list_accesses
        pinned = np.array([i for i in range(NLIST) if tier._path.pinned.find(i) is not None])
        others = np.setdiff1d(np.flatnonzero(plan.list_device < 0), pinned)
        assert 0 < router.stats().pinned_host_bytes <= limit
        assert (plan.list_device[pinned] < 0).all()
        assert accesses[pinned].min() >= accesses[others].max()


def test_save_copies_an_index_with_profiles_and_plans(index, profile, tmp_path):
    plan = index.plan(50, 1 << 30, profile, coverage=0.5)
    with index.store() as store:
        number = store.save_plan(plan.to_record(), profile.id)
    with index.save(tmp_path / "copy") as copy:
        assert copy.fingerprint == index.fingerprint
        assert copy.count == N
        with copy.store() as store:
            store.check_invariants()
            taken = Plan.from_record(store.load_plan(number).record, store.load_profile(profile.id))
        assert np.array_equal(taken.list_device, plan.list_device)
        with copy.router(taken, ["cpu"]) as router:
            assert router.residency.n_resident > 0
    # A store that stands there is nobody's to write over.
    with pytest.raises(StoreError, match=r"control store already.*plans=False"):
        index.save(tmp_path / "copy", replace=True)
    assert index.save(tmp_path / "copy", replace=True, plans=False).ivf.generation == 2
    with pytest.raises(IndexExistsError):
        index.save(tmp_path / "copy", plans=False)
    bare = index.save(tmp_path / "bare", plans=False)
    bare.close()
    assert not (tmp_path / "bare/control.sqlite").exists()
    # Where there is no store, none is made.
    hx.open(tmp_path / "bare").save(tmp_path / "again").close()
    assert not (tmp_path / "again/control.sqlite").exists()


def test_a_program_goes_over_to_another_generation(tmp_path):
    """As docs/service.md says: what was submitted to the old router is answered by it."""
    path, queries = tmp_path / "idx", clustered(4, seed=3)
    index = hx.build(clustered(600, seed=1), path, nlist=4)
    router = index.router()
    before = router.search(queries)
    waiting = router.submit(queries)
    hx.build(clustered(600, seed=2), path, nlist=4, replace=True).close()
    new_index = hx.open(path)
    new_router = new_index.router()
    (index, router), (old_index, old_router) = (new_index, new_router), (index, router)
    old_router.close()
    old_index.close()
    assert hx.remove_replaced(path) == [1]
    assert np.array_equal(waiting.result(300).ids, before.ids)
    assert not np.array_equal(router.search(queries).ids, before.ids)
    router.close()
    index.close()


def test_a_store_that_cannot_be_copied_is_said(index, profile, tmp_path):
    disk = FaultyDisk(counts=of("replace"), allowed=0, number=errno.ENOSPC)
    words = r"could not be copied.*make room"
    with index.store() as store, watched_by(disk), pytest.raises(StoreError, match=words):
        store.copy_to(tmp_path / "control.sqlite")
    assert list(tmp_path.iterdir()) == []


def _refuse(*_):
    raise OSError("no room")


def test_codes_come_and_go(tmp_path):
    with hx.build(clustered(600, seed=1), tmp_path / "i", nlist=4, codec="rabitq", rerank="sq8") as index:
        assert (index.codec, index.ivf.rabitq.spec.bits) == ("sq8", 1)
        assert index.compress(2, recall_loss=0.1).bits == index.ivf.rabitq.spec.bits == 2
        assert index.remove_codes() > 0
        assert index.ivf.rabitq is None
