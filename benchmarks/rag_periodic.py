"""PipeRAG beside a real LLM: time and quality of four schedules. The LLM has one core, retrieval the other.

A search of the demo's index takes milliseconds, a chunk of a CPU's LLM seconds. To balance the two, each search is done
so often that a full one takes as long as a chunk (:class:`Larger`): the work of a corpus as many times as large, on the
same lists. The one that answers is the first, so results are those of the corpus that is there.

Quality is the perplexity of documents of the corpus as the schedules would have continued them; passages of the
document itself are left out, or a search would find the answer.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybridindex.errors import GenerationError
from hybridindex.rag.chunk_time import ChunkTimeModel
from hybridindex.rag.documents import Document, DocumentStore
from hybridindex.rag.generator import OpenAIGenerator
from hybridindex.rag.periodic import ChunkReport, PeriodicRetrieval, Schedule
from hybridindex.rag.quality import periodic_likelihood
from hybridindex.rag.retriever import RetrievalSession, Retriever
from hybridindex.rag.steps import Steps
from hybridindex.types import SearchResult

__all__ = ["Larger", "Reference", "balance", "likelihoods", "references", "written"]

Rows = dict[str, Any]

_BATCH = 2000
#: Searches that the balance is found with; half of them warm up.
_CALLS = 200
#: Passages around a held-out document that no search finds.
_MARGIN = 32


@dataclass(slots=True)
class Larger:
    """A source, and its sessions, of a corpus ``factor`` times as large: each search is done as often. One thread."""

    source: Any
    factor: int = 1
    #: Ids that no search finds.
    hidden: frozenset[int] = frozenset()

    def session(self, **options: Any) -> RetrievalSession:
        return Larger(self.source.session(**options), self.factor, self.hidden)

    def lookahead(self, drafts: Any, /, *, nprobe: int | None = None) -> object:
        return self.source.lookahead(drafts, nprobe=nprobe)

    def search(
        self, queries: Any, /, k: int = 10, nprobe: int | None = None, *, deadline_ms: float | None = None,
        min_nprobe: int = 1,
    ) -> SearchResult:  # fmt: skip
        each = None if deadline_ms is None else deadline_ms / self.factor
        more = k + len(self.hidden)
        found: SearchResult = self.source.search(queries, more, nprobe, deadline_ms=each, min_nprobe=min_nprobe)
        for _ in range(self.factor - 1):
            self.source.search(queries, more, int(found.nprobe_used.max()))
        keep = [[n for n, i in enumerate(row) if i not in self.hidden][:k] for row in found.ids.tolist()]
        at = np.array(keep)
        return replace(
            found,
            ids=np.take_along_axis(found.ids, at, axis=1),
            distances=np.take_along_axis(found.distances, at, axis=1),
        )

    def close(self) -> None:
        self.source.close()


@dataclass(frozen=True, slots=True)
class Reference:
    """A document of the corpus: its first passage as what is asked, the rest as what a model should have said."""

    question: str
    text: str
    ids: frozenset[int]


def references(documents: DocumentStore, count: int, passages: int, last: int) -> list[Reference]:
    """Documents of that many passages or more, cut there, spread over the ids below ``last``."""
    chains: list[list[Document]] = []
    chain: list[Document] = []
    for start in range(0, last, _BATCH):
        found = documents.read(range(start, min(last, start + _BATCH)))
        for stored in (found[number] for number in sorted(found)):
            if chain and chain[-1].successor != stored.document.id:
                chains.append(chain)
                chain = []
            chain.append(stored.document)
    long = [chain for chain in (*chains, chain) if len(chain) >= passages]
    return [
        Reference(
            question=one[0].text,
            text=" ".join(document.text[document.lead :] for document in one[1:passages]),
            # A link may be missing where an article goes on: its neighbours are left out as well.
            ids=frozenset(range(one[0].id - _MARGIN, one[-1].id + _MARGIN)),
        )
        for one in long[:: max(1, len(long) // count)][:count]
    ]


def balance(
    retriever: Retriever, generator: OpenAIGenerator, plan: PeriodicRetrieval, question: str
) -> tuple[float, float]:
    """Seconds of a chunk without retrieval, and of one search; medians of an answer."""
    alone = replace(plan, schedule=Schedule.NONE, max_tokens=4 * plan.interval)
    with Steps(question, retriever, generator) as steps:
        chunk_s = float(np.median([chunk.generation_s for chunk in alone.run(steps).chunks]))
    session = retriever.open()
    vectors = retriever.embed([question])
    taken = []
    for _ in range(_CALLS):
        started = time.perf_counter()
        session.search(vectors, retriever.k, retriever.nprobe)
        taken.append(time.perf_counter() - started)
    session.close()
    # The first ones find nothing in the processor's caches.
    return chunk_s, float(np.median(taken[_CALLS // 2 :]))


def written(
    open_retriever: Callable[[], Retriever], generator: OpenAIGenerator, plan: PeriodicRetrieval,
    asked: Sequence[str], repeats: int, progress: Callable[[str], object],
) -> Rows:  # fmt: skip
    """Every schedule writes an answer to each question, in an order that changes."""
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {schedule: [] for schedule in Schedule}
    chunks: dict[str, list[ChunkReport]] = {schedule: [] for schedule in Schedule}
    tokens: dict[str, list[int]] = {schedule: [] for schedule in Schedule}
    model = ChunkTimeModel()
    for question, _ in itertools.product(asked, range(repeats)):
        for schedule in rng.permutation([str(s) for s in Schedule]).tolist():
            with Steps(question, open_retriever(), generator) as steps:
                done = replace(plan, schedule=Schedule(schedule)).run(steps, model)
            seconds[schedule].append(done.answer.seconds)
            chunks[schedule] += done.chunks
            tokens[schedule].append(sum(chunk.tokens for chunk in done.chunks))
            progress(f"{schedule}: {tokens[schedule][-1]} tokens in {done.answer.seconds:.1f} s")
    hidden = np.array(seconds[Schedule.PIPELINED])
    searched = [c for c in chunks[Schedule.PIPELINED] if c.retrieval_s is not None]
    errors = [
        abs(c.window_s - c.generation_s) / c.generation_s for c in itertools.chain(*chunks.values()) if c.window_s
    ]
    return {
        "schedules": {
            name: {
                "seconds": values,
                "tokens": tokens[name],
                "over_pipelined": float(np.median(np.array(values) / hidden)),
                "generation_s": sum(c.generation_s for c in chunks[name]) / len(values),
            }
            for name, values in seconds.items()
        },
        "searches": len(searched),
        "within_window": float(np.mean([c.retrieval_s <= c.window_s for c in searched if c.window_s])),
        "waited_share": float(np.mean([c.waited_s > 0.005 for c in searched])),
        "missed": sum(bool(c.missed) for c in chunks[Schedule.PIPELINED]),
        "nprobe_used": [c.nprobe_used for c in searched],
        "retrieval_s": [c.retrieval_s for c in searched],
        "window_s": [c.window_s for c in searched],
        "chunk_time_error": {"median": float(np.median(errors)), "p95": float(np.quantile(errors, 0.95))},
    }


def likelihoods(
    open_retriever: Callable[[frozenset[int]], Retriever], generator: OpenAIGenerator, plan: PeriodicRetrieval,
    texts: Sequence[Reference], progress: Callable[[str], object],
) -> Rows:  # fmt: skip
    """Perplexity of the references under each schedule, over all their tokens."""
    plans = {**{str(s): replace(plan, schedule=s) for s in Schedule}}
    plans["pipelined, not shifted"] = replace(plan, schedule=Schedule.PIPELINED, shift=False)
    total: dict[str, list[tuple[int, float]]] = {name: [] for name in plans}
    for number, reference in enumerate(texts):
        for name, one in plans.items():
            try:
                with Steps(reference.question, open_retriever(reference.ids), generator) as steps:
                    found = periodic_likelihood(one, steps, generator, reference.text)
            except GenerationError as error:
                progress(f"reference {number}, {name}: {error}")
                raise
            total[name].append((found.tokens, found.log_likelihood))
            progress(f"reference {number}, {name}: perplexity {found.perplexity:.1f}")
    return {
        name: {
            "perplexity": float(np.exp(-sum(v for _, v in rows) / sum(n for n, _ in rows))),
            "tokens": sum(n for n, _ in rows),
            "each": [float(np.exp(-v / n)) for n, v in rows],
        }
        for name, rows in total.items()
    }
