"""A search as a client asked for it, whatever it came by; where it is made; what a trace is told on its way, and
observers at its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from hybridindex.router.batch.stages import BatchReport
from hybridindex.router.router import Router
from hybridindex.router.session import Session
from hybridindex.types import F32, I64, SearchResult

__all__ = [
    "TURN_CELLS",
    "LoopTime",
    "Observation",
    "RouterSearches",
    "SearchRequest",
    "SearchTrace",
    "Traces",
    "joined",
    "load_of",
]

#: Queries times their nprobe, k or candidates in one turn of a large request: others wait for no more than a turn.
TURN_CELLS = 1 << 17
#: A query of more cells counts as several: as many turns share the router as there are small searches.
_CELLS_PER_QUERY = 128
#: Larger queries are checked and copied on a thread, not on the event loop.
_LARGE_BYTES = 1 << 20
_FILTERS = {"allow_ids", "deny_ids", "where"}
#: Searches that read no more are made on the event loop where the engine is idle: handing them over takes as long.
_SMALL_BYTES = 2 << 20
#: Those that read no more, about a millisecond, too, unless the loop has searched for half of its time: where many
#: come, the engine makes one batch of them.
_SHORT_BYTES = 16 << 20


def load_of(n: int, width: int) -> int:
    """What ``n`` queries with so large an nprobe, k or number of candidates take of the router's time, in queries."""
    return max(n, n * width // _CELLS_PER_QUERY)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """Counts are within the daemon's limits; the index checks that values are finite."""

    #: (n, d) float32.
    queries: F32
    k: int = 10
    nprobe: int | None = None
    #: Milliseconds from the arrival.
    deadline_ms: float | None = None
    #: Floor of nprobe under a deadline or overload.
    min_nprobe: int | None = None
    #: Rows that a search by codes compares exactly.
    candidates: int | None = None
    #: In a cluster, the least fraction of each query's work that an answer may rest on; None: all of it.
    allow_partial: float | None = None
    #: (m,) int64 ids that may be answered, and that may not; None: all, and none.
    allow_ids: I64 | None = None
    deny_ids: I64 | None = None
    #: A condition on attributes.
    where: str | None = None

    @property
    def row_filter(self) -> dict[str, Any]:
        """What says which rows may be answered; empty: all may."""
        asked = {"allow_ids": self.allow_ids, "deny_ids": self.deny_ids, "where": self.where}
        return {name: value for name, value in asked.items() if value is not None}


class LoopTime:
    """How much the event loop may search itself."""

    def __init__(self) -> None:
        #: From when on it has time for another short search, as of :func:`time.perf_counter`.
        self._free_from_s = 0.0

    def most_bytes(self) -> int:
        """That one search may read."""
        return _SMALL_BYTES if time.perf_counter() < self._free_from_s else _SHORT_BYTES

    def spent(self, since_s: float) -> None:
        """On a search that began then."""
        now_s = time.perf_counter()
        self._free_from_s = now_s + (now_s - since_s)


class RouterSearches:
    """Has admitted searches made: on the event loop, by the router's engine, or, of large ones, by way of a thread."""

    def __init__(self, preparing: Executor) -> None:
        self._preparing = preparing
        self._loop_time = LoopTime()
        #: Searches under way.
        self._n = 0

    async def __call__(
        self, queries: F32, k: int, nprobe: int, options: dict[str, Any], searched: Router | Session
    ) -> SearchResult:
        """Raises: as :meth:`hybridindex.router.router.Router.search`."""
        self._n += 1
        try:
            return await self._search(queries, k, nprobe, options, searched)
        finally:
            self._n -= 1

    async def _search(
        self, queries: F32, k: int, nprobe: int, options: dict[str, Any], searched: Router | Session
    ) -> SearchResult:
        # Filters are made where they are asked for.
        if queries.nbytes > _LARGE_BYTES or options.keys() & _FILTERS:
            submit = partial(searched.submit, queries, k, nprobe, **options)
            waiting = await asyncio.get_running_loop().run_in_executor(self._preparing, submit)
            return await asyncio.wrap_future(waiting)
        if isinstance(searched, Router) and not options.keys() - {"candidates"}:
            # What is ready goes first: a task that only searches must not keep the loop. Who comes meanwhile shares a
            # batch, which takes less than one search after the other.
            await asyncio.sleep(0)
            if self._n == 1:
                most_bytes, began_s = self._loop_time.most_bytes(), time.perf_counter()
                found = searched.search_directly(queries, k, nprobe, **options, most_bytes=most_bytes)
                if found is not None:
                    self._loop_time.spent(began_s)
                    return found
        return await searched.asearch(queries, k, nprobe, **options)


class SearchTrace(Protocol):
    """Records one search."""

    def asked(self, *, n: int, k: int, nprobe: int, plan_id: int | None, session_id: str | None) -> None: ...

    def admitted(self) -> None: ...

    def on_batch(self, report: BatchReport) -> None: ...

    def answered(self, result: SearchResult) -> None: ...


class Traces(Protocol):
    """Makes the spans of one service."""

    def request(
        self, method: str, headers: Mapping[bytes, bytes], request_id: str
    ) -> AbstractContextManager[Callable[[str, int], None]]:
        """Around one HTTP request; yields a function to be called at its end with the route and the status."""

    def search(self) -> SearchTrace | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One answered search. Times in seconds."""

    queries: F32
    queue_s: float
    search_s: float
    result: SearchResult
    #: The queue was so full that nprobe was lowered.
    lowered: bool
    #: Over the queries; summed once for all observers.
    hit_rate_sum: float = field(init=False)

    def __post_init__(self) -> None:
        rates = self.result.hit_rate
        object.__setattr__(self, "hit_rate_sum", float(rates[0] if len(rates) == 1 else rates.sum()))

    @property
    def latency_s(self) -> float:
        return self.queue_s + self.search_s


def joined(parts: Sequence[SearchResult]) -> SearchResult:
    """The answer to queries that were searched in parts."""
    return SearchResult(
        ids=np.concatenate([part.ids for part in parts]),
        distances=np.concatenate([part.distances for part in parts]),
        nprobe_used=np.concatenate([part.nprobe_used for part in parts]),
        hit_rate=np.concatenate([part.hit_rate for part in parts]),
        coverage=_joined_coverage(parts),
    )


def _joined_coverage(parts: Sequence[SearchResult]) -> F32 | None:
    if all(part.coverage is None for part in parts):
        return None
    whole = [np.ones(len(part.ids), np.float32) if part.coverage is None else part.coverage for part in parts]
    return np.concatenate(whole)
