"""One other node of the cluster: whether it answers, how long it takes, and what it was asked.

It is *up* while it answers pings, *late* when a scan takes longer there than nearly all do, *silent* after it answered
nothing for :data:`DOWN_AFTER_S`, and *down* after it refused a connection. Who is late is asked only where nobody else
can be; who is silent, or is not to serve by the map, only where nobody but such nodes has a list, and not for long: it
may be busy, or hang. Who is down is not asked.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from hybridindex.router.remote.channel import Channel
from hybridindex.router.remote.cluster_map import MapNode
from hybridindex.router.remote.connection import Address, Connections, Exchange
from hybridindex.router.remote.tail import Tail

__all__ = ["DOWN_AFTER_S", "LATE_FOR_S", "NOT_SEEN", "PING_PATH", "SEEN", "Peer"]

_log = logging.getLogger(__name__)

#: Asked with ``of=``, the name of the node that asks; and what it answers: it has that node up, or not yet.
PING_PATH = "/v1/cluster/ping"
SEEN, NOT_SEEN = 204, 202
#: What a daemon says that has too much to do: it is there.
_BUSY = (429, 503)
#: Between two pings, and for how long a node may answer nothing. Together below a second.
PING_EVERY_S = 0.2
DOWN_AFTER_S = 0.8
#: Bytes of an answer that is no search's.
_MOST_ANSWER = 64 << 20
#: A node that was late again before it answered a scan is asked as before after so long.
LATE_FOR_S = 2.0
#: Pings that a node answers before it is asked again; one of its own counts.
_TO_COME_BACK = 2


class Peer:
    """Everything on the loop's thread; counts may be read from any."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        node: MapNode,
        key: str | None,
        tls: ssl.SSLContext | None,
        *,
        up: bool = False,
        own: str = "",
    ) -> None:
        """``up``: taken to answer, until it does not. ``own``: name of the node that asks; a client has none."""
        self.node = node
        self.tail = Tail()
        #: It answers; until it did once, it is not asked. And: it did, and says nothing now.
        self.up, self.silent = up, False
        #: It has this node up, as it said last, and so tells it of changes; or it cannot be asked.
        self.sees_this = False
        #: By the map.
        self.serves = node.serving
        #: A scan took too long not long ago, and since then it has answered none, nor, the first time, a ping: of a
        #: node that works some scans are among the slowest, too, and whoever does not ask it goes to other nodes.
        self.late = False
        self._late_s, self._n_late = 0.0, 0
        #: Scans under way.
        self.n_open = 0
        self.n_asked = self.n_failed = self.n_hedged = self.n_downs = 0
        self.bytes_asked = 0
        self._loop = loop
        self._ping_target = f"{PING_PATH}?of={quote(own)}" if own else PING_PATH
        #: It has pinged this node since the last ping began; and the pause before the next one.
        self._was_pinged = False
        self._pause: asyncio.Future[None] | None = None
        address = Address(node.url, key, tls)
        self._connections, self._pings = Connections(loop, address), Connections(loop, address)
        self._scans = Channel(loop, address)
        self._closed = False
        self._heard_s = loop.time()
        self._n_good = _TO_COME_BACK - 1
        #: Told when it goes down: who waits for it.
        self._waiting: set[Callable[[Exception], None]] = set()
        self._task = loop.create_task(self._watch())

    @property
    def state(self) -> str:
        """ "down", "silent", "late" or "up"."""
        if not self.up:
            return "silent" if self.silent else "down"
        return "late" if self.late else "up"

    def ask(
        self,
        target: str,
        body: bytes,
        exchange: Exchange,
        on_down: Callable[[Exception], None],
        *,
        kind: str,
        accept: str,
    ) -> None:
        """``on_down``: told where the node goes down before it answers; until :meth:`forget`. ``kind`` and ``accept``:
        media types of body and answer."""
        self._waiting.add(on_down)
        self._connections.request("POST", target, body, exchange, kind=kind, accept=accept)

    def request(
        self,
        target: str,
        body: bytes,
        told: Callable[[int, bytes, Exception | None], None],
        *,
        kind: str = "",
        lines: str = "",
        limit_s: float,
    ) -> None:
        """Sends something once. ``told`` is called once: with status and body, or with what happened, at the latest
        after ``limit_s``. UnreachableError: it was not sent; else the node may have acted upon it."""
        ended = False

        def end(status: int, answer: bytes, error: Exception | None) -> None:
            nonlocal ended
            if not ended:
                ended = True
                timer.cancel()
                self.forget(on_down)
                exchange.cancel()
                told(status, answer, error)

        def on_down(error: Exception) -> None:
            end(0, b"", ConnectionError(str(error)))

        exchange = Exchange(end, _MOST_ANSWER)
        words = f"node {self.node.name} did not answer within {limit_s:g} s"
        timer = self._loop.call_later(limit_s, lambda: end(0, b"", TimeoutError(words)))
        self._waiting.add(on_down)
        accept = "application/json"
        self._connections.request("POST", target, body, exchange, kind=kind, accept=accept, lines=lines, once=True)

    def scan(self, options: str, body: bytes, exchange: Exchange, on_down: Callable[[Exception], None]) -> None:
        """As :meth:`ask`, of a scan."""
        self._waiting.add(on_down)
        self._scans.ask(options, body, exchange)

    def get(self, target: str, exchange: Exchange) -> None:
        """Asks for something small."""
        self._connections.request("GET", target, b"", exchange)

    def forget(self, on_down: Callable[[Exception], None]) -> None:
        """The exchange has ended."""
        self._waiting.discard(on_down)

    def heard(self) -> None:
        """It answered a scan or a search."""
        self._heard_s, self.late, self._n_late = self._loop.time(), False, 0

    def mark_late(self) -> None:
        """A scan or a search takes too long."""
        self._n_late += not self.late
        self._late_s, self.late = self._loop.time(), True

    def close(self) -> asyncio.Task[None]:
        """Ends all connections; what was asked fails. Returns what ends in the loop's next turns."""
        self._closed = True
        self._task.cancel()
        self._end_waits(ConnectionError(f"node {self.node.name} left the map"))
        self._connections.close()
        self._pings.close()
        self._scans.close()
        return self._task

    def pinged(self) -> None:
        """It has pinged this node: one that was down is asked at once whether it answers, too."""
        if not self.up and not self._was_pinged:
            self._n_good += 1
            self._was_pinged = True
            self._end_pause()

    async def _watch(self) -> None:
        while True:
            began = self._loop.time()
            self._was_pinged = False
            error = await self._ping()
            # wait_for forgets a cancellation where its future is done at the same time.
            if self._closed:
                return
            if error is None:
                self._heard_s = self._loop.time()
                self.late = self.late and self._n_late > 1 and self._heard_s < self._late_s + LATE_FOR_S
                self._n_good += 1
                if not self.up and self._n_good >= _TO_COME_BACK:
                    self._set_up()
            else:
                self._n_good, self.sees_this = 0, True
                # Refused at once, or silent for too long.
                if not isinstance(error, TimeoutError) or self._loop.time() - self._heard_s > DOWN_AFTER_S:
                    self._set_down(error)
            if not self._was_pinged:
                await self._wait_until(began + PING_EVERY_S)

    async def _wait_until(self, moment_s: float) -> None:
        """Or until it pings this node. No task of its own: one more could outlive the loop."""
        self._pause = self._loop.create_future()
        timer = self._loop.call_at(moment_s, self._end_pause)
        try:
            await self._pause
        finally:
            timer.cancel()

    def _end_pause(self) -> None:
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)

    async def _ping(self) -> Exception | None:
        """What is wrong with the node."""
        answered: asyncio.Future[Exception | None] = self._loop.create_future()

        def told(status: int, _body: bytes, error: Exception | None) -> None:
            if not answered.done():
                if error is None:
                    self.sees_this = status == SEEN
                    if status not in (SEEN, NOT_SEEN, *_BUSY):
                        error = ConnectionError(f"it answers {status}")
                answered.set_result(error)

        exchange = Exchange(told, most_bytes=1 << 16)
        self._pings.request("GET", self._ping_target, b"", exchange)
        try:
            return await asyncio.wait_for(answered, DOWN_AFTER_S)
        except TimeoutError:
            exchange.cancel()
            return TimeoutError(f"no answer for {DOWN_AFTER_S:g} s")

    def _set_up(self) -> None:
        self.up, self.silent = True, False
        _log.info("node %s answers", self.node.name)

    def _set_down(self, error: Exception) -> None:
        silent = isinstance(error, TimeoutError)
        if self.up or (self.silent and not silent):
            self.n_downs += self.up
            self.silent = silent
            _log.warning("node %s is %s: %s", self.node.name, "silent" if silent else "down", error)
            self._end_waits(error)

    def _end_waits(self, error: Exception) -> None:
        self.up = False
        if not self.silent:
            self._connections.drop_idle()
            self._scans.drop()
        for on_down in list(self._waiting):
            try:
                on_down(error)
            except Exception:  # noqa: BLE001 - the others are told, too
                _log.exception("something that was asked of node %s could not be ended", self.node.name)

    def status(self) -> dict[str, Any]:
        """For people and metrics."""
        return {
            "name": self.node.name,
            "url": self.node.url,
            "state": self.state,
            "asked": self.n_asked,
            "asked_bytes": self.bytes_asked,
            "failed": self.n_failed,
            "hedged": self.n_hedged,
            "downs": self.n_downs,
            "sees_this": self.sees_this,
        }
