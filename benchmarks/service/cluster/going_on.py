"""What callers notice while nodes go on to another generation, under a load that they sustain easily."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import show
from benchmarks.service.cluster.load import Load
from benchmarks.service.cluster.nodes import Workload, mixed_queries, nodes, until

__all__ = ["measure_generations"]

_N, _QUERIES = 4, 4096
#: Of the rows, upserted before each compaction: most lists change.
_CHANGED = 0.05
_WARM_S, _WHOLE_S = 4.0, 120.0


def measure_generations(
    workload: Workload, folder: Path, *, rate: float, seconds: float, trials: int
) -> dict[str, Any]:
    """Four nodes, which share the cores of this machine; and one node, which has them, as each would on a machine of
    its own."""
    several, one = (
        _measure(workload, folder / f"generations-{n}", n, rate=rate, seconds=seconds, trials=trials) for n in (_N, 1)
    )
    return {"rate": rate, "nodes": _N, "changed": _CHANGED, **several, "one_node": one}


def _measure(
    workload: Workload, folder: Path, n_nodes: int, *, rate: float, seconds: float, trials: int
) -> dict[str, Any]:
    """A node compacts the index; then all go on. The time in which nothing happens, the compaction, and going on, each
    against the first of them; and a second time in which nothing happens, which is the floor."""
    path = folder / "index"
    shutil.copytree(workload.path, path)
    queries, rng = mixed_queries(workload.centres, _QUERIES, seed=7), np.random.default_rng(2)
    rows: list[dict[str, Any]] = []
    replicas = min(2, n_nodes)
    with (
        nodes(replace(workload, path=path), folder / "nodes", n_nodes, replicas=replicas) as cluster,
        cluster.router() as router,
    ):
        for trial in range(trials):
            ids = rng.choice(len(workload.vectors), int(_CHANGED * len(workload.vectors)), replace=False)
            router.upsert(np.ascontiguousarray(workload.vectors[ids]), ids)
            load = Load(router, queries, rate, workload.nprobe)
            time.sleep(_WARM_S)
            times = [time.monotonic()]
            for _ in range(2):
                time.sleep(seconds)
                times.append(time.monotonic())
            generation = cluster.compact(cluster.names[-1])
            times.append(time.monotonic())
            going_s = until(lambda now=generation: cluster.serve_alone(now), _WHOLE_S)  # type: ignore[misc]
            times.append(time.monotonic())
            taken = load.end()
            parts = dict(zip(("quiet", "quiet again", "compacts", "goes on"), pairwise(times), strict=True))
            found = {name: taken.between(*part) for name, part in parts.items()}
            rows.append(
                {
                    "trial": trial,
                    "compaction_s": times[3] - times[2],
                    "going_on_s": going_s,
                    "failed": int(np.isinf(taken.seconds).sum()),
                    "errors": dict(taken.errors),
                    "searches": {name: len(each) for name, each in found.items()},
                    "p50_ms": {name: 1e3 * float(np.median(each)) for name, each in found.items()},
                    "p99_ms": {name: 1e3 * float(np.percentile(each, 99)) for name, each in found.items()},
                }
            )
    ratios = {
        name: float(np.median([row["p99_ms"][name] / row["p99_ms"]["quiet"] for row in rows]))
        for name in ("quiet again", "compacts", "goes on")
    }
    show(
        f"{n_nodes} nodes go on to another generation, {rate:g} searches/s; p99 against quiet: {ratios}",
        ("trial", "failed", "compacted in s", "went on in s", "p50 quiet / compacts / goes on", "p99"),
        [
            (
                row["trial"], row["failed"], f"{row['compaction_s']:.1f}", f"{row['going_on_s']:.1f}",
                *(" / ".join(f"{row[of][name]:.1f}" for name in ("quiet", "compacts", "goes on"))
                  for of in ("p50_ms", "p99_ms")),
            )
            for row in rows
        ],
    )  # fmt: skip
    return {"rows": rows, "p99_ratio": ratios}
