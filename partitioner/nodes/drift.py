"""Whether queries ask for other lists than those that a placement on nodes was made for. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridindex.partitioner.nodes.cover import U64
from hybridindex.partitioner.nodes.node_plan import NodePlan, NodeRequest
from hybridindex.partitioner.nodes.placement import foreseen, place_lists, split_sample
from hybridindex.types import F64, I64

__all__ = ["Drift", "judge_drift"]

#: Queries that a judgement needs, and what moving lists has to bring: part of a query's work that becomes local.
_LEAST_QUERIES, _LEAST_GAIN = 200, 0.05


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drift:
    """What recent queries say of a placement."""

    n_queries: int
    #: (nlist,) float64 bytes that each of these scans of each list, in the mean.
    work: F64
    #: Local share of recent queries now; and of the best plan for them, which is None where there are too few.
    local_share: float | None = None
    plan: NodePlan | None = None

    @property
    def pays(self) -> bool:
        """Whether lists should move."""
        if self.plan is None or self.plan.local_share is None or self.local_share is None:
            return False
        return self.plan.local_share - self.local_share >= _LEAST_GAIN


def judge_drift(list_bytes: I64, scanned_bytes: I64, holders: U64, request: NodeRequest, probes: I64) -> Drift:
    """Judges by recent queries.

    Args:
        list_bytes: (nlist,) int64 bytes of each list on a node.
        scanned_bytes: (nlist,) int64 bytes of each list that a search scans.
        holders: (nlist,) uint64, bit j: node j holds the list now.
        probes: (q, p) int64 lists that they probe, -1 = skip. Every second query is held back to predict.

    Raises:
        InvalidInputError: as :func:`hybridindex.partitioner.nodes.placement.place_lists`.
    """
    counts = np.bincount(probes[probes >= 0], minlength=len(list_bytes))
    work = counts * scanned_bytes / max(1, len(probes))
    if len(probes) < _LEAST_QUERIES:
        return Drift(n_queries=len(probes), work=work)
    _, held = split_sample(probes)
    now = foreseen(NodePlan(request=request, list_bytes=list_bytes, work=work, holders=holders), held)
    plan = place_lists(list_bytes, work, request, current=holders, probes=probes)
    return Drift(n_queries=len(probes), work=work, local_share=now.local_share, plan=plan)
