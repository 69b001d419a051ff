"""The floods go on for as long as they are measured."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest

from benchmarks.service import flood


def test_stalled_bodies_are_opened_again_when_the_daemon_has_closed_them():
    with socket.create_server(("127.0.0.1", 0), backlog=flood._STALLED) as server:
        sending = flood._Flood(server.getsockname()[1], "key")

        server.settimeout(20)
        refused = []

        def refuse():
            with suppress(TimeoutError):
                while len(refused) <= 2 * flood._STALLED:
                    connection, peer = server.accept()
                    with connection, suppress(ConnectionError):
                        connection.recv(1 << 12)
                        connection.sendall(b"HTTP/1.1 429 Too Many Requests\r\n\r\n")
                    refused.append(peer)
            sending.over.set()

        refusing = threading.Thread(target=refuse)
        refusing.start()
        with suppress(ConnectionError):  # of one that is opened when the server ends
            flood._stalled(sending)
        refusing.join()
    assert len(refused) > 2 * flood._STALLED


@pytest.mark.parametrize(("status", "passed"), [("429", True), ("401", False)])
def test_a_flood_that_did_not_come_through_shows_nothing(status, passed):
    found = {
        "of_bound": 0.5,
        "attainment_ratio": 1.0,
        "ended_s": 1.0,
        "beside": {"sent": 150},
        "answers_beside": {status: 1000},
    }
    assert flood._passed({"any": found}) is passed
