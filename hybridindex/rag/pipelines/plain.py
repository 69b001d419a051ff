"""Retrieve, then answer: the pipeline that the others are compared with."""

from __future__ import annotations

from hybridindex.rag.prompts import answer_prompt
from hybridindex.rag.records import Answer
from hybridindex.rag.steps import Steps

__all__ = ["plain"]


def plain(steps: Steps, *, answer_tokens: int = 128) -> Answer:
    """One search, for the question, and one generation. Nothing is generated before, so there is no lookahead."""
    (passages,) = steps.retrieve("question", [steps.question])
    answer = steps.generate("answer", answer_prompt(steps.question, passages), max_tokens=answer_tokens, show=True)
    return steps.answer("plain", answer.text, passages)
