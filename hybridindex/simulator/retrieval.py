"""Retrieval in virtual time: the engine's loop of on-demand batches over host and devices.

What the router's engine does with threads happens here as arithmetic, with its own rules of batching: one engine takes
what waits, quantizes and scans the host part; every device scans its parts in turn; two batches at most are under way.

**Early dispatch.** The host scans the lists of the lightest request first. A profile knows the scan of a whole batch
and each query's bytes, so a request ends when the bytes of all requests that are no heavier have been scanned, at an
even pace. That is late for lists which requests share, and right for the heaviest request. A device answers all at
once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hybridindex.router.batching import MAX_BATCHES_IN_FLIGHT, fits
from hybridindex.simulator.stages import StageTable
from hybridindex.types import F64, I64

__all__ = ["EngineRules", "Retrieved", "Watch", "retrieve"]

#: Random numbers drawn at once.
_DRAWN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """How the router was opened."""

    max_batch: int | None = None
    early_dispatch: bool = True
    #: Seconds that the engine spends on each request beyond its stages, and that an answer takes to its caller: what a
    #: profile, which times whole batches of one caller, does not have.
    per_request_s: float = 0.0
    answer_s: float = 0.0
    max_in_flight: int = MAX_BATCHES_IN_FLIGHT
    #: Draw how far each batch's stages scatter around their fits from the profile's residuals.
    scatter: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Retrieved:
    """What became of the searches, in order of arrival."""

    #: (n,) float64 seconds: when the batch began, when the answer was there.
    started_s: F64
    done_s: F64
    #: (n,) float64 hit rate by bytes.
    hit_rate: F64
    #: (b,) int64 queries of each batch.
    batches: I64
    #: (m, 3) float64: device, start and end of each of its scans.
    device_busy: F64


class Watch(Protocol):
    """Follows a run and may change what is resident: drift and refresh."""

    def table_at(self, now_s: float) -> StageTable:
        """What a batch that begins now is served with. Times never go back."""

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
    """Serves ``arrivals`` (n,) ascending seconds, request i with query i of the pool, around and around."""
    watch = None if isinstance(table, StageTable) else table
    served = table if isinstance(table, StageTable) else table.table_at(0.0)
    times = arrivals.tolist()
    n, cap, early, per_request = len(times), rules.max_batch, rules.early_dispatch, rules.per_request_s
    started: list[float] = [0.0] * n
    done: list[float] = [0.0] * n
    hits: list[float] = [0.0] * n
    batches: list[int] = []
    busy: list[tuple[int, float, float]] = []
    rng = np.random.default_rng(seed)
    host_ratios, coarse_ratios = served.model.host.ratios.tolist(), served.model.coarse_ratios.tolist()
    levels: list[int] = []
    ends = [0.0] * rules.max_in_flight
    device_free: list[float] = [0.0] * 64
    engine_free, first = 0.0, 0
    while first < n:
        # Requests gather while the engine or a slot is waited for: the batch is taken when both are there.
        now = max(times[first], engine_free, ends[len(batches) % rules.max_in_flight])
        last = bisect_right(times, now, first + 1)
        if cap is not None:
            size = 1
            while first + size < last and fits(size, 1, cap):
                size += 1
            last = first + size
        size = last - first
        if watch is not None:
            served = watch.table_at(now)
        stages = served.of_batch(size)
        at = first % served.n
        if not levels:
            levels = rng.integers(0, len(host_ratios), _DRAWN).tolist() if rules.scatter else [-1] * _DRAWN
        level = levels.pop()
        host_s, coarse_s = stages.host_s[at], stages.coarse_s + per_request * size
        if level >= 0:
            host_s *= host_ratios[level]
            coarse_s += stages.coarse_s * (coarse_ratios[level] - 1.0)
        split = now + coarse_s
        device_end, longest = 0.0, 0.0
        for device, seconds in enumerate(stages.device_s):
            took = seconds[at]
            if took > 0:
                begin = max(split, device_free[device])
                device_free[device] = begin + took
                busy.append((device, begin, begin + took))
                device_end, longest = max(device_end, begin + took), max(longest, took)
        # What does not hide behind the longer of the two scans delays whichever ends last.
        waiting = served.routing.serial * min(host_s, longest) if longest else 0.0
        engine_free = split + host_s + waiting
        tail = stages.merge_s + rules.answer_s
        if device_end:
            device_end += waiting + tail
        host_end = engine_free + tail
        end = max(host_end, device_end) if host_s or not device_end else device_end
        if size == 1:
            done[first] = end
        elif not early or not host_s:
            done[first:last] = [end] * size
        else:
            _dispatch_early(done, first, served, split, engine_free - split, tail, device_end, size)
        started[first:last] = [now] * size
        # The slot is free before the answer has reached its caller.
        ends[len(batches) % rules.max_in_flight] = end - rules.answer_s
        batches.append(size)
        whole = served.hit_rate
        hits[first:last] = [whole[i % served.n] for i in range(first, last)]
        if watch is not None:
            for i in sorted(range(first, last), key=done.__getitem__):
                watch.answered(done[i], done[i] - times[i], hits[i])
        first = last
        if progress is not None and len(batches) % 1024 == 0:
            progress(first)
    return Retrieved(
        started_s=np.array(started),
        done_s=np.array(done),
        hit_rate=np.array(hits),
        batches=np.array(batches, dtype=np.int64),
        device_busy=np.array(busy, dtype=np.float64).reshape(-1, 3),
    )


def _dispatch_early(
    done: list[float],
    first: int,
    served: StageTable,
    begin: float,
    took: float,
    tail: float,
    device_end: float,
    size: int,
) -> None:
    """Fills in when each request of a batch is complete: see the head of this file."""
    miss, n = served.miss_work, served.n
    work = [miss[i % n] for i in range(first, first + size)]
    total = sum(work)
    pace = took / total if total else 0.0
    scanned = 0.0
    for place in sorted(range(size), key=work.__getitem__):
        scanned += work[place]
        host_end = begin + scanned * pace + tail if work[place] else 0.0
        done[first + place] = max(host_end, device_end) or begin + tail
