"""The profiler's client of one OpenAI-compatible server: its models, its KV cache, timed completions.

Every answer is bounded in bytes and in time. Every failure is an :class:`LLMServerError` that names the address and
what came back.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from hybridindex.bearer import bearer
from hybridindex.errors import InvalidInputError, LLMServerError, MissingDependencyError, how_to_install
from hybridindex.llm.addresses import base_url
from hybridindex.llm.events import EventReader, parse_object, shown
from hybridindex.llm.models import max_tokens_of, names_of
from hybridindex.llm.refusals import NOT_YET, refusal_of
from hybridindex.profiler.llm.metrics import CacheState, read_cache_state
from hybridindex.profiler.llm.stream import chunk_of

__all__ = ["Answer", "LLMServer", "ServedModel"]

#: Answers that are not streamed: model lists, metrics, errors.
_MAX_BODY_BYTES: Final = 8 << 20
_MAX_ERROR_BYTES: Final = 64 << 10
_ROOT: Final = "/v1"
#: Fields beyond OpenAI's, tried in this order until a server accepts them: vLLM, SGLang and llama-server know the
#: first, strict servers the last.
_DIALECTS: Final[tuple[dict[str, Any], ...]] = (
    {"ignore_eos": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}},
    {},
)
#: Statuses of servers without metrics; llama-server answers 501 unless it is started with --metrics.
_NO_METRICS: Final = (404, 405, 501)
_METRICS_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that a server names."""

    name: str
    #: All that it goes by; ``name`` is the first.
    names: tuple[str, ...]
    #: Most tokens of prompt and answer together; None where the server does not tell.
    max_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One timed completion. Times in seconds from just before the request was sent."""

    first_token_s: float
    total_s: float
    #: Time per output token after the first; 0 for a single token.
    per_token_s: float
    input_tokens: int | None
    output_tokens: int


class LLMServer:
    """A client of one server. An async context manager; on one event loop. Proxies and redirects are not followed."""

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float = 60.0, connections: int = 64) -> None:
        """``timeout_s`` bounds each whole request.

        Raises:
            InvalidInputError: a bad address or time. MissingDependencyError: httpx is not installed.
        """
        if isinstance(timeout_s, bool) or not math.isfinite(timeout_s) or not 0 < timeout_s <= 3600:
            raise InvalidInputError(f"timeout_s is {timeout_s!r}; expected seconds above 0, an hour at most")
        try:
            import httpx
        except ImportError as error:
            raise MissingDependencyError(f"profiling an LLM needs httpx: {how_to_install('client')}") from error
        self.url = base_url(url)
        self._httpx = httpx
        self._timeout_s = timeout_s
        self._dialect = _DIALECTS[0]
        headers = {"accept-encoding": "identity", "user-agent": "hybridindex"}
        if key is not None:
            headers["authorization"] = bearer(key, "key (HYBRIDINDEX_LLM_KEY of the environment)")
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=timeout_s,
            trust_env=False,
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )

    async def __aenter__(self) -> LLMServer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def models(self) -> list[ServedModel]:
        """What the server says that it serves."""
        body = await self._get(f"{_ROOT}/models")
        listed = parse_object(body, f"{self.url}{_ROOT}/models").get("data")
        if not isinstance(listed, list) or not all(
            isinstance(m, dict) and isinstance(m.get("id"), str) for m in listed
        ):
            raise LLMServerError(f"{self.url}{_ROOT}/models lists no models: {shown(body)}")
        return [ServedModel(name=m["id"], names=names_of(m), max_tokens=max_tokens_of(m)) for m in listed]

    async def cache_state(self) -> CacheState | None:
        """The KV cache as ``/metrics`` tells; None where the server has no such page, or another one's.

        Raises:
            LLMServerError: the page is there and cannot be read: refused, too large, or not within seconds.
        """
        try:
            body = await self._get("/metrics", min(_METRICS_S, self._timeout_s))
        except LLMServerError as error:
            if error.status in _NO_METRICS:
                return None
            raise
        return read_cache_state(body.decode("utf-8", "replace"))

    async def wait_ready(self, wait_s: float) -> None:
        """Until the server lists its models; ``wait_s`` bounds how long it may refuse connections or load.

        Raises:
            LLMServerError: the last reason, when the time is over; at once where it is another one.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                await self.models()
                return
            except LLMServerError as error:
                left = deadline - time.monotonic()
                if error.status not in NOT_YET or left <= 0:
                    raise
                await asyncio.sleep(min(0.5, left))

    async def settle_dialect(self, model: str, prompt: str) -> Answer:
        """A first completion, which finds out what fields the server takes."""
        for dialect in _DIALECTS:
            self._dialect = dialect
            try:
                return await self.complete(model, prompt, 2)
            except LLMServerError as error:
                if error.status not in (400, 422) or dialect is _DIALECTS[-1]:
                    raise
        raise AssertionError("unreachable")

    async def complete(self, model: str, prompt: str, max_tokens: int) -> Answer:
        """One streamed completion, timed.

        Raises:
            LLMServerError: no whole answer in time.
        """
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        content = json.dumps({**body, **self._dialect}).encode()
        started = time.perf_counter()
        reader = EventReader()
        first_s = last_s = 0.0
        n_chunks, finished = 0, False
        input_tokens = output_tokens = None
        async with self._response("POST", f"{_ROOT}/completions", content) as response:
            async for portion in response.aiter_raw():
                for chunk in map(chunk_of, reader.feed(portion)):
                    now = time.perf_counter() - started
                    if chunk.text is not None:
                        first_s, last_s = first_s or now, now
                        n_chunks += 1
                    finished = finished or bool(chunk.finish_reason)
                    input_tokens = chunk.prompt_tokens if chunk.prompt_tokens is not None else input_tokens
                    output_tokens = chunk.completion_tokens if chunk.completion_tokens is not None else output_tokens
                if reader.done:
                    break
        n_output = n_chunks if output_tokens is None else output_tokens
        if not (reader.done or finished) or n_chunks == 0:
            raise LLMServerError(f"{self.url} broke off after {n_chunks} chunk(s) of an answer of {max_tokens} tokens")
        return Answer(
            first_token_s=first_s,
            total_s=last_s,
            per_token_s=(last_s - first_s) / (n_output - 1) if n_output > 1 else 0.0,
            input_tokens=input_tokens,
            output_tokens=n_output,
        )

    async def count_tokens(self, model: str, prompt: str) -> int:
        """Tokens of a prompt, as the server counts them in an answer of one token.

        Raises:
            LLMServerError: it does not count.
        """
        content = json.dumps({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
        async with self._response("POST", f"{_ROOT}/completions", content) as response:
            answer = parse_object(await self._body(response, _MAX_BODY_BYTES), f"the answer of {self.url}")
        usage = answer.get("usage")
        n = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise LLMServerError(f"{self.url} does not count prompt tokens (usage.prompt_tokens is {shown(n)})")
        return n

    async def _get(self, path: str, timeout_s: float | None = None) -> bytes:
        async with self._response("GET", path, timeout_s=timeout_s) as response:
            return await self._body(response, _MAX_BODY_BYTES)

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, content: bytes | None = None, *, timeout_s: float | None = None
    ) -> AsyncIterator[Any]:
        """A response with status 200 and a body as it was sent, within the time limit."""
        where, limit_s = f"{self.url}{path}", self._timeout_s if timeout_s is None else timeout_s
        headers = {} if content is None else {"content-type": "application/json"}
        try:
            async with (
                asyncio.timeout(limit_s),
                self._client.stream(method, where, content=content, headers=headers) as response,
            ):
                if response.status_code != 200:
                    raise _refusal(where, response.status_code, await self._body(response, _MAX_ERROR_BYTES))
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise LLMServerError(f"{where} answers compressed, which it was asked not to do")
                yield response
        except TimeoutError:
            raise LLMServerError(f"{where} did not answer in full within {limit_s:g} s") from None
        except (self._httpx.ConnectError, self._httpx.ConnectTimeout) as error:
            what = f"no LLM server answers at {self.url} ({error or type(error).__name__})"
            raise LLMServerError(what, status=0) from error
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            raise LLMServerError(f"{where}: {type(error).__name__}, {shown(str(error))}") from error

    async def _body(self, response: Any, limit: int) -> bytes:
        body = bytearray()
        async for portion in response.aiter_raw():
            body += portion
            if len(body) > limit:
                raise LLMServerError(f"{response.url} answers with more than {limit} bytes")
        return bytes(body)


def _refusal(where: str, status: int, body: bytes) -> LLMServerError:
    return LLMServerError(refusal_of(where, status, body), status=status)
