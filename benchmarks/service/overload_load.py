"""The clients of the overload benchmark: prepared requests over kept connections, on one thread and one epoll.

They share their cores with the daemon, so they do no more than they must: once in a tick they send what is due and
read what has come. So latencies are off by a tick at most, and what is due in one tick is sent together, which spares
the daemon wake-ups too. No retries but those that a refusal asks for. For answers of the daemon alone: each has a
length. What the load is good for, and what it shows, is in ``overload.py``.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.service.connection import request_bytes
from hybridindex.types import F64

__all__ = ["Clients", "Tally"]

#: How often the queue is looked at.
_WATCH_S = 0.25


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    #: Whose request is under way, and when it was due; -1: nobody's.
    client: int = -1
    due: float = 0.0
    taken: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    client: int
    due: float
    status: int
    retry_after_s: float | None
    body_bytes: int


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of one load."""

    seconds: float = 0.0
    #: CPU time of this process over wall time: 1 is a whole core.
    cpu: float = 0.0
    sent: int = 0
    #: Not sent: all connections were busy, or their client had been told to come back later.
    unsent: int = 0
    held_back: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    #: From due time to answer, of answers with status 200.
    latencies_s: list[float] = field(default_factory=list)
    retry_after_s: Counter[float] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    #: Queries seen waiting in the daemon.
    deepest_queue: int = 0


