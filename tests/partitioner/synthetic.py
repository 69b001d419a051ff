"""Zipf-like profiles whose true costs are known: the partitioner's tests need no index and no clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hybridindex.index.ivf import IVFIndex
from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.plan import Plan, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.profiler.hardware import hardware_info
from hybridindex.types import AccessSample, HardwareInfo, Profile, Stage, StageSample

HARDWARE = HardwareInfo(fingerprint="hw-1", cpu_model="synthetic", cpu_flags=(), cores=2, memory_bytes=1 << 34)

#: True costs of the synthetic machine.
PER_BYTE_S = 2e-10
PER_PROBE_S = 2e-7
OVERHEAD_S = 2e-5


def zipf_probes(rng: np.random.Generator, n: int, nlist: int, nprobe: int, skew: float) -> np.ndarray:
    """(n, nprobe) int32 distinct lists per query; popularity falls with the id, each query leans to its own topic."""
    popularity = 1.0 / np.arange(1, nlist + 1) ** skew
    topic = rng.integers(0, 8, size=n)
    lean = 1.0 + 3.0 * (np.arange(nlist)[None, :] % 8 == topic[:, None])
    keys = np.log(popularity)[None, :] + np.log(lean) + rng.gumbel(size=(n, nlist))
    return np.argpartition(-keys, min(nprobe, nlist) - 1, axis=1)[:, :nprobe].astype(np.int32)


def scan_seconds(miss_work: np.ndarray, miss_probes: np.ndarray, threads: int) -> float:
    """True host scan of one batch: queries shared by threads."""
    cost = PER_BYTE_S * miss_work + PER_PROBE_S * miss_probes
    return float(OVERHEAD_S + max(cost.max(), cost.sum() / threads))


def make_profile(
    *,
    nlist: int = 256,
    n: int = 400,
    nprobe: int = 16,
    skew: float = 1.0,
    seed: int = 0,
    code_size: int = 512,
    mean_size: int = 300,
    threads: int = 2,
    noise: float = 0.0,
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64),
    repeats: int = 4,
    coarse_s: float = 1e-4,
    empty_share: float = 0.0,
    list_sizes: np.ndarray | None = None,
    device_per_byte_s: float | None = None,
) -> Profile:
    """A profile with known truth: coarse = ``coarse_s`` (1 + b/10), host scan by :func:`scan_seconds`."""
    rng = np.random.default_rng(seed)
    nprobe = min(nprobe, nlist)
    sizes = rng.integers(1, 2 * mean_size, size=nlist) if list_sizes is None else np.asarray(list_sizes)
    if empty_share:
        sizes[rng.random(nlist) < empty_share] = 0
    sizes = sizes.astype(np.int64)
    list_bytes = sizes * code_size
    probes = zipf_probes(rng, n, nlist, nprobe, skew)
    fit, held = probes[: n // 2], probes[n // 2 :]
    accesses = np.bincount(fit.ravel(), minlength=nlist).astype(np.float64)
    order = np.argsort(-accesses, kind="stable")
    stages: list[StageSample] = []

    def jitter() -> float:
        return float(np.exp(noise * rng.standard_normal()))

    for batch in batches:
        for _ in range(repeats):
            stages.append(
                StageSample(stage="coarse", batch=batch, seconds=coarse_s * (1 + batch / 10) * jitter(), probes=0)
            )
            for coverage in (0.0, 0.1, 0.3):
                resident = np.zeros(nlist, dtype=bool)
                resident[order[: int(coverage * nlist)]] = True
                rows = held[rng.integers(0, held.shape[0], size=batch)]
                missed = ~resident[rows]
                work = (list_bytes[rows] * missed).sum(axis=1).astype(float)
                full = list_bytes[rows].sum(axis=1)
                stages.append(
                    StageSample(
                        stage="host_scan",
                        batch=batch,
                        seconds=scan_seconds(work, missed.sum(axis=1), threads if batch > 1 else 1) * jitter(),
                        probes=int(missed.sum()),
                        work_bytes=int(work.sum()),
                        max_work_bytes=int(work.max()),
                        unique_bytes=int(list_bytes[np.unique(rows[missed])].sum()),
                        coverage=coverage,
                        min_hit_rate=float((1 - work / np.maximum(full, 1)).min()),
                    )
                )
                if device_per_byte_s is not None and coverage > 0:
                    hits = int((list_bytes[rows] * ~missed).sum())
                    stage: Stage = "device_scan"
                    stages.append(
                        StageSample(
                            stage=stage,
                            batch=batch,
                            seconds=(1e-5 + device_per_byte_s * hits) * jitter(),
                            work_bytes=hits,
                            unique_bytes=int(list_bytes[np.unique(rows[~missed])].sum()),
                            coverage=coverage,
                            device="cpu (stand-in)",
                        )
                    )
    return Profile(
        created_at="2026-01-01T00:00:00Z",
        index_fingerprint="index-1",
        hardware=HARDWARE,
        metric="ip",
        codec="flat",
        dim=code_size // 4,
        count=int(sizes.sum()),
        nlist=nlist,
        nprobe=nprobe,
        k=10,
        scanner="faiss",
        threads=threads,
        omp_wait_policy="PASSIVE",
        load_average=0.1,
        seed=seed,
        list_bytes=list_bytes,
        list_sizes=sizes,
        access=AccessSample(fit_probes=fit, held_probes=held, list_accesses=accesses),
        stages=tuple(stages),
    )


def with_candidates(
    profile: Profile, row_bytes: int, *, candidates: int = 200, per_candidate_s: float = 4e-7
) -> Profile:
    """``profile``, of codes, with the candidates that its queries have, most of them in few lists, and with timed exact
    distances of them on the host and on a device."""
    rng = np.random.default_rng(profile.seed)

    def counted(probes: np.ndarray) -> np.ndarray:
        part = rng.exponential(size=probes.shape) ** 3 / (1.0 + profile.list_sizes[probes] / profile.list_sizes.mean())
        counts: np.ndarray = np.floor(candidates * part / part.sum(axis=1, keepdims=True)).astype(np.float32)
        return counts

    access, fit = profile.access, counted(profile.access.fit_probes)
    sums = np.bincount(access.fit_probes.ravel(), weights=fit.ravel(), minlength=profile.nlist).astype(np.float64)
    held = counted(access.held_probes)
    timed = tuple(
        StageSample(
            stage="rerank",
            batch=batch,
            seconds=1e-5 + each_s * batch * candidates * part,
            probes=round(batch * candidates * part),
            coverage=1.0 - part,
            device=device,
        )
        for batch in sorted({s.batch for s in profile.stages})
        for part in (1.0, 0.5, 0.25)
        for device, each_s in (("", per_candidate_s), ("cpu (stand-in)", per_candidate_s / 20))
    )
    notes = {"codes": {"bits": 1, "candidates": candidates, "row_bytes": row_bytes * int(profile.list_sizes.sum())}}
    return replace(
        profile,
        access=replace(access, list_candidates=sums, held_candidates=held),
        stages=profile.stages + timed,
        notes={**profile.notes, **notes},
    )


def with_row_faults(profile: Profile, *, overhead_s: float = 2e-4, per_page_s: float = 3e-5) -> Profile:
    """``profile``, of codes, with timed reads of rows from disk."""
    timed = tuple(
        StageSample(stage="row_faults", batch=batch, seconds=overhead_s + per_page_s * pages, probes=pages)
        for batch in (1, 4, 16)
        for pages in (50 * batch, 200 * batch)
    )
    return replace(profile, stages=profile.stages + timed)


def profile_of(view: IVFIndex) -> Profile:
    """Synthetic timings, on this machine, of what searches scan of an index: its rows, or its codes."""
    made = make_profile(nlist=view.nlist, n=100, nprobe=6, list_sizes=view.list_sizes)
    return replace(
        made,
        index_fingerprint=view.fingerprint,
        hardware=replace(made.hardware, fingerprint=hardware_info().fingerprint),
        codec=view.codec,
        dim=view.dim,
        count=view.count,
        list_bytes=np.asarray(view.list_bytes),
        scanner="native" if view.rows is view else "rabitq",
    )


def plan_for(analysis: Analysis, **arguments: Any) -> Plan:
    """A plan of 64 MiB and 2 ms, unless ``arguments`` of a request say otherwise."""
    asked: dict[str, Any] = {"slo_ms": 2.0, "device_budget_bytes": 64 << 20, **arguments}
    return make_plan(analysis.profile, PlanRequest.resolve(**asked), analysis=analysis)
