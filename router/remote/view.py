"""Who holds which lists, and which of them are asked for the lists of a batch: as of one map."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybridindex.partitioner.nodes.cover import choose_nodes
from hybridindex.router.remote.cluster_map import U64, ClusterMap
from hybridindex.router.remote.peer import Peer
from hybridindex.router.remote.pieces import NOBODY
from hybridindex.types import F64, I64

__all__ = ["RemoteChoice", "View"]


class View:
    """Who holds what, as of one map. Replaced, never changed."""

    __slots__ = ("_turn", "holders", "map", "own", "peers")

    def __init__(self, map_: ClusterMap | None, own: int | None, peers: Sequence[Peer | None], holders: U64) -> None:
        self.map, self.own, self.peers, self.holders = map_, own, peers, holders
        self._turn = itertools.count()

    def masks(self) -> tuple[int, int, int]:
        """Nodes that may be asked: those in time, those that are late, too, and whoever may still answer."""
        prompt = late = any_ = 0
        for i, peer in enumerate(self.peers):
            if peer is None or not (peer.up or peer.silent):
                continue
            any_ |= 1 << i
            if peer.up and peer.serves:
                late |= 1 << i
                if not peer.late:
                    prompt |= 1 << i
        return prompt, late, any_

    def choose(self, probes: I64, here: npt.NDArray[np.bool_], excluded: int = 0) -> npt.NDArray[np.int16]:
        """(n, p) int16: -1 = here, a node, or :data:`NOBODY`. The less a node promises, the later it is asked.
        ``here``: (nlist,) lists that nobody else is asked for; ``excluded``: mask of nodes that are not."""
        load = np.array([0.0 if peer is None else peer.n_open for peer in self.peers])
        turn = next(self._turn)
        where, before = None, -1
        for mask in self.masks():
            usable = mask & ~excluded
            if where is None:
                where = self._cover(probes, here, usable, load, turn)
            elif usable != before and (left := where == NOBODY).any():
                others = self._cover(np.where(left, probes, -1), here, usable, load, turn)
                where = np.where(left, others, where)
            before = usable
        assert where is not None
        return where

    def _cover(
        self, probes: I64, here: npt.NDArray[np.bool_], usable: int, load: F64, turn: int
    ) -> npt.NDArray[np.int16]:
        return choose_nodes(probes, here=here, holders=self.holders, usable=usable, own=self.own, load=load, turn=turn)


class RemoteChoice:
    """Who scans the probes of one batch."""

    __slots__ = ("view", "where")

    def __init__(self, view: View, where: npt.NDArray[np.int16]) -> None:
        self.view = view
        #: (n, p) int16: -1 = here, a node, or :data:`NOBODY`.
        self.where = where
