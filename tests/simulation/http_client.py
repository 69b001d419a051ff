"""A client of the daemon on a simulated connection: sends as slowly, and reads as late, as its user says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from hybridindex.answer_codec import ANSWER_TYPE
from hybridindex.types import F32
from tests.simulation.virtual.event_loop import Connection, SimLoop
from tests.simulation.virtual.scheduler import ViolationError

__all__ = ["Answer", "Client", "GoneError", "query_bytes"]


class GoneError(ConnectionError):
    """The daemon does not listen, or has closed the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def query_bytes(queries: F32) -> bytes:
    return np.ascontiguousarray(queries, dtype="<f4").tobytes()


class Client:
    """One connection, which is kept between requests."""

    def __init__(self, loop: SimLoop, key: str, limit_s: float) -> None:
        """``limit_s``: from a whole request to its answer."""
        self._loop = loop
        self._key = key
        self._limit_s = limit_s
        self._connection: Connection | None = None
        self._buffer = b""

    def head(self, method: str, path: str, kind: str, length: int) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "host: daemon", f"authorization: Bearer {self._key}"]
        lines += [f"accept: {ANSWER_TYPE}", f"content-length: {length}", f"content-type: {kind}"]
        return "\r\n".join([*lines, "", ""]).encode()

    def send(self, data: bytes) -> None:
        """Raises GoneError."""
        try:
            if self._connection is None or self._connection.closing:
                self._connection, self._buffer = self._loop.connect("10.0.0.1"), b""
            self._connection.send(data)
        except ConnectionError:
            self.leave()
            raise GoneError from None

    async def ask(self, method: str, path: str, body: bytes = b"", kind: str = "application/octet-stream") -> Answer:
        """Raises GoneError, or ViolationError: the answer takes too long."""
        self.send(self.head(method, path, kind, len(body)) + body)
        try:
            async with asyncio.timeout(self._limit_s):
                return await self.read()
        except TimeoutError:
            raise ViolationError(f"{method} {path} has no answer after {self._limit_s:g} s") from None

    async def read(self) -> Answer:
        """The next answer. Raises GoneError."""
        while b"\r\n\r\n" not in self._buffer:
            await self._more()
        head, _, rest = self._buffer.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", 0))
        self._buffer = rest
        while len(self._buffer) < length:
            await self._more()
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        if headers.get("connection") == "close":
            self.leave()
        return Answer(status=int(status.split()[1]), headers=headers, body=body)

    async def _more(self) -> None:
        data = b"" if self._connection is None else await self._connection.read()
        if not data:
            self.leave()
            raise GoneError
        self._buffer += data

    def leave(self) -> None:
        """Hangs up."""
        if self._connection is not None:
            self._connection.leave()
            self._connection = None
        self._buffer = b""
