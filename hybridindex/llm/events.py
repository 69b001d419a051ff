"""Reads the server-sent events of an OpenAI-compatible server: bytes in, JSON objects out, within limits.

Callers have the connection, interpret events and choose the error class.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from hybridindex.errors import HybridIndexError, LLMServerError

__all__ = ["MAX_ANSWER_BYTES", "MAX_LINE_BYTES", "EventReader", "events_of", "parse_object", "shown"]

#: A line holds one event; an answer of some thousand tokens takes about a megabyte.
MAX_LINE_BYTES = 1 << 20
MAX_ANSWER_BYTES = 16 << 20
_SHOWN = 120
_FIELDS = (b"", b"event", b"id", b"retry")


class EventReader:
    """Takes bytes in portions and returns whole events. One per answer; not thread-safe."""

    def __init__(
        self,
        *,
        error: type[HybridIndexError] = LLMServerError,
        max_line_bytes: int = MAX_LINE_BYTES,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        """``error``: raised where the answer is too long or no stream of events."""
        self._error = error
        self._max_line_bytes = max_line_bytes
        self._max_answer_bytes = max_answer_bytes
        self._rest = b""
        self._data: list[bytes] = []
        self._n_bytes = 0
        #: The server sent ``[DONE]``: the answer is complete, and the rest is not read.
        self.done = False

    def feed(self, portion: bytes) -> list[dict[str, Any]]:
        """The events that ``portion`` completes.

        Raises:
            HybridIndexError: a line or the answer is too long, or an event is not a JSON object.
        """
        self._n_bytes += len(portion)
        if self._n_bytes > self._max_answer_bytes:
            raise self._error(f"the answer is longer than {self._max_answer_bytes} bytes")
        lines = (self._rest + portion).splitlines(keepends=True)
        self._rest = b""
        # A CR at the end may be the first half of a CR LF.
        if lines and not lines[-1].endswith(b"\n"):
            self._rest = lines.pop()
        if max((len(line) for line in (*lines, self._rest)), default=0) > self._max_line_bytes:
            raise self._error(f"a line of the answer is longer than {self._max_line_bytes} bytes")
        events = (self._take(line.rstrip(b"\r\n")) for line in lines)
        return [event for event in events if event is not None]

    def end(self) -> list[dict[str, Any]]:
        """The last event: some servers send no empty line after it.

        Raises:
            HybridIndexError: as :meth:`feed`.
        """
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        events = (self._take(rest), self._take(b""))
        return [event for event in events if event is not None]

    def _take(self, line: bytes) -> dict[str, Any] | None:
        if self.done:
            return None
        if line:
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
            elif field not in _FIELDS:
                raise self._error(f"the answer is not an event stream: {shown(line)}")
            return None
        if not self._data:
            return None
        event, self._data = b"\n".join(self._data), []
        if event.strip() == b"[DONE]":
            self.done = True
            return None
        return parse_object(event, "an event of the answer", self._error)


def events_of(portions: Iterable[bytes], reader: EventReader) -> Iterator[dict[str, Any]]:
    """The events of an answer, up to ``[DONE]`` or its end. Raises as :meth:`EventReader.feed`."""
    for portion in portions:
        yield from reader.feed(portion)
        if reader.done:
            return
    yield from reader.end()


def parse_object(body: bytes, what: str, error: type[HybridIndexError] = LLMServerError) -> dict[str, Any]:
    """A JSON object. Raises ``error`` where ``what`` is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise error(f"{what} is not a JSON object: {shown(body)}")
    return value


def shown(value: object) -> str:
    """The start of what a server sent, for messages: one line without control characters."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * _SHOWN]).split())
    return repr(line[:_SHOWN] + "…" if len(line) > _SHOWN else line)
