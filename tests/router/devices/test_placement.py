"""What a plan wants gets to the device: at once, or once sessions have given back what they had."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from hybridindex.paging import DEFAULT_PAGE_BYTES
from hybridindex.router import Router
from hybridindex.tiers.contract.tier import LoadReport
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.device_tier import DeviceTier
from tests.clustered import NLIST, clustered, hand_made_plan, page_bytes_of, small_index
from tests.router.lookahead.test_session_cache import arena_of
from tests.router.slow_copies import until
from tests.stuck import Stuck

PLANNED, PROMISED = 6, 6


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i") as index:
        yield index


def plan_of(index, lists):
    placement = np.full(NLIST, -1)
    placement[lists] = 0
    return hand_made_plan(index, placement, budget=arena_of(index, PLANNED + PROMISED, DEFAULT_PAGE_BYTES))


def router_on(index, cache_fraction=0.0):
    """Pages for PLANNED lists of one page each, as their plan says, and for as many as sessions are promised."""
    page = page_bytes_of(index, DEFAULT_PAGE_BYTES)
    lists = np.flatnonzero(index.list_sizes)[:PLANNED]
    return Router(
        index,
        plan=plan_of(index, lists),
        devices=["cpu"],
        lookahead_bytes=PROMISED * page,
        cache_fraction=cache_fraction,
    )


def fill(router):
    """The plan gives its pages up, and a session takes them all: the session, and the lists that are not there."""
    router.apply_plan(plan_of(router._served.index, []))
    session = router.session(lookahead_bytes=1 << 30)
    session.lookahead(clustered(2, seed=3), nprobe=NLIST).result(300)
    tier = router.devices[0]
    assert tier.arena.pages.n_pages == PLANNED + PROMISED
    assert tier.arena.pages.n_free == 0
    return session, np.setdiff1d(np.flatnonzero(router._served.index.list_sizes), router.residency.resident_lists())


def test_lists_come_by_themselves_when_sessions_give_their_pages_back(index):
    with router_on(index) as router:
        session, absent = fill(router)
        wanted = absent[:PLANNED]
        router.apply_plan(plan_of(index, wanted))
        router._served.placement.complete()
        assert router.stats().unplaced_lists == PLANNED
        session.close()
        ends_s = time.monotonic() + 300
        while router.stats().unplaced_lists and time.monotonic() < ends_s:
            time.sleep(0.02)
        assert router.residency.resident_lists().tolist() == wanted.tolist()
        router.check_invariants()


def test_a_larger_plan_takes_from_the_share_of_sessions_and_the_rest_stays_theirs(index):
    """The budget has room for no more pages."""
    with router_on(index) as router:
        session, absent = fill(router)
        wanted = absent[: PLANNED + 3]
        router.apply_plan(plan_of(index, wanted))
        assert router.stats().unplaced_lists == PLANNED + 3
        session.close()
        for _ in range(2):
            router._served.placement.complete()
        assert router.stats().unplaced_lists == 0
        with router.session(lookahead_bytes=PROMISED << 16) as other:
            other.lookahead(clustered(2, seed=3), nprobe=NLIST).result(300)
            assert other.stats.lists_moved == PROMISED - 3
        router.check_invariants()


def test_no_more_of_the_cache_goes_than_is_needed(index):
    with router_on(index, cache_fraction=1.0) as router:
        session, absent = fill(router)
        wanted = absent[: PLANNED + 3]
        router.apply_plan(plan_of(index, wanted))
        session.close()
        assert router.stats().cached_lists == PLANNED + PROMISED
        router._served.placement.complete()
        assert router.stats().cached_lists == PROMISED - 3
        assert router.stats().unplaced_lists == 0
        router.check_invariants()


def test_a_change_that_fails_half_way_leaves_the_lists_of_the_plan_before(index, monkeypatch):
    with router_on(index) as router:
        before, (other,) = router.residency.resident_lists().tolist(), np.flatnonzero(index.list_sizes)[-1:]

        def broken(*_):
            raise MemoryError("no memory")

        monkeypatch.setattr(DeviceTier, "resize", broken)
        with pytest.raises(MemoryError, match="no memory"):
            router.apply_plan(plan_of(index, [other]))
        monkeypatch.undo()
        # What a session brings of them stays when it ends; the others come by themselves.
        with router.session() as session:
            session.lookahead(index.centroids[before[:3]], nprobe=1).result(300)
        assert set(before[:3]) <= set(router.residency.resident_lists().tolist())
        router._served.placement.complete()
        assert router.residency.resident_lists().tolist() == before
        router.check_invariants()


def test_a_change_whose_wait_is_interrupted_holds_nothing_up(index, monkeypatch):
    class Interrupted:
        def __enter__(self):
            raise KeyboardInterrupt

        def __exit__(self, *_):
            raise AssertionError("it was never entered")

    with router_on(index) as router:
        session, absent = fill(router)
        router.apply_plan(plan_of(index, absent[:PLANNED]))
        with monkeypatch.context() as patch:
            patch.setattr(router._served.placement, "_lock", Interrupted())
            with pytest.raises(KeyboardInterrupt):
                router.apply_plan(plan_of(index, []))
        session.close()
        router._served.placement.complete()
        assert router.stats().unplaced_lists == 0


def test_a_change_that_is_interrupted_brings_no_more_and_what_it_brought_leaves(index, monkeypatch):
    with router_on(index) as router:
        placement, before = router._served.placement, router.residency.resident_lists()
        others = np.setdiff1d(np.flatnonzero(index.list_sizes), before)[: PLANNED + PROMISED]

        def interrupt_at(moment):
            """A change of plan; what was loading then."""

            def wait_for(load):
                monkeypatch.undo()
                moment(load)
                raise KeyboardInterrupt

            monkeypatch.setattr(placement, "_wait_for", wait_for)
            with pytest.raises(KeyboardInterrupt):
                router.apply_plan(plan_of(index, others))
            return placement._loads[0]

        def is_as_before():
            until(lambda: placement.complete() or router.stats().unplaced_lists == 0)
            assert router.residency.resident_lists().tolist() == before.tolist()
            router.check_invariants()

        assert interrupt_at(lambda load: load.result(300)).result(0).loaded
        is_as_before()
        # What comes after the interrupt is skipped.
        with Stuck(PageArena, "write") as write:
            load = interrupt_at(lambda _: write.begun.wait(300))
        assert load.result(300).skipped
        is_as_before()


@pytest.mark.parametrize("ending", ["apply_plan", "close"])
def test_what_comes_late_gives_way(index, monkeypatch, ending):
    """To a change of plan, and to the end: neither waits for lists that nobody wants any more."""
    with router_on(index) as router:
        session, absent = fill(router)
        wanted = absent[:PLANNED]
        router.apply_plan(plan_of(index, wanted))
        asked, started = [], threading.Event()

        def load(self, lists, store, cancelled=None, *, bandwidth_share=None):
            future: Future[LoadReport] = Future()
            asked.append((lists, cancelled, future))
            started.set()
            return future

        real = DeviceTier.load
        monkeypatch.setattr(DeviceTier, "load", load)
        session.close()
        assert started.wait(300)
        lists, cancelled, future = asked[0]
        assert sorted(lists) == sorted(wanted.tolist())
        assert not cancelled()
        monkeypatch.setattr(DeviceTier, "load", real)
        given = [plan_of(index, wanted[:1])] if ending == "apply_plan" else []
        other = threading.Thread(target=getattr(router, ending), args=given)
        other.start()
        ends_s = time.monotonic() + 300
        while not cancelled() and time.monotonic() < ends_s:
            time.sleep(0.001)
        assert cancelled()
        future.set_result(LoadReport(loaded=(), skipped=tuple(lists), present=(), nbytes=0))
        other.join(300)
        assert not other.is_alive()
        if ending == "apply_plan":
            assert router.residency.resident_lists().tolist() == wanted[:1].tolist()
