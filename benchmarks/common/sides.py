"""Processes of several checkouts that take turns, for benchmarks that compare them.

A side runs a script with the package of its checkout. The script prints a line of JSON when it is ready,
``{"version": ...}``, and answers each line that it reads, ``{"batch": ..., "calls": ..., "seed": ...}``, with one:
``{"seconds": [...], "digest": ...}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Side", "compare_sides", "open_sides"]


class Side:
    """A process that works when it is asked, and stands still otherwise."""

    def __init__(self, script: Path, root: Path, *arguments: str) -> None:
        python = root / ".venv/bin/python"
        # Of the interpreter's path: the checkout, not the script's folder.
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(
            [python if python.exists() else sys.executable, script, root, *arguments],
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
        """Seconds of each call, and a digest of the answers."""
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
def open_sides(script: Path, sides: Mapping[str, tuple[Path, tuple[str, ...]]]) -> Iterator[dict[str, Side]]:
    """``sides``: of each its checkout, and what the script is told besides."""
    with contextlib.ExitStack() as stack:
        opened = {}
        for name, (root, told) in sides.items():
            opened[name] = Side(script, root, *told)
            stack.callback(opened[name].close)
        yield opened


def compare_sides(sides: dict[str, Side], batch: int, calls: int, repeats: int) -> dict[str, Any]:
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
