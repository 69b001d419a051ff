"""Haystack: a document store over an index that changes, and a retriever by embeddings. Needs the extra ``haystack``.

::

    store = HybridIndexDocumentStore("idx", embedding_dim=768, columns={"year": "int"})
    store.write_documents(documents)
    pipeline.add_component("retriever", HybridIndexEmbeddingRetriever(store, top_k=4))
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hybridindex.errors import DuplicateIdError, InvalidInputError, MissingDependencyError, how_to_install
from hybridindex.rag.collection import Collection, Compare, Condition, Item, Operator, Together, where_of

try:
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.document_stores.errors import DuplicateDocumentError
    from haystack.document_stores.types import DuplicatePolicy, FilterPolicy, apply_filter_policy
    from haystack.errors import FilterError
    from haystack.utils.filters import document_matches_filter
except ImportError as error:
    raise MissingDependencyError(f"what is for Haystack needs haystack-ai: {how_to_install('haystack')}") from error

__all__ = ["HybridIndexDocumentStore", "HybridIndexEmbeddingRetriever"]

#: Documents that are written at a time.
_BATCH = 512
#: In an item's metadata, what a document has beside text and meta.
_REST = "_haystack"
_OPERATORS: dict[str, Operator] = {
    "==": "=",
    "!=": "<>",
    ">": ">",
    ">=": ">=",
    "<": "<",
    "<=": "<=",
    "in": "in",
    "not in": "not in",
}
_LOGIC = {"AND": "and", "OR": "or", "NOT": "not"}


class HybridIndexDocumentStore:
    """Documents in an index that changes. Any thread or event loop; close it once.

    Documents without an embedding are stored, and found by filters alone. ``filter_documents`` takes any metadata, and
    reads all documents for it; the retriever filters in the index, by the metadata that are its columns.
    """

    def __init__(
        self,
        path: str,
        *,
        embedding_dim: int = 768,
        columns: Mapping[str, str] | None = None,
        keep_embeddings: bool = True,
        metric: str = "ip",
        normalize: bool | None = None,
        codec: str = "flat",
        nprobe: int | None = None,
        write: bool = False,
    ) -> None:
        """
        Args:
            path: of the index; where nothing is, one for embeddings of ``embedding_dim`` is made.
            columns: of an index that is to be made: name and kind of the metadata that retrievers may filter by, as
                {"year": "int", "lang": "string", "tags": "list of strings"}.
            keep_embeddings: documents come back with their embeddings, to the bit, which takes 11 bytes a dimension.
            metric, normalize, codec, nprobe, write: see :class:`hybridindex.rag.collection.Collection`.

        Raises:
            InvalidInputError, DocumentStoreError, IndexFormatError, BuildError: as the collection.
        """
        self._settings: dict[str, Any] = {
            "path": str(path),
            "embedding_dim": embedding_dim,
            "columns": dict(columns) if columns else None,
            "keep_embeddings": keep_embeddings,
            "metric": metric,
            "normalize": normalize,
            "codec": codec,
            "nprobe": nprobe,
            "write": write,
        }
        self._keep_embeddings = keep_embeddings
        options: dict[str, Any] = {"metric": metric, "normalize": normalize, "codec": codec, "nprobe": nprobe}
        self._collection = Collection(path, columns=columns, write=write, **options)
        try:
            self._collection.create(embedding_dim)
            if self._collection.index.dim != embedding_dim:
                raise InvalidInputError(
                    f"embedding_dim is {embedding_dim}; the index at {path} has {self._collection.index.dim}"
                )
        except BaseException:
            self._collection.close()
            raise

    @property
    def collection(self) -> Collection:
        """What it is a face of."""
        return self._collection

    def to_dict(self) -> dict[str, Any]:
        """For pipelines that are written down: what the store was made with."""
        found: dict[str, Any] = default_to_dict(self, **self._settings)
        return found

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HybridIndexDocumentStore:
        """Opens the index again."""
        found: HybridIndexDocumentStore = default_from_dict(cls, data)
        return found

    # What is there

    def count_documents(self) -> int:
        """All of them."""
        return self._collection.count()

    def filter_documents(self, filters: dict[str, Any] | None = None) -> list[Document]:
        """The documents whose metadata meet Haystack's filters; all where there are none."""
        return [self._found(item) for item in self._matching(filters)]

    def count_documents_by_filter(self, filters: dict[str, Any]) -> int:
        """Of those whose metadata meet Haystack's filters."""
        return sum(1 for _ in self._matching(filters))

    # Changes

    def write_documents(self, documents: list[Document], policy: DuplicatePolicy = DuplicatePolicy.NONE) -> int:
        """Writes documents; how many. NONE is FAIL.

        Raises:
            ValueError: no list of documents. DuplicateDocumentError: an id is there, and the policy is FAIL; earlier
            batches of 512 are written. InvalidInputError: metadata do not fit the columns, or an embedding the index.
        """
        if not isinstance(documents, list) or not all(isinstance(each, Document) for each in documents):
            raise ValueError("documents must be a list of haystack.Document")
        # Of documents with one id, the last one stays, or the first, as if they came one by one; with FAIL, two are an
        # error.
        ordered = documents[::-1] if policy == DuplicatePolicy.SKIP else documents
        given = {document.id: document for document in ordered}
        fails = policy in (DuplicatePolicy.NONE, DuplicatePolicy.FAIL)
        if fails and len(given) < len(documents):
            raise DuplicateDocumentError("documents hold an id twice; expected each once, or another policy")
        every, written = list({document.id: given[document.id] for document in documents}.values()), 0
        for start in range(0, len(every), _BATCH):
            batch = every[start : start + _BATCH]
            there = {} if policy == DuplicatePolicy.OVERWRITE else self._collection.get([each.id for each in batch])
            if fails and there:
                raise DuplicateDocumentError(f"{len(there)} ids exist already, among them {next(iter(there))!r}")
            batch = [document for document in batch if document.id not in there]
            try:
                # In their order, which is that of filter_documents.
                for _, part in itertools.groupby(batch, lambda document: document.embedding is None):
                    self._put(list(part), replace=not fails)
            except DuplicateIdError as error:
                raise DuplicateDocumentError(str(error)) from error
            written += len(batch)
        return len(documents) if policy == DuplicatePolicy.OVERWRITE else written

    def delete_documents(self, document_ids: Sequence[str]) -> None:
        """Ids that are not there change nothing."""
        if isinstance(document_ids, str):
            raise InvalidInputError(f"document_ids is {document_ids!r}; expected a list of ids")
        self._collection.delete(keys=document_ids)

    def delete_all_documents(self) -> None:
        """The store stays, without documents."""
        self._collection.clear()

    def delete_by_filter(self, filters: dict[str, Any]) -> int:
        """Deletes the documents that meet filters; how many."""
        return self._collection.delete([item.id for item in self._matching(filters) if item.id is not None])

    def update_by_filter(self, filters: dict[str, Any], meta: dict[str, Any]) -> int:
        """Gives the documents that meet filters further metadata; how many.

        Raises:
            InvalidInputError: embeddings are not kept, by this store or by what wrote a document.
        """
        if not self._keep_embeddings:
            raise InvalidInputError("keep_embeddings is False; expected True: an update writes documents anew")
        items = list(self._matching(filters))
        found = [self._found(item) for item in items]
        bare = [item.id for item, document in zip(items, found, strict=True) if document.embedding is None]
        if rowed := self._collection.rowed([row for row in bare if row is not None]):
            raise InvalidInputError(
                f"the embeddings of {len(rowed)} documents were not kept with them, and an update would lose them; "
                "write them anew, with embeddings"
            )
        documents = [dataclasses.replace(document, meta={**document.meta, **meta}) for document in found]
        self.write_documents(documents, DuplicatePolicy.OVERWRITE)
        return len(documents)

    def _put(self, documents: list[Document], *, replace: bool) -> None:
        if documents:
            has_vectors = documents[0].embedding is not None
            vectors = [document.embedding for document in documents] if has_vectors else None
            self._collection.put([self._item(document) for document in documents], vectors, replace=replace)

    # Searches

    def embedding_retrieval(
        self,
        query_embedding: list[float],
        *,
        filters: dict[str, Any] | None = None,
        top_k: int = 10,
        nprobe: int | None = None,
        return_embedding: bool = False,
    ) -> list[Document]:
        """The nearest documents, with the index's scores; for metric "l2" 1 / (1 + squared distance), as Haystack's
        components take the largest score for the best.

        Raises:
            InvalidInputError: names the argument, or, of filters, the columns that there are.
        """
        where = where_of(_condition(filters), self._collection.columns) if filters else None
        (hits,) = self._collection.search([query_embedding], top_k, where=where, nprobe=nprobe)
        is_l2 = self._collection.metric == "l2"
        scores = [1 / (1 + hit.score) if is_l2 else hit.score for hit in hits]
        found = zip(hits, scores, strict=True)
        return [self._found(hit.item, score, with_embedding=return_embedding) for hit, score in found]

    # As Haystack's asynchronous pipelines call them

    async def count_documents_async(self) -> int:
        return await asyncio.to_thread(self.count_documents)

    async def filter_documents_async(self, filters: dict[str, Any] | None = None) -> list[Document]:
        return await asyncio.to_thread(self.filter_documents, filters)

    async def count_documents_by_filter_async(self, filters: dict[str, Any]) -> int:
        return await asyncio.to_thread(self.count_documents_by_filter, filters)

    async def write_documents_async(
        self, documents: list[Document], policy: DuplicatePolicy = DuplicatePolicy.NONE
    ) -> int:
        return await asyncio.to_thread(self.write_documents, documents, policy)

    async def delete_documents_async(self, document_ids: list[str]) -> None:
        await asyncio.to_thread(self.delete_documents, document_ids)

    async def delete_all_documents_async(self) -> None:
        await asyncio.to_thread(self.delete_all_documents)

    async def delete_by_filter_async(self, filters: dict[str, Any]) -> int:
        return await asyncio.to_thread(self.delete_by_filter, filters)

    async def update_by_filter_async(self, filters: dict[str, Any], meta: dict[str, Any]) -> int:
        return await asyncio.to_thread(self.update_by_filter, filters, meta)

    def close(self) -> None:
        """Twice is harmless."""
        self._collection.close()

    # Documents and items

    def _matching(self, filters: dict[str, Any] | None) -> Iterator[Item]:
        if filters and "operator" not in filters:
            raise FilterError(f"filters is {filters!r}; expected 'operator', with 'field' and 'value' or 'conditions'")
        for item in self._collection.items():
            if not filters or document_matches_filter(filters=filters, document=self._found(item)):
                yield item

    def _item(self, document: Document) -> Item:
        if _REST in document.meta:
            raise InvalidInputError(f"meta has {_REST!r}, a name of ours; expected another one")
        rest = document.to_dict(flatten=False)
        for name in ("id", "content", "meta", "score", "embedding"):
            rest.pop(name, None)
        rest = {name: value for name, value in rest.items() if value is not None}
        if document.content is None:
            rest["content"] = None
        if document.embedding is not None and self._keep_embeddings:
            packed = np.asarray(document.embedding, dtype="<f8").tobytes()
            rest["embedding"] = base64.b64encode(packed).decode("ascii")
        metadata = {**document.meta, **({_REST: rest} if rest else {})}
        return Item(key=document.id, text=document.content or "", metadata=metadata)

    @staticmethod
    def _found(item: Item, score: float | None = None, *, with_embedding: bool = True) -> Document:
        meta = dict(item.metadata)
        rest: dict[str, Any] = {"content": item.text, **meta.pop(_REST, {})}
        packed = rest.pop("embedding", None)
        if packed is not None and with_embedding:
            rest["embedding"] = np.frombuffer(base64.b64decode(packed), dtype="<f8").tolist()
        key = item.key if item.key is not None else str(item.id)
        return Document.from_dict({"id": key, "meta": meta, "score": score, **rest})


