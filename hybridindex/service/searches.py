"""A search as a client asked for it, whatever it came by; what a trace is told on its way, and observers at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hybridindex.router.batch.stages import BatchReport
from hybridindex.types import F32, I64, SearchResult

__all__ = ["TURN_CELLS", "Observation", "SearchRequest", "SearchTrace", "Traces", "joined", "load_of"]

#: Queries times their nprobe, k or candidates in one turn of a large request: others wait for no more than a turn.
TURN_CELLS = 1 << 17
#: A query of more cells counts as several: as many turns share the router as there are small searches.
_CELLS_PER_QUERY = 128


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
