"""What other nodes do of a batch: a part of its scans, or the exact distances of some candidates; and who is asked, as
of one map. Each part is completed once, whatever happens to the nodes, on the loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hybridindex.partitioner.nodes.cover import choose_nodes
from hybridindex.router.batch.batch import Batch
from hybridindex.router.batch.comparison import Comparison
from hybridindex.router.batch.merge import empty_topk
from hybridindex.router.batch.split import ProbePart
from hybridindex.router.remote.cluster_map import U64, ClusterMap
from hybridindex.router.remote.filter_codec import SentFilters
from hybridindex.router.remote.loop_thread import HedgeBudget
from hybridindex.router.remote.peer import Peer
from hybridindex.router.remote.pieces import NOBODY, ComparedPart, Piece, ScannedPart
from hybridindex.types import F32, F64, I32, I64

__all__ = ["AskedComparison", "AskedScan", "AskedWork", "Owner", "RemoteChoice", "View"]

#: Before a deadline, for what follows the last answer.
_MARGIN_S = 0.002


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


class AskedWork(Protocol):
    """One of either."""

    def start(self) -> None: ...

    def give_up(self) -> None:
        """Waits for nothing more: what is not there counts as lost."""

    def fail(self, error: BaseException) -> None: ...


class Owner(Protocol):
    """Who has it asked."""

    loop: asyncio.AbstractEventLoop
    timeout_s: float
    hedges: HedgeBudget
    #: (nlist,) bool, all False.
    nothing_here: npt.NDArray[np.bool_]

    @property
    def map(self) -> ClusterMap | None:
        """The one in force."""

    def call(self, function: Callable[[], None]) -> None:
        """On the loop's thread."""

    def ended(self, work: AskedWork) -> None:
        """It has completed its part."""


class _Nodes:
    """What pieces ask of one view."""

    def __init__(self, owner: Owner, view: View) -> None:
        self._owner, self._view = owner, view
        self.loop = owner.loop

    def peer(self, node: int) -> Peer | None:
        return self._view.peers[node]

    def choose_again(self, probes: I64, excluded: int) -> npt.NDArray[np.int16]:
        return self._view.choose(probes, self._owner.nothing_here, excluded)

    def may_hedge(self, n_late: int, n_other: int) -> bool:
        return self._owner.hedges.spend(n_late, n_other)


class AskedScan:
    """One part of one batch, scanned by others."""

    def __init__(
        self,
        owner: Owner,
        view: View,
        batch: Batch,
        part: ProbePart,
        *,
        list_bytes: I64,
        filters: SentFilters | None,
        node: int,
        options: str,
    ) -> None:
        """
        Args:
            list_bytes: (nlist,) int64.
            node: who is asked first.
            options: of all questions.
        """
        self._owner, self._view, self._batch, self._part, self._node = owner, view, batch, part, node
        #: (m,) rows that wait.
        self._open = np.ones(len(part.rows), dtype=np.bool_)
        self._shared = ScannedPart(
            _Nodes(owner, view),
            batch.queries[part.rows],
            batch.k,
            keep_max=batch.keep_max,
            options=options,
            list_bytes=list_bytes,
            filters=filters,
        )
        rows = np.arange(len(part.rows), dtype=np.int32)
        self._piece = Piece(self._shared, self, rows, part.probes, part.coarse_distances, 0)
        self._timers: list[asyncio.TimerHandle] = []
        self._ended = False

    def start(self) -> None:
        loop, batch = self._owner.loop, self._batch
        for number, request in enumerate(batch.requests):
            if (until_s := request.partial_from_s) is not None:
                # The loop's clock is the monotonic one.
                left_s = until_s - time.monotonic() - _MARGIN_S
                self._timers.append(loop.call_later(max(0.0, left_s), self._give_up, batch.rows_of(number)))
        self._timers.append(loop.call_later(self._owner.timeout_s, self._give_up, slice(0, len(batch))))
        # Nobody is answered from it then, and all is searched again when its last scan has ended.
        batch.when_stale(lambda: self._owner.call(self._drop))
        self._piece.start(self._node)

    def done(self, piece: Piece) -> None:
        assert piece.found is not None
        try:
            self._complete(*piece.found, piece.lost)
        except BaseException as error:
            self._batch.fail(error)
            raise
        finally:
            self._end()

    def _complete(self, distances: F32, ids: I64, lost: I64 | None) -> None:
        rows = self._part.rows
        if lost is not None and self._owner.map is not self._view.map:
            # Nodes drop lists once the map says who has them instead.
            self._batch.search_again()
        elif self._open.all():
            if lost is not None:
                self._batch.lose(rows, lost)
            self._batch.complete_part(self._part, distances, ids)
        elif self._open.any():
            keep = self._open
            if lost is not None:
                self._batch.lose(rows[keep], lost[keep])
            self._batch.complete(rows[keep], distances[keep], ids[keep])

    def _give_up(self, batch_rows: slice) -> None:
        """No longer waits for these rows of the batch."""
        own = self._part.rows
        now = self._open & (own >= batch_rows.start) & (own < batch_rows.stop)
        if self._ended or not now.any():
            return
        self._open &= ~now
        self._batch.lose(own[now], self._shared.work(self._part.probes[now]))
        nothing = empty_topk(int(now.sum()), self._batch.k, keep_max=self._batch.keep_max)
        self._batch.complete(own[now], *nothing)
        if not self._open.any():
            self._piece.cancel()
            self._end()

    def _drop(self) -> None:
        """Nobody needs its answer."""
        if not self._ended:
            self._piece.cancel()
            self._end()

    def give_up(self) -> None:
        """Waits for nothing more."""
        self._give_up(slice(0, len(self._batch)))

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        for timer in self._timers:
            timer.cancel()
        self._owner.ended(self)
        self._batch.end_scan()

    def fail(self, error: BaseException) -> None:
        self._piece.cancel()
        self._batch.fail(error)
        self._end()


