"""Series for plots, plain arrays: coverage curves, SLO against bytes, latency fits with their samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.decision import Verdict
from hybridindex.partitioner.models.hitrate import HitRateName, expected_min_hit_rate
from hybridindex.partitioner.request import PlanRequest
from hybridindex.partitioner.solver import problem_of, solve
from hybridindex.types import F64

__all__ = ["CoverageSeries", "LatencySeries", "SloPoint", "coverage_series", "latency_series", "slo_curve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SloPoint:
    """What one SLO would take."""

    slo_ms: float
    verdict: Verdict
    coverage: float
    #: Pages and scratch of all devices.
    device_bytes: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoverageSeries:
    """Hit rates against coverage: (m,) float64 each, by ascending coverage."""

    coverage: F64
    coverage_bytes: F64
    device_bytes: F64
    mean: F64
    mean_by_count: F64
    variance: F64
    #: Batch size -> E[min hit rate] by the model that validated best.
    expected_min: Mapping[int, F64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatencySeries:
    """One host stage: timed samples and the fit through them."""

    stage: str
    #: (s,) batch sizes and seconds of samples.
    sample_batch: F64
    sample_s: F64
    #: (m,) batch sizes and fitted median seconds, all on the host.
    batch: F64
    fit_s: F64


def slo_curve(analysis: Analysis, request: PlanRequest, slos_ms: Sequence[float]) -> list[SloPoint]:
    """Solve ``request`` again for each SLO; everything else stays."""
    configured = analysis.configured(page_bytes=request.page_bytes, n_devices=request.n_devices)
    problem = problem_of(configured, request)
    spent_s = request.slo_ms / 1e3 - request.search_slo_s
    points = []
    for slo_ms in slos_ms:
        solution = solve(problem, max(slo_ms / 1e3 - spent_s, 1e-12) / (1.0 + request.epsilon))
        met = solution.feasible and slo_ms / 1e3 > spent_s
        points.append(
            SloPoint(
                slo_ms=float(slo_ms),
                verdict=Verdict.FEASIBLE if met else Verdict.INFEASIBLE,
                coverage=solution.count / configured.curve.nlist,
                device_bytes=problem.device_bytes(int(configured.curve.prefix_pages[solution.count])),
                batch=solution.batch,
            )
        )
    return points


def coverage_series(
    analysis: Analysis,
    *,
    batches: Sequence[int] = (1, 4, 16, 64),
    points: int = 41,
    model: HitRateName | None = None,
) -> CoverageSeries:
    """The coverage curve, thinned to about ``points`` grid points."""
    curve = analysis.curve
    name = model if model is not None else analysis.hit_rates.best
    rows = np.unique(np.linspace(0, curve.grid.size - 1, min(points, curve.grid.size)).astype(int))
    counts = curve.grid[rows]
    return CoverageSeries(
        coverage=counts / curve.nlist,
        coverage_bytes=curve.prefix_bytes[counts] / max(int(curve.prefix_bytes[-1]), 1),
        device_bytes=curve.prefix_pages[counts].astype(np.float64) * curve.geometry.page_bytes,
        mean=curve.mean[rows],
        mean_by_count=curve.mean_by_count[rows],
        variance=curve.variance[rows],
        expected_min={
            batch: np.array([expected_min_hit_rate(curve, int(c), batch, name) for c in counts]) for batch in batches
        },
    )


def latency_series(analysis: Analysis, points: int = 33) -> list[LatencySeries]:
    """Coarse quantization and host scan: samples without mask, and the fits."""
    latency, curve = analysis.latency, analysis.curve
    series = []
    for stage in ("coarse", "host_scan"):
        samples = [s for s in analysis.profile.stages if s.stage == stage and s.coverage == 0]
        if not samples:
            continue
        batch = np.unique(np.round(np.geomspace(1, max(s.batch for s in samples), points)))
        parts = [latency.parts(curve, curve.at(0), int(b)) for b in batch]
        fit = [p.coarse_s if stage == "coarse" else float(np.median(p.host_s)) for p in parts]
        series.append(
            LatencySeries(
                stage=stage,
                sample_batch=np.array([s.batch for s in samples], dtype=np.float64),
                sample_s=np.array([s.seconds for s in samples]),
                batch=batch,
                fit_s=np.array(fit),
            )
        )
    return series
