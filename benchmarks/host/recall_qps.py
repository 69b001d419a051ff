"""Recall@10 against queries per second, on real embeddings and a real query log: ours, faiss, hnswlib, usearch.

All systems hold the same vectors, answer the same queries, one at a time and 64 at a time, with the same number of
threads; the IVF ones also share centroids and lists. Truth is brute force by faiss. Ours is quantization and host scan
called directly, without a router. faiss's IVF runs in the fastest of its parallel modes, found for each batch size.
One query alone is one thread's work for the graphs; the IVF scans split it. A call includes its Python wrapper, ours
and theirs alike. All settings of all systems take turns in every round; queries per second are medians over rounds.

The table interpolates log(queries per second) over recall between the settings that no other setting of the same
system beats in both. A dash: no setting reaches that recall.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import import_lists
from benchmarks.common.data import benchmark_cache, benchmark_dataset
from benchmarks.common.measure import arguments, show, write
from benchmarks.rivals import ours
from benchmarks.rivals.known import CURVES
from benchmarks.rivals.system import Collection, K, System
from benchmarks.rivals.tuning import choose_mode, found, rate
from hybridindex.types import F32

BATCHES = (1, 64)
LEVELS = (0.90, 0.95, 0.99)
#: Settings below are not timed, but for the best of them: the table starts at 0.90, the picture at 0.80.
LEAST_RECALL = 0.75
#: And of those above, only the first.
MOST_RECALL = 0.9975


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", default="demo", help="demo or full")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--queries", type=int, default=1024, help="recall is over these, and batches are cut from them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.15, help="about how long a setting runs in one round")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves (PNG)")


def worth_timing(recalls: dict[str, float]) -> list[str]:
    """Settings between the limits, and the nearest on either side."""
    below = [name for name, r in recalls.items() if r < LEAST_RECALL]
    above = [name for name, r in recalls.items() if r > MOST_RECALL]
    keep = {*below, *above} - {*sorted(below, key=recalls.__getitem__)[-1:], *above[:1]}
    return [name for name in recalls if name not in keep]


def measure(
    ready: list[System], recalls: dict[str, dict[str, float]], queries: F32, batch: int, args: Any
) -> dict[str, Any]:
    """The curve of every system at one batch size."""
    points = {system.name: worth_timing(recalls[system.name]) for system in ready}
    answers = {system.name: system.points(args.threads) for system in ready}
    middle = {name: answers[name][some[len(some) // 2]] for name, some in points.items()}
    modes = {s.name: choose_mode(s, middle[s.name], queries, batch, args.seconds / 2) for s in ready}
    taken: dict[tuple[str, str], list[float]] = {(s.name, point): [] for s in ready for point in points[s.name]}
    by_name = {system.name: system for system in ready}
    rng = np.random.default_rng(batch)
    for _ in range(args.rounds):
        for at in rng.permutation(len(taken)).tolist():
            name, point = list(taken)[at]
            mode = modes[name]
            if mode is not None:
                by_name[name].set_mode(mode)
            taken[name, point].append(rate(answers[name][point], queries, batch, args.seconds))
    return {
        name: {
            "mode": modes[name],
            "points": [
                {
                    "setting": point,
                    "recall": recalls[name][point],
                    "qps": float(np.median(taken[name, point])),
                    "qps_quartiles": np.percentile(taken[name, point], [25, 75]).tolist(),
                }
                for point in points[name]
            ],
        }
        for name in by_name
    }


def front(points: list[Any]) -> list[tuple[float, float]]:
    """(recall, qps) of the settings that none beats in both, by rising recall."""
    best: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda p: (-p["recall"], -p["qps"])):
        if not best or point["qps"] > best[-1][1]:
            best.append((point["recall"], point["qps"]))
    return best[::-1]


def at_recall(points: list[Any], level: float) -> float | None:
    """Queries per second at this recall; the lowest setting's where all are above; None where none reaches it."""
    recalls, rates = np.array(front(points)).T
    return float(np.exp(np.interp(level, recalls, np.log(rates)))) if recalls[-1] >= level else None


