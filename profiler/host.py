"""Times the host: coarse quantization and list scan apart, by batch size, and scans of what a hot set leaves over.

Every timed run becomes one sample with the work that it did; fits and quantiles are the partitioner's. Runs on the
calling thread, which should have the machine for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hybridindex.index.faiss_model import require_faiss
from hybridindex.index.ivf import IVFIndex
from hybridindex.profiler.work import keep_probes, resident_counts, work_of
from hybridindex.tiers.host.host_scanner import HostScanner
from hybridindex.types import F32, I64, StageSample

__all__ = ["BatchRunner", "HostTiming", "host_threads", "time_host"]

#: Answers a whole batch end to end: ``(queries (n, dim) float32 as users give them, nprobe) -> None``.
BatchRunner = Callable[[F32, int], object]
Clock = Callable[[], float]
#: (done, total)
Tick = Callable[[int, int], None]

#: Rounds that are measured whatever they take: quantiles need more than one run.
_MIN_ROUNDS = 2
_WARM_UP_SHARE = 0.1
_WARM_UP_BATCH = 64
_ROUTED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTiming:
    """Samples of ``coarse``, ``host_scan`` and ``batch``, and what was left out."""

    samples: tuple[StageSample, ...]
    notes: dict[str, Any]


@contextmanager
def host_threads(scanner: HostScanner) -> Iterator[None]:
    """Quantize and scan with the scanner's threads on this thread, and give faiss its own setting back afterwards."""
    faiss = require_faiss()
    before = int(faiss.omp_get_max_threads())
    faiss.omp_set_num_threads(scanner.threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def time_host(
    index: IVFIndex,
    scanner: HostScanner,
    queries: F32,
    order: I64,
    *,
    nprobe: int,
    k: int,
    batches: Sequence[int],
    coverages: Sequence[float],
    repeats: int,
    max_seconds: float,
    seed: int = 0,
    raw_queries: F32 | None = None,
    runner: BatchRunner | None = None,
    tick: Tick | None = None,
    clock: Clock = time.perf_counter,
) -> HostTiming:
    """Measures in rounds: each round times every (batch size, coverage) once, in random order, on queries drawn anew.

    So drift of the machine's speed spreads evenly, and no run finds its lists in cache because another just read them.

    Args:
        index: the index.
        scanner: the host scanner to time.
        queries: (n, scan_dim) float32, transformed, held back from the choice of ``order``.
        order: (nlist,) int64, hottest first: the lists that masks take away.
        nprobe: lists per query.
        k: neighbours per query.
        batches: batch sizes, ascending, at most n. Sizes of which two rounds would not fit ``max_seconds`` are left
            out, the smallest excepted, and named in the notes.
        coverages: fractions of lists to mask, beside 0.
        repeats: rounds; fewer when the time is over, two at least.
        max_seconds: about how long to measure, warm-up included.
        seed: of draws and orders.
        raw_queries: (n, dim) float32, the same queries untransformed, for ``runner``.
        runner: when given, also times whole batches through it as stage ``batch``.
        tick: progress in rounds.
        clock: seconds, monotonic.
    """
    started = clock()
    bench = _HostBench(index, scanner, queries, order, nprobe, k, raw_queries, runner, seed, clock)
    counts = [0, *resident_counts(tuple(coverages), index.nlist)]
    bench.warm_up(started + _WARM_UP_SHARE * max_seconds)
    relative_cost = sum(1 - n / index.nlist for n in counts) + (runner is not None)
    chosen = _choose_batches(bench, batches, relative_cost, started, max_seconds, clock)
    kinds = [*counts, _ROUTED] if runner is not None else counts
    tasks = [(batch, kind) for batch in chosen for kind in kinds]
    samples: list[StageSample] = []
    rounds = 0
    while rounds < repeats and (rounds < _MIN_ROUNDS or clock() - started < max_seconds):
        for number in bench.rng.permutation(len(tasks)):
            if rounds >= _MIN_ROUNDS and clock() - started >= max_seconds:
                break
            samples += bench.run(*tasks[number])
        else:
            rounds += 1
            if tick is not None:
                tick(rounds, max(repeats, _MIN_ROUNDS))
    notes: dict[str, Any] = {
        "batches": list(chosen),
        "coverages": [n / index.nlist for n in counts],
        "rounds": rounds,
        "rounds_wanted": repeats,
        "seconds": clock() - started,
    }
    if len(chosen) < len(batches):
        notes["batches_left_out"] = [b for b in batches if b not in chosen]
        notes["batches_left_out_because"] = f"two rounds of them do not fit max_seconds, here {max_seconds:.1f} s"
    return HostTiming(samples=tuple(samples), notes=notes)


def _choose_batches(
    bench: _HostBench, batches: Sequence[int], relative_cost: float, started: float, max_seconds: float, clock: Clock
) -> list[int]:
    """The batch sizes of which ``_MIN_ROUNDS`` fit the time; each is run once to see, which also warms up."""
    chosen: list[int] = []
    round_cost = last = 0.0
    for batch in sorted(batches):
        left = max_seconds - (clock() - started)
        expected = last * batch / chosen[-1] if chosen else 0.0
        if chosen and expected + _MIN_ROUNDS * (round_cost + expected * relative_cost) > left:
            break
        before = clock()
        bench.run(batch, 0)
        last = clock() - before
        round_cost += last * relative_cost
        chosen.append(batch)
    return chosen


class _HostBench:
    """What one timed run needs. Not thread-safe."""

    def __init__(
        self,
        index: IVFIndex,
        scanner: HostScanner,
        queries: F32,
        order: I64,
        nprobe: int,
        k: int,
        raw_queries: F32 | None,
        runner: BatchRunner | None,
        seed: int,
        clock: Clock,
    ) -> None:
        self._index, self._scanner, self._queries, self._order = index, scanner, queries, order
        self._nprobe, self._k, self._raw_queries, self._runner = nprobe, k, raw_queries, runner
        self._clock = clock
        self.rng = np.random.default_rng(seed)

    def warm_up(self, until: float) -> None:
        """Pages in lists that the queries probe, as far as the time allows; one batch at least."""
        for start in range(0, len(self._queries), _WARM_UP_BATCH):
            x = self._queries[start : start + _WARM_UP_BATCH]
            self._scanner.scan(x, *self._index.quantize(x, self._nprobe), self._k)
            if self._clock() >= until:
                return

    def run(self, batch: int, n_resident: int) -> list[StageSample]:
        """One batch of random queries with the hottest ``n_resident`` lists masked, or through the runner."""
        rows = self.rng.choice(len(self._queries), batch, replace=False)
        return self._run_routed(rows) if n_resident == _ROUTED else self._run_apart(rows, n_resident)

    def _run_apart(self, rows: I64, n_resident: int) -> list[StageSample]:
        clock, batch = self._clock, len(rows)
        x = self._queries[rows]
        started = clock()
        probes, coarse = self._index.quantize(x, self._nprobe)
        samples = [StageSample(stage="coarse", batch=batch, seconds=clock() - started)]
        keep = np.ones(self._index.nlist, dtype=bool)
        keep[self._order[:n_resident]] = False
        missed = keep_probes(probes, coarse, keep, self._index.list_bytes)
        if missed.work.probes == 0:
            return samples
        x = x[missed.rows]
        started = clock()
        self._scanner.scan(x, missed.probes, missed.coarse_distances, self._k)
        seconds = clock() - started
        scan = StageSample(
            stage="host_scan",
            batch=batch,
            seconds=seconds,
            coverage=n_resident / self._index.nlist,
            min_hit_rate=missed.min_taken,
            **asdict(missed.work),
        )
        return [*samples, scan]

    def _run_routed(self, rows: I64) -> list[StageSample]:
        assert self._runner is not None
        assert self._raw_queries is not None
        probes, _ = self._index.quantize(self._queries[rows], self._nprobe)
        raw = self._raw_queries[rows]
        started = self._clock()
        self._runner(raw, self._nprobe)
        seconds = self._clock() - started
        work = work_of(probes, self._index.list_bytes)
        return [StageSample(stage="batch", batch=len(rows), seconds=seconds, **asdict(work))]