class AskedComparison:
    """Some candidates of one comparison, compared by others."""

    def __init__(
        self,
        owner: Owner,
        view: View,
        batch: Batch,
        comparison: Comparison,
        *,
        rows: I32,
        batch_rows: I64,
        lists: I64,
        numbers: I64,
        each: F64,
        row_bytes: int,
        node: int,
        options: str,
        until_s: float | None,
    ) -> None:
        """
        Args:
            rows: (m,) of the comparison's queries.
            batch_rows: (m,) the same of the batch.
            lists, numbers: (m, w) of each candidate, -1 = skip.
            each: (m,) what one candidate is of all of its query.
            row_bytes: of a candidate.
            node: who is asked first.
            options: of all questions.
            until_s: monotonic time from which on less is enough; None: all is needed.
        """
        self._owner, self._view, self._batch, self._comparison, self._node = owner, view, batch, comparison, node
        self._rows, self._batch_rows, self._lists, self._until_s = rows, batch_rows, lists, until_s
        self._each_byte: F64 = each / row_bytes
        self._part = ComparedPart(
            _Nodes(owner, view),
            comparison.queries[rows],
            comparison.k,
            keep_max=comparison.keep_max,
            options=options,
            row_bytes=row_bytes,
        )
        self._piece = Piece(self._part, self, np.arange(len(rows), dtype=np.int32), lists, numbers, 0)
        self._timers: list[asyncio.TimerHandle] = []
        self._ended = False

    def start(self) -> None:
        loop = self._owner.loop
        if self._until_s is not None:
            left_s = self._until_s - time.monotonic() - _MARGIN_S
            self._timers.append(loop.call_later(max(0.0, left_s), self.give_up))
        self._timers.append(loop.call_later(self._owner.timeout_s, self.give_up))
        self._batch.when_stale(lambda: self._owner.call(self._drop))
        self._piece.start(self._node)

    def done(self, piece: Piece) -> None:
        assert piece.found is not None
        if piece.lost is not None:
            if self._owner.map is not self._view.map:
                self._batch.search_again()
            else:
                self._lose(piece.lost)
        self._end(piece.found)

    def _lose(self, nbytes: I64) -> None:
        self._batch.lose_candidates(self._batch_rows, self._each_byte * nbytes)

    def give_up(self) -> None:
        """Waits for nothing more."""
        if not self._ended:
            self._lose(self._part.work(self._lists))
            self._drop()

    def _drop(self) -> None:
        """Nobody needs its answer; who waits for the comparison is told that it has ended."""
        if not self._ended:
            self._piece.cancel()
            self._end(empty_topk(len(self._rows), self._part.k, keep_max=self._part.keep_max))

    def _end(self, found: tuple[F32, I64] | None) -> None:
        """``found``: (m, k) each; None: it failed."""
        if self._ended:
            return
        self._ended = True
        for timer in self._timers:
            timer.cancel()
        try:
            if found is not None:
                self._comparison.complete_rows(self._rows, *found)
        except BaseException as error:
            self._comparison.fail(error)
            raise
        finally:
            self._owner.ended(self)
            self._batch.end_scan()

    def fail(self, error: BaseException) -> None:
        self._piece.cancel()
        self._comparison.fail(error)
        self._end(None)
