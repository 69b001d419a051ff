"""A call ends in its time, whatever the other side does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import httpx
import numpy as np
import pytest

from hybridindex import errors
from hybridindex.client import AsyncClient, Client

QUERY = np.zeros((1, 4), np.float32)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2000\r\n\r\n"
#: Seconds that a call of 0.2 s may take on a busy machine; without its limit it takes 5 and more.
SOON_S = 1.5


@pytest.fixture
def server():
    """Makes servers that send ``parts`` one after another, ``pause_s`` before each, to all who ask."""
    listening, over = [], threading.Event()

    def serve(connection, parts, pause_s):
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            for part in parts:
                if over.wait(pause_s):
                    return
                connection.sendall(part)
            over.wait(10)

    def accept(sock, parts, pause_s):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = sock.accept()
                threads.append(threading.Thread(target=serve, args=(connection, parts, pause_s)))
                threads[-1].start()

    threads: list[threading.Thread] = []

    def start(parts, pause_s):
        sock = socket.create_server(("127.0.0.1", 0))
        listening.append(sock)
        threads.append(threading.Thread(target=accept, args=(sock, parts, pause_s)))
        threads[-1].start()
        return f"http://127.0.0.1:{sock.getsockname()[1]}"

    yield start
    over.set()
    for sock in listening:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    for thread in list(threads):
        thread.join(10)


TRICKLES = {
    "body": ([HEAD, *[b"x"] * 2000], 0.01),
    "stalls": ([HEAD, b"x"], 0.09),
    "head": ([bytes([each]) for each in HEAD], 0.15),
}


@pytest.mark.parametrize("ask", [lambda c: c.search(QUERY, deadline_ms=200), lambda c: c.status()])
@pytest.mark.parametrize("trickle", TRICKLES)
def test_a_server_that_trickles_does_not_keep_a_call(server, trickle, ask):
    url = server(*TRICKLES[trickle])
    began_s = time.monotonic()
    with Client(url, timeout_s=0.2) as client, pytest.raises(errors.UnreachableError):
        ask(client)
    assert time.monotonic() - began_s < SOON_S


@pytest.mark.parametrize("ask", [lambda c: c.search(QUERY, deadline_ms=200), lambda c: c.status()])
@pytest.mark.parametrize("trickle", TRICKLES)
def test_nor_one_of_the_asynchronous_client(server, trickle, ask):
    url = server(*TRICKLES[trickle])

    async def run():
        async with AsyncClient(url, timeout_s=0.2) as client:
            with pytest.raises(errors.UnreachableError, match="no answer from the daemon"):
                await ask(client)

    began_s = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began_s < SOON_S


def test_a_slow_answer_within_its_time_is_read(server):
    body = b'{"ok": 1}'
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    url = server([head, *(bytes([each]) for each in body)], 0.02)
    with Client(url, timeout_s=10) as client:
        assert client.status() == {"ok": 1}

    async def run():
        async with AsyncClient(url, timeout_s=10) as client:
            return await client.status()

    assert asyncio.run(run()) == {"ok": 1}


def test_the_outer_cancellation_is_not_taken_for_the_limit(server):
    url = server([HEAD], 0.01)

    async def run():
        async with AsyncClient(url, timeout_s=10) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.status()

    asyncio.run(run())


def test_an_answer_that_is_whole_already_is_taken_however_late():
    def late(_request):
        time.sleep(0.05)
        return httpx.Response(200, json={"ok": 1})

    with Client("http://daemon", timeout_s=0.01, transport=httpx.MockTransport(late)) as client:
        assert client.status() == {"ok": 1}
