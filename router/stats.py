"""Counters of one router: what was served where, what was moved, what fell back."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields

__all__ = ["RouterStats", "StatsCounter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStats:
    """A consistent reading of a router's counters since its start."""

    requests: int = 0
    queries: int = 0
    batches: int = 0
    largest_batch: int = 0
    #: Code bytes that queries probed, by where they were scanned.
    host_work_bytes: int = 0
    device_work_bytes: int = 0
    #: Batch parts that a device should have scanned and the host did.
    device_fallbacks: int = 0
    #: Requests whose nprobe a deadline lowered.
    nprobe_lowered: int = 0
    lookahead_lists: int = 0
    lookahead_bytes: int = 0
    lookahead_used_lists: int = 0
    #: Lists that lookahead wanted and that did not fit.
    lookahead_skipped_lists: int = 0
    #: Lists that nobody held and that left for others.
    cache_evicted_lists: int = 0
    #: Lists that stay on devices because sessions used them.
    cached_lists: int = 0
    #: How often a device failed, and how often one came back.
    device_failures: int = 0
    device_recoveries: int = 0
    #: Lists of the current plan that no device holds now although one should: no room, or a failed device.
    unplaced_lists: int = 0

    @property
    def hit_rate(self) -> float:
        """Fraction of the scan work that devices served; 0 before the first query."""
        total = self.host_work_bytes + self.device_work_bytes
        return self.device_work_bytes / total if total else 0.0


class StatsCounter:
    """Owner of the running counters. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((f.name for f in fields(RouterStats)), 0)

    def add(self, *, largest_batch: int = 0, **increments: int) -> None:
        """Adds to the named counters; ``largest_batch`` is a maximum."""
        with self._lock:
            for name, by in increments.items():
                self._counts[name] += by
            if largest_batch > self._counts["largest_batch"]:
                self._counts["largest_batch"] = largest_batch

    def read(self) -> RouterStats:
        with self._lock:
            return RouterStats(**self._counts)
