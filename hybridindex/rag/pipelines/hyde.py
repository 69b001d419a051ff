"""HyDE (Gao et al. 2022): the LLM writes a hypothetical passage, which is the query."""

from __future__ import annotations

from hybridindex.rag.prompts import answer_prompt
from hybridindex.rag.records import Answer
from hybridindex.rag.steps import Steps

__all__ = ["hyde"]


def hyde(steps: Steps, *, draft_tokens: int = 128, answer_tokens: int = 128) -> Answer:
    """Lookahead on the question hides behind the hypothetical passage."""
    question = steps.question
    steps.look_ahead("question", question, behind=("hypothesis",))
    draft = steps.generate(
        "hypothesis",
        f"Write a short passage that answers the question.\n\nQuestion: {question}\nPassage:",
        max_tokens=draft_tokens,
    )
    # An empty passage: search for the question itself.
    (passages,) = steps.retrieve("hypothesis", [draft.text.strip() or question])
    answer = steps.generate("answer", answer_prompt(question, passages), max_tokens=answer_tokens, show=True)
    return steps.answer("hyde", answer.text, passages)
