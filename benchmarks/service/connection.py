"""A load generator's side of HTTP: kept connections that send prepared bytes and parse no more than they must.

A generator that shares cores with the daemon must be cheap: about 50 us a request, a tenth of what httpx takes. For
answers of the daemon alone: every one has a length or no body. Nothing is retried.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

__all__ = ["Answer", "Connection", "Pool", "request_bytes"]


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, head as it came, and body."""

    status: int
    head: bytes
    body: bytes

    def header(self, name: str) -> str | None:
        """The value of one header, by its lower-case name."""
        at = self.head.find(b"\r\n" + name.encode() + b":")
        if at < 0:
            return None
        start = at + len(name) + 3
        end = self.head.find(b"\r\n", start)
        return self.head[start : end if end >= 0 else None].strip().decode()


def request_bytes(
    method: str, target: str, body: bytes = b"", *, key: str | None = None, kind: str = "", accept: str = ""
) -> bytes:
    """One whole request. ``kind``: Content-Type."""
    lines = [f"{method} {target} HTTP/1.1", "host: daemon", f"content-length: {len(body)}"]
    for name, value in (("authorization", key and f"Bearer {key}"), ("content-type", kind), ("accept", accept)):
        if value:
            lines.append(f"{name}: {value}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


class Connection(asyncio.Protocol):
    """One connection; one request at a time. On one event loop."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._waiting: asyncio.Future[Answer] | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or self._waiting is None:
            return
        head = bytes(self._buffer[:end]).lower()
        at = head.find(b"\r\ncontent-length:")
        length = 0 if at < 0 else int(head[at + 17 :].split(b"\r\n", 1)[0])
        if len(self._buffer) < end + 4 + length:
            return
        answer = Answer(int(head[9:12]), head, bytes(self._buffer[end + 4 : end + 4 + length]))
        del self._buffer[: end + 4 + length]
        waiting, self._waiting = self._waiting, None
        if b"\r\nconnection: close" in head:
            self.close()
        if not waiting.done():
            waiting.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(exc or ConnectionResetError("closed before the answer"))

    async def ask(self, request: bytes) -> Answer:
        """Raises ConnectionError where the daemon ends the connection first."""
        if self.closed or self._transport is None:
            raise ConnectionResetError("the connection is closed")
        assert self._waiting is None, "one request at a time"
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._waiting

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.close()


class Pool:
    """Up to ``most`` connections to one port of this machine, opened as they are needed. On one event loop."""

    def __init__(self, port: int, most: int) -> None:
        self._port = port
        self._idle: list[Connection] = []
        self._room = asyncio.Semaphore(most)
        #: Connections that were opened.
        self.opened = 0

    async def ask(self, request: bytes) -> Answer:
        """Waits for a connection where all are busy. Raises ConnectionError."""
        async with self._room:
            connection = await self._take()
            try:
                return await connection.ask(request)
            except BaseException:
                # Cancelled, its answer may still come: nobody else must get it.
                connection.close()
                raise
            finally:
                if not connection.closed:
                    self._idle.append(connection)

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        self.opened += 1
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
