"""Changes of rows in a cluster: which node writes, how a change reaches it, and how others learn of what was changed.

All nodes follow one log, that of the index (:mod:`hybridindex.index.live.store`), and one of them writes at a time: the
lock on the index says who may. Which node tries is agreed on without asking: the first of the map that answers, where
most of those that serve do.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from hybridindex.errors import UnreachableError
from hybridindex.router.remote.peer import Peer
from hybridindex.router.remote.remote_lists import RemoteLists

__all__ = ["CHANGED_PATH", "KNOWN_WITHIN_S", "PeerChanges"]

#: Asked of nodes that shall look for changes, with ``number=``.
CHANGED_PATH = "/v1/cluster/changed"
#: A change waits no longer for other nodes to know of it: each looks by itself, too.
KNOWN_WITHIN_S = 1.0
#: Before a node that does not know yet is asked again.
_AGAIN_S = 0.02


_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Known:
    """What one node was told."""

    #: Change that it knows, or was asked in vain about.
    number: int = 0
    asking: bool = False


@dataclass(slots=True, eq=False)
class _Waiter:
    number: int
    future: Future[None]
    timer: asyncio.TimerHandle | None = None


class PeerChanges:
    """Of one node. Methods may be called from any thread; all else is on the thread of ``lists``."""

    def __init__(self, lists: RemoteLists) -> None:
        self._lists = lists
        self._known: dict[str, _Known] = {}
        self._wanted = 0
        self._waiters: list[_Waiter] = []
        #: What was begun and has not ended.
        self._under_way: set[Future[Any]] = set()

    def writer(self) -> str | None:
        """Name of the node that writes, as far as this one sees; None: it has no map, or sees no majority of the nodes
        that serve, and others may agree on another one."""
        map_ = self._lists.map
        if map_ is None:
            return None
        up = {peer.node.name for peer in self._lists.peers() if peer.up} | {self._lists.name}
        serving = [node.name for node in map_.nodes if node.serving]
        seen = [name for name in serving if name in up]
        return seen[0] if 2 * len(seen) > len(serving) else None

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for what was begun here."""
        return not self._under_way

    def _begun(self, future: Future[_T]) -> Future[_T]:
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    # A change on its way to the node that writes

    def ask(
        self, name: str, target: str, body: bytes, *, kind: str, lines: str, limit_s: float | None = None
    ) -> Future[tuple[int, bytes]]:
        """Has node ``name`` answer a request: status and body.

        Args:
            target: path and query.
            kind: media type of ``body``.
            lines: further header lines, each with its end.
            limit_s: for the answer; None: as long as for a scan.

        Raises (the future):
            UnreachableError: it was not sent. Exception: there is no answer, and it may have been acted upon.
        """
        future = self._begun(Future[tuple[int, bytes]]())
        limit_s = self._lists.timeout_s if limit_s is None else limit_s
        self._lists.call(lambda: self._ask(name, target, body, kind, lines, limit_s, future))
        return future

    def _ask(
        self,
        name: str,
        target: str,
        body: bytes,
        kind: str,
        lines: str,
        limit_s: float,
        future: Future[tuple[int, bytes]],
    ) -> None:
        peer = next((peer for peer in self._lists.peers() if peer.node.name == name and peer.up), None)
        if peer is None:
            if future.set_running_or_notify_cancel():
                future.set_exception(UnreachableError(f"node {name} does not answer"))
            return

        def told(status: int, answer: bytes, error: Exception | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            if error is None:
                future.set_result((status, answer))
            else:
                future.set_exception(error)

        peer.request(target, body, told, kind=kind, lines=lines, limit_s=limit_s)

    # Word of what was changed

    def tell(self, number: int) -> Future[None]:
        """Tells the nodes that answer of change ``number``; done when they know of it, or could not be told."""
        future = self._begun(Future[None]())
        self._lists.call(lambda: self._tell(number, future))
        return future

    def _tell(self, number: int, future: Future[None]) -> None:
        waiter = _Waiter(number, future)
        waiter.timer = self._lists.loop.call_later(KNOWN_WITHIN_S, self._settle, waiter)
        self._waiters.append(waiter)
        before, self._wanted = self._wanted, max(each.number for each in self._waiters)
        if self._wanted < before:  # the index was taken back
            self._known.clear()
        for peer in self._lists.peers():
            self._tell_peer(peer)
        self._settle_known()

    def _tell_peer(self, peer: Peer) -> None:
        """One question at a time, for all that has changed until then."""
        known = self._known.setdefault(peer.node.name, _Known())
        if known.asking or not peer.up or known.number >= self._wanted:
            return
        known.asking, asked = True, self._wanted

        def told(status: int, answer: bytes, _error: Exception | None) -> None:
            known.asking = False
            if status == 200 and answer.isdigit():
                known.number = int(answer)
            else:  # it looks by itself
                known.number = asked
            if known.number >= asked:
                self._tell_peer(peer)
            elif self._waiters:
                self._lists.loop.call_later(_AGAIN_S, self._tell_peer, peer)
            self._settle_known()

        target = f"{CHANGED_PATH}?number={asked}"
        peer.request(target, b"", told, limit_s=KNOWN_WITHIN_S)

    def _settle_known(self) -> None:
        up = [peer.node.name for peer in self._lists.peers() if peer.up]
        least = min((self._known[name].number if name in self._known else 0 for name in up), default=None)
        for waiter in [each for each in self._waiters if least is None or each.number <= least]:
            self._settle(waiter)

    def _settle(self, waiter: _Waiter) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            if waiter.future.set_running_or_notify_cancel():
                waiter.future.set_result(None)
