"""Rows that no other row beats in every column. Small is good."""

from __future__ import annotations

import numpy as np

from hybridindex.types import F64, I64

__all__ = ["undominated"]

_BLOCK = 256


def undominated(rows: F64) -> I64:
    """Indices of (n, m) ``rows`` such that no other row is at most as large in all columns; of equal rows the first.

    Exact; n times the size of the answer comparisons.
    """
    order = np.lexsort(rows.T[::-1])
    kept = np.empty((0, rows.shape[1]))
    indices: list[I64] = []
    # A row is only beaten by rows that sort before it.
    for start in range(0, len(order), _BLOCK):
        at = order[start : start + _BLOCK]
        block = rows[at]
        if len(kept):
            beaten = np.zeros(len(block), dtype=bool)
            for some in range(0, len(kept), _BLOCK):
                left = ~beaten
                if not left.any():
                    break
                beaten[left] = (kept[some : some + _BLOCK, None] <= block[left][None]).all(2).any(0)
            at, block = at[~beaten], block[~beaten]
        if not len(block):
            continue
        among = (block[:, None] <= block[None]).all(2)
        among &= ~np.tri(len(block), dtype=bool).T  # only earlier rows count; of equal ones the first stays
        stays = ~among.any(0)
        indices.append(at[stays])
        kept = np.concatenate([kept, block[stays]])
    return np.concatenate(indices) if indices else np.empty(0, dtype=np.int64)
