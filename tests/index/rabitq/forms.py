"""Formats and data of the tests of codes."""

from __future__ import annotations

import numpy as np

from hybridindex.index.rabitq.rotation import signs
from hybridindex.index.rabitq.spec import ROUNDS, CodeFormat, pad_dim
from hybridindex.types import F32, Metric

DIMS = (1, 3, 17, 32, 100, 384)


def form(dim: int, *, bits: int = 1, metric: Metric = "ip", f_scale: float = 2.0**-8, g_scale: float = 2.0**-6):
    return CodeFormat(
        bits=bits,
        dim=dim,
        padded_dim=pad_dim(dim),
        metric=metric,
        seed=7,
        rounds=ROUNDS,
        f_scale=f_scale,
        g_scale=g_scale,
    )


def list_of(n: int, dim: int, seed: int = 0) -> tuple[F32, F32, F32]:
    """Rows (n, dim) around a centroid (dim,), and the rotation's signs."""
    rng = np.random.default_rng(seed)
    centroid = rng.standard_normal(dim).astype(np.float32)
    rows = centroid + rng.standard_normal((n, dim)).astype(np.float32) / 2
    return rows.astype(np.float32), centroid, signs(pad_dim(dim), 7)
