"""Iter-RetGen (Shao et al. 2023): search, generate, and search again with what was generated."""

from __future__ import annotations

from hybridindex.rag.prompts import answer_prompt
from hybridindex.rag.records import Answer, Passage
from hybridindex.rag.steps import Steps

__all__ = ["iter_retgen"]


def iter_retgen(steps: Steps, *, rounds: int = 3, answer_tokens: int = 128) -> Answer:
    """The first search has nothing to hide behind. Each generation but the last hides the lookahead of the search
    after it, whose draft is the query before it."""
    question = steps.question
    query = question
    passages: list[Passage] = []
    text = ""
    for number in range(rounds):
        (passages,) = steps.retrieve("round", [query])
        last = number == rounds - 1
        if not last:
            steps.look_ahead("round", query, behind=("answer",))
        done = steps.generate("answer", answer_prompt(question, passages), max_tokens=answer_tokens, show=last)
        text = done.text.strip()
        query = f"{question} {text}"
    return steps.answer("iter_retgen", text, passages)
