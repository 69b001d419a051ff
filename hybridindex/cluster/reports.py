"""What the manager tells of the whole cluster, for people and for clients that look for nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex.cluster.access import Access
from hybridindex.cluster.state import ClusterState
from hybridindex.partitioner.nodes.node_plan import NodePlan

__all__ = ["describe_plan", "describe_state", "problem_of"]


def describe_plan(plan: NodePlan, access: Access, state: ClusterState) -> dict[str, Any]:
    """In words and numbers."""
    return {
        "fan_out": plan.fan_out,
        "local_share": plan.local_share,
        "nearest_fan_out": plan.nearest_fan_out,
        "nearest_local_share": plan.nearest_local_share,
        "profile_id": access.profile_id,
        "code_bytes": access.code_bytes,
        "explanation": plan.explain(),
        # Another node may have come since it was made.
        "node_bytes": {entry.name: n for entry, n in zip(state.nodes, plan.node_bytes.tolist(), strict=False)},
    }


def describe_state(
    state: ClusterState, access: Access, serving: Sequence[bool], below: npt.NDArray[np.bool_] | None
) -> dict[str, Any]:
    """
    Args:
        serving: of each node of the map.
        below: (nlist,) bool lists with too few holders; None: there is no map.
    """
    map_, of = state.map, access.of if state.map is None else state.map.of
    nobody = None
    if map_ is not None:
        mask = np.uint64(sum(1 << i for i, each in enumerate(serving) if each))
        nobody = int(np.count_nonzero(map_.holders & mask == 0))
    return {
        "cluster": state.cluster,
        "index": state.index,
        "fingerprint": of.fingerprint,
        "generation": of.generation,
        "map_version": 0 if map_ is None else map_.version,
        "replicas": state.request.replicas,
        "replicate": state.request.replicate,
        "nlist": len(access.list_bytes) if map_ is None else len(map_.holders),
        "index_bytes": int(access.list_bytes.sum()),
        "lists_below_replicas": None if below is None else int(below.sum()),
        "lists_of_nobody": nobody,
    }


def problem_of(nodes: Sequence[dict[str, Any]]) -> str:
    """Of the first that refuses what it is asked; empty: none does."""
    return next((f"node {node['name']}: {node['problem']}" for node in nodes if node["state"] == "refused"), "")
