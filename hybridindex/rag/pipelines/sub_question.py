"""SubQuestion (as in LlamaIndex): the LLM splits the question; its parts are searched together."""

from __future__ import annotations

from itertools import chain

from hybridindex.rag.prompts import answer_prompt, lines_of_list
from hybridindex.rag.records import Answer
from hybridindex.rag.steps import Steps

__all__ = ["sub_question"]


def sub_question(
    steps: Steps, *, most: int = 4, list_tokens: int = 128, answer_tokens: int = 128, k: int = 3
) -> Answer:
    """Lookahead on the question hides behind the list of sub-questions, which are one batched search.

    Args:
        most: sub-questions that are searched; more are left out.
        k: passages for each.
    """
    question = steps.question
    steps.look_ahead("question", question, behind=("sub_questions",))
    listed = steps.generate(
        "sub_questions",
        f"Split the question into {most} or fewer simpler questions, one a line.\n\nQuestion: {question}\n"
        "Simpler questions:",
        max_tokens=list_tokens,
    )
    parts = lines_of_list(listed.text, most) or [question]
    found = steps.retrieve("sub_questions", parts, k=k)
    # The best of each first, so that no part crowds out the others.
    longest = max(map(len, found))
    passages = list(chain.from_iterable([row[rank] for row in found if rank < len(row)] for rank in range(longest)))
    answer = steps.generate("answer", answer_prompt(question, passages), max_tokens=answer_tokens, show=True)
    return steps.answer("sub_question", answer.text, passages)
