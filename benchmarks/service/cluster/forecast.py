"""Rates and latencies that ``hybridindex simulate --nodes`` predicts, beside those of clusters, measured in one run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import show
from benchmarks.common.quota import pinned
from benchmarks.service.cluster.nodes import Workload, mixed_queries, nodes
from hybridindex.api import open_index
from hybridindex.cluster.router import ClusterRouter
from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.studies.cluster import ClusterInputs, Network, scale_out
from hybridindex.studies.simulator import Workload as Requests
from hybridindex.types import F32, Profile

__all__ = ["measure_forecast"]

_REQUESTS = 2000
#: Whose latencies are measured, after others that make connections and caches warm.
_SEARCHES, _BEFORE = 400, 100


def measure_forecast(
    workload: Workload, folder: Path, rate: dict[str, Any], routing: dict[str, Any], profile_s: float
) -> dict[str, Any]:
    """Profiles the host scan of one thread on a whole core; where several nodes were measured, beside one that scans on
    another core: here they share memory, as nodes on machines of their own do not.

    Args:
        rate: of :func:`~benchmarks.service.cluster.rate.measure_rate`, before. What has a part of a core takes longer
            by it: SLO and rates are scaled by that.
        routing: of :func:`~benchmarks.service.cluster.routing.measure_routing`, before: what requests and messages take
            here.
    """
    queries = mixed_queries(workload.centres, 2000, seed=1)
    message_s = 1e-6 * next(row["messages_us"] for row in routing["processor"] if row["queries"] == 1) / 2
    request_s, client_s = (1e-6 * routing["request"][name] for name in ("request_us", "client_us"))
    # What a hop takes and no processor: the line, and processes that have to wake.
    hop_s = max(0.0, 1e-6 * routing["pinned_hop_us"] / 2 - message_s)
    network = Network(hop_s=hop_s, ask_s=message_s, serve_s=message_s, request_s=request_s, client_s=client_s)
    analyses: dict[tuple[int, bool], Analysis] = {}
    with open_index(workload.path) as index:
        for nprobe in sorted({row["nprobe"] for row in rate["rows"]}):
            for several in (False, True):
                with _scanning(workload.path, queries, nprobe) if several else nullcontext():
                    profile = index.profile(queries, nprobe, threads=1, devices=0, max_seconds=profile_s)
                assert isinstance(profile, Profile)
                analyses[nprobe, several] = analyse(profile)
    return {
        "request_us": 1e6 * request_s,
        "client_us": 1e6 * client_s,
        "message_us": 1e6 * message_s,
        "hop_us": 1e6 * hop_s,
        "rows": _rates(workload, analyses, network, rate),
        "latencies": _latencies(workload, folder, analyses, network),
    }


@contextmanager
def _scanning(path: Path, queries: F32, nprobe: int) -> Iterator[None]:
    """Another process searches the index meanwhile, with one thread, one query after the other."""
    process = get_context("spawn").Process(target=_scan, args=(path, queries, nprobe), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _scan(path: Path, queries: F32, nprobe: int) -> None:
    with open_index(path) as index, index.router(threads=1) as router:
        while True:
            for query in queries:
                router.search(query, 10, nprobe)


def _inputs(
    workload: Workload, analysis: Analysis, network: Network, n_nodes: int, replicas: int, **more: Any
) -> ClusterInputs:
    """No room for hot lists on all nodes, as in the clusters that are measured."""
    node_bytes = int(1.02 * replicas * workload.index_bytes / n_nodes)
    return ClusterInputs(analysis=analysis, node_bytes=node_bytes, replicas=replicas, network=network, **more)


def _rates(
    workload: Workload, analyses: dict[tuple[int, bool], Analysis], network: Network, rate: dict[str, Any]
) -> list[dict[str, Any]]:
    share, rows = rate["cores_of_a_node"], []
    for row in [*rate["rows"], *_unmeasured(rate["rows"])]:
        inputs = _inputs(
            workload,
            analyses[row["nprobe"], row["nodes"] > 1 and row["rate"] is not None],
            network,
            row["nodes"],
            row["replicas"],
            slo_s=share * row["slo_ms"] / 1e3,
            rate=row.get("offered", row["rate"]) / share,
            by_locality=row["by_locality"],
        )
        (found,) = scale_out(inputs, [row["nodes"]], _evenly, attainment=rate["attainment"])
        assert found.compliant is not None, found.refused
        names = ("nprobe", "nodes", "replicas", "by_locality", "rate", "of_linear")
        rows.append(
            {
                **{name: row[name] for name in names},
                "predicted_rate": share * found.compliant.rate,
                "fan_out": found.fan_out,
            }
        )
    for row in rows:
        one = next(r for r in rows if r["nprobe"] == row["nprobe"] and r["nodes"] == 1)
        row["predicted_of_linear"] = row["predicted_rate"] / (row["nodes"] * one["predicted_rate"])
    show(
        f"searches/s with {rate['attainment']:.0%} within the SLO, {share:.2f} of a core for each node",
        ("nprobe", "nodes", "replicas", "chosen", "measured", "predicted", "of linear", "predicted", "fan-out"),
        [
            (
                *(r[name] for name in ("nprobe", "nodes", "replicas")),
                "by locality" if r["by_locality"] else "any",
                *(r[name] for name in ("rate", "predicted_rate", "of_linear", "predicted_of_linear", "fan_out")),
            )
            for r in rows
        ],
    )
    return rows


def _unmeasured(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of four nodes like the two that were measured, where there are no cores for four: what they are offered."""
    if any(row["nodes"] == 4 for row in rows):
        return []
    four = {"nodes": 4, "rate": None, "of_linear": None}
    ones = {row["nprobe"]: row["rate"] for row in rows if row["nodes"] == 1}
    return [{**row, **four, "offered": 4 * ones[row["nprobe"]]} for row in rows if row["nodes"] == 2]


