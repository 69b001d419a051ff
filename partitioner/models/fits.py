"""Continuous, monotone, piecewise-linear fits of repeated timings.

Covers latency as a function of one count (batch size). Does not cover what the count means, nor models with several
regressors (:mod:`hybridindex.partitioner.models.scan_models`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import scipy

from hybridindex.errors import InvalidInputError
from hybridindex.types import F64

__all__ = ["PiecewiseLinear", "fit_piecewise_linear", "ratio_levels"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PiecewiseLinear:
    """A continuous non-decreasing function given by its knots.

    Constant below the first knot. Beyond the last one the last rising slope continues, and :meth:`extrapolated` is
    true. With one knot the function is proportional to x beyond it.
    """

    #: (m,) float64, strictly increasing.
    knots: F64
    #: (m,) float64, non-decreasing, same length.
    values: F64

    @property
    def last_slope(self) -> float:
        """Slope beyond the last knot, never negative: from the last knot with a smaller value to the last knot.

        Noise pools the last knots into a flat step. A flat end would predict that any larger batch costs nothing.
        """
        x, y = self.knots, self.values
        if x.size == 1:
            return float(y[0] / x[0]) if x[0] > 0 else 0.0
        lower = np.flatnonzero(y < y[-1])
        if lower.size == 0:
            return 0.0
        j = int(lower[-1])
        return float((y[-1] - y[j]) / (x[-1] - x[j]))

    def predict(self, x: npt.ArrayLike) -> F64:
        """Values at ``x`` (any shape), same shape, float64."""
        at = np.asarray(x, dtype=np.float64)
        inside = np.interp(at, self.knots, self.values)
        return np.asarray(inside + np.maximum(at - self.knots[-1], 0.0) * self.last_slope, dtype=np.float64)

    def scaled(self, factor: float) -> PiecewiseLinear:
        """All values times ``factor``."""
        return replace(self, values=self.values * factor)

    def extrapolated(self, x: float) -> bool:
        """True beyond the last sample."""
        return bool(x > self.knots[-1])


def fit_piecewise_linear(x: Sequence[float] | F64, y: Sequence[float] | F64, quantile: float = 0.5) -> PiecewiseLinear:
    """Fit repeated samples: the ``quantile`` of ``y`` at each distinct ``x``, then made monotone.

    Pooling weighs each knot by its number of repeats.

    Raises:
        InvalidInputError: no samples, lengths differ, a value is not finite, or the quantile lies outside [0, 1].
    """
    xs = np.asarray(x, dtype=np.float64).ravel()
    ys = np.asarray(y, dtype=np.float64).ravel()
    if xs.size == 0 or xs.size != ys.size:
        raise InvalidInputError(f"x has {xs.size} and y {ys.size} samples; give equally many, at least one")
    if not (np.isfinite(xs).all() and np.isfinite(ys).all()):
        raise InvalidInputError("x or y holds NaN or infinity; samples are finite")
    if not 0.0 <= quantile <= 1.0:
        raise InvalidInputError(f"quantile is {quantile}; give a value in [0, 1]")
    knots, group, repeats = np.unique(xs, return_inverse=True, return_counts=True)
    values = np.array([np.quantile(ys[group == g], quantile) for g in range(knots.size)])
    if knots.size > 1:
        values = np.asarray(
            scipy.optimize.isotonic_regression(values, weights=repeats.astype(np.float64)).x, dtype=np.float64
        )
    return PiecewiseLinear(knots=knots, values=values)


def ratio_levels(measured: F64, predicted: F64, levels: int = 16) -> F64:
    """Spread of measured/predicted as ``levels`` equally likely ratios, ascending: (levels,) float64.

    Samples without a positive prediction are left out; if none is left, every ratio is 1.
    """
    usable = predicted > 0
    if not usable.any():
        return np.ones(levels)
    ratios = measured[usable] / predicted[usable]
    return np.asarray(np.quantile(ratios, (np.arange(levels) + 0.5) / levels), dtype=np.float64)
