"""Minima, maxima, sums and unions of batches that are drawn from a sample of queries.

Batches are drawn *without* replacement: then every figure is an unbiased estimate for batches of the whole population.
With replacement the minimum of a large batch from a small sample would be too high.
"""

from __future__ import annotations

import numpy as np
import scipy

from hybridindex.types import F64, I64

__all__ = ["avoid_probability", "expected_min", "window_max", "window_starts", "window_sum"]


def avoid_probability(n: int, batch: int) -> F64:
    """(n + 1,) float64: probability that ``batch`` of ``n`` queries contain none of k = 0..n given ones.

    C(n-k, batch) / C(n, batch). A batch larger than the sample counts as the whole sample.
    """
    b = min(batch, n)
    k = np.arange(n, dtype=np.float64)
    steps = np.maximum(n - k - b, 0.0) / (n - k)
    return np.concatenate(([1.0], np.cumprod(steps)))


def expected_min(ascending: F64, batch: int) -> float:
    """Mean of the smallest of ``batch`` values drawn from ``ascending`` (n,), exactly, over all possible batches.

    The survival form of VectorLiteRAG's Eq. 2 for an empirical distribution: sum of gaps times P(minimum is above).
    """
    survival = avoid_probability(ascending.size, batch)
    gaps = np.diff(ascending)
    return float(ascending[0] + gaps @ survival[1:-1])


def window_starts(n: int, limit: int = 512) -> I64:
    """Starts of at most ``limit`` cyclic windows, evenly spread over ``n`` randomly ordered queries."""
    if n <= limit:
        return np.arange(n, dtype=np.int64)
    return (np.arange(limit, dtype=np.int64) * n) // limit


def window_sum(values: F64, batch: int, starts: I64) -> F64:
    """Sums over cyclic windows of ``batch`` values. Exact for integral values below 2**53."""
    n = values.size
    if batch * starts.size <= 2 * n and batch < n:
        return np.asarray(_windows(values, batch, starts).sum(axis=0), dtype=np.float64)
    cumulative = np.concatenate(([0.0], np.cumsum(values)))
    rounds, rest = divmod(batch, n)
    ends = starts + rest
    wrapped = ends > n
    part = cumulative[np.where(wrapped, ends - n, ends)] - cumulative[starts] + np.where(wrapped, cumulative[n], 0.0)
    return np.asarray(rounds * cumulative[n] + part, dtype=np.float64)


def window_max(values: F64, batch: int, starts: I64) -> F64:
    """Maxima over the same windows as :func:`window_sum`."""
    n = values.size
    if batch == 1:
        return values[starts]
    if batch >= n:
        return np.full(starts.size, values.max())
    if batch * starts.size <= 4 * n:
        return np.asarray(_windows(values, batch, starts).max(axis=0), dtype=np.float64)
    centred = scipy.ndimage.maximum_filter1d(values, batch, mode="wrap")
    return np.asarray(centred[(starts + batch // 2) % n], dtype=np.float64)


def _windows(values: F64, batch: int, starts: I64) -> F64:
    """(batch, windows) values; cheaper than a pass over all values while windows are few and short."""
    at = np.arange(batch, dtype=np.int64)[:, None] + starts
    return values.take(at, mode="wrap")
