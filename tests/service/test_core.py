"""The service without HTTP: searches, sessions, observers, searches that go in parts."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from hybridindex.service import core, searches
from hybridindex.service.searches import SearchRequest
from tests.service.conftest import assert_same, held_engine


def search(service, queries, **options):
    return asyncio.run(service.search(SearchRequest(queries=queries, **options), "me"))


def test_an_observer_that_raises_costs_nobody_an_answer(service, queries):
    def fail(_seen) -> None:
        raise RuntimeError("observer")

    service.on_search.append(fail)
    assert search(service, queries).ids.shape == (20, 10)
    assert service.n_observer_errors == 1


def test_a_named_deadline_reaches_the_router_and_the_daemons_own_does_not(make_service, queries):
    service = make_service(router={"devices": ()}, limits={"default_deadline_ms": 0.001})
    # Time stands still, so that a deadline far too short for any scan has not passed when the search starts.
    service.clock = service.admission._clock = lambda: 7.0
    assert (search(service, queries, nprobe=24).nprobe_used == 24).all()
    assert (search(service, queries, nprobe=24, deadline_ms=0.001, min_nprobe=20).nprobe_used == 20).all()
    assert (search(service, queries, nprobe=24, deadline_ms=0.001).nprobe_used == 1).all()
    assert service.router.stats().nprobe_lowered == 2


async def until(condition) -> None:
    """Lets others run until something holds."""
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0)


def test_sessions_wait_without_threads(service, queries):
    """All searches of many sessions reach the engine while it is busy, and go as one batch."""
    n = 100
    expected = service.router.search(queries[:2], 5)
    request = SearchRequest(queries=queries[:2], k=5)

    async def run(opened):
        names = [service.open_session("me") for _ in range(n)]
        threads, batches = set(threading.enumerate()), service.router.stats().batches
        waiting = [asyncio.create_task(service.search(request, "me", name)) for name in names]
        # The engine's thread holds one of them.
        await until(lambda: len(service.router._served.engine._waiting) >= n - 1)
        assert set(threading.enumerate()) <= threads
        opened.set()
        for result in await asyncio.gather(*waiting):
            assert_same(result, expected)
        assert service.router.stats().batches - batches <= 2  # one was taken by itself, maybe
        for name in names:
            assert service.session_stats(name, "me")["searches"] == 1

    with held_engine(service.router, queries) as opened:
        asyncio.run(run(opened))


def test_a_cancelled_search_of_a_session_gives_its_turn_back(make_service, queries):
    service = make_service(limits={"in_flight_queries": 2})
    request = SearchRequest(queries=queries[:2], k=5)

    async def run(opened):
        name = service.open_session("me")
        gone, kept = [asyncio.create_task(service.search(request, "me", name)) for _ in range(2)]
        await until(lambda: service.admission.n_in_flight == 2 and service.admission.n_waiting == 2)
        gone.cancel()
        await asyncio.wait([gone])
        assert gone.cancelled()
        assert service.admission.n_in_flight == 2  # the other has the turn now
        opened.set()
        assert (await kept).ids.shape == (2, 5)
        assert service.session_stats(name, "me")["searches"] == 1

    with held_engine(service.router, queries) as opened:
        asyncio.run(run(opened))
    assert service.admission.n_in_flight == 0


def test_a_session_closed_while_it_is_searched_still_answers(service, queries):
    expected = service.router.search(queries, 5)
    request = SearchRequest(queries=queries, k=5)

    async def run(opened):
        name = service.open_session("me")
        searching = asyncio.create_task(service.search(request, "me", name))
        await until(lambda: service.admission.n_in_flight == len(queries))
        service.close_session(name, "me")
        opened.set()
        assert_same(await searching, expected)
        assert len(service.sessions) == 0

    with held_engine(service.router, queries) as opened:
        asyncio.run(run(opened))


def test_a_wide_search_goes_in_parts_with_the_same_answers_and_others_get_in_between(service, queries, monkeypatch):
    """Its arrays would take gigabytes: a batch has a bound, and each part a turn of its own."""
    monkeypatch.setattr(core, "TURN_CELLS", 16)
    monkeypatch.setattr(searches, "_CELLS_PER_QUERY", 1)
    expected, order = service.router.search(queries, 5, 8), []
    service.on_search.append(lambda seen: order.append(len(seen.queries)))

    async def run():
        wide = asyncio.create_task(service.search(SearchRequest(queries=queries, k=5, nprobe=8), "flood"))
        while not service.admission.n_in_flight:
            await asyncio.sleep(0)
        small = await service.search(SearchRequest(queries=queries[:1], k=5, nprobe=8), "modest")
        return await wide, small

    service.router.forget_load()
    wide, small = asyncio.run(run())
    assert_same(wide, expected)
    assert np.array_equal(wide.nprobe_used, expected.nprobe_used)
    assert np.array_equal(small.ids, expected.ids[:1])
    assert order == [1, len(queries)], "the small one was answered first"
    assert service.router.stats().largest_batch <= 3
    assert service.admission.n_in_flight == service.admission.n_waiting == 0


def test_a_wide_search_that_fails_or_is_given_up_leaves_nothing_behind(service, queries, monkeypatch):
    monkeypatch.setattr(core, "TURN_CELLS", 16)
    monkeypatch.setattr(searches, "_CELLS_PER_QUERY", 1)
    parts, asearch = [], service.router.asearch

    async def third_fails(*args, **options):
        parts.append(1)
        if len(parts) == 3:
            raise ZeroDivisionError
        return await asearch(*args, **options)

    monkeypatch.setattr(service.router, "asearch", third_fails)
    with pytest.raises(ZeroDivisionError):
        search(service, queries, k=5, nprobe=8)
    assert len(parts) == 3
    assert service.admission.n_in_flight == service.admission.n_waiting == 0
    assert service.generations.current.users == 0
