"""Kept-alive HTTP/1.1 connections to one node, on an asyncio loop: many requests at once, one on each connection.

Clients of general use spend more time on a request than a small scan takes. The parser is httptools', which uvicorn
reads requests with. No redirects, no proxies, no cookies, no compression.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hybridindex.bearer import bearer
from hybridindex.errors import MissingDependencyError, UnreachableError, how_to_install

__all__ = ["Address", "Connections", "Exchange", "Told", "response_parser"]

_P = TypeVar("_P", bound=asyncio.BaseProtocol)

#: Status, body, and what happened instead.
Told = Callable[[int, bytes, Exception | None], None]

#: Connections that wait for a request; more are closed when they are free. Under load each request has one, and making
#: them anew takes nodes longer than many a search.
_MOST_IDLE = 256
#: Of one answer's headers; and bytes beyond twice those of its body, however it comes.
_MOST_HEADERS, _MOST_BESIDE = 100, 1 << 16

#: In which a connection is made, TLS included. What was tried while the network was cut the system tries again only
#: after longer and longer, and a node that answers pings on other connections may be asked meanwhile.
_CONNECT_WITHIN_S = 2.0
#: For which what was sent may stay unacknowledged, by the system of the other machine: then a connection is ended. Else
#: one that the network was cut under is tried again only after longer and longer, also when the network is whole again.
_ACKNOWLEDGED_WITHIN_S = 4.0


def response_parser() -> Callable[[Any], Any]:
    """What reads an answer. A daemon that is no node does without it.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        from httptools import HttpResponseParser
    except ImportError as error:
        raise MissingDependencyError(f"nodes of a cluster need httptools: {how_to_install('cluster')}") from error
    return HttpResponseParser


def end_unacknowledged(transport: asyncio.BaseTransport, after_s: float) -> None:
    """Has the system end a connection when it did not acknowledge for so long what was sent."""
    connection = transport.get_extra_info("socket")
    if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1e3 * after_s))


class Exchange:
    """A request under way. Told once: an answer, or an error. Everything on the loop's thread."""

    __slots__ = ("_stop", "_told", "most_bytes")

    def __init__(self, told: Told, most_bytes: int) -> None:
        """
        Args:
            told: called with status, body and None; or with 0, no body, and what happened.
            most_bytes: of the answer's body; a longer one is an error.
        """
        self._told: Told | None = told
        self._stop: Callable[[], None] | None = None
        self.most_bytes = most_bytes

    def begin(self, stop: Callable[[], None]) -> bool:
        """``stop``: tells the node that nobody waits any more. False where it was cancelled meanwhile."""
        self._stop = stop
        return self._told is not None

    def settle(self, status: int, body: bytes, error: Exception | None) -> None:
        told, self._told, self._stop = self._told, None, None
        if told is not None:
            told(status, body, error)

    def cancel(self) -> None:
        """Nobody is told any more; the node need not go on."""
        stop, self._told, self._stop = self._stop, None, None
        if stop is not None:
            stop()


class _Connection(asyncio.Protocol):
    """One connection, with one exchange at a time."""

    def __init__(
        self,
        parser: Callable[[Any], Any],
        on_free: Callable[[_Connection], None],
        on_lost: Callable[[_Connection, Exchange | None, list[bytes] | None], bool],
    ) -> None:
        """``on_lost``: given what was under way; whether it goes on elsewhere."""
        self._new_parser, self._on_free, self._on_lost = parser, on_free, on_lost
        self._transport: Any = None
        self._parser: Any = None
        self._exchange: Exchange | None = None
        self._body: list[bytes] = []
        self._length = self._n_headers = self._n_bytes = 0
        #: What was sent on a connection that had answered before: the node may have ended it before it read that.
        self._again: list[bytes] | None = None
        self._used = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        again = self._on_lost(self, exchange, self._again)
        if exchange is not None and not again:
            exchange.settle(0, b"", exc or ConnectionError("the node ended the connection"))

    def data_received(self, data: bytes) -> None:
        self._again = None
        try:
            if self._parser is None:
                raise ConnectionError("the node sent something that nobody asked for")
            self._n_bytes += len(data)
            if self._exchange is not None and self._n_bytes > 2 * self._exchange.most_bytes + _MOST_BESIDE:
                raise ConnectionError(f"the node's answer has {self._n_bytes} bytes, and has not ended")
            self._parser.feed_data(data)
        except Exception as error:  # noqa: BLE001 - whatever a node sends, it ends this connection only
            self._fail(error)

    # httptools

    def on_header(self, _name: bytes, _value: bytes) -> None:
        self._n_headers += 1
        if self._n_headers > _MOST_HEADERS:
            raise ConnectionError("the node's answer has too many headers")

    def on_body(self, body: bytes) -> None:
        self._length += len(body)
        if self._exchange is not None and self._length > self._exchange.most_bytes:
            raise ConnectionError(f"the node's answer has more than {self._exchange.most_bytes} bytes")
        self._body.append(body)

    def on_message_complete(self) -> None:
        parser, exchange = self._parser, self._exchange
        status, stays = parser.get_status_code(), parser.should_keep_alive()
        body = b"".join(self._body)
        self._parser = self._exchange = None
        self._body = []
        if stays:
            self._on_free(self)
        else:
            self.abort()
        if exchange is not None:
            exchange.settle(status, body, None)

    # For :class:`Connections`

    def send(self, exchange: Exchange, parts: list[bytes]) -> None:
        self._exchange, self._parser = exchange, self._new_parser(self)
        self._body, self._length, self._n_headers, self._n_bytes = [], 0, 0, 0
        self._again, self._used = parts if self._used else None, True
        self._transport.write(b"".join(parts))

    def abort(self) -> None:
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: Exception) -> None:
        exchange = self._exchange
        self.abort()
        if exchange is not None:
            exchange.settle(0, b"", error)


