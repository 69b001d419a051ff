"""Lists that this node does not hold, scanned by the nodes that do: the remote tier of a router's engine.

The engine asks who scans what (:meth:`RemoteLists.choose`), hands over the parts of others (:meth:`RemoteLists.put`),
and goes on. One thread has an asyncio loop for all connections, timers and pings. It merges what comes and completes
the batch, as a device's thread does.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex.config import check_number
from hybridindex.errors import InvalidInputError, RouterClosedError
from hybridindex.index.filters.row_masks import RowMasks
from hybridindex.index.ivf import IVFIndex
from hybridindex.partitioner.nodes.cover import choose_nodes
from hybridindex.router.batch.batch import Batch
from hybridindex.router.batch.merge import empty_topk
from hybridindex.router.batch.split import HOST, ProbePart
from hybridindex.router.remote.cluster_map import U64, ClusterMap
from hybridindex.router.remote.connection import response_parser
from hybridindex.router.remote.filter_codec import SentFilters, encode_filters
from hybridindex.router.remote.loop_thread import HedgeBudget, LoopThread
from hybridindex.router.remote.peer import Peer
from hybridindex.router.remote.pieces import NOBODY, Part, Piece
from hybridindex.types import F64, I64

__all__ = ["RemoteChoice", "RemoteLists"]

_log = logging.getLogger(__name__)

#: Bytes of a scan before which other nodes are asked for certain, and how long that may take.
_WAITED_FOR, _ASKED_WITHIN_S = 4 << 20, 0.002
#: For nodes that are new to answer, before a map is in force that says what they hold; between two looks.
_FIRST_ANSWER_S, _LOOK_S = 1.0, 0.005
#: Before a deadline, for what follows the last answer.
_MARGIN_S = 0.002
#: Bytes of the filters of one scan, where it has more queries than one.
_MOST_FILTERS = 8 << 20


class _View:
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
        """(n, p) int16: -1 = here, a node, or :data:`NOBODY`. The less a node promises, the later it is asked."""
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

    def __init__(self, view: _View, where: npt.NDArray[np.int16]) -> None:
        self.view = view
        #: (n, p) int16: -1 = here, a node, or :data:`NOBODY`.
        self.where = where


class _Nodes:
    """What pieces ask of one view."""

    def __init__(self, lists: RemoteLists, view: _View) -> None:
        self._lists, self._view = lists, view
        self.loop, self.list_bytes = lists.loop, lists.list_bytes

    def peer(self, node: int) -> Peer | None:
        return self._view.peers[node]

    def choose_again(self, probes: I64, excluded: int) -> npt.NDArray[np.int16]:
        return self._view.choose(probes, self._lists.nothing_here, excluded)

    def may_hedge(self, n_late: int, n_other: int) -> bool:
        return self._lists.hedges.spend(n_late, n_other)


class _Scan:
    """One part of one batch. Everything on the loop's thread."""

    def __init__(
        self,
        lists: RemoteLists,
        view: _View,
        batch: Batch,
        part: ProbePart,
        filters: SentFilters | None,
        node: int,
        options: str,
    ) -> None:
        self._lists, self._view, self._batch, self._part, self._node = lists, view, batch, part, node
        #: (m,) rows that wait.
        self._open = np.ones(len(part.rows), dtype=np.bool_)
        queries, keep_max = batch.queries[part.rows], batch.keep_max
        shared = Part(_Nodes(lists, view), queries, batch.k, keep_max=keep_max, options=options, filters=filters)
        rows = np.arange(len(part.rows), dtype=np.int32)
        self._piece = Piece(shared, self, rows, part.probes, part.coarse_distances, 0)
        self._timers: list[asyncio.TimerHandle] = []
        self._ended = False

    def start(self) -> None:
        loop, batch = self._lists.loop, self._batch
        for number, request in enumerate(batch.requests):
            if request.params.allow_partial is not None and request.deadline_s is not None:
                # The loop's clock is the monotonic one.
                left_s = request.deadline_s - time.monotonic() - _MARGIN_S
                self._timers.append(loop.call_later(max(0.0, left_s), self._give_up, batch.rows_of(number)))
        self._timers.append(loop.call_later(self._lists.timeout_s, self._give_up, slice(0, len(batch))))
        # Nobody is answered from it then, and all is searched again when its last scan has ended.
        batch.when_stale(lambda: self._lists.call(self._drop))
        self._piece.start(self._node)

    def done(self, piece: Piece) -> None:
        assert piece.found is not None
        distances, ids = piece.found
        lost = piece.lost
        rows = self._part.rows
        if lost is not None and self._lists.map is not self._view.map:
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
        self._end()

    def _give_up(self, batch_rows: slice) -> None:
        """No longer waits for these rows of the batch."""
        own = self._part.rows
        now = self._open & (own >= batch_rows.start) & (own < batch_rows.stop)
        if self._ended or not now.any():
            return
        self._open &= ~now
        probes = self._part.probes[now]
        self._batch.lose(own[now], np.where(probes >= 0, self._lists.list_bytes[probes], 0).sum(axis=1))
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
        self._lists.ended(self)
        self._batch.end_scan()

    def fail(self, error: BaseException) -> None:
        self._piece.cancel()
        self._batch.fail(error)
        self._end()


