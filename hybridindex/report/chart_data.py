"""The data of the pictures, as plain arrays. Pure; knows nothing of matplotlib."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridindex.errors import ProfileError
from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.models.coverage import CoverageCurve, build_coverage_curve
from hybridindex.partitioner.models.hitrate import HitRateName, expected_min_hit_rate
from hybridindex.partitioner.models.latency import LatencyParts
from hybridindex.partitioner.models.scan_models import host_scan_work
from hybridindex.partitioner.models.validate_hitrate import DEFAULT_BATCHES, DEFAULT_COVERAGES
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.tradeoff import SloPoint, slo_curve
from hybridindex.types import F64, I64, StageSample

__all__ = [
    "AccessShares",
    "HitRateCheck",
    "SloNeed",
    "StageFit",
    "TimingCheck",
    "access_shares",
    "batch_check",
    "hit_rate_check",
    "scan_check",
    "slo_need",
    "stage_fit",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AccessShares:
    """Cumulative shares against the share of lists, hottest first: (nlist + 1,) float64 each, from 0 to 1."""

    lists: F64
    #: The half that chose the order, and the half that did not.
    fit_accesses: F64
    held_accesses: F64
    fit_work: F64
    held_work: F64

    def at(self, share: float, values: F64) -> float:
        """The value of one curve where ``share`` of the lists are resident."""
        return float(np.interp(share, self.lists, values))


def access_shares(analysis: Analysis) -> AccessShares:
    """Shares of accesses (probes) and of scan work (code bytes), in the order that plans use."""
    profile, order = analysis.profile, analysis.curve.order

    def shares(weights: F64) -> F64:
        total = np.concatenate(([0.0], np.cumsum(weights[order])))
        return total / total[-1] if total[-1] > 0 else total

    def counts(probes: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> F64:
        return np.bincount(probes[probes >= 0], minlength=profile.nlist).astype(np.float64)

    fit, held = counts(profile.access.fit_probes), counts(profile.access.held_probes)
    nbytes = profile.list_bytes.astype(np.float64)
    return AccessShares(
        lists=np.linspace(0.0, 1.0, profile.nlist + 1),
        fit_accesses=shares(fit),
        held_accesses=shares(held),
        fit_work=shares(fit * nbytes),
        held_work=shares(held * nbytes),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HitRateCheck:
    """Batch-minimum hit rates: predicted from one half of the held-back queries, measured on the other.

    Neither half chose the hot order.
    """

    model: HitRateName
    #: (m,) and (p,) coverages, fractions of lists.
    line_coverage: F64
    mark_coverage: F64
    #: Batch size -> (m,) predictions by ``model`` and by the Beta model.
    predicted: Mapping[int, F64]
    beta: Mapping[int, F64]
    #: Batch size -> (p,) averages over random batches, and both models' predictions at the same coverages.
    measured: Mapping[int, F64]
    predicted_at_marks: Mapping[int, F64]
    beta_at_marks: Mapping[int, F64]
    n_predict: int
    n_measure: int
    #: Batch sizes that the measured half is too small for.
    left_out: tuple[int, ...]

    def errors(self, predicted: Mapping[int, F64]) -> F64:
        """Absolute errors over all marks and batch sizes."""
        return np.concatenate([np.abs(predicted[b] - self.measured[b]) for b in self.measured])


def hit_rate_check(
    analysis: Analysis,
    *,
    batches: Sequence[int] = DEFAULT_BATCHES,
    marks: Sequence[float] = DEFAULT_COVERAGES,
    draws: int = 400,
    seed: int = 0,
) -> HitRateCheck | None:
    """``None`` when there are too few held-back queries to split."""
    profile = analysis.profile
    probes = profile.access.held_probes
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(probes.shape[0])

    def curve_of(rows: I64) -> CoverageCurve:
        access = dataclasses.replace(profile.access, held_probes=probes[rows])
        return build_coverage_curve(dataclasses.replace(profile, access=access))

    half = shuffled.size // 2
    try:
        own, other = curve_of(shuffled[:half]), curve_of(shuffled[half:])
    except ProfileError:
        return None
    usable = [b for b in batches if 2 * b <= other.n_held]
    if not usable:
        return None
    name = analysis.hit_rates.best
    lines = np.unique(np.round(np.linspace(0, profile.nlist, 41)).astype(np.int64))
    points = np.unique([max(1, round(c * profile.nlist)) for c in marks])
    drawn = {b: np.stack([rng.choice(other.n_held, b, replace=False) for _ in range(draws)]) for b in usable}
    rates = [other.at(int(c)).hit_rate for c in points]

    def predictions(counts: I64, model: HitRateName) -> dict[int, F64]:
        return {b: np.array([expected_min_hit_rate(own, int(c), b, model) for c in counts]) for b in usable}

    return HitRateCheck(
        model=name,
        line_coverage=lines / profile.nlist,
        mark_coverage=points / profile.nlist,
        predicted=predictions(lines, name),
        beta=predictions(lines, "beta"),
        # Batches of one: every query once, without drawing.
        measured={
            b: np.array([float(r.mean() if b == 1 else r[drawn[b]].min(axis=1).mean()) for r in rates]) for b in usable
        },
        predicted_at_marks=predictions(points, name),
        beta_at_marks=predictions(points, "beta"),
        n_predict=own.n_held,
        n_measure=other.n_held,
        left_out=tuple(b for b in batches if b not in usable),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageFit:
    """One host stage over batch sizes: timed samples, and the fit inside and beyond the measured range."""

    #: (s,) each.
    sample_batch: F64
    sample_s: F64
    #: (m,) each, ascending, going beyond ``measured_to``.
    batch: F64
    fit_s: F64
    measured_to: float


#: The term of a stage.
_SECONDS: Mapping[str, Callable[[LatencyParts], F64 | float]] = {
    "coarse": lambda parts: parts.coarse_s,
    "host_scan": lambda parts: parts.host_s,
    "rerank": lambda parts: parts.rerank_s,
}


def stage_fit(analysis: Analysis, stage: str, *, beyond: float = 4.0) -> StageFit | None:
    """``stage`` is "coarse", or "host_scan" or "rerank" with no resident list, on the host; ``None`` where it was not
    timed. With all rows in memory, as they were."""
    in_memory = analysis.configured(page_bytes=analysis.curve.geometry.page_bytes, n_devices=analysis.latency.n_devices)
    latency, curve = in_memory.latency, in_memory.curve
    stages = analysis.profile.stages
    samples = [s for s in stages if s.stage == stage and s.coverage == 0 and not s.device and s.batch > 0]
    if not samples or (stage == "coarse" and latency.coarse is None):
        return None
    top = max(s.batch for s in samples)
    inside = np.geomspace(min(s.batch for s in samples), top, 33)
    batch: F64 = np.unique(np.round(np.concatenate((inside, np.geomspace(top, beyond * top, 12))))).astype(np.float64)
    parts = [latency.parts(curve, curve.at(0), int(b)) for b in batch]
    return StageFit(
        sample_batch=np.array([s.batch for s in samples], dtype=np.float64),
        sample_s=np.array([s.seconds for s in samples]),
        batch=batch,
        fit_s=np.array([float(np.median(_SECONDS[stage](p))) for p in parts]),
        measured_to=float(top),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimingCheck:
    """Predicted beside measured seconds of the same runs: (m,) float64 each."""

    predicted_s: F64
    measured_s: F64
    coverage: F64
    batch: F64

    @property
    def relative_errors(self) -> F64:
        return np.abs(self.predicted_s - self.measured_s) / self.measured_s

    @property
    def within_band(self) -> float:
        """Fraction of runs whose measured time lies within 20 % of the prediction."""
        return float((np.abs(self.measured_s / np.maximum(self.predicted_s, 1e-12) - 1.0) <= 0.2).mean())


def scan_check(analysis: Analysis) -> TimingCheck | None:
    """Host scans that skip resident lists: the fitted model against each timed run, with the run's own work."""
    samples = _positive([s for s in analysis.profile.stages if s.stage == "host_scan" and s.coverage > 0])
    if not samples:
        return None
    work, seconds = host_scan_work(samples, analysis.profile.nprobe)
    return _check(samples, analysis.latency.host.model.predict(work), seconds)


