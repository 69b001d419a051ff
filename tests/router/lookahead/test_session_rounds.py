"""Rounds of the sessions' lookahead: which drafts wait, where they go, what a window allows, what fails."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError, RouterError
from hybridindex.router import Router
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.types import LLMProfile
from tests.clustered import NLIST, clustered, hand_made_plan, page_bytes_of, small_index
from tests.router.slow_copies import until
from tests.router.test_router import check
from tests.stuck import Stuck, held_quantizer


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", nprobe=8) as index:
        yield index


def test_drafts_that_wait_together_are_shared_out_over_devices(index, monkeypatch):
    options = {"devices": ["cpu", "cpu"], "device_budget_bytes": 32 << 20}
    with Router(index, **options) as router:
        sessions = [router.session() for _ in range(8)]
        entered, resume = held_quantizer(index, monkeypatch)
        try:
            moves = [sessions[0].lookahead(clustered(1, seed=0), nprobe=3)]
            assert entered.wait(300)
            moves += [s.lookahead(clustered(1, seed=i), nprobe=3) for i, s in enumerate(sessions[1:], 1)]
        finally:
            resume.set()
        for move in moves:
            move.result(300)
        assert all(len(router.residency.resident_lists(i)) for i in (0, 1))
        for i, session in enumerate(sessions):
            result = session.search(clustered(1, seed=i), 5, 3)
            check(index, clustered(1, seed=i), 5, 3, result)
            assert result.hit_rate.tolist() == [1.0]
            session.close()
        router.check_invariants()


def test_a_device_whose_copies_hang_holds_up_no_draft_for_another(index, monkeypatch):
    monkeypatch.setattr("hybridindex.router.lookahead.prefetch._MOST_FLIGHTS", 1)
    monkeypatch.setattr(DeviceTier, "retry_due", lambda *_: False)
    with Router(index, devices=["cpu", "cpu"], device_budget_bytes=32 << 20) as router, router.session() as session:
        hung, other = router.devices
        with Stuck(PageArena, "write", lambda arena, *_: arena is hung.arena) as write:
            coming = session.lookahead(clustered(1, seed=0), nprobe=3)
            assert write.begun.wait(300)
            session.lookahead(clustered(1, seed=1), nprobe=3).result(300)
            assert len(router.residency.resident_lists(other.ordinal))
            assert not coming.done()
            # Where no device is left, a draft is skipped and not kept; also one that waited before.
            other.fail(RuntimeError("it burns"))
            waiting = session.lookahead(clustered(1, seed=2), nprobe=3)
            until(router._served.lookahead._jobs.empty)
            hung.fail(RuntimeError("it burns"))
            router._served.recovery._complete()  # as it does every second
            waiting.result(300)
            assert session.stats.lists_skipped == 3
        coming.result(300)


def test_alike_drafts_go_to_one_device_however_many_queries_they_have(index, monkeypatch):
    """Four drafts wait together for two devices: two at one place of the space, two at another."""
    lists = np.flatnonzero(index.list_sizes)
    one, other = index.centroids[lists[0]], index.centroids[lists[1]]
    drafts = [np.stack([one]), np.stack([other, other]), np.stack([one, one]), np.stack([other])]
    with Router(index, devices=["cpu", "cpu"], device_budget_bytes=32 << 20) as router:
        entered, resume = held_quantizer(index, monkeypatch)
        first = router.session()
        moves = [first.lookahead(index.centroids[lists[2:3]], nprobe=1)]
        assert entered.wait(300)
        sessions = [router.session() for _ in drafts]
        moves += [s.lookahead(draft, nprobe=2) for s, draft in zip(sessions, drafts, strict=True)]
        resume.set()
        for move in moves:
            move.result(300)
        for draft in drafts:
            [device] = np.unique(router.residency.list_device[np.unique(index.quantize(draft, 1)[0])])
            assert device >= 0
        held = [set(router.residency.resident_lists(device).tolist()) for device in (0, 1)]
        assert len(held[0] & set(lists[:2])) == len(held[1] & set(lists[:2])) == 1


def test_lookaheads_that_cannot_be_quantized_fail_and_the_next_one_goes_on(index, monkeypatch):
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router, router.session() as session:
        monkeypatch.setattr(index, "quantize", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.lookahead(clustered(1), nprobe=4).result(300)
        monkeypatch.undo()
        session.lookahead(clustered(1), nprobe=4).result(300)
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


def test_a_lookahead_that_cannot_start_says_so_and_the_next_one_goes_on(index, monkeypatch):
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router:
        tier = router.devices[0]

        def broken(*args, **kwargs):
            raise RuntimeError("no thread is left")

        with router.session() as session:
            monkeypatch.setattr(tier, "load", broken)
            with pytest.raises(RuntimeError, match="no thread"):
                session.lookahead(clustered(1), nprobe=4).result(300)
            monkeypatch.undo()
            session.lookahead(clustered(1), nprobe=4).result(300)
            assert session.stats.lists_moved > 0


@pytest.mark.parametrize("what", ["close", "apply_plan"])
def test_a_lookahead_callback_may_not_wait_for_its_own_thread(index, what, monkeypatch):
    plan = hand_made_plan(index, np.zeros(NLIST))
    refused = []
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router:

        def callback(_future):
            try:
                router.close() if what == "close" else router.apply_plan(plan)
            except RouterError as error:
                refused.append(str(error))
            raise SystemExit  # and what it raises ends no thread

        entered, resume = held_quantizer(index, monkeypatch)
        try:
            with router.session() as session:
                first = session.lookahead(clustered(1), nprobe=4)
                assert entered.wait(300)
                first.add_done_callback(callback)
                resume.set()
                first.result(300)
                session.lookahead(clustered(1, seed=2), nprobe=4).result(300)
        finally:
            resume.set()
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
        assert write.begun.wait(300)
        moving.add_done_callback(close)
        write.go_on.set()
        moving.result(300)
        session.lookahead(clustered(1, seed=2), nprobe=4).result(300)
    [(thread, error)] = refused
    assert thread.startswith("hybridindex-mover")
    assert isinstance(error, RouterError)


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
    page = page_bytes_of(index, plan.request.page_bytes)
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
            most = int(router._served.opening.list_bytes.sum())
            assert tier.arena.nbytes == min(-(-nbytes // page) * page, most)
            assert f"for lookahead ({why}" in caplog.text


def test_each_lookahead_has_the_window_of_its_step(index):
    plan, asked = planned_in(index)
    with Router(index, plan=plan, devices=["cpu"]) as router:
        assert router.window_ms == 2000
        with router.session() as session:
            session.lookahead(clustered(1), nprobe=4, step="narrow").result(300)
            session.lookahead(clustered(1), nprobe=4, window_ms=70).result(300)
            session.lookahead(clustered(1), nprobe=4).result(300)
            router.session(step="answer").close()
        assert asked == [(2000, False), (500, False), (70, False)]
        with pytest.raises(InvalidInputError, match="step is 'rewrite'; expected one of narrow, answer"):
            router.session(step="rewrite")
        with router.session() as session, pytest.raises(InvalidInputError, match="window_ms and step are both given"):
            session.lookahead(clustered(1), window_ms=3, step="narrow")


def test_a_round_moves_no_more_than_its_window_hides(index):
    plan, _ = planned_in(index)
    page = page_bytes_of(index, plan.request.page_bytes)
    window_ms = 2.5 * page / (1 << 20) * 1e3
    with Router(index, plan=plan, devices=["cpu"], lookahead_bytes=1 << 30) as router, router.session() as session:
        session.lookahead(clustered(1), nprobe=NLIST, window_ms=window_ms).result(300)
        assert session.stats.lists_moved == 2
        session.lookahead(clustered(1), nprobe=NLIST, window_ms=window_ms).result(300)
        assert session.stats.lists_moved == 4


def test_close_drops_the_lookaheads_that_wait(index, monkeypatch):
    """It used to work off all of them: a flood delayed the end of a daemon by minutes."""
    router = Router(index, devices=["cpu"], device_budget_bytes=32 << 20)
    entered, resume = held_quantizer(index, monkeypatch)
    session = router.session()
    first = session.lookahead(clustered(1), nprobe=4)
    assert entered.wait(300)
    waiting = [session.lookahead(clustered(1, seed=i), nprobe=4) for i in range(50)]
    closer = threading.Thread(target=router.close)
    closer.start()
    for future in waiting:
        future.result(300)
    assert not first.done(), "they were dropped, not worked off"
    resume.set()
    closer.join(300)
    assert not closer.is_alive()
    first.result(0)
    assert router.stats().lookahead_dropped >= 50


def test_drafts_of_a_closed_session_wait_no_more(index, monkeypatch):
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router:
        entered, resume = held_quantizer(index, monkeypatch)
        try:
            closed, other = router.session(), router.session()
            first = closed.lookahead(clustered(1), nprobe=4)
            assert entered.wait(300)
            waiting = [session.lookahead(clustered(1, seed=2), nprobe=4) for session in (closed, other, closed)]
            before = router.stats().lookahead_waiting_bytes
            closed.close()
            waiting[0].result(300)
            waiting[2].result(300)
            assert not waiting[1].done()
            assert not first.done()
            assert router.stats().lookahead_waiting_bytes == before // 3
            router.check_invariants()
        finally:
            resume.set()
        waiting[1].result(300)
        assert other.stats.lists_moved > 0


def test_lookaheads_that_wait_are_bounded_and_a_newcomer_gets_in(index, monkeypatch):
    queue_bytes = 64 << 10
    options = {"device_budget_bytes": 32 << 20, "lookahead_queue_bytes": queue_bytes}
    with Router(index, devices=["cpu"], **options) as router:
        entered, resume = held_quantizer(index, monkeypatch)
        flood, modest = router.session(owner="flood"), router.session(owner="modest")
        futures = [flood.lookahead(clustered(1), nprobe=4)]
        assert entered.wait(300)
        started = [flood.start_lookahead(clustered(8, seed=i), nprobe=4) for i in range(200)]
        assert router.stats().lookahead_waiting_bytes <= queue_bytes
        n_dropped = sum(each.n_dropped for each in started)
        assert router.stats().lookahead_dropped == n_dropped > 100
        assert [each.moving.done() for each in started] == [True] * n_dropped + [False] * (200 - n_dropped)
        own = modest.start_lookahead(clustered(1, seed=7), nprobe=4)
        assert own.n_dropped == 0
        assert router.stats().lookahead_dropped == n_dropped + 1, "the flood made way"
        assert router.stats().lookahead_waiting_bytes <= queue_bytes
        with pytest.raises(InvalidInputError, match="lookahead_queue_bytes"):
            modest.lookahead(clustered(1000), nprobe=4)
        resume.set()
        for future in (*futures, own.moving, *(each.moving for each in started)):
            future.result(300)
        assert modest.stats.lists_moved > 0
        assert router.stats().lookahead_waiting_bytes == 0


def test_a_draft_that_is_a_round_alone_moves_what_it_would_in_one_piece(index, monkeypatch):
    drafts, moved = clustered(40, seed=3), []
    for round_probes in (1 << 19, 64):
        monkeypatch.setattr("hybridindex.router.lookahead.prefetch.ROUND_PROBES", round_probes)
        with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router, router.session() as session:
            session.lookahead(drafts, nprobe=6, budget_bytes=200_000).result(300)
            moved.append((router.residency.resident_lists().tolist(), session.stats))
    assert moved[0] == moved[1]
    assert 0 < len(moved[0][0]) < NLIST
