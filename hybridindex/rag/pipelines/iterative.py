"""Iterative (LlamaIndex's multi-step query): narrower questions, one after another, until the answer is good."""

from __future__ import annotations

from hybridindex.rag.prompts import answer_prompt, says_yes
from hybridindex.rag.records import Answer, Passage
from hybridindex.rag.steps import Steps

__all__ = ["iterative"]


def iterative(steps: Steps, *, rounds: int = 3, question_tokens: int = 48, answer_tokens: int = 128) -> Answer:
    """Each round: narrow, search, answer, judge. Lookahead hides behind the narrowing; from the second round on its
    draft is the answer so far, and the judgement hides it as well."""
    question = steps.question
    known = ""
    passages: list[Passage] = []
    text = ""
    steps.look_ahead("question", question, behind=("narrow",))
    for number in range(rounds):
        narrower = steps.generate(
            "narrow",
            f"What single question should be looked up next?\n\nQuestion: {question}\n"
            f"Known so far:{known or ' nothing'}\nNext question:",
            max_tokens=question_tokens,
            stop=("\n",),
        )
        asked = narrower.text.strip() or question
        (found,) = steps.retrieve("narrow", [asked])
        passages = found + passages
        last = number == rounds - 1
        part = steps.generate("answer", answer_prompt(f"{question} ({asked})", found), max_tokens=answer_tokens)
        text = part.text.strip()
        known += f"\n- {asked} {text}"
        if last:
            break
        steps.look_ahead("round", f"{question} {text}", behind=("judge", "narrow"))
        judged = steps.generate(
            "judge",
            f"Question: {question}\nAnswer: {text}\nIs the answer complete? Say yes or no.\nComplete:",
            max_tokens=4,
        )
        if says_yes(judged.text):
            break
    final = steps.generate(
        "final",
        f"Answer in one or two sentences from what is known.\n\nKnown:{known}\n\nQuestion: {question}\nAnswer:",
        max_tokens=answer_tokens,
        show=True,
    )
    return steps.answer("iterative", final.text or text, passages)
