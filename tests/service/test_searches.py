"""Where searches are made: on the event loop one that is small and alone, by the engine all others."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybridindex.router import Router
from hybridindex.service import searches as searches_module
from hybridindex.service.searches import RouterSearches
from tests.clustered import clustered, small_index
from tests.router.code_searches import differences

WAIT_S = 60


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i") as index:
        yield index


@pytest.fixture
def searches():
    with ThreadPoolExecutor(1) as pool:
        yield RouterSearches(pool)


@pytest.fixture
def direct(monkeypatch):
    """Of each call of ``Router.search_directly``, whether it was answered."""
    seen = []
    search = Router.search_directly

    def noted(self, *args, **options):
        found = search(self, *args, **options)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(Router, "search_directly", noted)
    return seen


def ask(*calls):
    """The answers to coroutines that begin together."""

    async def together():
        return await asyncio.wait_for(asyncio.gather(*calls), WAIT_S)

    return asyncio.run(together())


def test_one_alone_is_searched_on_the_loop_and_several_share_a_batch(index, searches, direct):
    queries = [clustered(1, seed=seed) for seed in range(5)]
    with Router(index) as router:
        expected = [router.submit(each, 5, 4).result(WAIT_S) for each in queries]
        (alone,) = ask(searches(queries[0], 5, 4, {}, router))
        assert direct == [True]
        together = ask(*(searches(each, 5, 4, {}, router) for each in queries))
        assert direct == [True]
        (again,) = ask(searches(queries[1], 5, 4, {}, router))
        assert direct == [True, True]
    assert [differences(a, b) for a, b in zip(together, expected, strict=True)] == [0] * 5
    assert differences(alone, expected[0]) == differences(again, expected[1]) == 0


def test_who_searches_all_the_time_lets_others_run(index, searches):
    async def main(router):
        ended = asyncio.Event()

        async def client():
            while not ended.is_set():
                await searches(clustered(1), 5, 4, {}, router)

        task = asyncio.create_task(client())
        for _ in range(50):
            await asyncio.sleep(0)
        ended.set()
        await asyncio.wait_for(task, WAIT_S)

    with Router(index) as router:
        asyncio.run(main(router))


@pytest.mark.parametrize("options", [{"deadline_ms": 1e4, "min_nprobe": 1}, {"allow_ids": [1, 2]}, {"on_batch": print}])
def test_options_that_a_batch_serves_need_one(index, searches, direct, options):
    with Router(index) as router:
        assert ask(searches(clustered(1), 2, 4, options, router))[0].ids.shape == (1, 2)
    assert direct == []


def test_a_session_and_a_long_search_are_the_engines(index, searches, direct, monkeypatch):
    with Router(index) as router, router.session() as session:
        ask(searches(clustered(1), 5, 4, {}, session))
        assert direct == []
        monkeypatch.setattr(searches_module, "_SMALL_BYTES", 0)
        searches._loop_time._free_from_s = float("inf")
        ask(searches(clustered(1), 5, 4, {}, router))
        assert direct == [False]


def test_an_error_leaves_the_next_one_alone(index, searches, direct, monkeypatch):
    with Router(index) as router:
        with monkeypatch.context() as patch:
            patch.setattr(router._served.host, "scan_checked", lambda *_args, **_kwargs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ask(searches(clustered(1), 5, 4, {}, router))
        ask(searches(clustered(1), 5, 4, {}, router))
    assert direct == [True]
