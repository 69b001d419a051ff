"""FLARE (Jiang et al. 2023): a sentence whose tokens are improbable is looked up and written again."""

from __future__ import annotations

import math
import re

from hybridindex.errors import GenerationError
from hybridindex.rag.prompts import answer_prompt
from hybridindex.rag.records import Answer, Generated, Passage
from hybridindex.rag.steps import Steps

__all__ = ["flare", "sure_part"]

_SENTENCE = re.compile(r".+?[.!?](?=\s|$)", re.DOTALL)


def _first_sentence(text: str) -> str:
    """Up to the end of the first sentence; all of an unfinished one."""
    found = _SENTENCE.match(text)
    return found.group() if found is not None else text


def _pieces_of(draft: Generated, sentence: str) -> list[tuple[str, float]]:
    """(text, least probability) of the pieces that the sentence is made of; 1 where none is known."""
    pieces, length = [], 0
    for piece in draft.pieces:
        if length >= len(sentence):
            break
        pieces.append((piece.text, math.exp(min(piece.logprobs, default=0.0))))
        length += len(piece.text)
    return pieces


def sure_part(pieces: list[tuple[str, float]], threshold: float) -> str:
    """The sentence without its improbable pieces: FLARE's masked query."""
    return "".join(text for text, probability in pieces if probability >= threshold).strip()


def flare(steps: Steps, *, sentences: int = 6, threshold: float = 0.4, sentence_tokens: int = 48) -> Answer:
    """Lookahead on the question, then on the last sentence, hides behind the tentative next sentence.

    Raises:
        GenerationError: the generator gives no probabilities; no sentence would ever be looked up.
    """
    question = steps.question
    passages: list[Passage] = []
    seen: list[Passage] = []
    text, draft_query = "", question
    for _ in range(sentences):
        steps.look_ahead("sentence", draft_query, behind=("tentative",))
        prompt = f"{answer_prompt(question, passages)}{text}"
        draft = steps.generate("tentative", prompt, max_tokens=sentence_tokens, logprobs=True, append=True)
        sentence = _first_sentence(draft.text)
        finished = draft.finish == "stop" and len(sentence) == len(draft.text)
        if not sentence.strip():
            break
        if not any(piece.logprobs for piece in draft.pieces):
            raise GenerationError(
                "FLARE needs probabilities of tokens (logprobs); the generator sent none with step 'tentative'. Use a "
                "server that gives them, or another pipeline"
            )
        pieces = _pieces_of(draft, sentence)
        if min(probability for _, probability in pieces) < threshold:
            (passages,) = steps.retrieve("sentence", [sure_part(pieces, threshold) or question])
            seen = passages + seen
            again = steps.generate(
                "sentence",
                f"{answer_prompt(question, passages)}{text}",
                max_tokens=sentence_tokens,
                append=True,
            )
            sentence = _first_sentence(again.text) or sentence
            finished = again.finish == "stop" and len(sentence) >= len(again.text)
        text += sentence
        steps.show(sentence)
        draft_query = f"{question} {sentence}"
        if finished:
            break
    return steps.answer("flare", text, seen)
