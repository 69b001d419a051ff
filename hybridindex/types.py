"""Values that rooms exchange: measurements and answers. Data only; no I/O, threads, torch or SQL.

Plans are in :mod:`hybridindex.partitioner.plan`, residency in :mod:`hybridindex.tiers.contract.residency`. Treat arrays
in frozen dataclasses as read-only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "DEFAULT_HEADROOM",
    "F32",
    "F64",
    "I32",
    "I64",
    "U8",
    "AccessSample",
    "HardwareInfo",
    "HitRateChoice",
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
    "VectorFile",
]

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

Metric = Literal["ip", "l2"]

#: The model of hit rates that decides a plan; "best": the one that predicts held-back queries best.
HitRateChoice = Literal["best", "beta", "beta_binomial", "empirical"]
#: What a plan must have to spare, as a fraction: of the rate and of the SLO (``benchmarks/host/plan_calibration.py``).
DEFAULT_HEADROOM = 0.05

#: What a latency sample timed. ``coarse``: coarse quantization of a batch on the host. ``host_scan``: the host scanner
#: over the probes it was given. ``device_scan``: one device's scan. ``rerank``: exact distances of the candidates of a
#: scan of codes, on the host unless a device is named. ``merge``: merging both. ``batch``: a whole routed batch end to
#: end.
#: ``row_faults``: what ``rerank`` takes longer where rows are on disk.
Stage = Literal["coarse", "host_scan", "device_scan", "rerank", "row_faults", "merge", "batch"]


@dataclass(frozen=True, slots=True)
class VectorFile:
    """A file that a build reads. Its ending names its format: see docs/inputs.md."""

    path: str | Path
    _: KW_ONLY
    #: Column (Parquet, Arrow) or dataset (HDF5) of the vectors; None: the only one that can hold vectors.
    column: str | None = None
    #: Column or dataset of the ids; None: rows are numbered from 0, or ``ids`` of the build.
    ids_column: str | None = None
    #: "bf16": the elements of a ``.npy`` file of uint16 are the bits of bfloat16 numbers.
    dtype: Literal["bf16"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Answer to one search call of ``n`` queries."""

    #: (n, k) int64; -1 marks an empty place.
    ids: I64
    #: (n, k) float32; +inf (l2) or -inf (ip) in empty places; best first, ties by id.
    distances: F32
    #: (n,) int32: lists probed per query. Lower than requested only under a deadline, or where an approximate coarse
    #: quantizer found fewer.
    nprobe_used: I32
    #: (n,) float32: fraction of each query's scan work (bytes) that resident lists served.
    hit_rate: F32
    #: (n,) float32: fraction of each query's scan work that was done, where a part of an answer was allowed and is all
    #: that could be had. None: everything was done.
    coverage: F32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareInfo:
    """The machine a profile was measured on. ``fingerprint`` covers what changes its speed, not its load."""

    fingerprint: str
    cpu_model: str
    cpu_flags: tuple[str, ...]
    cores: int
    memory_bytes: int
    #: One line per device: name and memory; empty without a GPU.
    devices: tuple[str, ...] = ()
    #: Package name -> version, of packages that take part in a measurement.
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSample:
    """Lists that the calibration queries probe: the sparse joint hit/miss matrix, split in two halves.

    The hot order is chosen on ``fit``; means, variances and coverage curves are estimated on ``held``. Estimates on the
    half that chose the order would be too good.
    """

    #: (n_fit, nprobe) int32 list ids, -1 = none.
    fit_probes: I32
    #: (n_held, nprobe) int32 list ids, -1 = none.
    held_probes: I32
    #: (nlist,) float64 access counts that order the lists: counts of ``fit``, plus decayed history where there is some.
    list_accesses: F64
    #: Of searches by codes: (nlist,) float64 candidates in each list, counted as ``list_accesses``; None: not counted.
    list_candidates: F64 | None = None
    #: (n_held, nprobe) float32 candidates of each held query in each probed list; with ``list_candidates``.
    held_candidates: F32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSample:
    """One timed run of one stage on one batch, and its work."""

    stage: Stage
    #: Number of queries in the batch.
    batch: int
    seconds: float
    #: (query, list) pairs scanned; of ``rerank`` candidates, of ``row_faults`` pages that were read.
    probes: int = 0
    #: Code bytes scanned, of ``rerank`` bytes of rows, of ``row_faults`` bytes of pages, summed over queries.
    work_bytes: int = 0
    #: Code bytes scanned for the query with the most work.
    max_work_bytes: int = 0
    #: Code bytes of the distinct lists that were scanned.
    unique_bytes: int = 0
    #: Fraction of lists that were masked as resident; 0 = all lists on the host.
    coverage: float = 0.0
    #: Smallest hit rate (by bytes) of the batch's queries under that mask.
    min_hit_rate: float = 0.0
    #: Device of ``device_scan``, ``batch`` and some ``rerank`` samples: "cuda:0", "cpu (stand-in)", joined by "+" where
    #: several share a ``batch``; empty for host stages.
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
    """Quality at one nprobe, against a search of the same index with nprobe = nlist."""

    nprobe: int
    recall: float
    ndcg: float
    k: int
    n_queries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMProfile:
    """Throughput of the LLM against its KV-cache bytes.

    ``points`` are measured (KV-cache bytes, requests/s) pairs, per device group, at ``input_tokens``/``output_tokens``.
    With one point, throughput is proportional to the bytes left (VectorLiteRAG, Algorithm 1, line 5), which overstates
    a convex curve.
    """

    #: KV-cache bytes, summed over devices, when no index is resident.
    kv_cache_bytes: int
    #: Requests/s at ``kv_cache_bytes``.
    throughput_rps: float
    points: tuple[tuple[int, float], ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    #: Time to first token at the throughput limit, without retrieval, in seconds, of nine requests of ten; part of a
    #: TTFT SLO.
    ttft_s: float = 0.0
    #: Pipeline step name -> generation seconds that retrieval can hide behind.
    generation_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMLevel:
    """A closed loop of requests to an LLM: ``concurrency`` clients, each sends its next request after an answer.

    Times in seconds; medians and 90th percentiles over the requests. In offline runs ``concurrency`` is the number of
    requests given at once, and times are 0.
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
    #: Largest observed part of the KV cache in use, 0..1; None where the engine does not report it.
    kv_usage: float | None = None
    #: Requests that the engine evicted from the KV cache and restarted; None where it does not report them.
    preemptions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMMeasurement:
    """Measurements of one LLM on one machine, and the profile that a plan uses."""

    #: ISO 8601, UTC.
    created_at: str
    #: Fingerprint of the machine that measured; the LLM's machine where it runs there.
    hardware_fingerprint: str
    model: str
    #: "server": closed loops over HTTP. "offline": vLLM's own loop, one engine per KV-cache size.
    method: Literal["server", "offline"]
    profile: LLMProfile
    #: Rising concurrency at ``profile.input_tokens`` and ``output_tokens``; offline: rising KV-cache bytes.
    levels: tuple[LLMLevel, ...]
    #: (prompt tokens, median TTFT in seconds) of single requests.
    prefill: tuple[tuple[int, float], ...] = ()
    #: (KV-cache bytes, reason) of points that the engine refused.
    refused: tuple[tuple[int, str], ...] = ()
    #: KV-cache tokens, why a run ended early, and other facts.
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All measurements of one index on one machine at one nprobe."""

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
    #: Host scanner that was timed: "native", "faiss", or "rabitq", which scans codes.
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
    #: Other facts about the measurement (data source, notes on load).
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        queries = len(self.access.fit_probes) + len(self.access.held_probes)
        return (
            f"<hybridindex.Profile {'not stored' if self.id is None else self.id} of {self.created_at}: "
            f"{self.count:,} x {self.dim}, nlist {self.nlist}, {self.codec}, {self.metric}; nprobe {self.nprobe}, "
            f"{queries:,} queries, {len(self.stages):,} stage and {len(self.transfers):,} copy timings>"
        )

    @property
    def bits(self) -> int | None:
        """Of a dimension, where searches by RaBitQ codes were measured: ``codec`` is "rabitq1", "rabitq2" or
        "rabitq4". None: searches of the rows were."""
        return int(self.codec.removeprefix("rabitq")) if self.codec.startswith("rabitq") else None

    @property
    def nbytes(self) -> int:
        """Code bytes of the whole index."""
        return int(self.list_bytes.sum())
