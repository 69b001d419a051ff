"""Whether a session's search waits for lists on their way, and for how long; every search that waits is answered.

The paces are set by hand: host and device of these tests are the same cores, where waiting never pays. What lands when
is decided by a gate in front of the copies.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridindex.router import Router
from hybridindex.router.deadline import PaceEstimator
from hybridindex.router.engine import Engine
from hybridindex.router.patience import choose_wait
from tests.clustered import NLIST, clustered, small_index
from tests.router.test_router import check

_NPROBE = 8
#: Seconds after which a test fails that hangs.
_SOON_S = 30.0


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", nprobe=_NPROBE) as index:
        yield index


# The decision


@settings(max_examples=300, deadline=None)
@given(
    data=st.lists(st.tuples(st.floats(0, 2), st.integers(0, 1000)), max_size=8),
    others=st.tuples(st.integers(0, 2000), st.integers(0, 2000)),
    host=st.tuples(st.floats(-0.1, 0.1), st.floats(0, 0.01)),
    device=st.tuples(st.floats(-0.1, 0.1), st.floats(0, 0.01)),
)
def test_the_wait_is_the_best_of_all(data, others, host, device):
    landing_s = np.sort(np.array([at for at, _ in data]))
    work = np.array([nbytes for _, nbytes in data], dtype=np.int64)
    host_bytes, device_bytes = others[0] + int(work.sum()), others[1]

    def total(n):
        saved = int(work[:n].sum())
        on_host = max(0.0, host[0] + host[1] * (host_bytes - saved)) if host_bytes > saved else 0.0
        on_device = max(0.0, device[0] + device[1] * (device_bytes + saved)) if device_bytes + saved else 0.0
        return (landing_s[n - 1] if n else 0.0) + max(on_host, on_device)

    totals = [total(n) for n in range(len(data) + 1)]
    wait = choose_wait(landing_s, work, host_bytes, device_bytes, host, device)
    if wait is None:
        # Nothing that is worth having is passed over.
        assert totals[0] - min(totals) <= max(5e-4, 0.1 * totals[0]) + 1e-9
        return
    assert totals[wait.n_lists] == pytest.approx(min(totals), abs=1e-9)
    assert wait.seconds == landing_s[wait.n_lists - 1]
    # Lists that land at the limit save nothing any more.
    assert wait.limit_s - wait.seconds + totals[wait.n_lists] == pytest.approx(totals[0], abs=1e-9)


# Sessions


class Gate:
    """Stands in front of a device's copies: each waits until it is let through."""

    def __init__(self, tier):
        self._send, self._open = tier._copier.send, threading.Semaphore(0)
        tier._copier.send = self.send
        tier._copier.send_pages = 1  # a list or less at a time

    def send(self, writes):
        assert self._open.acquire(timeout=2 * _SOON_S)
        return self._send(writes)

    def let_through(self, n=10_000):
        self._open.release(n)


def pace(seconds, nbytes=1_000_000):
    """An estimator that nothing teaches any better."""
    pace = PaceEstimator()
    pace.observe(nbytes, seconds)
    pace.observe = lambda *_: None
    return pace


class Slow:
    """A router whose copies wait at a gate, and which believes that they pay."""

    def __init__(self, router):
        self.router = router
        self.gate = Gate(router.devices[0])
        patience = router._patience
        patience._host_pace = pace(100.0)
        patience._device_pace = pace(1e-3)
        patience._copy_pace = dict.fromkeys(patience._copy_pace, pace(1.0))

    def fly(self, session, query, **options):
        """Starts a lookahead and returns when its lists are on their way."""
        landed = session.lookahead(query, **options)
        until(lambda: any(self.router._patience._flights.values()))
        return landed

    def until_a_search_waits(self):
        until(lambda: self.router._patience._waiting)

    @property
    def waits(self):
        stage = self.router.stats().stages.get("lookahead_wait")
        return stage.count if stage else 0


@contextmanager
def slow(index, **options):
    options = {"devices": ["cpu"], "device_budget_bytes": 32 << 20, "cache_fraction": 0} | options
    with Router(index, **options) as router:
        slow = Slow(router)
        try:
            yield slow
            router.check_invariants()
        finally:
            slow.gate.let_through()


def until(condition):
    ends = time.monotonic() + _SOON_S
    while not condition():
        assert time.monotonic() < ends, "it never came so far"
        time.sleep(1e-3)


def submitted(way, session, query, **options):
    """A search, by any of its three ways: a function that waits for the answer."""
    if way == "submit":
        future = session.submit(query, 5, _NPROBE, **options)
        return lambda: future.result(_SOON_S)
    found = []

    def search():
        if way == "search":
            found.append(session.search(query, 5, _NPROBE, **options))
        else:
            found.append(asyncio.run(session.asearch(query, 5, _NPROBE, **options)))

    thread = threading.Thread(target=search, daemon=True)
    thread.start()

    def answer():
        thread.join(_SOON_S)
        return found[0]

    return answer


