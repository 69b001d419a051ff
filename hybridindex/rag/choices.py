"""Reads events of streamed chats and completions: text, probabilities, token counts.

Accepts what servers really send; everything raises GenerationError for what cannot be read.
:mod:`hybridindex.llm.events` does the framing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridindex.errors import GenerationError
from hybridindex.llm.events import shown
from hybridindex.llm.refusals import message_of

__all__ = ["count_of", "first_choice", "logprobs_of", "text_of"]


def count_of(event: dict[str, Any], name: str) -> int:
    """A token count of an event's usage; 0 where it is missing or wrong."""
    usage = event.get("usage")
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 0


def first_choice(event: dict[str, Any]) -> dict[str, Any] | None:
    """None where an event has none, such as the last one with the usage."""
    if "error" in event:
        raise GenerationError(f"the server gave up: {shown(message_of(event))}")
    choices = event.get("choices")
    if not isinstance(choices, list):
        raise GenerationError(f"the server sent {str(event)[:80]!r}; expected an object with choices")
    if not choices:
        return None
    if not isinstance(choices[0], dict):
        raise GenerationError(f"the server sent a choice {str(choices[0])[:80]!r}; expected an object")
    return choices[0]


def text_of(choice: dict[str, Any], chat: bool) -> str:
    """Text of a choice; empty where there is none."""
    delta = choice.get("delta")
    text = (delta.get("content") if isinstance(delta, dict) else None) if chat else choice.get("text")
    if text is not None and not isinstance(text, str):
        raise GenerationError(f"the server sent {str(text)[:80]!r} as text; expected a string")
    return text or ""


def logprobs_of(choice: dict[str, Any]) -> tuple[float, ...]:
    """Log probabilities of a choice; empty where there are none."""
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
