"""Twice the load that the daemon can take: what it still answers, how it refuses, and what that costs in memory.

Capacity first: 64 clients in a closed loop. Then 64 clients send at twice that rate and wait for nobody: each has a
key of its own and as many connections as it has requests under way. The generator is a process of its own on the same
machine, niced, over plain sockets; daemon and generator share the cores, so both rates are lower than on two machines.

Targets: goodput (answers within the deadline, counted from when their requests were due) at least 0.9 of capacity, a
queue that stays within its limit, and Retry-After on every refusal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import arguments, show, write
from benchmarks.connection import Answer, Pool, request_bytes
from benchmarks.serving import daemon, planned_index, read_taken, sorted_clusters
from hybridindex.answers import ANSWER_TYPE, answer_bytes
from hybridindex.loadgen import poisson_arrivals

DIM, NLIST, K = 64, 128, 10
GOODPUT_TARGET = 0.9


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload; capacity is measured for a sixth")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--vectors", type=int, default=200_000)
    parser.add_argument("--nprobe", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4, help="queries per request")
    parser.add_argument("--queue", type=int, default=1024, help="the daemon's limit, queries")
    parser.add_argument("--deadline-ms", type=float, default=2000.0)
    parser.add_argument("--generate", type=json.loads, help="internal")


def _requests(keys: list[str], batch: int, target: str) -> list[bytes]:
    """One per client."""
    queries = sorted_clusters(len(keys) * batch, DIM, n_centres=200, seed=3)
    queries = np.random.default_rng(0).permutation(queries).reshape(len(keys), batch, DIM)
    return [
        request_bytes("POST", target, rows.tobytes(), key=key, kind="application/octet-stream", accept=ANSWER_TYPE)
        for key, rows in zip(keys, queries, strict=True)
    ]


async def _closed_loop(pool: Pool, requests: list[bytes], seconds: float) -> float:
    """Answers per second that the clients get, each waiting for its last one."""
    ends = time.perf_counter() + seconds
    count = 0

    async def client(request: bytes) -> None:
        nonlocal count
        while time.perf_counter() < ends:
            answer = await pool.ask(request)
            if answer.status != 200:
                raise SystemExit(f"capacity: {answer.status} {answer.body!r}")
            count += 1

    started = time.perf_counter()
    await asyncio.gather(*(client(request) for request in requests))
    return count / (time.perf_counter() - started)


async def _open_loop(pool: Pool, requests: list[bytes], rate: float, asked: dict[str, Any]) -> dict[str, Any]:
    """Poisson arrivals at ``rate``, the clients in turn, and what became of them."""
    statuses: Counter[int] = Counter()
    latencies: list[float] = []
    faults: Counter[str] = Counter()
    deepest = unsent = 0
    expected = answer_bytes(asked["batch"], K)

    def judge(answer: Answer, taken_s: float) -> None:
        statuses[answer.status] += 1
        if answer.status == 200:
            latencies.append(taken_s)
            if len(answer.body) != expected:
                faults["answers of a wrong length"] += 1
        elif answer.status in (429, 503):
            if not answer.header("retry-after"):
                faults["refusals without Retry-After"] += 1
        elif answer.status != 504:
            faults[f"status {answer.status}"] += 1

    async def send(request: bytes, due: float) -> None:
        try:
            judge(await pool.ask(request), time.perf_counter() - due)
        except OSError as error:
            faults[type(error).__name__] += 1

    async def watch() -> None:
        nonlocal deepest
        own = Pool(asked["port"], 1)
        request = request_bytes("GET", "/v1/status", key=asked["keys"][0])
        while True:
            deepest = max(deepest, json.loads((await own.ask(request)).body)["queue"]["waiting"])
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    tasks: set[asyncio.Task[None]] = set()
    started = time.perf_counter()
    arrivals = poisson_arrivals(rate, asked["seconds"], seed=0)
    for number, due in enumerate(arrivals):
        wait = due - (time.perf_counter() - started)
        if wait > 0 or number % 16 == 0:
            await asyncio.sleep(max(0.0, wait))
        if len(tasks) >= asked["most_open"]:
            unsent += 1
            continue
        task = asyncio.create_task(send(requests[number % len(requests)], started + due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    offered_s = time.perf_counter() - started
    await asyncio.gather(*tasks)
    watching.cancel()
    return {
        "offered": len(arrivals),
        "offered_rate": len(arrivals) / offered_s,
        "unsent": unsent,
        "statuses": dict(statuses),
        "answered_rate": statuses[200] / offered_s,
        "goodput": sum(taken_s * 1e3 <= asked["deadline_ms"] for taken_s in latencies) / offered_s,
        "latency_ms": dict(zip(("p50", "p99"), np.percentile(np.array(latencies) * 1e3, [50, 99]), strict=True)),
        "deepest_queue": deepest,
        "faults": dict(faults),
    }


async def _generate(asked: dict[str, Any]) -> dict[str, Any]:
    plain = f"/v1/search?k={K}&nprobe={asked['nprobe']}"
    pool = Pool(asked["port"], asked["most_open"])
    while (await pool.ask(request_bytes("GET", "/readyz"))).status != 200:
        await asyncio.sleep(0.05)
    requests = _requests(asked["keys"], asked["batch"], plain)
    await _closed_loop(pool, requests, 1.0)
    memory = [read_taken(asked["pid"]).rss_bytes]
    capacity = await _closed_loop(pool, requests, asked["seconds"] / 6)
    late = f"{plain}&deadline_ms={asked['deadline_ms']}&min_nprobe={asked['nprobe']}"
    found = await _open_loop(pool, _requests(asked["keys"], asked["batch"], late), 2 * capacity, asked)
    again = await _closed_loop(pool, requests, asked["seconds"] / 6)
    memory.append(read_taken(asked["pid"]).rss_bytes)
    pool.close()
    return {"capacity": capacity, "capacity_afterwards": again, "memory_bytes": memory, **found}


def main() -> None:
    args = arguments(__doc__, _options)
    if args.generate is not None:
        os.nice(5)
        print(json.dumps(asyncio.run(_generate(args.generate))))
        return
    from hybridindex.service.auth import KeyFile

    with tempfile.TemporaryDirectory() as folder:
        path, keys = Path(folder) / "idx", KeyFile(Path(folder) / "keys.json")
        planned_index(path, vectors=args.vectors, dim=DIM, nlist=NLIST, nprobe=16, budget_bytes=64 << 20)
        names = [keys.add(f"client-{number}", "search") for number in range(args.clients)]
        # Small steps from the queue to the router: what waits there can still be refused or given up in time.
        limits = json.dumps({"queue_queries": args.queue, "in_flight_queries": 64})
        with daemon(path, "--device", "cpu", "--keys", str(keys.path), "--limits", limits) as (pid, port):
            asked = {
                "pid": pid, "port": port, "keys": names, "seconds": args.seconds, "nprobe": args.nprobe,
                "batch": args.batch, "deadline_ms": args.deadline_ms, "most_open": 800,
            }  # fmt: skip
            command = [sys.executable, "-m", "benchmarks.overload", "--generate", json.dumps(asked)]
            root = Path(__file__).resolve().parent.parent
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=root)
    found: dict[str, Any] = json.loads(run.stdout)
    refused = sum(count for status, count in found["statuses"].items() if status in ("429", "503"))
    base = (found["capacity"] + found["capacity_afterwards"]) / 2
    found |= {"goodput_ratio": found["goodput"] / base, "refused_share": refused / found["offered"]}
    found["passed"] = (
        found["goodput_ratio"] >= GOODPUT_TARGET and found["deepest_queue"] <= args.queue and not found["faults"]
    )
    before, after = (value / 2**20 for value in found["memory_bytes"])
    show(
        f"overload: {args.clients} clients, {args.seconds:g} s at twice the capacity, batch {args.batch}, "
        f"nprobe {args.nprobe}, {os.cpu_count()} cores",
        ("what", "value"),
        [
            ("capacity before, after, requests/s", f"{found['capacity']:.0f}, {found['capacity_afterwards']:.0f}"),
            (
                "offered, requests/s (not sent: connections all busy)",
                f"{found['offered_rate']:.0f} ({found['unsent']})",
            ),
            ("answered, in time (goodput), requests/s", f"{found['answered_rate']:.0f}, {found['goodput']:.0f}"),
            (f"of capacity (target {GOODPUT_TARGET})", found["goodput_ratio"]),
            ("statuses", ", ".join(f"{s}: {c}" for s, c in sorted(found["statuses"].items()))),
            ("refused share", found["refused_share"]),
            ("p50, p99 of the answered, ms", f"{found['latency_ms']['p50']:.0f}, {found['latency_ms']['p99']:.0f}"),
            ("longest queue seen, limit", f"{found['deepest_queue']}, {args.queue}"),
            ("RSS before, after, MiB", f"{before:.0f}, {after:.0f}"),
            ("faults", ", ".join(f"{name} {count}" for name, count in found["faults"].items()) or "none"),
            ("passed", found["passed"]),
        ],
    )
    write(args.json, "overload", found)


if __name__ == "__main__":
    main()
