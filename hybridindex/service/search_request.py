"""A search as a client asked for it, whatever it came by."""

from __future__ import annotations

from dataclasses import dataclass

from hybridindex.types import F32

__all__ = ["SearchRequest"]


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
