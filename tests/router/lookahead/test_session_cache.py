"""Lists that sessions brought stay cached: within their share, for the next session, until others need the room."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from hybridindex import paging
from hybridindex.paging import scratch_for_budget
from hybridindex.router import Router
from hybridindex.tiers.paged.arena import PageArena
from tests.clustered import NLIST, clustered, hand_made_plan, page_bytes_of, small_index
from tests.router.test_router import check


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", nprobe=8) as index:
        yield index


def test_lists_stay_cached_and_serve_the_next_session(index):
    query = clustered(1, seed=7)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20, cache_fraction=1.0) as router:
        with router.session() as session:
            session.lookahead(query, nprobe=8).result(300)
            check(index, query, 5, 8, session.search(query, 5, 8))
            moved = session.stats
        assert moved.bytes_used == moved.bytes_moved > 0
        assert (moved.bytes_wasted, moved.searches, moved.hit_rate) == (0, 1, 1.0)
        assert router.stats().cached_lists == moved.lists_moved
        with router.session() as session:
            session.lookahead(query, nprobe=8).result(300)
            assert session.stats.bytes_moved == 0
            assert router.stats().cached_lists == 0
            assert session.search(query, 5, 8).hit_rate.tolist() == [1.0]
            assert session.stats.lists_used == moved.lists_moved
        router.check_invariants()


def test_what_is_cached_costs_a_session_nothing_of_its_budget(index):
    query = clustered(1, seed=7)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20, cache_fraction=1.0) as router:
        with router.session() as session:
            session.lookahead(query, nprobe=8).result(300)
            budget = session.stats.bytes_moved
        with router.session(lookahead_bytes=budget) as session:
            session.lookahead(query, nprobe=16).result(300)
            # The same lists again, and as many bytes of others.
            assert budget // 2 < session.stats.bytes_moved <= budget
            assert session.search(query, 5, 8).hit_rate.tolist() == [1.0]


@pytest.fixture(autouse=True)
def one_page_a_list(monkeypatch):
    monkeypatch.setattr(paging, "_LEAST_PAGE_BYTES", paging.DEFAULT_PAGE_BYTES)


def arena_of(index, n_pages, most=None):
    """A budget whose arena has ``n_pages`` pages; ``most``: as in :func:`tests.clustered.page_bytes_of`."""
    page = page_bytes_of(index, most)
    budget = n_pages * page
    while (budget - scratch_for_budget(budget)) // page < n_pages:
        budget += page
    return budget


def test_the_cache_keeps_its_share_and_makes_way(index):
    pages = int((index.list_sizes > 0).sum()) // 2
    budget = arena_of(index, pages)
    options = {"devices": ["cpu"], "device_budget_bytes": budget, "lookahead_bytes": budget, "cache_fraction": 0.5}
    with Router(index, **options) as router:
        tier = router.devices[0]
        for seed in range(12):
            query = clustered(1, seed=seed)
            with router.session() as session:
                session.lookahead(query, nprobe=6).result(300)
                assert session.stats.lists_skipped == 0  # whatever is cached makes way
                check(index, query, 5, 8, session.search(query, 5, 8))
            # The answer is there before its lease ends.
            assert router._served.residency.wait_reclaimed(router.residency.version, 30)
            assert tier.used_bytes <= tier.arena.nbytes // 2
            router.check_invariants()
        assert router.stats().cached_lists > 0
        assert router.stats().cache_evicted_lists > 0
        # A plan needs the whole arena.
        hottest = np.argsort(index.list_sizes, kind="stable")[::-1]
        wanted = np.full(NLIST, -1)
        wanted[hottest[: tier.arena.pages.n_pages]] = 0
        router.apply_plan(hand_made_plan(index, wanted))
        assert router.stats().unplaced_lists == 0
        check(index, clustered(9), 10, 8, router.search(clustered(9), 10, 8))


def test_what_no_search_used_leaves_the_cache_first(index):
    """Three lists in an arena of two pages. Of lists that were used alike, the one with the smaller id would go."""
    used, idle, fresh = np.flatnonzero(index.list_sizes)[:3]
    budget = arena_of(index, 2)
    options = {"devices": ["cpu"], "device_budget_bytes": budget, "lookahead_bytes": budget, "cache_fraction": 1.0}
    with Router(index, **options) as router:
        with router.session() as session:
            session.lookahead(index.centroids[[used, idle]], nprobe=1).result(300)
        assert router.residency.resident_lists().tolist() == [used, idle]
        with router.session() as session:
            session.search(index.centroids[[used]], 5, 1)
            session.lookahead(index.centroids[[fresh]], nprobe=1).result(300)
            assert router.residency.resident_lists().tolist() == [used, fresh]


def test_pages_of_a_copy_on_its_way_are_counted_once(index, monkeypatch):
    """What is free beside it is enough for the next draft: nothing cached has to go."""
    sizes = index.list_sizes
    first, second, third = (np.flatnonzero(sizes)[at : at + 4] for at in (0, 4, 8))
    budget = arena_of(index, 12)
    options = {"devices": ["cpu"], "device_budget_bytes": budget, "lookahead_bytes": budget, "cache_fraction": 1.0}
    with Router(index, **options) as router:
        tier = router.devices[0]
        assert tier.arena.pages.n_pages == 12
        assert (
            router._served.opening.list_bytes[np.concatenate([first, second, third])] == tier.geometry.page_bytes
        ).all()
        near = {name: index.centroids[lists] for name, lists in (("a", first), ("b", second), ("c", third))}
        with router.session() as session:
            session.lookahead(near["a"], nprobe=1).result(300)
        assert router.stats().cached_lists == 4
        write, entered, go_on = PageArena.write, threading.Event(), threading.Event()

        def held(self, pages, codes):
            entered.set()
            assert go_on.wait(300)
            write(self, pages, codes)

        monkeypatch.setattr(PageArena, "write", held)
        with router.session() as slow, router.session() as other:
            moving = slow.lookahead(near["b"], nprobe=1)
            assert entered.wait(300)
            waiting = other.lookahead(near["c"], nprobe=1)
            while not router._served.lookahead._jobs.empty() or len(tier._moves) < 2:
                time.sleep(0.001)
            go_on.set()
            moving.result(300)
            waiting.result(300)
            assert router.stats().cache_evicted_lists == 0
            assert router.residency.n_resident == 12
