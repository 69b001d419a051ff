"""Part of ``benchmarks.host.updates``: what a turnover with topic drift does to recall and scanned bytes.

Rows are ordered by topic, with some noise: the first half is there first, and goes in this order; the other half comes
in its place. Meanwhile the index is compacted when its writer would do it. At the end it is compared with fresh builds
of the same rows: recall at equal scanned bytes, and scanned bytes at equal recall, over a curve of nprobe. Two fresh
builds with different seeds are the noise floor.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import built_lists, make_clusters
from benchmarks.common.data import benchmark_dataset
from benchmarks.common.measure import show
from benchmarks.host.update_adds import Scale
from benchmarks.rivals.tuning import found
from hybridindex.api import Index, build, open_index
from hybridindex.index.changes.compact import needs_compaction
from hybridindex.types import F32, F64, I64

__all__ = ["curve", "drifting", "nearest", "recall", "scanned", "stands_beside"]

K = 10
#: Points of recall that may be lost, and times the bytes that may be scanned.
POINTS, BYTES = 0.5, 1.1
#: Recall at which both are compared.
LEVELS = (0.8, 0.9, 0.95)
NPROBES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)


def drifting(vectors: F32, lists: I64, centres: F32, seed: int = 0) -> F32:
    """``vectors`` in the order of their topics: that of a direction along which the centres differ most, and noise of a
    quarter of its spread, so that topics fade in and out."""
    rng = np.random.default_rng(seed)
    middle = centres - centres.mean(axis=0)
    direction = np.linalg.svd(middle, full_matrices=False)[2][0]
    topic = middle @ direction
    score = topic[lists] + 0.25 * topic.std() * rng.standard_normal(len(vectors))
    return np.ascontiguousarray(vectors[np.argsort(score, kind="stable")])


def nearest(vectors: F32, ids: I64, queries: F32) -> I64:
    """(n, K) true neighbours by inner product."""
    best = np.full((len(queries), K), -np.inf, dtype=np.float32)
    their = np.full((len(queries), K), -1, dtype=np.int64)
    for at in range(0, len(vectors), 65_536):
        score = queries @ vectors[at : at + 65_536].T
        part = np.argpartition(-score, min(K, score.shape[1] - 1), axis=1)[:, :K]
        every = np.concatenate([best, np.take_along_axis(score, part, axis=1)], axis=1)
        every_ids = np.concatenate([their, ids[at : at + 65_536][part]], axis=1)
        order = np.argsort(-every, axis=1, kind="stable")[:, :K]
        best, their = np.take_along_axis(every, order, axis=1), np.take_along_axis(every_ids, order, axis=1)
    return their


def scanned(index: Index, queries: F32, nprobe: int) -> float:
    """Bytes of codes that a search of one of the queries scans, on average: rows that are gone, and came, included."""
    ivf = index.ivf
    sizes = np.array(ivf.list_sizes)
    live = ivf.live.current()
    if live is not None and live.added is not None:
        sizes = sizes + live.added.sizes
    probes = ivf.quantize(queries, nprobe)[0]
    return float(sizes[probes].sum(axis=1).mean() * ivf.code_size)


def curve(index: Index, queries: F32, truth: I64) -> list[tuple[int, float, float]]:
    """(nprobe, scanned bytes, recall)."""
    points = []
    with index.router(warm_bytes=0, precision="rows") as router:
        for nprobe in (each for each in NPROBES if each <= index.nlist):
            answers = np.concatenate(
                [router.search(queries[at : at + 64], K, nprobe).ids for at in range(0, len(queries), 64)]
            )
            points.append((nprobe, scanned(index, queries, nprobe), float(found(answers, truth).mean())))
            if points[-1][2] > max(LEVELS) + 0.02:
                break
    return points


def _along(points: list[tuple[int, float, float]]) -> tuple[F64, F64]:
    """Logarithms of bytes, and recall that does not fall."""
    return np.log([each[1] for each in points]), np.maximum.accumulate([each[2] for each in points])


def stands_beside(
    ours: list[tuple[int, float, float]], fresh: list[tuple[int, float, float]], level: float
) -> tuple[float, float] | None:
    """Points of recall that ours lacks at the bytes at which the fresh one has ``level``; and times its bytes that ours
    needs for ``level``. None: one of them does not reach it, or has it from the first list."""
    (ours_bytes, ours_recall), (fresh_bytes, fresh_recall) = _along(ours), _along(fresh)
    for reached in (ours_recall, fresh_recall):
        if not reached[0] < level <= reached[-1]:
            return None
    at = float(np.interp(level, fresh_recall, fresh_bytes))
    lacks = level - float(np.interp(at, ours_bytes, ours_recall))
    return 100 * lacks, float(np.exp(np.interp(level, ours_recall, ours_bytes) - at))


def _turned_over(index: Index, vectors: F32, steps: int) -> dict[str, int]:
    """Deletes the first half step by step, and adds the other half; compacts when the writer would."""
    half = len(vectors) // 2
    borders = np.linspace(0, half, steps + 1).astype(int).tolist()
    done = {"compactions": 0}
    for start, end in itertools.pairwise(borders):
        index.delete(np.arange(start, end))
        for at in range(start, end, 10_000):
            come = np.arange(half + at, half + min(at + 10_000, end))
            index.add(vectors[come], come)
        if needs_compaction(index.ivf):
            index.compact()
            done["compactions"] += 1
    return done | {"nlist": index.nlist, "added": index.n_added, "deleted": index.n_deleted}


def _measure(name: str, vectors: F32, queries: F32, codec: str, scale: Scale) -> dict[str, Any]:
    half = len(vectors) // 2
    vectors = vectors[: 2 * half]
    nlist = int(4 * np.sqrt(half))
    rest, ids = vectors[half:], np.arange(half, 2 * half)
    truth = nearest(rest, ids, queries)
    curves = {}
    with tempfile.TemporaryDirectory(dir=scale.scratch) as folder:
        where = Path(folder)
        # Not open for writing: nothing compacts but this.
        build(vectors[:half], where / "ours", nlist=nlist, metric="ip", codec=codec).close()
        with open_index(where / "ours") as index:
            done = _turned_over(index, vectors, scale.steps)
            curves["as the writer leaves it"] = curve(index, queries, truth)
            index.compact()
            done["nlist"] = index.nlist
            curves["compacted"] = curve(index, queries, truth)
        for seed, fresh in enumerate(("fresh", "fresh again")):
            with build(rest, where / fresh, nlist=nlist, metric="ip", codec=codec, ids=ids, seed=100 + seed) as index:
                curves[fresh] = curve(index, queries, truth)
    compared = []
    for level in LEVELS:
        floor = stands_beside(curves["fresh again"], curves["fresh"], level)
        for kind in ("as the writer leaves it", "compacted"):
            beside = stands_beside(curves[kind], curves["fresh"], level)
            if beside is None or floor is None:
                continue
            compared.append(
                {
                    "recall": level,
                    "side": kind,
                    "points_lost": beside[0],
                    "points_floor": abs(floor[0]),
                    "bytes": beside[1],
                    "bytes_floor": abs(floor[1] - 1),
                    "points_verdict": _said(beside[0], POINTS, abs(floor[0])),
                    "bytes_verdict": _said(beside[1], BYTES, abs(floor[1] - 1)),
                }
            )
    return {
        "data": name, "codec": codec, "rows": half, "nlist_first": nlist, **done, "curves": curves, "compared": compared
    }  # fmt: skip


def _said(value: float, target: float, floor: float) -> str:
    """Within the floor of the target nothing is decided."""
    if value <= target - floor or value <= 0:
        return "met"
    return "missed" if value > target + floor else "inconclusive"


def _data(scale: Scale, dataset: str, count: int) -> list[tuple[str, F32, F32]]:
    """(name, vectors in the order in which they come, queries)."""
    made = make_clusters(scale.dim, count * 4 * scale.dim, nlist=int(4 * np.sqrt(count)))
    rng = np.random.default_rng(7)
    ordered = drifting(made.vectors, made.lists, made.centres)
    later = ordered[len(ordered) // 2 :]
    # About rows that are there in the end.
    queries = later[rng.integers(0, len(later), scale.queries)] + rng.standard_normal(
        (scale.queries, scale.dim), dtype=np.float32
    ) * np.float32(0.5 / np.sqrt(scale.dim))
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    sets = [("clusters", ordered, np.ascontiguousarray(queries))]
    if dataset != "none":
        real = benchmark_dataset(dataset)  # type: ignore[arg-type]
        vectors = real.centered(np.asarray(real.vectors()))
        vectors = vectors[rng.permutation(len(vectors))[:count]]
        log = real.centered(np.asarray(real.log_queries))
        log = np.ascontiguousarray(log[rng.permutation(len(log))[: scale.queries]])
        lists = built_lists(vectors)
        sets.append((f"real ({dataset})", drifting(lists.vectors, lists.lists, lists.centres), log))
    return sets


def recall(scale: Scale, dataset: str, codecs: tuple[str, ...], count: int) -> dict[str, Any]:
    """A turnover of half of ``count`` rows by the other half."""
    rows = [
        _measure(name, vectors, queries, codec, scale)
        for name, vectors, queries in _data(scale, dataset, count)
        for codec in codecs
    ]
    show(
        f"after a turnover with topic drift, beside a fresh build (targets {POINTS:g} points, {BYTES:g} times)",
        ("data", "codec", "rows", "lists", "compactions", "side", "at recall", "points lost", "floor", "", "bytes",
         "floor", ""),
        [
            (
                row["data"],
                row["codec"],
                f"{row['rows']:,}",
                f"{row['nlist_first']} to {row['nlist']}",
                row["compactions"],
                one["side"],
                one["recall"],
                f"{one['points_lost']:+.2f}",
                f"{one['points_floor']:.2f}",
                one["points_verdict"],
                f"{one['bytes']:.3f}",
                f"{one['bytes_floor']:.3f}",
                one["bytes_verdict"],
            )
            for row in rows
            for one in row["compared"]
        ],
    )  # fmt: skip
    return {"steps": scale.steps, "targets": {"points": POINTS, "bytes": BYTES}, "rows": rows}
