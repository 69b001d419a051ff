"""Rates and latencies that ``hybridindex simulate --nodes`` predicts, beside those of clusters, measured in one run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import show
from benchmarks.common.quota import pinned
from benchmarks.service.cluster.nodes import Nodes, Workload, mixed_queries, nodes
from benchmarks.service.cluster.routing import measure_costs
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
_NETWORK = ("request_s", "client_s", "ask_s", "hop_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """By one round: what is predicted from, and latencies, all of them within a minute or two."""

    #: By nprobe and whether clients choose nodes by their queries.
    networks: dict[tuple[int, bool], Network]
    #: By nprobe and whether another process scanned meanwhile.
    analyses: dict[tuple[int, bool], Analysis]
    latencies: list[dict[str, Any]]


def measure_forecast(
    workload: Workload, folder: Path, rate: dict[str, Any], profile_s: float, rounds: int, repeats: int
) -> dict[str, Any]:
    """Profiles the host scan of one thread on a whole core; where several nodes were measured, beside one that scans on
    another core: here they share memory, as nodes on machines of their own do not.

    All that a prediction rests on is measured again in each round, next to the latencies that it is compared with: the
    same search takes a quarter more in one minute of a shared machine than in another.

    Args:
        rate: of :func:`~benchmarks.service.cluster.rate.measure_rate`, before. What has a part of a core takes longer
            by it: SLO and rates are scaled by that. Of an index with codes, only what nodes that scan codes did.
        profile_s: of each round, for each number of lists.
        repeats: of :func:`~benchmarks.service.cluster.routing.measure_costs`.
    """
    precision = "rows" if workload.code_bits is None else "codes"
    rate = {**rate, "rows": [row for row in rate["rows"] if row["precision"] == precision]}
    nprobes = sorted({row["nprobe"] for row in rate["rows"]})
    options = ("--threads", "1", "--precision", precision)
    with ExitStack() as stack:
        clusters = [
            stack.enter_context(nodes(workload, folder / f"forecast-{n}", n, replicas=1, options=options))
            for n in range(1, len(os.sched_getaffinity(0)) + 1)
        ]
        measured = [
            _round(workload, folder / f"costs-{number}", clusters, nprobes, profile_s, repeats)
            for number in range(rounds)
        ]
    return {
        "rounds": rounds,
        "precision": precision,
        "costs": [
            {"nprobe": nprobe, "choosing": choosing, **_costs([each.networks[nprobe, choosing] for each in measured])}
            for nprobe, choosing in measured[0].networks
        ],
        "rows": _rates(workload, measured, rate),
        "latencies": _latencies(measured),
    }


def _round(
    workload: Workload, folder: Path, clusters: Sequence[Nodes], nprobes: Sequence[int], profile_s: float, repeats: int
) -> _Measured:
    costs = measure_costs(workload, folder, clusters[0], nprobes, repeats=repeats)
    networks = {
        (nprobe, choosing): _network(each, choosing) for nprobe, each in costs.items() for choosing in (False, True)
    }
    queries = mixed_queries(workload.centres, 2000, seed=1)
    analyses: dict[tuple[int, bool], Analysis] = {}
    latencies: list[dict[str, Any]] = []
    with open_index(workload.path) as index:
        for nprobe in nprobes:
            for several in (False, True):
                with _scanning(workload.path, queries, nprobe) if several else nullcontext():
                    profile = index.profile(queries, nprobe, threads=1, devices=0, max_seconds=profile_s)
                assert isinstance(profile, Profile)
                analysis = analyses[nprobe, several] = analyse(profile)
                for cluster in clusters:
                    if several == (len(cluster.names) > 1):
                        latencies += _compared(workload, cluster, analysis, networks, nprobe)
    return _Measured(networks=networks, analyses=analyses, latencies=latencies)


def _costs(networks: Sequence[Network]) -> dict[str, float]:
    return {f"{name[:-2]}_us": _middle([1e6 * getattr(each, name) for each in networks]) for name in _NETWORK}


def _network(costs: dict[str, Any], choosing: bool) -> Network:
    """``choosing``: a client chooses the node by its query."""
    message_s = 1e-6 * next(row["messages_us"] for row in costs["processor"] if row["queries"] == 1) / 2
    request = costs["request" if choosing else "alone"]
    request_s, client_s = (1e-6 * request[name] for name in ("request_us", "client_us"))
    # What a hop takes beyond the processor's time, or less where both nodes work at once.
    hop_s = max(-message_s / 2, 1e-6 * costs["pinned_hop_us"] / 2 - message_s)
    return Network(hop_s=hop_s, ask_s=message_s, serve_s=message_s, request_s=request_s, client_s=client_s)


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


def _rates(workload: Workload, measured: Sequence[_Measured], rate: dict[str, Any]) -> list[dict[str, Any]]:
    """Costs of requests are those of the shortest scans: where many come, code stays in caches between them."""
    share, rows = rate["cores_of_a_node"], []
    shortest = min(row["nprobe"] for row in rate["rows"])
    for row in [*rate["rows"], *_unmeasured(rate["rows"])]:
        predicted = []
        for each in measured:
            inputs = _inputs(
                workload,
                each.analyses[row["nprobe"], row["nodes"] > 1 and row["rate"] is not None],
                each.networks[shortest, row["nodes"] > 1 and row["by_locality"]],
                row["nodes"],
                row["replicas"],
                slo_s=share * row["slo_ms"] / 1e3,
                rate=row.get("offered", row["rate"]) / share,
                by_locality=row["by_locality"],
            )
            (found,) = scale_out(inputs, [row["nodes"]], _evenly, attainment=rate["attainment"])
            assert found.compliant is not None, found.refused
            predicted.append(share * found.compliant.rate)
        names = ("nprobe", "nodes", "replicas", "by_locality", "rate", "of_linear")
        rows.append(
            {
                **{name: row[name] for name in names},
                "predicted_rate": _middle(predicted),
                "predicted_rate_range": [min(predicted), max(predicted)],
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


def _compared(
    workload: Workload, cluster: Nodes, analysis: Analysis, networks: dict[tuple[int, bool], Network], nprobe: int
) -> Iterator[dict[str, Any]]:
    """Medians of searches one after the other, by nodes with one thread and a core each."""
    queries = mixed_queries(workload.centres, _BEFORE + _SEARCHES, seed=13)
    n = len(cluster.names)
    for by_locality in (True, False) if n > 1 and nprobe < workload.nlist else (True,):
        pids = [process.pid for process in cluster.processes.values()]
        with pinned(pids), cluster.router(by_locality=by_locality) as router:
            seconds = [_timed(router, query, nprobe) for query in queries]
        measured_s = float(np.median(seconds[_BEFORE:]))
        rate, network = 0.1 / measured_s, networks[nprobe, n > 1 and by_locality]
        inputs = _inputs(workload, analysis, network, n, 1, slo_s=10.0, rate=rate, by_locality=by_locality)
        (found,) = scale_out(inputs, [n], _evenly, attainment=0.95, find_rate=False)
        assert found.outcome is not None, found.refused
        yield {
            "nprobe": nprobe,
            "nodes": n,
            "by_locality": by_locality,
            "measured_p50_ms": 1e3 * measured_s,
            "predicted_p50_ms": 1e3 * found.outcome.search.p50,
        }


def _latencies(measured: Sequence[_Measured]) -> list[dict[str, Any]]:
    """Medians over the rounds; the ratio: of each round's own two."""
    rows = []
    for same in zip(*(each.latencies for each in measured), strict=True):
        ratios = [row["predicted_p50_ms"] / row["measured_p50_ms"] for row in same]
        medians = {name: _middle([row[name] for row in same]) for name in ("measured_p50_ms", "predicted_p50_ms")}
        rows.append(
            {**same[0], **medians, "of_measured": _middle(ratios), "of_measured_range": [min(ratios), max(ratios)]}
        )
    show(
        "median latency, a core for each node",
        ("nprobe", "nodes", "chosen", "measured ms", "predicted ms", "over measured", "in each round"),
        [
            (
                *(r[name] for name in ("nprobe", "nodes")),
                "by locality" if r["by_locality"] else "any",
                *(r[name] for name in ("measured_p50_ms", "predicted_p50_ms", "of_measured")),
                "..".join(f"{ratio:.2f}" for ratio in r["of_measured_range"]),
            )
            for r in rows
        ],
    )
    return rows


def _middle(values: Sequence[float]) -> float:
    return float(np.median(values))


def _timed(router: ClusterRouter, query: F32, nprobe: int) -> float:
    began = time.perf_counter()
    router.search(query, 10, nprobe)
    return time.perf_counter() - began


def _evenly(rate: float) -> Requests:
    """As the load of the benchmark comes."""
    return Requests(arrivals=np.arange(_REQUESTS) / rate)
