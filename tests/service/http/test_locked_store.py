"""Another process holds the control store's lock: health is told at once, and sessions and searches do not wait."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing

import pytest

from hybridindex.errors import OverloadedError
from hybridindex.service import status
from hybridindex.service.http import upkeep
from hybridindex.service.http.store_calls import StoreCalls
from hybridindex.service.observe.series import Series
from tests.service.conftest import talk


def test_health_and_sessions_never_wait_for_the_store(service, queries, monkeypatch):
    """Each call of /healthz used to hold a thread for as long as the store was locked, and all others waited."""
    monkeypatch.setattr(status, "_PATIENCE_S", 1.0)
    lock = sqlite3.connect(service.store.file, isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")

    async def conversation(http):
        asked = [asyncio.create_task(http.get("/healthz")) for _ in range(40)]
        opened = await http.post("/v1/sessions", json={})
        assert opened.status_code == 201
        path = f"/v1/sessions/{opened.json()['session']}"
        body = {"queries": queries[:1].tolist()}
        assert (await http.post(f"{path}/lookahead", json=body)).status_code == 202
        assert (await http.post(f"{path}/search", json=body)).status_code == 200
        for answer in [*await asyncio.gather(*asked), await http.get("/healthz")]:
            assert answer.status_code == 503
            [check] = [check for check in answer.json()["checks"] if not check["ok"]]
            assert check["name"] == "control store"
            assert check["detail"].startswith("no answer for"), "it did not wait for the end of the lock"
        lock.execute("ROLLBACK")
        while (await http.get("/healthz")).status_code != 200:
            pass

    with closing(lock):
        talk(service, conversation)


def test_upkeep_that_finds_the_line_full_comes_later(service, monkeypatch, caplog):
    """It was logged as an error of devices, and of a plan that waits."""
    caplog.set_level("INFO")
    for name in ("_SAMPLE_S", "_STORE_S"):
        monkeypatch.setattr(upkeep, name, 0.0)

    class Full(StoreCalls):
        refused = 0

        async def read(self, *_args, **_options):
            self.refused += 1
            raise OverloadedError("64 calls wait", retry_after_s=1)

    async def run():
        calls = Full(asyncio.get_running_loop().time, client_share=0.5)
        async with upkeep.keep_running(service, Series(service, lambda: 0.0), calls):
            while calls.refused < 4:
                await asyncio.sleep(0)

    asyncio.run(run())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert "checking the devices must wait: 64 calls wait" in caplog.text
    assert "checking the control store must wait: 64 calls wait" in caplog.text


def test_calls_that_wait_for_the_store_are_shared_between_clients():
    async def run():
        loop = asyncio.get_running_loop()
        calls, ended, order = StoreCalls(loop.time, client_share=0.5), [], []
        gates = [asyncio.Event() for _ in range(4)]

        def held(number):
            asyncio.run_coroutine_threadsafe(gates[number].wait(), loop).result(300)

        flood = [asyncio.create_task(calls.read("flood", held, number)) for number in range(4)]
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(calls.read("flood", order.append, "flood")) for _ in range(32)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="32 of your calls wait") as refused:
            await calls.read("flood", order.append, "flood")
        assert refused.value.own_share
        modest = asyncio.create_task(calls.read("modest", order.append, "modest"))
        await asyncio.sleep(0)
        # Given up, a call that runs keeps its thread until it ends.
        flood[0].cancel()
        gates[1].set()
        await asyncio.gather(modest, *waiting)
        assert order.index("modest") <= 1
        for gate in gates:
            gate.set()
        ended = await asyncio.gather(*flood, return_exceptions=True)
        assert isinstance(ended[0], asyncio.CancelledError)
        calls.close()

    asyncio.run(run())


def test_changes_go_one_after_the_other_and_nobody_waits_for_long(monkeypatch):
    monkeypatch.setattr("hybridindex.service.http.store_calls._CHANGE_S", 0.01)

    async def run():
        loop = asyncio.get_running_loop()
        calls, gate = StoreCalls(loop.time, client_share=0.5), asyncio.Event()
        moving = asyncio.create_task(
            calls.change("a", lambda: asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(300))
        )
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="another change"):
            await calls.change("b", int)
        gate.set()
        await moving
        assert await calls.change("b", int, "3") == 3
        calls.close()

    asyncio.run(run())
