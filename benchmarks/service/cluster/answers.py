"""Whether answers of a cluster are those of one machine while nodes fail, come back, and lists move."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.common.measure import show
from benchmarks.service.cluster.nodes import Nodes, Workload, mixed_queries, nodes, until
from hybridindex.api import open_index
from hybridindex.cluster.router import ClusterRouter
from hybridindex.errors import HybridIndexError
from hybridindex.types import F32, I64, SearchResult

__all__ = ["Oracle", "Verdict", "judge", "measure_answers"]

#: right: as one machine. partial: less, and the answer says so, and how much. silent: neighbours are missing, and the
#: answer does not say so. wrong: a neighbour that is none, or anything else.
Verdict = Literal["right", "partial", "silent", "wrong"]

_K = 10
_POOL = 512
_CALLERS = 4
_MOST_BATCH = 8
#: Of distances: sums of float32 in another order.
_RTOL = 2e-5
#: For all nodes to be back after a fault.
_WHOLE_S = 90.0


class Oracle:
    """Answers of one machine to a pool of queries; those to a search of all lists by rows are proven by brute force."""

    def __init__(self, workload: Workload, nprobes: tuple[int, ...]) -> None:
        self.queries = mixed_queries(workload.centres, _POOL, seed=5)
        self.vectors = workload.vectors
        self.nprobes, self.candidates = nprobes, workload.candidates
        #: Of a search by codes of all lists, against brute force; 1 by rows.
        self.recall = 1.0
        self._known: dict[int, tuple[I64, F32]] = {}
        with open_index(workload.path) as index, index.router() as router:
            for nprobe in nprobes:
                found = router.search(self.queries, _K, nprobe, candidates=self.candidates)
                self._known[nprobe] = found.ids, found.distances
            self.nlist = index.nlist
            every = router.search(self.queries, _K, index.nlist, candidates=self.candidates)
        scores = self.queries @ self.vectors.T
        best = -np.sort(-np.partition(scores, -_K, axis=1)[:, -_K:], axis=1)
        if self.candidates is not None:
            self.recall = float((every.distances >= best[:, -1:] * (1 - _RTOL) - 1e-6).mean())
        elif not np.allclose(every.distances, best, rtol=_RTOL, atol=1e-6):
            raise AssertionError("one machine's answers differ from brute force")
        self._known[index.nlist] = every.ids, every.distances

    def expected(self, rows: I64, k: int, nprobe: int) -> tuple[I64, F32]:
        ids, distances = self._known[nprobe]
        return ids[rows, :k], distances[rows, :k]


def judge(
    found: SearchResult,
    expected: tuple[I64, F32],
    queries: F32,
    vectors: F32,
    *,
    nprobe: int,
    allow_partial: float | None = None,
) -> list[Verdict]:
    """Of each query. ``vectors``: the row of each id."""
    ids, distances = expected
    verdicts: list[Verdict] = []
    for i, query in enumerate(queries):
        own, said = found.ids[i], found.distances[i]
        same = np.allclose(said, distances[i], rtol=_RTOL, atol=1e-6)
        there = own >= 0
        known = own < len(vectors)
        scores = vectors[np.where(there & known, own, 0)] @ query
        true = bool(
            known.all()
            and np.allclose(said[there], scores[there], rtol=_RTOL, atol=1e-6)
            and len(np.unique(own[there])) == there.sum()
            and (np.diff(said[there]) <= 0).all()
        )
        # Equal distances may stand in another order where these were summed in another one.
        right = same and true and (bool((own == ids[i]).all()) or _ties(own, ids[i], distances[i]))
        coverage = None if found.coverage is None else float(found.coverage[i])
        whole = coverage is None or coverage >= 1
        if not true or found.nprobe_used[i] != nprobe:
            verdicts.append("wrong")
        elif right:
            verdicts.append("right")
        elif whole:
            verdicts.append("silent")
        elif allow_partial is None or coverage is None or coverage < allow_partial - 1e-6:
            verdicts.append("wrong")
        else:
            verdicts.append("partial")
    return verdicts


def _ties(own: I64, ids: I64, distances: F32) -> bool:
    """Whether ids differ only where distances are as good as equal."""
    differ = np.flatnonzero(own != ids)
    near = np.abs(distances[:, None] - distances[differ]) <= _RTOL * np.abs(distances[differ])
    # The last place may be taken by one of several equals.
    return bool((near.sum(axis=0) > 1).all() or set(differ.tolist()) == {len(ids) - 1})


@dataclass(slots=True)
class _Count:
    """Shared by callers."""

    verdicts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    n_asked: int = 0
    #: The fault under way; errors are counted by it.
    fault: str = "none"
    lock: threading.Lock = field(default_factory=threading.Lock)


def _call(
    router: ClusterRouter, oracle: Oracle, count: _Count, seed: int, pause_s: float, over: threading.Event
) -> None:
    """Asks batches of random size one after another."""
    rng = np.random.default_rng(seed)
    while not over.is_set():
        rows = rng.integers(0, _POOL, rng.integers(1, _MOST_BATCH + 1))
        k = int(rng.choice([1, _K]))
        nprobe = int(
            rng.choice([*oracle.nprobes, oracle.nlist], p=[0.95 / len(oracle.nprobes)] * len(oracle.nprobes) + [0.05])
        )
        options: dict[str, Any] = {"candidates": oracle.candidates}
        if rng.random() < 0.2:
            options["allow_partial"] = 0.3
        if rng.random() < 0.2:
            # Its nprobe stays; where a part is allowed it may be cut.
            options |= {"deadline_ms": 300.0, "min_nprobe": nprobe}
        queries = oracle.queries[rows]
        began = time.monotonic()
        try:
            found = router.search(queries, k, nprobe, **options)
        except HybridIndexError as error:
            with count.lock:
                count.n_asked += len(rows)
                count.errors[f"{count.fault}: {type(error).__name__}"] += len(rows)
                if len(count.examples) < 20:
                    count.examples.append(f"{count.fault}: {type(error).__name__}: {str(error)[:300]} ({options})")
        else:
            verdicts = judge(
                found, oracle.expected(rows, k, nprobe), queries, oracle.vectors, nprobe=nprobe,
                allow_partial=options.get("allow_partial"),
            )  # fmt: skip
            with count.lock:
                count.n_asked += len(rows)
                count.verdicts.update(verdicts)
                for verdict in set(verdicts) & {"silent", "wrong"}:
                    count.examples.append(
                        f"{count.fault}: {verdict}: rows {rows.tolist()}, k {k}, nprobe {nprobe}, {options}"
                    )
        over.wait(max(0.0, pause_s * rng.exponential() - (time.monotonic() - began)))


class _Faults:
    """What happens to a cluster, one after the other; each ends when the cluster is whole again."""

    def __init__(self, cluster: Nodes, count: _Count, seed: int) -> None:
        self._cluster, self._count, self._rng = cluster, count, np.random.default_rng(seed)
        self.n: Counter[str] = Counter()
        #: Of each fault, seconds from its end until the cluster was whole.
        self.whole_s: dict[str, list[float]] = {}
        self.problems: list[str] = []

    def cycle(self, over: Callable[[], bool]) -> None:
        faults = (self.kill, self.stop, self.move, self.kill_while_moving, self.stop_while_moving, self.stop_two)
        for fault in faults:
            if over():
                return
            self._do(fault)

    def _do(self, fault: Callable[[], None]) -> None:
        self._count.fault = fault.__name__
        fault()
        self.n[fault.__name__] += 1
        try:
            whole_s = until(self._cluster.whole, _WHOLE_S)
            self.whole_s.setdefault(fault.__name__, []).append(whole_s)
        except TimeoutError:
            status = self._cluster.manager.status()
            self.problems.append(f"after {fault.__name__} the cluster did not become whole: {status}"[:1500])

    def _any(self) -> str:
        return str(self._rng.choice(self._cluster.names))

    def kill(self) -> None:
        name = self._any()
        self._cluster.signal(name, signal.SIGKILL)
        self._seen_down(name)

    def _seen_down(self, name: str) -> None:
        try:
            until(lambda: self._cluster.state(name) == "down", 5.0)
        except TimeoutError:
            self.problems.append(f"{name} was not seen to be down")

    def stop(self) -> None:
        self._stop(1)

    def stop_two(self) -> None:
        """Nobody is left who has some lists: searches of these fail, or say how much was done."""
        self._stop(2)

    def _stop(self, n: int) -> None:
        names = self._rng.choice(self._cluster.names, n, replace=False).tolist()
        for name in names:
            self._cluster.signal(name, signal.SIGSTOP)
        try:
            for name in names:
                self._seen_down(name)
            time.sleep(self._rng.uniform(1.0, 2.0))
        finally:
            for name in names:
                self._cluster.signal(name, signal.SIGCONT)

    def move(self) -> None:
        """All lists, to other nodes."""
        try:
            self._cluster.manager.repartition()
        except HybridIndexError as error:
            self.n["moves refused"] += 1
            self.problems.append(f"move: {error}"[:300])

    def _while_moving(self, fault: Callable[[], None]) -> None:
        moving = threading.Thread(target=self.move)
        moving.start()
        time.sleep(self._rng.uniform(0.05, 0.6))
        fault()
        moving.join()

    def kill_while_moving(self) -> None:
        self._while_moving(self.kill)

    def stop_while_moving(self) -> None:
        self._while_moving(self.stop)

    def drain(self) -> None:
        """One node gives all of its lists to others, and still answers."""

        def drain() -> None:
            try:
                self._cluster.manager.drain(self._cluster.names[-1])
            except HybridIndexError as error:
                self.problems.append(f"drain: {error}"[:300])

        self._do(drain)


def measure_answers(workload: Workload, folder: Path, *, queries: int, maps: int, rate: float) -> dict[str, Any]:
    """``queries`` over ``maps`` clusters, each with random placements. ``rate``: queries per second, about."""
    oracle = Oracle(workload, (1, workload.nprobe, 4 * workload.nprobe))
    rows = []
    pause_s = _CALLERS * (_MOST_BATCH + 1) / 2 / rate
    for number in range(maps):
        count, over = _Count(), threading.Event()
        wanted = -(-queries // maps)

        def enough(count: _Count = count, wanted: int = wanted) -> bool:
            return count.n_asked >= wanted

        with nodes(workload, folder / f"map-{number}", 4, repair_after_s=3.0, seed=number) as cluster:
            faults = _Faults(cluster, count, number)
            with cluster.router(timeout_s=20.0) as router:
                callers = [
                    threading.Thread(target=_call, args=(router, oracle, count, 100 * number + i, pause_s, over))
                    for i in range(_CALLERS)
                ]
                for caller in callers:
                    caller.start()
                try:
                    faults.cycle(lambda: False)
                    faults.drain()
                    while not enough():
                        faults.cycle(enough)
                finally:
                    over.set()
                    for caller in callers:
                        caller.join()
            rows.append(
                {
                    "map": number,
                    "queries": count.n_asked,
                    **{name: count.verdicts[name] for name in ("right", "partial", "silent", "wrong")},
                    "errors": dict(count.errors),
                    "faults": dict(faults.n),
                    "whole_again_s": faults.whole_s,
                    "map_version": cluster.manager.status()["map_version"],
                    "examples": count.examples[:20],
                    "problems": faults.problems,
                }
            )
    show(
        "answers while nodes fail and lists move",
        ("map", "queries", "right", "partial, told", "silently partial", "wrong", "errors", "faults"),
        [
            (r["map"], r["queries"], r["right"], r["partial"], r["silent"], r["wrong"], r["errors"], r["faults"])
            for r in rows
        ],
    )
    for row in rows:
        for told in (*row["examples"], *row["problems"]):
            print(f"map {row['map']}: {told}")
    total = {name: sum(row[name] for row in rows) for name in ("queries", "right", "partial", "silent", "wrong")}
    total["errors"] = sum(sum(row["errors"].values()) for row in rows)
    two = sum(n for row in rows for error, n in row["errors"].items() if error.startswith("stop_two"))
    total["errors_with_one_away"] = total["errors"] - two
    print(f"{total}; must be 0 wrong and 0 silent: {not total['wrong'] and not total['silent']}")
    return {"rows": rows, "total": total, "recall": oracle.recall, "passed": not total["wrong"] and not total["silent"]}
