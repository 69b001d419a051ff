"""Connections that take too long or send too much, on each of the HTTP parsers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time

import pytest

from hybridindex.client import Client
from hybridindex.router.remote.loop_thread import new_event_loop
from hybridindex.service import daemon as run
from hybridindex.service.daemon_address import bind_tcp
from hybridindex.service.http.protocol import TimedH11Protocol, _ConnectionTimeouts, _OneWrite, choose_protocol
from tests.service.conftest import assert_same
from tests.service.test_daemon import run_daemon

HEAD = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(params=["h11", "httptools"])
def protocol(request, monkeypatch):
    if request.param == "h11":
        monkeypatch.setattr(run, "choose_protocol", lambda turn_away: TimedH11Protocol)
    else:
        pytest.importorskip("httptools")
        assert choose_protocol(lambda scope, target, lines: None) is not TimedH11Protocol


def converse(service, talk):
    """What ``talk(connection)`` returns on a connection to a daemon."""
    sockets = [bind_tcp("127.0.0.1", 0)]

    def play():
        with socket.create_connection(sockets[0].getsockname()) as connection:
            connection.settimeout(30)
            said = talk(connection)
        os.kill(os.getpid(), signal.SIGTERM)
        return said

    return run_daemon(service, sockets, play)


def everything(connection) -> bytes:
    """Until the daemon closes."""
    found = b""
    try:
        while part := connection.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


def test_slow_headers_end_the_connection(make_service, protocol):
    service = make_service(warm=False, limits={"client_timeout_s": 1.0})

    def talk(connection):
        connection.sendall(HEAD + b"X-Slow: ")
        return connection.recv(100)

    assert converse(service, talk) == b""


@pytest.mark.parametrize("before", [b"", HEAD + b"\r\n"], ids=["at once", "after another"])
def test_endless_headers_end_the_connection(make_service, protocol, before):
    """Long before their time is over: 30 s by default, of which the test's clock would see the half."""
    service = make_service(warm=False)

    def talk(connection):
        connection.settimeout(15)
        connection.sendall(before + HEAD)
        sent = 0
        try:
            while sent < 1 << 24:
                sent += 8192  # also what a reset cuts short: the daemon may have read it
                connection.sendall(b"X-Long: " + b"x" * 8182 + b"\r\n")
        except (ConnectionResetError, BrokenPipeError):
            pass
        return sent

    assert 1 << 16 <= converse(service, talk) < 1 << 24


