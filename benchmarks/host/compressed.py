"""Queries per second at equal recall@10: our rows and RaBitQ codes against graphs, fast scans and other RaBitQ systems.

All sides hold the same vectors and answer the same queries in one process with the same number of threads; the IVF
sides share centroids and lists, but for LanceDB, which trains its own. "real" and "full" are the demo's embeddings and
more of them, with the real query log; numbers are dimensions of synthetic unit vectors with the spectrum of embeddings.
Truth is brute force.

Held-back queries are halved. On one half each side is tuned: for each value of its second dial (candidates compared
exactly) the smallest first one (nprobe, ef) that reaches the recall, to 3 %, and of these the fastest at this batch
size and number of threads, in its fastest parallel mode. On the other half it is timed, and its recall measured, with a
95 % interval; sides take turns in every round. One query alone is one thread's work for all but the IVF scans of
faiss and ours.

Ratio: our fastest side over the fastest rival, median over rounds. Floor: how far the quartiles of our side over itself
lie from 1. A ratio within the floor of its target, or of a side whose interval lies below the recall, is inconclusive.

Targets: recall 0.95: 2.5 times the best rival at batch 1, 3 times at batch 64, and there 2.5 times our own sq8 rows;
recall 0.99: ahead of all. Through ``router.search`` at batch 1: 0.8 of the bare scan's rate.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import Clusters, built_lists, import_lists, make_spectrum, real_clusters
from benchmarks.common.data import benchmark_cache
from benchmarks.common.measure import Timing, arguments, interleave, ratio_of_medians, show, write
from benchmarks.rivals import ours
from benchmarks.rivals.known import RIVALS
from benchmarks.rivals.system import Collection, K, System
from benchmarks.rivals.tuning import choose_mode, found, rate, reaching
from hybridindex.types import F32, F64, I64

DATASETS = ("real", "full", "384", "768", "1024")
DEFAULT = ("real", "384", "768", "1024")
LEVELS = (0.95, 0.99)
BATCHES = (1, 64)
CODECS = ("flat", "sq8")
#: (recall, batch) -> how many times the best rival.
TARGETS = {(0.95, 1): 2.5, (0.95, 64): 3.0, (0.99, 1): 1.0, (0.99, 64): 1.0}
OVER_OWN_SQ8 = 2.5
ROUTER_SHARE = 0.8
_SQ8 = "hybridindex sq8"
_AGAIN = "again"
_SPEED = ("queries/s", "quartiles", "ours/it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """Queries to tune with, queries to measure with, and the true neighbours of both."""

    tune: F32
    tune_truth: I64
    held: F32
    held_truth: I64


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What the sides of one comparison have in common."""

    recall: float
    batch: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A system at the setting that it was tuned to for a cell."""

    system: System
    first: int
    second: int
    mode: int | None
    #: Queries per second while tuning: how many it answers in a turn.
    quick_qps: float


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--datasets", nargs="+", default=list(DEFAULT), choices=DATASETS, metavar="NAME")
    parser.add_argument("--bits", type=int, nargs="*", default=[1, 2, 4], help="sizes of codes; none: our rows alone")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="one small synthetic dataset, few rounds: does it work")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where graphs are kept that take minutes to build")
    parser.add_argument("--queries", type=int, default=2048, help="held back; one half tunes, the other measures")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.15, help="about how long a side runs in one round")
    parser.add_argument("--megabytes", type=int, default=128, help="float32 size of a synthetic dataset")


def halves(vectors: F32, queries: F32) -> Halves:
    """``queries`` in two, with their true neighbours."""
    import faiss

    exact = faiss.IndexFlat(vectors.shape[1], faiss.METRIC_INNER_PRODUCT)
    exact.add(vectors)
    truth = exact.search(queries, K)[1]
    middle = len(queries) // 2
    return Halves(tune=queries[:middle], tune_truth=truth[:middle], held=queries[middle:], held_truth=truth[middle:])


class Tuned:
    """A system, and its recall over the tuning half: every setting runs once."""

    def __init__(self, system: System, data: Halves, threads: int) -> None:
        self.system = system
        self._data, self._threads = data, threads
        self._recalls: dict[tuple[int, int], float] = {}
        self._settings: dict[float, list[tuple[int, int]]] = {}

    def recall(self, first: int, second: int) -> float:
        """Mean over the tuning half."""
        if (first, second) not in self._recalls:
            ids = self.system.at(first, second, self._threads)(self._data.tune)
            self._recalls[first, second] = float(found(ids, self._data.tune_truth).mean())
        return self._recalls[first, second]

    def settings(self, level: float) -> list[tuple[int, int]]:
        """See :func:`reaching`."""
        if level not in self._settings:
            start = time.perf_counter()
            settings = self._settings[level] = reaching(self.system, self.recall, level)
            said = ", ".join(self.system.setting(*one) for one in settings) or f"at most {self.best:.4f}"
            sys.stderr.write(f"{self.system.name}: {level}: {said} ({time.perf_counter() - start:.0f} s)\n")
        return self._settings[level]

    @property
    def best(self) -> float:
        """The highest recall so far."""
        return max(self._recalls.values())

    def side(self, cell: Cell, seconds: float) -> Side | None:
        """The fastest setting for the cell; None where none reaches its recall."""
        settings = self.settings(cell.recall)
        if not settings:
            return None
        system, queries = self.system, self._data.tune
        with system.held_to(cell.threads):
            middle = system.at(*settings[len(settings) // 2], cell.threads)
            mode = choose_mode(system, middle, queries, cell.batch, seconds)
            if mode is not None:
                system.set_mode(mode)
            rates = {}
            for setting in settings:
                answer = system.at(*setting, cell.threads)
                rates[setting] = max(rate(answer, queries, cell.batch, seconds) for _ in range(3))
        first, second = max(rates, key=rates.__getitem__)
        return Side(system=system, first=first, second=second, mode=mode, quick_qps=rates[first, second])


def turn(side: Side, cell: Cell, batches: Sequence[F32], seconds: float) -> tuple[Callable[[], None], int]:
    """What a side runs in one round, and how many queries that answers."""
    import faiss

    system = side.system
    answer = system.at(side.first, side.second, cell.threads)
    count = int(np.clip(round(side.quick_qps * seconds / cell.batch), 1, len(batches)))
    done = 0

    def run() -> None:
        nonlocal done
        faiss.omp_set_num_threads(cell.threads)
        if side.mode is not None:
            system.set_mode(side.mode)
        with system.held_to(cell.threads):
            for _ in range(count):
                answer(batches[done % len(batches)])
                done += 1

    return run, count * cell.batch


def held_recall(side: Side, cell: Cell, data: Halves) -> tuple[float, float]:
    """Over the held half, and half the width of its 95 % interval."""
    ids = side.system.at(side.first, side.second, cell.threads)(data.held)
    shares: F64 = found(ids, data.held_truth)
    return float(shares.mean()), float(1.96 * shares.std() / np.sqrt(len(shares)))


def verdict(ratio: float, floor: float, target: float) -> str:
    """Of a ratio that is known to within ``floor``."""
    if ratio >= target * (1 + floor):
        return "passed"
    return "missed" if ratio < target / (1 + floor) else "inconclusive"


def compare(cell: Cell, tuned: dict[str, list[Tuned]], data: Halves, args: Any) -> dict[str, Any]:
    """One cell; ``tuned`` holds "ours" and "rivals", and as "routed" each of ours through a router."""
    import faiss

    faiss.omp_set_num_threads(cell.threads)
    chosen = {each.system.name: each.side(cell, args.seconds / 3) for each in (*tuned["ours"], *tuned["rivals"])}
    sides = {name: side for name, side in chosen.items() if side is not None}
    names = {kind: [each.system.name for each in tuned[kind] if each.system.name in sides] for kind in tuned}
    # The one of ours that runs twice, and through a router: the fastest so far.
    again = max(names["ours"], key=lambda name: sides[name].quick_qps, default=None)
    if again is not None:
        sides[_AGAIN] = sides[again]
        for bare, routed in zip(tuned["ours"], tuned["routed"], strict=True):
            if bare.system.name == again:
                sides[routed.system.name] = replace(sides[again], system=routed.system)
                names["routed"] = [routed.system.name]
    last = len(data.held) - len(data.held) % cell.batch
    batches = [np.ascontiguousarray(data.held[at : at + cell.batch]) for at in range(0, last, cell.batch)]
    turns = {name: turn(side, cell, batches, args.seconds) for name, side in sides.items()}
    timed = interleave({name: run for name, (run, _) in turns.items()}, repeats=args.rounds, warmup=1)
    timed = {name: Timing(tuple(s / turns[name][1] for s in one.seconds)) for name, one in timed.items()}
    recalls = {name: held_recall(side, cell, data) for name, side in sides.items() if name != _AGAIN}
    best = min(names["ours"], key=lambda name: timed[name].median, default=None)
    return {
        **asdict(cell),
        "floor": None if again is None else floor_of(timed[_AGAIN], timed[again]),
        "sides": {
            name: {
                "setting": sides[name].system.setting(sides[name].first, sides[name].second),
                "mode": sides[name].mode,
                "recall_held": mean,
                "recall_margin": margin,
                "qps": 1 / timed[name].median,
                "qps_quartiles": sorted(1 / s for s in timed[name].quartiles),
                "ours_over_it": None if best is None else ratio_of_medians(timed[name], timed[best])[0],
            }
            for name, (mean, margin) in recalls.items()
        },
        "not_reached": {name: best_recall(tuned, name) for name, side in chosen.items() if side is None},
        "against": [] if again is None else judged(cell, names, timed, recalls, again),
    }


def floor_of(again: Timing, once: Timing) -> float:
    """How far the quartiles of a side over itself lie from 1."""
    _, low, high = ratio_of_medians(again, once)
    return max(abs(low - 1), abs(high - 1))


def best_recall(tuned: dict[str, list[Tuned]], name: str) -> float:
    """The most that a system reached while it was tuned."""
    return next(each.best for some in tuned.values() for each in some if each.system.name == name)


def judged(
    cell: Cell,
    names: dict[str, list[str]],
    timed: dict[str, Timing],
    recalls: dict[str, tuple[float, float]],
    again: str,
) -> list[dict[str, Any]]:
    """Our fastest side against the fastest rival and our own sq8, and the routed one against the bare one."""
    floor = floor_of(timed[_AGAIN], timed[again])

    def against(what: str, us: str, other: str, target: float) -> dict[str, Any]:
        ratio, low, high = ratio_of_medians(timed[other], timed[us])
        reached = all(mean + margin >= cell.recall for mean, margin in (recalls[other], recalls[us]))
        return {
            "what": what,
            "ours": us,
            "other": other,
            "ratio": ratio,
            "ratio_quartiles": (low, high),
            "target": target,
            "verdict": verdict(ratio, floor, target) if reached else "inconclusive",
        }

    best = min(names["ours"], key=lambda name: timed[name].median)
    rows = []
    if names["rivals"]:
        rival = min(names["rivals"], key=lambda name: timed[name].median)
        rows.append(against("best rival", best, rival, TARGETS[cell.recall, cell.batch]))
    if (cell.recall, cell.batch) == (0.95, 64) and _SQ8 in names["ours"]:
        rows.append(against("our own sq8", best, _SQ8, OVER_OWN_SQ8))
    if cell.batch == 1:
        rows += [against("bare scan", routed, again, ROUTER_SHARE) for routed in names["routed"]]
    return rows


@contextmanager
def our_systems(
    data: Clusters, folder: Path, tune: F32, sizes: Sequence[int]
) -> Iterator[tuple[list[System], list[System]]]:
    """(bare, routed), side by side: rows, and codes of every size beside them."""
    with ExitStack() as stack:
        bare, routed = [], []
        for codec in CODECS:
            path = folder / codec
            index = stack.enter_context(import_lists(data.vectors, data.lists, data.centres, codec, "ip", path))
            bare.append(ours.rows(codec, index))
            routed.append(ours.routed(bare[-1], index))
            for bits in sizes:
                # Links: the rows lie in memory once.
                with_codes = shutil.copytree(path, folder / f"{codec}-{bits}", copy_function=os.link)
                start = time.perf_counter()
                index = stack.enter_context(ours.compressed(with_codes, bits, tune))
                sys.stderr.write(f"{bits} bits beside {codec}: {time.perf_counter() - start:.1f} s\n")
                bare.append(ours.codes(codec, index))
                routed.append(ours.routed(bare[-1], index))
        try:
            yield bare, routed
        finally:
            for system in (*bare, *routed):
                system.close()


def rivals(data: Clusters, cache: Path) -> tuple[list[System], dict[str, str]]:
    """Those that run here, and why the others do not."""
    made, missing = [], {}
    shared = Collection(vectors=data.vectors, lists=data.lists, centres=data.centres, cache=cache)
    for rival in RIVALS:
        if rival.missing:
            missing[rival.name] = f"{rival.package} is not installed: pip install 'hybridindex[rivals]'"
            continue
        start = time.perf_counter()
        try:
            made.append(rival.make(shared))
        except Exception as error:  # noqa: BLE001 - one side less, told in the results
            missing[rival.name] = repr(error)
        sys.stderr.write(f"{rival.name}: made in {time.perf_counter() - start:.0f} s\n")
    return made, missing


def measure(name: str, data: Clusters, queries: F32, args: Any) -> dict[str, Any]:
    """All cells of one dataset."""
    import faiss

    start = time.perf_counter()
    split = halves(data.vectors, queries)
    cache = args.cache or benchmark_cache() / "rivals"
    most = max(args.threads)
    with (
        tempfile.TemporaryDirectory() as folder,
        our_systems(data, Path(folder), split.tune, args.bits) as (bare, routed),
    ):
        theirs, missing = rivals(data, cache)
        faiss.omp_set_num_threads(most)
        tuned = {
            kind: [Tuned(system, split, most) for system in of]
            for kind, of in (("ours", bare), ("routed", routed), ("rivals", theirs))
        }
        most_of = {each.system.name: each.system.most for kind in ("ours", "rivals") for each in tuned[kind]}
        cells = []
        for recall in LEVELS:
            for batch in BATCHES:
                for threads in args.threads:
                    cells.append(compare(Cell(recall=recall, batch=batch, threads=threads), tuned, split, args))
                    sys.stderr.write(f"{name}: {cells[-1]['recall']} batch {batch}, {threads} threads done\n")
        for system in theirs:
            system.close()
    sys.stderr.write(f"{name}: {time.perf_counter() - start:.0f} s\n")
    return {
        "dataset": name,
        "count": len(data.vectors),
        "dim": data.vectors.shape[1],
        "nlist": len(data.centres),
        "tuned_on": len(split.tune),
        "held": len(split.held),
        "not_measured": missing,
        "most": most_of,
        "cells": cells,
    }


def clusters_of(name: str, args: Any) -> tuple[Clusters, F32]:
    """A dataset and its distinct held-back queries."""
    if name in ("real", "full"):
        data, log = real_clusters("demo" if name == "real" else "full")
        # Distinct: a popular query must not weigh its recall many times, and none may be answered from a warm cache.
        log = np.unique(log, axis=0)
        queries = log[np.random.default_rng(0).permutation(len(log))[: args.queries]]
    else:
        count = (args.megabytes << 20) // (4 * int(name))
        drawn = make_spectrum(int(name), count + args.queries)
        data, queries = built_lists(drawn[:count]), drawn[count:]
    return data, np.ascontiguousarray(queries)


def main() -> None:
    args = arguments(__doc__, _options)
    if args.quick:
        args.datasets, args.megabytes, args.queries, args.rounds, args.seconds = ["384"], 8, 128, 4, 0.02
    datasets: list[dict[str, Any]] = []
    for name in args.datasets:
        datasets.append(measure(name, *clusters_of(name, args), args))
        show_dataset(datasets[-1])
        # After every one: who is stopped keeps what was measured.
        common = {"k": K, "rounds": args.rounds, "rival_versions": rival_versions()}
        write(args.json, "compressed", {**common, "datasets": datasets})


def rival_versions() -> dict[str, str]:
    """Of the packages that are installed for this comparison alone."""
    return {rival.package: version(rival.package) for rival in RIVALS if rival.package != "faiss" and not rival.missing}


def show_dataset(data: dict[str, Any]) -> None:
    """Three tables: verdicts, every side, who is missing."""
    title = f"{data['dataset']}: {data['count']:,} x {data['dim']}, {data['nlist']} lists"
    show(
        f"{title}: ours against the best, at equal recall@{K}",
        ("recall", "batch", "threads", "ours", "against", "", "ratio", "quartiles", "target", "A/A floor %", "verdict"),
        [
            (
                *(cell[key] for key in ("recall", "batch", "threads")),
                row["ours"],
                row["what"],
                row["other"] if row["what"] == "best rival" else "",
                float(row["ratio"]),
                " to ".join(f"{r:.2f}" for r in row["ratio_quartiles"]),
                float(row["target"]),
                float(100 * cell["floor"]),
                row["verdict"],
            )
            for cell in data["cells"]
            for row in cell["against"]
        ],
    )
    show(
        f"{title}: every side",
        (
            "recall",
            "batch",
            "threads",
            "side",
            "setting",
            "mode",
            "recall on the other half",
            "queries/s",
            "quartiles",
            "ours/it",
        ),
        [row for cell in data["cells"] for row in _side_rows(cell)],
    )
    if data["not_measured"]:
        show(f"{title}: not measured", ("system", "why"), list(data["not_measured"].items()))


def _side_rows(cell: dict[str, Any]) -> list[tuple[object, ...]]:
    where = tuple(cell[key] for key in ("recall", "batch", "threads"))
    sides = sorted(cell["sides"].items(), key=lambda one: -one[1]["qps"])
    return [
        *(
            (
                *where,
                name,
                side["setting"],
                "-" if side["mode"] is None else side["mode"],
                f"{side['recall_held']:.4f} +- {side['recall_margin']:.4f}",
                f"{side['qps']:,.0f}",
                " to ".join(f"{q:,.0f}" for q in side["qps_quartiles"]),
                "-" if side["ours_over_it"] is None else float(side["ours_over_it"]),
            )
            for name, side in sides
        ),
        *((*where, name, f"reaches {best:.4f}", "-", "-", "-", "-", "-") for name, best in cell["not_reached"].items()),
    ]


if __name__ == "__main__":
    main()
