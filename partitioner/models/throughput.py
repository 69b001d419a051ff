"""LLM throughput against the KV-cache bytes that a resident index leaves it, and queueing of on-demand batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.types import F64, LLMProfile

__all__ = ["Queue", "ThroughputModel", "throughput_model", "waiting_factor"]

_LINEAR = (
    "LLM throughput at another KV-cache size (one point: the linear rule is assumed, and overstates a convex curve)"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ThroughputModel:
    """mu(KV bytes): measured points, made monotone, joined by lines; a line to the origin below the first point.

    With one point that is the paper's rule, mu0 * left / total (Algorithm 1, line 5). It overstates a convex curve.
    """

    total_bytes: int
    kv_bytes: F64
    rps: F64

    @property
    def measured(self) -> bool:
        """More than one point: not the paper's linear rule."""
        return self.kv_bytes.size > 2

    def extrapolated(self, index_bytes: int) -> bool:
        """True when the index leaves less than the smallest of several measured sizes."""
        left = self.total_bytes - index_bytes
        return self.measured and 0 < left < self.kv_bytes[1]

    def unmeasured(self, index_bytes: int) -> list[str]:
        """What is assumed instead of measured for an index of that size, in words."""
        if index_bytes <= 0:
            return []
        if not self.measured:
            return [_LINEAR]
        below = f"LLM throughput with less than {self.kv_bytes[1]:.0f} bytes of KV cache (a line to 0 is assumed)"
        return [below] if self.extrapolated(index_bytes) else []

    def at(self, index_bytes: int) -> float:
        """Requests/s with ``index_bytes`` of the KV cache given to the index; 0 when none is left."""
        left = self.total_bytes - index_bytes
        return float(np.interp(left, self.kv_bytes, self.rps)) if left > 0 else 0.0


def throughput_model(llm: LLMProfile) -> ThroughputModel:
    """The model of a profile.

    Raises:
        InvalidInputError: bytes or rates are negative or not finite.
    """
    points = {0: 0.0}
    for kv, rps in (*llm.points, (llm.kv_cache_bytes, llm.throughput_rps)):
        if kv < 0 or not math.isfinite(rps) or rps < 0:
            raise InvalidInputError(f"llm point ({kv}, {rps}) is wrong; give KV bytes >= 0 and requests/s >= 0")
        if kv > 0:
            points[int(kv)] = max(points.get(int(kv), 0.0), float(rps))
    kv_bytes = np.array(sorted(points), dtype=np.float64)
    rps_values = np.maximum.accumulate(np.array([points[int(kv)] for kv in kv_bytes]))
    return ThroughputModel(total_bytes=llm.kv_cache_bytes, kv_bytes=kv_bytes, rps=rps_values)


def waiting_factor(rate_qps: float, batch_s: float, percentile: float) -> float:
    """Queueing time over batch time (epsilon of Eq. 3) that ``percentile`` percent of requests stay below.

    On-demand batching under Poisson arrivals: the server is idle only when no request came during the last batch, so
    it is busy u = rT / (rT + exp(-rT)) of the time. A request that arrives while it is busy waits for the uniform rest
    of that batch: P(wait > x T) = u (1 - x). At full load and p = 90 % that is 0.9; the paper saw 0.9 to 1.0.
    """
    load = rate_qps * batch_s
    if load <= 0:
        return 0.0
    busy = load / (load + math.exp(-load)) if load < 700 else 1.0
    return max(0.0, 1.0 - (1.0 - percentile / 100.0) / busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Poisson arrivals at one server that takes ``each_s`` for each, in heavy traffic (M/D/1).

    P(wait > t) = exp(-2 (1 - u) t / (u each_s)) at load u.
    """

    each_s: float
    #: Part of the requests that may wait longer.
    late: float

    def wait_s(self, rate_qps: float) -> float:
        """Seconds that all but ``late`` of the requests wait at most."""
        load = rate_qps * self.each_s
        return math.log(1.0 / self.late) * self.each_s / 2.0 * load / (1.0 - load) if load < 1 else math.inf
