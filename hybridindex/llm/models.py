"""What an OpenAI-compatible server says of one model in its list. Reads a parsed entry; raises nothing."""

from __future__ import annotations

from typing import Any

__all__ = ["max_tokens_of", "names_of"]


def names_of(model: dict[str, Any]) -> tuple[str, ...]:
    """The names that it goes by: its id first, then what llama.cpp's server was given beside it (``--alias a,b``)."""
    others = model.get("aliases")
    return (str(model["id"]), *(map(str, others) if isinstance(others, list) else ()))


def max_tokens_of(model: dict[str, Any]) -> int | None:
    """Most tokens of prompt and answer together; None where the server does not tell.

    vLLM and SGLang tell ``max_model_len``, llama.cpp's server ``n_ctx`` under ``meta``.
    """
    meta = model.get("meta")
    told = model.get("max_model_len", meta.get("n_ctx") if isinstance(meta, dict) else None)
    return told if isinstance(told, int) and not isinstance(told, bool) and told > 0 else None
