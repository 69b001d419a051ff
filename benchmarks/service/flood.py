"""Three floods by one key while another behaves: memory of the daemon, the other's attainment, and the end at SIGTERM.

The floods: small lookaheads without end; 120 bodies of 15 MiB that never end; searches of 4,096 queries with an nprobe
of 16,384. Each has a daemon of its own. The behaving key sends small searches at a fixed rate, from eight threads with
the daemon's own client; its attainment is the part answered within ``--slo-ms`` of when it was due. Then SIGTERM, while
the flood goes on. Generator and daemon share the machine; the generator is niced.

Targets: anonymous memory at most 1.25 times the bound (what the idle daemon has, plus ``request_memory_bytes``);
attainment at least 0.95 of that alone, while the flood gets no fewer answers; the end within the drain's time and 5 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT
from benchmarks.common.measure import arguments, show, write
from benchmarks.common.serving import daemon, planned_index, read_taken, sorted_clusters
from benchmarks.service.connection import request_bytes
from hybridindex.client import Client
from hybridindex.errors import HybridIndexError

DIM, NLIST = 32, 16_384
MEMORY_TARGET, ATTAINMENT_TARGET = 1.25, 0.95
#: The daemon's own default, and what may come on top.
_DRAIN_S, _AFTER_S = 30.0, 5.0
#: Bodies that do not end.
_STALLED = 120
#: What a flood is told that came through to the limits.
_FLOODING = ("200", "202", "408", "429", "503")
#: Threads of the key that behaves.
_CALLERS = 8
_RAW = "application/octet-stream"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=15.0, help="of each flood")
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--index", type=Path, help="of a former run; made there where there is none")
    parser.add_argument("--only", choices=list(FLOODS), action="append", help="this flood alone; may be given again")
    parser.add_argument("--generate", nargs=3, help="internal: flood, port, key")
    parser.add_argument("--rate", type=float, default=10.0, help="searches a second of the key that behaves")
    parser.add_argument("--slo-ms", type=float, default=1000.0)
    parser.add_argument("--request-memory", type=int, default=512, help="MiB; 0: not told, for a daemon without it")


class _Flood:
    """Threads that send until they are stopped; what came back is counted."""

    def __init__(self, port: int, key: str) -> None:
        self.port, self.key = port, key
        self.over = threading.Event()
        self.answers: Counter[str] = Counter()
        self._threads: list[threading.Thread] = []

    def start(self, name: str) -> None:
        send, n_threads = FLOODS[name]
        self._threads = [threading.Thread(target=self._run, args=(send,), daemon=True) for _ in range(n_threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, send: Callable[[_Flood], None]) -> None:
        while not self.over.is_set():
            try:
                send(self)
            except (OSError, KeyError) as error:
                self.answers[type(error).__name__] += 1
                self.over.wait(0.05)

    def ask(self, connection: socket.socket, request: bytes) -> bytes:
        """Sends a request; the body of its answer."""
        connection.sendall(request)
        data = b""
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += _received(connection)
        length = int(data[:end].lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        parts = [data[end + 4 :]]
        while sum(map(len, parts)) < length:
            parts.append(_received(connection))
        self.answers[data[9:12].decode()] += 1
        return b"".join(parts)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)

    def stop(self) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(1)


def _received(connection: socket.socket) -> bytes:
    part = connection.recv(1 << 16)
    if not part:
        raise ConnectionResetError
    return part


def _lookaheads(flood: _Flood) -> None:
    drafts = np.random.default_rng(0).standard_normal((32, DIM)).astype(np.float32)
    opening = request_bytes("POST", "/v1/sessions", b"{}", key=flood.key, kind="application/json")
    with flood.connect() as connection:
        path = f"/v1/sessions/{json.loads(flood.ask(connection, opening))['session']}/lookahead?nprobe=256"
        request = request_bytes("POST", path, drafts.tobytes(), key=flood.key, kind=_RAW)
        while not flood.over.is_set():
            flood.ask(connection, request)


def _stalled(flood: _Flood) -> None:
    """One thread holds all connections, and opens again what the daemon refused or closed."""
    body = bytes(15 << 20)
    whole = request_bytes("POST", "/v1/search?k=10", body, key=flood.key, kind=_RAW)
    unfinished = memoryview(whole)[:-1]
    with contextlib.ExitStack() as stack:

        def opened() -> socket.socket:
            connection = stack.enter_context(flood.connect())
            connection.setblocking(False)
            return connection

        held = [opened() for _ in range(_STALLED)]
        sent = [0] * len(held)
        while not flood.over.is_set():
            for number, connection in enumerate(held):
                if not _goes_on(flood, connection, unfinished, sent, number):
                    connection.close()
                    held[number], sent[number] = opened(), 0
            time.sleep(0.005)


def _goes_on(flood: _Flood, connection: socket.socket, request: memoryview, sent: list[int], number: int) -> bool:
    """Sends some more; False: the daemon has answered, which is counted, or closed the connection."""
    try:
        with contextlib.suppress(BlockingIOError):
            if (at := sent[number]) < len(request):
                sent[number] += connection.send(request[at : at + (1 << 20)])
        said = connection.recv(1 << 12)
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    if said:
        flood.answers[said[9:12].decode()] += 1
    return False


def _searches(flood: _Flood) -> None:
    rows = np.random.default_rng(threading.get_ident()).standard_normal((4096, DIM)).astype(np.float32)
    request = request_bytes("POST", f"/v1/search?k=10&nprobe={NLIST}", rows.tobytes(), key=flood.key, kind=_RAW)
    with flood.connect() as connection:
        while not flood.over.is_set():
            flood.ask(connection, request)


FLOODS: dict[str, tuple[Callable[[_Flood], None], int]] = {
    "lookahead": (_lookaheads, 4),
    "stalled bodies": (_stalled, 1),
    "wide searches": (_searches, 4),
}


def _behave(port: int, key: str, args: argparse.Namespace) -> dict[str, Any]:
    """Sends small searches when they are due; how many were answered in time."""
    queries = sorted_clusters(64, DIM, n_centres=200, seed=5)
    latencies, faults = [], Counter[str]()
    began, n = time.perf_counter(), int(args.rate * args.seconds)

    def ask(client: Client, number: int) -> None:
        due = began + number / args.rate
        time.sleep(max(0.0, due - time.perf_counter()))
        try:
            client.search(queries[number % 64], 10, 16)
            latencies.append((time.perf_counter() - due) * 1e3)
        except HybridIndexError as error:
            faults[type(error).__name__] += 1

    def run(first: int) -> None:
        with Client(f"http://127.0.0.1:{port}", key=key) as client:
            for number in range(first, n, _CALLERS):
                ask(client, number)

    with ThreadPoolExecutor(_CALLERS) as callers:
        list(callers.map(run, range(_CALLERS)))
    in_time = sum(latency <= args.slo_ms for latency in latencies)
    p50, p99 = np.percentile(latencies or [np.inf], [50, 99])
    return {"sent": n, "attainment": in_time / n, "p50_ms": float(p50), "p99_ms": float(p99), "faults": dict(faults)}


def _generate(name: str, port: str, key: str) -> None:
    """The flood, until standard input ends; then what came back: in all, and between its first two lines."""
    flood = _Flood(int(port), key)
    flood.start(name)
    sys.stdin.readline()
    before = flood.answers.copy()
    sys.stdin.readline()
    beside = flood.answers.copy() - before
    sys.stdin.read()
    flood.stop()
    print(json.dumps({"answers": flood.answers, "answers_beside": beside}))


class _Peak:
    """The most that a process has, looked at ten times a second."""

    def __init__(self, pid: int) -> None:
        self._pid, self._over = pid, threading.Event()
        self.idle_bytes = self.peak_bytes = read_taken(pid).anonymous_bytes
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            with contextlib.suppress(OSError, KeyError):
                self.peak_bytes = max(self.peak_bytes, read_taken(self._pid).anonymous_bytes)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def _wait_ready(port: int) -> None:
    while True:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(request_bytes("GET", "/readyz"))
            if connection.recv(64).startswith(b"HTTP/1.1 200 "):
                return
        time.sleep(0.1)


def _end(pid: int) -> float:
    """Seconds from SIGTERM until the process has ended; it is our child's, so a zombie counts as ended."""
    began = time.perf_counter()
    os.kill(pid, signal.SIGTERM)
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                break
        except OSError:
            break
        if time.perf_counter() - began > 10 * _DRAIN_S:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return time.perf_counter() - began


