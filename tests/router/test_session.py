"""Sessions: what lookahead moves, what stays cached, what a plan takes over; answers stay those of plain IVF."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError, RouterClosedError, RouterError
from hybridindex.paging import scratch_for_budget
from hybridindex.router import Router
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.types import LLMProfile
from tests.clustered import DIM, NLIST, clustered, hand_made_plan, small_index
from tests.router.test_router import check
from tests.stuck import Stuck


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", nprobe=8) as index:
        yield index


def test_lookahead_moves_bytes_and_close_gives_them_back(index):
    query = clustered(1, seed=7)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20, cache_fraction=0) as router:
        with router.session() as session:
            session.lookahead(query, nprobe=8).result(30)
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
        session.lookahead(query, nprobe=4).result(30)
        first = session.stats
        session.lookahead(query, nprobe=4).result(30)
        assert session.stats.bytes_moved == first.bytes_moved
        session.lookahead(query, nprobe=9).result(30)
        assert session.stats.lookaheads == 3
        assert session.stats.lists_moved == 9 - (index.list_sizes[router._index.quantize(query, 9)[0]] == 0).sum()


def test_lookahead_keeps_its_budget_and_skips_what_does_not_fit(index):
    query = clustered(1, seed=7)
    page = 65_536 // (DIM * 4) * DIM * 4
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router, router.session() as session:
        session.lookahead(query, nprobe=NLIST, budget_bytes=3 * page).result(30)
        assert session.stats.bytes_moved <= 3 * page
        assert session.stats.lists_skipped > 0


@pytest.mark.parametrize("why", ["failed", "no room", "codec", "no devices"])
def test_lists_that_no_device_takes_are_counted_as_skipped(index, tmp_path, why):
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
        session.lookahead(query, nprobe=5).result(30)
        probed = np.unique(index.quantize(index.transform(query), 5)[0])
        expected = 0 if why == "no devices" else int((index.list_sizes[probed] > 0).sum())
        assert session.stats.lists_skipped == router.stats().lookahead_skipped_lists == expected
        assert session.stats.lists_moved == 0


def test_what_went_with_a_device_counts_against_a_budget_no_more(index, monkeypatch):
    query = clustered(1, seed=7)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router, router.session() as session:
        [tier] = router.devices
        session.lookahead(query, nprobe=6).result(30)
        first = session.stats
        assert first.lists_moved > 0
        with monkeypatch.context() as broken:
            broken.setattr(type(tier.scanner(router.residency)), "scan", lambda *_, **__: 1 / 0)
            session.search(query, 5, 6)
        assert router.residency.n_resident == 0
        # Lists that are gone are no reason to move none.
        assert tier.recover().result(30)
        budget = first.bytes_moved
        session.lookahead(query, nprobe=6, budget_bytes=budget).result(30)
        assert session.stats.lists_moved == 2 * first.lists_moved
        assert session.stats.bytes_moved == 2 * budget
        # And what came again counts again.
        session.lookahead(query, nprobe=NLIST, budget_bytes=budget).result(30)
        assert session.stats.bytes_moved == 2 * budget
        router.check_invariants()


def test_lists_held_by_two_sessions_stay_until_both_end(index):
    query = clustered(1, seed=7)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20, cache_fraction=0) as router:
        one, two = router.session(), router.session()
        one.lookahead(query, nprobe=4).result(30)
        two.lookahead(query, nprobe=4).result(30)
        held = router.residency.n_resident
        one.close()
        assert router.residency.n_resident == held > 0
        two.close()
        assert router.residency.n_resident == 0


def test_lists_stay_cached_and_serve_the_next_session(index):
    query = clustered(1, seed=7)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20, cache_fraction=1.0) as router:
        with router.session() as session:
            session.lookahead(query, nprobe=8).result(30)
            check(index, query, 5, 8, session.search(query, 5, 8))
            moved = session.stats
        assert moved.bytes_used == moved.bytes_moved > 0
        assert (moved.bytes_wasted, moved.searches, moved.hit_rate) == (0, 1, 1.0)
        assert router.stats().cached_lists == moved.lists_moved
        with router.session() as session:
            session.lookahead(query, nprobe=8).result(30)
            assert session.stats.bytes_moved == 0
            assert router.stats().cached_lists == 0
            assert session.search(query, 5, 8).hit_rate.tolist() == [1.0]
            assert session.stats.lists_used == moved.lists_moved
        router.check_invariants()


def test_what_is_cached_costs_a_session_nothing_of_its_budget(index):
    query = clustered(1, seed=7)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20, cache_fraction=1.0) as router:
        with router.session() as session:
            session.lookahead(query, nprobe=8).result(30)
            budget = session.stats.bytes_moved
        with router.session(lookahead_bytes=budget) as session:
            session.lookahead(query, nprobe=16).result(30)
            # The same lists again, and as many bytes of others.
            assert budget // 2 < session.stats.bytes_moved <= budget
            assert session.search(query, 5, 8).hit_rate.tolist() == [1.0]


def test_what_a_session_moves_and_does_not_probe_is_counted_as_waste(index):
    near, far = clustered(1, seed=7), clustered(200, seed=9)
    # Of many queries the one that probes least of what the first one does.
    probed = set(index.quantize(near, 4)[0].ravel().tolist())
    shared = [len(probed & set(row)) for row in index.quantize(far, 4)[0].tolist()]
    other = far[[int(np.argmin(shared))]]
    assert min(shared) == 0
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router, router.session() as session:
        session.lookahead(near, nprobe=4).result(30)
        session.search(other, 5, 4)
        stats = session.stats
        assert stats.bytes_wasted == stats.bytes_moved > 0
        assert (stats.bytes_used, stats.hit_rate) == (0, 0.0)


def arena_of(index, n_pages):
    """A budget whose arena has ``n_pages`` pages."""
    page = 65_536 // (DIM * 4) * DIM * 4
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
                session.lookahead(query, nprobe=6).result(30)
                assert session.stats.lists_skipped == 0  # whatever is cached makes way
                check(index, query, 5, 8, session.search(query, 5, 8))
            # The answer is there before its lease ends.
            assert router._residency.wait_reclaimed(router.residency.version, 30)
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
            session.lookahead(index.centroids[[used, idle]], nprobe=1).result(30)
        assert router.residency.resident_lists().tolist() == [used, idle]
        with router.session() as session:
            session.search(index.centroids[[used]], 5, 1)
            session.lookahead(index.centroids[[fresh]], nprobe=1).result(30)
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
        assert (router._opening.list_bytes[np.concatenate([first, second, third])] == tier.geometry.page_bytes).all()
        near = {name: index.centroids[lists] for name, lists in (("a", first), ("b", second), ("c", third))}
        with router.session() as session:
            session.lookahead(near["a"], nprobe=1).result(30)
        assert router.stats().cached_lists == 4
        write, entered, go_on = PageArena.write, threading.Event(), threading.Event()

        def held(self, pages, codes):
            entered.set()
            assert go_on.wait(30)
            write(self, pages, codes)

        monkeypatch.setattr(PageArena, "write", held)
        with router.session() as slow, router.session() as other:
            moving = slow.lookahead(near["b"], nprobe=1)
            assert entered.wait(30)
            waiting = other.lookahead(near["c"], nprobe=1)
            while not router._lookahead._jobs.empty() or len(tier._moves) < 2:
                time.sleep(0.001)
            go_on.set()
            moving.result(30)
            waiting.result(30)
            assert router.stats().cache_evicted_lists == 0
            assert router.residency.n_resident == 12


def test_drafts_that_wait_together_are_shared_out_over_devices(index):
    options = {"devices": ["cpu", "cpu"], "device_budget_bytes": 32 << 20}
    with Router(index, **options) as router:
        sessions = [router.session() for _ in range(8)]
        entered, resume = threading.Event(), threading.Event()
        quantize = index.quantize

        def held(queries, nprobe):
            entered.set()
            assert resume.wait(30)
            return quantize(queries, nprobe)

        index.quantize = held
        try:
            moves = [sessions[0].lookahead(clustered(1, seed=0), nprobe=3)]
            assert entered.wait(30)
            moves += [s.lookahead(clustered(1, seed=i), nprobe=3) for i, s in enumerate(sessions[1:], 1)]
        finally:
            resume.set()
            del index.quantize
        for move in moves:
            move.result(30)
        assert all(len(router.residency.resident_lists(i)) for i in (0, 1))
        for i, session in enumerate(sessions):
            result = session.search(clustered(1, seed=i), 5, 3)
            check(index, clustered(1, seed=i), 5, 3, result)
            assert result.hit_rate.tolist() == [1.0]
            session.close()
        router.check_invariants()


def test_alike_drafts_go_to_one_device_however_many_queries_they_have(index, monkeypatch):
    """Four drafts wait together for two devices: two at one place of the space, two at another."""
    lists = np.flatnonzero(index.list_sizes)
    one, other = index.centroids[lists[0]], index.centroids[lists[1]]
    drafts = [np.stack([one]), np.stack([other, other]), np.stack([one, one]), np.stack([other])]
    with Router(index, devices=["cpu", "cpu"], device_budget_bytes=32 << 20) as router:
        entered, resume = held_quantizer(index, monkeypatch)
        first = router.session()
        moves = [first.lookahead(index.centroids[lists[2:3]], nprobe=1)]
        assert entered.wait(30)
        sessions = [router.session() for _ in drafts]
        moves += [s.lookahead(draft, nprobe=2) for s, draft in zip(sessions, drafts, strict=True)]
        resume.set()
        for move in moves:
            move.result(30)
        for draft in drafts:
            [device] = np.unique(router.residency.list_device[np.unique(index.quantize(draft, 1)[0])])
            assert device >= 0
        held = [set(router.residency.resident_lists(device).tolist()) for device in (0, 1)]
        assert len(held[0] & set(lists[:2])) == len(held[1] & set(lists[:2])) == 1


def test_lookaheads_that_cannot_be_quantized_fail_and_the_next_one_goes_on(index, monkeypatch):
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router, router.session() as session:
        monkeypatch.setattr(index, "quantize", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.lookahead(clustered(1), nprobe=4).result(30)
        monkeypatch.undo()
        session.lookahead(clustered(1), nprobe=4).result(30)
        assert session.stats.lists_moved > 0


def test_a_window_asks_the_plan_once(index):
    """Pipelines have few windows; whoever has very many does not fill the memory with answers."""
    plan, asked = hand_made_plan(index, np.full(NLIST, -1)), []

    def budget(window_ms, *, share_bytes, pinned):
        asked.append(window_ms)
        return SimpleNamespace(nbytes=int(window_ms))

    plan.lookahead_budget = budget
    with Router(index, plan=plan, devices=["cpu"]) as router:
        for window in (5, 6, 5, 6):
            router.session(window_ms=window).close()
        assert asked == [5, 6]
        for window in range(1, 1000):
            router.session(window_ms=window).close()
        assert len(router._windows._known) < 500


def test_a_plan_adopts_lists_that_a_session_brought(index):
    query = clustered(1, seed=7)
    with Router(index, plan=hand_made_plan(index, np.full(NLIST, -1)), devices=["cpu"]) as router:
        session = router.session()
        session.lookahead(query, nprobe=4).result(30)
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
        assert go_on.wait(30)
        write(self, pages, codes)

    with Router(index, plan=hand_made_plan(index, np.full(NLIST, -1)), devices=["cpu"]) as router:
        monkeypatch.setattr(PageArena, "write", held)
        session = router.session()
        moved = session.lookahead(clustered(1, seed=7), nprobe=4)
        assert started.wait(30)
        planner = threading.Thread(target=router.apply_plan, args=(hand_made_plan(index, np.zeros(NLIST)),))
        planner.start()
        go_on.set()
        planner.join()
        moved.result(30)
        session.close()
        assert router.residency.n_resident == (index.list_sizes > 0).sum()
        assert router.stats().unplaced_lists == 0


def test_a_lookahead_that_cannot_start_says_so_and_the_next_one_goes_on(index, monkeypatch):
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router:
        tier = router.devices[0]

        def broken(*args, **kwargs):
            raise RuntimeError("no thread is left")

        with router.session() as session:
            monkeypatch.setattr(tier, "load", broken)
            with pytest.raises(RuntimeError, match="no thread"):
                session.lookahead(clustered(1), nprobe=4).result(30)
            monkeypatch.undo()
            session.lookahead(clustered(1), nprobe=4).result(30)
            assert session.stats.lists_moved > 0


@pytest.mark.parametrize("what", ["close", "apply_plan"])
def test_a_lookahead_callback_may_not_wait_for_its_own_thread(index, what):
    plan = hand_made_plan(index, np.zeros(NLIST))
    refused = []
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router:

        def callback(_future):
            try:
                router.close() if what == "close" else router.apply_plan(plan)
            except RouterError as error:
                refused.append(str(error))
            raise SystemExit  # and what it raises ends no thread

        entered, resume = threading.Event(), threading.Event()
        quantize = index.quantize

        def held(queries, nprobe):
            entered.set()
            assert resume.wait(30)
            return quantize(queries, nprobe)

        index.quantize = held
        try:
            with router.session() as session:
                first = session.lookahead(clustered(1), nprobe=4)
                assert entered.wait(30)
                first.add_done_callback(callback)
                resume.set()
                first.result(30)
                session.lookahead(clustered(1, seed=2), nprobe=4).result(30)
        finally:
            resume.set()
            del index.quantize
        assert len(refused) == 1
        assert "own thread" in refused[0]
        router.apply_plan(plan)
        check(index, clustered(4), 10, 8, router.search(clustered(4), 10, 8))


def test_a_callback_on_the_thread_that_moves_lists_may_not_close_the_router(index):
    refused = []
    with (
        Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router,
        Stuck(PageArena, "write") as write,
        router.session() as session,
    ):

        def close(_future):
            try:
                router.close()
            except Exception as error:  # noqa: BLE001 - shown below
                refused.append((threading.current_thread().name, error))

        moving = session.lookahead(clustered(1), nprobe=4)
        assert write.begun.wait(30)
        moving.add_done_callback(close)
        write.go_on.set()
        moving.result(30)
        session.lookahead(clustered(1, seed=2), nprobe=4).result(30)
    [(thread, error)] = refused
    assert thread.startswith("hybridindex-mover")
    assert isinstance(error, RouterError)


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
            session.lookahead(clustered(8), nprobe=NLIST).result(30)
            assert router._lookahead.n_held == router.residency.n_resident
        assert router._residency.wait_reclaimed(router.residency.version, 30)
        assert (router.residency.n_resident, tier.used_bytes) == (0, tier.kept_bytes)


def test_cancelling_a_lookahead_only_stops_waiting(index):
    with Router(index) as router, router.session() as session:
        assert not session.lookahead(clustered(1)).cancel()
        session.lookahead(clustered(1)).result(30)


def test_closed_session_refuses(index):
    with Router(index, devices=["cpu"], device_budget_bytes=8 << 20) as router:
        session = router.session()
        session.close()
        session.close()
        with pytest.raises(RouterClosedError):
            session.lookahead(clustered(1))
        with pytest.raises(RouterClosedError):
            session.search(clustered(1))


def held_quantizer(index, monkeypatch):
    """Batches wait for the second event; the first says that one does."""
    entered, resume = threading.Event(), threading.Event()
    quantize = index.quantize

    def held(queries, nprobe):
        entered.set()
        assert resume.wait(30)
        return quantize(queries, nprobe)

    monkeypatch.setattr(index, "quantize", held)
    return entered, resume


def test_submit_answers_and_counts_as_search_does(index):
    query = clustered(3, seed=7)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router, router.session() as session:
        session.lookahead(query, nprobe=8).result(30)
        told = []
        for number in range(1, 4):
            future = session.submit(query, 5, 8, on_batch=told.append)
            check(index, query, 5, 8, future.result(30))
            # Counted before the future knew.
            assert (session.stats.searches, session.stats.hit_rate) == (number, 1.0)
        assert session.stats.lists_used == session.stats.lists_moved
    assert [report.n_queries for report in told] == [3, 3, 3]


def test_a_session_may_end_while_its_searches_wait(index, monkeypatch):
    query = clustered(2, seed=7)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router:
        session = router.session()
        session.lookahead(query, nprobe=8).result(30)
        entered, resume = held_quantizer(index, monkeypatch)
        first = session.submit(query, 5, 8)
        assert entered.wait(30)
        second = session.submit(query, 5, 8)
        session.close()
        with pytest.raises(RouterClosedError, match="session"):
            session.submit(query)
        resume.set()
        monkeypatch.undo()
        for future in (first, second):
            check(index, query, 5, 8, future.result(30))
        router.check_invariants()


def test_a_cancelled_search_of_a_session_is_not_counted(index, monkeypatch):
    query = clustered(2, seed=7)
    with Router(index) as router, router.session() as session:
        entered, resume = held_quantizer(index, monkeypatch)
        futures = [session.submit(query, 5, 8)]
        assert entered.wait(30)
        futures += [session.submit(query, 5, 8) for _ in range(2)]
        assert futures[1].cancel()
        resume.set()
        for future in (futures[0], futures[2]):
            check(index, query, 5, 8, future.result(30))
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


def planned_in(index, **facts):
    """A plan whose copies take a second for a MiB, for an LLM with two measured steps."""
    plan, asked = hand_made_plan(index, np.full(NLIST, -1)), []
    plan.request.llm = LLMProfile(kv_cache_bytes=1, throughput_rps=1.0, generation_s={"narrow": 0.5, "answer": 2.0})

    def budget(window_ms, *, share_bytes, pinned):
        asked.append((window_ms, pinned))
        return SimpleNamespace(nbytes=min(share_bytes, int(window_ms * (1 << 20) / 1e3)))

    accesses = SimpleNamespace(list_accesses=np.zeros(NLIST))
    plan.analysis = SimpleNamespace(profile=SimpleNamespace(access=accesses))
    plan.lookahead_budget = budget
    plan.copy_bytes_per_s = lambda *, pinned: (4 if pinned else 1) << 20
    return plan, asked


def test_what_is_kept_for_sessions_follows_from_the_longest_step_and_the_bandwidth(index, caplog):
    plan, _ = planned_in(index)
    page = 65_536 // (DIM * 4) * DIM * 4
    caplog.set_level("INFO", logger="hybridindex")
    for options, nbytes, why in (
        ({}, 2 << 20, "2000 ms of generation at 1.00 MiB/s"),
        ({"window_ms": 250}, 1 << 18, "250 ms of generation at 1.00 MiB/s"),
        ({"window_ms": 250, "pin_host_lists": 1 << 20}, 1 << 20, "250 ms of generation at 4.00 MiB/s"),
        ({"lookahead_bytes": 1 << 17}, 1 << 17, "as configured"),
        ({"device_budget_bytes": 1 << 18}, (1 << 18) * 7 // 8 // page * page, "2000 ms of generation"),
    ):
        caplog.clear()
        with Router(index, plan=plan, devices=["cpu"], **options) as router:
            [tier] = router.devices
            most = int(router._opening.list_bytes.sum())
            assert tier.arena.nbytes == min(-(-nbytes // page) * page, most)
            assert f"for lookahead ({why}" in caplog.text


def test_each_lookahead_has_the_window_of_its_step(index):
    plan, asked = planned_in(index)
    with Router(index, plan=plan, devices=["cpu"]) as router:
        assert router.window_ms == 2000
        with router.session() as session:
            session.lookahead(clustered(1), nprobe=4, step="narrow").result(30)
            session.lookahead(clustered(1), nprobe=4, window_ms=70).result(30)
            session.lookahead(clustered(1), nprobe=4).result(30)
            router.session(step="answer").close()
        assert asked == [(2000, False), (500, False), (70, False)]
        with pytest.raises(InvalidInputError, match="step is 'rewrite'; expected one of narrow, answer"):
            router.session(step="rewrite")
        with router.session() as session, pytest.raises(InvalidInputError, match="window_ms and step are both given"):
            session.lookahead(clustered(1), window_ms=3, step="narrow")


def test_a_round_moves_no_more_than_its_window_hides(index):
    plan, _ = planned_in(index)
    page = 65_536 // (DIM * 4) * DIM * 4
    window_ms = 2.5 * page / (1 << 20) * 1e3
    with Router(index, plan=plan, devices=["cpu"], lookahead_bytes=1 << 30) as router, router.session() as session:
        session.lookahead(clustered(1), nprobe=NLIST, window_ms=window_ms).result(30)
        assert session.stats.lists_moved == 2
        session.lookahead(clustered(1), nprobe=NLIST, window_ms=window_ms).result(30)
        assert session.stats.lists_moved == 4
