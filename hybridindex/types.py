"""The shared nouns: what was measured, asked and answered. Data only; no I/O, no threads, no torch, no SQL.

Rooms exchange these values. What a *plan* is lives in :mod:`hybridindex.partitioner.plan`; where a list *is* lives in
:mod:`hybridindex.tiers.contract.residency`. Arrays inside frozen dataclasses are treated as read-only by everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "F32",
    "F64",
    "I32",
    "I64",
    "U8",
    "AccessSample",
    "HardwareInfo",
    "LLMLevel",
    "LLMMeasurement",
    "LLMProfile",
    "Metric",
    "Profile",
    "RecallPoint",
    "SearchResult",
    "Stage",
    "StageSample",
    "TransferSample",
]

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

Metric = Literal["ip", "l2"]

#: What a latency sample timed. ``coarse``: coarse quantization of a batch on the host. ``host_scan``: the host scanner
#: over the probes it was given. ``device_scan``: one device's scan. ``merge``: merging both. ``batch``: a whole routed
#: batch end to end. ``embed``: embedding the query texts, where the caller embeds through us.
Stage = Literal["coarse", "host_scan", "device_scan", "merge", "batch", "embed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Answer to one search call of ``n`` queries."""

    #: (n, k) int64; -1 marks an empty place.
    ids: I64
    #: (n, k) float32; +inf (l2) or -inf (ip) in empty places; best first, ties by id.
    distances: F32
    #: (n,) int32: lists that were really probed per query. Lower than asked only under a deadline, or where an
    #: approximate coarse quantizer found fewer.
    nprobe_used: I32
    #: (n,) float32: fraction of each query's scan work (bytes) that resident lists served.
    hit_rate: F32


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareInfo:
    """The machine a profile was measured on. ``fingerprint`` covers what changes speed, not load."""

    fingerprint: str
    cpu_model: str
    cpu_flags: tuple[str, ...]
    cores: int
    memory_bytes: int
    #: One line per device: name and memory; empty without a GPU.
    devices: tuple[str, ...] = ()
    #: Package name -> version, of what takes part in a measurement.
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSample:
    """Which lists the calibration queries probe: the sparse joint hit/miss matrix, split in two halves.

    The hot order is chosen on ``fit``; means, variances and coverage curves are estimated on ``held``:
    figures from the same half would flatter.
    """

    #: (n_fit, nprobe) int32 list ids, -1 = none.
    fit_probes: I32
    #: (n_held, nprobe) int32 list ids, -1 = none.
    held_probes: I32
    #: (nlist,) float64 access counts that order the lists: counts of ``fit``, plus decayed history where there is some.
    list_accesses: F64


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSample:
    """One timed run of one stage on one batch, with the work that it did."""

    stage: Stage
    #: Number of queries in the batch.
    batch: int
    seconds: float
    #: (query, list) pairs scanned.
    probes: int = 0
    #: Code bytes scanned, summed over queries.
    work_bytes: int = 0
    #: Code bytes of the query with the most work.
    max_work_bytes: int = 0
    #: Code bytes of the union of the scanned lists.
    unique_bytes: int = 0
    #: Fraction of lists that were masked as resident (0 = everything on the host).
    coverage: float = 0.0
    #: Smallest hit rate (by bytes) of the batch's queries under that mask.
    min_hit_rate: float = 0.0
    #: Device of ``device_scan`` and ``batch`` samples: "cuda:0", "cpu (stand-in)"; empty for host stages.
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSample:
    """One timed host-to-device copy."""

    device: str
    pinned: bool
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallPoint:
    """Quality at one nprobe against the same index searched with nprobe = nlist: what probing fewer lists loses."""

    nprobe: int
    recall: float
    ndcg: float
    k: int
    n_queries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMProfile:
    """What the LLM can do with how much KV cache.

    ``points`` are measured (KV-cache bytes, requests/s) pairs, per device group, at ``input_tokens``/``output_tokens``.
    With a single point, throughput is scaled linearly with the remaining bytes (VectorLiteRAG, Algorithm 1, line 5),
    which is not conservative for convex curves.
    """

    #: KV-cache bytes, summed over devices, when no index is resident.
    kv_cache_bytes: int
    #: Requests/s at ``kv_cache_bytes``.
    throughput_rps: float
    points: tuple[tuple[int, float], ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    #: Time to first token without retrieval, seconds; part of a TTFT SLO.
    ttft_s: float = 0.0
    #: Pipeline step name -> generation seconds that retrieval can hide behind.
    generation_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMLevel:
    """A closed loop of requests to an LLM: ``concurrency`` clients, each sends its next request after an answer.

    Times in seconds; medians and 90th percentiles over the requests. Offline runs have no clients and no such times:
    there ``concurrency`` is the number of requests given at once, and times are 0.
    """

    concurrency: int
    n_requests: int
    #: Mean tokens per request, as the engine counted them.
    input_tokens: float
    output_tokens: float
    throughput_rps: float
    ttft_p50_s: float = 0.0
    ttft_p90_s: float = 0.0
    #: Time per output token after the first.
    tpot_p50_s: float = 0.0
    tpot_p90_s: float = 0.0
    #: Whole request.
    latency_p50_s: float = 0.0
    latency_p90_s: float = 0.0
    #: Largest part of the KV cache that was seen in use, 0..1; None where the engine does not tell.
    kv_usage: float | None = None
    #: Requests that the engine threw out of the KV cache and began anew; None where it does not tell.
    preemptions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMMeasurement:
    """What was measured about one LLM on one machine, with the profile that a plan takes from it."""

    #: ISO 8601, UTC.
    created_at: str
    #: Fingerprint and devices of the machine that measured; the LLM's, where it runs there.
    hardware_fingerprint: str
    model: str
    #: "server": closed loops over HTTP. "offline": vLLM's own loop, one engine per KV-cache size.
    method: Literal["server", "offline"]
    profile: LLMProfile
    #: Rising concurrency at ``profile.input_tokens`` and ``output_tokens``; offline: rising KV-cache bytes.
    levels: tuple[LLMLevel, ...]
    #: (prompt tokens, median TTFT in seconds) of single requests.
    prefill: tuple[tuple[int, float], ...] = ()
    #: (KV-cache bytes, why) of points that the engine did not run.
    refused: tuple[tuple[int, str], ...] = ()
    #: KV-cache tokens, what ended a run early, and other facts worth keeping.
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything that was measured about one index on one machine, at one nprobe."""

    #: Row id in the control store; ``None`` until stored.
    id: int | None = None
    #: ISO 8601, UTC.
    created_at: str
    index_fingerprint: str
    hardware: HardwareInfo
    metric: Metric
    codec: str
    dim: int
    count: int
    nlist: int
    nprobe: int
    k: int
    #: Host scanner that was timed: "native" or "faiss".
    scanner: str
    threads: int
    omp_wait_policy: str
    load_average: float
    seed: int
    #: (nlist,) int64 code bytes of each list: the unit of work and of placement.
    list_bytes: I64
    #: (nlist,) int64.
    list_sizes: I64
    access: AccessSample
    stages: tuple[StageSample, ...]
    transfers: tuple[TransferSample, ...] = ()
    recall: tuple[RecallPoint, ...] = ()
    #: Free-form facts worth keeping beside the numbers (data source, notes on load).
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Code bytes of the whole index."""
        return int(self.list_bytes.sum())
