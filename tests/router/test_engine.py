"""Who executes a batch: the engine thread, or the caller who waits for it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
import pytest

from hybridindex.errors import RouterClosedError
from hybridindex.index.ivf import IVFIndex
from hybridindex.router import Router
from hybridindex.router.batch.batching import MAX_BATCHES_IN_FLIGHT
from hybridindex.router.request_queue import RequestQueue
from hybridindex.tiers.contract.residency import Lease
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.router.test_router import check
from tests.stuck import held_quantizer

WAIT_S = 300


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", nprobe=8) as index:
        yield index


@pytest.fixture
def quantizing_threads(index, monkeypatch):
    """Names of the threads that quantized, in order."""
    seen = []
    quantize = index.quantize

    def noted(queries, nprobe, *pool):
        seen.append(threading.current_thread().name)
        return quantize(queries, nprobe, *pool)

    monkeypatch.setattr(index, "quantize", noted)
    return seen


def in_thread(name, call):
    """Runs ``call`` on a thread of its own and returns what it returned."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), name=name)
    thread.start()
    thread.join(WAIT_S)
    return results[0]


def test_a_waiting_caller_searches_on_its_own_thread(index, quantizing_threads):
    with Router(index) as router:
        router.search(clustered(3))
        router.submit(clustered(1)).result(WAIT_S)
    assert quantizing_threads == [threading.current_thread().name, "hybridindex-engine"]


def test_only_one_living_thread_stands_in(index, quantizing_threads):
    with Router(index) as router, ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:
        in_thread("first", lambda: router.search(clustered(1)))
        pool.submit(router.search, clustered(1)).result(WAIT_S)  # "first" is gone
        router.search(clustered(1))  # the pool's thread is not
    assert quantizing_threads == ["first", "pool_0", "hybridindex-engine"]


def test_the_callers_own_thread_count_comes_back(index):
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(3)
    try:
        with Router(index, threads=1) as router:
            router.search(clustered(2))
            assert faiss.omp_get_max_threads() == 3
    finally:
        faiss.omp_set_num_threads(before)


def test_batches_are_quantized_by_faiss_with_one_thread_after_a_late_call(index, monkeypatch):
    seen = []
    quantize = index.quantize

    def noted(queries, nprobe, *pool):
        seen.append((len(queries), faiss.omp_get_max_threads()))
        return quantize(queries, nprobe, *pool)

    monkeypatch.setattr(index, "quantize", noted)
    # As with a graph quantizer.
    monkeypatch.setattr(IVFIndex, "quantizes_itself", False)
    with Router(index, threads=2, host_scanner="native") as router:
        router._served.host._alone = 1
        for n in (1, 3, 3, 1):
            router.search(clustered(n), 5, 4)
    assert seen == [(1, 2), (3, 1), (3, 2), (1, 2)]


def test_nobody_overtakes_what_waits(index, monkeypatch):
    """While a search runs on its caller's thread, others queue; they come next, together."""
    entered, resume = threading.Event(), threading.Event()
    quantize, batches = index.quantize, []

    def held(queries, nprobe, *pool):
        batches.append(len(queries))
        entered.set()
        assert resume.wait(WAIT_S)
        return quantize(queries, nprobe, *pool)

    with Router(index) as router, ThreadPoolExecutor(4) as pool:
        monkeypatch.setattr(index, "quantize", held)
        first = pool.submit(router.search, clustered(1))
        assert entered.wait(WAIT_S)
        futures = [router.submit(clustered(2, seed=i)) for i in range(3)]
        blocked = [pool.submit(router.search, clustered(1, seed=i)) for i in range(2)]
        while len(router._served.engine._waiting) < 4:  # the engine thread holds the fifth
            threading.Event().wait(0.001)
        resume.set()
        for future in [first, *blocked]:
            future.result(WAIT_S)
        monkeypatch.undo()
        for i, future in enumerate(futures):
            check(index, clustered(2, seed=i), 10, router.nprobe, future.result(WAIT_S))
    assert batches == [1, 8]


def submit_together(index, router, monkeypatch, searches):
    """Futures of ``searches`` (queries, nprobe), which share one batch; ``go_on`` lets that batch begin."""
    entered, go_on = threading.Event(), threading.Event()
    quantize = index.quantize

    def held(queries, nprobe, *pool):
        entered.set()
        assert go_on.wait(WAIT_S)
        return quantize(queries, nprobe, *pool)

    monkeypatch.setattr(index, "quantize", held)
    before = router.submit(clustered(1))
    assert entered.wait(WAIT_S)
    return [before, *(router.submit(queries, 5, nprobe) for queries, nprobe in searches)], go_on


@pytest.mark.parametrize("early", [True, False])
def test_a_request_is_answered_when_its_own_queries_are_done(index, monkeypatch, early):
    """The scanner reports query by query; the batch is not over until the last one."""
    queries = [clustered(2, seed=1), clustered(1, seed=2)]
    done = []
    with Router(index, early_dispatch=early) as router:
        [_, first, second], go_on = submit_together(index, router, monkeypatch, [(q, 8) for q in queries])
        scan = router._served.host.scan_checked

        def one_by_one(*arguments, on_done=None):
            distances, ids = scan(*arguments)
            for row in (0, 2, 1) if on_done is not None else ():
                rows = np.array([row], dtype=np.int32)
                on_done(rows, distances[rows], ids[rows])
                done.append((first.done(), second.done()))
            if len(ids) == 3:
                done.append((first.done(), second.done()))
            return distances, ids

        monkeypatch.setattr(router._served.host, "scan_checked", one_by_one)
        go_on.set()
        for each, future in zip(queries, (first, second), strict=True):
            check(index, each, 5, 8, future.result(WAIT_S))
    expected = [(False, False), (False, True), (True, True), (True, True)]
    assert done == (expected if early else [(False, False)])


