"""Lists on their way to nodes: the account of bytes and work that placing, repartition and repair share."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hybridindex.partitioner.nodes.cover import U64
from hybridindex.partitioner.nodes.node_plan import NodeRequest, holders_of, matrix_of
from hybridindex.partitioner.nodes.sample import Sample
from hybridindex.types import F64, I64

__all__ = ["Placing", "hottest_first"]

#: A node may have as many times the even share of bytes and of work, where that keeps lists together.
_SLACK = 1.2
#: Most of a node's bytes that one other node may hold too, over what a node may have, where that keeps lists together.
_COMMON = 0.6
#: Rounds in which every list may go where most of what is probed with it is by now.
_ROUNDS = 3
#: What a node counts without a neighbour of the list, beside one with one.
_ALONE = 1e-3


def hottest_first(list_bytes: I64, work: F64) -> I64:
    """(nlist,) int64 lists by falling work per byte."""
    return np.argsort(-work / np.maximum(list_bytes, 1), kind="stable")


class Placing:
    """Which node holds which list so far. Bytes of a node never exceed its memory, but between :meth:`start` and
    :meth:`make_room`."""

    def __init__(
        self, list_bytes: I64, work: F64, request: NodeRequest, hot: npt.NDArray[np.bool_], sample: Sample | None
    ) -> None:
        """``hot``: (nlist,) bool lists that every node is to hold."""
        self.list_bytes, self.work, self.hot = list_bytes, work, hot
        self._taking = np.array(request.node_bytes) > 0
        #: Copies of a list that is not hot.
        self.replicas = min(request.replicas, int(self._taking.sum()))
        self.on = np.zeros((len(list_bytes), request.n_nodes), dtype=np.bool_)
        self.room = np.array(request.node_bytes, dtype=np.int64)
        self.load = np.zeros(request.n_nodes)
        self._sample = sample
        #: (q, n_nodes) lists of each query on each node.
        self._near = np.zeros((len(sample.probes) if sample else 0, request.n_nodes), dtype=np.float32)
        rest = ~hot
        free = np.maximum(self.room - int(list_bytes[hot].sum()), 0)
        even = free / max(int(free.sum()), 1) * int(list_bytes[rest].sum()) * self.replicas
        self._most_bytes = np.maximum(np.minimum(free, even * _SLACK), 1.0)
        self._most_work = max(float(work[rest].sum()) / max(int(self._taking.sum()), 1) * _SLACK, 1e-300)
        #: (n_nodes,) bytes of lists that are not hot; (n_nodes, n_nodes) those that two nodes hold both.
        self._bytes = np.zeros(request.n_nodes)
        self._shared = np.zeros((request.n_nodes, request.n_nodes))
        even_part = (self.replicas - 1) / max(int(self._taking.sum()) - 1, 1)
        self._most_shared = self._most_bytes * max(_COMMON, even_part * _SLACK)

    @property
    def holders(self) -> U64:
        return holders_of(self.on)

    def start(self, holders: U64 | None = None) -> None:
        """Every list where it is, at ``holders`` that take lists; hot ones on every node. Nodes may be over full."""
        on = np.zeros_like(self.on) if holders is None else matrix_of(holders, len(self.room))
        on &= self._taking
        on[self.hot] = self._taking
        for which in np.flatnonzero(on.any(axis=1)).tolist():
            self._put(which, np.flatnonzero(on[which]), 1)

    def drop_spare(self) -> None:
        """Lists that are no longer hot leave the fullest of their nodes, down to ``replicas``."""
        for which in np.flatnonzero((self.on.sum(axis=1) > self.replicas) & ~self.hot).tolist():
            nodes = np.flatnonzero(self.on[which])
            emptiest = np.argsort(-self.room[nodes], kind="stable")
            self._put(which, nodes[emptiest[self.replicas :]], -1)

    def make_room(self) -> None:
        """Nodes that are over full give up lists that are not hot: first those that others hold, the coldest first."""
        coldest = hottest_first(self.list_bytes, self.work)[::-1]
        for node in np.flatnonzero(self.room < 0).tolist():
            lists = coldest[self.on[coldest, node] & ~self.hot[coldest]]
            alone = self.on[lists].sum(axis=1) == 1
            lists = lists[np.argsort(alone, kind="stable")]
            count = int(np.searchsorted(np.cumsum(self.list_bytes[lists]), -self.room[node])) + 1
            for which in lists[:count].tolist():
                self._put(which, np.array([node]), -1)

    def order(self) -> list[int]:
        """The order in which lists are placed that lack copies."""
        lacks = self.on.sum(axis=1) < self.replicas
        heaviest: I64 = np.argsort(-self.work, kind="stable")
        if self._sample is not None:
            return self._sample.neighbours_together(heaviest, lacks)
        lists: list[int] = heaviest[lacks[heaviest]].tolist()
        return lists

    def fill(self, lists: Iterable[int]) -> I64:
        """Places copies of ``lists`` until each is on ``replicas`` nodes: near those that are probed with it, on nodes
        with few bytes and little work. (m,) int64 lists for which a node with room is missing."""
        return np.array([which for which in lists if not self._fill(which, packed=False)], dtype=np.int64)

    def pack(self) -> I64:
        """Places all lists that are not hot, each on the nodes with the most room, the largest first: wherever any way
        is easily found, this one is. (m,) int64 lists for which a node with room is missing."""
        largest = np.argsort(-self.list_bytes, kind="stable")
        return np.array([one for one in largest[~self.hot[largest]] if not self._fill(int(one), packed=True)], np.int64)

    def improve(self, lists: list[int]) -> None:
        """Lets every list of ``lists`` move where it is nearer to those that are probed with it."""
        for _ in range(_ROUNDS if self._sample is not None else 0):
            for which in lists:
                before = np.flatnonzero(self.on[which])
                self._put(which, before, -1)
                if not self._fill(which, packed=False):
                    self._put(which, np.flatnonzero(self.on[which]), -1)
                    self._put(which, before, 1)

    def even(self) -> None:
        """Moves lists with much work and few bytes from the node with the most work to the one with the least, until
        neither is far from the even share."""
        nodes = np.flatnonzero(self._taking)
        if nodes.size < 2:
            return
        share = self.work / self.replicas
        hottest = hottest_first(self.list_bytes, self.work)
        mean = float(self.load[nodes].mean())
        for _ in range(4 * nodes.size):
            giver = int(nodes[self.load[nodes].argmax()])
            taker = int(nodes[self.load[nodes].argmin()])
            if self.load[giver] <= mean * _SLACK and self.load[taker] >= mean / _SLACK:
                return
            may = self.on[hottest, giver] & ~self.on[hottest, taker] & ~self.hot[hottest] & (share[hottest] > 0)
            lists = hottest[may]
            gap = min(self.load[giver] - mean, mean - self.load[taker])
            lists = lists[(share[lists] <= gap) & (self.list_bytes[lists] <= self.room[taker])]
            lists = lists[(np.cumsum(share[lists]) <= gap) & (np.cumsum(self.list_bytes[lists]) <= self.room[taker])]
            if not lists.size:
                return
            for which in lists.tolist():
                self._put(which, np.array([giver]), -1)
                self._put(which, np.array([taker]), 1)

    def serve_all(self) -> None:
        """Lists that no node holds take the place of the coldest second copies, where memory is short."""
        copies = self.on.sum(axis=1)
        hottest = hottest_first(self.list_bytes, self.work)
        coldest = [iter(hottest[::-1][self.on[hottest[::-1], node]].tolist()) for node in range(len(self.room))]
        second = copies > 1
        #: What each node has room for without its second copies.
        could = self.room + self.list_bytes[second] @ self.on[second]
        could[~self._taking] = -1
        for which in hottest[copies[hottest] == 0].tolist():
            node, nbytes = int(could.argmax()), int(self.list_bytes[which])
            if could[node] < nbytes:
                continue
            while self.room[node] < nbytes:
                other = next(coldest[node])
                if copies[other] == 1:
                    continue
                self._put(other, np.array([node]), -1)
                copies[other] -= 1
                if copies[other] == 1:
                    could[self.on[other]] -= self.list_bytes[other]
            self._put(which, np.array([node]), 1)
            could[node] -= nbytes

    def _fill(self, which: int, *, packed: bool) -> bool:
        """Puts a list on nodes with room until ``replicas`` hold it; false: too few have room."""
        missing = self.replicas - int(self.on[which].sum())
        score = None if packed or missing <= 0 else self._score(which)
        for _ in range(missing):
            may = np.flatnonzero(self._taking & ~self.on[which] & (self.room >= self.list_bytes[which]))
            if not may.size:
                return False
            scores = self.room if score is None else self._apart(which, score)
            self._put(which, may[[scores[may].argmax()]], 1)
        return True

    def _score(self, which: int) -> F64:
        """(n_nodes,) how good each node is for a list."""
        fill = np.maximum(self._bytes / self._most_bytes, self.load / self._most_work)
        score: F64 = np.full(len(self.room), _ALONE)
        if self._sample is not None:
            score += self._near[self._sample.queries_of(which)].sum(axis=0)
        # Where all are full, the one that is the least so.
        return np.where(fill < 1, score * (1 - fill), -fill)

    def _apart(self, which: int, score: F64) -> F64:
        """``score``, less for nodes that have much in common with a holder of the list: were one lost, the other alone
        would do its work. Without a sample such pairs are what keeps queries from asking many."""
        held = np.flatnonzero(self.on[which])
        if self._sample is None or not held.size:
            return score
        common = (self._shared[held] / self._most_shared[held, None]).max(axis=0)
        apart: F64 = np.where((common < 1) & (score > 0), score * (1 - common), np.minimum(score, 0) - common)
        return apart

    def _put(self, which: int, nodes: I64, sign: int) -> None:
        """Puts a list on ``nodes``, or, with ``sign`` -1, takes it from them."""
        nbytes = int(self.list_bytes[which])
        self.room[nodes] -= sign * nbytes
        if self.hot[which]:
            self.on[which, nodes] = sign > 0
            return
        self._bytes[nodes] += sign * nbytes
        self.load[nodes] += sign * self.work[which] / self.replicas
        for node in nodes.tolist():
            self.on[which, node] = False
            others = np.flatnonzero(self.on[which])
            self._shared[node, others] += sign * nbytes
            self._shared[others, node] += sign * nbytes
            self.on[which, node] = sign > 0
            if self._sample is not None:
                self._near[self._sample.queries_of(which), node] += sign
