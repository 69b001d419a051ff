"""How many other nodes a search asks, as planned and as counted; and the rate that more nodes bring."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import show
from benchmarks.service.cluster.load import Load
from benchmarks.service.cluster.nodes import Nodes, Workload, mixed_queries, nodes, pin
from hybridindex.api import open_index
from hybridindex.cluster.access import read_access
from hybridindex.cluster.router import ClusterRouter
from hybridindex.partitioner.nodes.node_plan import NodeRequest
from hybridindex.partitioner.nodes.placement import place_lists
from hybridindex.types import F32

__all__ = ["measure_fan_out", "measure_rate"]

#: Memory beyond the copies: none of it for hot lists, or all.
_SPARE = 1.2
_REPLICAS = 2
#: A service level below that is the scheduler's noise where nodes and client share cores.
_LEAST_SLO_S = 0.025


def measure_fan_out(workload: Workload, folder: Path, *, queries: int) -> dict[str, Any]:
    """Four nodes as predicted and as counted; sixteen as predicted."""
    asked = mixed_queries(workload.centres, queries, seed=11)
    with open_index(workload.path) as index:
        probes = index.ivf.quantize(asked, workload.nprobe)[0]
        total_bytes = int(index.list_bytes[probes[probes >= 0]].sum())
    rows = []
    for n in (4, 16):
        memory_bytes = int(_SPARE * _REPLICAS * workload.index_bytes / n)
        for replicate in ("none", "hot"):
            row = _predict(workload, n, memory_bytes, replicate)
            if n == 4:
                with nodes(
                    workload, folder / f"fan-out-{replicate}", n, replicas=_REPLICAS, replicate=replicate,
                    memory_bytes=memory_bytes,
                ) as cluster:  # fmt: skip
                    row |= _count(cluster, asked, total_bytes)
            rows.append(row)
    show(
        f"other nodes that a search asks, {_REPLICAS} replicas, nprobe {workload.nprobe}",
        ("nodes", "20 % more memory", "fan-out", "counted", "local share", "counted", "hot lists"),
        [
            (r["nodes"], r["replicate"], r["fan_out"], r.get("counted_fan_out", ""), r["local_share"],
             r.get("counted_local_share", ""), r["hot_lists"])
            for r in rows
        ],
    )  # fmt: skip
    return {"queries": queries, "rows": rows}


def _predict(workload: Workload, n: int, memory_bytes: int, replicate: Any) -> dict[str, Any]:
    access = read_access(workload.path)
    request = NodeRequest(node_bytes=(memory_bytes,) * n, replicas=_REPLICAS, replicate=replicate)
    began = time.perf_counter()
    plan = place_lists(access.list_bytes, access.work, request, probes=access.probes)
    return {
        "nodes": n,
        "replicate": replicate,
        "memory_bytes": memory_bytes,
        "fan_out": plan.fan_out,
        "local_share": plan.local_share,
        "hot_lists": int(plan.spread.size),
        "planned_in_s": time.perf_counter() - began,
    }


def _count(cluster: Nodes, queries: F32, total_bytes: int) -> dict[str, Any]:
    """One search for each query, two at a time."""
    before = _asked(cluster)
    with cluster.router() as router, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda query: router.search(query, 10, cluster.workload.nprobe), queries))
        by_client = sum(each["asked"] for each in router.status())
    found = {name: value - before[name] for name, value in _asked(cluster).items()}
    return {
        # A search that the client asked twice has the fan-out of two.
        "counted_fan_out": (found["asked"] - found["hedged"]) / by_client,
        "counted_local_share": 1 - found["asked_bytes"] / (total_bytes * by_client / len(queries)),
        "hedged": found["hedged"],
        "failed": found["failed"],
        "searches": by_client,
    }


def _asked(cluster: Nodes) -> dict[str, int]:
    peers = [peer for name in cluster.names for peer in cluster.calls(name).node()["peers"]]
    return {name: sum(peer[name] for peer in peers) for name in ("asked", "asked_bytes", "hedged", "failed")}


def measure_rate(workload: Workload, folder: Path, *, seconds: float, attainment: float = 0.95) -> dict[str, Any]:
    """The highest rate with ``attainment`` at five times the median of one node without load, 25 ms at least. Each
    daemon has one thread, and a core of its own where there are as many."""
    queries = mixed_queries(workload.centres, 4096, seed=13)
    cores = sorted(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    slo_s = 0.0
    for n, replicas in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2)):
        with nodes(
            workload, folder / f"rate-{n}-{replicas}", n, replicas=replicas, options=("--threads", "1")
        ) as cluster:
            for i, process in enumerate(cluster.processes.values()):
                pin(process.pid, {cores[i % len(cores)]})
            with cluster.router() as router:
                alone = _alone(router, queries, workload.nprobe)
                slo_s = slo_s or max(5 * alone, _LEAST_SLO_S)
                rates = _highest(router, queries, workload.nprobe, slo_s, seconds, attainment)
        rows.append(
            {
                "nodes": n,
                "replicas": replicas,
                "own_core": n <= len(cores),
                "alone_ms": 1e3 * alone,
                "rate": max((r["rate"] for r in rates if r["attainment"] >= attainment), default=0.0),
                "tried": rates,
            }
        )
    show(
        f"searches/s with {attainment:.0%} within {1e3 * slo_s:.1f} ms; {len(cores)} cores, also for the client",
        ("nodes", "replicas", "a core each", "one search alone ms", "searches/s"),
        [(r["nodes"], r["replicas"], r["own_core"], r["alone_ms"], r["rate"]) for r in rows],
    )
    note = f"{len(cores)} cores for nodes and the client: no more nodes than cores bring a rate here"
    return {"slo_ms": 1e3 * slo_s, "attainment": attainment, "cores": len(cores), "note": note, "rows": rows}


def _alone(router: ClusterRouter, queries: F32, nprobe: int) -> float:
    taken = []
    for query in queries[:200]:
        began = time.perf_counter()
        router.search(query, 10, nprobe)
        taken.append(time.perf_counter() - began)
    return float(np.median(taken[50:]))


def _highest(
    router: ClusterRouter, queries: F32, nprobe: int, slo_s: float, seconds: float, attainment: float
) -> list[dict[str, float]]:
    """Doubles the rate until it is too high, then halves the interval four times; what fails is tried once more."""
    tried: list[dict[str, float]] = []

    def holds(rate: float) -> bool:
        return once(rate) or once(rate)

    def once(rate: float) -> bool:
        load = Load(router, queries, rate, nprobe)
        time.sleep(seconds)
        taken = load.end()
        # The first half second is the connections'.
        settled = taken.seconds[taken.due_s > taken.due_s[0] + 0.5]
        tried.append(
            {
                "rate": rate,
                "attainment": float((settled <= slo_s).mean()),
                "p50_ms": 1e3 * float(np.median(settled)),
                "p99_ms": 1e3 * float(np.percentile(settled, 99, method="lower")),
            }
        )
        return tried[-1]["attainment"] >= attainment

    low, high = 0.0, 25.0
    while high < 20_000 and holds(high):
        low, high = high, 2 * high
    for _ in range(4):
        middle = (low + high) / 2
        if middle < 1:
            break
        low, high = (middle, high) if holds(middle) else (low, middle)
    return tried
