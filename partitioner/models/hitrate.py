"""Distributions of the per-query hit rate, and the smallest hit rate of a batch.

Three models: Beta (VectorLiteRAG IV-A2), the empirical order statistic, and a Beta-binomial for small nprobe. A point
mass replaces a Beta that is undefined. :mod:`hybridindex.partitioner.models.validate_hitrate` chooses one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import scipy

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.models import order_stats
from hybridindex.partitioner.models.coverage import CoverageCurve, QueryWork
from hybridindex.types import F64

__all__ = [
    "MODEL_NAMES",
    "BetaBinomialHitRate",
    "BetaHitRate",
    "EmpiricalHitRate",
    "HitRateDistribution",
    "HitRateName",
    "PointHitRate",
    "beta_binomial_hit_rate",
    "beta_hit_rate",
    "distribution",
    "expected_min_hit_rate",
    "hit_rate_to_coverage",
    "modelled",
]

HitRateName = Literal["beta", "empirical", "beta_binomial"]
MODEL_NAMES: tuple[HitRateName, ...] = ("beta", "empirical", "beta_binomial")

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(96)
_TAIL = 1e-10
#: A larger nu counts as a point mass: the inverse CDF of the Beta loses digits there. A smaller one as all or nothing.
_MAX_NU, _MIN_NU = 1e7, 1e-9
#: Points at which the inverse CDF of a Beta is computed.
_KNOTS = 129


class HitRateDistribution(Protocol):
    """Hit rate of one query at one coverage."""

    @property
    def mean(self) -> float: ...

    @property
    def variance(self) -> float: ...

    def cdf(self, x: npt.ArrayLike) -> F64:
        """P(hit rate <= x), same shape as ``x``."""

    def quantiles(self, n: int) -> F64:
        """(n,) hit rates, ascending, at the middles of n equally likely ranges."""

    def expected_min(self, batch: int) -> float:
        """Mean of the smallest hit rate of ``batch`` queries: integral of (1 - F(x))^batch over [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointHitRate:
    """Every query has the same hit rate: no variance, or a mean of exactly 0 or 1."""

    mean: float

    @property
    def variance(self) -> float:
        return 0.0

    def cdf(self, x: npt.ArrayLike) -> F64:
        return np.asarray(np.asarray(x, dtype=np.float64) >= self.mean, dtype=np.float64)

    def quantiles(self, n: int) -> F64:
        return np.full(n, self.mean)

    def expected_min(self, batch: int) -> float:
        _check_batch(batch)
        return self.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class BetaHitRate:
    """Beta(alpha = m nu, beta = (1 - m) nu)."""

    mean: float
    nu: float

    @property
    def variance(self) -> float:
        return self.mean * (1.0 - self.mean) / (self.nu + 1.0)

    @property
    def alpha(self) -> float:
        return self.mean * self.nu

    @property
    def beta(self) -> float:
        return (1.0 - self.mean) * self.nu

    def cdf(self, x: npt.ArrayLike) -> F64:
        at = np.clip(np.asarray(x, dtype=np.float64), 0.0, 1.0)
        return np.asarray(scipy.special.betainc(self.alpha, self.beta, at), dtype=np.float64)

    def quantiles(self, n: int) -> F64:
        # The inverse costs microseconds a point: interpolated between knots that are dense at both ends.
        t = np.linspace(0.0, 1.0, _KNOTS)
        knots = 0.5 / n + (1.0 - 1.0 / n) * t**3 * (10.0 - 15.0 * t + 6.0 * t**2)
        at = (np.arange(n) + 0.5) / n
        return np.asarray(
            np.interp(at, knots, scipy.special.betaincinv(self.alpha, self.beta, knots)), dtype=np.float64
        )

    def expected_min(self, batch: int) -> float:
        _check_batch(batch)
        # All mass lies between these two. Nodes there resolve narrow and U-shaped distributions.
        lo = float(scipy.special.betaincinv(self.alpha, self.beta, _TAIL / batch))
        hi = float(scipy.special.betaincinv(self.alpha, self.beta, -math.expm1(math.log(_TAIL) / batch)))
        t = (_NODES + 1.0) / 2.0
        # Quintic smoothstep: places more nodes at both ends, where a U-shaped CDF bends.
        x = lo + (hi - lo) * t**3 * (10.0 - 15.0 * t + 6.0 * t**2)
        dx = (hi - lo) * 30.0 * t**2 * (1.0 - t) ** 2 * _WEIGHTS / 2.0
        survival = scipy.special.betaincc(self.alpha, self.beta, x) ** batch
        return float(min(lo + survival @ dx, self.mean))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmpiricalHitRate:
    """The hit rates of the held-back queries; batches are drawn from them without replacement."""

    #: (n,) float64 hit rates, ascending.
    ascending: F64

    @property
    def mean(self) -> float:
        return float(self.ascending.mean())

    @property
    def variance(self) -> float:
        return float(self.ascending.var())

    def cdf(self, x: npt.ArrayLike) -> F64:
        below = np.searchsorted(self.ascending, np.asarray(x, dtype=np.float64), side="right")
        return np.asarray(below / self.ascending.size, dtype=np.float64)

    def quantiles(self, n: int) -> F64:
        at = (np.arange(n) * self.ascending.size + self.ascending.size // 2) // n
        return np.asarray(self.ascending[at], dtype=np.float64)

    def expected_min(self, batch: int) -> float:
        _check_batch(batch)
        return order_stats.expected_min(self.ascending, batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class BetaBinomialHitRate:
    """``trials`` equally heavy probes, each a hit with a Beta-distributed probability."""

    mean: float
    trials: int
    #: Concentration of the Beta; ``inf``: a plain binomial.
    nu: float

    @property
    def variance(self) -> float:
        spread = 1.0 / (self.nu + 1.0)
        return self.mean * (1.0 - self.mean) * (1.0 + (self.trials - 1) * spread) / self.trials

    def _pmf(self) -> F64:
        n, k = self.trials, np.arange(self.trials + 1, dtype=np.float64)
        choose = scipy.special.gammaln(n + 1) - scipy.special.gammaln(k + 1) - scipy.special.gammaln(n - k + 1)
        if math.isinf(self.nu):
            log = choose + scipy.special.xlogy(k, self.mean) + scipy.special.xlog1py(n - k, -self.mean)
        else:
            a, b = self.mean * self.nu, (1.0 - self.mean) * self.nu
            log = choose + scipy.special.betaln(k + a, n - k + b) - scipy.special.betaln(a, b)
        pmf = np.exp(log)
        return np.asarray(pmf / pmf.sum(), dtype=np.float64)

    def _survival(self) -> F64:
        """(trials,) P(hits >= 1), ..., P(hits >= trials)."""
        pmf = self._pmf()
        return np.asarray(np.clip(np.cumsum(pmf[::-1])[::-1][1:], 0.0, 1.0), dtype=np.float64)

    def cdf(self, x: npt.ArrayLike) -> F64:
        hits = np.floor(np.asarray(x, dtype=np.float64) * self.trials + 1e-9).astype(np.int64)
        steps = np.concatenate(([0.0], np.cumsum(self._pmf())))
        return np.asarray(np.minimum(steps[np.clip(hits + 1, 0, self.trials + 1)], 1.0), dtype=np.float64)

    def quantiles(self, n: int) -> F64:
        hits = np.searchsorted(np.cumsum(self._pmf()), (np.arange(n) + 0.5) / n)
        return np.asarray(np.minimum(hits, self.trials) / self.trials, dtype=np.float64)

    def expected_min(self, batch: int) -> float:
        _check_batch(batch)
        return float(min((self._survival() ** batch).sum() / self.trials, self.mean))


def beta_hit_rate(mean: float, sigma2_max: float) -> BetaHitRate | BetaBinomialHitRate | PointHitRate:
    """Beta with mean m and variance 4 sigma2_max m (1 - m): nu = 1 / (4 sigma2_max) - 1.

    Where the Beta is undefined, what it tends to: a point mass for a mean of 0 or 1 or without variance, and all or
    nothing for a ``sigma2_max`` of 1/4, as of queries that probe one list.
    """
    m = min(max(mean, 0.0), 1.0)
    if not sigma2_max > 0.0 or not 1e-9 < m < 1.0 - 1e-9:
        return PointHitRate(mean=m)
    nu = 1.0 / (4.0 * sigma2_max) - 1.0
    if nu <= _MIN_NU:
        return BetaBinomialHitRate(mean=m, trials=1, nu=math.inf)
    return BetaHitRate(mean=m, nu=nu) if nu < _MAX_NU else PointHitRate(mean=m)


def beta_binomial_hit_rate(
    mean: float, sigma2_max: float, effective_probes: float
) -> BetaBinomialHitRate | PointHitRate:
    """Beta-binomial with the variance 4 sigma2_max m (1 - m) over ``effective_probes`` equally heavy probes."""
    m = min(max(mean, 0.0), 1.0)
    if not sigma2_max > 0.0 or not 1e-9 < m < 1.0 - 1e-9:
        return PointHitRate(mean=m)
    trials = max(1, round(effective_probes)) if sigma2_max < 0.25 else 1
    # 4 sigma2_max = (1 + (n - 1) s) / n with s = 1 / (nu + 1). Below the binomial's variance: the binomial.
    spread = (4.0 * sigma2_max * trials - 1.0) / (trials - 1) if trials > 1 else 0.0
    nu = math.inf if spread <= 1e-9 else max(1.0 / spread - 1.0, 1e-9)
    return BetaBinomialHitRate(mean=m, trials=trials, nu=nu)


def distribution(curve: CoverageCurve, work: QueryWork, name: HitRateName) -> HitRateDistribution:
    """Model ``name`` of the hit rate by bytes when ``work``'s lists are resident."""
    rates = work.hit_rate
    if name == "empirical":
        return EmpiricalHitRate(ascending=np.sort(rates))
    if name == "beta":
        return beta_hit_rate(float(rates.mean()), curve.sigma2_max)
    return beta_binomial_hit_rate(float(rates.mean()), curve.sigma2_max, curve.effective_probes)


def modelled(curve: CoverageCurve, work: QueryWork, name: HitRateName) -> QueryWork:
    """``work`` with the hit rates that model ``name`` gives the held-back queries, in their order.

    The query with the i-th lowest hit rate gets the model's i-th quantile, scaled so that bytes and probes that hit
    keep their sums. Where the model gives no query a hit, and where it is the empirical one, nothing changes.
    """
    if name == "empirical":
        return work
    rates = work.hit_rate
    hit_rate = np.empty_like(rates)
    hit_rate[np.argsort(rates, kind="stable")] = distribution(curve, work, name).quantiles(rates.size)

    def hits(every: F64, measured: F64) -> F64:
        told = hit_rate * every
        total = float(told.sum())
        if not total > 0.0:
            return measured
        scaled = told * (measured.sum() / total)
        return np.asarray(np.minimum(scaled, every), dtype=np.float64)

    return replace(work, hit_work=hits(work.work, work.hit_work), hit_probes=hits(work.probes, work.hit_probes))


def expected_min_hit_rate(curve: CoverageCurve, count: int, batch: int, name: HitRateName = "empirical") -> float:
    """E[smallest hit rate of ``batch`` queries] with the first ``count`` lists of the hot order resident (Eq. 2)."""
    return distribution(curve, curve.at(count), name).expected_min(batch)


def hit_rate_to_coverage(curve: CoverageCurve, batch: int, eta: float, name: HitRateName = "empirical") -> float | None:
    """Smallest coverage (fraction of lists) whose expected batch-minimum hit rate is at least ``eta``.

    VectorLiteRAG's HitRate2Coverage. ``eta`` <= 0 needs nothing: 0. ``None``: full coverage gives less than ``eta``.
    """
    _check_batch(batch)
    if not math.isfinite(eta):
        raise InvalidInputError(f"eta is {eta}; give a finite hit rate")
    if eta <= 0.0:
        return 0.0
    if expected_min_hit_rate(curve, curve.nlist, batch, name) < eta - 1e-12:
        return None
    lo, hi = 0, int(curve.grid.size) - 1  # grid points: lo misses eta, hi reaches it
    while hi - lo > 1:
        mid = (lo + hi) // 2
        reached = expected_min_hit_rate(curve, int(curve.grid[mid]), batch, name) >= eta - 1e-12
        lo, hi = (lo, mid) if reached else (mid, hi)
    low, high = int(curve.grid[lo]), int(curve.grid[hi])
    while high - low > 1:
        count = (low + high) // 2
        reached = expected_min_hit_rate(curve, count, batch, name) >= eta - 1e-12
        low, high = (low, count) if reached else (count, high)
    return high / curve.nlist


def _check_batch(batch: int) -> None:
    if batch < 1:
        raise InvalidInputError(f"batch is {batch}; a batch has at least 1 query")
