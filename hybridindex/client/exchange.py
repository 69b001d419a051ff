"""One request and its answer within a time, whatever the other side does meanwhile.

httpx bounds each wait for bytes by itself, and a server that sends a byte now and then is waited for without end. Here
every wait is given what is left of the whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from hybridindex.client.addresses import Addresses
from hybridindex.errors import ServiceError

__all__ = ["Waits", "answer_within", "async_answer_within", "bound_each_wait"]

#: Of a request, what is written between two looks at the clock.
_PIECE_BYTES = 1 << 16


class _Left(float):
    """Seconds that are left, and the time at which none is."""

    until_s: float

    @classmethod
    def of(cls, until_s: float) -> _Left:
        """At least 0.001: some transports take zero for no limit."""
        left = cls(max(until_s - time.monotonic(), 1e-3))
        left.until_s = until_s
        return left


class Waits(dict[str, float]):
    """httpx's limits of a request. Each part of the exchange asks for its own when it begins, and gets what is left."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(dict.fromkeys(("connect", "read", "write", "pool"), timeout_s))
        self._until_s = time.monotonic() + timeout_s

    def __getitem__(self, name: str) -> float:
        return _Left.of(self._until_s)

    def get(self, name: str, default: Any = None) -> Any:
        return _Left.of(self._until_s) if name in self else default


def _over(timeout_s: float) -> str:
    return f"the answer was not whole after {timeout_s:.3g} s"


def answer_within(transport: Any, request: Any, timeout_s: float) -> tuple[Any, bytes]:
    """The answer of an httpx transport, and its body.

    Raises:
        httpx.TransportError: it did not come, or not in time.
        ServiceError: its body cannot be unpacked.
    """
    import httpx

    until_s = time.monotonic() + timeout_s
    answer = transport.handle_request(request)
    parts, whole = [], answer.is_stream_consumed
    try:
        # The limits of httpx end waits; this ends a body whose parts never stop.
        for part in answer.iter_bytes():
            # What is whole already is taken, however late.
            if not whole and time.monotonic() > until_s:
                raise httpx.ReadTimeout(_over(timeout_s))
            parts.append(part)
    except httpx.DecodingError as error:
        raise ServiceError(f"the daemon's answer cannot be unpacked ({error})") from error
    finally:
        answer.close()
    return answer, parts[0] if len(parts) == 1 else b"".join(parts)


async def async_answer_within(transport: Any, request: Any, timeout_s: float) -> tuple[Any, bytes]:
    """As :func:`answer_within`, of an asynchronous transport. ServiceError: it is of another event loop."""
    import httpx

    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            answer = await transport.handle_async_request(request)
            try:
                body: bytes = await answer.aread()
            finally:
                await answer.aclose()
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise httpx.ReadTimeout(_over(timeout_s)) from error
    except httpx.DecodingError as error:
        raise ServiceError(f"the daemon's answer cannot be unpacked ({error})") from error
    except RuntimeError as error:  # asyncio's, of a connection of another loop
        raise ServiceError(
            f"the connections cannot be used ({error}); an AsyncClient belongs to the event loop that used it first: "
            "create one for each"
        ) from error
    return answer, body


def bound_each_wait(transport: Any) -> Any:
    """The same blocking httpx transport, whose waits for bytes of one answer are bounded together. Where httpx is built
    otherwise than it was, waits for the head of an answer are bounded one by one."""
    pool: Any = getattr(transport, "_pool", None)
    backend = getattr(pool, "_network_backend", None)
    if backend is not None:
        pool._network_backend = _Connections(backend)
    return transport


class _Connections:
    """A network backend of httpcore whose connections look at the clock. Any thread."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._addresses = inner, Addresses()

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, **options: Any) -> _Connection:
        """To the first address of the host that takes the connection. Each gets an equal part of what is left."""
        import httpcore

        found = self._addresses.of(host, port, timeout)
        for n_left in range(len(found), 0, -1):
            left_s = _now_left(timeout, "ConnectTimeout")
            part_s = None if left_s is None else left_s / n_left
            try:
                return _Connection(self._inner.connect_tcp(found[-n_left], port, timeout=part_s, **options))
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if n_left == 1:
                    raise
        raise httpcore.ConnectError(f"the name {host} has no address")

    def connect_unix_socket(self, *args: Any, **options: Any) -> _Connection:
        return _Connection(self._inner.connect_unix_socket(*args, **options))

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class _Connection:
    """A network stream of httpcore. One thread at a time."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.close: Callable[[], None] = inner.close
        self.get_extra_info: Callable[[str], Any] = inner.get_extra_info

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data: bytes = self._inner.read(max_bytes, timeout=_now_left(timeout, "ReadTimeout"))
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if len(buffer) <= _PIECE_BYTES:
            self._inner.write(buffer, timeout=_now_left(timeout, "WriteTimeout"))
            return
        rest = memoryview(buffer)
        while rest:
            self._inner.write(rest[:_PIECE_BYTES], timeout=_now_left(timeout, "WriteTimeout"))
            rest = rest[_PIECE_BYTES:]

    def start_tls(self, *args: Any, timeout: float | None = None, **options: Any) -> _Connection:
        left_s = _now_left(timeout, "ConnectTimeout")
        return _Connection(self._inner.start_tls(*args, timeout=left_s, **options))


def _now_left(timeout: float | None, error: str) -> float | None:
    """Raises httpcore's timeout named ``error`` where nothing is left."""
    if not isinstance(timeout, _Left):
        return timeout
    left_s = timeout.until_s - time.monotonic()
    if left_s <= 0:
        import httpcore

        raise getattr(httpcore, error)("timed out")
    return left_s
