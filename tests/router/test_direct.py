"""Calls that are answered without a batch: what they find and count is what a batch would, and when there is one."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hybridindex.errors import DamagedListsError, InvalidInputError, RouterClosedError, RouterError
from hybridindex.router import Router
from hybridindex.router.direct import DirectSearch
from tests.clustered import NLIST, clustered, small_index
from tests.coded import with_codes
from tests.router.code_searches import differences

WAIT_S = 300
KINDS = [("flat", "l2", "rows"), ("sq8", "ip", "rows"), ("flat", "ip", "codes"), ("sq8", "l2", "codes")]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def router(request, tmp_path_factory):
    codec, metric, precision = request.param
    folder = tmp_path_factory.mktemp("idx")
    with (
        with_codes(small_index(folder / "i", codec=codec, metric=metric)) as index,
        Router(index, precision=precision, threads=2) as router,
    ):
        yield router


@pytest.fixture
def direct(monkeypatch):
    """Numbers of queries of the calls that were answered so."""
    seen = []
    search = DirectSearch.search

    def noted(self, queries, *given):
        found = search(self, queries, *given)
        if found is not None:
            seen.append(len(queries))
        return found

    monkeypatch.setattr(DirectSearch, "search", noted)
    return seen


@pytest.mark.parametrize("n", [1, 7])
def test_answers_and_counts_are_those_of_a_batch(router, direct, n):
    def load(stats):
        times = {stage: total.count for stage, total in stats.stages.items()}
        return times, [
            stats.requests,
            stats.queries,
            stats.batches,
            stats.largest_batch,
            stats.host_work_bytes,
            stats.candidates,
        ]

    answers, loads = [], []
    for ask in (lambda *a: router.submit(*a).result(WAIT_S), router.search):
        router.forget_load()
        for k, nprobe in ((1, 1), (10, 8), (40, NLIST)):
            answers.append(ask(clustered(n, seed=n), k, nprobe))
        loads.append(load(settled(router, 3)))
    assert direct == [n] * 3
    for by_batch, directly in zip(answers[:3], answers[3:], strict=True):
        assert differences(by_batch, directly) == 0
        assert by_batch.nprobe_used.tolist() == directly.nprobe_used.tolist()
        assert directly.hit_rate.tolist() == [0.0] * n
        assert directly.nprobe_used.dtype == np.int32
        assert directly.hit_rate.dtype == np.float32
    (batch_stages, batch_counts), (direct_stages, direct_counts) = loads
    assert direct_counts == batch_counts
    # A batch of codes merges one part, which takes no time.
    assert batch_stages.keys() - direct_stages.keys() <= {"merge"}
    assert all(count == 3 for count in direct_stages.values())


def settled(router, batches):
    """The router's counts, when so many batches have been reported."""
    for _ in range(WAIT_S * 100):
        stats = router.stats()
        if stats.stages.get("coarse") is not None and stats.stages["coarse"].count >= batches:
            return stats
        threading.Event().wait(0.01)
    raise AssertionError("a batch did not end")


def test_whoever_has_to_be_told_is_told_of_a_batch(router, direct):
    told = queue.SimpleQueue()

    def number_of_a_batch():
        router.on_batch.append(told.put)
        try:
            router.search(clustered(2))
            return told.get(timeout=WAIT_S).number
        finally:
            router.on_batch.clear()

    router.search(clustered(1))
    first = number_of_a_batch()
    router.search(clustered(3))
    # The calls between count, too.
    assert number_of_a_batch() - first == 2
    assert direct == [1, 3]


def test_a_deadline_and_a_device_need_a_batch(router, direct):
    assert (router.search(clustered(2), 5, 4, deadline_ms=60_000).nprobe_used == 4).all()
    with Router(router._served.index.rows, devices=["cpu"], device_budget_bytes=1 << 20, precision="rows") as beside:
        beside.search(clustered(2), 5, 4)
    assert direct == []


def test_direct_calls_teach_deadlines_what_the_host_takes(router):
    with Router(router._served.index.rows, precision=router.config.precision, scrub_bytes_per_s=0) as fresh:
        assert fresh._served.engine._host_parts._pace.line() is None
        fresh.search(clustered(2), 5, 4)
        assert fresh._served.engine._host_parts._pace.line() is not None


def test_callers_beside_each_other_get_their_own_answers(router, direct):
    queries = [clustered(1 + seed % 3, seed=seed) for seed in range(12)]
    expected = [router.submit(each, 5, 8).result(WAIT_S) for each in queries]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            answers = list(pool.map(lambda each: router.search(each, 5, 8), queries))
            assert [differences(a, b) for a, b in zip(answers, expected, strict=True)] == [0] * len(queries)


def test_a_callback_on_the_routers_thread_is_still_refused(router, direct):
    def ask(_probes):
        with pytest.raises(RouterError, match="would wait for itself"):
            router.search(clustered(1))
        refused.append(threading.current_thread().name)

    refused = []
    router.submit(clustered(1), on_probes=ask).result(WAIT_S)
    assert refused == ["hybridindex-engine"]
    router.search(clustered(1))
    assert direct == [1]


