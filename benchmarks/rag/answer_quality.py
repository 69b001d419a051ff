"""How well passages serve a model: the likelihood of a reference text after them, chunk by chunk (PipeRAG, §4).

Perplexity falls where passages help. Schedules are compared on the same texts: none, once, synchronous, pipelined. The
windows are those of the reference, as if the model had written it. Needs a scorer with probabilities of given text, as
:meth:`hybridindex.rag.generator.OpenAIGenerator.score`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from hybridindex.errors import InvalidInputError
from hybridindex.rag.periodic import PeriodicRetrieval, Schedule
from hybridindex.rag.prompts import answer_prompt
from hybridindex.rag.records import Passage
from hybridindex.rag.steps import Steps

__all__ = ["Likelihood", "Scorer", "answer_likelihood", "periodic_likelihood"]


class Scorer(Protocol):
    """What knows the probability of a text."""

    def score(self, prompt: str, continuation: str, /) -> tuple[float, ...]:
        """Natural logarithms of the probabilities of the continuation's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """Of a text under a model."""

    tokens: int
    log_likelihood: float

    @property
    def perplexity(self) -> float:
        """exp of the mean negative logarithm; infinity where it does not fit a float."""
        try:
            return math.exp(-self.log_likelihood / self.tokens)
        except OverflowError:
            return math.inf


def _total(values: list[float]) -> Likelihood:
    if not values:
        raise InvalidInputError("the scorer found no tokens; expected a reference of one or more")
    return Likelihood(tokens=len(values), log_likelihood=math.fsum(values))


def answer_likelihood(scorer: Scorer, question: str, passages: list[Passage], answer: str) -> Likelihood:
    """Of a reference ``answer`` after the prompt that pipelines use.

    Raises:
        InvalidInputError: an answer without tokens. GenerationError.
    """
    return _total(list(scorer.score(answer_prompt(question, passages), f" {answer}")))


def periodic_likelihood(plan: PeriodicRetrieval, steps: Steps, scorer: Scorer, reference: str) -> Likelihood:
    """Of ``reference`` as the continuation of the steps' question, with the passages that ``plan`` would have found.

    Chunks are cut at every ``plan.interval`` tokens of the document store's. Stale windows and shifts are those of the
    schedule; nothing runs concurrently, and nothing has a deadline.

    Raises:
        InvalidInputError: a reference without tokens. GenerationError, DocumentStoreError.
    """
    plan = plan.fitted(steps.retriever)
    starts = plan.starts_of(reference)
    # Before the white space: tokens of an LLM begin with it.
    cuts = [len(reference[:start].rstrip()) for start in starts[plan.interval :: plan.interval]]
    cuts.append(len(reference))
    values: list[float] = []
    passages: list[Passage] = []
    found: list[Passage] = []
    first = passages
    window_end, begin = 0, 0
    for number, end in enumerate(cuts):
        if plan.schedule is not Schedule.NONE and number == 0:
            passages = found = first = _search(plan, steps, "")
        elif plan.schedule is Schedule.SYNCHRONOUS:
            passages = _search(plan, steps, reference[:begin])
        elif plan.schedule is Schedule.PIPELINED:
            # The window ended where the chunk before this one began.
            if number > 1:
                found = _search(plan, steps, reference[:window_end])
            passages = plan.shifted(steps, found, plan.count_tokens(reference[window_end:begin]))
        prompt = plan.prompt_of(steps.question, reference[:begin], first, passages)
        values += scorer.score(prompt, reference[begin:end])
        window_end, begin = begin, end
    return _total(values)


def _search(plan: PeriodicRetrieval, steps: Steps, text: str) -> list[Passage]:
    query = plan.query_of(f"{steps.question} {text}" if text else steps.question)
    (found,) = steps.retrieve("window", [query])
    return found
