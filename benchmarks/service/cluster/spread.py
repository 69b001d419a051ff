"""How many other nodes a search asks, as planned and as counted: of clients that ask any node, and that choose one."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import show
from benchmarks.service.cluster.nodes import Nodes, Workload, mixed_queries, nodes
from hybridindex.api import open_index
from hybridindex.cluster.access import read_access
from hybridindex.cluster.router import ClusterRouter
from hybridindex.partitioner.nodes.node_plan import NodeRequest
from hybridindex.partitioner.nodes.placement import place_lists
from hybridindex.types import F32, I64

__all__ = ["measure_fan_out"]

#: Memory beyond the copies: none of it for hot lists, or all.
_SPARE = 1.2
_REPLICAS = 2
#: Searches of each kind of client in a row.
_IN_A_ROW = 250
#: Clients that ask any node, and those that choose.
_SIDES = {"": False, "nearest_": True}


def measure_fan_out(workload: Workload, folder: Path, *, queries: int) -> dict[str, Any]:
    """Four nodes as predicted and as counted; sixteen as predicted."""
    asked = mixed_queries(workload.centres, queries, seed=11)
    with open_index(workload.path) as index:
        probes = index.ivf.quantize(asked, workload.nprobe)[0]
        nbytes = np.where(probes >= 0, index.list_bytes[probes], 0).sum(axis=1)
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
                    row |= _count(cluster, asked, nbytes)
            rows.append(row)
    show(
        f"other nodes that a search asks, {_REPLICAS} replicas, nprobe {workload.nprobe}",
        ("nodes", "20 % more memory", "clients", "fan-out", "counted", "local share", "counted", "median ms"),
        [
            (r["nodes"], r["replicate"], "choose" if side else "ask any", r[f"{side}fan_out"],
             r.get(f"counted_{side}fan_out", ""), r[f"{side}local_share"], r.get(f"counted_{side}local_share", ""),
             r.get(f"{side}p50_ms", ""))
            for r in rows
            for side in _SIDES
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
        "nearest_fan_out": plan.nearest_fan_out,
        "nearest_local_share": plan.nearest_local_share,
        "hot_lists": int(plan.spread.size),
        "planned_in_s": time.perf_counter() - began,
    }


def _count(cluster: Nodes, queries: F32, nbytes: I64) -> dict[str, Any]:
    """One search for each query, two at a time, by either kind of client in turn; ``nbytes``: (n,) of its lists."""
    counts = {side: Counter[str]() for side in _SIDES}
    taken: dict[str, list[float]] = {side: [] for side in _SIDES}
    with ExitStack() as opened:
        pool = opened.enter_context(ThreadPoolExecutor(2))
        routers = {side: opened.enter_context(cluster.router(by_locality=chosen)) for side, chosen in _SIDES.items()}
        for first in range(0, len(queries), _IN_A_ROW):
            some = queries[first : first + _IN_A_ROW]
            for side, router in routers.items():
                before, by_client = _asked(cluster), _searches(router)
                taken[side] += pool.map(lambda query, router=router: _seconds(router, query, cluster.workload), some)
                counts[side].update({name: value - before[name] for name, value in _asked(cluster).items()})
                counts[side]["searches"] += _searches(router) - by_client
    found: dict[str, Any] = {}
    for side, count in counts.items():
        # A search that the client asked twice has the fan-out of two.
        found[f"counted_{side}fan_out"] = (count["asked"] - count["hedged"]) / count["searches"]
        whole = float(nbytes.sum()) * count["searches"] / len(queries)
        found[f"counted_{side}local_share"] = 1 - count["asked_bytes"] / whole
        found[f"{side}p50_ms"] = 1e3 * float(np.median(taken[side]))
        found |= {f"{side}{name}": count[name] for name in ("hedged", "failed", "searches")}
    return found


def _seconds(router: ClusterRouter, query: F32, workload: Workload) -> float:
    began = time.perf_counter()
    router.search(query, 10, workload.nprobe)
    return time.perf_counter() - began


def _searches(router: ClusterRouter) -> int:
    return sum(each["asked"] for each in router.status())


def _asked(cluster: Nodes) -> dict[str, int]:
    peers = [peer for name in cluster.names for peer in cluster.calls(name).node()["peers"]]
    return {name: sum(peer[name] for peer in peers) for name in ("asked", "asked_bytes", "hedged", "failed")}
