"""Results of a simulated run: latency distributions, attainment, throughput, memory."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hybridindex.types import F64

__all__ = ["Outcome", "Quantiles", "quantiles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Quantiles of one latency, in seconds."""

    p50: float
    p90: float
    p99: float
    mean: float


def quantiles(values: F64) -> Quantiles:
    """Quantiles of (n,) seconds; NaN counts as infinite."""
    filled = np.where(np.isfinite(values), values, np.inf)
    # No interpolation: there is nothing between a time and infinity.
    p50, p90, p99 = (float(p) for p in np.percentile(filled, [50, 90, 99], method="higher"))
    return Quantiles(p50=p50, p90=p90, p99=p99, mean=float(filled.mean()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """One run. TTFT counts from a request's arrival at the router; without an LLM it is the search time."""

    rate: float
    n_requests: int
    search: Quantiles
    ttft: Quantiles
    #: Part of the requests whose TTFT met the SLO; None without an SLO.
    attainment: float | None
    slo_s: float | None
    #: Median time per output token after the first; None without an LLM.
    tpot_s: float | None
    #: Finished requests per second, from the first arrival to the last answer.
    throughput_rps: float
    hit_rate: float
    mean_batch: float
    #: Part of the time in which each device scans.
    device_use: tuple[float, ...]
    #: Part of the KV cache in use: mean by time, and largest; None without an LLM.
    kv_mean: float | None
    kv_peak: float | None
    #: (n,) float64 seconds of each request, in order of arrival: of its search, and until its first token.
    search_s: F64 = field(repr=False)
    ttft_s: F64 = field(repr=False)

    def to_data(self) -> dict[str, Any]:
        """JSON-able, without single requests; NaN and infinity become null."""
        data = asdict(self)
        del data["search_s"], data["ttft_s"]
        return {name: _finite(value) for name, value in data.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(v) for name, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
