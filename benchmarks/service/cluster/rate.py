"""The rate that more nodes bring: each with one thread, and the same part of a core."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import show
from benchmarks.common.quota import pinned, quotas
from benchmarks.service.cluster.load import Load
from benchmarks.service.cluster.nodes import Workload, mixed_queries, nodes
from hybridindex.cluster.router import ClusterRouter
from hybridindex.types import F32

__all__ = ["measure_rate"]

#: An SLO below is of this machine's clock rather than of the nodes.
_LEAST_SLO_S = 0.025
#: Of the cores, what all nodes of the largest cluster may use together. The client has the rest.
_NODES_PART = 0.6
#: A rate that holds and one that does not are this near to each other in the end, as a part of the higher.
_NEAR = 0.12
#: Nodes and replicas.
_CLUSTERS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2))
#: More is no question for one client.
_MOST_RATE = 20_000


def measure_rate(
    workload: Workload,
    folder: Path,
    *,
    seconds: float,
    nprobes: tuple[int, ...],
    most_nodes: int,
    attainment: float = 0.95,
) -> dict[str, Any]:
    """The highest rate with ``attainment`` at five times the median of one node without load, 25 ms at least.

    Each daemon has one thread and the same part of one core; the client has what is left. Where there are more nodes
    than cores, threads of a node wait for those of others, which nodes on machines of their own would not. Of an index
    with codes, nodes scan rows, and then codes.
    """
    queries = mixed_queries(workload.centres, 4096, seed=13)
    share = _NODES_PART * len(os.sched_getaffinity(0)) / most_nodes
    rows: list[dict[str, Any]] = []
    precisions = ("rows",) if workload.code_bits is None else ("rows", "codes")
    for nprobe, precision in itertools.product(nprobes, precisions):
        slo_s = one = most = 0.0
        options = ("--threads", "1", "--precision", precision)
        for n, replicas in (each for each in _CLUSTERS if each[0] <= most_nodes):
            name = folder / f"rate-{nprobe}-{precision}-{n}-{replicas}"
            with nodes(workload, name, n, replicas=replicas, options=options) as cluster:
                pids = [process.pid for process in cluster.processes.values()]
                # All nodes are equal to a query that probes all lists.
                for by_locality in (True, False) if n > 1 and nprobe < workload.nlist else (True,):
                    with pinned(pids), quotas(pids, share), cluster.router(by_locality=by_locality) as router:
                        alone_s = _alone(router, queries, nprobe)
                        slo_s = slo_s or max(5 * alone_s, _LEAST_SLO_S)
                        most = most or 1 / alone_s
                        first = n * (one or most) / 4
                        tried = _highest(router, queries, nprobe, slo_s, seconds, attainment, first)
                    # The highest that held; a lower one may have failed twice by chance.
                    rate = max((each["rate"] for each in tried if each["attainment"] >= attainment), default=0.0)
                    one = one or rate
                    rows.append(
                        {
                            "nprobe": nprobe,
                            "precision": precision,
                            "nodes": n,
                            "replicas": replicas,
                            "by_locality": by_locality,
                            "alone_ms": 1e3 * alone_s,
                            "slo_ms": 1e3 * slo_s,
                            "rate": rate,
                            "of_linear": rate / (n * one) if one else 0.0,
                            "client_cores": max(
                                (each["client_cores"] for each in tried if each["rate"] == rate), default=0.0
                            ),
                            "tried": tried,
                        }
                    )
    show(
        f"searches/s with {attainment:.0%} within the SLO; {share:.2f} of a core for each node",
        (
            "nprobe",
            "scanned",
            "nodes",
            "replicas",
            "chosen",
            "one search alone ms",
            "SLO ms",
            "searches/s",
            "of linear",
            "cores of the client",
        ),
        [
            (
                r["nprobe"],
                r["precision"],
                r["nodes"],
                r["replicas"],
                "by locality" if r["by_locality"] else "any",
                *(r[name] for name in ("alone_ms", "slo_ms", "rate", "of_linear", "client_cores")),
            )
            for r in rows
        ],
    )
    return {"attainment": attainment, "cores_of_a_node": share, "rows": rows}


def _alone(router: ClusterRouter, queries: F32, nprobe: int) -> float:
    taken = []
    for query in queries[:200]:
        began = time.perf_counter()
        router.search(query, 10, nprobe)
        taken.append(time.perf_counter() - began)
    return float(np.median(taken[50:]))


def _highest(
    router: ClusterRouter, queries: F32, nprobe: int, slo_s: float, seconds: float, attainment: float, first: float
) -> list[dict[str, float]]:
    """Doubles from ``first`` until the rate is too high, then halves the interval; what fails is tried once more. With
    each: how much of a core the client took."""
    tried: list[dict[str, float]] = []

    def holds(rate: float) -> bool:
        return once(rate) or once(rate)

    def once(rate: float) -> bool:
        load, began_s, used_s = Load(router, queries, rate, nprobe), time.monotonic(), time.process_time()
        # A queue that grows has to outgrow the SLO meanwhile.
        time.sleep(max(seconds, 6 * slo_s))
        client = (time.process_time() - used_s) / (time.monotonic() - began_s)
        taken = load.end()
        # The first half second is the connections'.
        settled = taken.seconds[taken.due_s > taken.due_s[0] + 0.5]
        tried.append(
            {
                "rate": rate,
                "attainment": float((settled <= slo_s).mean()),
                "p50_ms": 1e3 * float(np.median(settled)),
                "p99_ms": 1e3 * float(np.percentile(settled, 99, method="lower")),
                "client_cores": client,
            }
        )
        return tried[-1]["attainment"] >= attainment

    low, high = 0.0, first
    while high < _MOST_RATE and holds(high):
        low, high = high, 2 * high
    while high - low > _NEAR * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return tried
