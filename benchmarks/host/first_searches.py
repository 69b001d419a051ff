"""The first searches of a router, against later ones: is the index in memory when the router is ready?

An index comes to a router in one of three ways: built in the process, imported from a faiss file, or opened with
nothing of its files in memory, as a daemon's reload does. Then one search comes after the other, each of other lists.
Every run has a process of its own, with the router's ``warm_bytes`` as it is by default, or with 0: nothing is read
ahead.

Per way: how long the router took to open, the first search, the mean of the first ten, and the median of warm searches,
those after the first 500 of the same run. Noise (A/A): what 90 of 100 tens of warm searches take at most, over their
median. The ratio of work counts processor time alone, which neighbours change little. Target: the first ten take at
most 2 times as long as ten warm ones.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT
from benchmarks.common.clusters import import_lists, make_clusters, make_queries
from benchmarks.common.measure import PART, arguments, show, write

K, FIRST, WARM_AFTER, SEARCHES = 10, 10, 500, 1000
MOST_RATIO = 2.0
WAYS = ("build", "import", "open")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--codecs", nargs="+", default=["flat", "fp16", "sq8", "pq96", "pqfs96"])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way with what is read ahead by default")
    parser.add_argument("--cold-repeats", type=int, default=1, help="runs of each way with nothing read ahead")
    parser.add_argument("--megabytes", type=int, default=48, help="float32 size of the dataset")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--nprobe", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default a temporary one")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)


def forget_files(folder: Path) -> None:
    """Drops what is cached of the files below ``folder``; nobody may have them mapped."""
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def run_one(way: str, codec: str, folder: Path, nprobe: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One run in this process; seconds."""
    import hybridindex as hx

    queries = np.load(folder / "queries.npy")
    if way == "build":
        index = hx.build(
            np.load(folder / "vectors.npy"), folder / f"built-{os.getpid()}", nlist=256, metric="ip", codec=codec
        )
    elif way == "import":
        index = hx.from_faiss(folder / f"{codec}.faiss", folder / f"imported-{os.getpid()}")
    else:
        index = hx.open(folder / codec, verify="quick")
    started = time.perf_counter()
    router = index.router(threads=2, **settings)
    opened_s = time.perf_counter() - started
    taken, worked = [], []
    for query in queries[:SEARCHES]:
        started, started_work = time.perf_counter(), time.process_time()
        router.search(query, K, nprobe)
        worked.append(time.process_time() - started_work)
        taken.append(time.perf_counter() - started)
    router.close()
    if way != "open":
        shutil.rmtree(index.path)
    return {"open_s": opened_s, "taken_s": taken, "worked_s": worked}


def run_apart(args: argparse.Namespace, folder: Path, way: str, codec: str, settings: dict[str, Any]) -> dict[str, Any]:
    """:func:`run_one` in a process of its own, with nothing of the files in memory."""
    forget_files(folder)
    one = json.dumps({"way": way, "codec": codec, "folder": str(folder), "nprobe": args.nprobe, "settings": settings})
    command = [sys.executable, "-m", "benchmarks.host.first_searches", "--one", one]
    done = subprocess.run(
        command, env=os.environ | {PART: "1"}, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def prepare(args: argparse.Namespace, folder: Path) -> None:
    """Vectors, queries, and per codec an index and a faiss file."""
    data = make_clusters(args.dim, args.megabytes << 20)
    np.save(folder / "vectors.npy", data.vectors)
    np.save(folder / "queries.npy", make_queries(data.centres, SEARCHES, "low"))
    for codec in args.codecs:
        with import_lists(data.vectors, data.lists, data.centres, codec, "ip", folder / codec) as index:
            index.to_faiss(folder / f"{codec}.faiss")


def describe(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds: medians over the runs."""
    taken = np.array([run["taken_s"] for run in runs]) * 1e3
    warm = np.median(taken[:, WARM_AFTER:], axis=1)
    tens = taken[:, WARM_AFTER:].reshape(len(runs), -1, FIRST).mean(axis=2)
    ratios = taken[:, :FIRST].mean(axis=1) / np.median(tens, axis=1)
    worked = np.array([run["worked_s"] for run in runs])
    work_ratios = worked[:, :FIRST].mean(axis=1) / np.median(worked[:, WARM_AFTER:], axis=1)
    return {
        "open_ms": float(np.median([run["open_s"] for run in runs]) * 1e3),
        "first_ms": float(np.median(taken[:, 0])),
        "first_ten_ms": float(np.median(taken[:, :FIRST].mean(axis=1))),
        "first_hundred_ms": float(np.median(taken[:, :100].mean(axis=1))),
        "warm_ms": float(np.median(warm)),
        "ratio": float(np.median(ratios)),
        "noise": float(np.median(np.percentile(tens, 90, axis=1) / np.median(tens, axis=1))),
        "work_ratio": float(np.median(work_ratios)),
        "ratios": ratios.tolist(),
        "met": bool(np.median(ratios) <= MOST_RATIO),
    }


def main() -> None:
    args = arguments(__doc__, _options)
    if args.one is not None:
        args.one["folder"] = Path(args.one["folder"])
        print(json.dumps(run_one(**args.one)))
        return
    sides: dict[str, tuple[int, dict[str, Any]]] = {
        "default": (args.repeats, {}),
        "nothing read ahead": (args.cold_repeats, {"warm_bytes": 0}),
    }
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        prepare(args, folder)
        for codec in args.codecs:
            # Training takes too long for repeats, and leaves nothing that an import does not.
            for way in WAYS[1:] if codec.startswith("pq") else WAYS:
                for side, (repeats, settings) in sides.items():
                    runs = [run_apart(args, folder, way, codec, settings) for _ in range(repeats)]
                    rows.append({"codec": codec, "way": way, "warm": side, **describe(runs)})
    names = (
        "codec",
        "way",
        "warm",
        "open_ms",
        "first_ms",
        "first_ten_ms",
        "first_hundred_ms",
        "warm_ms",
        "ratio",
        "noise",
        "work_ratio",
        "met",
    )
    show("the first searches of a router, ms", names, [[row[name] for name in names] for row in rows])
    write(
        args.json,
        "first_searches",
        {"most_ratio": MOST_RATIO, "dim": args.dim, "megabytes": args.megabytes, "rows": rows},
    )


if __name__ == "__main__":
    main()