def test_a_callback_on_the_callers_thread_is_refused_too(router):
    """The caller does the engine's work there, and would wait for it. The main thread does not."""
    refused = queue.SimpleQueue()
    with Router(router._served.index.rows, precision=router.config.precision, scrub_bytes_per_s=0) as fresh:

        def listen(_report):
            with pytest.raises(RouterError, match="would wait for itself"):
                fresh.search(clustered(1))
            refused.put(threading.current_thread().name)

        fresh.on_batch.append(listen)
        with ThreadPoolExecutor(1, thread_name_prefix="caller") as pool:
            pool.submit(fresh.search, clustered(1)).result(WAIT_S)
        fresh.search(clustered(1))
        assert [refused.get(timeout=WAIT_S) for _ in range(2)] == ["caller_0", "hybridindex-engine"]
        fresh.on_batch.clear()
        assert fresh.search(clustered(1)).ids.shape[0] == 1


def test_errors_reach_the_caller_and_the_next_call_works(router, direct, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(router._served.host, "scan_checked", lambda *_args, **_kwargs: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                router.search(clustered(1))
    assert direct == []
    router.search(clustered(1))
    assert direct == [1]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_damaged_list_is_refused_and_the_others_answer(tmp_path, direct, monkeypatch, when):
    queries = clustered(40, seed=3)
    with small_index(tmp_path / "i") as index, Router(index, scrub_bytes_per_s=0) as router:
        probes, _ = index.quantize(queries, 4)
        hot = int(np.bincount(probes.reshape(-1)).argmax())
        damage = index.integrity.quarantine
        scan = router._served.host.scan_checked

        def found_meanwhile(*args, **kwargs):
            monkeypatch.setattr(router._served.host, "scan_checked", scan)
            answer = scan(*args, **kwargs)
            damage([hot])
            return answer

        if when == "before":
            damage([hot])
        else:
            monkeypatch.setattr(router._served.host, "scan_checked", found_meanwhile)
        others = [hot not in own for own in probes.tolist()]
        for query, is_other in zip(queries, others, strict=True):
            if not is_other:
                with pytest.raises(DamagedListsError, match=f"list {hot}"):
                    router.search(query, 5, 4)
            else:
                assert (router.search(query, 5, 4).nprobe_used == 4).all()
        assert len(direct) == sum(others[1:] if when == "meanwhile" else others)
        index.integrity.lift([hot])
        router.search(queries, 5, 4)
        assert direct[-1] == 40


def test_a_closed_router_searches_no_more(tmp_path, direct):
    with small_index(tmp_path / "i") as index:
        router = Router(index)
        router.search(clustered(1))
        router.close()
        with pytest.raises(RouterClosedError):
            router.search(clustered(1))
    assert direct == [1]


def test_a_search_on_an_event_loop_tells_who_listens_at_once(router, direct):
    reports = []
    queries = clustered(2, seed=4)
    expected = router.submit(queries, 10, 8).result(WAIT_S)
    settled(router, 1)
    router.on_batch.append(lambda report: reports.append((report, threading.current_thread())))
    try:
        found = router.search_directly(queries, 10, 8)
        router.submit(queries, 10, 8).result(WAIT_S)
        for _ in range(WAIT_S * 100):
            if len(reports) == 2:
                break
            threading.Event().wait(0.01)
    finally:
        router.on_batch.clear()
    assert direct == [2]
    assert differences(found, expected) == 0
    (own, thread), (batch, _) = reports
    assert thread is threading.current_thread()
    assert (own.n_requests, own.n_queries, own.k, own.nprobe) == (1, 2, 10, 8)
    assert (own.n_requests, own.n_queries, own.k, own.nprobe) == (
        batch.n_requests,
        batch.n_queries,
        batch.k,
        batch.nprobe,
    )
    assert own.candidates == batch.candidates
    assert batch.number == own.number + 1
    own_stages, batch_stages = ([time.stage for time in report.stages] for report in (own, batch))
    assert set(batch_stages) - set(own_stages) <= {"merge"}
    ends = [(time.started_s, time.ended_s) for time in own.stages]
    assert all(a <= b for a, b in ends)
    assert ends == sorted(ends)


def test_what_needs_a_batch_is_not_searched_on_an_event_loop(router, direct):
    queries = clustered(2)
    assert router.search_directly(queries, 5, 4, most_bytes=1) is None
    assert router.search_directly(clustered(64), 5, NLIST, most_bytes=10_000) is None
    with Router(router._served.index.rows, devices=["cpu"], device_budget_bytes=1 << 20, precision="rows") as beside:
        assert beside.search_directly(queries, 5, 4) is None
    with Router(router._served.index.rows, precision=router.config.precision, warm_bytes=0) as cold:
        assert cold.search_directly(queries, 5, 4) is None
    assert direct == []
    with pytest.raises(InvalidInputError, match="k"):
        router.search_directly(queries, 0, 4)
    assert router.search_directly(queries, 5, 4, most_bytes=1 << 30) is not None


def test_a_closed_router_does_not_search_on_an_event_loop(tmp_path):
    with small_index(tmp_path / "i") as index:
        router = Router(index)
        assert router.search_directly(clustered(1)) is not None
        router.close()
        assert router.search_directly(clustered(1)) is None
