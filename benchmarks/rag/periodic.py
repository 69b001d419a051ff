"""PipeRAG beside a real LLM: the time of its schedules. The LLM has one core, retrieval the other.

- **balance**: what a chunk and a search take while both run, so that the corpus can be made to fit (``rag_corpus``).
- **written**: every schedule writes an answer to each question, interleaved.
- **projected**: PipeRAG's model of whole runs (Appendix C: a sum without the pipeline, the larger of the two with it),
  from the parts of other schedules' answers, against what the runs took.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hybridindex.rag.chunk_time import ChunkTimeModel
from hybridindex.rag.generator import OpenAIGenerator
from hybridindex.rag.periodic import PeriodicAnswer, PeriodicRetrieval, Schedule
from hybridindex.rag.records import Retrieved
from hybridindex.rag.retriever import Retriever
from hybridindex.rag.steps import Steps

__all__ = ["balance", "in_time", "projected", "written"]

Rows = dict[str, Any]

#: Generation that went on for longer than this had not to wait, in seconds: a search that was there is taken at once.
_AT_ONCE_S = 0.005


def balance(
    retriever: Retriever, generator: OpenAIGenerator, plan: PeriodicRetrieval, question: str
) -> tuple[float, float]:
    """Median seconds of a chunk with passages appended, and of one search beside it."""
    taken: list[float] = []
    done = threading.Event()

    def search() -> None:
        vectors = retriever.embed([question])
        session = retriever.open()
        while not done.is_set():
            started = time.perf_counter()
            session.search(vectors, retriever.k, retriever.nprobe)
            taken.append(time.perf_counter() - started)
        session.close()

    beside = threading.Thread(target=search)
    beside.start()
    try:
        alone = replace(plan, schedule=Schedule.SYNCHRONOUS, max_tokens=5 * plan.interval)
        with Steps(question, retriever, generator) as steps:
            # The first chunk reads a prompt that the server has not seen.
            chunk_s = float(np.median([chunk.generation_s for chunk in alone.run(steps).chunks[1:]]))
    finally:
        done.set()
        beside.join()
    return chunk_s, float(np.median(taken))


def in_time(answers: Sequence[PeriodicAnswer]) -> Rows:
    """Of searches beside a chunk: within its generation, as measured; nprobe; how generation was foretold."""
    chunks = [chunk for done in answers for chunk in done.chunks]
    searched = [
        (chunk, chunk.deadline_ms, chunk.retrieval_s)
        for chunk in chunks
        if chunk.deadline_ms is not None and chunk.retrieval_s is not None
    ]
    errors = [abs(c.window_s - c.generation_s) / c.generation_s for c in chunks if c.window_s]
    return {
        "searches": len(searched),
        "missed": sum(bool(chunk.missed) for chunk in chunks),
        "within_window": float(np.mean([s <= c.generation_s for c, _, s in searched])),
        "waited_share": float(np.mean([c.waited_s > _AT_ONCE_S for c, _, _ in searched])),
        "waited_s": [c.waited_s for c, _, _ in searched],
        "nprobe_used": [c.nprobe_used for c, _, _ in searched],
        "retrieval_s": [retrieval_s for _, _, retrieval_s in searched],
        "deadline_s": [deadline_ms / 1e3 for _, deadline_ms, _ in searched],
        "predicted_s": [c.window_s for c, _, _ in searched],
        "generation_s": [c.generation_s for c, _, _ in searched],
        "chunk_time_error": {"median": float(np.median(errors)), "p95": float(np.quantile(errors, 0.95))},
    }


def written(
    open_retriever: Callable[[], Retriever], generator: OpenAIGenerator, plan: PeriodicRetrieval,
    asked: Sequence[str], repeats: int, progress: Callable[[str], object],
) -> Rows:  # fmt: skip
    """Every schedule writes an answer to each question; rounds run forwards and backwards, so that drift cancels."""
    plans = {str(schedule): replace(plan, schedule=schedule) for schedule in Schedule}
    # What PipeRAG compares with: RETRO retrieves once per 64 tokens.
    plans["synchronous, every 64"] = replace(plan, schedule=Schedule.SYNCHRONOUS, interval=64)
    schedules = list(plans)
    answers: dict[str, list[PeriodicAnswer]] = {name: [] for name in schedules}
    models = {name: ChunkTimeModel() for name in schedules}
    for number, (question, _) in enumerate(itertools.product(asked, range(repeats))):
        for name in schedules[:: -1 if number % 2 else 1]:
            with Steps(question, open_retriever(), generator) as steps:
                done = plans[name].run(steps, models[name])
            answers[name].append(done)
            tokens = sum(chunk.tokens for chunk in done.chunks)
            progress(f"{name}: {tokens} tokens in {done.answer.seconds:.1f} s")
    hidden = np.array([done.answer.seconds for done in answers[Schedule.PIPELINED]])
    without = np.array([done.answer.seconds for done in answers[Schedule.NONE]])
    rows = {}
    for name, dones in answers.items():
        seconds = np.array([done.answer.seconds for done in dones])
        rows[name] = {
            "seconds": seconds.tolist(),
            "tokens": [sum(chunk.tokens for chunk in done.chunks) for done in dones],
            "over_pipelined": float(np.median(seconds / hidden)),
            "over_none": float(np.median(seconds / without)),
            "generation_s": float(np.mean([done.answer.generation_s for done in dones])),
            "nprobe_used": [n for done in dones for e in _searches(done) for n in e.nprobe_used],
        }
    return {
        "schedules": rows,
        "deadlines": in_time(answers[Schedule.PIPELINED]),
        "projected": projected(answers),
        "chunks": {
            name: [[chunk.generation_s for chunk in done.chunks] for done in dones] for name, dones in answers.items()
        },
    }


def _searches(done: PeriodicAnswer) -> list[Retrieved]:
    return [event for event in done.answer.events if isinstance(event, Retrieved)]


def projected(answers: Mapping[str, Sequence[PeriodicAnswer]]) -> Rows:
    """Seconds of the pipelined answers, foretold from the synchronous ones, and the other way round.

    Both have the same chunks and searches, one after the other or beside each other; neither's own times are used for
    itself. The first search stands before everything in both.
    """

    def parts(name: str) -> tuple[list[float], float, float]:
        """Chunks by position, later searches, first search: medians over that schedule's answers."""
        dones = answers[name]
        chunks = np.median([[chunk.generation_s for chunk in done.chunks] for done in dones], axis=0)
        found = [[event.seconds for event in _searches(done)] for done in dones]
        later = [seconds for row in found for seconds in row[1:]]
        return chunks.tolist(), float(np.median(later)), float(np.median([row[0] for row in found]))

    chunks, search, first = parts(Schedule.SYNCHRONOUS)
    # No search runs beside the first chunk and the last.
    pipelined = first + chunks[0] + chunks[-1] + sum(max(chunk, search) for chunk in chunks[1:-1])
    chunks, search, first = parts(Schedule.PIPELINED)
    synchronous = first + sum(chunks) + (len(chunks) - 1) * search
    foretold = {Schedule.PIPELINED: pipelined, Schedule.SYNCHRONOUS: synchronous}
    errors = {
        str(name): [abs(value - done.answer.seconds) / done.answer.seconds for done in answers[name]]
        for name, value in foretold.items()
    }
    return {
        "seconds": {str(name): value for name, value in foretold.items()},
        "errors": errors,
        "median_error": float(np.median([error for values in errors.values() for error in values])),
    }
