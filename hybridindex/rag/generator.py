"""Generators: any server with OpenAI's completions interface, read piece by piece as it generates.

Covers one request at a time, its limits and its errors. Does not choose prompts and does not retry: a generation that
broke in the middle cannot be sent again unseen.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol

from hybridindex.errors import GenerationError, InvalidInputError, MissingDependencyError
from hybridindex.llm.events import EventReader, events_of
from hybridindex.rag.records import Piece

__all__ = ["Finished", "Generator", "OpenAIGenerator", "Prompt"]

#: Longest prompt and longest generated text, in characters.
_MAX_TEXT = 4 << 20
#: Of a whole answer: an event has some fifty bytes beside each character.
_MAX_BYTES = 64 * _MAX_TEXT
#: Characters of a server's complaint that are repeated.
_MAX_COMPLAINT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is asked of a generator."""

    #: Name of the pipeline's step, for records and replays.
    name: str
    text: str
    max_tokens: int
    stop: tuple[str, ...] = ()
    #: Whether the pieces' probabilities are needed.
    logprobs: bool = False
    #: Whether the answer goes on where the text ends: never as a chat.
    append: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise InvalidInputError(f"max_tokens is {self.max_tokens!r}; expected an integer of 1 or more")
        if not 0 < len(self.text) <= _MAX_TEXT:
            raise InvalidInputError(f"the prompt has {len(self.text)} characters; expected 1..{_MAX_TEXT}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last thing of a generation."""

    reason: str
    #: 0 where the server did not say.
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Generator(Protocol):
    """What writes text."""

    def generate(self, prompt: Prompt, /) -> Iterator[Piece | Finished]:
        """Pieces as they come, then one :class:`Finished`. Closing the iterator ends the generation.

        Raises GenerationError.
        """

    def close(self) -> None: ...


class OpenAIGenerator:
    """A server's ``/v1/completions`` or ``/v1/chat/completions``, streamed. Any thread; close it once."""

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        key: str | None = None,
        mode: Literal["chat", "completions"] = "chat",
        temperature: float = 0.0,
        seed: int | None = 0,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float = 120.0,
        idle_s: float = 30.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Connects when first used.

        Args:
            url: of the server, with or without ``/v1``.
            model: as the server names it; empty: the first that it serves, asked for once.
            key: an API key, sent as a bearer token.
            extra: fields of a request that are not OpenAI's, as the server takes them: vLLM's ``ignore_eos``.
            mode: "chat" for models with a chat template, "completions" for plain text.
            timeout_s: longest time of one generation. ``idle_s``: longest silence within it.

        Raises:
            InvalidInputError, MissingDependencyError.
        """
        try:
            import httpx
        except ImportError as error:
            raise MissingDependencyError("a generator needs httpx: pip install 'hybridindex[client]'") from error
        if not url.startswith(("http://", "https://")):
            raise InvalidInputError(f"url is {url!r}; expected http://host:port or https://…")
        if mode not in ("chat", "completions"):
            raise InvalidInputError(f"mode is {mode!r}; expected 'chat' or 'completions'")
        for name, value in (("timeout_s", timeout_s), ("idle_s", idle_s)):
            if not 0 < value <= 86_400:
                raise InvalidInputError(f"{name} is {value!r}; expected seconds above 0, a day at most")
        self._httpx = httpx
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._mode = mode
        self._sampling = {"temperature": temperature, **({} if seed is None else {"seed": seed}), **(extra or {})}
        self._timeout_s = timeout_s
        self._clock = clock
        # Encodings are refused: what a server sends is bounded as it is read. Proxies are not asked: it is near.
        headers = {"accept-encoding": "identity", **({} if key is None else {"authorization": f"Bearer {key}"})}
        self._client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(idle_s, connect=min(idle_s, 10.0)),
            follow_redirects=False,
            trust_env=False,
        )

    @property
    def model(self) -> str:
        """Its name at the server. Raises GenerationError where none was given and none is served."""
        if not self._model:
            served = self.models()
            if not served:
                raise GenerationError(f"{self._url} serves no model")
            self._model = served[0]
        return self._model

    def generate(self, prompt: Prompt, /) -> Iterator[Piece | Finished]:
        """As :meth:`Generator.generate`.

        Raises:
            GenerationError: no answer, a refusal, a broken stream, silence beyond ``idle_s``, more than ``timeout_s``.
        """
        chat = self._mode == "chat" and not prompt.append
        body = self._body(prompt, chat)
        started = self._clock()
        reason, prompt_tokens, completion_tokens, length = "", 0, 0, 0
        with self._sent("POST", "/v1/chat/completions" if chat else "/v1/completions", body) as answer:
            reader = EventReader(error=GenerationError, max_answer_bytes=_MAX_BYTES)
            for event in events_of(self._chunks(answer, started), reader):
                prompt_tokens = _count_of(event, "prompt_tokens") or prompt_tokens
                completion_tokens = _count_of(event, "completion_tokens") or completion_tokens
                choice = _first_choice(event)
                if choice is None:
                    continue
                text = _text_of(choice, chat)
                length += len(text)
                if length > _MAX_TEXT:
                    raise GenerationError(f"{self._url} sent more than {_MAX_TEXT} characters; the answer is cut off")
                logprobs = _logprobs_of(choice)
                if text or logprobs:
                    # Without probabilities an event counts as a token: what servers send, but for bursts.
                    tokens = len(logprobs) or 1
                    yield Piece(text=text, tokens=tokens, at_s=self._clock() - started, logprobs=logprobs)
                reason = str(choice.get("finish_reason") or reason)
        if not reason:
            raise GenerationError(f"{self._url} ended its answer before it was finished")
        yield Finished(reason=reason, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)

    def score(self, prompt: str, continuation: str) -> tuple[float, ...]:
        """Logarithms of the probabilities of ``continuation``'s tokens after ``prompt``, without generating it.

        Needs a server that echoes prompts with probabilities, as vLLM's completions do. A token across the border
        counts with the continuation where it starts there.

        Raises:
            GenerationError: as in :meth:`generate`, or a server that does not echo.
        """
        text = prompt + continuation
        body = {"model": self.model, "prompt": text, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0.0}
        with self._sent("POST", "/v1/completions", body) as answer:
            content = b"".join(self._chunks(answer, self._clock()))
        try:
            found = json.loads(content)["choices"][0]["logprobs"]
            places, values = found["text_offset"], found["token_logprobs"]
            if len(places) != len(values) or not places or places[0] >= len(prompt):
                raise ValueError("the prompt is not echoed")
            inside = [v for place, v in zip(places, values, strict=True) if len(prompt) <= place < len(text)]
            return tuple(float(v) for v in inside)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise GenerationError(f"{self._url} gave no probabilities of the prompt ({error!r})") from error

    def models(self) -> list[str]:
        """Names of what the server serves. Raises GenerationError."""
        with self._sent("GET", "/v1/models", None) as answer:
            content = b"".join(self._chunks(answer, self._clock()))
        try:
            return [str(model["id"]) for model in json.loads(content)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise GenerationError(f"{self._url} gave no list of models ({error!r})") from error

    def _body(self, prompt: Prompt, chat: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": prompt.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
        }
        if chat:
            body["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            body["prompt"] = prompt.text
        if prompt.stop:
            body["stop"] = list(prompt.stop)
        if prompt.logprobs:
            body |= {"logprobs": True} if chat else {"logprobs": 1}
        return body

    @contextlib.contextmanager
    def _sent(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[Any]:
        try:
            with self._client.stream(method, self._url + path, json=body) as answer:
                if answer.status_code != 200:
                    raise GenerationError(f"{self._url} answered {answer.status_code}: {_complaint(answer)}")
                if answer.headers.get("content-encoding", "identity") != "identity":
                    raise GenerationError(f"{self._url} compressed its answer, which it was asked not to do")
                yield answer
        except self._httpx.TimeoutException as error:
            raise GenerationError(f"{self._url} was silent for too long ({type(error).__name__})") from error
        except self._httpx.HTTPError as error:
            raise GenerationError(f"no answer from {self._url} ({error or type(error).__name__})") from error

    def _chunks(self, answer: Any, started: float) -> Iterator[bytes]:
        total = 0
        for chunk in answer.iter_raw():
            total += len(chunk)
            if self._clock() - started > self._timeout_s:
                raise GenerationError(f"{self._url} took longer than {self._timeout_s:g} s for one generation")
            if total > _MAX_BYTES:
                raise GenerationError(f"{self._url} sent {total} bytes; the answer is cut off")
            yield chunk

    def close(self) -> None:
        """Closes the connections. Closing twice is harmless."""
        self._client.close()

    def __enter__(self) -> OpenAIGenerator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _complaint(answer: Any) -> str:
    """The start of what a server says about its refusal."""
    seen = b""
    for chunk in answer.iter_raw():
        seen += chunk
        if len(seen) > 4 * _MAX_COMPLAINT:
            break
    return " ".join(seen.decode("utf-8", errors="replace").split())[:_MAX_COMPLAINT] or "nothing more"


def _count_of(event: dict[str, Any], name: str) -> int:
    """Of an event's usage; 0 where it has none, or nonsense."""
    usage = event.get("usage")
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 0


def _first_choice(event: dict[str, Any]) -> dict[str, Any] | None:
    if "error" in event:
        raise GenerationError(f"the server gave up: {str(event['error'])[:_MAX_COMPLAINT]}")
    choices = event.get("choices")
    if not isinstance(choices, list):
        raise GenerationError(f"the server sent {str(event)[:80]!r}; expected an object with choices")
    if not choices:
        return None
    if not isinstance(choices[0], dict):
        raise GenerationError(f"the server sent a choice {str(choices[0])[:80]!r}; expected an object")
    return choices[0]


def _text_of(choice: dict[str, Any], chat: bool) -> str:
    delta = choice.get("delta")
    text = (delta.get("content") if isinstance(delta, dict) else None) if chat else choice.get("text")
    if text is not None and not isinstance(text, str):
        raise GenerationError(f"the server sent {str(text)[:80]!r} as text; expected a string")
    return text or ""


def _logprobs_of(choice: dict[str, Any]) -> tuple[float, ...]:
    """Of a chat's and of a completion's choice; empty where there are none."""
    found = choice.get("logprobs")
    if not isinstance(found, dict):
        return ()
    try:
        if isinstance(found.get("content"), list):
            return tuple(float(token["logprob"]) for token in found["content"])
        values: Sequence[Any] = found.get("token_logprobs") or ()
        return tuple(float(value) for value in values if value is not None)
    except (KeyError, TypeError, ValueError) as error:
        raise GenerationError(f"the server sent probabilities that cannot be read ({error!r})") from error
