"""Strictly reads one event of a streamed completion. :mod:`hybridindex.llm.events` does the framing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridindex.errors import LLMServerError
from hybridindex.llm.events import shown
from hybridindex.llm.refusals import message_of

__all__ = ["CompletionChunk", "chunk_of"]


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


def chunk_of(event: dict[str, Any]) -> CompletionChunk:
    """Reads one event.

    Raises:
        LLMServerError: it reports an error, or is no completion chunk.
    """
    if event.get("error") is not None:
        raise LLMServerError(f"the server reports an error within the answer: {shown(message_of(event))}")
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
