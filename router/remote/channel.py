"""Scans asked of one node: all on one connection, which is made when it is needed, and again after it was lost.

A request of its own for each scan takes longer than a small scan does. So an HTTP/1.1 connection, with its key and TLS,
is upgraded once; then :mod:`hybridindex.router.remote.frames` go both ways, many scans at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from functools import partial
from typing import Any

from hybridindex.errors import UnreachableError
from hybridindex.router.remote.connection import Address, Exchange
from hybridindex.router.remote.frames import (
    ANSWER,
    ASK,
    CANCEL,
    CHANNEL_PATH,
    REFUSAL,
    UPGRADE,
    FrameReader,
    frame,
)

__all__ = ["Channel"]

#: Of the answer that begins a channel.
_MOST_HEAD_BYTES = 1 << 16
_SWITCHED = re.compile(rb"HTTP/1\.1 101[ \r]")
#: In which a connection that was made is switched to frames.
_SWITCH_WITHIN_S = 2.0
#: What an asking node numbers its scans up to, before it begins anew.
_NUMBERS = 1 << 32


class _Open:
    """A scan that was asked, or waits for the connection."""

    __slots__ = ("again", "exchange", "frame")

    def __init__(self, exchange: Exchange, frame: bytes) -> None:
        self.exchange, self.frame = exchange, frame
        #: It was asked on a connection that was lost.
        self.again = False


class _Wire(asyncio.Protocol):
    """One connection: the upgrade, then frames."""

    def __init__(self, channel: Channel, request: bytes) -> None:
        self._channel, self._request = channel, request
        #: Of the answer to it; None: frames come.
        self._head: bytes | None = b""
        self._reader = FrameReader(channel.expects, channel.answered)
        self._error: Exception | None = None
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if self._channel.made(self):
            self.transport.write(self._request)
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        try:
            if self._head is not None:
                data = self._begin(self._head + data)
            self._reader.feed(data)
        except Exception as error:  # noqa: BLE001 - whatever a node sends, it ends this connection only
            self.end(error)

    def _begin(self, head: bytes) -> bytes:
        """Returns what came after the answer's head."""
        before, found, rest = head.partition(b"\r\n\r\n")
        if not found:
            if len(head) > _MOST_HEAD_BYTES:
                raise ConnectionError("the node's answer has too many headers")
            self._head = head
            return b""
        if not _SWITCHED.match(before):
            line = before.partition(b"\r\n")[0][:100].decode("latin-1")
            raise ConnectionError(f"the node opens no channel for scans: {line}: {rest[:200]!r}")
        self._head = None
        self._channel.opened(self)
        return rest

    def connection_lost(self, exc: Exception | None) -> None:
        error = exc or ConnectionError("the node ended the connection")
        self._channel.lost(self, error, may_go_on=self._head is None)

    def end(self, error: Exception, *, may_go_on: bool = False) -> None:
        self._error = error
        self.transport.abort()
        self._channel.lost(self, error, may_go_on=may_go_on)