@pytest.mark.parametrize("way", ["search", "submit", "asearch"])
def test_a_search_waits_for_the_lists_that_it_probes(index, way):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        it.fly(session, query, nprobe=_NPROBE)
        answer = submitted(way, session, query)
        it.until_a_search_waits()
        # Others go on meanwhile, also those of the same session that probe other lists.
        check(index, -query, 5, _NPROBE, it.router.search(-query, 5, _NPROBE))
        assert it.router._patience._waiting
        time.sleep(0.1)
        it.gate.let_through()
        result = answer()
        check(index, query, 5, _NPROBE, result)
        assert result.hit_rate.tolist() == [1.0]
        assert it.waits == 1
        assert session.stats.searches == 1
        # Nothing is held for it any more, and what it waited is not the queue's.
        until(lambda: it.router._engine._slots.qsize() == 2)
        stages = it.router.stats().stages
        assert stages["lookahead_wait"].seconds > 0.05 > stages["queue"].seconds


def test_it_waits_for_no_list_that_it_does_not_probe(index):
    query = clustered(1, seed=7)
    probes, _ = index.quantize(query, NLIST)
    # One that brings some of the others before the last that counts, and some after.
    drafts = clustered(20, seed=8)
    ranks = [np.flatnonzero(np.isin(lists, probes[0, :_NPROBE])) for lists in index.quantize(drafts, NLIST)[0]]
    draft = next(d for d, at in zip(drafts, ranks, strict=True) if at[-1] not in (_NPROBE - 1, NLIST - 1))
    with slow(index) as it, it.router.session() as session:
        it.fly(session, draft, nprobe=NLIST)
        answer = submitted("submit", session, query)
        it.until_a_search_waits()
        sent = it.router._patience._flights[0][0].lists.tolist()
        [waiting] = it.router._patience._waiting
        assert set(waiting.lists.tolist()) == {i for i in probes[0, :_NPROBE].tolist() if index.list_sizes[i]}
        last = max(sent.index(i) for i in waiting.lists.tolist())
        pages = it.router.devices[0].geometry.pages_for(index.list_sizes[sent[: last + 1]])
        it.gate.let_through(int(pages.sum()))
        # Those behind are still at the gate.
        result = answer()
        check(index, query, 5, _NPROBE, result)
        assert result.hit_rate.tolist() == [1.0]
        assert it.router._patience._flights[0]
        assert it.router.stats().stages["lookahead_wait"].seconds < waiting.until_s - waiting.since_s


@pytest.mark.parametrize("copies_s", [200.0, None])
def test_it_begins_at_once_where_waiting_does_not_pay(index, copies_s):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        # None: nothing is known of copies.
        it.router._patience._copy_pace[0] = PaceEstimator() if copies_s is None else pace(copies_s)
        it.fly(session, query)
        result = session.search(query, 5, _NPROBE)
        check(index, query, 5, _NPROBE, result)
        assert result.hit_rate.tolist() == [0.0]
        assert it.waits == 0


def test_it_begins_at_once_where_the_router_is_told_so(index):
    query = clustered(1, seed=7)
    with slow(index, wait_for_lists=False) as it, it.router.session() as session:
        it.fly(session, query)
        check(index, query, 5, _NPROBE, session.search(query, 5, _NPROBE))
        assert it.waits == 0


def test_other_searches_wait_for_nothing(index):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session, it.router.session() as other:
        it.fly(session, query)
        check(index, query, 5, _NPROBE, it.router.search(query, 5, _NPROBE))
        check(index, query, 5, _NPROBE, other.search(query, 5, _NPROBE))
        assert it.waits == 0


def test_copies_that_stall_are_waited_for_no_longer_than_they_could_pay(index):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        patience = it.router._patience
        scanned = int(index.list_bytes[index.quantize(query, _NPROBE)[0]].sum())
        # The host would take 0.2 s: copies that never come cost as much once more, at most.
        patience._host_pace = pace(0.2, scanned)
        patience._copy_pace[0] = pace(0.01, scanned)
        it.fly(session, query)
        answer = submitted("submit", session, query)
        it.until_a_search_waits()
        [waiting] = patience._waiting
        assert 0.1 < waiting.until_s - waiting.since_s <= 0.2
        result = answer()
        check(index, query, 5, _NPROBE, result)
        assert result.hit_rate.tolist() == [0.0]
        assert it.waits == 1


