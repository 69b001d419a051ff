"""Errors of OpenAI-compatible servers in words, from status and body. Raises nothing."""

from __future__ import annotations

import json

from hybridindex.llm.events import shown

__all__ = ["NOT_YET", "message_of", "refusal_of"]

#: Statuses of a server that may answer later: 0, nothing listens; 503, it loads.
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
    """One line: the address, the status in words, and the server's message."""
    said = shown(message_of(_parsed(body))) if body.strip() else "nothing more"
    return f"{where} {_WORDS.get(status, 'failed')} (status {status}): {said}"


def message_of(said: object) -> object:
    """The message in an error of OpenAI's, vLLM's or llama.cpp's server; otherwise all of ``said``."""
    for name in ("error", "message", "detail"):
        if isinstance(said, dict) and name in said:
            said = said[name]
    return said


def _parsed(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body
