"""Queries whose hot set can move, over the vectors of :mod:`tests.clustered`."""

from __future__ import annotations

import numpy as np

from hybridindex.types import F32
from tests.clustered import DIM


def moving_queries(n: int, *, seed: int, moved: bool, n_centers: int = 60) -> F32:
    """(n, DIM) float32 around the centers of ``clustered``; ``moved``: the least popular are now the most popular."""
    centers = np.random.default_rng(99).standard_normal((n_centers, DIM))
    popularity = 1 / np.arange(1, n_centers + 1) ** 1.5
    if moved:
        popularity = popularity[::-1]
    rng = np.random.default_rng(seed)
    chosen = rng.choice(n_centers, size=n, p=popularity / popularity.sum())
    return (centers[chosen] + 0.4 * rng.standard_normal((n, DIM))).astype(np.float32)