@pytest.mark.parametrize(
    ("deadline_s", "waits"),
    [
        # Less than the lists take to land; enough for them but not for what remains on the host; enough for both.
        (0.5, False),
        (1.5, False),
        (30.0, True),
    ],
)
def test_a_deadline_leaves_the_time_that_the_host_needs_for_the_rest(index, deadline_s, waits):
    query = clustered(1, seed=7)
    probed = index.quantize(query, _NPROBE)[0][0]
    with slow(index) as it, it.router.session() as session:
        patience = it.router._patience
        half = probed[: _NPROBE // 2]
        page_bytes = it.router._opening.list_bytes
        patience._copy_pace[0] = pace(1.0, int(page_bytes[half].sum()))
        patience._host_pace = pace(8.0, int(index.list_bytes[probed[_NPROBE // 2 :]].sum()))
        it.fly(session, query, nprobe=_NPROBE // 2)
        answer = submitted("submit", session, query, deadline_ms=1e3 * deadline_s, min_nprobe=_NPROBE)
        if waits:
            it.until_a_search_waits()
            [waiting] = patience._waiting
            assert waiting.until_s <= waiting.request.deadline_s - 7.9
            it.gate.let_through()
        check(index, query, 5, _NPROBE, answer())
        assert it.waits == waits


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
            until(lambda: it.router._patience._closed)
            check(index, query, 5, _NPROBE, answer())
            it.gate.let_through()
            closing.join(_SOON_S)
            return
        if end == "session":
            session.close()
        elif end == "device":
            it.router.devices[0].fail(RuntimeError("the device fell off the bus"))
        else:
            it.router._lookahead.release(session._holder)
        it.gate.let_through()
        check(index, query, 5, _NPROBE, answer())
        assert it.waits == 1
        assert not it.router._patience._flights[0]
        session.close()


def test_those_that_wait_leave_their_batch_to_the_others(index, monkeypatch):
    query = clustered(1, seed=7)
    others = clustered(3, seed=8)
    with slow(index) as it, it.router.session() as session:
        it.fly(session, query)
        # All in one batch: the engine's thread is held until they are queued.
        held = threading.Event()
        take = Engine._take
        monkeypatch.setattr(Engine, "_take", lambda engine, first: (held.wait(_SOON_S), take(engine, first))[1])
        queued = [it.router.submit(q, 3 + n, 2 + n) for n, q in enumerate(others)]
        queued.insert(1, session.submit(query, 5, _NPROBE))
        queued.insert(3, session.submit(query, 7, 3))
        held.set()
        for n, number in enumerate((0, 2, 4)):
            check(index, others[n : n + 1], 3 + n, 2 + n, queued[number].result(_SOON_S))
        until(lambda: len(it.router._patience._waiting) == 2)
        assert it.router.stats().largest_batch == 3
        # Each for its own lists, whatever the others of the batch probe.
        nearest = index.quantize(query, _NPROBE)[0][0].tolist()
        for waiting in it.router._patience._waiting:
            assert set(waiting.lists.tolist()) <= set(nearest[: waiting.request.nprobe])
        it.gate.let_through()
        check(index, query, 5, _NPROBE, queued[1].result(_SOON_S))
        check(index, query, 7, 3, queued[3].result(_SOON_S))
        assert it.router.stats().requests == 5


def test_one_that_is_left_alone_probes_no_more_than_it_asked_for(index, monkeypatch):
    query, other = clustered(1, seed=7), clustered(1, seed=8)
    with slow(index) as it, it.router.session() as session:
        it.fly(session, query)
        held = threading.Event()
        take = Engine._take
        monkeypatch.setattr(Engine, "_take", lambda engine, first: (held.wait(_SOON_S), take(engine, first))[1])
        queued = session.submit(query, 5, _NPROBE), it.router.submit(other, 5, 2)
        held.set()
        check(index, other, 5, 2, queued[1].result(_SOON_S))
        it.gate.let_through()
        check(index, query, 5, _NPROBE, queued[0].result(_SOON_S))


@pytest.fixture
def asked(monkeypatch):
    """What the decisions were asked: (landing_s, work) of each."""
    asked = []
    monkeypatch.setattr(
        "hybridindex.router.patience.choose_wait", lambda *args: (asked.append(args[:2]), choose_wait(*args))[1]
    )
    return asked


def test_what_is_coming_is_in_the_order_in_which_it_lands(index, asked):
    """Flights of two sessions, one after the other on one device, which share lists of which one is there."""
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        patience, page_bytes = it.router._patience, it.router._opening.list_bytes
        probed = index.quantize(query, _NPROBE)[0][0]
        first = it.fly(session, query, nprobe=4)
        it.gate.let_through(1)  # one send; the rest stays at the gate
        until(lambda: it.router.residency.n_resident == 1)
        flying = patience._flights[0][0].lists.tolist()
        other = patience.begin(0, [*flying[2:], *probed[5:7].tolist(), flying[1]])
        future = session.submit(query, 5, _NPROBE)
        it.until_a_search_waits()
        [(landing_s, work)] = asked
        coming = [*flying[1:], *probed[5:7].tolist()]
        assert work.tolist() == index.list_bytes[coming].tolist()
        assert landing_s == pytest.approx(np.cumsum(page_bytes[coming]) * patience._copy_pace[0].line()[1])
        it.gate.let_through()
        first.result(_SOON_S)
        patience.end(other, 0)
        check(index, query, 5, _NPROBE, future.result(_SOON_S))


@pytest.mark.parametrize("n", [1, 32])
def test_nothing_is_reckoned_where_the_host_scans_faster_than_lists_come(index, asked, n):
    """A list is copied once and scanned for each query that probes it."""
    queries = np.repeat(clustered(1, seed=7), n, axis=0)
    with slow(index) as it, it.router.session() as session:
        it.router._patience._copy_pace[0] = pace(200.0)  # the host takes 100 s
        it.fly(session, queries)
        future = session.submit(queries, 5, _NPROBE)
        if n > 1:
            it.until_a_search_waits()
        it.gate.let_through()
        check(index, queries, 5, _NPROBE, future.result(_SOON_S))
        assert len(asked) == (n > 1)


def test_nobody_waits_for_a_device_that_failed(index, asked):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        it.fly(session, query)
        it.router.devices[0].fail(RuntimeError("the device fell off the bus"))
        check(index, query, 5, _NPROBE, session.search(query, 5, _NPROBE))
        assert not asked


def test_nobody_waits_in_a_router_that_closes(index):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        it.fly(session, query)
        it.router._patience.close()
        check(index, query, 5, _NPROBE, session.search(query, 5, _NPROBE))
        assert it.waits == 0


def test_a_lookahead_that_does_not_set_out_leaves_nothing_on_its_way(index, monkeypatch):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        monkeypatch.setattr(it.router.devices[0], "load", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.lookahead(query).result(_SOON_S)
        assert not it.router._patience._flights[0]


def test_a_decision_that_fails_costs_only_the_wait(index, monkeypatch, caplog):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        monkeypatch.setattr("hybridindex.router.patience.choose_wait", lambda *_: 1 / 0)
        it.fly(session, query)
        check(index, query, 5, _NPROBE, session.search(query, 5, _NPROBE))
        assert "could not be told" in caplog.text


def test_a_search_that_waits_when_the_engine_has_died_fails(index, monkeypatch):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        it.fly(session, query)
        future = session.submit(query, 5, _NPROBE)
        it.until_a_search_waits()
        monkeypatch.setattr(Engine, "_run_once", lambda _: 1 / 0)
        monkeypatch.setattr(it.router._patience._waiting[0], "resubmit", lambda _: 1 / 0)
        it.gate.let_through()
        with pytest.raises(ZeroDivisionError):
            future.result(_SOON_S)


def test_copies_are_timed_from_the_end_of_the_one_before(index):
    queries = clustered(2, seed=7)
    with slow(index) as it, it.router.session() as one, it.router.session() as two:
        patience = it.router._patience
        seen = []
        patience._copy_pace[0].observe = lambda nbytes, seconds: seen.append((nbytes, seconds))
        first = it.fly(one, queries[:1], nprobe=4)
        second = two.lookahead(queries[1:], nprobe=4)
        until(lambda: len(patience._flights[0]) == 2)
        began_s = patience._flights[0][0].started_s
        time.sleep(0.05)
        it.gate.let_through()
        first.result(_SOON_S), second.result(_SOON_S)
        until(lambda: len(seen) == 2)
        assert [nbytes for nbytes, _ in seen] == [one.stats.bytes_moved, two.stats.bytes_moved]
        # Not the time for which the second stood behind the first.
        assert seen[0][1] >= 0.05
        assert seen[0][1] + seen[1][1] == pytest.approx(patience._free_since_s[0] - began_s)


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
                        session.lookahead(queries[n], nprobe=_NPROBE)
                        time.sleep(1e-3 * (n % 3))
                        answers = [session.submit(queries[n], 5, _NPROBE) for _ in range(2)]
                        for answer in answers:
                            check(index, queries[n : n + 1], 5, _NPROBE, answer.result(_SOON_S))
            except BaseException as error:  # noqa: BLE001 - looked at below
                wrong.append(error)

        gates = threading.Thread(target=open_gates)
        clients = [threading.Thread(target=client) for _ in range(6)]
        for thread in (gates, *clients):
            thread.start()
        for thread in clients:
            thread.join(_SOON_S)
        stop.set()
        gates.join()
        second.let_through()
        assert not wrong, wrong
        assert it.waits > 0
        assert not it.router._patience._waiting
