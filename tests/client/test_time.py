"""A call ends in its time, whatever the other side does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import time

import httpx
import numpy as np
import pytest

from hybridindex import errors
from hybridindex.client import AsyncClient, Client, RetryPolicy
from tests.unreachable import unreachable

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


@pytest.fixture
def slow_names(monkeypatch):
    """Names are looked up when the test is over, and not before; which were asked for."""
    look_up, over, asked = socket.getaddrinfo, threading.Event(), []

    def slow(host, *args, **options):
        if host != "daemon.example":
            return look_up(host, *args, **options)
        if options.get("flags") == socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        asked.append(host)
        over.wait(5)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    yield asked
    over.set()


@pytest.mark.parametrize("ask", [lambda c: c.search(QUERY, deadline_ms=200), lambda c: c.status()])
def test_a_name_that_is_not_looked_up_in_time_does_not_keep_a_call(slow_names, ask):
    began_s = time.monotonic()
    with Client("http://daemon.example:80", timeout_s=0.2) as client:
        with pytest.raises(errors.UnreachableError, match=r"the name daemon\.example was not looked up in time"):
            ask(client)
        assert time.monotonic() - began_s < SOON_S
        # Whoever asks meanwhile waits for the same look-up: threads do not gather behind a slow one.
        with pytest.raises(errors.UnreachableError, match="was not looked up"):
            ask(client)
    assert slow_names == ["daemon.example"]


def test_addresses_of_a_name_share_the_time_of_a_call(server, monkeypatch):
    """The first one takes no connections, as a machine that is away."""
    body = b'{"ok": 1}'
    url = server([b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body], 0)
    port = int(url.rpartition(":")[2])
    look_up = socket.getaddrinfo

    def found(host, asked_port, *args, **options):
        if host != "daemon.example":
            return look_up(host, asked_port, *args, **options)
        if options.get("flags") == socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in ("127.0.0.2", "127.0.0.1")]

    with unreachable("127.0.0.2", port):
        monkeypatch.setattr(socket, "getaddrinfo", found)
        with Client(f"http://daemon.example:{port}", timeout_s=1) as client:
            assert client.status() == {"ok": 1}


def test_a_name_without_an_address_is_an_error_at_once():
    for host in ("nosuch.invalid", "a" * 70):
        client = Client(f"http://{host}:80", timeout_s=5, retry=RetryPolicy(attempts=1))
        with client, pytest.raises(errors.UnreachableError, match=f"the name {host} has no address"):
            client.status()


def test_tls_that_never_begins_has_what_the_connection_left(server, monkeypatch):
    """Of a call of 2 s, taking the connection takes 1.7 s. With the whole time for each, it would end after 3.7."""
    connect = socket.create_connection

    def slow(*args, **options):
        time.sleep(1.7)
        return connect(*args, **options)

    url = server([b"x"], 20)
    monkeypatch.setattr(socket, "create_connection", slow)
    began_s = time.monotonic()
    with Client(url.replace("http:", "https:"), timeout_s=2) as client, pytest.raises(errors.UnreachableError):
        client.status()
    assert time.monotonic() - began_s < 3.5


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_asynchronous_client_of_a_loop_that_has_ended_says_so(server):
    body = b'{"ok": 1}'
    url = server([b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body], 0)
    client = AsyncClient(url)
    assert asyncio.run(client.status()) == {"ok": 1}
    with pytest.raises(errors.ServiceError, match="belongs to the event loop that used it first"):
        asyncio.run(client.status())
    del client
    gc.collect()  # the connection that nobody can close any more
