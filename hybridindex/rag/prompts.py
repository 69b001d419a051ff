"""Prompts of pipelines, and how short answers of an LLM are read. Text only."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hybridindex.rag.records import Passage

__all__ = ["answer_prompt", "context_of", "lines_of_list", "says_no", "says_yes"]

#: Characters of one passage that a prompt holds.
_MAX_PASSAGE = 4000


def context_of(passages: Iterable[Passage]) -> str:
    """Numbered passages; those without a text are left out."""
    shown = [passage.text[:_MAX_PASSAGE] for passage in passages if passage.text]
    return "\n".join(f"[{number}] {text}" for number, text in enumerate(shown, 1))


def answer_prompt(question: str, passages: Iterable[Passage]) -> str:
    """Asks for an answer from passages; without any, for one from memory."""
    context = context_of(passages)
    if not context:
        return f"Answer in one or two sentences.\n\nQuestion: {question}\nAnswer:"
    return f"Answer in one or two sentences, from these passages.\n\n{context}\n\nQuestion: {question}\nAnswer:"


def lines_of_list(text: str, most: int) -> list[str]:
    """The lines of a list without bullets and numbers; blank and repeated ones left out."""
    lines = (re.sub(r"^\s*(?:[-*•]|\(?\d{1,2}[.):])\s*", "", line).strip() for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if line))[:most]


def says_yes(text: str) -> bool:
    """Whether a short answer begins with yes."""
    return re.match(r"\W*yes\b", text, re.IGNORECASE) is not None


def says_no(text: str) -> bool:
    """Whether a short answer begins with no."""
    return re.match(r"\W*no\b", text, re.IGNORECASE) is not None