class Channel:
    """To one node. Everything on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address) -> None:
        self._loop, self._address = loop, address
        upgrade = f"connection: upgrade\r\nupgrade: {UPGRADE}\r\n\r\n".encode()
        self._request = b"".join((f"GET {CHANNEL_PATH} HTTP/1.1\r\n".encode(), address.lines, upgrade))
        self._numbers = itertools.count()
        #: Of any answer, also of one that nobody waits for any more.
        self._most_bytes = 0
        #: By number.
        self._asked: dict[int, _Open] = {}
        #: Made or being made; None: neither.
        self._wire: _Wire | None = None
        self._opening: asyncio.Task[None] | None = None
        self._is_open = self._closed = False

    def ask(self, options: str, body: bytes, exchange: Exchange) -> None:
        """Begins ``exchange``: a scan, with its options as a query string."""
        number = next(self._numbers) % _NUMBERS
        if not exchange.begin(partial(self._cancel, number)):
            return
        head = options.encode()
        self._send(number, _Open(exchange, frame(ASK, number, head, body, extra=len(head))))

    def _send(self, number: int, asked: _Open) -> None:
        if self._closed:
            asked.exchange.settle(0, b"", ConnectionError("the connection was closed"))
            return
        self._asked[number] = asked
        self._most_bytes = max(self._most_bytes, asked.exchange.most_bytes)
        if self._is_open:
            assert self._wire is not None
            self._wire.transport.write(asked.frame)
        elif self._opening is None and self._wire is None:
            self._opening = self._loop.create_task(self._connect())

    def _cancel(self, number: int) -> None:
        if self._asked.pop(number, None) is not None and self._is_open:
            assert self._wire is not None
            self._wire.transport.write(frame(CANCEL, number))

    async def _connect(self) -> None:
        try:
            wire = await self._address.connect(lambda: _Wire(self, self._request))
        except UnreachableError as error:
            self._opening = None
            if isinstance(error.__cause__, TimeoutError):
                self._ask_again(error)
            else:
                self._settle_all(error)
        else:
            self._loop.call_later(_SWITCH_WITHIN_S, self._is_late, wire)
        finally:
            if self._opening is asyncio.current_task():
                self._opening = None

    def _is_late(self, wire: _Wire) -> None:
        """The connection should be switched by now."""
        if self._wire is wire and not self._is_open:
            error = TimeoutError(f"the node opened no channel for scans within {_SWITCH_WITHIN_S:g} s")
            wire.end(error, may_go_on=True)

    # For the connection

    def made(self, wire: _Wire) -> bool:
        """Whether it is wanted."""
        self._wire = None if self._closed else wire
        return not self._closed

    def opened(self, wire: _Wire) -> None:
        """What waits is asked."""
        self._is_open = True
        wire.transport.write(b"".join([asked.frame for asked in self._asked.values()]))

    def expects(self, kind: int, number: int, length: int) -> bool:
        """Whether the answer is still waited for.

        Raises:
            ConnectionError: it is none, or longer than it can be.
        """
        if kind not in {ANSWER, REFUSAL}:
            raise ConnectionError(f"the node sent a frame of kind {kind}")
        asked = self._asked.get(number)
        most_bytes = self._most_bytes if asked is None else asked.exchange.most_bytes
        if length > most_bytes:
            raise ConnectionError(f"the node's answer has {length} bytes, more than {most_bytes}")
        return asked is not None

    def answered(self, kind: int, number: int, extra: int, payload: bytes) -> None:
        """The exchange has ended."""
        asked = self._asked.pop(number, None)
        if asked is not None:
            asked.exchange.settle(200 if kind == ANSWER else extra, payload, None)

    def lost(self, wire: _Wire, error: Exception, *, may_go_on: bool) -> None:
        """What the node may not have read, because it had ended the connection, is asked once more."""
        if self._wire is not wire:
            return
        self._wire, self._is_open = None, False
        if may_go_on:
            self._ask_again(error)
        else:
            self._settle_all(error)

    def _ask_again(self, error: Exception) -> None:
        """Once; who was asked again already is told of ``error``."""
        left, self._asked = self._asked, {}
        for number, asked in left.items():
            if asked.again:
                asked.exchange.settle(0, b"", error)
            else:
                asked.again = True
                self._send(number, asked)

    def _settle_all(self, error: Exception) -> None:
        left, self._asked = self._asked, {}
        for asked in left.values():
            asked.exchange.settle(0, b"", error)

    # Its end

    def drop(self) -> None:
        """Ends the connection: the node was away, and it may lead nowhere. What was asked fails."""
        if self._wire is not None:
            self._wire.end(ConnectionError("the node is away"))

    def close(self) -> None:
        """Exchanges under way end with an error."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        error = ConnectionError("the connection was closed")
        if self._wire is not None:
            self._wire.end(error)
        self._settle_all(error)
