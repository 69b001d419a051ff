"""Requests to one node over connections that stay open, against servers that do as a test says."""

from __future__ import annotations

import asyncio

import pytest

from hybridindex.router.remote.connection import Address, Connections, Exchange

PATIENCE_S = 20.0
#: Of an answer's body.
MOST = 1000
ENDLESS = {
    "header": (b"HTTP/1.1 200 OK\r\nx: ", b"a" * (1 << 14)),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"x: a\r\n"),
    "body": (b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n", b"a" * (1 << 14)),
    "chunks": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
    "extension": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;", b"a" * (1 << 14)),
    "trailer": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ", b"a" * (1 << 14)),
}


async def asked(connections, most=MOST):
    told = asyncio.get_running_loop().create_future()
    exchange = Exchange(lambda *said: told.set_result(said), most)
    connections.request("GET", "/", b"", exchange)
    try:
        return await asyncio.wait_for(told, PATIENCE_S)
    finally:
        exchange.cancel()


async def with_server(serve, test):
    serving = set()

    async def one(reader, writer):
        serving.add(asyncio.current_task())
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    connections = Connections(asyncio.get_running_loop(), Address(url, None))
    try:
        await test(connections)
    finally:
        connections.close()
        server.close()
        await asyncio.sleep(0)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


@pytest.mark.parametrize("what", ENDLESS)
def test_an_answer_that_never_ends_is_not_read_further(what):
    first, again = ENDLESS[what]

    async def endless(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(first)
        while True:
            writer.write(again)
            await writer.drain()

    async def test(connections):
        status, body, error = await asked(connections)
        assert (status, body) == (0, b"")
        assert error is not None
        assert not connections._all

    asyncio.run(with_server(endless, test))


def test_answers_of_any_length_that_is_allowed_come_on_one_connection():
    lengths, n_connections = [0, MOST, 1, MOST, 0], []

    async def serve(reader, writer):
        n_connections.append(1)
        for length in lengths:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length + b"a" * length)

    async def test(connections):
        for length in lengths:
            assert await asked(connections) == (200, b"a" * length, None)
        assert len(n_connections) == 1

    asyncio.run(with_server(serve, test))
