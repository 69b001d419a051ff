"""Reads and parses request bodies within the limits of size, time and memory. ``wire.py`` has the formats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from hybridindex.errors import OverloadedError
from hybridindex.service.config import Limits
from hybridindex.service.http.problems import Problem, ProblemError
from hybridindex.service.http.wire import BodyError, parsed_bytes
from hybridindex.service.intake.request_memory import Charge

__all__ = ["CHARGE", "LARGE_JSON", "hold", "media_type", "parse_within", "read_body"]

#: Key of the :class:`Charge` in a request's scope.
CHARGE = "hybridindex.charge"
#: Larger JSON is parsed and written on a thread.
LARGE_JSON = 1 << 20
T = TypeVar("T")


def hold(charge: Charge, nbytes: int) -> None:
    """Lets a request hold ``nbytes`` from here on.

    Raises:
        OverloadedError: there is no room now. BodyError: there never is.
    """
    if nbytes > charge.most:
        words = (
            f"takes {nbytes} bytes of memory with its answer; one request may have {charge.most}: send fewer queries"
        )
        raise BodyError("body", words, 413)
    charge.hold(nbytes)


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, limits: Limits, charge: Charge) -> bytes:
    """The whole body.

    Args:
        headers: names in lower case.
        receive: the ASGI callable of the request.
        charge: holds twice the body, its parts and the whole, before they come.

    Raises:
        BodyError: compressed, or too large. ProblemError: too slow. ClientDisconnect: the client is gone.
        OverloadedError: there is no memory for it.
    """
    if b"content-encoding" in headers:
        raise BodyError("Content-Encoding", "is not supported; send the body without compression", 415)
    length = headers.get(b"content-length")
    if length is not None and (len(length) > 20 or not length.isdigit() or int(length) > limits.max_body_bytes):
        raise _too_large(limits)
    if length is not None:
        hold(charge, 2 * int(length))
    try:
        async with asyncio.timeout(limits.client_timeout_s) as limit:
            with charge.reading(limit):
                return await _read(receive, limits, charge)
    except TimeoutError:
        if limit.when() == 0.0:
            raise OverloadedError("the daemon is about to stop; ask another one", retry_after_s=1) from None
        detail = f"the body did not come within {limits.client_timeout_s:g} s"
        raise ProblemError(Problem(408, "timeout", "Request timeout", detail)) from None


async def parse_within(charge: Charge, body: bytes, media: str, parse: Callable[[], T]) -> T:
    """What ``parse`` makes of ``body``, of media type ``media``. What large JSON takes is held meanwhile.

    Raises:
        BodyError: it is wrong, or takes too much. OverloadedError: there is no memory for it.
    """
    # Parsing float32 bodies copies nothing; parsing JSON takes time.
    if len(body) <= LARGE_JSON or media != "application/json":
        return parse()
    hold(charge, 2 * len(body) + parsed_bytes(body))
    parsed = await asyncio.to_thread(parse)
    hold(charge, 2 * len(body))
    return parsed


async def _read(receive: Receive, limits: Limits, charge: Charge) -> bytes:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > limits.max_body_bytes:
            raise _too_large(limits)
        if 2 * size > charge.nbytes:
            hold(charge, 2 * size)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limits: Limits) -> BodyError:
    return BodyError("body", f"is too large; expected at most {limits.max_body_bytes} bytes", 413)


def media_type(headers: Mapping[bytes, bytes]) -> str:
    """The body's media type, lower case, without parameters; empty without a header."""
    return headers.get(b"content-type", b"").decode("latin-1").split(";")[0].strip().lower()
