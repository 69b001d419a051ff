"""A network between simulated nodes: connections in memory, each end on an event loop of its own.

Bytes take time, arrive in order, and maybe in pieces. A link may be cut, which holds them up until it is whole again; a
connection may be lost, with all that is on its way.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.simulation.virtual.event_loop import SimLoop
from tests.simulation.virtual.scheduler import Scheduler

__all__ = ["End", "Network"]

#: After which a connection that nobody accepts is given up.
_CONNECT_S = 100.0
#: Of what is written, and of writes on a link that loses connections.
_IN_PIECES, _LOST = 0.2, 0.1
_LONGEST_S = 0.1

_Place = tuple[SimLoop, str, Callable[[], asyncio.Protocol]]


class Network:
    """Who listens, and what is wrong between whom. Nodes have names."""

    def __init__(self, sim: Scheduler, draw: random.Random) -> None:
        self._sim = sim
        self._draw = draw
        #: Mean seconds of each link.
        self._means: dict[frozenset[str], float] = {}
        #: Loop, name and maker of protocols, of what listens; by port.
        self._places: dict[int, _Place] = {}
        self._names: dict[int, str] = {}
        #: Ordered.
        self._ends: dict[End, None] = {}
        #: Until when nothing passes; and connections are lost.
        self.cut: dict[frozenset[str], float] = {}
        self.losing: dict[frozenset[str], float] = {}
        self.n_lost = 0

    def listen(self, port: int, loop: SimLoop, name: str, make: Callable[[], asyncio.Protocol]) -> None:
        """Connections to ``port`` are accepted on ``loop`` from now on."""
        self._places[port], self._names[port] = (loop, name, make), name

    def go_away(self, name: str) -> None:
        """Nobody of this name listens any more, nor reaches others; its connections end."""
        self._places = {port: place for port, place in self._places.items() if place[1] != name}
        for end in [end for end in self._ends if name in end.link]:
            end.lose()

    def heal(self) -> None:
        """Nothing is wrong any more; what is held up comes when it was to come."""
        self.cut.clear()
        self.losing.clear()

    def dialler(self, loop: SimLoop, name: str) -> Callable[[Callable[[], Any], int], Any]:
        """:attr:`SimLoop.dial` for who is called ``name``."""
        return partial(self._dial, loop, name)

    def due(self, link: frozenset[str]) -> float:
        """When what is sent now arrives."""
        mean_s = self._means.setdefault(link, 10 ** self._draw.uniform(-4, -1.8))
        return max(self._sim.now, self.cut.get(link, 0.0)) + min(self._draw.expovariate(1 / mean_s), _LONGEST_S)

    def loses(self, link: frozenset[str]) -> bool:
        """Whether the connection ends now."""
        return self.losing.get(link, 0.0) > self._sim.now and self._draw.random() < _LOST

    def in_pieces(self, data: bytes) -> list[bytes]:
        if len(data) < 2 or self._draw.random() >= _IN_PIECES:
            return [data]
        at = self._draw.randrange(1, len(data))
        return [data[:at], data[at:]]

    async def _dial(self, loop: SimLoop, name: str, make: Callable[[], Any], port: int) -> tuple[Any, Any]:
        link = frozenset((name, self._names[port]))
        takes_s = self._tried_again(link) + self.due(link) - max(self._sim.now, self.cut.get(link, 0.0))
        await asyncio.sleep(min(takes_s, _CONNECT_S))
        if takes_s > _CONNECT_S:
            raise OSError("no answer")
        if port not in self._places:
            raise ConnectionRefusedError(f"nobody listens on {port}")
        there, other, make_there = self._places[port]
        near, far = End(self, loop, link, other), End(self, there, link, name)
        near.other, far.other = far, near
        self._ends |= {near: None, far: None}
        far.call(lambda: far.open(make_there()))
        near.open(protocol := make())
        return near, protocol

    def _tried_again(self, link: frozenset[str]) -> float:
        """Seconds until what asks for a connection is sent and not lost: as systems do, after 1, 3, 7, 15 s."""
        after_s, waits_s = 0.0, 1.0
        while self._sim.now + after_s < self.cut.get(link, 0.0):
            after_s, waits_s = after_s + waits_s, 2 * waits_s
        return after_s

    def forget(self, end: End) -> None:
        self._ends.pop(end, None)


class End(asyncio.Transport):
    """One end of a connection."""

    other: End

    def __init__(self, network: Network, loop: SimLoop, link: frozenset[str], peer: str) -> None:
        super().__init__({"peername": (peer, 1)})
        self.link = link
        self._network, self._loop = network, loop
        self._protocol: Any = None
        #: On its way: bytes; None: the other end was closed.
        self._coming: deque[bytes | None] = deque()
        self._due = 0.0
        self._closing = self._ended = False

    def open(self, protocol: Any) -> None:
        if not self._ended:
            self._protocol = protocol
            protocol.connection_made(self)

    def call(self, function: Callable[[], object]) -> None:
        """On the loop of this end."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    # From the other end, on its loop

    def take(self, data: bytes | None) -> None:
        due = self._due = max(self._due, self._network.due(self.link))
        self.call(lambda: self._expect(data, due))

    def _expect(self, data: bytes | None, due: float) -> None:
        self._coming.append(data)
        self._loop.call_at(due, self._arrive)

    def _arrive(self) -> None:
        data = self._coming.popleft()
        if self._ended or self._closing:
            return
        if data is None:
            self._end(None)
        else:
            self._protocol.data_received(data)

    def lose(self) -> None:
        """Both ends find the connection gone; what is on its way is, too."""
        self._network.n_lost += 1
        for end in (self, self.other):
            if not end._ended:
                end._closing = True
                end.call(partial(end._end, ConnectionResetError("the connection was lost")))

    def _end(self, error: Exception | None) -> None:
        if self._ended:
            return
        self._ended = self._closing = True
        self._network.forget(self)
        if self._protocol is not None:
            self._protocol.connection_lost(error)

    # asyncio.Transport

    def write(self, data: Any) -> None:
        if self._closing:
            return
        if self._network.loses(self.link):
            self.lose()
            return
        for piece in self._network.in_pieces(bytes(data)):
            self.other.take(piece)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self.other.take(None)
            self._loop.call_soon(self._end, None)

    abort = close
