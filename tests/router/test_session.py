"""Sessions: what lookahead moves and counts, what a plan takes over; answers stay those of plain IVF."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError, RouterClosedError
from hybridindex.index import codec
from hybridindex.router import Router
from hybridindex.tiers.paged.arena import PageArena
from tests.clustered import NLIST, clustered, hand_made_plan, page_bytes_of, small_index
from tests.router.test_router import check
from tests.stuck import held_quantizer


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", nprobe=8) as index:
        yield index


def test_lookahead_moves_bytes_and_close_gives_them_back(index):
    query = clustered(1, seed=7)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20, cache_fraction=0) as router:
        with router.session() as session:
            session.lookahead(query, nprobe=8).result(300)
            tier = router.devices[0]
            assert session.stats.lists_moved > 0
            assert session.stats.bytes_moved == tier.used_bytes
            result = session.search(query, 5, 8)
            check(index, query, 5, 8, result)
            assert result.hit_rate.tolist() == [1.0]
            assert session.stats.lists_used == session.stats.lists_moved
        assert router.residency.n_resident == 0
        assert tier.used_bytes == 0
        router.check_invariants()


def test_second_round_moves_only_what_is_missing(index):
    query = clustered(1, seed=7)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router, router.session() as session:
        session.lookahead(query, nprobe=4).result(300)
        first = session.stats
        session.lookahead(query, nprobe=4).result(300)
        assert session.stats.bytes_moved == first.bytes_moved
        session.lookahead(query, nprobe=9).result(300)
        assert session.stats.lookaheads == 3
        assert (
            session.stats.lists_moved == 9 - (index.list_sizes[router._served.index.quantize(query, 9)[0]] == 0).sum()
        )


def test_lookahead_keeps_its_budget_and_skips_what_does_not_fit(index):
    query = clustered(1, seed=7)
    page = page_bytes_of(index)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router, router.session() as session:
        session.lookahead(query, nprobe=NLIST, budget_bytes=3 * page).result(300)
        assert session.stats.bytes_moved <= 3 * page
        assert session.stats.lists_skipped > 0


@pytest.mark.parametrize("why", ["failed", "no room", "codec", "no devices"])
def test_lists_that_no_device_takes_are_counted_as_skipped(index, tmp_path, why, monkeypatch):
    monkeypatch.setattr(codec, "_MOST_PARTS", 11)
    query = clustered(2, seed=7)
    budget = 1 if why == "no room" else 32 << 20
    devices = [] if why == "no devices" else ["cpu"]
    with ExitStack() as stack:
        if why == "codec":
            index = stack.enter_context(small_index(tmp_path / "i", codec="pqfs12", n=600))
        router = stack.enter_context(Router(index, devices=devices, device_budget_bytes=budget))
        if why == "failed":
            router.devices[0].fail(RuntimeError("the device fell off the bus"))
        session = stack.enter_context(router.session(lookahead_bytes=1 << 20))
        session.lookahead(query, nprobe=5).result(300)
        probed = np.unique(index.quantize(index.transform(query), 5)[0])
        expected = 0 if why == "no devices" else int((index.list_sizes[probed] > 0).sum())
        assert session.stats.lists_skipped == router.stats().lookahead_skipped_lists == expected
        assert session.stats.lists_moved == 0


def test_what_went_with_a_device_counts_against_a_budget_no_more(index, monkeypatch):
    query = clustered(1, seed=7)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router, router.session() as session:
        [tier] = router.devices
        session.lookahead(query, nprobe=6).result(300)
        first = session.stats
        assert first.lists_moved > 0
        with monkeypatch.context() as broken:
            broken.setattr(type(tier.scanner(router.residency)), "scan", lambda *_, **__: 1 / 0)
            session.search(query, 5, 6)
        assert router.residency.n_resident == 0
        # Lists that are gone are no reason to move none.
        assert tier.recover().result(300)
        budget = first.bytes_moved
        session.lookahead(query, nprobe=6, budget_bytes=budget).result(300)
        assert session.stats.lists_moved == 2 * first.lists_moved
        assert session.stats.bytes_moved == 2 * budget
        # And what came again counts again.
        session.lookahead(query, nprobe=NLIST, budget_bytes=budget).result(300)
        assert session.stats.bytes_moved == 2 * budget
        router.check_invariants()


def test_lists_held_by_two_sessions_stay_until_both_end(index):
    query = clustered(1, seed=7)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20, cache_fraction=0) as router:
        one, two = router.session(), router.session()
        one.lookahead(query, nprobe=4).result(300)
        two.lookahead(query, nprobe=4).result(300)
        held = router.residency.n_resident
        one.close()
        assert router.residency.n_resident == held > 0
        two.close()
        assert router.residency.n_resident == 0


def test_what_a_session_moves_and_does_not_probe_is_counted_as_waste(index):
    near, far = clustered(1, seed=7), clustered(200, seed=9)
    # Of many queries the one that probes least of what the first one does.
    probed = set(index.quantize(near, 4)[0].ravel().tolist())
    shared = [len(probed & set(row)) for row in index.quantize(far, 4)[0].tolist()]
    other = far[[int(np.argmin(shared))]]
    assert min(shared) == 0
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router, router.session() as session:
        session.lookahead(near, nprobe=4).result(300)
        session.search(other, 5, 4)
        stats = session.stats
        assert stats.bytes_wasted == stats.bytes_moved > 0
        assert (stats.bytes_used, stats.hit_rate) == (0, 0.0)


def test_a_plan_adopts_lists_that_a_session_brought(index):
    query = clustered(1, seed=7)
    with Router(index, plan=hand_made_plan(index, np.full(NLIST, -1)), devices=["cpu"]) as router:
        session = router.session()
        session.lookahead(query, nprobe=4).result(300)
        brought = router.residency.resident_lists()
        placement = np.full(NLIST, -1)
        placement[brought] = 0
        router.apply_plan(hand_made_plan(index, placement))
        session.close()
        assert router.residency.resident_lists().tolist() == brought.tolist()


def test_a_plan_keeps_lists_that_a_session_was_still_bringing(index, monkeypatch):
    """The copy is held in the middle; the plan comes; the session ends; the plan's lists stay."""
    write, started, go_on = PageArena.write, threading.Event(), threading.Event()

    def held(self, pages, codes):
        started.set()
        assert go_on.wait(300)
        write(self, pages, codes)

    with Router(index, plan=hand_made_plan(index, np.full(NLIST, -1)), devices=["cpu"]) as router:
        monkeypatch.setattr(PageArena, "write", held)
        session = router.session()
        moved = session.lookahead(clustered(1, seed=7), nprobe=4)
        assert started.wait(300)
        planner = threading.Thread(target=router.apply_plan, args=(hand_made_plan(index, np.zeros(NLIST)),))
        planner.start()
        go_on.set()
        planner.join()
        moved.result(300)
        session.close()
        assert router.residency.n_resident == (index.list_sizes > 0).sum()
        assert router.stats().unplaced_lists == 0