@pytest.mark.parametrize("line", [b"aa: bb\r\n", b"x" * 8192], ids=["many", "one without an end"])
def test_endless_trailers_end_the_connection(make_service, protocol, line):
    """What may follow a body in parts is counted as headers are, and nobody keeps it."""
    service = make_service(warm=False)

    def talk(connection):
        connection.settimeout(15)
        connection.sendall(HEAD.replace(b"GET /livez", b"POST /v1/search") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n")
        connection.sendall(b"X-Long: " if len(line) > 100 else b"")
        sent, part = 0, line * (8192 // len(line))
        try:
            while sent < 1 << 24:
                sent += len(part)
                connection.sendall(part)
        except (ConnectionResetError, BrokenPipeError):
            pass
        return sent

    assert converse(service, talk) < 1 << 24


def test_what_follows_a_body_is_no_header_of_the_request(make_service, protocol):
    service = make_service(warm=False)

    def talk(connection):
        head = HEAD.replace(b"GET /livez", b"POST /v1/search") + b"X-Request-Id: before\r\n"
        head += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        connection.sendall(head + b"2\r\n{}\r\n0\r\nX-Request-Id: after\r\n\r\n")
        return everything(connection)

    said = converse(service, talk)
    assert b"x-request-id: before" in said
    assert b"after" not in said


def test_large_headers_are_taken(make_service, protocol):
    """The same ones on both: half of what ends a connection."""
    service = make_service(warm=False)

    def talk(connection):
        connection.sendall(HEAD + b"Connection: close\r\n")
        for _ in range(4):
            connection.sendall(b"X-Long: " + b"x" * 8182 + b"\r\n")
            time.sleep(0.05)  # read apart: what comes whole passes any limit
        connection.sendall(b"\r\n")
        return everything(connection)

    assert converse(service, talk).startswith(b"HTTP/1.1 200 ")


def test_bodies_are_no_headers(make_service, protocol, queries):
    """A body larger than any headers may be, on a connection that is kept."""
    service = make_service(warm=False)
    many = queries.repeat(100, axis=0)
    expected = service.router.search(many, 3)
    sockets = [bind_tcp("127.0.0.1", 0)]

    def play():
        with Client(f"http://127.0.0.1:{sockets[0].getsockname()[1]}") as client:
            for _ in range(3):
                assert_same(client.search(many, 3), expected)
        os.kill(os.getpid(), signal.SIGTERM)

    assert many.nbytes > 1 << 17
    run_daemon(service, sockets, play)


class _Loop:
    """A clock that the test moves, and the timers that were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, object]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay, callback):
        self.timers.append((self.now + delay, callback))
        return self

    def advance(self) -> None:
        self.now, callback = self.timers.pop(0)
        callback()


def test_whoever_is_turned_away_has_the_full_time_for_the_next_request():
    class Turned(_ConnectionTimeouts):
        timeout_keep_alive, cycle = 30, None

        def __init__(self) -> None:
            self.loop, self.transport = _Loop(), _Recorded()

    connection = Turned()
    connection._wait_for_headers()
    for moment in (10.0, 29.0):
        connection.loop.now = connection._turned_s = moment
    connection.loop.advance()
    assert (connection.loop.now, connection.transport.closed) == (30, False)
    assert [at for at, _ in connection.loop.timers] == [59]
    connection.loop.advance()
    assert connection.transport.closed
    assert not connection.loop.timers


def test_an_answer_without_a_body_is_sent_at_once(make_service, protocol):
    service = make_service(warm=False)

    def talk(connection):
        connection.settimeout(15)  # half of the time after which the connection ends
        said = b""
        for line in (b"HEAD /livez", b"HEAD /v1/status", b"HEAD /", b"GET /livez"):
            connection.sendall(HEAD.replace(b"GET /livez", line) + b"\r\n")
            part = connection.recv(1 << 16)
            while not part.endswith(b"\r\n\r\n") and line.startswith(b"HEAD"):
                part += connection.recv(1 << 16)
            said += part
        return said

    assert converse(service, talk).count(b"HTTP/1.1 ") == 4


def test_pipelined_requests_are_answered_in_order(make_service, protocol):
    service = make_service(warm=False)

    def talk(connection):
        connection.sendall(HEAD + b"X-Request-Id: a\r\n\r\n" + HEAD + b"X-Request-Id: b\r\nConnection: close\r\n\r\n")
        return everything(connection)

    said = converse(service, talk)
    assert said.count(b"HTTP/1.1 200") == 2
    assert said.index(b"x-request-id: a") < said.index(b"x-request-id: b")


def test_the_loop_is_uvloops_where_that_is_installed():
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert isinstance(runner.get_loop(), uvloop.Loop)


class _Recorded(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data) -> None:
        assert not self.closed
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def test_head_and_body_are_written_together():
    transport = _Recorded()
    one = _OneWrite(transport)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
    for data in (head, b"ab", head, b"", b"HTTP/1.1 100 Continue\r\n\r\n", head, b"a", b"b"):
        one.write(data)
    assert transport.written == [head + b"ab", head, b"HTTP/1.1 100 Continue\r\n\r\n", head + b"a", b"b"]


def test_a_head_without_a_body_goes_out_before_the_end():
    transport = _Recorded()
    one = _OneWrite(transport)
    one.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    one.close()
    assert transport.written == [b"HTTP/1.1 204 No Content\r\n\r\n"]
    assert transport.closed