@component
class HybridIndexEmbeddingRetriever:
    """The nearest documents of a :class:`HybridIndexDocumentStore`, for an embedded query."""

    def __init__(
        self,
        document_store: HybridIndexDocumentStore,
        *,
        filters: dict[str, Any] | None = None,
        top_k: int = 10,
        nprobe: int | None = None,
        return_embedding: bool = False,
        filter_policy: FilterPolicy | str = FilterPolicy.REPLACE,
    ) -> None:
        """
        Args:
            filters: Haystack's, of columns of the index: ``{"field": "meta.year", "operator": ">=", "value": 2020}``.
            top_k: documents per query.
            nprobe: lists per query; None: the store's.
            filter_policy: whether filters of a run take the place of these, or are asked for beside them.
        """
        if not isinstance(document_store, HybridIndexDocumentStore):
            raise InvalidInputError(
                f"document_store is a {type(document_store).__name__}; expected a HybridIndexDocumentStore"
            )
        if top_k < 1:
            raise InvalidInputError(f"top_k is {top_k}; expected 1 or more")
        self._document_store = document_store
        self._filters, self._top_k, self._nprobe = filters, top_k, nprobe
        self._return_embedding = return_embedding
        self._filter_policy = FilterPolicy.from_str(filter_policy) if isinstance(filter_policy, str) else filter_policy

    def to_dict(self) -> dict[str, Any]:
        """As that of the store, with the store in it."""
        found: dict[str, Any] = default_to_dict(
            self,
            document_store=self._document_store.to_dict(),
            filters=self._filters,
            top_k=self._top_k,
            nprobe=self._nprobe,
            return_embedding=self._return_embedding,
            filter_policy=self._filter_policy.value,
        )
        return found

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HybridIndexEmbeddingRetriever:
        """Opens the store again."""
        given = dict(data["init_parameters"])
        if isinstance(given["document_store"], dict):
            given["document_store"] = HybridIndexDocumentStore.from_dict(given["document_store"])
        return cls(**given)

    @component.output_types(documents=list[Document])
    def run(
        self, query_embedding: list[float], filters: dict[str, Any] | None = None, top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """Raises InvalidInputError, RouterError, DocumentStoreError."""
        found = self._document_store.embedding_retrieval(
            query_embedding,
            filters=apply_filter_policy(self._filter_policy, self._filters, filters),
            top_k=self._top_k if top_k is None else top_k,
            nprobe=self._nprobe,
            return_embedding=self._return_embedding,
        )
        return {"documents": found}

    @component.output_types(documents=list[Document])
    async def run_async(
        self, query_embedding: list[float], filters: dict[str, Any] | None = None, top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """:meth:`run` for asynchronous pipelines."""
        return await asyncio.to_thread(self.run, query_embedding, filters, top_k)


def _condition(filters: Any, level: int = 0) -> Condition:
    """
    Raises:
        InvalidInputError: these are no filters of Haystack.
    """
    if not isinstance(filters, Mapping) or "operator" not in filters or level > 50:
        raise InvalidInputError(
            f"filters is {filters!r}; expected 'operator', with 'field' and 'value' or 'conditions'"
        )
    operator = filters["operator"]
    if "field" not in filters:
        parts = filters.get("conditions")
        if operator not in _LOGIC or not isinstance(parts, list) or not parts:
            raise InvalidInputError(f"filters has {operator!r} of {parts!r}; expected AND, OR or NOT of a list")
        return Together(_LOGIC[operator], tuple(_condition(part, level + 1) for part in parts))  # type: ignore[arg-type]
    if operator not in _OPERATORS or "value" not in filters:
        raise InvalidInputError(f"filters has {operator!r}; expected one of {', '.join(_OPERATORS)}, and 'value'")
    return Compare(str(filters["field"]).removeprefix("meta."), _OPERATORS[operator], filters["value"])
