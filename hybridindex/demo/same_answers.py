"""The demo's second act: the same answers wherever lists are, while they move and while lookaheads bring more."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import hybridindex as hx
from hybridindex.partitioner.plan import Plan
from hybridindex.rag.documents import DOCUMENTS_FILE, DocumentStore
from hybridindex.router.router import Router
from hybridindex.types import F32, I64, SearchResult

__all__ = ["Lookaheads", "SameAnswers", "compare_answers", "measure_lookahead"]

K = 10
SECONDS = 6.0
#: Queries whose nearest rows are also found by comparing all rows.
N_BRUTE = 200
#: Passages that continue another, for which the other one was the draft.
N_PAIRS = 200
#: Most bytes that one lookahead brings, and seconds for which it is waited: the LLM generates that long.
LOOKAHEAD_BYTES = 16 << 20
WINDOW_S = 0.1
#: Part of the budget that random lists fill; the rest is for what lookaheads bring.
_FULL = 0.6
_CALLERS = 2
_TOLERANCE = 1e-4

Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SameAnswers:
    """What was compared."""

    #: Answers under load that were compared, and those that differ from the ones of plain IVF search.
    queries: int
    differences: int
    #: Changes of plan meanwhile, and lookaheads of a query before another one.
    plans: int
    lookaheads: int
    #: The least and the largest part of the bytes that the device scanned for a query.
    hit_rates: tuple[float, float]
    #: Part of the ``k`` nearest of all rows that plain IVF search finds, over ``brute_queries``.
    recall: float
    brute_queries: int
    seconds: float
    #: For a picture: seconds of each change of plan, and answers in each tenth of a second.
    changed_s: tuple[float, ...]
    answers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookaheads:
    """Mean part of the bytes of the final queries that the device scanned."""

    pairs: int
    #: Most bytes that each brought.
    nbytes: int
    with_lookahead: float
    without: float


def compare_answers(
    index: hx.Index, plan: Plan, device: str, queries: F32, rows: F32, progress: Progress, *, seed: int = 0
) -> SameAnswers:
    """Searches with random placements that change under load, and compares every answer with plain IVF search.

    Args:
        queries: (n, d).
        rows: (count, d), as the index was built from: the nearest of all of them are found by comparing all.
    """
    rng = np.random.default_rng(seed)
    progress("same answers", 0, int(SECONDS))
    plain = index.search(queries, K, plan.nprobe)
    with index.router(
        plan=_random(index, plan, rng), devices=[device], threads=plan.analysis.profile.threads
    ) as router:
        load = _Load(queries, plain)
        callers = [
            threading.Thread(target=load.run, args=(router, seed + 1 + each), name=f"demo-caller-{each}")
            for each in range(_CALLERS)
        ]
        for caller in callers:
            caller.start()
        try:
            # One change at least, however slow the machine is.
            while (load.seconds < SECONDS or not load.changed_s) and all(caller.is_alive() for caller in callers):
                router.apply_plan(_random(index, plan, rng), force=True)
                load.changed_s.append(load.seconds)
                progress("same answers", min(int(load.seconds), int(SECONDS)), int(SECONDS))
        finally:
            load.stop.set()
            for caller in callers:
                caller.join()
    load.reraise()
    n_brute = min(N_BRUTE, len(queries))
    bins = np.bincount((np.array(load.answered_s) * 10).astype(int), weights=load.sizes, minlength=1)
    return SameAnswers(
        queries=int(sum(load.sizes)),
        differences=load.differences,
        plans=len(load.changed_s),
        lookaheads=load.lookaheads,
        hit_rates=(min(load.hit_rates), max(load.hit_rates)),
        recall=_recall(plain.ids[:n_brute], _nearest(queries[:n_brute], rows)),
        brute_queries=n_brute,
        seconds=load.seconds,
        changed_s=tuple(load.changed_s),
        answers=tuple(bins.astype(int).tolist()),
    )


class _Load:
    """Callers, and what they count."""

    def __init__(self, queries: F32, plain: SearchResult) -> None:
        self._queries, self._plain = queries, plain
        self.stop = threading.Event()
        self._began_s = time.monotonic()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.differences = self.lookaheads = 0
        self.hit_rates: list[float] = []
        self.sizes: list[int] = []
        self.answered_s: list[float] = []
        self.changed_s: list[float] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    def run(self, router: Router, seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not self.stop.is_set():
                at = rng.integers(0, len(self._queries), int(rng.choice((1, 4, 16))))
                if rng.random() < 0.3:
                    with router.session(lookahead_bytes=LOOKAHEAD_BYTES) as session:
                        session.lookahead(self._queries[rng.integers(0, len(self._queries))])
                        found = session.search(self._queries[at], K)
                    self._count(at, found, lookaheads=1)
                else:
                    self._count(at, router.search(self._queries[at], K), lookaheads=0)
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            self._error = error

    def _count(self, at: I64, found: SearchResult, *, lookaheads: int) -> None:
        differ = _differ(self._plain.ids[at], self._plain.distances[at], found)
        with self._lock:
            self.differences += differ
            self.lookaheads += lookaheads
            self.hit_rates += found.hit_rate.tolist()
            self.sizes.append(len(at))
            self.answered_s.append(self.seconds)

    def reraise(self) -> None:
        if self._error is not None:
            raise self._error


def _differ(ids: I64, distances: F32, found: SearchResult) -> int:
    """How many answers differ: other distances, or other rows that are not equally near."""
    close = np.isclose(found.distances, distances, rtol=_TOLERANCE, atol=_TOLERANCE)
    same = found.ids == ids
    # Rows that are equally near may come in any order, and the last of them may be another one.
    gaps = np.abs(np.diff(distances, axis=1)) <= _TOLERANCE
    tied = np.pad(gaps, ((0, 0), (1, 0))) | np.pad(gaps, ((0, 0), (0, 1)), constant_values=True)
    return int((~(close & (same | tied))).any(axis=1).sum())


def _random(index: hx.Index, plan: Plan, rng: np.random.Generator) -> Plan:
    """``plan`` with other lists on its device: any, as many as it pleases."""
    request = plan.request
    pages = -(-index.list_bytes // request.page_bytes) * request.page_bytes
    room = rng.random() * min(_FULL * (request.budgets[0] - request.scratch[0]), pages.sum())
    order = rng.permutation(index.ivf.nlist)
    chosen = np.sort(order[np.cumsum(pages[order]) <= room])
    device = np.full(index.ivf.nlist, -1, dtype=np.int16)
    device[chosen] = 0
    return dataclasses.replace(plan, list_device=device, resident_lists=chosen)


def _nearest(queries: F32, rows: F32, *, block: int = 16_384) -> I64:
    """(n, k) ids of the rows with the largest inner products, of all."""
    best = np.full((len(queries), K), -np.inf, dtype=np.float32)
    ids = np.full((len(queries), K), -1, dtype=np.int64)
    for start in range(0, len(rows), block):
        products = queries @ np.asarray(rows[start : start + block]).T
        both = np.concatenate((best, products), axis=1)
        both_ids = np.concatenate(
            (ids, np.broadcast_to(np.arange(start, start + products.shape[1]), products.shape)), 1
        )
        top = np.argpartition(both, -K, axis=1)[:, -K:]
        best, ids = np.take_along_axis(both, top, 1), np.take_along_axis(both_ids, top, 1)
    return ids


def _recall(found: I64, nearest: I64) -> float:
    return float(np.mean([len(np.intersect1d(a, b)) / K for a, b in zip(found, nearest, strict=True)]))


def measure_lookahead(
    index: hx.Index, plan: Plan, device: str, rows: F32, progress: Progress, *, seed: int = 0
) -> Lookaheads | None:
    """Looks ahead with a passage, and searches with the one that continues it, as while an answer is generated. None
    where the texts have too few that do."""
    pairs = _continued(index, seed)
    if len(pairs) < N_PAIRS // 10:
        return None
    rates: dict[bool, list[float]] = {False: [], True: []}
    done = 0
    with index.router(plan=plan, devices=[device], threads=plan.analysis.profile.threads) as router:
        # What sessions brought stays while there is room: those without a lookahead come first.
        for ahead, found in rates.items():
            for draft, final in pairs:
                progress("lookahead", done, 2 * len(pairs))
                done += 1
                with router.session(lookahead_bytes=LOOKAHEAD_BYTES) as session:
                    if ahead:
                        moving = session.lookahead(rows[draft])
                        with contextlib.suppress(TimeoutError):
                            moving.result(WINDOW_S)
                    found += session.search(rows[final], K).hit_rate.tolist()
    progress("lookahead", done, done)
    with_it, without = (float(np.mean(rates[ahead])) for ahead in (True, False))
    return Lookaheads(pairs=len(pairs), nbytes=LOOKAHEAD_BYTES, with_lookahead=with_it, without=without)


def _continued(index: hx.Index, seed: int) -> Sequence[tuple[int, int]]:
    with DocumentStore(index.ivf.path / DOCUMENTS_FILE) as store:
        numbers = np.random.default_rng(seed).permutation(index.count)[: 12 * N_PAIRS].tolist()
        documents = [each.document for each in store.read(numbers).values()]
    pairs = [(each.id, each.successor) for each in documents if each.successor is not None]
    return pairs[:N_PAIRS]
