"""The search path of two checkouts against each other, beside an A/A floor.

Each side is a process of its own, run by its checkout's ``.venv/bin/python``: the old checkout, this one, and the old
one again. All build an index from the same vectors and answer the same queries with the same threads; they take turns
by the round, in an order that changes, and stand still (SIGSTOP) while another side's turn is on. Answers are
compared. A change is within the floor where its median lies inside the quartiles of old against old, or is no larger
than the larger of these. The background scrub is off where a checkout has one; ``--scrub`` compares this checkout with
it and without instead, in turns that are long enough for whole passes.

    git worktree add ../old COMMIT    # make its .venv, and build the extension
    python -m benchmarks.host.revisions --old ../old
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT
from benchmarks.common.data import benchmark_dataset
from benchmarks.common.measure import arguments, show, write

#: Batch size -> searches in one turn.
_CALLS = {1: 200, 4: 100, 16: 40, 64: 12, 256: 4}


class Side:
    """A process that searches when it is asked, and stands still otherwise."""

    def __init__(self, root: Path, data: Path, **settings: Any) -> None:
        python = root / ".venv/bin/python"
        script = Path(__file__).with_name("revisions_side.py")
        # Of the interpreter's path: the checkout, not the script's folder.
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(
            [python if python.exists() else sys.executable, script, root, data, json.dumps(settings)],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self._read()["version"]
        self._process.send_signal(signal.SIGSTOP)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def turn(self, batch: int, calls: int, seed: int) -> tuple[list[float], int]:
        """Seconds of each search, and a digest of the answers."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"batch": batch, "calls": calls, "seed": seed}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self._process.send_signal(signal.SIGSTOP)
        return answer["seconds"], answer["digest"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.close()
        self._process.wait(60)


@contextlib.contextmanager
def _sides(roots: dict[str, tuple[Path, dict[str, Any]]], data: Path, **settings: Any) -> Iterator[dict[str, Side]]:
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, (root, router) in roots.items():
            sides[name] = Side(root, data, router=router, **settings)
            stack.callback(sides[name].close)
        yield sides


def _row(sides: dict[str, Side], batch: int, calls: int, repeats: int) -> dict[str, Any]:
    """Each side's turns; the first is what the others are compared with."""
    medians: dict[str, list[float]] = {name: [] for name in sides}
    every: dict[str, list[float]] = {name: [] for name in sides}
    rng = np.random.default_rng(batch)
    for side in sides.values():
        side.turn(batch, calls, 0)
    for number in range(repeats):
        digests = set()
        for name in rng.permutation(list(sides)).tolist():
            seconds, digest = sides[name].turn(batch, calls, number)
            medians[name].append(float(np.median(seconds)))
            every[name] += seconds
            digests.add(digest)
        assert len(digests) == 1, f"the sides' answers differ (batch {batch}, round {number})"
    first = next(iter(sides))
    row: dict[str, Any] = {"batch": batch, "searches": repeats * calls}
    for name in sides:
        row[name] = {"us": 1e6 * float(np.median(medians[name])), "p99_us": 1e6 * float(np.percentile(every[name], 99))}
        if name != first:
            ratios = np.array(medians[name]) / np.array(medians[first])
            row[name]["ratio_quartiles"] = np.percentile(ratios, [25, 50, 75]).tolist()
            row[name]["p99_ratio"] = row[name]["p99_us"] / row[first]["p99_us"]
    return row


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--old", type=Path, metavar="DIR", help="a checkout with an environment and the extension")
    parser.add_argument("--scrub", action="store_true", help="this checkout with the background scrub and without")
    parser.add_argument("--dataset", default="demo", help="demo or full")
    parser.add_argument("--codecs", nargs="+", default=["flat", "sq8"])
    parser.add_argument("--nprobe", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--threads", type=int, default=os.cpu_count())


def main() -> None:
    args = arguments(__doc__, _options)
    if (args.old is None) is not args.scrub:
        raise SystemExit("give --old DIR, or --scrub")
    quiet = {"scrub_bytes_per_s": 0}
    if args.scrub:
        compared = {"without": (ROOT, quiet), "with": (ROOT, {}), "without again": (ROOT, quiet)}
    else:
        old = args.old.resolve()
        has_scrub = "scrub_bytes_per_s" in (old / "hybridindex/config.py").read_text()
        before = (old, quiet if has_scrub else {})
        compared = {"old": before, "new": (ROOT, quiet), "old again": before}
    dataset = benchmark_dataset(args.dataset)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        vectors = dataset.centered(np.asarray(dataset.vectors()))
        np.save(data / "vectors.npy", vectors)
        np.save(data / "log.npy", dataset.centered(np.asarray(dataset.log_queries)))
        nlist = int(4 * np.sqrt(len(vectors)))
        for codec in args.codecs:
            settings = {"nlist": nlist, "codec": codec, "threads": args.threads, "nprobe": args.nprobe}
            with _sides(compared, data, **settings) as sides:
                for batch, calls in _CALLS.items():
                    # A pass begins every ten seconds: a turn with the scrub must hold some.
                    many = (40, max(args.repeats // 5, 3)) if args.scrub else (1, args.repeats)
                    row = {"codec": codec} | _row(sides, batch, calls * many[0], many[1])
                    rows.append(row)
                    print(json.dumps(row), file=sys.stderr, flush=True)
    first, second, again = compared
    show(
        f"{second} over {first}, per turn (quartiles), {args.threads} threads, nprobe {args.nprobe}",
        ("codec", "batch", f"{first} us", "ratio", "quartiles", f"A/A: {again}", "quartiles", "p99 ratio", "A/A p99"),
        [
            (
                row["codec"],
                row["batch"],
                row[first]["us"],
                *(
                    cell
                    for name in (second, again)
                    for low, middle, high in [row[name]["ratio_quartiles"]]
                    for cell in (f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
                ),
                row[second]["p99_ratio"],
                row[again]["p99_ratio"],
            )
            for row in rows
        ],
    )
    write(args.json, "revisions", {"sides": list(compared), "nprobe": args.nprobe, "rows": rows})


if __name__ == "__main__":
    main()
