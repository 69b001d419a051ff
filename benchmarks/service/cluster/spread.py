"""How many other nodes a search asks, as planned and as counted."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.measure import show
from benchmarks.service.cluster.nodes import Nodes, Workload, mixed_queries, nodes
from hybridindex.api import open_index
from hybridindex.cluster.access import read_access
from hybridindex.partitioner.nodes.node_plan import NodeRequest
from hybridindex.partitioner.nodes.placement import place_lists
from hybridindex.types import F32

__all__ = ["measure_fan_out"]

#: Memory beyond the copies: none of it for hot lists, or all.
_SPARE = 1.2
_REPLICAS = 2


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
