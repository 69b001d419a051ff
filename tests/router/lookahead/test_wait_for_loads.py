"""Whether a session's search waits for lists on their way, for which of them, and for how long."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.router import Router
from hybridindex.router.batch.deadline import PaceEstimator
from hybridindex.router.lookahead.wait_for_loads import choose_wait
from tests.clustered import NLIST, clustered, small_index
from tests.examples import examples
from tests.router.slow_copies import NPROBE, SOON_S, Gate, one_batch, pace, slow, submitted, until
from tests.router.test_router import check


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", nprobe=NPROBE) as index:
        yield index


@examples(300)
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
        on_host = host[0] + host[1] * (host_bytes - saved)
        on_device = max(0.0, device[0] + device[1] * (device_bytes + saved)) if device_bytes + saved else 0.0
        return (landing_s[n - 1] if n else 0.0) + max(on_host, on_device)

    totals = [total(n) for n in range(len(data) + 1)]
    wait = choose_wait(landing_s, work, host_bytes, device_bytes, host, device)
    if wait is None:
        # Nothing that is worth having is passed over.
        assert totals[0] - min(totals) <= max(1e-3, 0.1 * totals[0]) + 1e-9
        return
    assert totals[wait.n_lists] == pytest.approx(min(totals), abs=1e-9)
    assert wait.seconds == landing_s[wait.n_lists - 1]
    # Lists that land at the limit save nothing any more.
    assert wait.limit_s - wait.seconds + totals[wait.n_lists] == pytest.approx(totals[0], abs=1e-9)


@pytest.mark.parametrize("way", ["search", "submit", "asearch"])
def test_a_search_waits_for_the_lists_that_it_probes(index, way):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        it.fly(session, query, nprobe=NPROBE)
        answer = submitted(way, session, query)
        it.until_a_search_waits()
        # Others go on meanwhile, also those of the same session that probe other lists.
        check(index, -query, 5, NPROBE, it.router.search(-query, 5, NPROBE))
        assert it.router._served.wait_for_loads._waiting
        # Many times what the other search waited for its turn, beside whatever else runs on this machine.
        time.sleep(0.1 + 10 * it.router.stats().stages["queue"].seconds)
        it.gate.let_through()
        result = answer()
        check(index, query, 5, NPROBE, result)
        assert result.hit_rate.tolist() == [1.0]
        assert it.waits == 1
        assert session.stats.searches == 1
        # Nothing is held for it any more, and what it waited is not the queue's.
        until(lambda: it.router._served.engine._slots.qsize() == 2)
        stages = it.router.stats().stages
        assert stages["queue"].seconds < stages["lookahead_wait"].seconds


def test_it_waits_for_no_list_that_it_does_not_probe(index):
    query = clustered(1, seed=7)
    probes, _ = index.quantize(query, NLIST)
    # One that brings some of the others before the last that counts, and some after.
    drafts = clustered(20, seed=8)
    ranks = [np.flatnonzero(np.isin(lists, probes[0, :NPROBE])) for lists in index.quantize(drafts, NLIST)[0]]
    draft = next(d for d, at in zip(drafts, ranks, strict=True) if at[-1] not in (NPROBE - 1, NLIST - 1))
    with slow(index) as it, it.router.session() as session:
        it.fly(session, draft, nprobe=NLIST)
        answer = submitted("submit", session, query)
        it.until_a_search_waits()
        sent = it.flights[0].lists.tolist()
        [waiting] = it.router._served.wait_for_loads._waiting
        assert set(waiting.lists.tolist()) == {i for i in probes[0, :NPROBE].tolist() if index.list_sizes[i]}
        last = max(sent.index(i) for i in waiting.lists.tolist())
        pages = it.router.devices[0].geometry.pages_for(index.list_sizes[sent[: last + 1]])
        it.gate.let_through(int(pages.sum()))
        # Those behind are still at the gate.
        result = answer()
        check(index, query, 5, NPROBE, result)
        assert result.hit_rate.tolist() == [1.0]
        assert it.flights
        assert it.router.stats().stages["lookahead_wait"].seconds < waiting.until_s - waiting.since_s


@pytest.mark.parametrize("copies_s", [200.0, None])
def test_it_begins_at_once_where_waiting_does_not_pay(index, copies_s):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        # None: nothing is known of copies.
        it.route.pace = PaceEstimator() if copies_s is None else pace(copies_s)
        it.fly(session, query)
        result = session.search(query, 5, NPROBE)
        check(index, query, 5, NPROBE, result)
        assert result.hit_rate.tolist() == [0.0]
        assert it.waits == 0


def test_it_begins_at_once_where_the_router_is_told_so(index):
    query = clustered(1, seed=7)
    with slow(index, wait_for_lists=False) as it, it.router.session() as session:
        it.fly(session, query)
        check(index, query, 5, NPROBE, session.search(query, 5, NPROBE))
        assert it.waits == 0


def test_other_searches_wait_for_nothing(index):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session, it.router.session() as other:
        it.fly(session, query)
        check(index, query, 5, NPROBE, it.router.search(query, 5, NPROBE))
        check(index, query, 5, NPROBE, other.search(query, 5, NPROBE))
        assert it.waits == 0


def test_copies_that_stall_are_waited_for_no_longer_than_they_could_pay(index):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        scanned = int(index.list_bytes[index.quantize(query, NPROBE)[0]].sum())
        # The host would take 0.2 s: copies that never come cost as much once more, at most.
        it.router._served.wait_for_loads._host_pace = it.router._served.wait_for_loads._host_line = pace(0.2, scanned)
        it.route.pace = pace(0.01, scanned)
        it.fly(session, query)
        let_go, waited = it.router._served.wait_for_loads._let_go, []
        it.router._served.wait_for_loads._let_go = lambda waiting: (waited.append(waiting), let_go(waiting))
        result = session.search(query, 5, NPROBE)
        check(index, query, 5, NPROBE, result)
        assert result.hit_rate.tolist() == [0.0]
        [waiting] = waited
        assert 0.1 < waiting.until_s - waiting.since_s <= 0.2
        assert it.waits == 1


def test_nothing_is_waited_for_for_long_whatever_is_believed(index):
    query = clustered(1, seed=7)
    with slow(index, longest_s=0.05) as it, it.router.session() as session:
        it.route.pace = pace(0.01)
        it.fly(session, query)
        let_go, waited = it.router._served.wait_for_loads._let_go, []
        it.router._served.wait_for_loads._let_go = lambda waiting: (waited.append(waiting), let_go(waiting))
        result = session.search(query, 5, NPROBE)
        check(index, query, 5, NPROBE, result)
        assert result.hit_rate.tolist() == [0.0]
        assert [waiting.until_s - waiting.since_s for waiting in waited] == [pytest.approx(0.05)]


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
    probed = index.quantize(query, NPROBE)[0][0]
    with slow(index) as it, it.router.session() as session:
        wait_for_loads = it.router._served.wait_for_loads
        half = probed[: NPROBE // 2]
        page_bytes = it.router._served.opening.list_bytes
        it.route.pace = pace(1.0, int(page_bytes[half].sum()))
        wait_for_loads._host_pace = wait_for_loads._host_line = pace(
            8.0, int(index.list_bytes[probed[NPROBE // 2 :]].sum())
        )
        it.fly(session, query, nprobe=NPROBE // 2)
        answer = submitted("submit", session, query, deadline_ms=1e3 * deadline_s, min_nprobe=NPROBE)
        if waits:
            it.until_a_search_waits()
            [waiting] = wait_for_loads._waiting
            assert waiting.until_s <= waiting.request.deadline_s - 7.9
            it.gate.let_through()
        check(index, query, 5, NPROBE, answer())
        assert it.waits == waits


@pytest.fixture
def asked(monkeypatch):
    """What the decisions were asked: (landing_s, work) of each."""
    asked = []
    monkeypatch.setattr(
        "hybridindex.router.lookahead.wait_for_loads.choose_wait",
        lambda *args: (asked.append(args[:2]), choose_wait(*args))[1],
    )
    return asked


def test_what_is_coming_is_in_the_order_in_which_it_lands(index, asked):
    """Flights of two sessions, one after the other on one device, which share lists of which one is there."""
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        wait_for_loads, page_bytes = it.router._served.wait_for_loads, it.router._served.opening.list_bytes
        probed = index.quantize(query, NPROBE)[0][0]
        first = it.fly(session, query, nprobe=4)
        it.gate.let_through(it.n_pages(it.flights[0].lists[:1]))  # the rest stays at the gate
        until(lambda: it.router.residency.n_resident == 1)
        flying = it.flights[0].lists.tolist()
        other = wait_for_loads.begin(0, [*flying[2:], *probed[5:7].tolist(), flying[1]])
        future = session.submit(query, 5, NPROBE)
        it.until_a_search_waits()
        [(landing_s, work)] = asked
        coming = [*flying[1:], *probed[5:7].tolist()]
        assert work.tolist() == index.list_bytes[coming].tolist()
        # Less than what has passed since something landed.
        passed_s = np.cumsum(page_bytes[coming]) * it.route.pace.line()[1] - landing_s
        assert passed_s == pytest.approx(passed_s[0])
        assert 0 < passed_s[0] < time.monotonic() - it.route.landed_s
        assert it.route.landed_s > it.flights[0].started_s
        it.gate.let_through()
        first.result(SOON_S)
        wait_for_loads.end(other, 0)
        check(index, query, 5, NPROBE, future.result(SOON_S))


@pytest.mark.parametrize("n", [1, 32])
def test_nothing_is_reckoned_where_the_host_scans_faster_than_lists_come(index, asked, n):
    """A list is copied once and scanned for each query that probes it."""
    queries = np.repeat(clustered(1, seed=7), n, axis=0)
    with slow(index) as it, it.router.session() as session:
        it.route.pace = pace(200.0)  # the host takes 100 s
        it.fly(session, queries)
        future = session.submit(queries, 5, NPROBE)
        if n > 1:
            it.until_a_search_waits()
            it.gate.let_through()
        check(index, queries, 5, NPROBE, future.result(SOON_S))
        assert len(asked) == (n > 1)


def test_nobody_waits_for_a_device_that_failed(index, asked):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        it.fly(session, query)
        it.router.devices[0].fail(RuntimeError("the device fell off the bus"))
        check(index, query, 5, NPROBE, session.search(query, 5, NPROBE))
        assert not asked


def test_copies_are_timed_from_the_end_of_the_one_before(index):
    queries = clustered(2, seed=7)
    with slow(index) as it, it.router.session() as one, it.router.session() as two:
        seen = []
        it.route.pace.observe = lambda nbytes, seconds: seen.append((nbytes, seconds))
        first = it.fly(one, queries[:1], nprobe=4)
        second = two.lookahead(queries[1:], nprobe=4)
        until(lambda: len(it.flights) == 2)
        began_s = it.flights[0].started_s
        time.sleep(0.05)
        it.gate.let_through()
        first.result(SOON_S), second.result(SOON_S)
        until(lambda: len(seen) == 2)
        assert [nbytes for nbytes, _ in seen] == [one.stats.bytes_moved, two.stats.bytes_moved]
        # Not the time for which the second stood behind the first.
        assert seen[0][1] >= 0.05
        assert seen[0][1] + seen[1][1] == pytest.approx(it.route.free_since_s - began_s)


def test_one_that_never_set_out_says_nothing_of_the_one_before_it(index):
    with slow(index) as it:
        wait_for_loads = it.router._served.wait_for_loads
        first, second = wait_for_loads.begin(0, [1, 2]), wait_for_loads.begin(0, [3])
        wait_for_loads.end(second, 0)
        assert it.route.free_since_s == 0.0
        assert it.flights == [first]
        wait_for_loads.end(first, 0)
        assert it.route.free_since_s >= first.started_s


def test_who_would_stand_behind_its_batch_does_not_wait(index, monkeypatch):
    query, others = clustered(1, seed=7), clustered(8, seed=8)
    with slow(index) as it, it.router.session() as session:
        it.fly(session, query)
        with one_batch(monkeypatch):
            queued = [session.submit(query, 5, NPROBE), *(it.router.submit(q, 5, 2) for q in others)]
        check(index, query, 5, NPROBE, queued[0].result(SOON_S))
        for other, future in zip(others, queued[1:], strict=True):
            check(index, other[None], 5, 2, future.result(SOON_S))
        assert it.waits == 0


def test_one_search_in_so_many_begins_at_once(index):
    """Where everything is on the device in the end, the host scans nothing, and what is believed of it stays."""
    queries = clustered(2, seed=7)
    with slow(index) as it:
        waited = []
        for _ in range(32):
            with it.router.session() as session:
                landed = it.fly(session, queries[:1])
                answer = session.submit(queries[:1], 5, NPROBE)
                until(lambda answer=answer: answer.done() or it.router._served.wait_for_loads._waiting)
                waited.append(not answer.done())
                n_pages = it.n_pages(it.flights[0].lists)
                it.gate.let_through(n_pages)
                answer.result(SOON_S)
                # Closing a session gives up its copies: their turns at the gate would be left over.
                landed.result(SOON_S)
            until(lambda: not it.flights)
        assert waited.count(False) == 2


def test_a_list_on_its_way_to_two_devices_counts_once(index, asked):
    query = clustered(1, seed=7)
    with slow(index, devices=["cpu", "cpu"]) as it, it.router.session() as session:
        gate = Gate(it.router.devices[1])
        wait_for_loads = it.router._served.wait_for_loads
        wait_for_loads._routes[1].pace = pace(0.9)
        session.lookahead(query)
        until(lambda: it.flights or wait_for_loads._routes[1].flights)
        [flight] = it.flights or wait_for_loads._routes[1].flights
        other = wait_for_loads.begin(1 - flight.ordinal, flight.lists)
        future = session.submit(query, 5, NPROBE)
        it.until_a_search_waits()
        [(landing_s, work)] = asked
        assert len(work) == len(flight.lists)
        # By the faster of the two.
        pages = it.router._served.opening.list_bytes[flight.lists].sum()
        assert landing_s[-1] <= 0.9e-6 * pages
        wait_for_loads.end(other, 0)
        it.gate.let_through(), gate.let_through()
        check(index, query, 5, NPROBE, future.result(SOON_S))


@pytest.mark.parametrize(
    ("host_s", "device_s", "kept_s"),
    [
        # The host cannot keep it: what the device needs is left. It can: copies that stall must not cost lists.
        (60.0, 6.0, 5.9),
        (12.0, 1e-3, 11.9),
    ],
)
def test_a_deadline_leaves_the_time_of_whoever_can_keep_it(index, host_s, device_s, kept_s):
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        scanned = int(index.list_bytes[index.quantize(query, NPROBE)[0]].sum())
        wait_for_loads = it.router._served.wait_for_loads
        wait_for_loads._host_pace = wait_for_loads._host_line = pace(host_s, scanned)
        wait_for_loads._device_pace = pace(device_s, scanned)
        it.fly(session, query)
        future = session.submit(query, 5, NPROBE, deadline_ms=20_000, min_nprobe=NPROBE)
        it.until_a_search_waits()
        [waiting] = wait_for_loads._waiting
        assert waiting.until_s <= waiting.request.deadline_s - kept_s
        it.gate.let_through()
        check(index, query, 5, NPROBE, future.result(SOON_S))


def test_paces_are_learned_where_the_work_is_done(index):
    queries = clustered(2, seed=7)
    with Router(index, devices=["cpu"], device_budget_bytes=32 << 20) as router, router.session() as session:
        wait_for_loads = router._served.wait_for_loads
        lines = [
            wait_for_loads._host_line,
            wait_for_loads._host_pace,
            wait_for_loads._device_pace,
            wait_for_loads._routes[0].pace,
        ]
        assert [line.line() for line in lines] == [None] * 4
        session.search(queries[:1], 5, NPROBE)
        session.lookahead(queries[:1]).result(SOON_S)
        session.search(queries[:1], 5, NPROBE)
        until(lambda: all(line.line() is not None for line in lines))


@pytest.mark.parametrize("seconds", [(200.0,), (200.0, 200.0)])
def test_scans_of_one_size_say_nothing_of_the_next(index, seconds):
    """One that found its lists on the disk, or a small one whose fixed costs are all that it took."""
    query = clustered(1, seed=7)
    with slow(index) as it, it.router.session() as session:
        wait_for_loads = it.router._served.wait_for_loads
        wait_for_loads._host_line = PaceEstimator(through_origin=0.0)
        for took in seconds:
            wait_for_loads.note_host(1000, took)
        it.fly(session, query)
        check(index, query, 5, NPROBE, session.search(query, 5, NPROBE))
        assert it.waits == 0
