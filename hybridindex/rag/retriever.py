"""From texts to passages: an embedder, a source of retrieval sessions, and a document store.

A router and a daemon's client are both a :class:`SessionSource`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hybridindex.errors import InvalidInputError, ServiceError
from hybridindex.rag.documents import DocumentStore, StoredPassage, tokens_of_store
from hybridindex.rag.records import Passage
from hybridindex.rag.tokens import TokenStarts, word_starts
from hybridindex.types import F32, SearchResult

__all__ = ["CenteredEmbedder", "Embedder", "RetrievalSession", "Retriever", "SessionSource"]


class Embedder(Protocol):
    """Texts to query vectors of an index. One that has a ``name`` is compared with the document store's.

    One that embeds passages in another way than queries has a method ``embed_passages`` too.
    """

    def embed(self, texts: Sequence[str], /) -> F32:
        """(n, d) float32."""


class RetrievalSession(Protocol):
    """What pipelines use of a router's session and of a daemon's."""

    def lookahead(self, drafts: Any, /, *, nprobe: int | None = None, window_ms: float | None = None) -> object: ...

    def search(
        self,
        queries: Any,
        /,
        k: int = 10,
        nprobe: int | None = None,
        *,
        deadline_ms: float | None = None,
        min_nprobe: int = 1,
    ) -> SearchResult: ...

    def close(self) -> None: ...


class SessionSource(Protocol):
    """A router, or a client of a daemon."""

    def search(
        self,
        queries: Any,
        /,
        k: int = 10,
        nprobe: int | None = None,
        *,
        deadline_ms: float | None = None,
        min_nprobe: int = 1,
    ) -> SearchResult: ...

    def session(self, *, lookahead_bytes: int | None = None, window_ms: float | None = None) -> RetrievalSession: ...


class CenteredEmbedder:
    """Subtracts the passages' mean from an embedder's vectors and normalises them. As thread-safe as the embedder."""

    def __init__(self, embedder: Embedder, mean: F32) -> None:
        """``mean``: (d,) float32, as :class:`hybridindex.rag.documents.DocumentsInfo` has it."""
        self._embedder = embedder
        self._mean = mean

    @property
    def token_starts(self) -> TokenStarts | None:
        """Those of the embedder within; None where it has none."""
        return getattr(self._embedder, "token_starts", None)

    @property
    def name(self) -> str | None:
        """That of the embedder within; None where it has none."""
        return getattr(self._embedder, "name", None)

    def embed(self, texts: Sequence[str], /) -> F32:
        """(n, d) float32, of length 1 or 0. Raises InvalidInputError where the mean has another dimension."""
        return self._centered(self._embedder.embed(texts))

    def embed_passages(self, texts: Sequence[str], /) -> F32:
        """As :meth:`embed`, of passages."""
        return self._centered(getattr(self._embedder, "embed_passages", self._embedder.embed)(texts))

    def _centered(self, vectors: F32) -> F32:
        if vectors.shape[1:] != self._mean.shape:
            raise InvalidInputError(
                f"the embedder gives {vectors.shape[1:]} dimensions, the mean has {self._mean.shape}; "
                "use the embedder that the documents were embedded with"
            )
        moved = vectors - self._mean
        norms = np.linalg.norm(moved, axis=1, keepdims=True)
        unit: F32 = np.divide(moved, norms, out=np.zeros_like(moved), where=norms > 0)
        return unit


class Retriever:
    """Owns neither source, embedder nor documents. As thread-safe as they are."""

    def __init__(
        self,
        source: SessionSource,
        embedder: Embedder,
        documents: DocumentStore | None,
        *,
        k: int = 5,
        nprobe: int | None = None,
        window_ms: float | None = None,
        lookahead_bytes: int | None = None,
        dim: int | None = None,
    ) -> None:
        """
        Args:
            source: a router, or a client of a daemon.
            documents: None: passages have no text, only ids and scores.
            k: passages per query text.
            nprobe: lists per query; None: the router's.
            window_ms: generation time that hides lookahead; or ``lookahead_bytes``; neither: the router's default.
            dim: of the index; None: the documents', else what the source says, where it answers now. Embeddings are
                checked against it once, here.

        Raises:
            InvalidInputError: a bad k or nprobe, another embedder than the documents', or embeddings of another
            dimension than the documents or ``dim``.
        """
        for name, value in (("k", k), ("nprobe", nprobe)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidInputError(f"{name} is {value!r}; expected an integer of 1 or more")
        self.source = source
        self.documents = documents
        self.k = k
        self.nprobe = nprobe
        self._embedder = embedder
        self._budget = {"window_ms": window_ms, "lookahead_bytes": lookahead_bytes}
        if documents is None and dim is None:
            dim = _dim_of(source)
        expected = documents.info.dim if documents is not None else dim
        if dim is not None and expected != dim:
            raise InvalidInputError(
                f"documents have {expected} dimensions, the index {dim}; expected those of the index"
            )
        given = getattr(embedder, "name", None)
        was = None if documents is None else documents.info.embedder
        if None not in (given, was) and given != was:
            raise InvalidInputError(
                f"the embedder is {given!r}, but the documents were embedded by {was!r}; use that one"
            )
        if expected is not None and (found := self.embed(["dimension"]).shape[1]) != expected:
            of, by = f" {given!r}" if given else "", f", embedded by {was!r}" if was else ""
            raise InvalidInputError(
                f"the embedder{of} gives {found} dimensions, but the index has {expected}{by}; use the embedder it "
                "was built with"
            )

    def token_starts(self, given: TokenStarts | None = None) -> TokenStarts:
        """The tokenizer of the document store: ``given``, or the embedder's own, or words.

        Raises:
            InvalidInputError: the store's tokens are others. DocumentStoreError: a damaged file.
        """
        own = getattr(self._embedder, "token_starts", None)
        tried = (given,) if given is not None else (own, word_starts) if own is not None else (word_starts,)
        return tried[0] if self.documents is None else tokens_of_store(self.documents, tried)

    @property
    def has_budget(self) -> bool:
        """Whether it says what its sessions move."""
        return any(value is not None for value in self._budget.values())

    def open(self) -> RetrievalSession:
        """A session with this retriever's lookahead budget; the caller closes it."""
        return self.source.session(**self._budget)  # type: ignore[arg-type]

    def search(
        self,
        texts: Sequence[str],
        *,
        k: int | None = None,
        deadline_ms: float | None = None,
        min_nprobe: int = 1,
    ) -> list[list[Passage]]:
        """The passages of each text, best first, without a session.

        Raises:
            InvalidInputError: a text that is empty or none, or what the source refuses. ServiceError, RouterError,
            DocumentStoreError.
        """
        for text in texts:
            if not isinstance(text, str) or not text.strip():
                raise InvalidInputError(f"query is {text!r}; expected a text")
        result = self.source.search(
            self.embed(texts),
            self.k if k is None else k,
            self.nprobe,
            deadline_ms=deadline_ms,
            min_nprobe=min_nprobe,
        )
        return self.passages_of(result)

    async def asearch(self, texts: Sequence[str], **options: Any) -> list[list[Passage]]:
        """:meth:`search` on a thread: embedding would hold up the event loop. Concurrent calls share batches."""
        return await asyncio.to_thread(self.search, texts, **options)

    def embed(self, texts: Sequence[str]) -> F32:
        """(n, d) float32.

        Raises:
            InvalidInputError: no texts, or an embedder that answers something else.
        """
        if not texts:
            raise InvalidInputError("texts is empty; expected one or more")
        vectors = self._embedder.embed(list(texts))
        if not isinstance(vectors, np.ndarray) or vectors.ndim != 2 or len(vectors) != len(texts):
            what = vectors.shape if isinstance(vectors, np.ndarray) else type(vectors).__name__
            raise InvalidInputError(f"the embedder gave {what} for {len(texts)} texts; expected ({len(texts)}, d)")
        return vectors.astype(np.float32, copy=False)

    def passages_of(self, result: SearchResult) -> list[list[Passage]]:
        """The passages of each query, best first; empty places, and what was deleted meanwhile, left out.

        Raises:
            DocumentStoreError: an id without a passage.
        """
        documents, found = self.documents, []
        texts: Mapping[int, StoredPassage] = {}
        if documents is not None:
            # What was deleted since the search has no text any more.
            read = documents.find if documents.is_live else documents.read
            texts = read(result.ids[result.ids >= 0].tolist())
        for ids, scores, used in zip(result.ids, result.distances, result.nprobe_used, strict=True):
            row = []
            for number, score in zip(ids.tolist(), scores.tolist(), strict=True):
                if number < 0 or (documents is not None and number not in texts):
                    continue
                document = texts[number].document if number in texts else None
                row.append(
                    Passage(
                        id=number,
                        score=score,
                        text=document.text if document is not None else "",
                        source=document.source if document is not None else "",
                        nprobe_used=int(used),
                    )
                )
            found.append(row)
        return found


def _dim_of(source: SessionSource) -> int | None:
    """Dimensions of the searched index; None where the source does not say or does not answer."""
    ask = getattr(source, "status", None)
    if not callable(ask):
        return getattr(source, "dim", None)
    with contextlib.suppress(ServiceError, KeyError, TypeError):
        return int(ask()["index"]["dim"])
    return None
