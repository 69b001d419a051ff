"""Generators: streaming clients of servers with OpenAI's completions interface.

Handles one request at a time, its limits and its errors. Does not retry: part of a broken answer was already shown.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol

from hybridindex.bearer import bearer
from hybridindex.client.exchange import Waits, bound_each_wait
from hybridindex.errors import GenerationError, InvalidInputError, MissingDependencyError, how_to_install
from hybridindex.llm.addresses import base_url
from hybridindex.llm.events import EventReader, events_of, shown
from hybridindex.llm.models import names_of
from hybridindex.llm.refusals import NOT_YET, refusal_of
from hybridindex.rag.choices import count_of, first_choice, logprobs_of, text_of
from hybridindex.rag.records import Piece

__all__ = ["Finished", "Generator", "OpenAIGenerator", "Prompt", "Sampling"]

_CHAT = "/v1/chat/completions"
#: Longest prompt and longest generated text, in characters.
_MAX_TEXT = 4 << 20
#: Of a whole answer: an event has some fifty bytes beside each character.
_MAX_BYTES = 64 * _MAX_TEXT
#: Of an answer that is not streamed.
_MAX_BODY_BYTES = 8 << 20
_MAX_ERROR_BYTES = 64 << 10
#: Statuses of a server that answers but lists no models.
_NO_LIST = (404, 405, 501)
#: Models of a server that a message names.
_NAMED = 12
#: Longest time to connect, in seconds.
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is asked of a generator."""

    #: The pipeline's step, for records and replays.
    name: str
    text: str
    max_tokens: int
    stop: tuple[str, ...] = ()
    #: Whether the pieces' probabilities are needed.
    logprobs: bool = False
    #: Whether the answer continues the text; never sent as a chat.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a server chooses tokens."""

    temperature: float = 0.0
    #: None: the server's.
    seed: int | None = 0
    #: Fields of a request that are not OpenAI's, as the server takes them: vLLM's ``ignore_eos``.
    extra: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Of a request's body."""
        seed = {} if self.seed is None else {"seed": self.seed}
        return {"temperature": self.temperature, **seed, **self.extra}


