"""A plan of nodes: who holds each list, what it was decided from, and what follows from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.paging import format_bytes
from hybridindex.partitioner.nodes.cover import MOST_NODES, U64
from hybridindex.types import F64, I64

__all__ = ["NodeLoss", "NodePlan", "NodeRequest", "holders_of", "lists_of_node", "mask_of", "matrix_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRequest:
    """What nodes there are and how lists are to be spread over them."""

    #: Bytes of lists that each node may hold; 0: the node takes none.
    node_bytes: tuple[int, ...]
    #: Nodes that hold a list, at least.
    replicas: int = 2
    #: "hot": memory beyond ``replicas`` copies of the index holds the hottest lists on every node; "none": it is free.
    replicate: Literal["hot", "none"] = "hot"
    #: Most bytes of copies beyond ``replicas``, of all nodes together; None: what the memory holds.
    spread_bytes: int | None = None
    #: Bytes of the codes of all lists, which each node holds beside ``node_bytes``; 0: the index has none.
    code_bytes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= len(self.node_bytes) <= MOST_NODES:
            raise InvalidInputError(f"node_bytes names {len(self.node_bytes)} nodes; give 1 to {MOST_NODES}")
        for node, nbytes in enumerate(self.node_bytes):
            if nbytes < 0:
                raise InvalidInputError(f"node_bytes[{node}] is {nbytes}; give bytes >= 0")
        if self.replicas < 1:
            raise InvalidInputError(f"replicas is {self.replicas}; give an integer >= 1")
        if self.replicate not in ("hot", "none"):
            raise InvalidInputError(f"replicate is {self.replicate!r}; give 'hot' or 'none'")
        if self.spread_bytes is not None and self.spread_bytes < 0:
            raise InvalidInputError(f"spread_bytes is {self.spread_bytes}; give bytes >= 0, or None")

    @property
    def n_nodes(self) -> int:
        return len(self.node_bytes)

    @property
    def taking(self) -> I64:
        """(m,) int64 nodes that take lists."""
        return np.flatnonzero(np.array(self.node_bytes))

    def without(self, nodes: I64) -> NodeRequest:
        """The same, where ``nodes`` take none."""
        left = [0 if node in nodes else nbytes for node, nbytes in enumerate(self.node_bytes)]
        return dataclasses.replace(self, node_bytes=tuple(left))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """What is left without one node."""

    #: Lists that no other node holds; lists that one other node holds.
    n_none: int
    n_one: int
    #: Bytes to copy again, until each of its lists is on ``replicas`` nodes.
    copy_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodePlan:
    """Who holds each list. Holds what it was decided from, so that it can be repaired without an index or a profile."""

    request: NodeRequest
    #: (nlist,) int64 bytes of each list.
    list_bytes: I64
    #: (nlist,) float64 expected bytes that a query scans of each list.
    work: F64
    #: (nlist,) uint64, bit j: node j holds the list.
    holders: U64
    #: Nodes beside the answering one that a query asks, and the part of its bytes that the answering node scans: means
    #: over held-back queries of a sample, each answered by every node that takes lists. None without a sample.
    fan_out: float | None = None
    local_share: float | None = None
    #: The same where each is answered by the node that a client chooses (:mod:`.nearest`).
    nearest_fan_out: float | None = None
    nearest_local_share: float | None = None

    @property
    def nlist(self) -> int:
        return len(self.holders)

    @property
    def copies(self) -> I64:
        """(nlist,) int64 nodes that hold each list."""
        return np.bitwise_count(self.holders).astype(np.int64)

    @property
    def node_bytes(self) -> I64:
        """(n_nodes,) int64 bytes of lists on each node."""
        return self.list_bytes @ matrix_of(self.holders, self.request.n_nodes)

    @property
    def work_share(self) -> F64:
        """(n_nodes,) float64 part of all work that each node does, where any node answers and equal ones share."""
        each = self.work / np.maximum(self.copies, 1)
        shares: F64 = each @ matrix_of(self.holders, self.request.n_nodes)
        return shares / max(float(shares.sum()), 1e-300)

    @property
    def below(self) -> I64:
        """(m,) int64 lists that fewer than ``replicas`` nodes hold. None in a plan that was not repaired."""
        return np.flatnonzero(self.copies < self.request.replicas)

    @property
    def spread(self) -> I64:
        """(m,) int64 lists that more than ``replicas`` nodes hold: the hottest, on every node."""
        return np.flatnonzero(self.copies > self.request.replicas)

    def loss(self, node: int) -> NodeLoss:
        """What is left without ``node``."""
        lists = lists_of_node(self.holders, node)
        others = self.copies[lists] - 1
        again = lists[others < self.request.replicas]
        return NodeLoss(
            n_none=int((others == 0).sum()),
            n_one=int((others == 1).sum()),
            copy_bytes=int(self.list_bytes[again].sum()),
        )

    def explain(self) -> str:
        """A line for the whole and one for each node, in plain words."""
        request, spread, below = self.request, self.spread, self.below
        index = int(self.list_bytes.sum())
        told = [
            f"{self.nlist} lists ({format_bytes(index)}) on {request.taking.size} of {request.n_nodes} nodes, each on "
            f"{request.replicas}; {spread.size} hot lists ({format_bytes(self.list_bytes[spread].sum())}) on more."
        ]
        if request.code_bytes:
            told.append(f"Beside its lists each node holds the codes of all: {format_bytes(request.code_bytes)}.")
        if below.size:
            none = int((self.copies == 0).sum())
            told.append(
                f"Memory is short: {below.size} lists ({format_bytes(self.list_bytes[below].sum())}) are on fewer than "
                f"{request.replicas} nodes, {none} of them on none."
            )
        if self.fan_out is not None and self.local_share is not None:
            told.append(
                f"On held-back queries a node scans {self.local_share:.1%} of the bytes of a query that it answers, "
                f"and asks {self.fan_out:.2f} other nodes; where the client chooses the node by the query, "
                f"{self.nearest_local_share:.1%} and {self.nearest_fan_out:.2f}."
            )
        for node, (used, share) in enumerate(zip(self.node_bytes.tolist(), self.work_share.tolist(), strict=True)):
            if not request.node_bytes[node]:
                told.append(f"Node {node} takes no lists.")
                continue
            loss = self.loss(node)
            told.append(
                f"Node {node}: {format_bytes(used)} of {format_bytes(request.node_bytes[node])}, {share:.1%} of the "
                f"work. Without it {loss.n_one} lists are on one node, {loss.n_none} on none, and "
                f"{format_bytes(loss.copy_bytes)} have to be copied again."
            )
        return "\n".join(told)

    def to_json(self) -> dict[str, Any]:
        """As values that JSON has: what was asked, who holds which lists, and what follows."""
        return {
            "request": dataclasses.asdict(self.request),
            "lists_of_node": [lists_of_node(self.holders, node).tolist() for node in range(self.request.n_nodes)],
            "node_bytes": self.node_bytes.tolist(),
            "work_share": self.work_share.tolist(),
            "hot_lists": self.spread.tolist(),
            "fan_out": self.fan_out,
            "local_share": self.local_share,
            "nearest_fan_out": self.nearest_fan_out,
            "nearest_local_share": self.nearest_local_share,
        }


def matrix_of(holders: U64, n_nodes: int) -> npt.NDArray[np.bool_]:
    """(nlist, n_nodes) bool: which node holds which list."""
    return (holders[:, None] >> np.arange(n_nodes, dtype=np.uint64) & np.uint64(1)).astype(np.bool_)


def holders_of(on: npt.NDArray[np.bool_]) -> U64:
    """(nlist,) uint64 holders; ``on``: what :func:`matrix_of` returns."""
    bits = np.uint64(1) << np.arange(on.shape[1], dtype=np.uint64)
    found: U64 = np.bitwise_or.reduce(on * bits, axis=1)
    return found


def lists_of_node(holders: U64, node: int) -> I64:
    """(m,) int64 lists that ``node`` holds, ascending."""
    return np.flatnonzero(holders & (np.uint64(1) << np.uint64(node)))


def mask_of(nodes: I64) -> int:
    """The bits of ``nodes``."""
    return sum(1 << node for node in nodes.tolist())
