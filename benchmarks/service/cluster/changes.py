"""Whether a cluster's answers are of one state while rows change, nodes fail and lists move; and what a change takes.

One writer, whose changes are repeated until they are acknowledged, and several who search all lists. An answer is right
where brute force over some state gives it, between what was acknowledged when the search began and what was begun when
it ended.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import show
from benchmarks.service.cluster.nodes import Nodes, Workload, mixed_queries, nodes, until
from hybridindex.cluster.router import ClusterRouter
from hybridindex.errors import HybridIndexError
from hybridindex.types import F32, I64, SearchResult

__all__ = ["measure_changes"]

_K, _POOL, _CALLERS = 10, 256, 3
#: Nearest rows of each query of the pool that are known from the start: deleted ones are left out of them.
_KNOWN = 800
_RTOL = 2e-5
_WHOLE_S = 90.0


class _States:
    """Every state that the index had, and may have. Its own rows are found by brute force once."""

    def __init__(self, workload: Workload) -> None:
        self.queries = mixed_queries(workload.centres, _POOL, seed=7)
        self.vectors = workload.vectors
        scores = self.queries @ workload.vectors.T
        nearest = np.argpartition(-scores, _KNOWN, axis=1)[:, :_KNOWN]
        order = np.argsort(-np.take_along_axis(scores, nearest, axis=1), axis=1)
        #: (pool, known) ids and scores, nearest first.
        self.ids: I64 = np.take_along_axis(nearest, order, axis=1)
        self.scores: F32 = np.take_along_axis(scores, self.ids, axis=1)
        #: Id -> state since which its first row is gone.
        self._gone: dict[int, int] = {}
        #: Id -> rows with the states from and until which they are there.
        self._came: dict[int, list[tuple[F32, int, float]]] = {}
        self._lock = threading.Lock()
        self.n_begun = self.n_done = 0

    def alive(self, number: int) -> bool:
        rows = self._came.get(number)
        return rows[-1][2] == np.inf if rows else number < len(self.vectors) and number not in self._gone

    def begin(self, come: dict[int, F32], go: set[int]) -> None:
        """A change: ids go, then rows come."""
        with self._lock:
            state = self.n_begun + 1
            for each in go:
                if each < len(self.vectors):
                    self._gone.setdefault(each, state)
                if rows := self._came.get(each):
                    row, since, _ = rows[-1]
                    rows[-1] = (row, since, min(rows[-1][2], state))
            for each, row in come.items():
                self._came.setdefault(each, []).append((row, state, np.inf))
            self.n_begun = state

    def end(self) -> None:
        with self._lock:
            self.n_done = self.n_begun

    def fits(self, query: int, found: SearchResult, first: int) -> bool | None:
        """Whether an answer is that of a state from ``first`` on; None: too many of the known rows are gone."""
        with self._lock:
            last = self.n_begun
            gone = dict(self._gone)
            came = {each: list(rows) for each, rows in self._came.items()}
        ids, told = found.ids[0].tolist(), found.distances[0]
        if found.coverage is not None or len(set(ids)) < _K:
            return False
        for state in range(first, last + 1):
            left = [i for i, each in enumerate(self.ids[query].tolist()) if gone.get(each, state + 1) > state][:_K]
            if len(left) < _K:
                return None
            there = {int(self.ids[query, i]): float(self.scores[query, i]) for i in left}
            for each, rows in came.items():
                for row, since, until_ in rows:
                    if since <= state < until_:
                        there[each] = float(row @ self.queries[query])
            nearest = np.sort(np.array(list(there.values())))[::-1][:_K]
            own = np.array([there.get(each, np.nan) for each in ids])
            if np.allclose(told, nearest, rtol=_RTOL, atol=1e-6) and np.allclose(told, own, rtol=_RTOL, atol=1e-6):
                return True
        return False


class _Writer:
    """Makes one change after the other, near what is searched for."""

    def __init__(self, states: _States, router: ClusterRouter, seed: int) -> None:
        self._states, self._router, self._rng = states, router, np.random.default_rng(seed)
        self._next = len(states.vectors)
        self.took_s: list[float] = []
        self.repeated = 0
        #: When the last change was acknowledged.
        self.acknowledged_s = time.monotonic()
        self.longest_s = 0.0

    def run(self, over: threading.Event, pause_s: float) -> None:
        while not over.is_set():
            self._change(over)
            over.wait(pause_s * self._rng.exponential())

    def _near(self, n: int) -> F32:
        rows = self._states.queries[self._rng.integers(0, _POOL, n)]
        rows = rows + 0.3 * self._rng.standard_normal(rows.shape, dtype=np.float32) / np.float32(np.sqrt(rows.shape[1]))
        return np.ascontiguousarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)

    def _some(self, n: int) -> list[int]:
        """Ids that are there, among the nearest of a query."""
        query = self._rng.integers(0, _POOL)
        known = [each for each in self._states.ids[query, :40].tolist() if self._states.alive(each)]
        own = [each for each in range(len(self._states.vectors), self._next) if self._states.alive(each)]
        pool = known + own[-20:]
        return self._rng.choice(pool, min(n, len(pool)), replace=False).tolist() if pool else []

    def _change(self, over: threading.Event) -> None:
        kind, n = self._rng.choice(["add", "upsert", "delete"], p=[0.4, 0.3, 0.3]), int(self._rng.integers(1, 4))
        ids = list(range(self._next, self._next + n)) if kind == "add" else self._some(n)
        if not ids:
            return
        rows = self._near(len(ids))
        come = {} if kind == "delete" else dict(zip(ids, rows, strict=True))
        self._next += n if kind == "add" else 0
        self._states.begin(come, set() if kind == "add" else set(ids))
        began = time.monotonic()
        while True:
            try:
                if kind == "delete":
                    self._router.delete(ids)
                elif kind == "upsert":
                    self._router.upsert(rows, ids)
                else:
                    self._router.add(rows, ids)
                break
            except HybridIndexError:
                self.repeated += 1
                kind = "upsert" if kind == "add" else kind  # it may have been made
                if over.is_set() and time.monotonic() > began + 60:
                    raise
        self._states.end()
        now = time.monotonic()
        self.took_s.append(now - began)
        self.longest_s = max(self.longest_s, now - self.acknowledged_s)
        self.acknowledged_s = now


class _Count:
    def __init__(self) -> None:
        self.n: Counter[str] = Counter()
        self.examples: list[str] = []
        self.lock = threading.Lock()
        self.fault = "none"


def _call(router: ClusterRouter, states: _States, count: _Count, seed: int, nlist: int, over: threading.Event) -> None:
    rng = np.random.default_rng(seed)
    while not over.is_set():
        query, first = int(rng.integers(0, _POOL)), states.n_done
        try:
            found = router.search(states.queries[query : query + 1], _K, nlist)
        except HybridIndexError as error:
            said = f"error: {type(error).__name__}"
            words = str(error)[:200]
        else:
            fits = states.fits(query, found, first)
            said, words = {True: "right", False: "wrong", None: "not known"}[fits], f"query {query}, from state {first}"
        with count.lock:
            count.n[said] += 1
            if said not in ("right", "not known") and len(count.examples) < 20:
                count.examples.append(f"{count.fault}: {said}: {words}")


def _faults(cluster: Nodes, count: _Count, writer: _Writer, rng: np.random.Generator) -> dict[str, float]:
    """One of each; the longest time without an acknowledged change of each."""
    longest = {}
    for fault in (
        "none", "kill the node that writes", "kill another one", "stop one for 2 s", "move all lists", "go on",
        "go on, and kill one",
    ):  # fmt: skip
        count.fault, writer.longest_s, writer.acknowledged_s = fault, 0.0, time.monotonic()
        if fault == "none":
            time.sleep(3.0)
        elif fault == "move all lists":
            cluster.manager.repartition()
        elif fault.startswith("go on"):
            generation = cluster.compact(cluster.names[-1])
            if fault != "go on":
                time.sleep(float(rng.uniform(0.0, 3.0)))
                cluster.signal(str(rng.choice(cluster.names)), signal.SIGKILL)
            until(lambda now=generation: cluster.serve_alone(now), _WHOLE_S)  # type: ignore[misc]
        elif fault == "stop one for 2 s":
            name = str(rng.choice(cluster.names))
            cluster.signal(name, signal.SIGSTOP)
            time.sleep(2.0)
            cluster.signal(name, signal.SIGCONT)
        else:
            first = cluster.calls(cluster.names[-1]).node()["changes"]["writer"]
            name = first if fault.startswith("kill the") else str(rng.choice([n for n in cluster.names if n != first]))
            cluster.signal(name, signal.SIGKILL)
            until(lambda name=name: cluster.state(name) == "down", _WHOLE_S)  # type: ignore[misc]
        until(lambda: cluster.whole() and cluster.peers_up(), _WHOLE_S)
        longest[fault] = max(writer.longest_s, time.monotonic() - writer.acknowledged_s)
    return longest


def measure_changes(
    workload: Workload, folder: Path, *, searches: int, changes_per_s: float, rounds: int
) -> dict[str, Any]:
    """``searches``, at least, over at least ``rounds`` of all faults."""
    path = folder / "changing"
    shutil.copytree(workload.path, path)
    states, count, over = _States(workload), _Count(), threading.Event()
    nlist, rng = len(workload.centres), np.random.default_rng(3)
    times: list[dict[str, float]] = []
    with (
        nodes(replace(workload, path=path), folder / "changes", 4, repair_after_s=3.0, seed=1) as cluster,
        cluster.router(timeout_s=20.0) as router,
    ):
        writer = _Writer(states, router, 5)
        threads = [
            threading.Thread(target=_call, args=(router, states, count, i, nlist, over)) for i in range(_CALLERS)
        ]
        threads.append(threading.Thread(target=writer.run, args=(over, 1.0 / changes_per_s)))
        for thread in threads:
            thread.start()
        try:
            while len(times) < rounds or sum(count.n.values()) < searches:
                times.append(_faults(cluster, count, writer, rng))
        finally:
            over.set()
            for thread in threads:
                thread.join()
        nlist_now = cluster.manager.status()["nlist"]
    longest = {fault: [each[fault] for each in times] for fault in times[0]}
    total = {
        "searches": sum(count.n.values()),
        "right": count.n["right"],
        "wrong": count.n["wrong"],
        "not_known": count.n["not known"],
        "errors": sum(n for said, n in count.n.items() if said.startswith("error")),
        "changes": states.n_done,
        "repeated": writer.repeated,
    }
    took = np.array(writer.took_s)
    show(
        f"{total['changes']} changes beside {total['searches']} searches of all lists: {total}",
        ("while", "longest s without an acknowledged change: median", "most"),
        [(fault, f"{np.median(each):.2f}", f"{max(each):.2f}") for fault, each in longest.items()],
    )
    for told in count.examples:
        print(told)
    return {
        "total": total,
        "nlist": [nlist, nlist_now],
        "rounds": len(times),
        "longest_without_change_s": longest,
        "change_ms": {"median": 1e3 * float(np.median(took)), "p99": 1e3 * float(np.quantile(took, 0.99))},
        "examples": count.examples,
        "passed": not total["wrong"],
    }
