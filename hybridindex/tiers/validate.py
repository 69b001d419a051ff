"""Argument checks shared by all scanners: an error before anything is read."""

from __future__ import annotations

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.types import F32, I64

__all__ = ["MAX_K", "check_scan"]

#: faiss-gpu's own limit; one limit for every tier keeps answers independent of placement.
MAX_K = 2048


def check_scan(queries: F32, probes: I64, coarse_distances: F32, k: int, *, dim: int, nlist: int) -> None:
    """Checks the arguments of :meth:`hybridindex.tiers.protocol.Scanner.scan`.

    Raises:
        InvalidInputError: names the argument, what it is and what it should be.
    """
    if not 1 <= k <= MAX_K:
        raise InvalidInputError(f"k is {k}; expected 1..{MAX_K}")
    if queries.ndim != 2 or queries.shape[1] != dim or queries.dtype != np.float32:
        raise InvalidInputError(f"queries are {queries.dtype} {queries.shape}; expected float32 (n, {dim})")
    if probes.ndim != 2 or len(probes) != len(queries) or probes.dtype != np.int64:
        raise InvalidInputError(f"probes are {probes.dtype} {probes.shape}; expected int64 ({len(queries)}, p)")
    if coarse_distances.shape != probes.shape or coarse_distances.dtype != np.float32:
        raise InvalidInputError(
            f"coarse_distances are {coarse_distances.dtype} {coarse_distances.shape}; expected float32 {probes.shape}"
        )
    if probes.size:
        low, high = int(probes.min()), int(probes.max())
        if low < -1 or high >= nlist:
            bad = low if low < -1 else high
            raise InvalidInputError(f"probes hold list id {bad}; expected -1 (skip) or 0..{nlist - 1}")
