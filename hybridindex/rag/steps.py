"""The steps of a pipeline, for one question: look ahead, generate, retrieve. Records every step.

Owns the retrieval session; leaving the block always closes it, which frees the pages of its lists.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType

from hybridindex.errors import GenerationError, InvalidInputError
from hybridindex.rag.generator import Finished, Generator, Prompt
from hybridindex.rag.records import Answer, Event, Generated, LookedAhead, Passage, Piece, Retrieved
from hybridindex.rag.retriever import RetrievalSession, Retriever
from hybridindex.types import F32

__all__ = ["Steps", "unique"]

_log = logging.getLogger(__name__)

#: Longest question, in characters.
_MAX_QUESTION = 1 << 16


class Steps:
    """One run of a pipeline; a context manager, entered once. One thread; a second one may :meth:`retrieve`."""

    def __init__(
        self,
        question: str,
        retriever: Retriever,
        generator: Generator,
        *,
        lookahead: bool = True,
        step_s: Mapping[str, float] | None = None,
        on_text: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            lookahead: False: the same pipeline without it, to compare.
            step_s: seconds of generations by name, as ``profile llm`` measured them: the windows of lookaheads that
                hide behind these, where the retriever names neither window nor bytes. For sources whose plan timed
                copies.
            on_text: called with the pieces of the answer as they arrive. What it raises ends the run.

        Raises:
            InvalidInputError: an empty or far too long question.
        """
        if not question.strip() or len(question) > _MAX_QUESTION:
            raise InvalidInputError(f"question has {len(question)} characters; expected text, {_MAX_QUESTION} at most")
        self.question = question
        self.retriever = retriever
        self.events: list[Event] = []
        self._generator = generator
        self._lookahead = lookahead
        self._step_s = {} if step_s is None or retriever.has_budget else dict(step_s)
        self._on_text = on_text
        self._clock = clock
        self._started = clock()
        self._session: RetrievalSession | None = None

    @property
    def session(self) -> RetrievalSession:
        """The open retrieval session."""
        assert self._session is not None, "steps are used within their block"
        return self._session

    def now(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    def look_ahead(self, name: str, *texts: str, behind: Sequence[str] = ()) -> None:
        """Starts to load the lists of these drafts; returns at once. Blank texts are left out.

        ``behind``: the generations that it hides behind. Where all of them were measured, their time is its window.
        """
        drafts = [text for text in texts if text.strip()]
        if not self._lookahead or not drafts:
            return
        started = self.now()
        seconds = [self._step_s.get(step, 0.0) for step in behind]
        window = {"window_ms": sum(seconds) * 1e3} if seconds and all(seconds) else {}
        self.session.lookahead(self.retriever.embed(drafts), nprobe=self.retriever.nprobe, **window)
        self.events.append(LookedAhead(name=name, texts=tuple(drafts), started_s=started, seconds=self.now() - started))

    def retrieve(
        self,
        name: str,
        texts: Sequence[str],
        *,
        k: int | None = None,
        deadline_ms: Callable[[float], float] | None = None,
        min_nprobe: int = 1,
    ) -> list[list[Passage]]:
        """The passages of each text.

        Args:
            deadline_ms: from the seconds that embedding took to the time that the search may take.
            min_nprobe: floor under a deadline.
        """
        started = self.now()
        vectors: F32 = self.retriever.embed(texts)
        embed_s = self.now() - started
        limit = None if deadline_ms is None else deadline_ms(embed_s)
        result = self.session.search(
            vectors,
            self.retriever.k if k is None else k,
            self.retriever.nprobe,
            deadline_ms=limit,
            min_nprobe=min_nprobe,
        )
        found = self.retriever.passages_of(result)
        self.events.append(
            Retrieved(
                name=name,
                texts=tuple(texts),
                ids=tuple(tuple(row) for row in result.ids.tolist()),
                nprobe_used=tuple(result.nprobe_used.tolist()),
                hit_rate=tuple(result.hit_rate.tolist()),
                deadline_ms=limit,
                started_s=started,
                embed_s=embed_s,
                seconds=self.now() - started,
            )
        )
        return found

    def generate(
        self,
        name: str,
        prompt: str,
        *,
        max_tokens: int,
        stop: tuple[str, ...] = (),
        logprobs: bool = False,
        append: bool = False,
        show: bool = False,
    ) -> Generated:
        """One whole generation. ``show``: it is part of the answer. Raises GenerationError."""
        asked = Prompt(name=name, text=prompt, max_tokens=max_tokens, stop=stop, logprobs=logprobs, append=append)
        started = self.now()
        pieces: list[Piece] = []
        finished: Finished | None = None
        stream = self._generator.generate(asked)
        try:
            for part in stream:
                if isinstance(part, Finished):
                    finished = part
                    break
                pieces.append(part)
                if show:
                    self.show(part.text)
        finally:
            # Ends a generation that nobody reads any more.
            close = getattr(stream, "close", None)
            if close is not None:
                close()
        if finished is None:
            raise GenerationError(f"the generator ended step {name!r} without saying why")
        done = Generated(
            name=name,
            pieces=tuple(pieces),
            finish=finished.reason,
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            prompt_sha256=hashlib.sha256(prompt.encode()).hexdigest(),
            max_tokens=max_tokens,
            started_s=started,
            seconds=self.now() - started,
        )
        self.events.append(done)
        return done

    def show(self, text: str) -> None:
        """Hands over a part of the answer."""
        if self._on_text is not None and text:
            self._on_text(text)

    def answer(self, pipeline: str, text: str, passages: Iterable[Passage]) -> Answer:
        """What the pipeline returns."""
        return Answer(
            pipeline=pipeline,
            question=self.question,
            text=text.strip(),
            passages=tuple(unique(passages)),
            events=tuple(sorted(self.events, key=lambda event: event.started_s)),
            seconds=self.now(),
        )

    def __enter__(self) -> Steps:
        self._session = self.retriever.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        try:
            session.close()
        except Exception:  # noqa: BLE001 - neither an answer nor an earlier error is lost for it
            # A daemon that cannot be reached ends the unused session by itself after a while.
            _log.warning("the retrieval session could not be closed", exc_info=True)


def unique(passages: Iterable[Passage]) -> list[Passage]:
    """Each passage once, where it came first."""
    found: dict[int, Passage] = {}
    for passage in passages:
        found.setdefault(passage.id, passage)
    return list(found.values())
