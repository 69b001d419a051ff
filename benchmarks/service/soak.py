"""A daemon for as long as it takes to answer hundreds of thousands of mixed requests, every answer checked.

An open-loop load with the bursts of a real trace, compressed in time: binary, .npy and JSON searches of 1 to 16
queries, deadlines, sessions with lookahead (some are never closed), bad requests; meanwhile keys are rotated, the plan
is changed by hand, the hot set moves and a refresh follows it on the stand-in device. Every answer is compared with an
oracle that is exact at ``nprobe_used``, every refusal with what was asked.

Passes with no wrong answer, no unexpected status, and memory that grows by less than 2 % over the second half. The
generator is this process, on the same cores as the daemon: latencies say little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from benchmarks.common.measure import arguments, show, write
from benchmarks.common.serving import Taken, daemon, planned_index, read_taken, sorted_clusters
from benchmarks.common.trace import TRACE
from benchmarks.service.connection import Pool
from benchmarks.service.soak_client import SESSION_TTL_S, Client
from benchmarks.service.soak_load import MOST_K, Load, make_load, read_trace, synthetic_trace
from benchmarks.service.soak_oracle import PoolOracle

DIM, NLIST, NPROBE, MOST_NPROBE, POOL = 32, 64, 8, 24, 4096
#: Growth over the second half that is not called a leak.
MOST_GROWTH = 0.02


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=480.0, help="in which they arrive")
    parser.add_argument("--vectors", type=int, default=40_000)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--trace", type=Path, default=TRACE, help="RAGPulse; where it is missing, synthetic bursts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="the daemon's log; default nowhere")


async def _sample(pid: int, started: float, samples: list[tuple[float, Taken]]) -> None:
    while True:
        samples.append((time.perf_counter() - started, read_taken(pid)))
        await asyncio.sleep(0.5)


async def _drive(load: Load, client: Client, pid: int, seconds: float) -> list[tuple[float, Taken]]:
    """Sends everything when it is due; returns what the daemon took meanwhile and, last, when it was idle again."""
    samples: list[tuple[float, Taken]] = []
    started = time.perf_counter()
    beside = [asyncio.create_task(t) for t in (_sample(pid, started, samples), client.change_things(seconds))]
    tasks: set[asyncio.Task[None]] = set()
    with Progress(transient=True) as progress:
        bar = progress.add_task("soak", total=len(load.due))
        for number, due in enumerate(load.due):
            wait = due - (time.perf_counter() - started)
            if wait > 0.001:
                await asyncio.sleep(wait)
            task = asyncio.create_task(client.play(number, started + due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if number % 64 == 0:
                progress.update(bar, completed=number)
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
    loaded = len(samples)
    await client.end()
    for task in beside:
        task.cancel()
    for outcome in await asyncio.gather(*beside, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
    # What it takes while sessions are waited for is no load's.
    return [*samples[:loaded], (time.perf_counter() - started, read_taken(pid))]


def growth(samples: list[tuple[float, Taken]], field: str) -> float:
    """Relative growth over the second half: the median of its last fifth against that of its first."""
    values = [float(getattr(taken, field)) for _, taken in samples[len(samples) // 2 : -1]]
    fifth = max(1, len(values) // 5)
    return float(np.median(values[-fifth:]) / np.median(values[:fifth]) - 1)


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import hybridindex as hx
    from hybridindex.service.auth import KeyFile

    path, keys = folder / "idx", KeyFile(folder / "keys.json")
    planned_index(path, vectors=args.vectors, dim=DIM, nlist=NLIST, nprobe=NPROBE, budget_bytes=16 << 20)
    admin, fixed = keys.add("operator", "admin"), keys.add("agents", "search")
    trace = read_trace(args.trace) if args.trace.exists() else synthetic_trace()
    load = make_load(
        trace, requests=args.requests, seconds=args.seconds, pool=POOL, most_nprobe=MOST_NPROBE, seed=args.seed
    )
    queries = sorted_clusters(POOL, DIM, n_centres=200, seed=3)
    limits = json.dumps({"session_ttl_s": SESSION_TTL_S})
    with hx.open(path) as index:
        oracle = PoolOracle(index.ivf, queries, most_nprobe=MOST_NPROBE, most_k=MOST_K)
        words = ("--device", "cpu", "--refresh", "--keys", str(keys.path), "--limits", limits)
        with daemon(path, *words, log=args.log) as (pid, port):

            async def main() -> tuple[Client, list[tuple[float, Taken]]]:
                pool = Pool(port, args.connections)
                client = Client(pool, load, queries, oracle, keys, admin=admin, fixed=fixed, default_nprobe=NPROBE)
                try:
                    await client.until_ready()
                    return client, await _drive(load, client, pid, args.seconds)
                finally:
                    pool.close()

            client, samples = asyncio.run(main())
    seconds = samples[-2][0]
    growths = {name: growth(samples, name) for name in ("rss_bytes", "anonymous_bytes")}
    final = client.final
    return {
        "requests": args.requests,
        "trace": trace.name,
        "seconds": seconds,
        "rate": args.requests / seconds,
        "outcomes": dict(client.outcomes),
        "checked_answers": client.n_checked,
        "checked_queries": client.n_queries_checked,
        "close_calls": oracle.n_close_calls,
        "wrong": client.wrong,
        "unexpected": client.unexpected,
        "latency_ms": dict(zip(("p50", "p99", "max"), np.percentile(client.latencies_ms, [50, 99, 100]), strict=True)),
        "p99_ms_by_part": [float(np.percentile(part, 99)) for part in np.array_split(client.latencies_ms, 20)],
        "growth": growths,
        "taken": {name: getattr(samples[-1][1], name) for name in ("rss_bytes", "anonymous_bytes", "fds", "threads")},
        "most_fds": max(taken.fds for _, taken in samples),
        "samples": [(at, taken.rss_bytes, taken.anonymous_bytes, taken.fds) for at, taken in samples],
        "changes": dict(client.changes),
        "updates": final["refresher"]["updates"],
        "left": {
            "waiting": final["queue"]["waiting"],
            "in_flight": final["queue"]["in_flight"],
            "sessions": final["sessions"]["open"],
        },
        "expired_sessions": final["sessions"]["expired"],
        "passed": not client.wrong
        and not client.unexpected
        and growths["rss_bytes"] < MOST_GROWTH
        and not any((final["queue"]["waiting"], final["queue"]["in_flight"], final["sessions"]["open"])),
    }


def _show(found: dict[str, Any]) -> None:
    kinds: dict[str, Counter[str]] = {}
    for (kind, outcome), count in found["outcomes"].items():
        kinds.setdefault(kind, Counter())[outcome] += count
    show(
        f"soak: {found['requests']:,} requests of {found['trace']} in {found['seconds']:.0f} s, {found['rate']:.0f}/s",
        ("request", "count", "answers"),
        [
            (kind, sum(c.values()), ", ".join(f"{name} {count}" for name, count in sorted(c.items())))
            for kind, c in sorted(kinds.items())
        ],
    )
    latency, mib = found["latency_ms"], found["taken"]["rss_bytes"] / 2**20
    show(
        "passed" if found["passed"] else "FAILED",
        ("what", "value"),
        [
            ("answers checked (queries)", f"{found['checked_answers']:,} ({found['checked_queries']:,})"),
            ("wrong answers", len(found["wrong"])),
            ("unexpected outcomes", len(found["unexpected"])),
            ("p50, p99, max from due time, ms", f"{latency['p50']:.1f}, {latency['p99']:.1f}, {latency['max']:.0f}"),
            ("RSS at the end, growth over 2nd half", f"{mib:.0f} MiB, {found['growth']['rss_bytes']:+.2%}"),
            ("of it allocated, growth", f"{found['growth']['anonymous_bytes']:+.2%}"),
            ("open files at the end, most", f"{found['taken']['fds']}, {found['most_fds']}"),
            ("left: waiting, in flight, sessions", ", ".join(str(v) for v in found["left"].values())),
            ("sessions that expired", found["expired_sessions"]),
            ("changes beside it", ", ".join(f"{n} {c}" for n, c in sorted(found["changes"].items()))),
            ("updates of the refresh", ", ".join(f"{n} {c}" for n, c in found["updates"].items())),
        ],
    )
    for line in [*found["wrong"][:5], *found["unexpected"][:10]]:
        print(line)


def main() -> None:
    args = arguments(__doc__, _options)
    with tempfile.TemporaryDirectory() as folder:
        found = run(args, Path(folder))
    _show(found)
    flat = {**found, "outcomes": {f"{kind}: {name}": count for (kind, name), count in found["outcomes"].items()}}
    write(args.json, "soak", flat)
    raise SystemExit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