def test_a_request_on_a_device_does_not_wait_for_the_host(index, monkeypatch):
    """Two requests of one batch: the host's scan ends only after the other request has its answer."""
    on_device, on_host = np.flatnonzero(index.list_sizes)[:2]
    placement = np.full(NLIST, -1)
    placement[on_device] = 0
    queries = [index.centroids[[on_device]], index.centroids[[on_host]]]
    with Router(index, plan=hand_made_plan(index, placement), devices=["cpu"]) as router:
        [before, first, second], go_on = submit_together(index, router, monkeypatch, [(q, 1) for q in queries])
        scan = router._served.host.scan_checked

        def last(*arguments, **options):
            if before.done():
                assert first.result(WAIT_S).hit_rate.tolist() == [1.0]
                assert not second.done()
            return scan(*arguments, **options)

        monkeypatch.setattr(router._served.host, "scan_checked", last)
        go_on.set()
        for each, future in zip(queries, (first, second), strict=True):
            check(index, each, 5, 1, future.result(WAIT_S))


def test_close_waits_for_a_search_on_its_callers_thread(index, monkeypatch):
    entered, resume = held_quantizer(index, monkeypatch)
    router = Router(index, devices=["cpu"], device_budget_bytes=1 << 20)
    with ThreadPoolExecutor(2) as pool:
        search = pool.submit(router.search, clustered(2))
        assert entered.wait(WAIT_S)
        closing = pool.submit(router.close)
        while not router._served.searcher.closed:
            threading.Event().wait(0.001)
        assert not closing.done()
        resume.set()
        monkeypatch.undo()
        check(index, clustered(2), 10, 8, search.result(WAIT_S))
        closing.result(WAIT_S)
    with pytest.raises(RouterClosedError):
        router.search(clustered(1))


def test_who_waits_for_an_engine_that_stopped_is_told_why(index, monkeypatch):
    """Of three requests one is answered, one was left over by the cap, and one was not yet taken."""
    searches = [(clustered(2, seed=seed), 8) for seed in range(3)]
    router = Router(index, max_batch=2)
    [before, answered, left_over, queued], go_on = submit_together(index, router, monkeypatch, searches)
    release = Lease.release

    def broken(lease):
        if before.done() and answered.done():
            raise RuntimeError("the account of leases is broken")
        release(lease)

    monkeypatch.setattr(Lease, "release", broken)
    go_on.set()
    check(index, searches[0][0], 5, 8, answered.result(WAIT_S))
    for future in (left_over, queued):
        with pytest.raises(RuntimeError, match="account of leases"):
            future.result(WAIT_S)
    with pytest.raises(RouterClosedError):
        router.submit(clustered(1))
    monkeypatch.undo()
    router.close()


def test_requests_that_were_taken_when_the_engine_stopped_are_told_why(index, monkeypatch):
    router = Router(index)
    take = RequestQueue.take

    def broken(waiting, requests):
        take(waiting, requests)
        raise RuntimeError("the batch could not be formed")

    monkeypatch.setattr(RequestQueue, "take", broken)
    with pytest.raises(RuntimeError, match="could not be formed"):
        router.submit(clustered(1)).result(WAIT_S)
    router.close()


def test_a_batch_without_a_lease_fails_alone(index, monkeypatch):
    with Router(index) as router:
        router.on_batch.append(lambda report: None)  # else a call needs neither
        with monkeypatch.context() as patch:
            patch.setattr(router._served.residency, "lease", lambda: 1 / 0)
            for ask in (router.search, lambda queries: router.submit(queries).result(WAIT_S)):
                for _ in range(3):  # more than there are slots
                    with pytest.raises(ZeroDivisionError):
                        ask(clustered(1))
        check(index, clustered(2), 5, 4, router.submit(clustered(2), 5, 4).result(WAIT_S))


def test_what_was_cancelled_while_it_waited_is_not_searched(index, monkeypatch):
    entered, resume = held_quantizer(index, monkeypatch)
    with Router(index) as router:
        scan, scans = router._served.host.scan_checked, []
        router._served.host.scan_checked = lambda queries, *rest, **options: (
            scans.append(len(queries)),
            scan(queries, *rest, **options),
        )[1]
        first = router.submit(clustered(1))
        assert entered.wait(WAIT_S)
        gone, wanted, also_gone = (router.submit(clustered(n), 5) for n in (2, 3, 4))
        assert gone.cancel()
        assert also_gone.cancel()
        resume.set()
        first.result(WAIT_S)
        check(index, clustered(3), 5, 8, wanted.result(WAIT_S))
        assert scans == [1, 3]

        async def cancelled():
            resume.clear()
            entered.clear()
            searching = asyncio.ensure_future(router.asearch(clustered(1)))
            assert await asyncio.to_thread(entered.wait, WAIT_S)
            left = asyncio.ensure_future(router.asearch(clustered(5)))
            await asyncio.sleep(0)
            left.cancel()
            await asyncio.sleep(0)
            resume.set()
            await searching

        asyncio.run(cancelled())
        router._served.engine.wait_idle(WAIT_S)
        assert scans == [1, 3, 1]
        # A turn in which all were cancelled leaves no slot behind.
        assert router._served.engine._slots.qsize() == MAX_BATCHES_IN_FLIGHT
        router.check_invariants()
