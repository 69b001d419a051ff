"""LangChain: a vector store, and a retriever over a :class:`hybridindex.rag.Retriever`. Needs the extra ``langchain``.

::

    store = HybridIndexVectorStore("idx", embedding, columns={"year": "int"})
    store.add_documents(documents)
    store.similarity_search("what is a planet", k=4, filter={"year": {"$gte": 2020}})

    retriever = HybridIndexRetriever(retriever=hybridindex.rag.Retriever(router, embedder, documents))
    chain = retriever | format_documents | prompt | llm
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from hybridindex.errors import InvalidInputError, MissingDependencyError, how_to_install
from hybridindex.rag.collection import Collection, Hit, Item, from_dict
from hybridindex.rag.records import Passage
from hybridindex.rag.retriever import Retriever

try:
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.vectorstores import VectorStore
    from langchain_core.vectorstores.utils import maximal_marginal_relevance
except ImportError as error:
    raise MissingDependencyError(
        f"what is for LangChain needs langchain-core: {how_to_install('langchain')}"
    ) from error

__all__ = ["HybridIndexRetriever", "HybridIndexVectorStore"]

#: Texts that are embedded and written at a time.
_BATCH = 512


class HybridIndexRetriever(BaseRetriever):
    """Documents with ``id``, ``score``, ``source`` and ``nprobe_used`` as metadata. The caller closes the
    inner retriever. Any thread or event loop."""

    retriever: Retriever
    #: Documents per query; None: the inner retriever's.
    k: int | None = None
    #: Time limit of a search, and the floor to which nprobe may fall to meet it.
    deadline_ms: float | None = None
    min_nprobe: int = 1

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        """Raises InvalidInputError, ServiceError, RouterError, DocumentStoreError."""
        (passages,) = self.retriever.search([query], k=self.k, deadline_ms=self.deadline_ms, min_nprobe=self.min_nprobe)
        return [_document(passage) for passage in passages]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        (passages,) = await self.retriever.asearch(
            [query], k=self.k, deadline_ms=self.deadline_ms, min_nprobe=self.min_nprobe
        )
        return [_document(passage) for passage in passages]


def _document(passage: Passage) -> Document:
    metadata = {
        "id": passage.id,
        "score": passage.score,
        "source": passage.source,
        "nprobe_used": passage.nprobe_used,
    }
    return Document(id=str(passage.id), page_content=passage.text, metadata=metadata)


class HybridIndexVectorStore(VectorStore):
    """Texts with metadata in an index that changes. Any thread or event loop; close it once.

    Metadata that are columns of the index filter searches there; all of it comes back with the documents. Scores are
    the index's: cosine similarity, where nothing else is said.
    """

    def __init__(
        self,
        path: str | Path | None,
        embedding: Embeddings,
        *,
        columns: Mapping[str, str] | None = None,
        collection: Collection | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            path: of the index; where nothing is, the first texts make one.
            embedding: embeds texts and queries.
            columns: of an index that is to be made: name and kind of the metadata that filters may name, as
                {"year": "int", "lang": "string", "tags": "list of strings"}.
            collection: instead of ``columns`` and ``options``, which are refused beside it, and of ``path``, which is
                then None or its own; the caller closes it.
            options: further ones of :class:`hybridindex.rag.collection.Collection`: metric, codec, nprobe, router, …

        Raises:
            InvalidInputError, DocumentStoreError, IndexFormatError, BuildError: as the collection.
        """
        self._embedding = embedding
        self._owns = collection is None
        if collection is None:
            if path is None:
                raise InvalidInputError("path is missing; expected path=, the directory of the index, or collection=")
            collection = Collection(path, columns=columns, **options)
        else:
            if path is not None and Path(path).absolute() != collection.path.absolute():
                raise InvalidInputError(
                    f"path is {str(path)!r}, the collection is at {collection.path}; give one of them"
                )
            if named := [*options, *(["columns"] if columns else [])]:
                raise InvalidInputError(
                    f"a collection has its own {', '.join(named)}; give them to it, and not beside it"
                )
        self._collection = collection

    @property
    def collection(self) -> Collection:
        """What it is a face of."""
        return self._collection

    @property
    def embeddings(self) -> Embeddings:
        return self._embedding

    # Changes

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Embeds and writes texts, in the place of those that have their ids; the ids, new ones where none are given.

        Raises:
            InvalidInputError: as many texts as metadata or ids were expected; or metadata do not fit the columns.
            DocumentStoreError, BuildError, FileError: earlier batches of 512 are written.
        """
        given = list(texts)
        for name, values in (("metadatas", metadatas), ("ids", ids)):
            if values is not None and len(values) != len(given):
                raise InvalidInputError(f"{name} has {len(values)} entries for {len(given)} texts; expected as many")
        keys = [str(uuid.uuid4()) if key is None else str(key) for key in (ids or [None] * len(given))]
        every = [
            Item(text=text, key=key, metadata=metadata or {})
            for text, key, metadata in zip(given, keys, metadatas or [{}] * len(given), strict=True)
        ]
        # Of texts with one id, the last one stays.
        items = list({item.key: item for item in every}.values())
        for start in range(0, len(items), _BATCH):
            batch = items[start : start + _BATCH]
            self._collection.put(batch, self._embedding.embed_documents([item.text for item in batch]))
        return keys

    def delete(self, ids: Sequence[str] | None = None, **kwargs: Any) -> bool | None:
        """Deletes documents; those that are not there change nothing. None: all of them."""
        if ids is None:
            self._collection.clear()
        elif isinstance(ids, str):
            raise InvalidInputError(f"ids is {ids!r}; expected a list of ids")
        else:
            self._collection.delete(keys=list(map(str, ids)))
        return True

    # Searches

    def similarity_search(
        self,
        query: str,
        k: int = 4,
        filter: Mapping[str, Any] | str | None = None,  # noqa: A002
        **kwargs: Any,
    ) -> list[Document]:
        """
        Args:
            filter: {"year": {"$gte": 2020}, "$or": [...]}, of columns of the index; or a condition as ``where`` takes.
            kwargs: nprobe.

        Raises:
            InvalidInputError: names what is wrong with the filter, and the columns.
        """
        return [found for found, _ in self.similarity_search_with_score(query, k, filter, **kwargs)]

    def similarity_search_with_score(
        self,
        query: str,
        k: int = 4,
        filter: Mapping[str, Any] | str | None = None,  # noqa: A002
        **kwargs: Any,
    ) -> list[tuple[Document, float]]:
        """As :meth:`similarity_search`, with the index's score: larger is nearer, but for metric "l2"."""
        return self.similarity_search_with_score_by_vector(self._embedding.embed_query(query), k, filter, **kwargs)

    def similarity_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        filter: Mapping[str, Any] | str | None = None,  # noqa: A002
        **kwargs: Any,
    ) -> list[Document]:
        return [found for found, _ in self.similarity_search_with_score_by_vector(embedding, k, filter, **kwargs)]

    def similarity_search_with_score_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        filter: Mapping[str, Any] | str | None = None,  # noqa: A002
        **kwargs: Any,
    ) -> list[tuple[Document, float]]:
        return [(_found(hit.item), hit.score) for hit in self._search(embedding, k, filter, **kwargs)]

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Mapping[str, Any] | str | None = None,  # noqa: A002
        **kwargs: Any,
    ) -> list[Document]:
        """Near to the query and unlike each other; embeds the texts of ``fetch_k`` candidates for it."""
        vector = self._embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(vector, k, fetch_k, lambda_mult, filter, **kwargs)

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Mapping[str, Any] | str | None = None,  # noqa: A002
        **kwargs: Any,
    ) -> list[Document]:
        hits = self._search(embedding, max(k, fetch_k), filter, **kwargs)
        if not hits:
            return []
        vectors = self._embedding.embed_documents([hit.item.text for hit in hits])
        chosen = maximal_marginal_relevance(np.array(embedding, dtype=np.float32), vectors, lambda_mult, k)
        return [_found(hits[at].item) for at in chosen]

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """In the order of ``ids``; those that are not there are left out."""
        found = self._collection.get(list(map(str, ids)))
        return [_found(found[key]) for key in map(str, ids) if key in found]

    def _search(
        self, embedding: Sequence[float], k: int, asked: Mapping[str, Any] | str | None, nprobe: int | None = None
    ) -> list[Hit]:
        where = asked if isinstance(asked, str) else None
        condition = from_dict(asked) if asked and not isinstance(asked, str) else None
        return self._collection.search([embedding], k, condition=condition, where=where, nprobe=nprobe)[0]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        """From 0, unlike, to 1, equal; of inner products of vectors of any length, which have no bound, a sigmoid."""
        if self._collection.metric == "l2":
            return lambda distance: 1 / (1 + distance)
        if self._collection.normalize:
            return lambda cosine: min(1.0, max(0.0, (1 + cosine) / 2))
        return lambda product: 1 / (1 + math.exp(-max(-700.0, product)))

    # Making and closing

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        path: str | Path | None = None,
        **kwargs: Any,
    ) -> Self:
        """Opens or makes the index at ``path``, and adds texts to it; or to the one of ``collection``."""
        store = cls(path, embedding, **kwargs)
        try:
            store.add_texts(texts, metadatas, ids=ids)
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Twice is harmless. A collection that was given stays open."""
        if self._owns:
            self._collection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _found(item: Item) -> Document:
    key = item.key if item.key is not None else str(item.id)
    return Document(id=key, page_content=item.text, metadata=dict(item.metadata))
