"""Rates and latencies that ``hybridindex simulate --nodes`` predicts, beside those that a cluster was measured with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import show
from benchmarks.service.cluster.nodes import Workload, mixed_queries
from hybridindex.api import open_index
from hybridindex.partitioner.analysis import analyse
from hybridindex.studies.cluster.scale_out import scale_out
from hybridindex.studies.cluster.system import ClusterInputs
from hybridindex.studies.simulator import Workload as Requests

__all__ = ["measure_forecast"]

_REQUESTS = 2000


def measure_forecast(workload: Workload, measured: Path, profile_s: float) -> dict[str, Any]:
    """Profiles the host scan of one thread on a whole core. What has a part of one takes longer by it: SLO and rates
    of ``measured``, a result of :func:`~benchmarks.service.cluster.rate.measure_rate`, are scaled by it."""
    rate = json.loads(measured.read_text())["rate"]
    share, rows = rate["cores_of_a_node"], []
    queries = mixed_queries(workload.centres, 2000, seed=1)
    with open_index(workload.path) as index:
        profiles = {
            nprobe: index.profile(queries, nprobe, threads=1, devices=0, max_seconds=profile_s)
            for nprobe in sorted({row["nprobe"] for row in rate["rows"]})
        }
    for row in rate["rows"]:
        inputs = ClusterInputs(
            analysis=analyse(profiles[row["nprobe"]]),
            slo_s=share * row["slo_ms"] / 1e3,
            rate=row["rate"] / share,
            # No room for hot lists on all nodes, as there.
            node_bytes=int(1.02 * row["replicas"] * workload.index_bytes / row["nodes"]),
            replicas=row["replicas"],
            by_locality=row["by_locality"],
        )
        (found,) = scale_out(inputs, [row["nodes"]], _evenly, attainment=rate["attainment"])
        assert found.outcome is not None, found.refused
        assert found.compliant is not None
        rows.append(
            {
                **{
                    name: row[name]
                    for name in ("nprobe", "nodes", "replicas", "by_locality", "rate", "of_linear", "alone_ms")
                },
                "predicted_rate": share * found.compliant.rate,
                "fan_out": found.fan_out,
                "latencies": _latencies(inputs, row, share, rate["attainment"]),
            }
        )
    for row in rows:
        one = next(r for r in rows if r["nprobe"] == row["nprobe"] and r["nodes"] == 1)
        row["predicted_of_linear"] = row["predicted_rate"] / (row["nodes"] * one["predicted_rate"])
    show(
        f"searches/s with {rate['attainment']:.0%} within the SLO, {share:.2f} of a core for each node",
        (
            "nprobe",
            "nodes",
            "replicas",
            "chosen",
            "measured",
            "predicted",
            "of linear",
            "predicted of linear",
            "fan-out",
        ),
        [
            (
                *(r[name] for name in ("nprobe", "nodes", "replicas")),
                "by locality" if r["by_locality"] else "any",
                *(r[name] for name in ("rate", "predicted_rate")),
                *(r[name] for name in ("of_linear", "predicted_of_linear", "fan_out")),
            )
            for r in rows
        ],
    )
    show(
        "median latency at rates that held",
        ("nprobe", "nodes", "replicas", "searches/s", "measured ms", "predicted ms", "over measured"),
        [
            (r["nprobe"], r["nodes"], r["replicas"], *each.values(), each["predicted_p50_ms"] / each["measured_p50_ms"])
            for r in rows
            for each in r["latencies"]
        ],
    )
    return {"rows": rows}


def _latencies(inputs: ClusterInputs, row: dict[str, Any], share: float, attainment: float) -> list[dict[str, float]]:
    """Medians at each rate that held, lowest first: of all runs with it the first that did."""
    held: dict[float, float] = {}
    for tried in row["tried"]:
        if tried["attainment"] >= attainment:
            held.setdefault(tried["rate"], tried["p50_ms"])
    found = []
    for rate, p50_ms in sorted(held.items()):
        asked = replace(inputs, rate=rate / share)
        (at,) = scale_out(asked, [row["nodes"]], _evenly, attainment=attainment, find_rate=False)
        assert at.outcome is not None
        predicted = 1e3 * at.outcome.search.p50 / share
        found.append({"rate": rate, "measured_p50_ms": p50_ms, "predicted_p50_ms": predicted})
    return found


def _evenly(rate: float) -> Requests:
    """As the load of the benchmark comes."""
    return Requests(arrivals=np.arange(_REQUESTS) / rate)
