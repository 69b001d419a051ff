"""An open-loop load on a router: Poisson arrivals that do not wait for answers, latency counted from the due time.

A closed loop would slow down with the server and hide its queue. Counting from the due time also counts the delay of a
late sender.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.router import Router
from hybridindex.types import F32, F64, SearchResult

__all__ = ["LoadResult", "PoissonLoad", "poisson_arrivals", "run_open_loop"]

#: Of one load: their due times and answers are held in memory.
_MOST_REQUESTS = 10_000_000
_MOST_SECONDS = 365 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonLoad:
    """What is offered. Raises InvalidInputError: names the field that is out of its range."""

    #: Requests per second: more than 0, finite.
    rate: float
    #: More than 0, a year at most. With ``rate``, 10,000,000 requests at most.
    duration_s: float
    k: int = 10
    nprobe: int | None = None
    #: For :attr:`LoadResult.attainment`: more than 0, finite.
    slo_ms: float | None = None
    #: Of the arrivals: 0 or more.
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise InvalidInputError(f"rate is {self.rate}; expected more than 0 requests per second, and a finite rate")
        if not 0 < self.duration_s <= _MOST_SECONDS:
            raise InvalidInputError(
                f"duration_s is {self.duration_s}; expected more than 0 seconds, and {_MOST_SECONDS:,} at most"
            )
        if self.rate * self.duration_s > _MOST_REQUESTS:
            raise InvalidInputError(
                f"rate {self.rate:g} over {self.duration_s:g} s is {self.rate * self.duration_s:.3g} requests; "
                f"expected {_MOST_REQUESTS:,} at most"
            )
        if self.slo_ms is not None and not 0 < self.slo_ms < math.inf:
            raise InvalidInputError(f"slo_ms is {self.slo_ms}; expected more than 0 milliseconds, and a finite SLO")
        if self.seed < 0:
            raise InvalidInputError(f"seed is {self.seed}; expected 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What one load at one rate measured. Latencies in milliseconds, from a request's due time to its answer."""

    #: Offered and answered requests per second.
    rate: float
    achieved_rate: float
    n_requests: int
    n_failed: int
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    mean_ms: float
    #: Fraction of all offered requests that were answered within the SLO; None without one.
    attainment: float | None
    #: Mean over queries, by bytes.
    hit_rate: float
    mean_batch: float


def poisson_arrivals(rate: float, duration_s: float, seed: int) -> F64:
    """Due times in [0, duration_s), ascending, of a Poisson process of ``rate`` per second."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / rate, size=int(rate * duration_s * 1.5) + 50)
    times: F64 = np.cumsum(gaps)
    return times[times < duration_s]


def run_open_loop(
    router: Router, queries: F32, load: PoissonLoad, *, progress: Callable[[str, int, int | None], None] | None = None
) -> LoadResult:
    """Sends single queries, taken from ``queries`` (n, d) in order and around again.

    Raises:
        InvalidInputError: a query cannot be used, there is none, or the load has no request.
    """
    queries = router.index.check_queries(queries)
    if not len(queries):
        raise InvalidInputError("queries hold 0 rows; expected 1 at least")
    due = poisson_arrivals(load.rate, load.duration_s, load.seed)
    if len(due) == 0:
        raise InvalidInputError(f"rate {load.rate} over {load.duration_s} s gives no request; raise one of them")
    latency: F64 = np.full(len(due), np.inf)
    hit_rate: F64 = np.zeros(len(due))
    all_done = threading.Semaphore(0)
    before = router.stats()
    start = time.perf_counter()

    def answered(number: int, future: Future[SearchResult]) -> None:
        if future.exception() is None:
            latency[number] = time.perf_counter() - start - due[number]
            hit_rate[number] = future.result().hit_rate[0]
        all_done.release()

    for number, at in enumerate(due):
        wait = at - (time.perf_counter() - start)
        if wait > 0:
            time.sleep(wait)
        future = router.submit(queries[number % len(queries)], load.k, load.nprobe)
        future.add_done_callback(lambda done, number=number: answered(number, done))  # type: ignore[misc]
        if progress is not None and number % 64 == 0:
            progress("load", number, len(due))
    for _ in due:
        all_done.acquire()
    elapsed = time.perf_counter() - start
    if progress is not None:
        progress("load", len(due), len(due))
    after = router.stats()
    good = np.isfinite(latency)
    p50, p90, p95, p99, mean = (
        (*np.percentile(latency[good] * 1e3, [50, 90, 95, 99]), latency[good].mean() * 1e3)
        if good.any()
        else (np.inf,) * 5
    )
    return LoadResult(
        rate=float(load.rate),
        achieved_rate=float(good.sum() / elapsed),
        n_requests=len(due),
        n_failed=int((~good).sum()),
        p50_ms=float(p50),
        p90_ms=float(p90),
        p95_ms=float(p95),
        p99_ms=float(p99),
        mean_ms=float(mean),
        attainment=None if load.slo_ms is None else float((latency * 1e3 <= load.slo_ms).mean()),
        hit_rate=float(hit_rate[good].mean()) if good.any() else 0.0,
        mean_batch=(after.queries - before.queries) / max(1, after.batches - before.batches),
    )
