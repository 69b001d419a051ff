"""Which node a client asks: one that holds what the query probes, and of several the one with the least to do. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from hybridindex.types import F32, F64, I64

__all__ = ["LOCAL_WORTH", "nearest_nodes", "remote_costs"]

#: Searches that a node which holds all that a query probes may have under way beyond those of one that holds none.
LOCAL_WORTH: Final = 4


def remote_costs(local: F32 | F64) -> I64:
    """What it costs that nodes hold parts ``local`` of what queries probe, in searches under way: int64 of that shape.
    Nodes that hold nearly as much cost the same, and share the work."""
    return np.rint(LOCAL_WORTH * (1 - local)).astype(np.int64)


def nearest_nodes(local: F32 | F64) -> I64:
    """(n,) int64 nodes that clients ask, of nodes that all have as much to do.

    Args:
        local: (n, n_nodes) part of the bytes of each query on each node. Of nodes that cost the same, each is
            asked in its turn.
    """
    n, n_nodes = local.shape
    places = (np.arange(n_nodes) - np.arange(n)[:, None]) % n_nodes
    found: I64 = (remote_costs(local) * n_nodes + places).argmin(axis=1)
    return found