class Clients:
    """Some clients, and the connections that they take in turn. One thread; close it once."""

    def __init__(
        self, port: int, requests: list[bytes], *, status_key: str, most_open: int, body_bytes: int, tick_s: float
    ) -> None:
        """
        Args:
            requests: one per client, whole.
            status_key: shown when the queue is looked at.
            body_bytes: length that the body of each answer must have.
            tick_s: how often the clients look.
        """
        self._port, self._requests, self._most_open = port, requests, most_open
        self._body_bytes, self._tick_s = body_bytes, tick_s
        self._status = request_bytes("GET", "/v1/status", key=status_key)
        self._poll = select.epoll()
        self._open: dict[int, _Connection] = {}
        self._idle: deque[_Connection] = deque()
        self._watcher = self._connect()

    def wait_ready(self) -> None:
        """Returns when the daemon has warmed up."""
        while not self._ask(request_bytes("GET", "/readyz")).startswith(b"HTTP/1.1 200 "):
            time.sleep(0.05)

    def close(self) -> None:
        """Ends all connections."""
        self._watcher.close()
        for connection in self._open.values():
            connection.socket.close()
        self._poll.close()

    def closed_loop(self, seconds: float, *, beside: float = 0.0) -> Tally:
        """Each client sends again as soon as it is answered. ``beside``: cores that are wasted here meanwhile."""
        tally = Tally()

        def react(answer: _Answer, now: float) -> None:
            self._judge(answer, now, tally)
            if now < seconds:
                self._send(answer.client, now, tally)

        def begin(now: float) -> None:
            if not tally.sent:
                for client in range(len(self._requests)):
                    self._send(client, now, tally)

        self._run(tally, begin, react, seconds, beside)
        return tally

    def open_loop(self, arrivals: F64, *, patient: bool) -> Tally:
        """The clients in turn send when it is due, whatever became of the requests before.

        Args:
            arrivals: (n,) seconds, ascending.
            patient: a client that is told to come back later sends nothing until then; then that request again.
        """
        tally = Tally()
        resting = np.zeros(len(self._requests))
        again: list[tuple[float, int]] = []
        number = 0

        def send_due(now: float) -> None:
            nonlocal number
            while number < len(arrivals) and arrivals[number] <= now:
                client, due = number % len(self._requests), float(arrivals[number])
                number += 1
                if resting[client] > now:
                    tally.held_back += 1
                else:
                    self._send(client, due, tally)
            for entry in [entry for entry in again if entry[0] <= now]:
                again.remove(entry)
                self._send(entry[1], entry[0], tally)

        def react(answer: _Answer, now: float) -> None:
            self._judge(answer, now, tally)
            if patient and answer.retry_after_s is not None and now < arrivals[-1]:
                resting[answer.client] = max(resting[answer.client], now + answer.retry_after_s)
                again.append((now + answer.retry_after_s, answer.client))

        self._run(tally, send_due, react, float(arrivals[-1]), 0.0)
        return tally

    def _run(
        self,
        tally: Tally,
        send: Callable[[float], None],
        react: Callable[[_Answer, float], None],
        seconds: float,
        beside: float,
    ) -> None:
        """Looks again and again for ``seconds``, and then until all is answered. Times in seconds from the start."""
        began_cpu, began = time.process_time(), time.perf_counter()
        watched, over = 0.0, False
        while not over or len(self._idle) < len(self._open):
            now = time.perf_counter() - began
            if not over:
                over = now >= seconds
                tally.seconds, tally.cpu = now, time.process_time() - began_cpu
                send(now)
            for answer in self._answers(tally):
                react(answer, time.perf_counter() - began)
            if now - watched >= _WATCH_S:
                watched = now
                self._watch(tally)
            if beside and not over:
                ends = time.thread_time() + beside * self._tick_s
                while time.thread_time() < ends:
                    pass
            time.sleep(self._tick_s)
        tally.cpu /= tally.seconds

    def _connect(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self._port))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def _send(self, client: int, due: float, tally: Tally) -> None:
        if self._idle:
            connection = self._idle.popleft()
        elif len(self._open) < self._most_open:
            connection = _Connection(self._connect())
            self._open[connection.socket.fileno()] = connection
            self._poll.register(connection.socket, select.EPOLLIN)
        else:
            tally.unsent += 1
            return
        connection.client, connection.due = client, due
        connection.socket.sendall(self._requests[client])
        tally.sent += 1

    def _answers(self, tally: Tally) -> Iterator[_Answer]:
        for number, _ in self._poll.poll(0):
            connection = self._open[number]
            data = connection.socket.recv(1 << 16)
            if not data:
                self._lose(connection, tally)
                continue
            if connection.taken:
                data = connection.taken + data
            end = data.find(b"\r\n\r\n")
            length = _length(data, end) if end >= 0 else 0
            if end < 0 or len(data) < end + 4 + length:
                connection.taken = data
                continue
            status, wait = int(data[9:12]), _value(data, b"retry-after-ms", end)
            yield _Answer(
                client=connection.client,
                due=connection.due,
                status=status,
                retry_after_s=None if wait is None else float(wait) / 1e3,
                body_bytes=length,
            )
            connection.client, connection.taken = -1, b""
            self._idle.append(connection)

    def _lose(self, connection: _Connection, tally: Tally) -> None:
        self._poll.unregister(connection.socket)
        del self._open[connection.socket.fileno()]
        connection.socket.close()
        if connection.client >= 0:
            tally.faults["closed before the answer"] += 1
        else:
            self._idle.remove(connection)

    def _judge(self, answer: _Answer, now: float, tally: Tally) -> None:
        tally.statuses[answer.status] += 1
        if answer.status == 200:
            tally.latencies_s.append(now - answer.due)
            if answer.body_bytes != self._body_bytes:
                tally.faults["answers of a wrong length"] += 1
        elif answer.status in (429, 503):
            if answer.retry_after_s is None:
                tally.faults["refusals without Retry-After-Ms"] += 1
            else:
                tally.retry_after_s[answer.retry_after_s] += 1
        elif answer.status != 504:
            tally.faults[f"status {answer.status}"] += 1

    def _watch(self, tally: Tally) -> None:
        answer = self._ask(self._status)
        tally.deepest_queue = max(
            tally.deepest_queue, json.loads(answer[answer.find(b"\r\n\r\n") :])["queue"]["waiting"]
        )

    def _ask(self, request: bytes) -> bytes:
        """The whole answer, waited for, on the connection that looks at the queue."""
        self._watcher.sendall(request)
        data = b""
        while (end := data.find(b"\r\n\r\n")) < 0 or len(data) < end + 4 + _length(data, end):
            data += self._watcher.recv(1 << 16)
        return data


def _length(data: bytes, end: int) -> int:
    return int(_value(data, b"content-length", end) or 0)


def _value(data: bytes, name: bytes, end: int) -> bytes | None:
    """Of one header, by its lower-case name, before ``end``."""
    at = data.find(b"\r\n" + name + b": ", 0, end)
    if at < 0:
        return None
    start = at + len(name) + 4
    return data[start : data.find(b"\r\n", start)]
