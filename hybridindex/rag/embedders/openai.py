"""Texts to vectors through a server's ``/v1/embeddings``: OpenAI's, vLLM, llama.cpp, TEI and others.

Texts go in batches; what may succeed later is tried again. Sizes and times are bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from hybridindex.bearer import bearer
from hybridindex.client.exchange import Waits, bound_each_wait
from hybridindex.errors import EmbeddingError, InvalidInputError, MissingDependencyError, how_to_install
from hybridindex.llm.addresses import base_url
from hybridindex.llm.events import parse_object, shown
from hybridindex.llm.refusals import refusal_of
from hybridindex.rag.embed import normalize
from hybridindex.types import F32

__all__ = ["EmbeddingLimits", "OpenAIEmbedder"]

_PATH = "/v1/embeddings"
#: A number of an answer takes some twenty bytes; a batch of 2,048 with 4,096 dimensions is not meant to be asked for.
_MAX_ANSWER_BYTES = 256 << 20
_MAX_ERROR_BYTES = 64 << 10
#: Statuses of a server that may answer later: 0, nothing listens or the connection broke.
_LATER = (0, 408, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingLimits:
    """How much is asked at once, how long it may take, and how often it is asked again."""

    #: Texts of one request.
    batch: int = 64
    #: Characters of one request, unless one text is longer; and of one text.
    request_chars: int = 1 << 18
    text_chars: int = 1 << 17
    #: Seconds of one request.
    timeout_s: float = 60.0
    #: Further attempts, after waits that double, or the server's ``Retry-After`` where that is longer.
    retries: int = 4
    first_wait_s: float = 0.5
    most_wait_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("batch", "request_chars", "text_chars"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} is {getattr(self, name)!r}; expected 1 or more")
        if not 0 < self.timeout_s <= 86_400:
            raise InvalidInputError(f"timeout_s is {self.timeout_s!r}; expected seconds above 0, a day at most")
        if self.retries < 0:
            raise InvalidInputError(f"retries is {self.retries!r}; expected 0 or more")


class OpenAIEmbedder:
    """Unit vectors of a server's model. Any thread; close it once."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        limits: EmbeddingLimits | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Connects when first used.

        Args:
            url: of the server, with or without ``/v1``, and without a name and a password.
            model: as the server names it.
            key: an API key of visible ASCII characters, sent as a bearer token.
            limits: None: the default ones.
            sleep: waits between attempts.

        Raises:
            InvalidInputError: a bad url or key, or no model. MissingDependencyError: httpx is not installed.
        """
        try:
            import httpx
        except ImportError as error:
            raise MissingDependencyError(f"embeddings of a server need httpx: {how_to_install('client')}") from error
        if not model:
            raise InvalidInputError("model is empty; expected its name at the server")
        self.name = f"openai:{model}"
        self._httpx = httpx
        self._url = base_url(url) + _PATH
        self._model = model
        self._limits = limits or EmbeddingLimits()
        self._sleep = sleep
        headers = {"accept-encoding": "identity"}
        if key is not None:
            headers["authorization"] = bearer(key, "key (HYBRIDINDEX_EMBEDDER_KEY of the environment)")
        transport = bound_each_wait(httpx.HTTPTransport(trust_env=False))
        self._client = httpx.Client(headers=headers, transport=transport, follow_redirects=False, trust_env=False)

    def embed(self, texts: Sequence[str], /) -> F32:
        """Unit vectors (n, d) float32.

        Raises:
            InvalidInputError: a text that is empty or too long. EmbeddingError: no answer, a refusal, or an answer that
            cannot be read, after all attempts.
        """
        for number, text in enumerate(texts):
            if not 0 < len(text) <= self._limits.text_chars:
                raise InvalidInputError(
                    f"text {number} has {len(text)} characters; expected 1 to {self._limits.text_chars}: split it"
                )
        parts = [self._asked(batch) for batch in self._batches(texts)]
        if not parts:
            raise InvalidInputError("texts is empty; expected one or more")
        if len({part.shape[1] for part in parts}) > 1:
            raise EmbeddingError(f"{self._url} gave vectors of {[part.shape[1] for part in parts]} dimensions")
        return normalize(np.concatenate(parts))

    def close(self) -> None:
        """Closes the connections. Closing twice is harmless."""
        self._client.close()

    def _batches(self, texts: Sequence[str]) -> Iterator[list[str]]:
        batch: list[str] = []
        chars = 0
        for text in texts:
            if batch and (len(batch) == self._limits.batch or chars + len(text) > self._limits.request_chars):
                yield batch
                batch, chars = [], 0
            batch.append(text)
            chars += len(text)
        if batch:
            yield batch

    def _asked(self, texts: list[str]) -> F32:
        wait_s = self._limits.first_wait_s
        for left in range(self._limits.retries, -1, -1):
            try:
                return self._answer(texts)
            except EmbeddingError as error:
                if error.status not in _LATER or not left:
                    raise
                self._sleep(min(max(wait_s, error.retry_after_s), self._limits.most_wait_s))
                wait_s *= 2
        raise AssertionError("unreachable")

    def _answer(self, texts: list[str]) -> F32:
        asked = {"model": self._model, "input": texts, "encoding_format": "float"}
        started = time.monotonic()
        # All waits of the request together: a server that sends a byte now and then keeps no call.
        waits = {"timeout": Waits(self._limits.timeout_s)}
        try:
            with self._client.stream("POST", self._url, json=asked, extensions=waits) as answer:
                good = answer.status_code == 200
                body = bytearray()
                for chunk in answer.iter_raw():
                    body += chunk
                    if not good and len(body) > _MAX_ERROR_BYTES:
                        break
                    if len(body) > _MAX_ANSWER_BYTES:
                        raise EmbeddingError(f"{self._url} sent more than {_MAX_ANSWER_BYTES} bytes; ask for less")
                    if time.monotonic() - started > self._limits.timeout_s:
                        raise EmbeddingError(f"{self._url} took longer than {self._limits.timeout_s:g} s", status=0)
                if not good:
                    raise EmbeddingError(
                        refusal_of(self._url, answer.status_code, bytes(body)),
                        status=answer.status_code,
                        retry_after_s=_seconds(answer.headers.get("retry-after")),
                    )
        except self._httpx.TimeoutException as error:
            raise EmbeddingError(f"{self._url} took longer than {self._limits.timeout_s:g} s", status=0) from error
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            raise EmbeddingError(f"no answer from {self._url} ({error or type(error).__name__})", status=0) from error
        return self._vectors(bytes(body), len(texts))

    def _vectors(self, body: bytes, n: int) -> F32:
        found = parse_object(body, f"the answer of {self._url}", EmbeddingError)
        try:
            rows: list[Any] = [None] * n
            for entry in found["data"]:
                number = entry["index"]
                if type(number) is not int or not 0 <= number < n:
                    raise IndexError(number)
                rows[number] = entry["embedding"]
            with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused below
                vectors = np.array(rows, dtype=np.float32)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise EmbeddingError(f"{self._url} sent no embeddings of {n} texts: {shown(body)}") from error
        if vectors.ndim != 2 or not vectors.shape[1] or not np.isfinite(vectors).all():
            raise EmbeddingError(
                f"{self._url} sent embeddings {vectors.shape} that are not vectors, or hold NaN or infinity"
            )
        return vectors

    def __enter__(self) -> OpenAIEmbedder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _seconds(retry_after: str | None) -> float:
    """Of a ``Retry-After`` header; 0 where there is none, or a date."""
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:
        return 0.0
