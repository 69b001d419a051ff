"""What the RAG benchmarks search: a corpus as if it were larger, and without the documents that are held out.

A search of the demo's index takes milliseconds, a chunk of a CPU's LLM seconds. To balance the two, the host scans each
batch as often as it takes: the work of a corpus as many times as large, on the same lists. It happens inside the
router's scanner, so that the router sees, predicts and limits one long scan. The results are those of the corpus that
is there. What it does not show: lists that are larger than the processor's caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybridindex.api import Index
from hybridindex.rag.documents import Document, DocumentStore
from hybridindex.rag.retriever import RetrievalSession
from hybridindex.router import Router
from hybridindex.types import SearchResult

__all__ = ["Hiding", "Reference", "host_router", "references"]

_BATCH = 2000
#: Passages around a held-out document that no search finds.
_MARGIN = 32


class _Repeated:
    """A host scanner that scans everything ``factor`` times; else the one within."""

    def __init__(self, within: Any, factor: int) -> None:
        self._within = within
        self._factor = factor

    def scan_checked(self, *arguments: Any, **options: Any) -> Any:
        for _ in range(self._factor - 1):
            self._within.scan_checked(*arguments, **{**options, "on_done": None})
        return self._within.scan_checked(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._within, name)


@contextmanager
def host_router(index: Index, factor: int = 1, devices: Sequence[str] = (), **options: Any) -> Iterator[Router]:
    """A router on one host thread, of a corpus ``factor`` times as large for the host.

    Args:
        options: of :meth:`Index.router`.
    """
    with index.router(None, devices, threads=1, **options) as router:
        if factor > 1:
            router._served.engine._host = _Repeated(router._served.engine._host, factor)
        yield router


@dataclass(slots=True)
class Hiding:
    """A source, and its sessions, that finds none of the ``hidden`` ids."""

    source: Any
    hidden: frozenset[int]

    def session(self, **options: Any) -> RetrievalSession:
        return Hiding(self.source.session(**options), self.hidden)

    def lookahead(self, drafts: Any, /, *, nprobe: int | None = None, window_ms: float | None = None) -> object:
        return self.source.lookahead(drafts, nprobe=nprobe, window_ms=window_ms)

    def search(self, queries: Any, /, k: int = 10, nprobe: int | None = None, **options: Any) -> SearchResult:
        found: SearchResult = self.source.search(queries, k + len(self.hidden), nprobe, **options)
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
