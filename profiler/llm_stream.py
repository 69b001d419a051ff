"""Server-sent events of an OpenAI-compatible completion, out of bytes as they come: bounded, and strict about JSON.

Knows the format alone. Connections and clocks are in :mod:`hybridindex.profiler.llm_server`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hybridindex.errors import LLMServerError

__all__ = ["MAX_ANSWER_BYTES", "MAX_LINE_BYTES", "CompletionChunk", "EventReader", "parse_object", "shown"]

#: A line holds one chunk of an answer; a whole answer of some thousand tokens takes about a megabyte.
MAX_LINE_BYTES = 1 << 20
MAX_ANSWER_BYTES = 16 << 20
_SHOWN = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionChunk:
    """One event of a streamed completion."""

    #: None: no token, only counts.
    text: str | None
    #: Why the answer ended; empty while it goes on.
    finish_reason: str = ""
    #: Tokens of prompt and answer, where the server counts them in this chunk.
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class EventReader:
    """Takes bytes in any portions and gives whole chunks. One per answer; not thread-safe."""

    def __init__(self, *, max_line_bytes: int = MAX_LINE_BYTES, max_answer_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._max_answer_bytes = max_answer_bytes
        self._rest = b""
        self._data: list[bytes] = []
        self._n_bytes = 0
        #: The server said ``[DONE]``: the answer is whole.
        self.done = False

    def feed(self, portion: bytes) -> list[CompletionChunk]:
        """The chunks that ``portion`` completes.

        Raises:
            LLMServerError: a line or the answer is too long, or an event is no completion chunk.
        """
        self._n_bytes += len(portion)
        if self._n_bytes > self._max_answer_bytes:
            raise LLMServerError(f"the answer is longer than {self._max_answer_bytes} bytes")
        lines = (self._rest + portion).splitlines(keepends=True)
        self._rest = b""
        # A CR at the end may be the first half of a CR LF.
        if lines and not lines[-1].endswith(b"\n"):
            self._rest = lines.pop()
        if max((len(line) for line in (*lines, self._rest)), default=0) > self._max_line_bytes:
            raise LLMServerError(f"a line of the answer is longer than {self._max_line_bytes} bytes")
        chunks = (self._take(line.rstrip(b"\r\n")) for line in lines)
        return [chunk for chunk in chunks if chunk is not None]

    def _take(self, line: bytes) -> CompletionChunk | None:
        if line:
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
            elif field not in (b"", b"event", b"id", b"retry"):
                raise LLMServerError(f"the answer is no event stream: {shown(line)}")
            return None
        if not self._data:
            return None
        event, self._data = b"\n".join(self._data), []
        if event == b"[DONE]":
            self.done = True
            return None
        return _chunk_of(parse_object(event, "an event of the answer"))


def _chunk_of(event: dict[str, Any]) -> CompletionChunk:
    if event.get("error") is not None:
        raise LLMServerError(f"the server reports an error within the answer: {shown(event['error'])}")
    choices, usage = event.get("choices", []), event.get("usage") or {}
    if not isinstance(choices, list) or not isinstance(usage, dict) or (choices and not isinstance(choices[0], dict)):
        raise LLMServerError(f"an event of the answer is no completion chunk: {shown(event)}")
    choice = choices[0] if choices else {}
    text, reason = choice.get("text") or "", choice.get("finish_reason") or ""
    if not isinstance(text, str) or not isinstance(reason, str):
        raise LLMServerError(f"an event of the answer is no completion chunk: {shown(event)}")
    return CompletionChunk(
        text=text if choices else None,
        finish_reason=reason,
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=_count(usage, "completion_tokens"),
    )


def _count(usage: dict[str, Any], name: str) -> int | None:
    value = usage.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise LLMServerError(f"usage.{name} of the answer is {shown(value)}; expected a number of tokens")
    return value


def parse_object(body: bytes, what: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        LLMServerError: ``what`` is something else.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise LLMServerError(f"{what} is no JSON object: {shown(body)}")
    return value


def shown(value: object) -> str:
    """A little of what a server sent, for a message: one line, and no control characters."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * _SHOWN]).split())
    return repr(line[:_SHOWN] + "…" if len(line) > _SHOWN else line)
