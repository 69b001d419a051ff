"""Arenas grow and shrink with the plan, within the budget, while searches go on; its lists find their pages."""

from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

from hybridindex.router import Router
from hybridindex.router.devices import opening
from hybridindex.tiers.contract import devices
from hybridindex.tiers.paged import device_tier
from hybridindex.tiers.paged.device_tier import PagedMemory
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.router.test_router import check

PAGE = 65_536 // (24 * 4) * 24 * 4
WAIT_S = 300


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Lists of one to three pages."""
    with small_index(tmp_path_factory.mktemp("idx") / "i", n=30_000, nprobe=8) as index:
        yield index


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(opening, "PagedMemory", partial(PagedMemory, block_bytes=PAGE))


def plan_of(index, share, budget=64 << 20):
    placement = np.full(NLIST, -1)
    placement[np.argsort(-index.list_sizes, kind="stable")[: round(share * NLIST)]] = 0
    return hand_made_plan(index, placement, budget=budget)


def pages_of(index, plan):
    sizes = index.list_sizes[plan.resident_lists]
    return int(-(-sizes // (65_536 // index.code_size)).sum())


def resident(router):
    return set(router.residency.resident_lists().tolist())


def test_every_list_of_every_plan_is_there_while_searches_go_on(index):
    """0.1 -> 0.6 -> 0.2 of the lists, one after the other and again."""
    stop, problems, done = threading.Event(), [], []
    with Router(index, plan=plan_of(index, 0.1), devices=["cpu"], lookahead_bytes=2 * PAGE) as router:
        [tier] = router.devices

        def load(seed):
            try:
                while not stop.is_set():
                    queries = clustered(3, seed=seed + len(done))
                    check(index, queries, 10, 8, router.search(queries, 10, 8))
                    with router.session() as session:
                        session.lookahead(queries, nprobe=4)
                        check(index, queries, 10, 8, session.search(queries, 10, 8))
                    tier.check_invariants()
                    done.append(seed)
            except BaseException as error:
                problems.append(error)
                raise

        threads = [threading.Thread(target=load, args=(1000 * n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        try:
            for share in (0.6, 0.2, 0.1, 0.6, 0.2):
                plan = plan_of(index, share)
                router.apply_plan(plan)
                before = len(done)
                # Sessions may have the pages of some of its lists now, and others the next moment.
                ends = time.monotonic() + WAIT_S
                while router.stats().unplaced_lists and not problems and time.monotonic() < ends:
                    router._served.placement.complete()
                assert resident(router) >= set(plan.resident_lists.tolist())
                while len(done) < before + 3 and not problems:
                    stop.wait(0.01)
        finally:
            stop.set()
            for thread in threads:
                thread.join(WAIT_S)
        assert not problems
        router.check_invariants()
        assert router._served.residency.wait_reclaimed(router.residency.version, WAIT_S)
        router._served.placement.complete()
        assert tier.arena.pages.n_pages == pages_of(index, plan) + 2


def test_what_stays_is_not_moved(index):
    with Router(index, plan=plan_of(index, 0.2), devices=["cpu"], lookahead_bytes=0) as router:
        [tier], before, moved = router.devices, router.residency, router.devices[0].moved_bytes
        kept = before.resident_lists()
        router.apply_plan(plan_of(index, 0.6))
        n_pages = pages_of(index, router.plan)
        assert tier.arena.pages.n_pages == n_pages
        assert all(router.residency.holds(i, 0, before.list_pages[i]) for i in kept.tolist())
        assert tier.moved_bytes == n_pages * PAGE
        router.apply_plan(plan_of(index, 0.2))
        assert all(router.residency.holds(i, 0, before.list_pages[i]) for i in kept.tolist())
        assert tier.moved_bytes == n_pages * PAGE
        assert tier.arena.nbytes == moved


def test_what_is_only_cached_does_not_keep_memory(index):
    """Sessions hold more than the lookahead's pages while a plan wants what one of them brought."""
    hottest = np.argsort(-index.list_sizes, kind="stable")
    wanted_later, others = hottest[8], hottest[-3:]
    with Router(index, plan=plan_of(index, 0.1), devices=["cpu"], lookahead_bytes=2 * PAGE) as router:
        [tier] = router.devices
        with router.session() as first, router.session() as second:
            first.lookahead(index.centroids[[wanted_later]], nprobe=1).result(WAIT_S)
            router.apply_plan(plan_of(index, 0.6))
            second.lookahead(index.centroids[others], nprobe=1).result(WAIT_S)
            router.apply_plan(plan_of(index, 0.1))
        assert router._served.residency.wait_reclaimed(router.residency.version, WAIT_S)
        assert wanted_later in resident(router)
        assert resident(router) & set(others.tolist())
        before = tier.arena.pages.n_pages
        router._served.placement.complete()
        assert tier.arena.pages.n_pages == pages_of(index, router.plan) + 2 < before
        assert router.stats().cache_evicted_lists >= 1
        router.check_invariants()