class Address:
    """Where a node listens, and what every request to it says."""

    __slots__ = ("_host", "_port", "_tls", "lines")

    def __init__(self, url: str, key: str | None, tls: ssl.SSLContext | None = None) -> None:
        """``tls``: for ``https``; None: the system's authorities. Raises InvalidInputError: no header can carry the
        key."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._host, self._port = parts.hostname, parts.port
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        own = "" if key is None else f"authorization: {bearer(key, 'key')}\r\n"
        #: Of a request's head.
        self.lines = f"host: {parts.netloc}\r\n{own}".encode()

    async def connect(self, make: Callable[[], _P]) -> _P:
        """The protocol of a new connection.

        Raises:
            UnreachableError: there is none.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_WITHIN_S):
                transport, protocol = await loop.create_connection(make, self._host, self._port, ssl=self._tls)
        except TimeoutError as error:
            words = f"no connection to {self._host}:{self._port} within {_CONNECT_WITHIN_S:g} s"
            raise UnreachableError(words) from error
        except Exception as error:
            raise UnreachableError(f"no connection to {self._host}:{self._port}: {error}") from error
        end_unacknowledged(transport, _ACKNOWLEDGED_WITHIN_S)
        return protocol


class Connections:
    """Of one node. Everything on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address) -> None:
        """Raises MissingDependencyError: httptools is not installed."""
        self._loop, self._address, self._parser = loop, address, response_parser()
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._closed = False

    def request(
        self,
        method: str,
        target: str,
        body: bytes,
        exchange: Exchange,
        *,
        kind: str = "",
        accept: str = "",
        lines: str = "",
        once: bool = False,
    ) -> None:
        """Begins ``exchange``; ``target``: path and query. ``kind``, ``accept``: media types of body and answer;
        ``lines``: further header lines, each with its end. ``once``: on a connection of its own, so that it is sent
        once; UnreachableError: it was not."""
        more = f"{lines}content-type: {kind}\r\n" if kind else lines
        more += f"accept: {accept}\r\n" if accept else ""
        head = f"{method} {target} HTTP/1.1\r\n{more}content-length: {len(body)}\r\n".encode()
        parts = [head, self._address.lines, b"\r\n", body]
        if self._idle and not once:
            connection = self._idle.pop()
            if exchange.begin(connection.abort):
                connection.send(exchange, parts)
            else:
                self._idle.append(connection)
            return
        self._send_on_new(exchange, parts)

    def _send_on_new(self, exchange: Exchange, parts: list[bytes]) -> None:
        task = self._loop.create_task(self._open_and_send(exchange, parts))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_and_send(self, exchange: Exchange, parts: list[bytes]) -> None:
        try:
            connection = await self._address.connect(lambda: _Connection(self._parser, self._free, self._lost))
        except UnreachableError as error:
            exchange.settle(0, b"", error)
            return
        self._all.add(connection)
        if self._closed or not exchange.begin(connection.abort):
            self._free(connection)
        else:
            connection.send(exchange, parts)

    def _free(self, connection: _Connection) -> None:
        if len(self._idle) < _MOST_IDLE and not self._closed:
            self._idle.append(connection)
        else:
            connection.abort()

    def _lost(self, connection: _Connection, exchange: Exchange | None, again: list[bytes] | None) -> bool:
        """Whether the exchange goes on: what a connection that had waited did not answer is asked once more."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if exchange is None or again is None or self._closed:
            return False
        self._send_on_new(exchange, again)
        return True

    def drop_idle(self) -> None:
        """Ends those that wait: the node was away, and theirs may lead nowhere."""
        for connection in list(self._idle):
            connection.abort()
        self._idle.clear()

    def close(self) -> None:
        """Exchanges under way end with an error."""
        self._closed = True
        for task in list(self._opening):
            task.cancel()
        for connection in list(self._all):
            exchange = connection._exchange
            connection.abort()
            if exchange is not None:
                exchange.settle(0, b"", ConnectionError("the connection was closed"))
