"""Twice the load that the daemon can take: what it still answers, how it refuses, and what that costs.

Capacity first: 64 clients in a closed loop. Then the same clients send at twice that rate, each with a key of its own,
and wait for nobody, whatever they are told: this decides. At last they do as Retry-After-Ms says. The generator
(``overload_load.py``) is a process of its own on the same machine, niced; nothing is pinned. It shares the cores with
the daemon, and has more to do under overload. So CPU time is counted, of the generator, of the daemon's event loop and
of its other threads; and capacity is measured again while the generator takes as much of the cores as under overload.

Targets: goodput (answers within the deadline, counted from when their requests were due) at least 0.9 of capacity, a
queue that stays within its limit, and Retry-After-Ms on every refusal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT
from benchmarks.common.measure import arguments, show, write
from benchmarks.common.serving import daemon, planned_index, read_spent, read_taken, sorted_clusters
from benchmarks.service.connection import request_bytes
from benchmarks.service.overload_load import Clients, Tally
from hybridindex.answer_codec import ANSWER_TYPE, answer_bytes
from hybridindex.profiler.open_loop import poisson_arrivals

DIM, NLIST, K = 64, 128, 10
GOODPUT_TARGET = 0.9
#: Requests under way, at most: more than the daemon lets in.
_MOST_OPEN = 800


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload; each capacity for a sixth")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--vectors", type=int, default=200_000)
    parser.add_argument("--nprobe", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4, help="queries per request")
    parser.add_argument("--queue", type=int, default=1024, help="the daemon's limit, queries")
    parser.add_argument("--deadline-ms", type=float, default=2000.0)
    parser.add_argument("--tick-ms", type=float, default=2.0, help="how often the clients look and send")
    parser.add_argument("--generate", type=json.loads, help="internal")


def _requests(asked: dict[str, Any]) -> list[bytes]:
    """One per client."""
    keys, batch = asked["keys"], asked["batch"]
    queries = sorted_clusters(len(keys) * batch, DIM, n_centres=200, seed=3)
    queries = np.random.default_rng(0).permutation(queries).reshape(len(keys), batch, DIM)
    target = (
        f"/v1/search?k={K}&nprobe={asked['nprobe']}&deadline_ms={asked['deadline_ms']}&min_nprobe={asked['nprobe']}"
    )
    return [
        request_bytes("POST", target, rows.tobytes(), key=key, kind="application/octet-stream", accept=ANSWER_TYPE)
        for key, rows in zip(keys, queries, strict=True)
    ]


def _phase(pid: int, deadline_ms: float, load: Callable[[], Tally]) -> dict[str, Any]:
    """Runs one load; what became of it, and what the daemon took meanwhile. CPU in cores: 1 is a whole one."""
    before, started = read_spent(pid), time.perf_counter()
    tally = load()
    wall_s, after = time.perf_counter() - started, read_spent(pid)
    latencies_ms = np.array(tally.latencies_s) * 1e3
    refused = tally.statuses[429] + tally.statuses[503]
    waits_s = np.repeat([*tally.retry_after_s], [*tally.retry_after_s.values()]) if refused else np.zeros(1)
    return {
        "seconds": tally.seconds,
        "sent_rate": tally.sent / tally.seconds,
        "answered_rate": tally.statuses[200] / tally.seconds,
        "refused_rate": refused / tally.seconds,
        "goodput": float((latencies_ms <= deadline_ms).sum()) / tally.seconds,
        "unsent": tally.unsent,
        "held_back": tally.held_back,
        "statuses": dict(tally.statuses),
        "latency_ms": dict(zip(("p50", "p99"), np.percentile(latencies_ms, [50, 99]), strict=True)),
        "retry_after_s": dict(zip(("p10", "p50", "p90"), np.percentile(waits_s, [10, 50, 90]), strict=True)),
        "deepest_queue": tally.deepest_queue,
        "faults": dict(tally.faults),
        "generator_cores": tally.cpu,
        "loop_cores": (after.loop_s - before.loop_s) / wall_s,
        "search_cores": (after.others_s - before.others_s) / wall_s,
        "idle_cores": (after.idle_s - before.idle_s) / wall_s,
    }


def _generate(asked: dict[str, Any]) -> dict[str, Any]:
    pid, seconds, part_s = asked["pid"], asked["seconds"], asked["seconds"] / 6
    expected = answer_bytes(asked["batch"], K)
    key = asked["keys"][0]
    clients = Clients(
        asked["port"],
        _requests(asked),
        status_key=key,
        most_open=_MOST_OPEN,
        body_bytes=expected,
        tick_s=asked["tick_ms"] / 1e3,
    )

    def phase(load: Callable[[], Tally]) -> dict[str, Any]:
        return _phase(pid, asked["deadline_ms"], load)

    clients.wait_ready()
    clients.closed_loop(1.0)
    memory = [read_taken(pid).rss_bytes]
    before = phase(lambda: clients.closed_loop(part_s))
    rate = 2 * before["answered_rate"]
    overload = phase(lambda: clients.open_loop(poisson_arrivals(rate, seconds, seed=0), patient=False))
    after = phase(lambda: clients.closed_loop(part_s))
    extra = max(0.0, overload["generator_cores"] - after["generator_cores"])
    beside = phase(lambda: clients.closed_loop(part_s, beside=extra))
    patient = phase(lambda: clients.open_loop(poisson_arrivals(rate, seconds / 2, seed=1), patient=True))
    memory.append(read_taken(pid).rss_bytes)
    clients.close()
    phases = {
        "capacity before": before,
        "overload": overload,
        "capacity after": after,
        "capacity beside": beside,
        "overload, clients heed": patient,
    }
    return {"phases": phases, "memory_bytes": memory}


def _run(args: argparse.Namespace) -> dict[str, Any]:
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
                "batch": args.batch, "deadline_ms": args.deadline_ms, "tick_ms": args.tick_ms,
            }  # fmt: skip
            command = [sys.executable, "-m", "benchmarks.service.overload", "--generate", json.dumps(asked)]
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def judged(found: dict[str, Any], *, queue: int) -> dict[str, Any]:
    """``found`` with its ratios, and whether the targets are met."""
    phases = found["phases"]
    overload, heeding = phases["overload"], phases["overload, clients heed"]
    alone = (phases["capacity before"]["answered_rate"] + phases["capacity after"]["answered_rate"]) / 2
    beside = phases["capacity beside"]["answered_rate"]
    per_core = [phases[name]["answered_rate"] / _cores(phases[name]) for name in ("capacity before", "capacity after")]
    answer_s = 2 / sum(per_core)
    refusal_s = (_cores(overload) - overload["answered_rate"] * answer_s) / max(overload["refused_rate"], 1e-9)
    ratios = {
        "goodput_ratio": overload["goodput"] / alone,
        # What is left of it where others take cores too, or cores are left idle.
        "goodput_ratio_per_core": overload["goodput"] / _cores(overload) / (sum(per_core) / 2),
        "goodput_ratio_beside": overload["goodput"] / beside,
        "goodput_ratio_heeding": heeding["goodput"] / alone,
    }
    costs = {"answer_cpu_us": answer_s * 1e6, "refusal_cpu_us": refusal_s * 1e6}
    passed = (
        ratios["goodput_ratio"] >= GOODPUT_TARGET
        and all(phase["deepest_queue"] <= queue for phase in phases.values())
        and not any(phase["faults"] for phase in phases.values())
    )
    return {**found, **ratios, **costs, "passed": passed}


def _cores(phase: dict[str, Any]) -> float:
    """That generator and daemon took together."""
    return float(phase["generator_cores"] + phase["loop_cores"] + phase["search_cores"])


def _per_request_us(cores: float, rate: float) -> str:
    return f"{cores / rate * 1e6:.0f}" if rate else "-"


def main() -> None:
    args = arguments(__doc__, _options)
    if args.generate is not None:
        os.nice(5)
        print(json.dumps(_generate(args.generate)))
        return
    found = judged(_run(args), queue=args.queue)
    phases = found["phases"]
    show(
        f"overload: {args.clients} clients, {args.seconds:g} s at twice the capacity, batch {args.batch}, "
        f"nprobe {args.nprobe}, {os.cpu_count()} cores",
        ("", "sent", "answered", "in time", "refused", "p50, p99 ms", "come back, s", "held back", "queue"),
        [
            (
                name,
                f"{p['sent_rate']:.0f}",
                f"{p['answered_rate']:.0f}",
                f"{p['goodput']:.0f}",
                f"{p['refused_rate']:.0f}",
                f"{p['latency_ms']['p50']:.0f}, {p['latency_ms']['p99']:.0f}",
                ", ".join(f"{s:.2g}" for s in p["retry_after_s"].values()) if p["refused_rate"] else "",
                p["held_back"] + p["unsent"],
                p["deepest_queue"],
            )
            for name, p in phases.items()
        ],
    )
    show(
        "CPU: cores taken, and microseconds of each per request sent",
        ("", "generator", "us", "event loop", "us", "other threads", "idle"),
        [
            (
                name,
                f"{p['generator_cores']:.2f}",
                _per_request_us(p["generator_cores"], p["sent_rate"]),
                f"{p['loop_cores']:.2f}",
                _per_request_us(p["loop_cores"], p["sent_rate"]),
                f"{p['search_cores']:.2f}",
                f"{p['idle_cores']:.2f}",
            )
            for name, p in phases.items()
        ],
    )
    before, after = (value / 2**20 for value in found["memory_bytes"])
    faults = [f"{name}: {fault} {n}" for name, p in phases.items() for fault, n in p["faults"].items()]
    show(
        "passed" if found["passed"] else "FAILED",
        ("what", "value"),
        [
            (f"goodput, of the capacity before and after (target {GOODPUT_TARGET})", found["goodput_ratio"]),
            ("goodput, of the capacity beside as busy a generator", found["goodput_ratio_beside"]),
            ("goodput per core that was taken, of capacity per core", found["goodput_ratio_per_core"]),
            ("goodput where clients heed Retry-After-Ms, of capacity", found["goodput_ratio_heeding"]),
            (
                "CPU of an answer and of a refusal, both sides, us",
                f"{found['answer_cpu_us']:.0f}, {found['refusal_cpu_us']:.0f}",
            ),
            ("RSS before, after, MiB", f"{before:.0f}, {after:.0f}"),
            ("faults", ", ".join(faults) or "none"),
        ],
    )
    write(args.json, "overload", found)


if __name__ == "__main__":
    main()
