"""Clients that reset their connections at any moment: no error of ours, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import struct
import threading

import numpy as np
import pytest

from hybridindex.router.remote.loop_thread import new_event_loop
from hybridindex.service.daemon import Daemon
from hybridindex.service.daemon_address import bind_tcp
from tests.service.test_daemon import certificate

HEAD = b"POST /v1/search?k=2000&nprobe=1 HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
BINARY = b"Accept: application/octet-stream\r\n"


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def play(port: int, body: bytes, context: ssl.SSLContext | None) -> None:
    whole = HEAD + BINARY + b"Content-Length: %d\r\n\r\n" % len(body)
    halves = [b"", HEAD, whole, whole + body[:100], whole + body, whole + body + whole]
    session = HEAD.replace(b"/v1/search", b"/v1/sessions/none/search") + b"Content-Length: 1000\r\n\r\n" + bytes(9)
    other = HEAD.replace(b"/v1/search", b"/v1/sessions") + b"Content-Length: 1000\r\n\r\n" + bytes(9)
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"
    for sent in [*halves, session, other, chunked, b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"]:
        for reads in (False, True):
            raw = socket.create_connection(("127.0.0.1", port))
            raw.settimeout(30)
            connection = raw if context is None or sent.startswith(b"\x16") else context.wrap_socket(raw)
            connection.sendall(sent)
            if reads:
                connection.settimeout(0.1)
                with contextlib.suppress(OSError):
                    connection.recv(1)
            reset(connection)


def serve_beside(run, service, bound, loop):
    """Serves on ``bound`` until ``run``, on a thread of its own, has sent SIGTERM."""

    async def main():
        player = threading.Thread(target=run)
        running = Daemon(service, None, [bound])
        player.start()
        await running.run()
        player.join(300)

    with asyncio.Runner(loop_factory=new_event_loop if loop == "uvloop" else None) as runner:
        runner.run(main())


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_clients_that_reset_are_no_errors(make_service, queries, tmp_path, caplog, loop, tls):
    caplog.set_level(logging.DEBUG)
    certificates = certificate(tmp_path) if tls else (None, None)
    service = make_service(warm=False, tls_cert=certificates[0], tls_key=certificates[1])
    context = None
    if tls:
        context = ssl.create_default_context(cafile=str(certificates[0]))
        context.check_hostname = False
    bound = bind_tcp("127.0.0.1", 0)
    failed: list[BaseException] = []

    def run():
        try:
            while not service.ready:
                pass
            play(bound.getsockname()[1], np.tile(queries, (25, 1)).tobytes(), context)
        except BaseException as error:  # noqa: BLE001 - raised on the test's thread
            failed.append(error)
        os.kill(os.getpid(), signal.SIGTERM)

    serve_beside(run, service, bound, loop)
    assert not failed, failed
    assert service.memory.taken_bytes == 0
    assert service.admission.n_in_flight == service.admission.n_waiting == 0
    worse = [r for r in caplog.records if r.levelno >= logging.ERROR or r.exc_info]
    assert not worse, [(r.name, r.getMessage(), r.exc_text) for r in worse]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_silent_tls_connection_ends_when_headers_would(make_service, tmp_path, loop):
    cert, private = certificate(tmp_path)
    service = make_service(warm=False, tls_cert=cert, tls_key=private, limits={"client_timeout_s": 1.0})
    bound, said = bind_tcp("127.0.0.1", 0), []

    def run():
        while not service.ready:
            pass
        with socket.create_connection(bound.getsockname()) as silent:
            silent.settimeout(15)  # it used to last a minute
            try:
                said.append(silent.recv(1))
            except OSError as error:
                said.append(error)
        os.kill(os.getpid(), signal.SIGTERM)

    serve_beside(run, service, bound, loop)
    assert said == [b""] or isinstance(said[0], ConnectionResetError)
