"""Where the time of a batch goes, stage by stage.

Covers what is recorded and how it is read; :mod:`hybridindex.router.engine` and :mod:`hybridindex.router.batch.batch`
record, :mod:`hybridindex.router.batch.stats` sums. Times are seconds of ``time.perf_counter``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = [
    "ADDED_SCAN",
    "COARSE",
    "HOST_SCAN",
    "LOOKAHEAD_WAIT",
    "MERGE",
    "QUEUE",
    "RERANK",
    "SPLIT",
    "BatchClock",
    "BatchReport",
    "StageSum",
    "StageTime",
]

#: From a request's submission, or the end of its wait for lists, to the start of its batch.
QUEUE = "queue"
#: Waits of sessions' searches for lists on their way: of no batch.
LOOKAHEAD_WAIT = "lookahead_wait"
#: Coarse quantization of the batch; with a filter, the choice of lists.
COARSE = "coarse"
#: Deadlines, of searches by codes the products with centroids, and the probe split.
SPLIT = "split"
#: Scan on the host; where requests share a batch, what was merged and reranked meanwhile is in it.
HOST_SCAN = "host_scan"
#: Scan of the rows that were added since the lists were written.
ADDED_SCAN = "added_scan"
#: Merges of all parts. Devices scan as stages of their own: :func:`device_scan`.
MERGE = "merge"
#: Exact distances: of candidates, of searches by codes; of the rows that a filter leaves.
RERANK = "rerank"


def device_scan(ordinal: int) -> str:
    """The stage of one device's scans, results on the host included."""
    return f"device_scan_{ordinal}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """One stage of one batch."""

    stage: str
    started_s: float
    ended_s: float
    #: Less than the time between where the stage came in pieces, as merges and reranks do.
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """One batch that has ended, whether its requests were answered or failed."""

    #: Running number of the router, from 1.
    number: int
    n_requests: int
    n_queries: int
    #: Largest of its requests.
    k: int
    nprobe: int
    #: Rows that were compared exactly, of searches by codes or with a filter.
    candidates: int
    #: When it left the queue.
    started_s: float
    #: Seconds that each request waited in the queue.
    queue_s: tuple[float, ...]
    #: In the order in which they ended; without the queue.
    stages: tuple[StageTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSum:
    """How often a stage was timed, and its seconds in all. The queue and waits count requests, the others batches or
    parts."""

    count: int
    seconds: float


class BatchClock:
    """Recorder of one batch. :meth:`note` and :meth:`note_host_rerank` from any thread, :meth:`note_merge` and
    :meth:`note_rerank` by one at a time."""

    __slots__ = (
        "_merge_busy_s",
        "_merge_ended_s",
        "_merge_started_s",
        "_rerank",
        "_times",
        "host_reranks",
        "started_s",
    )

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        # Tuples: a dataclass takes longer to make than some stages last.
        self._times: list[tuple[str, float, float, float]] = []
        self._merge_started_s: float | None = None
        self._merge_ended_s = self._merge_busy_s = 0.0
        #: As in :attr:`_times`.
        self._rerank: tuple[str, float, float, float] | None = None
        #: Candidates, and seconds, of each comparison that the host did.
        self.host_reranks: list[tuple[int, float]] = []

    def note(self, stage: str, started_s: float) -> float:
        """A stage that began at ``started_s`` ends now; returns now."""
        now = time.perf_counter()
        self._times.append((stage, started_s, now, now - started_s))
        return now

    def note_merge(self, started_s: float) -> None:
        """One of the batch's merges ends now."""
        now = time.perf_counter()
        if self._merge_started_s is None:
            self._merge_started_s = started_s
        self._merge_ended_s = now
        self._merge_busy_s += now - started_s

    def note_rerank(self, started_s: float) -> None:
        """One of the batch's reranks ends now."""
        now = time.perf_counter()
        first_s, busy_s = (started_s, 0.0) if self._rerank is None else (self._rerank[1], self._rerank[3])
        self._rerank = (RERANK, first_s, now, busy_s + now - started_s)

    def note_host_rerank(self, n_candidates: int, started_s: float) -> None:
        """A comparison on the host ends now."""
        self.host_reranks.append((n_candidates, time.perf_counter() - started_s))

    def times(self) -> list[tuple[str, float, float, float]]:
        """(stage, start, end, busy) of each; once, when nobody records any more."""
        if self._merge_started_s is not None:
            self._times.append((MERGE, self._merge_started_s, self._merge_ended_s, self._merge_busy_s))
        if self._rerank is not None:
            self._times.append(self._rerank)
        return self._times