class _WaitsForHead(Waits):
    """httpx's limits until the head of an answer is there: connecting, sending and the whole head may each take as long
    as a silence, and all of them together as long as a generation."""

    def __init__(self, idle_s: float, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._idle_s, self._end_s = idle_s, time.monotonic() + timeout_s

    def get(self, name: str, default: Any = None) -> Any:
        part_s = min(self._idle_s, _CONNECT_S) if name == "connect" else self._idle_s
        return Waits(min(part_s, self._end_s - time.monotonic())).get(name, default)


class OpenAIGenerator:
    """A server's ``/v1/completions`` or ``/v1/chat/completions``, streamed. Any thread; close it once."""

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        key: str | None = None,
        mode: Literal["chat", "completions"] = "chat",
        sampling: Sampling | None = None,
        timeout_s: float = 120.0,
        idle_s: float = 30.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Connects when first used.

        Args:
            url: of the server, with or without ``/v1``, and without a name and a password.
            model: as the server names it; empty: the only one that it serves, asked for once.
            key: an API key of visible ASCII characters, sent as a bearer token.
            mode: "chat" for models with a chat template, "completions" for plain text.
            sampling: None: greedy, with seed 0.
            timeout_s: longest time of one generation. ``idle_s``: longest silence within it.

        Raises:
            InvalidInputError, MissingDependencyError.
        """
        try:
            import httpx
        except ImportError as error:
            raise MissingDependencyError(f"a generator needs httpx: {how_to_install('client')}") from error
        if mode not in ("chat", "completions"):
            raise InvalidInputError(f"mode is {mode!r}; expected 'chat' or 'completions'")
        for name, value in (("timeout_s", timeout_s), ("idle_s", idle_s)):
            if not 0 < value <= 86_400:
                raise InvalidInputError(f"{name} is {value!r}; expected seconds above 0, a day at most")
        self._httpx = httpx
        self._url = base_url(url)
        self._model = model
        self._mode = mode
        self._sampling = (sampling or Sampling()).fields()
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._clock = clock
        # No encodings: answers are bounded as they are read. No proxies: the server is near.
        headers = {"accept-encoding": "identity"}
        if key is not None:
            headers["authorization"] = bearer(key, "key (HYBRIDINDEX_LLM_KEY of the environment)")
        self._client = httpx.Client(
            headers=headers,
            timeout=min(idle_s, timeout_s),
            transport=bound_each_wait(httpx.HTTPTransport(trust_env=False)),
            follow_redirects=False,
            trust_env=False,
        )

    @property
    def model(self) -> str:
        """Its name at the server.

        Raises:
            InvalidInputError: none was given, and several are served. GenerationError: none is served.
        """
        if not self._model:
            self._model = self._one_of(self._listed())
        return self._model

    def ready(self, wait_s: float = 0.0) -> str:
        """Asks for the server's models before anything is generated; the model's name.

        Args:
            wait_s: how long the server may refuse connections, or load.

        Raises:
            InvalidInputError: as :attr:`model`.
            GenerationError: no server, one that is not ready in time, or one that serves other models.
        """
        deadline = self._clock() + wait_s
        while True:
            try:
                self._model = self._one_of(self._listed())
                return self._model
            except GenerationError as error:
                if error.status in _NO_LIST and self._model:
                    return self._model
                left = deadline - self._clock()
                if error.status not in NOT_YET or left <= 0:
                    raise
                time.sleep(min(0.5, left))

    def _one_of(self, listed: list[dict[str, Any]]) -> str:
        served = [names_of(model) for model in listed]
        names = ", ".join(shown(name) for name, *_ in served[:_NAMED]) or "no model"
        if len(served) > _NAMED:
            names += f" and {len(served) - _NAMED} more"
        if not self._model and len(served) > 1:
            raise InvalidInputError(f"model is missing; {self._url} serves {names}: name one")
        for name, *others in served:
            if not self._model or self._model == name or self._model in others:
                return name
        raise GenerationError(f"{self._url} serves {names}" + (f", not {self._model!r}" if self._model else ""))

    def generate(self, prompt: Prompt, /) -> Iterator[Piece | Finished]:
        """As :meth:`Generator.generate`.

        Raises:
            GenerationError: no answer, a refusal, a broken stream, silence beyond ``idle_s``, more than ``timeout_s``.
            InvalidInputError: as :attr:`model`.
        """
        chat = self._mode == "chat" and not prompt.append
        body = self._body(prompt, chat)
        started = self._clock()
        reason, prompt_tokens, completion_tokens, length = "", 0, 0, 0
        with self._sent("POST", _CHAT if chat else "/v1/completions", body) as answer:
            reader = EventReader(error=GenerationError, max_answer_bytes=_MAX_BYTES)
            for event in events_of(self._chunks(answer, started), reader):
                prompt_tokens = count_of(event, "prompt_tokens") or prompt_tokens
                completion_tokens = count_of(event, "completion_tokens") or completion_tokens
                choice = first_choice(event)
                if choice is None:
                    continue
                text = text_of(choice, chat)
                length += len(text)
                if length > _MAX_TEXT:
                    raise GenerationError(f"{self._url} sent more than {_MAX_TEXT} characters; the answer is cut off")
                logprobs = logprobs_of(choice)
                if text or logprobs:
                    # Without probabilities an event counts as one token; bursts are then counted too low.
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
            content = b"".join(self._chunks(answer, self._clock(), _MAX_BODY_BYTES))
        try:
            found = json.loads(content)["choices"][0]["logprobs"]
            places, values = found["text_offset"], found["token_logprobs"]
            if len(places) != len(values) or not places or places[0] >= len(prompt):
                raise ValueError("the prompt is not echoed")
            inside = [v for place, v in zip(places, values, strict=True) if len(prompt) <= place < len(text)]
            return tuple(float(v) for v in inside)
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise GenerationError(
                f"{self._url} gave no probabilities of the prompt ({error!r}); expected a server that echoes prompts, "
                "as vLLM does and llama.cpp does not"
            ) from error

    def models(self) -> list[str]:
        """Names of what the server serves. Raises GenerationError."""
        return [str(model["id"]) for model in self._listed()]

    def _listed(self) -> list[dict[str, Any]]:
        with self._sent("GET", "/v1/models", None) as answer:
            content = b"".join(self._chunks(answer, self._clock(), _MAX_BODY_BYTES))
        try:
            listed: list[dict[str, Any]] = json.loads(content)["data"]
            if not isinstance(listed, list) or not all(isinstance(m, dict) and "id" in m for m in listed):
                raise ValueError("a model without a name")
            return listed
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise GenerationError(
                f"{self._url}/v1/models lists no models: {shown(content)}; expected the address of an "
                "OpenAI-compatible server"
            ) from error

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
        begun, began_s = False, time.monotonic()
        waits = {"timeout": _WaitsForHead(self._idle_s, self._timeout_s)}
        try:
            with (
                self._client.stream(method, self._url + path, json=body, extensions=waits) as answer,
                self._ended_in_time(answer, began_s + self._timeout_s - time.monotonic()),
            ):
                begun = True
                # From here each silence counts by itself, and the timer ends the whole.
                answer.request.extensions["timeout"] = self._client.timeout.as_dict()
                if answer.status_code != 200:
                    raise self._refusal(path, answer)
                if answer.headers.get("content-encoding", "identity") != "identity":
                    raise GenerationError(f"{self._url} compressed its answer, although the request asked for none")
                yield answer
        except (self._httpx.ConnectError, self._httpx.ConnectTimeout) as error:
            raise GenerationError(
                f"no answer from {self._url} ({error or type(error).__name__}); is the LLM's server running there?",
                status=0,
            ) from error
        except self._httpx.TimeoutException as error:
            if self._timeout_s < self._idle_s:
                raise self._too_long() from error
            raise self._silent() from error
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            what = f"{self._url} broke off during its answer" if begun else f"no answer from {self._url}"
            raise GenerationError(f"{what} ({error or type(error).__name__})") from error

    @contextlib.contextmanager
    def _ended_in_time(self, answer: Any, left_s: float) -> Iterator[None]:
        """Ends the connection when the time of a generation is over: a read that waits would wait for ``idle_s``."""
        over = threading.Event()
        connection = answer.extensions["network_stream"].get_extra_info("socket")

        def end() -> None:
            over.set()
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(max(0.0, left_s), end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (self._httpx.HTTPError, GenerationError) as error:
            if over.is_set():
                raise self._over(answer) from error
            raise
        finally:
            timer.cancel()
        # Some answers end where the connection does.
        if over.is_set():
            raise self._over(answer)

    def _over(self, answer: Any) -> GenerationError:
        # Where both limits are equal, one that sent nothing was silent for all of the time.
        nothing = answer.num_bytes_downloaded == 0 and self._idle_s <= self._timeout_s
        return self._silent() if nothing else self._too_long()

    def _silent(self) -> GenerationError:
        return GenerationError(f"{self._url} was silent for more than {self._idle_s:g} s")

    def _too_long(self) -> GenerationError:
        return GenerationError(f"{self._url} took longer than {self._timeout_s:g} s for one generation")

    def _refusal(self, path: str, answer: Any) -> GenerationError:
        started, body = self._clock(), b""
        for chunk in answer.iter_raw():
            body += chunk
            if len(body) > _MAX_ERROR_BYTES or self._clock() - started > self._timeout_s:
                break
        words = refusal_of(self._url + path, answer.status_code, body)
        if path == _CHAT and b"chat template" in body.lower().replace(b"_", b" "):
            words += "; the model has no chat template: use the mode 'completions' (--mode completions)"
        return GenerationError(words, status=answer.status_code)

    def _chunks(self, answer: Any, started: float, limit: int = _MAX_BYTES) -> Iterator[bytes]:
        total = 0
        for chunk in answer.iter_raw():
            total += len(chunk)
            if self._clock() - started > self._timeout_s:
                raise self._too_long()
            if total > limit:
                raise GenerationError(
                    f"{self._url} sent {total} bytes, where {limit} are allowed; the answer is cut off"
                )
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
