"""Where a scanner found a row: list id << 32 | row in the list. The host turns positions into ids."""

from __future__ import annotations

import numpy as np

from hybridindex.index.ivf import IVFIndex
from hybridindex.types import I64

__all__ = ["POSITION_BITS", "ids_of_positions"]

POSITION_BITS = 32
_ROW_MASK = (1 << POSITION_BITS) - 1


def ids_of_positions(index: IVFIndex, positions: I64, *, complete: bool = False) -> I64:
    """Ids of positions, same shape; -1 stays -1. ``complete``: there is none."""
    if complete:
        return index.ids_at(positions >> POSITION_BITS, positions & _ROW_MASK)
    ids = np.full(positions.shape, -1, dtype=np.int64)
    found = positions >= 0
    ids[found] = index.ids_at(positions[found] >> POSITION_BITS, positions[found] & _ROW_MASK)
    return ids
