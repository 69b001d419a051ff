"""Calls as HTTP requests and answers as results and errors; no connection here, so both clients share it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

import numpy as np

from hybridindex.answers import ANSWER_TYPE, decode_answer
from hybridindex.errors import (
    AccessDeniedError,
    DeadlineExceededError,
    HybridIndexError,
    InvalidInputError,
    OverloadedError,
    ProfileError,
    ServiceError,
    UnknownSessionError,
)
from hybridindex.types import SearchResult

__all__ = [
    "Address",
    "Call",
    "call",
    "error_of",
    "json_of",
    "lookahead_call",
    "recent_call",
    "result_of",
    "search_call",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a daemon is: a base URL, and a socket path where it is not TCP."""

    url: str
    uds: str | None = None

    @classmethod
    def parse(cls, address: str) -> Address:
        """``http://…``, ``https://…`` or ``unix:/path``.

        Raises:
            InvalidInputError: neither.
        """
        if address.startswith("unix:") and len(address) > 5:
            return cls(url="http://daemon", uds=address[5:])
        if address.startswith(("http://", "https://")):
            return cls(url=address.rstrip("/"))
        raise InvalidInputError(f"url is {address!r}; expected http://…, https://… or unix:/path/to/socket")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request. ``repeatable``: sending it twice does what sending it once does."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True


def call(method: str, path: str, body: Mapping[str, Any] | None = None, *, repeatable: bool = True) -> Call:
    """A call with a JSON body; keys whose value is None are left out."""
    if body is None:
        return Call(method=method, path=path, repeatable=repeatable)
    content = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
    headers = {"content-type": "application/json"}
    return Call(method=method, path=path, content=content, headers=headers, repeatable=repeatable)


def _queries_call(path: str, queries: Any, options: Mapping[str, Any]) -> Call:
    if not isinstance(queries, np.ndarray) or queries.dtype != np.float32 or queries.ndim not in (1, 2):
        what = f"{queries.dtype} {queries.shape}" if isinstance(queries, np.ndarray) else type(queries).__name__
        raise InvalidInputError(f"queries is {what}; expected a float32 array (d,) or (n, d)")
    rows = np.atleast_2d(queries)
    params = {"n": len(rows), "d": rows.shape[1], **{k: v for k, v in options.items() if v is not None}}
    return Call(
        method="POST",
        path=path,
        params=params,
        content=rows.astype("<f4", copy=False).tobytes(),
        headers={"content-type": "application/octet-stream", "accept": ANSWER_TYPE},
    )


def search_call(queries: Any, session: str | None, **options: Any) -> Call:
    """``queries``: (d,) or (n, d) float32.

    Raises:
        InvalidInputError: something else.
    """
    path = "/v1/search" if session is None else f"/v1/sessions/{quote(session, safe='')}/search"
    return _queries_call(path, queries, options)


def lookahead_call(drafts: Any, session: str, **options: Any) -> Call:
    """As :func:`search_call`. Moving the same lists twice moves them once."""
    return _queries_call(f"/v1/sessions/{quote(session, safe='')}/lookahead", drafts, options)


def recent_call(queries: Any) -> Call:
    """As :func:`search_call`. Sent twice, they would count twice."""
    return replace(_queries_call("/v1/queries/recent", queries, {}), repeatable=False)


def result_of(body: bytes) -> SearchResult:
    """Raises ServiceError where the answer is not one."""
    try:
        return decode_answer(body)
    except InvalidInputError as error:
        raise ServiceError(f"the daemon's answer cannot be read: {error}") from error


def json_of(body: bytes) -> Any:
    """Raises ServiceError where the answer is not JSON."""
    try:
        return json.loads(body)
    except ValueError as error:
        raise ServiceError(f"the daemon's answer is not JSON ({error})") from error


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> HybridIndexError | None:
    """The error that an answer stands for, or None."""
    if status < 400:
        return None
    try:
        problem = json.loads(body)
    except ValueError:
        problem = {}
    if not isinstance(problem, dict):
        problem = {}
    detail = str(problem.get("detail") or f"the daemon answered {status}")
    if status in (429, 503):
        return OverloadedError(detail, retry_after_s=_seconds(headers.get("retry-after")), own_share=status == 429)
    kinds: dict[int, type[HybridIndexError]] = {
        400: InvalidInputError,
        401: AccessDeniedError,
        403: AccessDeniedError,
        408: DeadlineExceededError,
        409: ProfileError,
        413: InvalidInputError,
        415: InvalidInputError,
        504: DeadlineExceededError,
    }
    if status == 404 and str(problem.get("type", "")).endswith(":unknown-session"):
        return UnknownSessionError(detail)
    if status not in kinds:
        detail = f"{detail} (status {status}, request {problem.get('request_id', 'unknown')})"
    return kinds.get(status, ServiceError)(detail)


def _seconds(text: str | None) -> float:
    """Retry-After as seconds; a date, or nonsense, counts as one."""
    try:
        return max(0.0, float(text)) if text is not None else 1.0
    except ValueError:
        return 1.0
