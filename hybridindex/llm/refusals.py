"""What an OpenAI-compatible server means when it refuses, in words. Reads statuses and bodies; raises nothing."""

from __future__ import annotations

import json

from hybridindex.llm.events import shown

__all__ = ["NOT_YET", "message_of", "refusal_of"]

#: Statuses of a server that may answer later: nobody listens, or it loads.
NOT_YET = (0, 503)

_WORDS = {
    400: "refuses the request",
    401: "asks for another API key",
    403: "asks for another API key",
    404: "is not there",
    422: "refuses the request",
    503: "is loading or overloaded",
}


def refusal_of(where: str, status: int, body: bytes) -> str:
    """One line: the address, what the status means, and what the server says about it."""
    said = shown(message_of(_parsed(body))) if body.strip() else "nothing more"
    return f"{where} {_WORDS.get(status, 'failed')} (status {status}): {said}"


def message_of(said: object) -> object:
    """The message within an error, where it lies as OpenAI's, vLLM's and llama.cpp's servers lay it; else all of it."""
    for name in ("error", "message", "detail"):
        if isinstance(said, dict) and name in said:
            said = said[name]
    return said


def _parsed(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body
