"""uvicorn's HTTP protocols with an end to patience: for headers that do not come, or do not end, and for answers that
are not taken.

Two of them: on h11, and on httptools where that is installed (the extra ``speed``), which takes less time.
Bodies that do not come are :mod:`hybridindex.service.app`'s business.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from hybridindex.errors import MissingDependencyError

try:
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise MissingDependencyError("the daemon needs uvicorn: pip install 'hybridindex[service]'") from error

if TYPE_CHECKING:
    # The half of a protocol that the other half stands on; both of uvicorn's have the same.
    _Protocol = H11Protocol
else:
    _Protocol = object

__all__ = ["PatientProtocol", "choose_protocol"]

#: As h11 has it. httptools has no limit of its own.
_MAX_HEAD_BYTES = 1 << 16


class _OneWrite:
    """A transport that keeps the head of an answer back until its body comes: one system call and one packet for both.

    uvicorn writes them apart, and event loops send what they can at once.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1") and data.endswith(b"\r\n\r\n"):
            self._head = data
            return
        self._transport.write(data)

    def close(self) -> None:
        if self._head:
            self.write(b"")
        self._transport.close()


class _Patience(_Protocol):
    """Closes a connection on which a request's headers, or the taking of its answer, last longer than the keep-alive
    time. (uvicorn itself only ends connections that say nothing at all after an answer.)"""

    _late: asyncio.TimerHandle | None = None

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
        if self._between_requests() and not self.transport.is_closing():
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        # close() would wait for a client that never reads the rest.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> Any:
        self._stop_waiting()
        super().connection_lost(exc)


class PatientProtocol(_Patience, H11Protocol):
    """On h11."""


def choose_protocol() -> type[asyncio.Protocol]:
    """The faster one that is installed."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return PatientProtocol

    class FastPatientProtocol(_Patience, HttpToolsProtocol):  # type: ignore[misc]
        """On httptools, with a limit to headers: what came with their first bytes, and 64 KiB more."""

        _in_head = False
        _head_bytes = 0

        def data_received(self, data: bytes) -> None:
            was_in_head = self._in_head
            super().data_received(data)
            if was_in_head and self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
                    self.send_400_response("headers are too large")

        def on_message_begin(self) -> None:
            self._in_head, self._head_bytes = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()

    return FastPatientProtocol
