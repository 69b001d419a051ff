"""The process that is killed: writers and a compaction on threads, which tell of each change before and after it."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hybridindex as hx
from hybridindex.types import F32

__all__ = ["N_WRITERS", "POOL", "be_child", "be_recoverer", "vectors_of"]

N_WRITERS = 3
#: Numbers that writers give; those of the index's own lie above.
POOL = 1500
#: The row before those that the index gives numbers; nobody deletes it.
KEPT = 999_999
#: Rows of one writer, more or less.
_MANY = 120


def vectors_of(writer: int, change: int, n: int, dim: int) -> F32:
    """(n, dim) float32: of the rows that a change brings."""
    return np.random.default_rng([writer, change]).standard_normal((n, dim)).astype(np.float32)


class _Writer:
    """One thread. Knows its rows from what it was given and what it did."""

    def __init__(self, index: hx.Index, number: int, ids: set[int], change: int, tell: Callable[[Any], None]) -> None:
        self._index, self._number, self._ids, self._change, self._tell = index, number, ids, change, tell
        self._draw = random.Random(f"{number} {change}")

    def run(self) -> None:
        while True:
            self._once()

    def _once(self) -> None:
        draw, ids = self._draw, self._ids
        free = [each for each in range(self._number, POOL, N_WRITERS) if each not in ids]
        mine = sorted(each for each in ids if each != KEPT)
        n = draw.choice((1, 1, 2, 5, 20, 60))
        kind = draw.choice(("add", "name", "upsert", "upsert", "delete"))
        if len(mine) > _MANY:
            kind = "delete"
        chosen = draw.sample(mine, min(n, len(mine)))
        if kind == "add":
            chosen = draw.sample(free, min(n, len(free)))
        elif kind == "upsert":
            chosen += draw.sample(free, min(draw.randrange(3), len(free)))
        if not chosen and kind != "name":
            return
        self._change += 1
        rows = vectors_of(self._number, self._change, n if kind == "name" else len(chosen), self._index.dim)
        self._tell([self._number, "begin", self._change, kind, len(rows) if kind == "name" else chosen])
        if kind == "delete":
            assert self._index.delete(np.array(chosen)) == len(chosen)
            ids.difference_update(chosen)
        elif kind == "upsert":
            assert self._index.upsert(rows, np.array(chosen)) == len(ids.intersection(chosen))
            ids.update(chosen)
        else:
            found = self._index.add(rows, None if kind == "name" else np.array(chosen)).tolist()
            assert kind == "name" or found == chosen
            chosen = found
            ids.update(chosen)
        self._tell([self._number, "done", self._change, kind, chosen])


def _compact(index: hx.Index, draw: random.Random, tell: Callable[[Any], None]) -> None:
    while True:
        time.sleep(draw.expovariate(30))
        if draw.random() < 0.3:
            index.ivf.live.rewrite(least_bytes=0)
        else:
            tell([-1, "compacted", index.compact()])


def be_child(path: Path, seed: int, ids: list[set[int]], changes: list[int], out: int) -> None:
    """Until it is killed."""
    lock = threading.Lock()

    def tell(what: Any) -> None:
        with lock:
            os.write(out, json.dumps(what).encode() + b"\n")

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - the parent is told
            tell([-1, "error", repr(error)])

    draw = random.Random(seed)
    index = hx.open(path, verify="quick", write=True)
    tell([-1, "open", index.ivf.generation])
    writers = [_Writer(index, number, ids[number], changes[number], tell).run for number in range(N_WRITERS)]
    bodies = [*writers, lambda: _compact(index, draw, tell)]
    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def be_recoverer(path: Path) -> None:
    """Opens what a crash left, and compacts it, until it is killed."""
    with hx.open(path, write=True) as index:
        index.compact()
    time.sleep(10)
