"""Runs in processes, one seed after the other, and what came of all."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.memory_folder import memory_folder
from tests.simulation.changes.world import Outcome, run
from tests.simulation.virtual.patching import patched

__all__ = ["many", "one", "runner"]


@contextlib.contextmanager
def runner() -> Iterator[Callable[[int], Outcome]]:
    """Makes one run of a seed."""
    logger = logging.getLogger("hybridindex")
    before = logger.level, logger.propagate
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with memory_folder() as place, patched():
            gc.collect()
            gc.freeze()
            templates: dict[Any, Any] = {}
            yield lambda seed: run(seed, place, templates)
    finally:
        gc.unfreeze()
        logger.level, logger.propagate = before


def one(seed: int) -> Outcome:
    """Raises ViolationError."""
    with runner() as once:
        return once(seed)


def _work(first: int, step: int, ends: float, go_on: bool, told: Any) -> None:
    with runner() as once:
        seed = first
        while time.monotonic() < ends:
            try:
                found = once(seed)
            except AssertionError as error:
                words = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
                told.put((seed, None, words))
                if not go_on:
                    break
            else:
                told.put((seed, found, ""))
            seed += step
    told.put(None)


def many(first: int, seconds: float, workers: int, *, go_on: bool, json_file: str | None) -> int:
    """1: something was violated."""
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    jobs = [
        context.Process(target=_work, args=(first + n, workers, time.monotonic() + seconds, go_on, told))
        for n in range(workers)
    ]
    for job in jobs:
        job.start()
    done, killed_in, total, failures = Counter[str](), Counter[str](), Counter[str](), list[dict[str, Any]]()
    left, shown = workers, began
    while left:
        said = told.get()
        if said is None:
            left -= 1
            continue
        seed, found, words = said
        total["runs"] += 1
        if found is None:
            command = f"python -m tests.simulation.changes --replay {seed}"
            failures.append({"seed": seed, "error": words, "command": command})
            print(f"VIOLATION: {words}\n{command}", flush=True)
        else:
            total["operations"] += found.operations
            total["changes"] += found.changes
            total["kills"] += found.kills
            done, killed_in = done + found.done, killed_in + found.killed_in
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{shown - began:.0f} s: {dict(total)}, {len(failures)} violations", flush=True)
    for job in jobs:
        job.join()
    report = {
        "command": f"python -m tests.simulation.changes --seconds {seconds:g} --seed {first} --workers {workers}",
        "seconds": round(time.monotonic() - began, 1),
        "seeds": [first, first + total["runs"] - 1],
        **total,
        **{name: sum(name in each["error"] for each in failures) for name in ("LOST", "BACK", "DOUBLED", "WRONG")},
        "done": dict(sorted(done.items())),
        "kills_in": dict(killed_in.most_common()),
        "failures": failures,
    }
    if json_file is not None:
        Path(json_file).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name not in ("kills_in", "failures")}))
    return int(bool(failures))