def draw(curves: dict[int, Any], file: Path, title: str) -> None:
    """Both batch sizes side by side; log queries per second over recall."""
    from hybridindex.report.style import MARKERS, PALETTE, canvas, show_plain_log

    with canvas(4.8) as picture:
        panels = picture.panels(len(curves))
        for axes, (batch, systems_) in zip(panels, curves.items(), strict=True):
            for number, (name, curve) in enumerate(systems_.items()):
                line = np.array(front(curve["points"]))
                own = name.startswith("hybridindex")
                axes.plot(
                    line[:, 0],
                    line[:, 1],
                    label=name,
                    color=(*PALETTE, "#222222")[number % 7],
                    marker=(*MARKERS, "X")[number % 7],
                    linestyle="-" if own else "--",
                    linewidth=2.4 if own else 1.3,
                    zorder=3 if own else 2,
                )
            inside = [q for c in systems_.values() for r, q in front(c["points"]) if 0.795 <= r <= 1.0]
            axes.set_xlim(0.795, 1.002)
            axes.set_ylim(min(inside) * 0.8, max(inside) * 1.25)
            show_plain_log(axes, "y")
            axes.set_xlabel(f"recall@{K}")
            axes.set_ylabel("queries per second")
            axes.set_title("one query at a time" if batch == 1 else f"{batch} queries at a time")
        picture.figure.suptitle(title, fontsize=10)
        handles, labels = panels[0].get_legend_handles_labels()
        picture.figure.legend(handles, labels, loc="outside lower center", ncols=4)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture.png())


def main() -> None:
    args = arguments(__doc__, _options)
    import faiss

    import hybridindex as hx

    faiss.omp_set_num_threads(args.threads)
    data = benchmark_dataset(args.dataset)
    vectors = data.centered(np.asarray(data.vectors()))
    log = data.centered(np.asarray(data.log_queries))
    # Distinct: a popular query must not weigh its recall many times, and none may be answered from a warm cache.
    log = np.unique(log, axis=0)
    queries = np.ascontiguousarray(log[np.random.default_rng(0).permutation(len(log))[: args.queries]])
    exact = faiss.IndexFlat(vectors.shape[1], faiss.METRIC_INNER_PRODUCT)
    exact.add(vectors)
    truth = exact.search(queries, K)[1]
    del exact
    nlist = int(4 * np.sqrt(len(vectors)))
    with tempfile.TemporaryDirectory() as folder, hx.build(vectors, Path(folder) / "flat", nlist=nlist) as flat:
        blocks = range(0, len(vectors), 65_536)
        lists = np.concatenate([flat.ivf.quantize(vectors[at : at + 65_536], 1)[0][:, 0] for at in blocks])
        with import_lists(vectors, lists, np.array(flat.centroids), "sq8", "ip", Path(folder) / "sq8") as sq8:
            shared = Collection(
                vectors=vectors, lists=lists, centres=np.array(flat.centroids), cache=benchmark_cache() / "rivals"
            )
            ready, recalls = [ours.rows("flat", flat), ours.rows("sq8", sq8)], {}
            ready += [rival.make(shared) for rival in CURVES if not rival.missing]
            for system in ready:
                points = system.points(args.threads)
                recalls[system.name] = {name: float(found(run(queries), truth).mean()) for name, run in points.items()}
                sys.stderr.write(f"{system.name}: recall {max(recalls[system.name].values()):.4f} at most\n")
            curves = {batch: measure(ready, recalls, queries, batch, args) for batch in BATCHES}
            for system in ready:
                system.close()
    missing = [rival.name for rival in CURVES if rival.missing]
    title = f"{data.name}: {len(vectors):,} x {vectors.shape[1]}, {args.threads} threads"
    show(
        f"queries per second at recall@{K} ({title})",
        ("batch", "system", "mode", *(f"{level:.2f}" for level in LEVELS)),
        [
            (batch, name, "-" if c["mode"] is None else c["mode"], *(_said(c["points"], level) for level in LEVELS))
            for batch in BATCHES
            for name, c in curves[batch].items()
        ]
        + [(batch, name, "-", *("not installed" for _ in LEVELS)) for batch in BATCHES for name in missing],
    )
    write(
        args.json,
        "recall_qps",
        {
            "dataset": data.name,
            "count": len(vectors),
            "dim": vectors.shape[1],
            "nlist": nlist,
            "threads": args.threads,
            "queries": len(queries),
            "k": K,
            "not_installed": missing,
            "most": {system.name: system.most for system in ready},
            "at_recall": {
                batch: {name: {level: at_recall(c["points"], level) for level in LEVELS} for name, c in by.items()}
                for batch, by in curves.items()
            },
            "curves": curves,
        },
    )
    if args.plot is not None:
        draw(curves, args.plot, title)


def _said(points: list[Any], level: float) -> str:
    value = at_recall(points, level)
    return "-" if value is None else f"{value:,.0f}"


if __name__ == "__main__":
    main()
