"""What changes between two placements, and a placement without lost nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.nodes.cover import U64
from hybridindex.partitioner.nodes.node_plan import NodePlan, lists_of_node
from hybridindex.partitioner.nodes.placement import choose_hot, foreseen, missing_bytes, split_sample
from hybridindex.partitioner.nodes.placing import Placing, hottest_first
from hybridindex.partitioner.nodes.sample import Sample
from hybridindex.types import I64

__all__ = ["NodeMoves", "moves", "repair"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeMoves:
    """What each node takes and drops."""

    #: Per node, (m,) int64 ascending list ids.
    take: tuple[I64, ...]
    drop: tuple[I64, ...]
    #: (n_nodes,) int64 bytes of the lists that each node takes, and of those that it drops.
    take_bytes: I64
    drop_bytes: I64

    @property
    def nbytes(self) -> int:
        """Bytes that all nodes take."""
        return int(self.take_bytes.sum())


def moves(old_holders: U64, new_holders: U64, list_bytes: I64, *, n_nodes: int | None = None) -> NodeMoves:
    """What nodes take and drop between two placements.

    Args:
        old_holders, new_holders: (nlist,) uint64.
        list_bytes: (nlist,) int64.
        n_nodes: None: up to the last node that holds a list before or after.
    """
    if n_nodes is None:
        n_nodes = int(np.bitwise_or.reduce(old_holders | new_holders, initial=np.uint64(0))).bit_length()
    take = tuple(lists_of_node(new_holders & ~old_holders, node) for node in range(n_nodes))
    drop = tuple(lists_of_node(old_holders & ~new_holders, node) for node in range(n_nodes))
    return NodeMoves(
        take=take,
        drop=drop,
        take_bytes=np.array([list_bytes[lists].sum() for lists in take], dtype=np.int64),
        drop_bytes=np.array([list_bytes[lists].sum() for lists in drop], dtype=np.int64),
    )


def repair(plan: NodePlan, lost: Iterable[int], *, probes: I64 | None = None) -> NodePlan:
    """``plan`` without ``lost`` nodes: living nodes take what has fewer than ``replicas`` holders, and keep the rest.

    Fewer lists are hot where their copies would take the room. Where memory is short nothing is refused: lists that no
    node holds come first, then the hottest; :attr:`NodePlan.below` of the new plan names those that fewer nodes hold.

    Args:
        lost: nodes, by their index.
        probes: (q, p) int64 a sample as :func:`~hybridindex.partitioner.nodes.placement.place_lists` takes it.

    Raises:
        InvalidInputError: no such node, or none is left.
    """
    gone = np.unique(np.array(list(lost), dtype=np.int64))
    if gone.size and not 0 <= gone[0] <= gone[-1] < plan.request.n_nodes:
        raise InvalidInputError(f"lost is {gone.tolist()}; give nodes from 0 to {plan.request.n_nodes - 1}")
    request = plan.request.without(gone)
    if not request.taking.size:
        raise InvalidInputError(f"lost is {gone.tolist()}: no node is left that takes lists; name fewer")
    living = dataclasses.replace(request, replicas=min(request.replicas, request.taking.size))
    fit, held = split_sample(probes)
    sample = None if fit is None else Sample(fit, plan.nlist)
    hottest = hottest_first(plan.list_bytes, plan.work)
    hot = choose_hot(plan.list_bytes, living, hottest[np.isin(hottest, plan.spread)])
    placing = Placing(plan.list_bytes, plan.work, living, hot, sample)
    placing.start(plan.holders)
    placing.drop_spare()
    nobody_first = np.argsort(placing.holders[hottest] > 0, kind="stable")
    if placing.fill(hottest[nobody_first].tolist()).size and not missing_bytes(plan.list_bytes, living):
        packed = Placing(plan.list_bytes, plan.work, living, np.zeros_like(hot), None)
        if not packed.pack().size:
            placing = packed
    placing.serve_all()
    return foreseen(dataclasses.replace(plan, request=request, holders=placing.holders), held)