def _say_line(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _run(args: argparse.Namespace) -> dict[str, Any]:
    from hybridindex.service.auth import KeyFile

    found: dict[str, Any] = {}
    limits = f'{{"request_memory_bytes": {args.request_memory << 20}}}' if args.request_memory else "{}"
    with tempfile.TemporaryDirectory() as folder:
        path, keys = args.index or Path(folder) / "idx", KeyFile(Path(folder) / "keys.json")
        if not path.exists():
            planned_index(path, vectors=args.vectors, dim=DIM, nlist=NLIST, nprobe=16, budget_bytes=16 << 20)
        modest, greedy = keys.add("modest", "search"), keys.add("greedy", "search")
        for name in args.only or FLOODS:
            with daemon(path, "--device", "cpu", "--keys", str(keys.path), "--limits", limits) as (pid, port):
                _wait_ready(port)
                _behave(port, modest, argparse.Namespace(**{**vars(args), "seconds": 2.0}))
                alone = _behave(port, modest, args)
                peak = _Peak(pid)
                command = [sys.executable, "-m", "benchmarks.service.flood", "--generate", name, str(port), greedy]
                flood = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
                time.sleep(3.0)
                _say_line(flood)
                beside = _behave(port, modest, args)
                _say_line(flood)
                ended_s = _end(pid)
                peak.stop()
                said, _ = flood.communicate("")
            bound = peak.idle_bytes + (args.request_memory << 20)
            found[name] = {
                "idle_bytes": peak.idle_bytes,
                "peak_bytes": peak.peak_bytes,
                "bound_bytes": bound,
                "of_bound": peak.peak_bytes / bound,
                "alone": alone,
                "beside": beside,
                "attainment_ratio": beside["attainment"] / max(alone["attainment"], 1e-9),
                "ended_s": ended_s,
                **json.loads(said),
            }
    return found


def _passed(found: dict[str, Any]) -> bool:
    return all(
        each["of_bound"] <= MEMORY_TARGET
        and each["attainment_ratio"] >= ATTAINMENT_TARGET
        and each["ended_s"] <= _DRAIN_S + _AFTER_S
        # The flood went on beside the key that behaves.
        and sum(each["answers_beside"].get(status, 0) for status in _FLOODING) >= each["beside"]["sent"]
        for each in found.values()
    )


def main() -> None:
    args = arguments(__doc__, _options)
    os.nice(5)
    if args.generate is not None:
        _generate(*args.generate)
        return
    floods = _run(args)
    passed = _passed(floods)
    show(
        f"{'passed' if passed else 'FAILED'}: floods of {args.seconds:g} s, {args.request_memory} MiB for requests",
        ("flood", "idle MiB", "peak MiB", "of the bound", "alone", "beside", "p99 ms", "ratio", "SIGTERM s", "answers"),
        [
            (
                name,
                f"{each['idle_bytes'] / 2**20:.0f}",
                f"{each['peak_bytes'] / 2**20:.0f}",
                f"{each['of_bound']:.2f}",
                f"{each['alone']['attainment']:.3f}",
                f"{each['beside']['attainment']:.3f}",
                f"{each['alone']['p99_ms']:.0f}, {each['beside']['p99_ms']:.0f}",
                f"{each['attainment_ratio']:.3f}",
                f"{each['ended_s']:.1f}",
                ", ".join(f"{status} {n}" for status, n in each["answers"].items()),
            )
            for name, each in floods.items()
        ],
    )
    write(args.json, "flood", {"floods": floods, "slo_ms": args.slo_ms, "passed": passed})


if __name__ == "__main__":
    main()