def batch_check(analysis: Analysis) -> TimingCheck | None:
    """Whole routed batches: the predicted median against each timed run."""
    samples = _positive([s for s in analysis.profile.stages if s.stage == "batch"])
    if not samples:
        return None
    curve, nlist = analysis.curve, analysis.profile.nlist
    known: dict[tuple[int, int], float] = {}
    for s in samples:
        key = (min(round(s.coverage * nlist), nlist), s.batch)
        if key not in known:
            known[key] = analysis.latency.quantile(curve, curve.at(key[0]), s.batch, 50.0)
    predicted = np.array([known[min(round(s.coverage * nlist), nlist), s.batch] for s in samples])
    return _check(samples, predicted, np.array([s.seconds for s in samples]))


def _positive(samples: list[StageSample]) -> list[StageSample]:
    return [s for s in samples if s.batch > 0 and s.seconds > 0]


def _check(samples: list[StageSample], predicted: F64, seconds: F64) -> TimingCheck:
    return TimingCheck(
        predicted_s=predicted,
        measured_s=seconds,
        coverage=np.array([s.coverage for s in samples]),
        batch=np.array([s.batch for s in samples], dtype=np.float64),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SloNeed:
    """Device bytes that each SLO takes with unlimited memory, and what the budget allows."""

    #: SLOs that can be met, ascending; empty when none in the range can.
    points: tuple[SloPoint, ...]
    #: The range to show: from SLOs that no memory can meet to those that the host meets alone, with the plan's SLO.
    low_ms: float
    high_ms: float
    #: Most bytes that the devices can hold, scratch included.
    limit_bytes: int
    #: Smallest SLO of the curve that the budget allows; ``None`` when it allows none.
    smallest_slo_ms: float | None


def slo_need(plan: Plan, points: int = 49) -> SloNeed:
    """Solve again for SLOs around the plan's, more densely where the answer changes."""
    request, curve = plan.request, plan.analysis.curve
    page = curve.geometry.page_bytes
    capacity = request.capacity_pages(page)
    limit = sum(c * page + s for c, s in zip(capacity, request.scratch, strict=True) if c > 0)
    room = int(curve.prefix_pages[-1]) * page
    unlimited = dataclasses.replace(
        request, budgets=tuple(room + s + page for s in request.scratch), page_bytes=plan.page_bytes
    )

    def solved(slo_ms: float) -> SloPoint:
        return slo_curve(plan.analysis, unlimited, [slo_ms])[0]

    wide = np.geomspace(request.slo_ms / 64, request.slo_ms * 64, 25)
    # A larger SLO never needs more bytes, so bisection finds both ends of the curve. Infeasible solves are slow.
    first = _first(wide, lambda slo_ms: solved(slo_ms).verdict == "feasible")
    if first is None:
        return SloNeed(
            points=(), low_ms=request.slo_ms / 4, high_ms=request.slo_ms * 4, limit_bytes=limit, smallest_slo_ms=None
        )
    alone = _first(wide, lambda slo_ms: (p := solved(slo_ms)).verdict == "feasible" and p.device_bytes == 0)
    below = float(wide[max(first - 1, 0)])
    top = float(wide[alone if alone is not None else -1])
    dense = np.geomspace(below, max(top, below), points)
    high = max(top, request.slo_ms) * 1.3
    slos = np.unique(np.concatenate((dense, [high], [request.slo_ms] if request.slo_ms >= below else [])))
    met = [p for p in slo_curve(plan.analysis, unlimited, slos.tolist()) if p.verdict == "feasible"]
    allowed = [p.slo_ms for p in met if p.device_bytes <= limit]
    return SloNeed(
        points=tuple(met),
        low_ms=min(met[0].slo_ms / 1.4, request.slo_ms / 1.3),
        high_ms=high,
        limit_bytes=limit,
        smallest_slo_ms=min(allowed) if allowed else None,
    )


def _first(ascending: F64, holds: Callable[[float], bool]) -> int | None:
    """Index of the first value for which ``holds``, if it then holds for all larger ones; None where it never does."""
    if not holds(float(ascending[-1])):
        return None
    low, high = -1, ascending.size - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(float(ascending[middle])) else (middle, high)
    return high