def test_lists_that_landed_before_a_load_failed_stay_the_sessions(index, monkeypatch):
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20, cache_fraction=0) as router:
        tier = router.devices[0]
        write, calls = tier.arena.write, []

        def failing(pages, codes):
            calls.append(len(pages))
            if len(calls) > 5:
                raise RuntimeError("copy failed")
            write(pages, codes)

        monkeypatch.setattr(tier.arena, "write", failing)
        monkeypatch.setattr(tier._copier, "send_pages", 1)
        with router.session() as session:
            session.lookahead(clustered(8), nprobe=NLIST).result(300)
            assert router._served.lookahead.n_held == router.residency.n_resident
        assert router._served.residency.wait_reclaimed(router.residency.version, 30)
        assert (router.residency.n_resident, tier.used_bytes) == (0, tier.kept_bytes)


def test_cancelling_a_lookahead_only_stops_waiting(index):
    with Router(index) as router, router.session() as session:
        assert not session.lookahead(clustered(1)).cancel()
        session.lookahead(clustered(1)).result(300)


def test_closed_session_refuses(index):
    with Router(index, devices=["cpu"], device_budget_bytes=8 << 20) as router:
        session = router.session()
        session.close()
        session.close()
        with pytest.raises(RouterClosedError):
            session.lookahead(clustered(1))
        with pytest.raises(RouterClosedError):
            session.search(clustered(1))


@pytest.mark.parametrize("owner", [None, 7, ["team"]])
def test_an_owner_that_is_no_text_is_refused(index, owner):
    """What cannot be a key would fail on the thread that ends other sessions, too."""
    with Router(index) as router, pytest.raises(InvalidInputError, match=r"owner is .*; expected a text"):
        router.session(owner=owner)


def test_submit_answers_and_counts_as_search_does(index):
    query = clustered(3, seed=7)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router, router.session() as session:
        session.lookahead(query, nprobe=8).result(300)
        told = []
        for number in range(1, 4):
            future = session.submit(query, 5, 8, on_batch=told.append)
            check(index, query, 5, 8, future.result(300))
            # Counted before the future knew.
            assert (session.stats.searches, session.stats.hit_rate) == (number, 1.0)
        assert session.stats.lists_used == session.stats.lists_moved
    assert [report.n_queries for report in told] == [3, 3, 3]


def test_a_session_may_end_while_its_searches_wait(index, monkeypatch):
    query = clustered(2, seed=7)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router:
        session = router.session()
        session.lookahead(query, nprobe=8).result(300)
        entered, resume = held_quantizer(index, monkeypatch)
        first = session.submit(query, 5, 8)
        assert entered.wait(300)
        second = session.submit(query, 5, 8)
        session.close()
        with pytest.raises(RouterClosedError, match="session"):
            session.submit(query)
        resume.set()
        monkeypatch.undo()
        for future in (first, second):
            check(index, query, 5, 8, future.result(300))
        router.check_invariants()


def test_a_cancelled_search_of_a_session_is_not_counted(index, monkeypatch):
    query = clustered(2, seed=7)
    with Router(index) as router, router.session() as session:
        entered, resume = held_quantizer(index, monkeypatch)
        futures = [session.submit(query, 5, 8)]
        assert entered.wait(300)
        futures += [session.submit(query, 5, 8) for _ in range(2)]
        assert futures[1].cancel()
        resume.set()
        for future in (futures[0], futures[2]):
            check(index, query, 5, 8, future.result(300))
        monkeypatch.undo()
        assert session.stats.searches == 2


def test_bad_arguments_of_submit_are_raised_at_once(index):
    with Router(index) as router, router.session() as session:
        with pytest.raises(InvalidInputError, match="k is 0"):
            session.submit(clustered(1), 0)
        router.close()
        with pytest.raises(RouterClosedError):
            session.submit(clustered(1))


# Windows that were measured
