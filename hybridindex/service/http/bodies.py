"""Reads request bodies within the limits of size and time. ``wire.py`` parses them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from hybridindex.service.config import Limits
from hybridindex.service.http.problems import Problem, ProblemError
from hybridindex.service.http.wire import BodyError

__all__ = ["media_type", "read_body"]


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, limits: Limits) -> bytes:
    """The whole body.

    Args:
        headers: names in lower case.
        receive: the ASGI callable of the request.

    Raises:
        BodyError: compressed, or too large. ProblemError: too slow. ClientDisconnect: the client is gone.
    """
    if b"content-encoding" in headers:
        raise BodyError("Content-Encoding", "is not supported; send the body as it is", 415)
    length = headers.get(b"content-length")
    if length is not None and (not length.isdigit() or int(length[:20]) > limits.max_body_bytes):
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.client_timeout_s):
            return await _read(receive, limits)
    except TimeoutError:
        detail = f"the body did not come within {limits.client_timeout_s:g} s"
        raise ProblemError(Problem(408, "timeout", "Request timeout", detail)) from None


async def _read(receive: Receive, limits: Limits) -> bytes:
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
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limits: Limits) -> BodyError:
    return BodyError("body", f"is too large; expected at most {limits.max_body_bytes} bytes", 413)


def media_type(headers: Mapping[bytes, bytes]) -> str:
    """The body's media type, lower case, without parameters; empty without a header."""
    return headers.get(b"content-type", b"").decode("latin-1").split(";")[0].strip().lower()
