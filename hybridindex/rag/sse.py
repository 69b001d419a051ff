"""Server-sent events: JSON objects out of a stream of bytes, within bounds. No connection here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from hybridindex.errors import GenerationError

__all__ = ["events_of", "lines_of"]

#: Longest line of a stream.
MAX_LINE = 1 << 20


def lines_of(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their ends. Raises GenerationError for a longer one than ``MAX_LINE``."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE:
            raise GenerationError(f"the server sent a line of more than {MAX_LINE} bytes")
        for line in lines:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


def events_of(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of ``data:`` lines up to ``[DONE]``; comments and other fields are skipped.

    Raises:
        GenerationError: a line that is no event, or data that is no JSON object.
    """
    for line in lines_of(chunks):
        if not line or line.startswith((b":", b"event:", b"id:", b"retry:")):
            continue
        if not line.startswith(b"data:"):
            raise GenerationError(f"the server sent {line[:80]!r}; expected a stream of events")
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise GenerationError(f"the server sent data that is not JSON: {data[:80]!r}") from error
        if not isinstance(event, dict):
            raise GenerationError(f"the server sent {data[:80]!r}; expected an object")
        yield event
