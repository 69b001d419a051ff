"""uvicorn's HTTP protocols with limits: to the time of headers, their size, and the time in which an answer is read.

There are two: on h11, and on httptools where that is installed (the extra ``speed``). The latter is faster, and refuses
requests before they have a task. :mod:`hybridindex.service.http.bodies` limits the time of bodies.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    # The base of the mixin below, for the type checker: uvicorn's two protocols have the same attributes.
    _Protocol = H11Protocol
else:
    _Protocol = object

__all__ = ["MAX_HEAD_BYTES", "SWITCH", "SWITCHED", "Switch", "TimedH11Protocol", "TurnAway", "choose_protocol"]

#: (scope of a POST request, its target, header lines of every answer) -> the whole answer of a refusal, which keeps the
#: connection; None: the request may come in.
TurnAway = Callable[[MutableMapping[str, Any], bytes, bytes], bytes | None]

#: In the scope of a request that asks for another protocol: has the connection given to one, and told so, by its name.
SWITCH = "hybridindex.switch"
Switch = Callable[["OtherProtocol", str], None]
#: In the scope once it was.
SWITCHED = "hybridindex.switched"

#: Limit of a request's line and headers. It is h11's own limit; httptools has none, and there what came with the first
#: bytes is not counted.
MAX_HEAD_BYTES = 1 << 16


class OtherProtocol(Protocol):
    """What the server ends as it does HTTP connections."""

    #: To be called with it when its connection has ended.
    on_end: Callable[[Any], None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...

    def shutdown(self) -> None:
        """Ends it when what has come was answered."""


class _OneWrite:
    """A transport that sends the head of an answer with the first part of its body, in one system call and one packet.

    uvicorn writes them separately, and event loops send at once.
    """

    __slots__ = ("_head", "raw")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.raw = transport
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1") and data.endswith(b"\r\n\r\n"):
            self._head = data
            return
        # uvloop raises where the client is gone before uvicorn was told.
        if not self.raw.is_closing():
            self.raw.write(data)

    def send_head(self) -> None:
        """Of an answer that has no body, as to HEAD."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.send_head()
        self.raw.close()


class _ConnectionTimeouts(_Protocol):
    """Closes a connection when a request's headers, or the reading of its answer, take longer than the keep-alive time.

    uvicorn itself closes only connections that send nothing after an answer.
    """

    _late: asyncio.TimerHandle | None = None
    #: Runs while an answer waits to be read.
    _unread: asyncio.TimerHandle | None = None
    #: When a request was last turned away.
    _turned_s = -math.inf

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_OneWrite(transport))  # type: ignore[arg-type]
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        if self._between_requests():
            self._wait_for_headers()
        super().data_received(data)
        if not self._between_requests():
            self._stop_waiting()

    def _between_requests(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _wait_for_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        left_s = self._turned_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            # One timer for all requests that were turned away.
            self._late = self.loop.call_later(left_s, self._give_up)
        elif self._between_requests() and not self.transport.is_closing():
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.timeout_keep_alive, self._abort)

    def resume_writing(self) -> None:
        self._stop_unread()
        super().resume_writing()

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _abort(self) -> None:
        """close() would wait for a client that never reads."""
        self._unread = None
        self.transport.abort()

    def on_response_complete(self) -> None:
        cast("_OneWrite", self.transport).send_head()
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        # close() would wait for a client that never reads.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> Any:
        self._stop_waiting()
        self._stop_unread()
        super().connection_lost(exc)


class TimedH11Protocol(_ConnectionTimeouts, H11Protocol):
    """On h11."""


def choose_protocol(turn_away: TurnAway) -> type[asyncio.Protocol]:
    """The faster one that is installed. Only httptools asks ``turn_away``."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return TimedH11Protocol

    class TimedHttpToolsProtocol(_ConnectionTimeouts, HttpToolsProtocol):  # type: ignore[misc]
        """On httptools."""

        _in_head = False
        _head_bytes = 0
        #: Bytes since a part of a body, or the length of one, came.
        _stray_bytes = 0
        _strays = False
        #: The body of a request that was turned away is being read.
        _skipping = False

        def data_received(self, data: bytes) -> None:
            was_in_head, self._strays = self._in_head, True
            super().data_received(data)
            self._stray_bytes = self._stray_bytes + len(data) if self._strays else 0
            if self._stray_bytes > MAX_HEAD_BYTES and not self._in_head and not self.transport.is_closing():
                self.transport.abort()  # what follows the last part of a body has no end
            if was_in_head and self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                    self.send_400_response("headers are too large")

        def on_message_begin(self) -> None:
            self._in_head, self._head_bytes, self._strays = True, 0, False
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_head:  # and not behind a body
                super().on_header(name, value)

        def on_chunk_header(self) -> None:
            self._strays = False

        def on_headers_complete(self) -> None:
            self._in_head = False
            if self.parser.should_upgrade():
                cast("dict[str, Any]", self.scope)[SWITCH] = self._switch
            answer = self._turned_away() if self.parser.get_method() == b"POST" else None
            if answer is None:
                super().on_headers_complete()
                return
            self._skipping = True
            self._turned_s = self.loop.time()
            self.server_state.total_requests += 1
            self.transport.write(answer)

        def _unsupported_upgrade_warning(self) -> None:
            """What another protocol was asked for in vain is answered as any request."""

        def _switch(self, other: OtherProtocol, name: str) -> None:
            cast("dict[str, Any]", self.scope)[SWITCHED] = True
            self.cycle.response_started = self.cycle.response_complete = True
            self._stop_waiting()
            self._stop_unread()
            self._unset_keepalive_if_required()
            connections: set[Any] = self.connections
            raw = cast("_OneWrite", self.transport).raw
            connections.discard(self)
            connections.add(other)
            other.on_end = connections.discard
            raw.write(f"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: {name}\r\n\r\n".encode())
            raw.set_protocol(cast("asyncio.BaseProtocol", other))
            other.connection_made(raw)

        def _turned_away(self) -> bytes | None:
            """None while another answer is pending or unread, and where the connection ends with this request."""
            if (
                not self._between_requests()
                or self.flow.write_paused
                or self.transport.is_closing()
                or self.parser.get_http_version() != "1.1"
                or not self.parser.should_keep_alive()
                or self.parser.should_upgrade()
            ):
                return None
            lines = b"".join([b"%b: %b\r\n" % line for line in self.server_state.default_headers])
            scope: Any = self.scope
            scope["method"] = "POST"
            return turn_away(scope, self.url, lines)

        def on_body(self, body: bytes) -> None:
            self._strays = False
            if not self._skipping:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._strays = False
            if self._skipping:
                self._skipping = False
            else:
                super().on_message_complete()

    return TimedHttpToolsProtocol
