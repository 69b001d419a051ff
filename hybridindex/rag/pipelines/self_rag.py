"""Self-RAG (Asai et al. 2023), the short form: decide whether to search, answer from each passage, keep the best.

The paper's model was trained to emit judgements as special tokens. Here they are short questions that any model can
answer. An answer that is neither yes nor no leads to a search, which costs less than a missing fact.
"""

from __future__ import annotations

import math

from hybridindex.rag.prompts import answer_prompt, says_no, says_yes
from hybridindex.rag.records import Answer, Generated, Passage
from hybridindex.rag.steps import Steps

__all__ = ["self_rag"]


def _mean_probability(done: Generated) -> float:
    """Geometric mean over tokens; 1 where none are known."""
    logprobs = [value for piece in done.pieces for value in piece.logprobs]
    return math.exp(sum(logprobs) / len(logprobs)) if logprobs else 1.0


def _first_probability(done: Generated) -> float:
    """Of the piece that begins it; 1 where none is known."""
    return next((math.exp(sum(piece.logprobs)) for piece in done.pieces if piece.text.strip()), 1.0)


def self_rag(
    steps: Steps, *, candidates: int = 3, answer_tokens: int = 96, support: float = 1.0, threshold: float = 0.2
) -> Answer:
    """Lookahead on the question hides behind the decision; the search asks the same text, so every list is right.

    Args:
        candidates: passages that are answered from.
        threshold: of the probability that a search is needed, above which one is made (the paper's delta). It is
            1 less that of the "no", where the generator gives probabilities; without them a "no" is certain.
        support: weight of the judgement beside the answer's probability.
    """
    question = steps.question
    steps.look_ahead("question", question, behind=("decide",))
    decision = steps.generate(
        "decide",
        f"Does the question need facts to be looked up? Say yes or no.\n\nQuestion: {question}\nLook up:",
        max_tokens=4,
        logprobs=True,
    )
    if says_no(decision.text) and 1 - _first_probability(decision) <= threshold:
        plain = steps.generate("answer", answer_prompt(question, ()), max_tokens=answer_tokens, show=True)
        return steps.answer("self_rag", plain.text, ())
    (passages,) = steps.retrieve("question", [question], k=candidates)
    best: tuple[float, str, tuple[Passage, ...]] = (-math.inf, "", ())
    for passage in passages:
        done = steps.generate("answer", answer_prompt(question, [passage]), max_tokens=answer_tokens, logprobs=True)
        judged = steps.generate(
            "critique",
            f"Passage: {passage.text[:4000]}\nAnswer: {done.text.strip()}\n"
            "Is the answer supported by the passage? Say yes or no.\nSupported:",
            max_tokens=4,
        )
        score = _mean_probability(done) + support * says_yes(judged.text)
        if score > best[0]:
            best = score, done.text, (passage,)
    steps.show(best[1])
    # The chosen one first; the others were read as well.
    return steps.answer("self_rag", best[1], (*best[2], *passages))
