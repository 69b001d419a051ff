"""Reads an entry of an OpenAI-compatible server's list of models. Raises nothing."""

from __future__ import annotations

from typing import Any

__all__ = ["max_tokens_of", "names_of"]


def names_of(model: dict[str, Any]) -> tuple[str, ...]:
    """Its id, then the aliases that llama.cpp's server was given (``--alias a,b``)."""
    others = model.get("aliases")
    return (str(model["id"]), *(map(str, others) if isinstance(others, list) else ()))


def max_tokens_of(model: dict[str, Any]) -> int | None:
    """Most tokens of prompt and answer together; None where the server does not tell.

    vLLM and SGLang have ``max_model_len``, llama.cpp's server ``n_ctx`` under ``meta``.
    """
    meta = model.get("meta")
    told = model.get("max_model_len", meta.get("n_ctx") if isinstance(meta, dict) else None)
    return told if isinstance(told, int) and not isinstance(told, bool) and told > 0 else None