class RemoteLists:
    """Owner of the thread and of the connections to other nodes. Methods may be called from any thread."""

    def __init__(
        self,
        index: IVFIndex,
        name: str,
        *,
        key: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """
        Args:
            index: a share, or a whole index; of which this node is a member.
            name: this node's, in maps.
            key: that other nodes ask for.
            tls: for nodes at ``https``; None: the system's authorities.
            timeout_s: longest wait for other nodes.

        Raises:
            InvalidInputError: ``timeout_s`` is no time.
            MissingDependencyError: httptools is not installed.
        """
        response_parser()
        self.timeout_s = check_number("timeout_s", timeout_s, 3600.0)
        self.name = name
        self._index = index
        self._key, self._tls = key, tls
        self.list_bytes: I64 = index.list_bytes
        #: (nlist,) bool, all False.
        self.nothing_here = np.zeros(index.nlist, dtype=np.bool_)
        self._of = f"{index.fingerprint}.{index.generation}"
        self._view = _View(None, None, (), np.zeros(index.nlist, dtype=np.uint64))
        self._here: tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]] | None = None
        #: The last answer of :meth:`devices_here`, and what it was for.
        self._devices: tuple[npt.NDArray[np.int16], npt.NDArray[np.bool_], npt.NDArray[np.int16]] | None = None
        self._scans: set[_Scan] = set()
        self.hedges = HedgeBudget()
        self._changing = threading.Lock()
        self._idle = threading.Condition()
        self._n_open = 0
        self._closed = False
        self._thread = LoopThread(name="hybridindex-remote")
        self.loop = self._thread.loop

    # The map

    @property
    def map(self) -> ClusterMap | None:
        """The newest that was applied."""
        return self._view.map

    def apply(self, map_: ClusterMap) -> bool:
        """From now on lists are asked of their holders in this map; False: the one in force is as new, or newer.

        Raises:
            InvalidInputError: it is of another cluster, index or generation. RouterClosedError: after :meth:`close`.
        """
        index = self._index
        if len(map_.holders) != index.nlist:
            raise InvalidInputError(f"the map has {len(map_.holders)} lists; the index has {index.nlist}")
        if (map_.fingerprint, map_.generation) != (index.fingerprint, index.generation):
            raise InvalidInputError(
                f"the map is of generation {map_.generation} of index {map_.fingerprint}; this node has generation "
                f"{index.generation} of {index.fingerprint}"
            )
        with self._changing:
            if self._closed:
                raise RouterClosedError("the connections to other nodes are closed")
            before = self._view.map
            if before is not None and before.cluster != map_.cluster:
                raise InvalidInputError(f"the map is of cluster {map_.cluster}; this node is of {before.cluster}")
            if before is not None and map_.version <= before.version:
                return map_.to_json() == before.to_json()
            self._thread.run(self._change(map_))
        return True

    async def _change(self, map_: ClusterMap) -> None:
        known = {peer.node.name: peer for peer in self._view.peers if peer is not None}
        peers: list[Peer | None] = []
        for node in map_.nodes:
            peer = known.pop(node.name, None)
            if peer is not None and (node.name == self.name or peer.node.url != node.url):
                peer.close()
                peer = None
            if peer is None and node.name != self.name:
                peer = Peer(self.loop, node, self._key, self._tls, own=self.name)
            if peer is not None:
                peer.serves = node.serving
            peers.append(peer)
        new = [peer for peer in peers if peer is not None and peer not in self._view.peers]
        await self._wait_for(new)
        self._view = _View(map_, map_.index_of(self.name), tuple(peers), map_.holders)
        for peer in known.values():
            peer.close()

    async def _wait_for(self, peers: Sequence[Peer]) -> None:
        """Until these, which are new, have answered once, or could have: before that nobody asks them for their lists,
        which others may have given up."""
        ends_s = self.loop.time() + _FIRST_ANSWER_S
        while self.loop.time() < ends_s and not all(peer.up for peer in peers):
            await asyncio.sleep(_LOOK_S)

    # For the engine

    def devices_here(
        self, list_device: npt.NDArray[np.int16], absent: npt.NDArray[np.bool_] | None
    ) -> npt.NDArray[np.int16]:
        """(n_pieces,) who scans each list here: no device has what is ``absent``, (nlist,), as :meth:`choose` sees it.
        The same array for the same arguments."""
        if absent is None or not (list_device >= 0).any():
            return list_device
        known = self._devices
        if known is None or known[0] is not list_device or known[1] is not absent:
            known = self._devices = list_device, absent, np.where(absent, np.int16(HOST), list_device)
        return known[2]

    def choose(self, probes: I64, absent: npt.NDArray[np.bool_] | None) -> RemoteChoice | None:
        """Who scans (n, p) probes; None: all are here. ``absent``: (nlist,) lists that are not; None: all lists are."""
        if absent is None or not (absent[probes] & (probes >= 0)).any():
            return None
        here = self._here
        if here is None or here[0] is not absent:
            here = self._here = absent, ~absent
        view = self._view
        return RemoteChoice(view, view.choose(probes, here[1]))

    def put(self, batch: Batch, part: ProbePart, node: int, choice: RemoteChoice) -> None:
        """Has ``node`` scan a part. Completes it, and ends its scan in the batch, on the own thread."""
        options = f"of={self._of}&d={batch.queries.shape[1]}&k={batch.k}"
        parts = [(part, None)] if batch.masks is None else list(self._with_filters(part, batch.masks.take(part.rows)))
        with self._idle:
            if self._closed:
                raise RouterClosedError("the connections to other nodes are closed")
            self._n_open += len(parts)
        for _ in parts[1:]:
            batch.add_scan()
        for each, filters in parts:
            self._thread.call(self._start, choice.view, batch, each, filters, node, options)

    def wait_until_asked(self, nbytes: int) -> None:
        """Waits until what was put has left, where the caller is about to scan so many bytes that it takes
        milliseconds: on busy cores the own thread would run only after that, and the other nodes begin as late."""
        if nbytes < _WAITED_FOR or self._thread.is_current():
            return
        asked = threading.Event()
        # In the loop's turn after that in which it is written.
        self._thread.call(self.loop.call_soon, asked.set)
        asked.wait(_ASKED_WITHIN_S)

    def _with_filters(self, part: ProbePart, masks: RowMasks) -> Iterator[tuple[ProbePart, SentFilters]]:
        """A part with the filters of its queries; or several, where these would be too many bytes for one."""
        filters, n = encode_filters(masks, part.probes), len(part.rows)
        if n == 1 or filters.nbytes <= _MOST_FILTERS:
            yield part, filters
            return
        for rows in (slice(0, n // 2), slice(n // 2, n)):
            probes = part.probes[rows]
            nbytes = int(self.list_bytes[probes[probes >= 0]].sum())
            some = ProbePart(part.device, part.rows[rows], probes, part.coarse_distances[rows], nbytes)
            yield from self._with_filters(some, masks.take(rows))

    def _start(
        self, view: _View, batch: Batch, part: ProbePart, filters: SentFilters | None, node: int, options: str
    ) -> None:
        scan = None
        try:
            self.hedges.earn()
            scan = _Scan(self, view, batch, part, filters, node, options)
            self._scans.add(scan)
            scan.start()
        except BaseException as error:  # noqa: BLE001 - nobody may wait for what did not begin
            _log.exception("a part of a batch of %d queries could not be asked of other nodes", len(batch))
            if scan is not None:
                scan.fail(error)
            else:
                batch.fail(error)
                self._count_down()
                batch.end_scan()

    def call(self, function: Callable[[], None]) -> None:
        """On the own thread, which closes when no scan is left."""
        self._thread.call(function)

    def ended(self, scan: _Scan) -> None:
        """On the own thread."""
        self._scans.discard(scan)
        self._count_down()

    def _count_down(self) -> None:
        with self._idle:
            self._n_open -= 1
            if not self._n_open:
                self._idle.notify_all()

    def settle(self, limit_s: float) -> None:
        """Until no part is under way; after so long they are given up, and count as not scanned."""
        with self._idle:
            if self._idle.wait_for(lambda: not self._n_open, limit_s):
                return
        self._thread.call(self._give_up_all)
        with self._idle:
            self._idle.wait_for(lambda: not self._n_open)

    def _give_up_all(self) -> None:
        for scan in list(self._scans):
            scan.give_up()

    def owns_current_thread(self) -> bool:
        """Whether the own thread asks, in a callback of an answer."""
        return self._thread.is_current()

    # Its end, and what it tells

    def status(self) -> list[dict[str, Any]]:
        """Of each other node that may be asked."""
        return [peer.status() for peer in self.peers()]

    def peers(self) -> Sequence[Peer]:
        """The other nodes of the map, in its order."""
        return [peer for peer in self._view.peers if peer is not None]

    def pinged_by(self, name: str) -> bool:
        """Another node asks whether this one answers; whether it is up here."""
        peer = next((peer for peer in self.peers() if peer.node.name == name), None)
        if peer is None:
            return False
        if not peer.up:
            self.call(peer.pinged)
        return peer.up

    def nobody_has(self) -> I64:
        """Ids of lists that no node which answers has, this one included."""
        view = self._view
        mask = np.uint64(sum(1 << i for i, peer in enumerate(view.peers) if peer is not None and peer.up))
        absent = self._index.integrity.quarantined
        if absent is None:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(absent & (view.holders & mask == 0))

    def close(self) -> None:
        """Ends the connections and the thread. Not while a router still puts parts."""
        with self._idle:
            if self._closed:
                return
            self._closed = True
        self.settle(0.0)
        with self._changing:  # a map that is being applied ends first
            self._thread.run(self._close_peers())
        self._thread.close()

    async def _close_peers(self) -> None:
        view, self._view = self._view, _View(None, None, (), self._view.holders)
        tasks = [peer.close() for peer in view.peers if peer is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        # What was aborted tells its protocol in the loop's next turn.
        await asyncio.sleep(0)
