"""Counters of one router: what was served where, what was moved, what fell back."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from hybridindex.router.batch.stages import QUEUE, StageSum

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
    #: Queries whose lists a device found; and those of which the host had to find them again: not proven, or too late.
    device_quantized: int = 0
    device_quantized_again: int = 0
    #: Requests whose nprobe a deadline lowered.
    nprobe_lowered: int = 0
    #: Requests with a filter, and rows that were compared for them, exactly and on the host.
    filtered_requests: int = 0
    filtered_rows: int = 0
    #: Rows that searches by codes compared exactly.
    candidates: int = 0
    #: Of these: with rows that a device holds beside codes, there.
    device_candidates: int = 0
    #: Where rows are on disk: pages of candidates that were read from there. Also those in memory, where the system
    #: does not say which are.
    row_pages: int = 0
    lookahead_lists: int = 0
    lookahead_bytes: int = 0
    lookahead_used_lists: int = 0
    #: Lists that lookahead wanted and that did not fit, or that no device took: failed, disabled, or of whole shards.
    lookahead_skipped_lists: int = 0
    #: Lookaheads that made way for newer ones in a full queue, or that the close met waiting.
    lookahead_dropped: int = 0
    #: Bytes of drafts that wait for their turn, now.
    lookahead_waiting_bytes: int = 0
    #: Lists that nobody held and that left for others.
    cache_evicted_lists: int = 0
    #: Lists that stay on devices because sessions used them.
    cached_lists: int = 0
    #: How often a device failed, and how often one came back.
    device_failures: int = 0
    device_recoveries: int = 0
    #: Of those failures: devices that took longer than the host would, or did not end a scan.
    device_slowdowns: int = 0
    #: Lists of the current plan that no device holds now although one should: no room, or a failed device.
    unplaced_lists: int = 0
    #: Page-locked host memory of lists that sessions may fetch.
    pinned_host_bytes: int = 0
    #: Listeners of batches that raised.
    listener_errors: int = 0
    #: What searches scan: "codes: …" or "rows…", and why.
    precision: str = "rows"
    #: Time by stage (:mod:`hybridindex.router.batch.stages`) of batches that have ended; an answer comes a little
    #: earlier.
    stages: Mapping[str, StageSum] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Fraction of the scan work that devices served; 0 before the first query."""
        total = self.host_work_bytes + self.device_work_bytes
        return self.device_work_bytes / total if total else 0.0

    @property
    def rerank_hit_rate(self) -> float:
        """Fraction of the candidates that devices compared exactly; 0 before the first."""
        return self.device_candidates / self.candidates if self.candidates else 0.0


#: Counters of what was asked.
_LOAD = (
    "requests",
    "queries",
    "batches",
    "largest_batch",
    "host_work_bytes",
    "device_work_bytes",
    "device_quantized",
    "device_quantized_again",
    "nprobe_lowered",
    "filtered_requests",
    "filtered_rows",
    "candidates",
    "device_candidates",
    "row_pages",
)
#: What is no counter.
_OTHER = ("stages", "precision")


class StatsCounter:
    """Owner of the running counters. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((f.name for f in fields(RouterStats) if f.name not in _OTHER), 0)
        #: Stage -> (count, seconds).
        self._stages: dict[str, tuple[int, float]] = {}

    def add(self, *, largest_batch: int = 0, **increments: int) -> None:
        """Adds to the named counters; ``largest_batch`` is a maximum."""
        with self._lock:
            for name, by in increments.items():
                self._counts[name] += by
            if largest_batch > self._counts["largest_batch"]:
                self._counts["largest_batch"] = largest_batch

    def add_stages(self, queue_s: Iterable[float], times: Iterable[tuple[str, float, float, float]]) -> None:
        """Adds one batch: seconds in the queue by request, and (stage, start, end, busy) of the others."""
        with self._lock:
            for waited in queue_s:
                self._add_stage(QUEUE, waited)
            for stage, _, _, busy in times:
                self._add_stage(stage, busy)

    def add_batch(
        self,
        seconds: Mapping[str, float],
        *,
        n_queries: int,
        host_bytes: int,
        candidates: int = 0,
        row_pages: int = 0,
        for_node: bool = False,
    ) -> None:
        """Adds a batch of one request that the host answered without a wait: ``seconds`` by stage.

        ``for_node``: another node counts the request.
        """
        with self._lock:
            counts = self._counts
            if not for_node:
                counts["requests"] += 1
                counts["queries"] += n_queries
            counts["batches"] += 1
            counts["largest_batch"] = max(counts["largest_batch"], n_queries)
            counts["host_work_bytes"] += host_bytes
            counts["candidates"] += candidates
            counts["row_pages"] += row_pages
            self._add_stage(QUEUE, 0.0)
            for stage, busy in seconds.items():
                self._add_stage(stage, busy)

    def _add_stage(self, stage: str, seconds: float) -> None:
        count, total = self._stages.get(stage, (0, 0.0))
        self._stages[stage] = count + 1, total + seconds

    def forget_load(self) -> None:
        """Sets what was asked and how long it took to nothing; failures, fallbacks and moves stay."""
        with self._lock:
            self._counts.update(dict.fromkeys(_LOAD, 0))
            self._stages.clear()

    def read(self) -> RouterStats:
        with self._lock:
            stages = {name: StageSum(count=count, seconds=total) for name, (count, total) in self._stages.items()}
            return RouterStats(stages=stages, precision="rows", **self._counts)
