"""PipeRAG (Jiang et al. 2024): periodic retrieval that runs while an answer is generated.

While a chunk is generated, the next chunk's passages are searched with a query window that is stale by one chunk; the
results are shifted by as much. The router chooses the nprobe that fits the chunk's generation time, its load and its
residency. Works with decoder-only models, by a new prompt for each chunk or by inserting passages; the paper's model
has them in cross attention instead.

Windows and shifts count the document store's tokens, the interval the LLM's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Literal

from hybridindex.errors import (
    DeadlineExceededError,
    InvalidInputError,
    OverloadedError,
    UnreachableError,
)
from hybridindex.rag.beside import Beside
from hybridindex.rag.chunk_time import ChunkTimeModel
from hybridindex.rag.prompts import answer_prompt, context_of
from hybridindex.rag.records import Answer, Passage, Retrieved
from hybridindex.rag.retriever import RetrievalSession, Retriever
from hybridindex.rag.shift import shift_passage, tail_of
from hybridindex.rag.steps import Steps
from hybridindex.rag.tokens import TokenStarts, word_starts

__all__ = ["ChunkReport", "PeriodicAnswer", "PeriodicRetrieval", "Schedule", "round_trip_ms"]

#: Least deadline; it means min_nprobe. Zero would mean no deadline.
_LEAST_DEADLINE_MS = 1.0


class Schedule(StrEnum):
    """When passages are searched."""

    NONE = "none"
    ONCE = "once"
    #: Before each chunk, with the newest window; generation waits.
    SYNCHRONOUS = "synchronous"
    #: During the chunk before, with a stale window.
    PIPELINED = "pipelined"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReport:
    """One chunk of an answer, and the retrieval that ran beside it."""

    tokens: int
    generation_s: float
    #: Generation time that was predicted for it; None while the model knew nothing.
    window_s: float | None
    #: Time that the search beside it was given; None: no deadline, or no search.
    deadline_ms: float | None = None
    #: Embedding, search and reading passages; None: no search.
    retrieval_s: float | None = None
    #: Time that generation waited for the search.
    waited_s: float = 0.0
    nprobe_used: int | None = None
    #: Tokens by which the results were shifted.
    staleness: int = 0
    #: Why the search gave nothing, and the passages before it stayed; empty: it gave something, or there was none.
    missed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicAnswer:
    """An answer and its chunks."""

    answer: Answer
    chunks: tuple[ChunkReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicRetrieval:
    """How an answer is generated. :meth:`run` may be called from several threads, each with its own steps."""

    schedule: Schedule = Schedule.PIPELINED
    #: Tokens between retrievals, m': the size of a chunk, and the staleness of a query.
    interval: int = 64
    #: Tokens of a query, m.
    window: int = 64
    max_tokens: int = 256
    #: Floor of nprobe under a deadline.
    min_nprobe: int = 1
    #: Fraction of the shortest expected generation time that a retrieval may take.
    margin: float = 0.95
    #: "replace": each chunk's prompt has its passages before all text. "insert": the first passages stay in front, the
    #: newest stand before the last ``behind`` tokens of the text; the server's prefix cache stays valid up to there.
    placement: Literal["replace", "insert"] = "replace"
    behind: int = 128
    shift: bool = True
    #: Time of a round trip to a daemon; None: measured when an answer begins, 0 in process (:func:`round_trip_ms`).
    network_ms: float | None = None
    #: Must be the document store's; None: found out when an answer begins (:meth:`fitted`), words until then.
    token_starts: TokenStarts | None = None

    def __post_init__(self) -> None:
        for name in ("interval", "window", "max_tokens", "min_nprobe", "behind"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInputError(f"{name} is {value!r}; expected an integer of 1 or more")
        if not 0 < self.margin <= 1:
            raise InvalidInputError(f"margin is {self.margin!r}; expected a number above 0, 1 at most")
        if self.network_ms is not None and not 0 <= self.network_ms < 60_000:
            raise InvalidInputError(f"network_ms is {self.network_ms!r}; expected milliseconds, 0 or more")
        if self.placement not in ("replace", "insert"):
            raise InvalidInputError(f"placement is {self.placement!r}; expected 'replace' or 'insert'")

    def run(self, steps: Steps, model: ChunkTimeModel | None = None) -> PeriodicAnswer:
        """Writes an answer to the steps' question.

        Args:
            model: generation times of earlier answers. Without it the first search has no deadline.

        Raises:
            InvalidInputError: as :meth:`fitted`. GenerationError, ServiceError, DocumentStoreError. A background
            search that was late or refused raises nothing; the chunk's report says so.
        """
        plan = self.fitted(steps.retriever)
        if plan.network_ms is None:
            plan = replace(plan, network_ms=round_trip_ms(steps.session))
        with Beside[list[Passage]]() as beside:
            return _Run(plan, steps, model or ChunkTimeModel(), beside).write()

    def fitted(self, retriever: Retriever) -> PeriodicRetrieval:
        """The same with the tokens of the retriever's document store: those given, its embedder's, or words.

        Raises:
            InvalidInputError: the store's are others. DocumentStoreError: a damaged file.
        """
        return replace(self, token_starts=retriever.token_starts(self.token_starts))

    def starts_of(self, text: str) -> list[int]:
        """Where the document store's tokens start, in characters."""
        return [int(start) for start in (self.token_starts or word_starts)([text])[0]]

    def count_tokens(self, text: str) -> int:
        """In the document store's tokens."""
        return len(self.starts_of(text))

    def query_of(self, text: str) -> str:
        """The window at the end of ``text``."""
        return tail_of(text, self.starts_of(text), self.window).strip()

    def prompt_of(self, question: str, text: str, first: Sequence[Passage], passages: Sequence[Passage]) -> str:
        """What the next chunk is asked with.

        Args:
            text: of the answer so far.
            first: the passages of the first search.
            passages: those of the newest window; ``first`` itself where there was none.
        """
        if self.placement == "replace":
            return answer_prompt(question, passages) + text
        head = answer_prompt(question, first)
        context = "" if passages is first else context_of(passages)
        if not context or not text:
            return head + text
        # The model continues what stands last, which must be its own text.
        tail = tail_of(text, self.starts_of(text), self.behind)
        return f"{head}{text[: len(text) - len(tail)].rstrip()}\n\n{context}\n\n{tail.lstrip()}"

    def shifted(self, steps: Steps, passages: Sequence[Passage], staleness: int) -> list[Passage]:
        """The passages, moved on by ``staleness`` tokens; those with nothing left are left out."""
        documents = steps.retriever.documents
        if documents is None or not self.shift or staleness == 0:
            return list(passages)
        moved = [replace(p, text=shift_passage(documents, p.id, staleness)) for p in passages]
        return [passage for passage in moved if passage.text]


