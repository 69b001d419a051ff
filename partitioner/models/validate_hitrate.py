"""Cross-validation of the hit-rate models: each predicts the batch minimum of queries that it has not seen.

A model built on one half of the held-back queries predicts E[min hit rate] on the other, both ways. "Measured" is the
mean over *all* batches of that other half (the order statistic without replacement), so the reported error does not
contain the error of drawing a few batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridindex.partitioner.models import order_stats
from hybridindex.partitioner.models.coverage import CoverageCurve, variance_at_half
from hybridindex.partitioner.models.hitrate import (
    MODEL_NAMES,
    EmpiricalHitRate,
    HitRateDistribution,
    HitRateName,
    beta_binomial_hit_rate,
    beta_hit_rate,
)
from hybridindex.types import F64, I64

__all__ = ["HitRateError", "HitRateValidation", "validate_hit_rate_models"]

DEFAULT_BATCHES = (1, 4, 16, 64)
DEFAULT_COVERAGES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRateError:
    """One prediction beside its measurement."""

    model: HitRateName
    coverage: float
    batch: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRateValidation:
    """Errors of every model on unseen queries, and the model with the smallest mean error."""

    best: HitRateName
    points: tuple[HitRateError, ...]

    def errors(self, name: HitRateName) -> F64:
        """(m,) absolute errors of one model."""
        return np.array([point.error for point in self.points if point.model == name])

    def summary(self) -> Mapping[str, tuple[float, float]]:
        """Model -> (median, worst) absolute error."""
        return {name: (float(np.median(e)), float(e.max())) for name in MODEL_NAMES if (e := self.errors(name)).size}


def validate_hit_rate_models(
    curve: CoverageCurve,
    *,
    batches: Sequence[int] = DEFAULT_BATCHES,
    coverages: Sequence[float] = DEFAULT_COVERAGES,
) -> HitRateValidation:
    """Cross-validate the hit-rate models in two halves. Batches larger than a half are left out."""
    half = curve.n_held // 2
    if half == 0:  # a single query cannot be split
        return HitRateValidation(best="empirical", points=())
    halves = (np.arange(half), np.arange(half, curve.n_held))
    counts = [max(1, round(coverage * curve.nlist)) for coverage in coverages]
    sigma2 = [_sigma2_max(curve, rows) for rows in halves]
    points: list[HitRateError] = []
    for count in counts:
        rates = curve.at(count).hit_rate
        for built, seen in ((0, 1), (1, 0)):
            own, other = rates[halves[built]], np.sort(rates[halves[seen]])
            mean = float(own.mean())
            models: dict[HitRateName, HitRateDistribution] = {
                "beta": beta_hit_rate(mean, sigma2[built]),
                "empirical": EmpiricalHitRate(ascending=np.sort(own)),
                "beta_binomial": beta_binomial_hit_rate(mean, sigma2[built], curve.effective_probes),
            }
            for batch in batches:
                if batch > half:
                    continue
                measured = order_stats.expected_min(other, batch)
                points.extend(
                    HitRateError(
                        model=name,
                        coverage=count / curve.nlist,
                        batch=batch,
                        predicted=model.expected_min(batch),
                        measured=measured,
                    )
                    for name, model in models.items()
                )
    scores = {
        name: (sum(p.error for p in points if p.model == name), place)
        for place, name in enumerate(("empirical", "beta", "beta_binomial"))
    }
    best: HitRateName = "empirical"
    for name in MODEL_NAMES:
        if scores[name] < scores[best]:
            best = name
    return HitRateValidation(best=best, points=tuple(points))


def _sigma2_max(curve: CoverageCurve, rows: I64) -> float:
    """:attr:`CoverageCurve.sigma2_max` of the held-back queries ``rows``."""
    rates = curve.hit_work[:, rows] / np.maximum(curve.hit_work[-1, rows], 1.0)
    return variance_at_half(rates.mean(axis=1), rates.var(axis=1))
