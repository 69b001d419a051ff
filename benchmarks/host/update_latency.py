"""Part of ``benchmarks.host.updates``: searches while rows are written, deleted and maintained, beside quiet ones."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import Clusters, import_lists, make_clusters, make_queries
from benchmarks.common.measure import show
from benchmarks.host.update_adds import Scale, verdict
from hybridindex.api import Index, open_index
from hybridindex.errors import BusyWritingError
from hybridindex.router import Router
from hybridindex.types import F32

__all__ = ["Writing", "latency"]

#: p99 beside writes, in times of quiet searches.
TARGET = 1.5
#: Part of the capacity that is written meanwhile; part of the time in which maintenance works.
LOAD, MAINTENANCE = 0.1, 0.25
K, NPROBE = 10, 32
#: Between the end of one compaction and the begin of the next, where all of a window shall be beside one.
_BETWEEN_S = 5.0
#: Searches begin so many medians apart.
_APART = 3.0


class Writing:
    """Steps that delete the oldest rows and add as many new ones, so that the index keeps its size."""

    def __init__(self, index: Index, vectors: F32, count: int, change: int) -> None:
        """``count``: rows of ``vectors`` that are there, ids 0 .. count - 1; the others come in turn."""
        self._index, self._vectors, self._count, self._change = index, vectors, count, change
        self.steps = 0

    def step(self) -> None:
        old = self.steps * self._change
        gone, come = np.arange(old, old + self._change), np.arange(self._count + old, self._count + old + self._change)
        self._index.delete(gone)
        while True:
            try:
                self._index.add(self._vectors[come % len(self._vectors)], come)
                break
            except BusyWritingError:  # what maintenance takes belongs to the capacity
                time.sleep(0.05)
        self.steps += 1

    def capacity(self, seconds: float) -> float:
        """Steps per second, as fast as they go, with the maintenance that they bring."""
        before, began = self.steps, time.perf_counter()
        while time.perf_counter() - began < seconds:
            self.step()
        return (self.steps - before) / (time.perf_counter() - began)

    @contextmanager
    def going_on(self, steps_per_s: float) -> Iterator[None]:
        """In a thread of its own, at this rate; what it could not keep up with is not made up for."""
        ending = threading.Event()
        failed: list[BaseException] = []

        def write() -> None:
            try:
                due = time.perf_counter()
                while not ending.is_set():
                    self.step()
                    now = time.perf_counter()
                    due = max(due + 1 / steps_per_s, now)
                    ending.wait(due - now)
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            yield
        finally:
            ending.set()
            writer.join()
        if failed:
            raise failed[0]


@contextmanager
def _compacting(index: Index) -> Iterator[list[float]]:
    """Compacts, as maintenance does it, at once and again some seconds later; seconds of each."""
    ending, taken = threading.Event(), list[float]()

    def compact() -> None:
        while not ending.is_set():
            began = time.perf_counter()
            if index.writer.compact(share=MAINTENANCE) is not None:
                taken.append(time.perf_counter() - began)
            ending.wait(_BETWEEN_S)

    thread = threading.Thread(target=compact)
    thread.start()
    try:
        yield taken
    finally:
        ending.set()
        thread.join()


def _rest(index: Index) -> None:
    """Until maintenance has nothing to do: quiet is quiet."""
    from hybridindex.index.changes.compact import needs_compaction

    while needs_compaction(index.ivf):
        time.sleep(0.1)
    index.compact()


def _search(router: Router, queries: F32, batch: int, seconds: float, apart_s: float) -> list[float]:
    """Seconds of each search, by a router that stays open and follows compactions."""
    taken, at = [], 0
    router.search(queries, K, NPROBE)
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        router.search(queries[at : at + batch], K, NPROBE)
        done = time.perf_counter()
        taken.append(done - began)
        at = (at + batch) % (len(queries) - batch + 1)
        time.sleep(max(0.0, began + apart_s - done))
    return taken


def latency(scale: Scale) -> dict[str, Any]:
    """p99 of searches: quiet, beside writes, and beside writes and a compaction."""
    clusters = make_clusters(
        scale.dim, (scale.count + scale.count // 2) * 4 * scale.dim, nlist=int(4 * np.sqrt(scale.count))
    )
    queries = make_queries(clusters.centres, 4096, "low")
    with tempfile.TemporaryDirectory(dir=scale.scratch) as folder:
        first = Clusters(clusters.vectors[: scale.count], clusters.lists[: scale.count], clusters.centres)
        path = Path(folder) / "idx"
        import_lists(first.vectors, first.lists, first.centres, "flat", "ip", path).close()
        del first
        with open_index(path, write=True) as index:
            writing = Writing(index, clusters.vectors, scale.count, scale.change)
            capacity = writing.capacity(scale.capacity_s)
            n_compactions = index.writer.compactions
            rows = []
            with index.router(threads=2, warm_bytes=0) as router:
                for batch in (1, 8):
                    rows.append(_windows(index, router, queries, batch, writing, LOAD * capacity, scale))
                generations = (router.index.generation, index.ivf.generation)
    show(
        f"searches beside writes, {scale.count:,} rows x {scale.dim}, 2 threads; {LOAD:.0%} of "
        f"{capacity * scale.change:,.0f} rows/s added and as many deleted, {scale.change} a call",
        ("batch", "window", "searches", "p50 ms", "p99 ms", "p99.9 ms", "p99 over quiet", "quartiles", "verdict"),
        [
            (
                row["batch"],
                kind,
                found["searches"],
                f"{found['p50_ms']:.3f}",
                f"{found['p99_ms']:.3f}",
                f"{found['p999_ms']:.3f}",
                f"{found['ratio']:.2f}",
                " to ".join(f"{each:.2f}" for each in found["ratio_quartiles"]),
                found["verdict"] or f"floor {row['floor']:.2f}",
            )
            for row in rows
            for kind, found in row["windows"].items()
        ],
    )
    return {
        "nprobe": NPROBE,
        "change": scale.change,
        "capacity_rows_per_s": capacity * scale.change,
        "compactions_while_measured_for_capacity": n_compactions,
        "load": LOAD,
        "generation_of_router_and_index": generations,
        "rows": rows,
    }


def _windows(
    index: Index, router: Router, queries: F32, batch: int, writing: Writing, steps_per_s: float, scale: Scale
) -> dict[str, Any]:
    """Windows of each kind in turn, each between two quiet ones."""
    _rest(index)
    alone = _search(router, queries, batch, min(3.0, scale.window_s), 0.0)
    apart_s = max(0.002, _APART * float(np.median(alone)))
    taken: dict[str, list[list[float]]] = {"quiet": [], "quiet again": [], "writing": [], "compacting": []}
    compactions: list[float] = []
    for number in range(scale.windows):
        kinds = list(taken) if number % 2 == 0 else list(taken)[::-1]
        for kind in kinds:
            if kind in ("quiet", "quiet again"):
                _rest(index)
                time.sleep(0.2)
                taken[kind].append(_search(router, queries, batch, scale.window_s, apart_s))
            elif kind == "writing":
                with writing.going_on(steps_per_s):
                    taken[kind].append(_search(router, queries, batch, scale.window_s, apart_s))
            else:
                with writing.going_on(steps_per_s), _compacting(index) as done:
                    taken[kind].append(_search(router, queries, batch, scale.window_s, apart_s))
                compactions += done
    p99 = {kind: np.array([np.percentile(each, 99) for each in found]) for kind, found in taken.items()}
    quiet = (p99["quiet"] + p99["quiet again"]) / 2
    _, low, high = _quartiles(p99["quiet again"] / p99["quiet"])
    floor = max(abs(low - 1), abs(high - 1))
    windows = {}
    for kind, found in taken.items():
        every = 1e3 * np.concatenate([np.array(each) for each in found])
        middle, low, high = _quartiles(p99[kind] / (p99["quiet"] if kind == "quiet again" else quiet))
        windows[kind] = {
            "searches": len(every),
            "p50_ms": float(np.median(every)),
            "p99_ms": float(np.percentile(every, 99)),
            "p999_ms": float(np.percentile(every, 99.9)),
            "max_ms": float(every.max()),
            "ratio": middle,
            "ratio_quartiles": (low, high),
            "verdict": None if kind.startswith("quiet") else verdict(middle, TARGET, floor),
        }
    return {
        "batch": batch,
        "apart_ms": 1e3 * apart_s,
        "floor": floor,
        "compactions_s": compactions,
        "target": TARGET,
        "windows": windows,
    }


def _quartiles(ratios: Any) -> tuple[float, float, float]:
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return float(middle), float(low), float(high)