def _latencies(
    workload: Workload, folder: Path, analyses: dict[tuple[int, bool], Analysis], network: Network
) -> list[dict[str, Any]]:
    """Medians of searches one after the other, by nodes with one thread and a core each."""
    queries = mixed_queries(workload.centres, 4096, seed=13)
    rows: list[dict[str, Any]] = []
    for n in range(1, len(os.sched_getaffinity(0)) + 1):
        with nodes(workload, folder / f"forecast-{n}", n, replicas=1, options=("--threads", "1")) as cluster:
            for nprobe, analysis in (
                (nprobe, each) for (nprobe, several), each in analyses.items() if several == (n > 1)
            ):
                for by_locality in (True, False) if n > 1 and nprobe < workload.nlist else (True,):
                    pids = [process.pid for process in cluster.processes.values()]
                    with pinned(pids), cluster.router(by_locality=by_locality) as router:
                        seconds = [_timed(router, query, nprobe) for query in queries[: _BEFORE + _SEARCHES]]
                    measured_s = float(np.median(seconds[_BEFORE:]))
                    rate = 0.1 / measured_s
                    inputs = _inputs(workload, analysis, network, n, 1, slo_s=10.0, rate=rate, by_locality=by_locality)
                    (found,) = scale_out(inputs, [n], _evenly, attainment=0.95, find_rate=False)
                    assert found.outcome is not None, found.refused
                    rows.append(
                        {
                            "nprobe": nprobe,
                            "nodes": n,
                            "by_locality": by_locality,
                            "measured_p50_ms": 1e3 * measured_s,
                            "predicted_p50_ms": 1e3 * found.outcome.search.p50,
                        }
                    )
    show(
        "median latency, a core for each node",
        ("nprobe", "nodes", "chosen", "measured ms", "predicted ms", "over measured"),
        [
            (
                *(r[name] for name in ("nprobe", "nodes")),
                "by locality" if r["by_locality"] else "any",
                *(r[name] for name in ("measured_p50_ms", "predicted_p50_ms")),
                r["predicted_p50_ms"] / r["measured_p50_ms"],
            )
            for r in rows
        ],
    )
    return rows


def _timed(router: ClusterRouter, query: F32, nprobe: int) -> float:
    began = time.perf_counter()
    router.search(query, 10, nprobe)
    return time.perf_counter() - began


def _evenly(rate: float) -> Requests:
    """As the load of the benchmark comes."""
    return Requests(arrivals=np.arange(_REQUESTS) / rate)
