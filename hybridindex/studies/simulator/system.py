"""One run of a system: all requests are retrieved, then all are generated.

Retrieval does not depend on generation: decoding slows device scans by a constant factor. Device scans slow decoding
when they happen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hybridindex.studies.simulator.arrivals import Workload
from hybridindex.studies.simulator.engine_loop import EngineRules, Retrieved, Watch, retrieve
from hybridindex.studies.simulator.llm_server import LLMServer, generate
from hybridindex.studies.simulator.outcome import Outcome, quantiles
from hybridindex.studies.simulator.stage_table import StageTable
from hybridindex.types import F64

__all__ = ["System", "simulate"]


#: Spans of virtual time for which contention is kept: of a second each, or longer where it takes more of them.
_MAX_SPANS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class System:
    """A server that can be simulated."""

    name: str
    table: StageTable
    rules: EngineRules
    #: None: search only.
    llm: LLMServer | None = None
    #: Seconds that the LLM loses per second in which its devices scan.
    contention: float = 0.0
    n_devices: int = 1
    #: What was assumed instead of measured, in words.
    assumptions: tuple[str, ...] = ()


def simulate(
    system: System,
    workload: Workload,
    *,
    slo_s: float | None = None,
    seed: int = 0,
    watch: Watch | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Serves ``workload``; the same arguments give the same outcome. ``watch`` replaces the system's own table."""
    arrivals = workload.arrivals
    found = retrieve(arrivals, watch or system.table, system.rules, seed=seed, progress=progress)
    search_s = found.done_s - arrivals
    ttft_s, finished = search_s, found.done_s
    tpot = kv_mean = kv_peak = None
    if system.llm is not None:
        slower, slower_s = None, 1.0
        if system.contention:
            scanning, slower_s = _scanning(found, system.n_devices)
            slower = 1.0 + system.contention * scanning
        told = generate(
            found.done_s,
            system.llm,
            inputs=workload.input_tokens,
            outputs=workload.output_tokens,
            slower=slower,
            slower_s=slower_s,
        )
        ttft_s, finished = told.first_token_s - arrivals, told.done_s
        answer = workload.output_tokens if workload.output_tokens is not None else system.llm.output_tokens
        per_token = (told.done_s - told.first_token_s) / np.maximum(np.asarray(answer) - 1, 1)
        tpot = float(np.nanmedian(per_token)) if np.isfinite(per_token).any() else None
        kv_mean, kv_peak = told.kv_mean, told.kv_peak
    ended = finished[np.isfinite(finished)]
    span = float(ended.max() - arrivals[0]) if ended.size else 0.0
    busy = found.device_busy
    return Outcome(
        rate=workload.rate,
        n_requests=len(arrivals),
        search=quantiles(search_s),
        ttft=quantiles(ttft_s),
        attainment=None if slo_s is None else float((ttft_s <= slo_s).mean()),
        slo_s=slo_s,
        tpot_s=tpot,
        throughput_rps=ended.size / span if span > 0 else 0.0,
        hit_rate=float(found.hit_rate.mean()),
        mean_batch=float(found.batches.mean()),
        device_use=tuple(
            float((busy[busy[:, 0] == d, 2] - busy[busy[:, 0] == d, 1]).sum() / max(found.done_s.max(), 1e-12))
            for d in range(len(system.table.devices))
        ),
        kv_mean=kv_mean,
        kv_peak=kv_peak,
        search_s=search_s,
        ttft_s=ttft_s,
    )


def _scanning(found: Retrieved, n_devices: int) -> tuple[F64, float]:
    """(n,) float64 part of each span in which a device scans, averaged over all devices; and the seconds of a span."""
    last = float(found.done_s.max())
    span_s = max(1.0, last / _MAX_SPANS)
    seconds = np.zeros(int(last / span_s) + 1)
    # A scan counts in the span in which it begins: scans are much shorter than a second.
    begins = (found.device_busy[:, 1] / span_s).astype(np.int64)
    np.add.at(seconds, begins, found.device_busy[:, 2] - found.device_busy[:, 1])
    return np.minimum(seconds / (n_devices * span_s), 1.0), span_s
