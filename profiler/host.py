"""Times the host by batch size: coarse quantization, list scans, and scans of the lists outside a hot set.

Of searches by codes, the products of queries and centroids belong to ``coarse``. A scan keeps the candidates of the
profile's k and nprobe. Their exact distances are the stage ``rerank``: of all, or of those outside the hottest lists.

Where rows are on disk, ``row_faults`` is what exact distances of candidates take longer that are not in memory: the
pages are dropped, the candidates compared, and compared again.

Every timed run becomes one sample with the work that it did; the partitioner fits them. Runs on the calling thread,
which should have the machine for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from mmap import PAGESIZE
from typing import Any

import numpy as np

from hybridindex.extension import native
from hybridindex.index.faiss_model import require_faiss
from hybridindex.index.ivf import IVFIndex
from hybridindex.profiler.hardware import file_system_of
from hybridindex.profiler.request import ProfileRequest
from hybridindex.profiler.searching import Searching
from hybridindex.profiler.work import keep_probes, resident_counts
from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.tiers.host.host_scanner import HostScanner
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.types import F32, I64, StageSample

__all__ = ["HostTiming", "host_threads", "time_host", "time_row_faults"]

Clock = Callable[[], float]
#: (done, total)
Tick = Callable[[int, int], None]

#: Rounds that are measured whatever they take: quantiles need more than one run.
_MIN_ROUNDS = 2
_WARM_UP_SHARE = 0.1
_WARM_UP_BATCH = 64
#: Of rows on disk: batch sizes, and parts of the candidates that are compared.
_MOST_COLD = 64
_COLD_PARTS = (1.0, 0.5, 0.25)
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTiming:
    """Samples of ``coarse`` and ``host_scan``, and what was left out."""

    samples: tuple[StageSample, ...]
    notes: dict[str, Any]


@contextmanager
def host_threads(scanner: HostScanner) -> Iterator[None]:
    """Sets faiss's threads to the scanner's on this thread, and back afterwards."""
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
    request: ProfileRequest,
    *,
    max_seconds: float,
    tick: Tick | None = None,
    clock: Clock = time.perf_counter,
) -> HostTiming:
    """Measures in rounds: each round times every (batch size, coverage) once, in random order, on queries drawn anew.

    So a change of the machine's speed affects all alike, and no run finds its lists in cache because of another one.
    Batch sizes of which two rounds would not fit ``max_seconds`` are left out, the smallest excepted, and noted.

    Args:
        index: the index.
        scanner: the host scanner to time.
        queries: (n, scan_dim) float32, transformed, held back from the choice of ``order``.
        order: (nlist,) int64, hottest first: the lists that masks take away.
        request: nprobe, k, batch sizes of at most n, coverages to mask beside 0, rounds and seed.
        max_seconds: about how long to measure, warm-up included; fewer rounds when it is over, two at least.
        tick: progress in rounds.
        clock: seconds, monotonic.
    """
    started = clock()
    bench = _HostBench(index, scanner, queries, order, request, clock)
    batches, repeats = request.batches, request.repeats
    counts = [0, *resident_counts(tuple(request.coverages), index.nlist)]
    bench.warm_up(started + _WARM_UP_SHARE * max_seconds)
    relative_cost = sum(1 - n / index.nlist for n in counts)
    chosen = _choose_batches(bench, batches, relative_cost, started, max_seconds, clock)
    tasks = [(batch, count) for batch in chosen for count in counts]
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
    if bench.searching.by_codes:
        notes["candidates"] = bench.kept
        notes["coarse"] = "quantization and products with centroids"
    if len(chosen) < len(batches):
        notes["batches_left_out"] = [b for b in batches if b not in chosen]
        notes["batches_left_out_because"] = f"two rounds of them do not fit max_seconds, here {max_seconds:.1f} s"
    return HostTiming(samples=tuple(samples), notes=notes)


def time_row_faults(
    searching: Searching,
    queries: F32,
    request: ProfileRequest,
    *,
    max_seconds: float,
    tick: Tick | None = None,
    clock: Clock = time.perf_counter,
) -> HostTiming:
    """Samples of ``row_faults``: seconds beyond those of the same comparison in memory, and pages that were read. None,
    and ``skipped`` in the notes, where rows cannot be dropped from memory.

    Args:
        searching: by codes, of rows on disk.
        queries: as :func:`time_host`.
        max_seconds: about how long; each batch size is measured once whatever it takes.
    """
    assert request.nprobe is not None, "recall chooses it before the host is timed"
    scanner, integrity = searching.scanner, searching.index.integrity
    assert isinstance(scanner, HostRabitqScanner)
    assert scanner.on_disk is not None, "rows are on disk"
    on_disk, kind, started = scanner.on_disk, file_system_of(integrity.file), clock()

    def skipped(why: str) -> HostTiming:
        return HostTiming(samples=(), notes={"file_system": kind, "skipped": why})

    if native is None:
        return skipped("the extension, which has pages read, is missing")
    if not on_disk.sees_memory:
        return skipped("the system does not say which pages are in memory to a user who does not own the file")
    if integrity.mended or integrity.lists_in_quarantine():
        return skipped("lists are damaged, and are served from memory")
    on_disk.forget_all()
    kept, rng = searching.kept(request.k, request.nprobe), np.random.default_rng(request.seed)
    batches = [b for b in request.batches if b <= _MOST_COLD] or list(request.batches[:1])
    samples: list[StageSample] = []
    rounds = 0
    while rounds < 1 or (rounds < request.repeats and clock() - started < max_seconds):
        for batch in rng.permutation(batches).tolist():
            x = queries[rng.choice(len(queries), batch, replace=False)]
            found = scanner.scan(x, *searching.quantize(x, request.nprobe), kept)[1]
            part = float(rng.choice(_COLD_PARTS)) if rounds else 1.0
            found = np.where(rng.random(found.shape) < part, found, -1)
            if not on_disk.forget(found):
                continue
            on_disk.take_pages()
            times = [clock()]
            for _ in range(2):
                searching.finish(x, found, request.k)
                times.append(clock())
            pages = on_disk.take_pages()
            if not pages:
                why = "it is memory" if kind in _IN_MEMORY else "another process has them mapped, or it keeps them"
                return skipped(f"rows on {kind or 'this file system'} stay in memory: {why}")
            seconds = (times[1] - times[0]) - (times[2] - times[1])
            if seconds > 0:
                samples.append(
                    StageSample(
                        stage="row_faults",
                        batch=batch,
                        seconds=seconds,
                        probes=pages,
                        work_bytes=pages * PAGESIZE,
                        coverage=1.0 - part,
                    )
                )
        rounds += 1
        if tick is not None:
            tick(rounds, request.repeats)
    if not samples:
        return skipped(f"rows on {kind or 'this file system'} are read as fast as from memory")
    notes = {
        "file_system": kind,
        "page_bytes": PAGESIZE,
        "batches": batches,
        "rounds": rounds,
        "seconds": clock() - started,
    }
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
    """Runs timed batches. Not thread-safe."""

    def __init__(
        self,
        index: IVFIndex,
        scanner: HostScanner,
        queries: F32,
        order: I64,
        request: ProfileRequest,
        clock: Clock,
    ) -> None:
        assert request.nprobe is not None, "recall chooses it before the host is timed"
        self.searching = Searching(index=index, scanner=scanner)
        #: Rows that a scan keeps of each query.
        self.kept = self.searching.kept(request.k, request.nprobe)
        self._index, self._scanner, self._queries, self._order = index, scanner, queries, order
        self._nprobe, self._k, self._clock = request.nprobe, request.k, clock
        #: Numbers of hottest lists whose candidates are left out of a rerank.
        self._masked = (0, 0, *resident_counts(tuple(request.coverages), index.nlist))
        self.rng = np.random.default_rng(request.seed)

    def warm_up(self, until: float) -> None:
        """Pages in lists that the queries probe, as far as the time allows; one batch at least."""
        for start in range(0, len(self._queries), _WARM_UP_BATCH):
            x = self._queries[start : start + _WARM_UP_BATCH]
            self.searching.search(x, self._k, self._nprobe)
            if self._clock() >= until:
                return

    def run(self, batch: int, n_resident: int) -> list[StageSample]:
        """Scans one batch of random queries with the hottest ``n_resident`` lists masked."""
        clock = self._clock
        rows = self.rng.choice(len(self._queries), batch, replace=False)
        x = self._queries[rows]
        started = clock()
        probes, coarse = self.searching.quantize(x, self._nprobe)
        fixed = StageSample(stage="coarse", batch=batch, seconds=clock() - started)
        keep = np.ones(self._index.nlist, dtype=bool)
        keep[self._order[:n_resident]] = False
        missed = keep_probes(probes, coarse, keep, self._index.list_bytes)
        if missed.work.probes == 0:
            return [fixed]
        x = x[missed.rows]
        started = clock()
        _, found = self._scanner.scan(x, missed.probes, missed.coarse_distances, self.kept)
        seconds = clock() - started
        scan = StageSample(
            stage="host_scan",
            batch=batch,
            seconds=seconds,
            coverage=n_resident / self._index.nlist,
            min_hit_rate=missed.min_taken,
            **asdict(missed.work),
        )
        # With a mask these are not the candidates of the whole search.
        if self.searching.by_codes and not n_resident:
            return [fixed, scan, self._rerank(x, found)]
        return [fixed, scan]

    def _rerank(self, x: F32, found: I64) -> StageSample:
        """Compares the candidates ``found``, or those outside some of the hottest lists."""
        clock, n_masked = self._clock, int(self.rng.choice(self._masked))
        found = np.where(np.isin(found >> POSITION_BITS, self._order[:n_masked]), -1, found)
        started = clock()
        self.searching.finish(x, found, self._k)
        seconds = clock() - started
        compared = int(np.count_nonzero(found >= 0))
        return StageSample(
            stage="rerank",
            batch=len(x),
            seconds=seconds,
            probes=compared,
            work_bytes=compared * self._index.rows.code_size,
            coverage=n_masked / self._index.nlist,
        )
