"""The asking end of a channel, against servers that do as a test says."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest

from hybridindex.errors import UnreachableError
from hybridindex.router.remote import channel as channel_module
from hybridindex.router.remote import connection
from hybridindex.router.remote.channel import Channel
from hybridindex.router.remote.connection import Address, Exchange
from hybridindex.router.remote.frames import ANSWER, CANCEL, HEAD_BYTES, REFUSAL, frame
from tests.unreachable import unreachable

PATIENCE_S = 20.0
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: hybridindex-scans\r\n\r\n"


class Server:
    """Each connection is given to the next of ``scripts``, after the upgrade."""

    def __init__(self, *scripts, head=SWITCHED):
        self.scripts, self.head = list(scripts), head
        self.requests, self.url = [], ""
        self.tasks = set()

    async def serve(self, reader, writer):
        self.tasks.add(asyncio.current_task())
        try:
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(self.head)
            await self.scripts.pop(0)(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, IndexError):
            pass
        finally:
            writer.close()


async def read_frame(reader):
    head = await reader.readexactly(HEAD_BYTES)
    length, number, kind, extra = (int.from_bytes(head[a:b], "little") for a, b in ((0, 4), (4, 8), (8, 10), (10, 12)))
    payload = await reader.readexactly(length)
    return kind, number, payload[:extra], payload[extra:]


async def echo(reader, writer):
    while True:
        kind, number, _, body = await read_frame(reader)
        if kind != CANCEL:
            writer.write(frame(ANSWER, number, body))


async def end_after_one(reader, _writer):
    await read_frame(reader)


@asynccontextmanager
async def serving(server, key=None):
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    channel = Channel(asyncio.get_running_loop(), Address(f"http://{host}:{port}", key))
    try:
        yield channel
    finally:
        channel.close()
        listening.close()
        for task in server.tasks:
            task.cancel()
        await asyncio.gather(*server.tasks, return_exceptions=True)


def ask(channel, body, most_bytes=1 << 20):
    """The exchange, and a future of what it is told."""
    future = asyncio.get_running_loop().create_future()
    exchange = Exchange(lambda *told: future.set_result(told), most_bytes)
    channel.ask("n=1", body, exchange)
    return exchange, asyncio.wait_for(future, PATIENCE_S)


async def asked(channel, body, **options):
    return await ask(channel, body, **options)[1]


def test_scans_go_both_ways_on_one_connection():
    async def test():
        server = Server(echo)
        async with serving(server, key="secret") as channel:
            waiting = [ask(channel, bytes([i]) * (1 + i))[1] for i in range(20)]
            for i, answer in enumerate(waiting):
                assert await answer == (200, bytes([i]) * (1 + i), None)
            assert len(server.requests) == 1
            assert server.requests[0].startswith(b"GET /v1/cluster/channel HTTP/1.1\r\n")
            assert b"\r\nauthorization: Bearer secret\r\n" in server.requests[0]

    asyncio.run(test())


def test_a_refusal_has_its_status():
    async def refuse(reader, writer):
        _, number, _, _ = await read_frame(reader)
        writer.write(frame(REFUSAL, number, b"{}", extra=503))
        await reader.read()

    async def test():
        async with serving(Server(refuse)) as channel:
            assert await asked(channel, b"a") == (503, b"{}", None)

    asyncio.run(test())


def test_what_a_node_that_stops_did_not_answer_is_asked_once_more():
    async def test():
        server = Server(end_after_one, echo)
        async with serving(server) as channel:
            assert await asked(channel, b"a") == (200, b"a", None)
            assert len(server.requests) == 2
        server = Server(end_after_one, end_after_one, echo)
        async with serving(server) as channel:
            status, _, error = await asked(channel, b"a")
            assert status == 0
            assert "ended the connection" in str(error)
            assert await asked(channel, b"b") == (200, b"b", None)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\n\r\nno", "opens no channel for scans: HTTP/1.1 401"),
        (b"HTTP/1.1 1010 What\r\n\r\n", "opens no channel"),
        (b"x: y\r\n" * 20_000, "too many headers"),
        (b"", "ended the connection"),
    ],
)
def test_who_opens_no_channel_is_told(head, words):
    async def nothing(_reader, _writer):
        pass

    async def test():
        async with serving(Server(nothing, head=head)) as channel:
            status, _, error = await asked(channel, b"a")
            assert status == 0
            assert words in str(error)

    asyncio.run(test())


@pytest.mark.parametrize("kind", [CANCEL, 77])
def test_what_is_no_answer_ends_the_connection_only(kind):
    async def talk(reader, writer):
        _, number, _, _ = await read_frame(reader)
        writer.write(frame(kind, number))
        await reader.read()

    async def test():
        async with serving(Server(talk, echo)) as channel:
            status, _, error = await asked(channel, b"a")
            assert status == 0
            assert f"of kind {kind}" in str(error)
            assert await asked(channel, b"b") == (200, b"b", None)

    asyncio.run(test())


def test_an_answer_to_nobody_that_is_too_long_ends_the_connection():
    """Else all that comes after it would be taken for its rest."""

    async def talk(reader, writer):
        await read_frame(reader)
        writer.write(frame(ANSWER, 99, bytes(200)))
        await reader.read()

    async def test():
        async with serving(Server(talk, echo)) as channel:
            status, _, error = await asked(channel, b"a", most_bytes=100)
            assert status == 0
            assert "200 bytes, more than 100" in str(error)
            assert (await asked(channel, b"b"))[0] == 200

    asyncio.run(test())


def test_an_answer_that_is_too_long_is_not_read():
    async def test():
        async with serving(Server(echo, echo)) as channel:
            status, _, error = await asked(channel, bytes(101), most_bytes=100)
            assert status == 0
            assert "101 bytes, more than 100" in str(error)
            assert (await asked(channel, bytes(100), most_bytes=100))[0] == 200

    asyncio.run(test())


def test_a_cancelled_scan_is_told_to_the_node_and_its_answer_is_skipped():
    async def late(reader, writer):
        _, first, _, _ = await read_frame(reader)
        kind, number, _, _ = await read_frame(reader)
        assert (kind, number) == (CANCEL, first)
        _, second, _, _ = await read_frame(reader)
        writer.write(frame(ANSWER, first, b"late") + frame(ANSWER, second, b"second"))
        await reader.read()

    async def test():
        server = Server(late)
        async with serving(server) as channel:
            exchange, answer = ask(channel, b"a")
            while not server.requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            exchange.cancel()
            assert await asked(channel, b"b") == (200, b"second", None)
            answer.close()

    asyncio.run(test())


def test_nobody_there_and_closed():
    async def test():
        server = Server(echo)
        async with serving(server) as channel:
            waiting = ask(channel, b"a")[1]
            channel.close()
            assert "closed" in str((await waiting)[2])
            assert "closed" in str((await asked(channel, b"b"))[2])
        status, _, error = await asked(Channel(asyncio.get_running_loop(), Address("http://127.0.0.1:9", None)), b"a")
        assert status == 0
        assert isinstance(error, UnreachableError)

    asyncio.run(test())


def test_dropping_a_connection_fails_what_was_asked():
    async def never(reader, _writer):
        await reader.read()

    async def test():
        async with serving(Server(never, echo)) as channel:
            waiting = ask(channel, b"a")[1]
            await asyncio.sleep(0.1)
            channel.drop()
            assert "away" in str((await waiting)[2])
            assert await asked(channel, b"b") == (200, b"b", None)

    asyncio.run(test())


def test_a_connection_that_is_never_switched_is_made_anew(monkeypatch):
    monkeypatch.setattr(channel_module, "_SWITCH_WITHIN_S", 0.1)

    class HangsAtFirst(Server):
        async def serve(self, reader, writer):
            if not self.requests:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                await reader.read()
                writer.close()
            else:
                await super().serve(reader, writer)

    async def never(reader, writer):
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        await reader.read()
        writer.close()

    async def test():
        async with serving(HangsAtFirst(echo)) as channel:
            assert await asked(channel, b"a") == (200, b"a", None)
        listening = await asyncio.start_server(never, "127.0.0.1", 0)
        async with listening:
            channel = Channel(
                asyncio.get_running_loop(), Address(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", None)
            )
            assert "opened no channel" in str((await asked(channel, b"b"))[2])
            assert len(requests) == 2  # asked again once
            channel.close()

    requests = []
    asyncio.run(test())


def test_a_connection_that_nobody_takes_is_an_error_soon(monkeypatch):
    """As while the network is cut: nothing answers, and the system tries for minutes."""
    monkeypatch.setattr(connection, "_CONNECT_WITHIN_S", 0.3)

    async def test():
        channel = Channel(asyncio.get_running_loop(), Address(f"http://127.0.0.1:{port}", None))
        status, _, error = await asked(channel, b"a")
        assert (status, type(error)) == (0, UnreachableError)
        assert "within 0.3 s" in str(error)
        channel.close()

    with unreachable() as port:
        asyncio.run(test())


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_what_is_not_acknowledged_ends_its_connection(kind):
    """Else one that the network was cut under hangs for minutes after that is whole again."""
    if kind == "uvloop":
        new_loop = pytest.importorskip("uvloop").new_event_loop
    else:
        new_loop = asyncio.new_event_loop

    async def connect(port):
        made = []

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport):
                made.append(transport)

        await Address(f"http://127.0.0.1:{port}", None).connect(Protocol)
        found = made[0].get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        made[0].abort()
        await asyncio.sleep(0.01)
        return found

    loop = new_loop()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert loop.run_until_complete(connect(server.getsockname()[1])) == 4000
    finally:
        loop.close()
