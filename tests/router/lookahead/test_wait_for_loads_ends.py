"""Every search that waits for lists is answered once, whatever becomes of them, of its batch and of the router."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref

import numpy as np
import pytest

from hybridindex.errors import RouterError
from hybridindex.router import Router
from hybridindex.router.batch.split import split_probes
from hybridindex.router.engine import Engine
from tests.clustered import clustered, small_index
from tests.router.slow_copies import NPROBE, SOON_S, Gate, one_batch, slow, submitted, until
from tests.router.test_router import check


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", nprobe=NPROBE) as index:
        yield index


@pytest.mark.parametrize("end", ["session", "device", "cancelled", "router"])
def test_what_waits_is_answered_whatever_becomes_of_the_lists(index, end):
    query = clustered(1, seed=7)
    with slow(index) as it:
        session = it.router.session()
        it.fly(session, query)
        answer = submitted("submit", session, query)
        it.until_a_search_waits()
        if end == "router":
            closing = threading.Thread(target=it.router.close)
            closing.start()
            until(lambda: it.router._served.wait_for_loads._closed)
            check(index, query, 5, NPROBE, answer())
            it.gate.let_through()
            closing.join(SOON_S)
            return
        if end == "session":
            session.close()
        elif end == "device":
            it.router.devices[0].fail(RuntimeError("the device fell off the bus"))
        else:
            it.router._served.lookahead.release(session._lists)
        it.gate.let_through()
        check(index, query, 5, NPROBE, answer())
        assert it.waits == 1
        assert not it.flights
        session.close()


def test_those_that_wait_leave_their_batch_to_the_others(index, monkeypatch):
    query = clustered(1, seed=7)
    others = clustered(3, seed=8)
    splits = []
    monkeypatch.setattr(
        "hybridindex.router.engine.split_probes", lambda *args: (splits.append(args[:2]), split_probes(*args))[1]
    )
    with slow(index) as it, it.router.session() as session:
        it.fly(session, query)
        with one_batch(monkeypatch):
            queued = [it.router.submit(others[0], 3, 1), session.submit(query, 5, NPROBE)]
            queued += [it.router.submit(others[1], 4, 1), session.submit(query, 7, 6)]
            queued.append(it.router.submit(others[2], 5, 1))
        for n, number in enumerate((0, 2, 4)):
            check(index, others[n : n + 1], 3 + n, 1, queued[number].result(SOON_S))
        until(lambda: len(it.router._served.wait_for_loads._waiting) == 2)
        # The rows that are left, with what belongs to them.
        [split] = splits
        for given, expected in zip(split, index.quantize(others, 1), strict=True):
            np.testing.assert_allclose(given, expected, rtol=1e-5)
        assert it.router.stats().largest_batch == 3
        # Each for its own lists, whatever the others of the batch probe.
        nearest = index.quantize(query, NPROBE)[0][0].tolist()
        for waiting in it.router._served.wait_for_loads._waiting:
            assert set(waiting.lists.tolist()) <= set(nearest[: waiting.request.nprobe])
        it.gate.let_through()
        check(index, query, 5, NPROBE, queued[1].result(SOON_S))
        check(index, query, 7, 6, queued[3].result(SOON_S))
        assert it.router.stats().requests == 5


def test_one_that_is_left_alone_probes_no_more_than_it_asked_for(index, monkeypatch):
    query, other = clustered(1, seed=7), clustered(1, seed=8)
    with slow(index) as it, it.router.session() as session:
        it.fly(session, query)
        with one_batch(monkeypatch):
            queued = session.submit(query, 5, NPROBE), it.router.submit(other, 5, 2)
        check(index, other, 5, 2, queued[1].result(SOON_S))
        it.gate.let_through()
        check(index, query, 5, NPROBE, queued[0].result(SOON_S))


def test_a_batch_that_fails_leaves_those_alone_that_wait(index, monkeypatch):
    query, other = clustered(1, seed=7), clustered(1, seed=8)
    with slow(index) as it, it.router.session() as session:
        it.fly(session, query)
        with monkeypatch.context() as broken:
            broken.setattr("hybridindex.router.engine.split_probes", lambda *_: 1 / 0)
            with one_batch(monkeypatch):
                queued = session.submit(query, 5, NPROBE), it.router.submit(other, 5, 1)
            with pytest.raises(ZeroDivisionError):
                queued[1].result(SOON_S)
        assert not queued[0].done()
        it.gate.let_through()
        check(index, query, 5, NPROBE, queued[0].result(SOON_S))


def test_a_lookahead_that_does_not_set_out_leaves_nothing_on_its_way(index, monkeypatch):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        monkeypatch.setattr(it.router.devices[0], "load", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.lookahead(query).result(SOON_S)
        assert not it.flights


def test_a_decision_that_fails_costs_only_the_wait(index, monkeypatch, caplog):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        monkeypatch.setattr("hybridindex.router.lookahead.wait_for_loads.choose_wait", lambda *_: 1 / 0)
        it.fly(session, query)
        check(index, query, 5, NPROBE, session.search(query, 5, NPROBE))
        assert "could not be told" in caplog.text


def test_a_search_that_waits_when_the_engine_has_died_fails(index, monkeypatch):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        it.fly(session, query)
        future = session.submit(query, 5, NPROBE)
        it.until_a_search_waits()
        monkeypatch.setattr(Engine, "_run_once", lambda _: 1 / 0)
        monkeypatch.setattr(it.router._served.wait_for_loads._waiting[0], "resubmit", lambda _: 1 / 0)
        it.gate.let_through()
        with pytest.raises(ZeroDivisionError):
            future.result(SOON_S)


def test_when_the_own_thread_dies_nobody_waits_any_more(index, monkeypatch, caplog):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        wait_for_loads = it.router._served.wait_for_loads
        it.fly(session, query)
        future = session.submit(query, 5, NPROBE)
        it.until_a_search_waits()
        monkeypatch.setattr(wait_for_loads, "_take_going", lambda: 1 / 0)
        with wait_for_loads._changed:
            wait_for_loads._changed.notify()
        check(index, query, 5, NPROBE, future.result(SOON_S))
        assert "wait for no lists any more" in caplog.text
        check(index, query, 5, NPROBE, session.search(query, 5, NPROBE))
        monkeypatch.undo()


def test_what_was_let_go_is_kept_by_nobody(index):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        it.fly(session, query)
        future = session.submit(query, 5, NPROBE)
        it.until_a_search_waits()
        kept = weakref.ref(future)
        it.gate.let_through()
        future.result(SOON_S)
        del future
        until(lambda: (gc.collect(), kept() is None)[1])


def test_a_callback_on_the_own_thread_may_not_close_the_router(index, monkeypatch):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        it.fly(session, query)
        future = session.submit(query, 5, NPROBE)
        it.until_a_search_waits()
        monkeypatch.setattr(it.router._served.wait_for_loads._waiting[0], "resubmit", lambda _: 1 / 0)
        refused = []

        def close(_future):
            with pytest.raises(RouterError, match="own thread"):
                it.router.close()
            refused.append(threading.current_thread().name)

        future.add_done_callback(close)
        it.gate.let_through()
        until(lambda: refused)
        assert refused == ["hybridindex-wait-for-loads"]


def test_nobody_waits_in_a_router_that_closes(index):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        it.fly(session, query)
        it.router._served.wait_for_loads.close()
        check(index, query, 5, NPROBE, session.search(query, 5, NPROBE))
        assert it.waits == 0


def test_a_router_that_does_not_open_leaves_no_thread_behind(index, monkeypatch):
    before = set(threading.enumerate())
    monkeypatch.setattr("hybridindex.router.served.Engine", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Router(index, devices=["cpu"], device_budget_bytes=32 << 20)
    assert set(threading.enumerate()) <= before


def test_a_closed_router_hears_of_no_list(index):
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router:
        assert len(router._served.residency.listeners) == 1
    assert router._served.residency.listeners == []


def test_many_sessions_at_once(index):
    """Gates that open at random; every answer is right, and nothing waits for ever."""
    queries = clustered(64, seed=11)
    numbers = itertools.count()
    with slow(index, devices=["cpu", "cpu"]) as it:
        second = Gate(it.router.devices[1])
        stop, wrong = threading.Event(), []

        def open_gates():
            rng = np.random.default_rng(3)
            while not stop.wait(2e-3 * rng.random()):
                it.gate.let_through(int(rng.integers(1, 9)))
                second.let_through(int(rng.integers(1, 9)))

        def client():
            try:
                while (n := next(numbers)) < len(queries):
                    with it.router.session() as session:
                        session.lookahead(queries[n], nprobe=NPROBE)
                        time.sleep(1e-3 * (n % 3))
                        answers = [session.submit(queries[n], 5, NPROBE) for _ in range(2)]
                        for answer in answers:
                            check(index, queries[n : n + 1], 5, NPROBE, answer.result(SOON_S))
            except BaseException as error:  # noqa: BLE001 - looked at below
                wrong.append(error)

        gates = threading.Thread(target=open_gates)
        clients = [threading.Thread(target=client) for _ in range(6)]
        for thread in (gates, *clients):
            thread.start()
        for thread in clients:
            thread.join(SOON_S)
        stop.set()
        gates.join()
        second.let_through()
        assert not wrong, wrong
        assert it.waits > 0
        assert not it.router._served.wait_for_loads._waiting
