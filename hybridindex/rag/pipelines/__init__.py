"""Pipelines, each a function of the steps of one question. Lookahead is placed as in TeleRAG (§3.3, Figure 8).

The lists of a draft are loaded while the LLM generates the query that follows it. Where a pipeline begins with a
search, the generation after it hides the lookahead of the next search. ``plain`` has one search and no lookahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybridindex.errors import InvalidInputError
from hybridindex.rag.generator import Generator
from hybridindex.rag.pipelines.flare import flare
from hybridindex.rag.pipelines.hyde import hyde
from hybridindex.rag.pipelines.iter_retgen import iter_retgen
from hybridindex.rag.pipelines.iterative import iterative
from hybridindex.rag.pipelines.plain import plain
from hybridindex.rag.pipelines.self_rag import self_rag
from hybridindex.rag.pipelines.sub_question import sub_question
from hybridindex.rag.records import Answer
from hybridindex.rag.retriever import Retriever
from hybridindex.rag.steps import Steps

__all__ = [
    "PIPELINES",
    "flare",
    "hyde",
    "iter_retgen",
    "iterative",
    "plain",
    "run_pipeline",
    "self_rag",
    "sub_question",
]

PIPELINES: Mapping[str, Callable[..., Answer]] = {
    "hyde": hyde,
    "sub_question": sub_question,
    "iterative": iterative,
    "iter_retgen": iter_retgen,
    "flare": flare,
    "self_rag": self_rag,
    "plain": plain,
}
"""Each by the name that traces and the command line use."""


def run_pipeline(
    name: str, question: str, retriever: Retriever, generator: Generator, options: Any = None, **steps: Any
) -> Answer:
    """Answers one question: opens the steps, runs the pipeline, closes the session.

    Args:
        options: keyword arguments of the pipeline, as a mapping.
        steps: keyword arguments of :class:`hybridindex.rag.steps.Steps`.

    Raises:
        InvalidInputError: no such pipeline. GenerationError, ServiceError, DocumentStoreError.
    """
    if name not in PIPELINES:
        raise InvalidInputError(f"pipeline is {name!r}; expected one of {', '.join(PIPELINES)}")
    with Steps(question, retriever, generator, **steps) as opened:
        return PIPELINES[name](opened, **(options or {}))
