"""A router whose devices hold shards: placement, plan changes and failures never change an answer."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hybridindex.router import Router
from hybridindex.tiers.shard import shard_tier
from hybridindex.tiers.shard.scanner import ShardScanner, ShardSource
from hybridindex.tiers.shard.shard_tier import ShardTier
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.router.test_router import check, random_placement

BUDGET = 4 << 20


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", codec="faiss:PQ6x6np", metric="l2") as index:
        yield index


def test_with_everything_resident_the_host_scans_nothing(index):
    queries = clustered(20, seed=2)
    with Router(index, plan=hand_made_plan(index, np.zeros(NLIST), budget=BUDGET), devices=["cpu"]) as router:
        assert isinstance(router.devices[0], ShardTier)
        result = router.search(queries, 10, 8)
        assert result.hit_rate.min() == 1.0
        check(index, queries, 10, 8, result)
        stats = router.stats()
        assert (stats.host_work_bytes, stats.unplaced_lists, stats.device_fallbacks) == (0, 0, 0)
        assert router.devices[0].used_bytes <= BUDGET
        router.check_invariants()


@pytest.mark.parametrize("n_devices", [1, 2])
def test_plans_change_under_traffic_without_a_wrong_answer(index, n_devices):
    rng = np.random.default_rng(5)
    plans = [hand_made_plan(index, random_placement(rng, n_devices, f), n_devices=n_devices) for f in (0.3, 1.0, 0.6)]
    queries = clustered(12, seed=4)
    stop, wrong = threading.Event(), []
    with Router(index, plan=plans[0], devices=["cpu"] * n_devices) as router:

        def keep_asking():
            while not stop.is_set():
                try:
                    check(index, queries, 10, 8, router.search(queries, 10, 8))
                except BaseException as error:  # noqa: BLE001 - reported below
                    wrong.append(error)
                    return

        askers = [threading.Thread(target=keep_asking) for _ in range(2)]
        for asker in askers:
            asker.start()
        for plan in plans[1:] + plans:
            router.apply_plan(plan)
            wanted = plan.list_device
            np.testing.assert_array_equal(router.residency.list_device, wanted)
            router.check_invariants()
        stop.set()
        for asker in askers:
            asker.join(300)
        assert not wrong, wrong[0]
        assert router.stats().device_fallbacks == 0
        assert all(tier.pages.n_shards <= 1 for tier in router.devices)


def test_lists_beyond_the_budget_stay_on_the_host_and_are_counted(index):
    queries = clustered(12, seed=2)
    plan = hand_made_plan(index, np.zeros(NLIST), budget=80_000)
    with Router(index, plan=plan, devices=["cpu"]) as router:
        n_resident = router.residency.n_resident
        assert 0 < n_resident < NLIST
        assert router.stats().unplaced_lists == NLIST - n_resident
        check(index, queries, 10, 8, router.search(queries, 10, 8))
        router.check_invariants()


def test_a_lower_budget_holds(index):
    few = np.full(NLIST, -1)
    few[:4] = 0
    budget = 200_000
    with Router(index, plan=hand_made_plan(index, np.zeros(NLIST), budget=BUDGET), devices=["cpu"]) as router:
        [tier] = router.devices
        assert tier.used_bytes > budget
        router.apply_plan(hand_made_plan(index, few, budget=budget))
        assert tier.used_bytes <= tier.budget_bytes == budget
        np.testing.assert_array_equal(router.residency.list_device, few)
        check(index, clustered(12, seed=2), 10, 8, router.search(clustered(12, seed=2), 10, 8))


def test_a_budget_beyond_what_the_device_has_leaves_all_to_the_host_and_says_so(index, monkeypatch):
    monkeypatch.setattr(shard_tier, "available_bytes", lambda _device: 1000)
    queries = clustered(12, seed=2)
    with Router(index, plan=hand_made_plan(index, np.zeros(NLIST)), devices=["cpu"]) as router:
        assert "1,000 are free" in str(router.devices[0].failure)
        check(index, queries, 10, 8, router.search(queries, 10, 8))
        assert router.stats().unplaced_lists == NLIST


def test_a_scan_that_fails_is_answered_by_the_host_and_the_lists_come_back(index, monkeypatch):
    def broken(self, *args, **kwargs):
        raise RuntimeError("the device fell off the bus")

    queries = clustered(12, seed=2)
    with Router(index, plan=hand_made_plan(index, np.zeros(NLIST)), devices=["cpu"]) as router:
        tier = router.devices[0]
        monkeypatch.setattr(ShardScanner, "scan", broken)
        check(index, queries, 10, 8, router.search(queries, 10, 8))
        monkeypatch.undo()
        assert router.stats().device_fallbacks == 1
        assert router.residency.n_resident == 0
        assert tier.used_bytes == 0
        monkeypatch.setattr(tier, "retry_due", lambda now: tier.failure is not None)
        router._served.recovery.try_failed()
        assert router.search(queries, 10, 8).hit_rate.min() == 1.0


def test_a_shard_that_cannot_be_built_leaves_its_lists_to_the_host(index, monkeypatch):
    def broken(self, number):
        raise OSError("no memory")

    queries = clustered(12, seed=2)
    monkeypatch.setattr(ShardSource, "copy", broken)
    with Router(index, plan=hand_made_plan(index, np.zeros(NLIST)), devices=["cpu"]) as router:
        check(index, queries, 10, 8, router.search(queries, 10, 8))
        assert router.stats().device_failures == 1
        assert router.stats().unplaced_lists == NLIST


def test_sessions_move_nothing_to_a_shard(index):
    queries = clustered(4, seed=2)
    plan = hand_made_plan(index, random_placement(np.random.default_rng(1), 1, 0.4))
    with Router(index, plan=plan, devices=["cpu"]) as router:
        before = router.residency.version
        with router.session() as session:
            session.lookahead(queries).result(300)
            check(index, queries, 10, 8, session.search(queries, 10, 8))
        assert router.stats().lookahead_lists == 0
        assert router.residency.version == before
        assert router.stats().cached_lists == 0
