"""Rows that no other row beats in every column; smaller is better."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybridindex.types import F64, I64

__all__ = ["undominated"]

#: Rows compared at once, so that the comparisons stay in cache.
_BLOCK = 256


def undominated(rows: F64) -> I64:
    """Indices of those of ``rows`` (n, m) for which no other row is at most as large in all columns; of equal rows the
    first. Exact; takes n times the size of the answer comparisons.
    """
    order = np.lexsort(rows.T[::-1])
    kept = np.empty((rows.shape[1], 0))
    indices: list[I64] = []
    # Only rows that sort before a row can beat it.
    for start in range(0, len(order), _BLOCK):
        at = order[start : start + _BLOCK]
        block = np.ascontiguousarray(rows[at].T)
        for some in range(0, kept.shape[1], _BLOCK):
            if not at.size:
                break
            stays = ~_at_most(kept[:, some : some + _BLOCK], block).any(0)
            at, block = at[stays], block[:, stays]
        if not at.size:
            continue
        # Compare with earlier rows of the block only; of equal ones the first stays.
        stays = ~np.triu(_at_most(block, block), 1).any(0)
        indices.append(at[stays])
        kept = np.concatenate([kept, block[:, stays]], axis=1)
    return np.concatenate(indices) if indices else np.empty(0, dtype=np.int64)


def _at_most(these: F64, those: F64) -> npt.NDArray[np.bool_]:
    """(a, b) bool of (m, a) and (m, b): at most as large in every column."""
    found = np.ones((these.shape[1], those.shape[1]), dtype=np.bool_)
    for one, other in zip(these, those, strict=True):
        found &= one[:, None] <= other
    return found
