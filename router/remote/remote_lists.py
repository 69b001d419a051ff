"""Lists that this node does not hold, scanned by the nodes that do: the remote tier of a router's engine.

The engine asks who scans what (:meth:`RemoteLists.choose`), hands over the parts of others (:meth:`RemoteLists.put`),
and goes on. A search by codes scans those of all lists itself, and hands over the candidates whose rows are not here
(:meth:`RemoteLists.compare`). One thread has an asyncio loop for all connections, timers and pings. It merges what
comes and completes the batch, as a device's thread does.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex.config import check_number
from hybridindex.errors import InvalidInputError, RouterClosedError
from hybridindex.index.filters.row_masks import RowMasks
from hybridindex.index.ivf import IVFIndex
from hybridindex.router.batch.batch import Batch
from hybridindex.router.batch.comparison import Comparison
from hybridindex.router.batch.split import HOST, ProbePart, compact
from hybridindex.router.remote.asking import AskedComparison, AskedScan, AskedWork, RemoteChoice, View
from hybridindex.router.remote.cluster_map import ClusterMap
from hybridindex.router.remote.connection import response_parser
from hybridindex.router.remote.filter_codec import SentFilters, encode_filters
from hybridindex.router.remote.loop_thread import HedgeBudget, LoopThread
from hybridindex.router.remote.peer import Peer
from hybridindex.router.remote.pieces import NOBODY
from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.types import F64, I32, I64

__all__ = ["RemoteChoice", "RemoteLists"]

_log = logging.getLogger(__name__)

#: Bytes of a scan before which other nodes are asked for certain, and how long that may take.
_WAITED_FOR, _ASKED_WITHIN_S = 4 << 20, 0.002
#: For nodes that are new to answer, before a map is in force that says what they hold; between two looks.
_FIRST_ANSWER_S, _LOOK_S = 1.0, 0.005
_ROW_MASK = (1 << POSITION_BITS) - 1
#: Bytes of the filters of one scan, and of the arrays of one comparison, where it has more queries than one.
_MOST_FILTERS, _MOST_COMPARED = 8 << 20, 4 << 20


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
        self._view = View(None, None, (), np.zeros(index.nlist, dtype=np.uint64))
        self._here: tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]] | None = None
        #: Lists whose rows nobody has, None: there are none; and what that was said for.
        self._readable: tuple[View, npt.NDArray[np.bool_], int, npt.NDArray[np.bool_] | None] | None = None
        #: The last answer of :meth:`devices_here`, and what it was for.
        self._devices: tuple[npt.NDArray[np.int16], npt.NDArray[np.bool_], npt.NDArray[np.int16]] | None = None
        self._asked: set[AskedWork] = set()
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
        self._view = View(map_, map_.index_of(self.name), tuple(peers), map_.holders)
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

    def choose(
        self, probes: I64, absent: npt.NDArray[np.bool_] | None, *, by_codes: bool = False
    ) -> RemoteChoice | None:
        """Who scans (n, p) probes; None: all are here. ``absent``: (nlist,) lists that are not; None: all lists are.
        ``by_codes``: the codes of all lists are here, and those are left out whose rows nobody has."""
        if by_codes:
            return self._choose_readable(probes)
        if absent is None or not (absent[probes] & (probes >= 0)).any():
            return None
        here = self._here
        if here is None or here[0] is not absent:
            here = self._here = absent, ~absent
        view = self._view
        return RemoteChoice(view, view.choose(probes, here[1]))

    def _choose_readable(self, probes: I64) -> RemoteChoice | None:
        absent, view = self._index.integrity.quarantined, self._view
        if absent is None:
            return None
        mask = view.masks()[-1]
        known = self._readable
        if known is None or known[0] is not view or known[1] is not absent or known[2] != mask:
            nobody = absent & (view.holders & np.uint64(mask) == 0)
            known = self._readable = view, absent, mask, nobody if nobody.any() else None
        nobody = known[3]
        if nobody is None or not (lost := nobody[probes] & (probes >= 0)).any():
            return None
        return RemoteChoice(view, np.where(lost, np.int16(NOBODY), np.int16(HOST)))

    def put(self, batch: Batch, part: ProbePart, node: int, choice: RemoteChoice) -> None:
        """Has ``node`` scan a part. Completes it, and ends its scan in the batch, on the own thread."""
        options = self._options(batch, batch.k)
        parts = [(part, None)] if batch.masks is None else list(self._with_filters(part, batch.masks.take(part.rows)))
        self._expect(len(parts))
        for _ in parts[1:]:
            batch.add_scan()
        for each, filters in parts:
            make = partial(
                AskedScan, self, choice.view, batch, each,
                list_bytes=self.list_bytes, filters=filters, node=node, options=options,
            )  # fmt: skip
            self._thread.call(self._start, make, batch.fail, batch)

    def compare(
        self, batch: Batch, comparison: Comparison, rows: I64, positions: I64, until_s: float | None = None
    ) -> I64:
        """Has other nodes compare the candidates whose rows are not here.

        Args:
            comparison: of queries ``rows`` (n,) of the batch; gets a part for each node that is asked, and the batch a
                scan.
            positions: (n, r) int64 of their candidates, -1: none.
            until_s: monotonic time from which on an answer from less is enough; None: all is needed.

        Returns:
            (n, r) int64 those that are here.

        Raises:
            RouterClosedError: after :meth:`close`.
        """
        absent, there = self._index.integrity.quarantined, positions >= 0
        lists = positions >> POSITION_BITS
        away = np.zeros_like(there) if absent is None else there & absent[lists]
        if not away.any():
            return positions
        view = self._view
        where = view.choose(np.where(away, lists, -1), self.nothing_here)
        each: F64 = 1 / np.maximum(np.count_nonzero(there, axis=1), 1)
        batch.lose_candidates(rows, each * np.count_nonzero(where == NOBODY, axis=1))
        options, parts = self._options(batch, comparison.k), list[tuple[int, I32, I64, I64]]()
        most = max(1, _MOST_COMPARED // (4 * (batch.queries.shape[1] + 2 * positions.shape[1])))
        for node in np.unique(where[where >= 0]).tolist():
            own, asked, numbers = compact(where == node, lists, positions & _ROW_MASK)
            for at in range(0, len(own), most):
                some = slice(at, at + most)
                parts.append((node, own[some], asked[some], numbers[some]))
        # From here on nothing fails: all of it is asked.
        self._expect(len(parts))
        for node, own, asked, numbers in parts:
            comparison.add()
            # The batch ends after it.
            batch.add_scan()
            make = partial(
                AskedComparison, self, view, batch, comparison,
                rows=own, batch_rows=rows[own], lists=asked, numbers=numbers, each=each[own],
                row_bytes=self._index.rows.code_size, node=node, options=options, until_s=until_s,
            )  # fmt: skip
            self._thread.call(self._start, make, comparison.fail, batch)
        return np.where(away, -1, positions)

    def _options(self, batch: Batch, k: int) -> str:
        return f"of={self._of}&d={batch.queries.shape[1]}&k={k}"

    def _expect(self, n: int) -> None:
        """So many are about to be asked."""
        with self._idle:
            if self._closed:
                raise RouterClosedError("the connections to other nodes are closed")
            self._n_open += n

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

    def _start(self, make: Callable[[], AskedWork], fail: Callable[[BaseException], None], batch: Batch) -> None:
        """``fail``: told why it could not be made."""
        work = None
        try:
            self.hedges.earn()
            work = make()
            self._asked.add(work)
            work.start()
        except BaseException as error:  # noqa: BLE001 - nobody may wait for what did not begin
            _log.exception("a part of a batch of %d queries could not be asked of other nodes", len(batch))
            if work is not None:
                work.fail(error)
            else:
                fail(error)
                self._count_down()
                batch.end_scan()

    def call(self, function: Callable[[], None]) -> None:
        """On the own thread, which closes when no scan is left."""
        self._thread.call(function)

    def ended(self, work: AskedWork) -> None:
        """On the own thread."""
        self._asked.discard(work)
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
        for work in list(self._asked):
            work.give_up()

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
        view, self._view = self._view, View(None, None, (), self._view.holders)
        tasks = [peer.close() for peer in view.peers if peer is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        # What was aborted tells its protocol in the loop's next turn.
        await asyncio.sleep(0)
