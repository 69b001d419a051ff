"""A load generator that costs little: one thread, prebuilt requests, plain sockets, a closed loop on each.

It shares the machine with the daemon that it loads, so what it takes is measured: its CPU time beside its requests. It
reads as many bytes as the first answer had, which is right where all answers are of one size, and checks that each
begins with a status of 200.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import time
from dataclasses import asdict, dataclass

import numpy as np

from hybridindex.types import F32

__all__ = ["Load", "closed_loop"]

_OK = b"HTTP/1.1 200 "


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one run did."""

    requests_per_s: float
    n_requests: int
    #: CPU time of the generator's process over the run's wall time: 1 is a whole core.
    cpu: float


def request(path: str, query: F32) -> bytes:
    """One binary search as it goes over the wire. ``query``: (d,)."""
    body = query.astype("<f4", copy=False).tobytes()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n"
        f"accept: application/octet-stream\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _answer_bytes(connection: socket.socket, message: bytes) -> int:
    """Sends one request and says how long its answer is."""
    connection.sendall(message)
    taken = b""
    while b"\r\n\r\n" not in taken:
        taken += connection.recv(1 << 16)
    head, _, rest = taken.partition(b"\r\n\r\n")
    assert head.startswith(_OK), taken
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    missing = int(fields[b"content-length"]) - len(rest)
    total = len(taken) + missing
    while missing > 0:
        missing -= len(connection.recv(missing))
    return total


def closed_loop(port: int, messages: list[bytes], seconds: float) -> Load:
    """Each of ``messages`` on a connection of its own, again as soon as it is answered."""
    connections = {}
    for message in messages:
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connections[connection.fileno()] = connection, message
    size = {_answer_bytes(connection, message) for connection, message in connections.values()}
    assert len(size) == 1, f"answers have {size} bytes; expected one size"
    total = size.pop()
    left = dict.fromkeys(connections, total)
    poll = select.epoll()
    for number, (connection, message) in connections.items():
        poll.register(number, select.EPOLLIN)
        connection.sendall(message)
    n, cpu, started = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - started < seconds:
        for number, _ in poll.poll(1.0):
            connection, message = connections[number]
            part = connection.recv(1 << 16)
            assert left[number] < total or part.startswith(_OK), part
            left[number] -= len(part)
            if left[number] == 0:
                n += 1
                left[number] = total
                connection.sendall(message)
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
    poll.close()
    for connection, _ in connections.values():
        connection.close()
    return Load(requests_per_s=n / elapsed, n_requests=n, cpu=cpu / elapsed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--nprobe", type=int, required=True)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    queries = np.random.default_rng(2).standard_normal((args.callers, args.dim)).astype(np.float32)
    path = f"/v1/search?k=10&nprobe={args.nprobe}"
    print(json.dumps(asdict(closed_loop(args.port, [request(path, q) for q in queries], args.seconds))))


if __name__ == "__main__":
    main()