def test_the_configured_budget_is_the_most(index):
    budget = 10 * PAGE + 2 * PAGE
    with Router(index, plan=plan_of(index, 0.1), devices=["cpu"], device_budget_bytes=budget) as router:
        [tier] = router.devices
        router.apply_plan(plan_of(index, 1.0))
        assert tier.budget_bytes == budget
        assert tier.arena.nbytes + tier.scratch_bytes <= budget
        assert router.stats().unplaced_lists > 0
        check(index, clustered(5), 10, 8, router.search(clustered(5), 10, 8))


def test_a_lower_budget_holds_and_its_plan_finds_room(index):
    """Lists of the new plan lie in pages that have to go."""
    order = np.argsort(-index.list_sizes, kind="stable")
    everywhere, late = np.zeros(NLIST), np.full(NLIST, -1)
    late[order[-6:]] = 0
    with Router(index, plan=hand_made_plan(index, everywhere), devices=["cpu"]) as router:
        [tier] = router.devices
        plan = hand_made_plan(index, late, budget=12 * PAGE)
        router.apply_plan(plan)
        assert tier.arena.nbytes + tier.scratch_bytes <= tier.budget_bytes == 12 * PAGE
        assert router.stats().unplaced_lists == 0
        check(index, clustered(5), 10, 8, router.search(clustered(5), 10, 8))
        router.apply_plan(plan_of(index, 1.0))
        assert tier.budget_bytes == 64 << 20
        assert router.stats().unplaced_lists == 0
        assert router.search(clustered(5), 10, 8).hit_rate.min() == 1.0


def test_a_device_without_a_page_gets_some(index):
    nowhere = hand_made_plan(index, np.full(NLIST, -1), budget=1000)
    with Router(index, plan=nowhere, devices=["cpu"]) as router:
        assert "below one page" in router.devices[0].disabled_reason
        router.apply_plan(plan_of(index, 1.0))
        assert router.devices[0].disabled_reason == ""
        result = router.search(clustered(5), 10, 8)
        check(index, clustered(5), 10, 8, result)
        assert result.hit_rate.min() == 1.0
        assert router.stats().device_fallbacks == 0


def test_memory_that_a_reader_holds_leaves_with_him(index):
    with Router(index, plan=plan_of(index, 0.6), devices=["cpu"], lookahead_bytes=0) as router:
        [tier] = router.devices
        with router.session(lookahead_bytes=1 << 30) as session:
            router.apply_plan(plan_of(index, 0.3))
            session.lookahead(clustered(4), nprobe=NLIST).result(WAIT_S)
            held = tier.arena.nbytes
            router.apply_plan(plan_of(index, 0.1))
            assert pages_of(index, router.plan) * PAGE <= tier.arena.nbytes <= held
        router._served.placement.complete()
        assert tier.used_bytes <= tier.arena.nbytes
        router.check_invariants()


def test_memory_is_kept_where_a_neighbour_must_not_see_it_go(index):
    with Router(index, plan=plan_of(index, 0.6), devices=["cpu"], lookahead_bytes=0, shrink_arenas=False) as router:
        [tier] = router.devices
        before = tier.arena.nbytes
        router.apply_plan(plan_of(index, 0.1))
        router._served.placement.complete()
        assert tier.arena.nbytes == before
        router.apply_plan(plan_of(index, 0.6))
        assert tier.arena.nbytes == before
        assert router.stats().unplaced_lists == 0


def test_a_device_with_too_little_room_takes_what_there_is_and_the_rest_later(index, monkeypatch):
    free = [3 * PAGE]
    with Router(index, plan=plan_of(index, 0.1), devices=["cpu"], lookahead_bytes=0) as router:
        [tier] = router.devices
        before = tier.arena.pages.n_pages
        monkeypatch.setattr(device_tier, "available_bytes", lambda _device: free[0])
        router.apply_plan(plan_of(index, 0.6))
        assert tier.arena.pages.n_pages == before + 3
        missing = router.stats().unplaced_lists
        assert missing > 0
        check(index, clustered(5), 10, 8, router.search(clustered(5), 10, 8))
        free[0] = 1 << 30
        router._served.placement.complete()
        assert router.stats().unplaced_lists == 0


@pytest.mark.parametrize("noted", [False, True], ids=["unseen", "failed"])
def test_a_plan_is_applied_where_a_device_was_lost(index, monkeypatch, noted):
    """It does not grow. The host serves, and lists come when it works again."""

    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with Router(index, plan=plan_of(index, 0.1), devices=["cpu"], lookahead_bytes=0) as router:
        [tier], asked = router.devices, []
        before = tier.arena.pages.n_pages
        with monkeypatch.context() as patch:
            patch.setattr(tier, "retry_due", lambda _now: False)
            patch.setattr(torch.cuda, "mem_get_info", lambda *_: asked.append(1) or lost())
            patch.setattr(
                device_tier, "available_bytes", lambda _device: devices.available_bytes(torch.device("cuda", 0))
            )
            if noted:
                tier.fail(RuntimeError("CUDA error"))
            router.apply_plan(plan_of(index, 0.6))
            assert (tier.arena.pages.n_pages, bool(asked)) == (before, not noted)
            check(index, clustered(5), 10, 8, router.search(clustered(5), 10, 8))
        assert tier.recover().result(WAIT_S)
        router._served.placement.restore(tier)
        assert tier.arena.pages.n_pages > before
        assert router.stats().unplaced_lists == 0
