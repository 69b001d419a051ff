"""Runs of the six pipelines with a real LLM, recorded: what benchmarks.rag replays and reads its overlap from.

Questions are the first of NQ and TriviaQA, by turns. Generations are short, since a small model on a CPU writes them;
several are under way at once, so that a trace's times are those of a shared server. A run that is in the file is not
made again. Questions and texts stay in the file: they are no part of this project.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.data import benchmark_cache
from hybridindex.rag.generator import OpenAIGenerator
from hybridindex.rag.pipelines import run_pipeline
from hybridindex.rag.retriever import Retriever
from hybridindex.rag.trace import RunTrace, TraceWriter, read_traces

__all__ = ["OPTIONS", "questions", "record", "recorded"]

#: Of each pipeline: a query's length is what matters, an answer's is not. Three iterations at most, as in TeleRAG.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "hyde": {"draft_tokens": 64, "answer_tokens": 24},
    "sub_question": {"list_tokens": 64, "answer_tokens": 24},
    "iterative": {"question_tokens": 24, "answer_tokens": 24, "rounds": 3},
    "iter_retgen": {"answer_tokens": 32, "rounds": 3},
    "flare": {"sentence_tokens": 24, "sentences": 3},
    "self_rag": {"answer_tokens": 24, "candidates": 2},
}
_SETS = ("nq", "triviaqa")


def questions(count: int) -> list[str]:
    """As many of the demo's query sets, one of each by turns."""
    texts = [(benchmark_cache() / "queries" / f"{name}.txt").read_text().splitlines() for name in _SETS]
    return [question for turn in zip(*texts, strict=False) for question in turn][:count]


def recorded(path: Path) -> list[RunTrace]:
    """What the file has; nothing where there is none."""
    return list(read_traces(path)) if path.exists() else []


def record(path: Path, retriever: Retriever, generator: OpenAIGenerator, asked: Sequence[str], at_once: int) -> None:
    """Adds the runs that ``path`` lacks. Raises GenerationError of the first that failed; the others are kept."""
    there = {(run.pipeline, run.question) for run in recorded(path)}
    missing = [(name, question) for question in asked for name in OPTIONS if (name, question) not in there]
    lock = threading.Lock()
    done = 0
    with TraceWriter(path, model=generator.model) as writer, ThreadPoolExecutor(at_once) as pool:

        def run(job: tuple[str, str]) -> None:
            nonlocal done
            name, question = job
            answer = run_pipeline(name, question, retriever, generator, OPTIONS[name])
            with lock:
                writer.append(answer)
                done += 1
                sys.stderr.write(f"recorded {done} of {len(missing)}: {name}, {answer.seconds:.0f} s\n")

        finished: Iterator[None] = pool.map(run, missing)
        for _ in finished:
            pass
