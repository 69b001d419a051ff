"""The search routes, as plain ASGI.

They serve thousands of requests a second. Without a framework's request and response objects, a request costs half as
much beside the search. ``middleware.py`` turns errors into problem documents; ``app.py`` has all other routes, and
describes these two in the OpenAPI document.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TypeVar
from urllib.parse import parse_qsl

from hybridindex.answer_codec import ANSWER_TYPE, encode_answer
from hybridindex.service.core import Service
from hybridindex.service.http.bodies import CHARGE, LARGE_JSON, hold, media_type, parse_within, read_body
from hybridindex.service.http.middleware import CALLER, Receive, Scope, Send
from hybridindex.service.http.requests import Requests
from hybridindex.service.http.wire import BodyError, accepts_binary, to_json_answer
from hybridindex.service.observe.metrics import Metrics
from hybridindex.types import SearchResult

__all__ = ["SearchRoute", "options_of"]

#: What a neighbour takes in an answer: arrays, a copy of them, and the bytes to send; in JSON lists and text besides.
_ROW_BYTES, _JSON_ROW_BYTES = 36, 200
#: Longer headers and query strings are not cached.
_SHORT = 256
T = TypeVar("T")
Parse = Callable[[bytes, str, Mapping[str, str]], T]
_BINARY = (b"content-type", ANSWER_TYPE.encode())
_JSON = (b"content-type", b"application/json")


#: They take tens of milliseconds to make, on the event loop: the same serve all routes, and other generations like one.
_requests = lru_cache(maxsize=16)(Requests)


class SearchRoute:
    """``POST /v1/search``, within a session where the path names one. On the event loop."""

    def __init__(self, service: Service, metrics: Metrics, prefix: str = "/v1") -> None:
        """``prefix``: of the index's routes."""
        self.path = f"{prefix}/search"
        self._service = service
        self._metrics = metrics
        self._of: tuple[int, int, int] | None = None

    @property
    def requests(self) -> Requests:
        """What the routes take of the index that serves."""
        index, router = self._service.index, self._service.router
        if self._of != (of := (index.dim, index.nlist, len(router.devices))):
            self._requests = _requests(self._service.config.limits, *of)
            self._of = of
        return self._requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        asked = await self.read(scope, receive, headers, self.requests.read_search)
        session = scope["path_params"].get("session")
        binary = _binary(headers.get(b"accept", b""))
        row_bytes = _ROW_BYTES if binary else _JSON_ROW_BYTES
        # The router copies the queries, and ids of filters are sorted into a copy.
        filters = sum(ids.nbytes for ids in (asked.allow_ids, asked.deny_ids) if ids is not None)
        hold(scope[CHARGE], 2 * (asked.queries.nbytes + filters) + len(asked.queries) * asked.k * row_bytes)
        result = await self._service.search(asked, scope[CALLER].name, session)
        began = time.perf_counter()
        answer = encode_answer(result) if binary else await _to_json(result)
        self._metrics.time_stage("encode", time.perf_counter() - began)
        length = (b"content-length", str(len(answer)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [_BINARY if binary else _JSON, length]})
        await send({"type": "http.response.body", "body": answer})

    async def read(self, scope: Scope, receive: Receive, headers: dict[bytes, bytes], parse: Parse[T]) -> T:
        """Reads a request's queries and options. ``parse``: one of ``requests.py``."""
        charge = scope[CHARGE]
        body = await read_body(headers, receive, self._service.config.limits, charge)
        began = time.perf_counter()
        kind, options = media_type(headers), options_of(scope)
        parsed = await parse_within(charge, body, kind, lambda: parse(body, kind, options))
        self._metrics.time_stage("parse", time.perf_counter() - began)
        return parsed


async def _to_json(result: SearchResult) -> bytes:
    if result.ids.nbytes > LARGE_JSON:
        return await asyncio.to_thread(lambda: json.dumps(to_json_answer(result)).encode())
    return json.dumps(to_json_answer(result)).encode()


def _binary(accept: bytes) -> bool:
    read = _accepts if len(accept) <= _SHORT else _accepts.__wrapped__
    return read(accept)


@lru_cache(maxsize=256)
def _accepts(accept: bytes) -> bool:
    return accepts_binary(accept.decode("latin-1"))


def options_of(scope: Scope) -> dict[str, str]:
    """The options of the query string. Cached: do not change the dictionary.

    Raises:
        BodyError: it names an option twice.
    """
    text: bytes = scope["query_string"]
    read = _options if len(text) <= _SHORT else _options.__wrapped__
    return read(text)


@lru_cache(maxsize=1024)
def _options(text: bytes) -> dict[str, str]:
    pairs = parse_qsl(text.decode("latin-1"), keep_blank_values=True)
    options = dict(pairs)
    if len(options) != len(pairs):
        raise BodyError("query string", "names an option twice")
    return options
