"""Searches of asyncio: one wake for all that is answered together, and what becomes of those that nobody awaits."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from hybridindex.errors import InvalidInputError, RouterClosedError
from hybridindex.router import Router
from tests.clustered import clustered, small_index
from tests.router.test_router import check

WAIT_S = 300


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", nprobe=8) as index:
        yield index


class Held:
    """Holds batches at their quantization until :meth:`let_go`."""

    def __init__(self, index, monkeypatch) -> None:
        self.entered, self._resume = threading.Event(), threading.Event()
        quantize = index.quantize

        def held(queries, nprobe, *pool):
            self.entered.set()
            assert self._resume.wait(WAIT_S)
            return quantize(queries, nprobe, *pool)

        monkeypatch.setattr(index, "quantize", held)

    def let_go(self) -> None:
        self._resume.set()


async def begun(search):
    """A task that has run up to its first wait."""
    task = asyncio.create_task(search)
    await asyncio.sleep(0)
    return task


def test_answers_of_one_batch_wake_the_loop_once(index, monkeypatch):
    held = Held(index, monkeypatch)
    with Router(index, early_dispatch=False) as router:

        async def run():
            loop = asyncio.get_running_loop()
            woken = []
            wake = loop.call_soon_threadsafe
            tasks = [await begun(router.asearch(clustered(1)))]
            assert held.entered.wait(WAIT_S)
            tasks += [await begun(router.asearch(clustered(1 + i, seed=i), 5, 4 + i)) for i in range(9)]
            monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: woken.append(args) or wake(*args))
            held.let_go()
            results = await asyncio.gather(*tasks)
            for i, result in enumerate(results[1:]):
                check(index, clustered(1 + i, seed=i), 5, 4 + i, result)
            # One for the held batch, one for the other: one each where both were done before the loop looked.
            assert 1 <= len(woken) <= 2
            assert router.stats().batches == 2

        asyncio.run(run())


def test_a_cancelled_search_disturbs_no_other(index, monkeypatch):
    held = Held(index, monkeypatch)
    with Router(index) as router, router.session() as session:

        async def run():
            gone, kept = await begun(session.asearch(clustered(2))), await begun(session.asearch(clustered(2), 5, 4))
            assert held.entered.wait(WAIT_S)
            gone.cancel()
            held.let_go()
            check(index, clustered(2), 5, 4, await kept)
            assert gone.cancelled()

        asyncio.run(run())
        assert session.stats.searches == 1


def test_errors_come_to_who_awaits(index, monkeypatch):
    def broken(*_args):
        raise RuntimeError("no quantizer")

    with Router(index) as router, router.session() as session:

        async def run():
            with pytest.raises(InvalidInputError, match="k is 0"):
                await router.asearch(clustered(1), 0)
            monkeypatch.setattr(index, "quantize", broken)
            outcomes = await asyncio.gather(
                router.asearch(clustered(1)), session.asearch(clustered(1)), return_exceptions=True
            )
            assert [str(outcome) for outcome in outcomes] == ["no quantizer"] * 2
            monkeypatch.undo()
            check(index, clustered(1), 10, 8, await session.asearch(clustered(1)))
            session.close()
            with pytest.raises(RouterClosedError, match="session"):
                await session.asearch(clustered(1))

        asyncio.run(run())


def test_a_loop_that_is_closed_stops_nobody_and_is_forgotten(index, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("hybridindex"), "propagate", True)
    held = Held(index, monkeypatch)
    with Router(index) as router:

        async def leave():
            await begun(router.asearch(clustered(1)))
            assert await asyncio.to_thread(held.entered.wait, WAIT_S)

        asyncio.run(leave())
        held.let_go()
        check(index, clustered(2), 5, 4, router.submit(clustered(2), 5, 4).result(WAIT_S))

        # No search failed. What a batch answers may come in two parts, and each part says so.
        assert {record.getMessage() for record in caplog.records} == {"answers came after their event loop was closed"}

        async def search():
            check(index, clustered(2), 5, 4, await router.asearch(clustered(2), 5, 4))

        for _ in range(3):
            asyncio.run(search())
        assert len(router._served.searcher.mailboxes._of) == 1


def test_loops_of_several_threads_get_their_own_answers(index):
    with Router(index) as router:
        failures = []

        async def many(seed):
            for number in range(10):
                n = 1 + (seed + number) % 4
                results = await asyncio.gather(*[router.asearch(clustered(n, seed=seed), 5, 4) for _ in range(3)])
                for result in results:
                    check(index, clustered(n, seed=seed), 5, 4, result)

        def run(seed) -> None:
            try:
                asyncio.run(many(seed))
            except BaseException as error:  # noqa: BLE001 - shown on the test's thread
                failures.append(error)

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not failures