class _Run:
    """The state of one answer."""

    def __init__(
        self, plan: PeriodicRetrieval, steps: Steps, model: ChunkTimeModel, beside: Beside[list[Passage]]
    ) -> None:
        self._plan = plan
        self._steps = steps
        self._model = model
        self._beside = beside
        self._text = ""
        #: What the server has cached: the last prompt and its completion.
        self._known = ""
        self._first: list[Passage] = []
        self._passages = self._first
        self._seen: list[Passage] = []
        #: The results of the newest window, as they were found.
        self._found: list[Passage] = []

    def write(self) -> PeriodicAnswer:
        plan = self._plan
        reports: list[ChunkReport] = []
        left = plan.max_tokens
        if plan.schedule is not Schedule.NONE:
            # The first chunk of the sequence is the question: searched before anything is written.
            self._use(self._search(self._query(), None))
            self._first = self._found = self._passages
        while left > 0:
            size = min(plan.interval, left)
            report, finished = self._write_chunk(size, first=not reports, last=size == left)
            reports.append(report)
            left -= size
            if finished:
                break
        return PeriodicAnswer(
            answer=self._steps.answer(f"piperag_{plan.schedule}", self._text, self._seen), chunks=tuple(reports)
        )

    def _write_chunk(self, size: int, *, first: bool, last: bool) -> tuple[ChunkReport, bool]:
        plan, steps = self._plan, self._steps
        if plan.schedule is Schedule.SYNCHRONOUS and not first:
            self._use(self._search(self._query(), None))
        prompt = plan.prompt_of(steps.question, self._text, self._first, self._passages)
        length = plan.count_tokens(prompt)
        unseen = max(1, length - plan.count_tokens(prompt[: _in_common(prompt, self._known)]))
        window_s = self._model.predict_s(length, size, unseen=unseen)
        least_s = self._model.predict_least_s(length, size, unseen=unseen)
        started = steps.now()
        pending: Future[list[Passage]] | None = None
        # Beside the first chunk the window is that of the first search, whose results are there.
        if plan.schedule is Schedule.PIPELINED and not first and not last:
            window = None if least_s is None else (started, least_s)
            pending = self._beside.submit(partial(self._search, self._query(), window))
        done = steps.generate("chunk", prompt, max_tokens=size, append=True, show=True)
        self._model.observe(length, done.tokens, done.first_token_s, done.seconds, unseen=unseen)
        self._text += done.text
        self._known = prompt + done.text
        report = ChunkReport(tokens=done.tokens, generation_s=done.seconds, window_s=window_s)
        if plan.schedule is not Schedule.PIPELINED or last:
            return report, done.finish != "length"
        staleness = plan.count_tokens(done.text)
        if pending is not None:
            report = self._collect(pending, report)
        if not report.missed:
            self._use(plan.shifted(steps, self._found, staleness))
        return replace(report, staleness=0 if report.missed else staleness), done.finish != "length"

    def _query(self) -> str:
        return self._plan.query_of(f"{self._steps.question} {self._text}" if self._text else self._steps.question)

    def _search(self, query: str, window: tuple[float, float] | None) -> list[Passage]:
        """On either thread. ``window``: when generation of the chunk began, and its least seconds."""
        plan, steps = self._plan, self._steps

        def deadline_ms(_embed_s: float) -> float:
            assert window is not None
            # Embedding is done; the rest is for the network, coarse quantization and the scan. The margin is for
            # reading passages.
            started, seconds = window
            left_s = seconds * plan.margin - (steps.now() - started)
            return max(_LEAST_DEADLINE_MS, left_s * 1e3 - (plan.network_ms or 0.0))

        (found,) = steps.retrieve(
            "window", [query], deadline_ms=None if window is None else deadline_ms, min_nprobe=plan.min_nprobe
        )
        return found

    def _collect(self, pending: Future[list[Passage]], report: ChunkReport) -> ChunkReport:
        before = time.perf_counter()
        try:
            self._found = pending.result()
        except (DeadlineExceededError, OverloadedError, UnreachableError) as error:
            return replace(report, missed=str(error), waited_s=time.perf_counter() - before)
        waited_s = time.perf_counter() - before
        search = next(event for event in reversed(self._steps.events) if isinstance(event, Retrieved))
        return replace(
            report,
            deadline_ms=search.deadline_ms,
            retrieval_s=search.seconds,
            nprobe_used=search.nprobe_used[0],
            waited_s=waited_s,
        )

    def _use(self, passages: list[Passage]) -> None:
        self._passages = passages
        self._seen = self._seen + passages


def _in_common(some: str, other: str) -> int:
    """Characters that both begin with."""
    return next((n for n, (a, b) in enumerate(zip(some, other, strict=False)) if a != b), min(len(some), len(other)))


def round_trip_ms(session: RetrievalSession, tries: int = 3) -> float:
    """The shortest of a few calls to a daemon's session; 0 for a session in process."""
    ask = getattr(session, "stats", None)
    if not callable(ask):
        return 0.0
    times = []
    for _ in range(tries):
        before = time.perf_counter()
        ask()
        times.append(time.perf_counter() - before)
    return min(times) * 1e3
