"""Retrieval in virtual time: the engine's loop of on-demand batches over host and devices.

Computes what the router's engine does with threads, under its batching rules: one engine takes the waiting requests,
quantizes and scans the host part; every device scans its parts in turn; at most two batches are in flight.

**Early dispatch.** The host scans the lists of the lightest request first, each list for all requests that probe it. A
profile gives the scan time of a whole batch and each query's lists. So a request ends when its lists and those of all
lighter requests have been scanned, at a constant rate. A device answers all its requests at once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hybridindex.router.batch.batching import MAX_BATCHES_IN_FLIGHT, fits
from hybridindex.studies.simulator.stage_table import StageTable
from hybridindex.types import F64, I64

__all__ = ["EngineRules", "Retrieved", "Watch", "retrieve"]

#: Random numbers drawn at once.
_DRAWN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """How the router was opened."""

    #: None: everything that waits, also beyond :data:`hybridindex.router.batch.batching.MAX_BATCH_CELLS`.
    max_batch: int | None = None
    early_dispatch: bool = True
    #: Seconds from the end of a search until its caller has the answer.
    answer_s: float = 0.0
    #: Equally likely seconds in which an idle engine wakes, and seconds from a batch to the next. A profile has
    #: neither: see :func:`hybridindex.studies.simulator.engine_fit.fit_engine`.
    wake_s: tuple[float, ...] = (0.0,)
    between_s: float = 0.0
    max_in_flight: int = MAX_BATCHES_IN_FLIGHT
    #: Draw each batch's deviation from the fits out of their residuals.
    scatter: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Retrieved:
    """The searches, in order of arrival."""

    #: (n,) float64 seconds: when the batch began, and when the answer was there.
    started_s: F64
    done_s: F64
    #: (n,) float64 hit rate by bytes.
    hit_rate: F64
    #: (b,) int64 queries of each batch.
    batches: I64
    #: (b,) float64 seconds of each batch in the engine, until its parts are submitted and until its host part ends.
    split_s: F64
    engine_s: F64
    #: (m, 3) float64: device, start and end of each of its scans.
    device_busy: F64


class Watch(Protocol):
    """Follows a run and may change residency: drift and refresh."""

    def table_at(self, now_s: float) -> StageTable:
        """The table of a batch that begins now. Times never go back."""

    def answered(self, now_s: float, latency_s: float, hit_rate: float) -> None:
        """A request was answered."""


def retrieve(
    arrivals: F64,
    table: StageTable | Watch,
    rules: EngineRules,
    *,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> Retrieved:
    """Serves ``arrivals`` (n,) ascending seconds; request i asks query i modulo the pool."""
    watch = None if isinstance(table, StageTable) else table
    served = table if isinstance(table, StageTable) else table.table_at(0.0)
    times = arrivals.tolist()
    n, cap, early = len(times), rules.max_batch, rules.early_dispatch
    started: list[float] = [0.0] * n
    done: list[float] = [0.0] * n
    hits: list[float] = [0.0] * n
    batches: list[int] = []
    engine: list[tuple[float, float]] = []
    busy: list[tuple[int, float, float]] = []
    rng = np.random.default_rng(seed)
    draws: list[float] = []
    wakes: list[float] = []
    ends = [0.0] * rules.max_in_flight
    device_free: list[float] = [0.0] * 64
    engine_free, first = -math.inf, 0
    while first < n:
        # The batch takes all requests that wait when both the engine and a slot are free.
        now = times[first]
        if now > engine_free:
            if not wakes:
                wakes = rng.choice(rules.wake_s, _DRAWN).tolist()
            now += wakes.pop()
        now = max(now, engine_free, ends[len(batches) % rules.max_in_flight])
        last = bisect_right(times, now, first + 1)
        if cap is not None:
            size = 1
            while first + size < last and fits(size, 1, cap):
                size += 1
            last = first + size
        size = last - first
        if watch is not None:
            served = watch.table_at(now)
        stages, hits_of = served.of_batch(size), served.hit_rate
        at = first % served.n
        if not draws:
            draws = rng.random(_DRAWN).tolist()
        draw = draws.pop()
        host_s, coarse_s, own_s = stages.host_s[at], stages.coarse_s, stages.own_s
        if rules.scatter:
            host_ratio, coarse_ratio = served.ratios(stages, at, draw)
            host_s *= host_ratio
            coarse_s *= coarse_ratio
            own_s *= coarse_ratio
        split = now + coarse_s
        device_end, longest = 0.0, 0.0
        for device, seconds in enumerate(stages.device_s):
            took = seconds[at]
            if took > 0:
                if rules.scatter:
                    took *= served.device_ratio(took, (draw + 0.5) % 1.0)
                begin = max(split, device_free[device])
                device_free[device] = begin + took
                busy.append((device, begin, begin + took))
                device_end, longest = max(device_end, begin + took), max(longest, took)
        # The part of the shorter scan that does not overlap the longer one delays the later end.
        waiting = served.serial * min(host_s, longest) if longest else 0.0
        # Merging and answering happen while the host scans, or at once where it has nothing to scan.
        took = own_s + host_s + waiting
        scanned = split + took
        tail = stages.merge_s + rules.answer_s
        if device_end:
            device_end += waiting + tail
        host_end = scanned + tail
        engine_free = scanned + rules.between_s
        end = max(host_end, device_end) if host_s or not device_end else device_end
        if size == 1:
            done[first] = end
        elif not early or not host_s:
            done[first:last] = [end] * size
        else:
            for place, part in enumerate(served.early_ends(at, size), first):
                # A request without resident lists does not wait for the devices.
                of_device = device_end if hits_of[place % served.n] else 0.0
                done[place] = max(split + part * took + tail if part else split, of_device)
        started[first:last] = [now] * size
        # The slot is free before the answer reaches the caller.
        ends[len(batches) % rules.max_in_flight] = end - rules.answer_s
        batches.append(size)
        engine.append((coarse_s, scanned - now))
        hits[first:last] = [hits_of[i % served.n] for i in range(first, last)]
        if watch is not None:
            for i in sorted(range(first, last), key=done.__getitem__):
                watch.answered(done[i], done[i] - times[i], hits[i])
        first = last
        if progress is not None and len(batches) % 1024 == 0:
            progress(first)
    split_s, engine_s = np.array(engine, dtype=np.float64).T
    return Retrieved(
        started_s=np.array(started),
        done_s=np.array(done),
        hit_rate=np.array(hits),
        batches=np.array(batches, dtype=np.int64),
        split_s=split_s,
        engine_s=engine_s,
        device_busy=np.array(busy, dtype=np.float64).reshape(-1, 3),
    )
