"""LlamaIndex: a vector store, and a retriever over :class:`hybridindex.rag.Retriever`. Needs the extra ``llamaindex``.

::

    store = HybridIndexVectorStore("idx", columns={"year": "int"})
    index = VectorStoreIndex.from_documents(documents, storage_context=StorageContext.from_defaults(vector_store=store))

    retriever = HybridIndexRetriever(hybridindex.rag.Retriever(router, embedder, documents))
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridindex.errors import InvalidInputError, MissingDependencyError, how_to_install
from hybridindex.rag.collection import Collection, Compare, Condition, Item, Operator, Together
from hybridindex.rag.records import Passage
from hybridindex.rag.retriever import Retriever

try:
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle, TextNode
    from llama_index.core.vector_stores.types import (
        BasePydanticVectorStore,
        FilterCondition,
        FilterOperator,
        MetadataFilter,
        MetadataFilters,
        VectorStoreQuery,
        VectorStoreQueryMode,
        VectorStoreQueryResult,
    )
    from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict
except ImportError as error:
    raise MissingDependencyError(
        f"what is for LlamaIndex needs llama-index-core: {how_to_install('llamaindex')}"
    ) from error

__all__ = ["HybridIndexRetriever", "HybridIndexVectorStore"]

#: Nodes that are written at a time.
_BATCH = 512
#: A node without its text, in an item's metadata.
_NODE, _TYPE = "_node_content", "_node_type"
_OPERATORS: dict[str, Operator] = {
    "==": "=",
    "!=": "<>",
    ">": ">",
    "<": "<",
    ">=": ">=",
    "<=": "<=",
    "in": "in",
    "nin": "not in",
    "contains": "has",
}


class HybridIndexRetriever(BaseRetriever):
    """Nodes with the index's scores, and ``id``, ``source`` and ``nprobe_used`` as metadata. The caller
    closes the inner retriever. Any thread or event loop."""

    def __init__(
        self,
        retriever: Retriever,
        *,
        k: int | None = None,
        deadline_ms: float | None = None,
        min_nprobe: int = 1,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        """
        Args:
            k: nodes per query; None: the inner retriever's.
            deadline_ms: time limit of a search; nprobe may fall to ``min_nprobe`` to meet it.
        """
        self._retriever = retriever
        self._k = k
        self._deadline_ms = deadline_ms
        self._min_nprobe = min_nprobe
        super().__init__(callback_manager=callback_manager)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Raises InvalidInputError, ServiceError, RouterError, DocumentStoreError."""
        (passages,) = self._retriever.search(
            [query_bundle.query_str], k=self._k, deadline_ms=self._deadline_ms, min_nprobe=self._min_nprobe
        )
        return [_node(passage) for passage in passages]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        (passages,) = await self._retriever.asearch(
            [query_bundle.query_str], k=self._k, deadline_ms=self._deadline_ms, min_nprobe=self._min_nprobe
        )
        return [_node(passage) for passage in passages]


def _node(passage: Passage) -> NodeWithScore:
    metadata = {"id": passage.id, "source": passage.source, "nprobe_used": passage.nprobe_used}
    # A model should neither read nor embed these numbers.
    hidden = ["id", "nprobe_used"]
    node = TextNode(
        id_=str(passage.id),
        text=passage.text,
        metadata=metadata,
        excluded_llm_metadata_keys=hidden,
        excluded_embed_metadata_keys=hidden,
    )
    return NodeWithScore(node=node, score=passage.score)


class HybridIndexVectorStore(BasePydanticVectorStore):
    """Nodes in an index that changes. Any thread or event loop; close it once.

    Metadata that are columns of the index can be filtered by. Similarities are cosines, where nothing else is said;
    1 / (1 + squared distance) for metric "l2".
    """

    stores_text: bool = True
    flat_metadata: bool = False
    _collection: Collection = PrivateAttr()
    _owns: bool = PrivateAttr()

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        columns: Mapping[str, str] | None = None,
        collection: Collection | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            path: of the index; where nothing is, the first nodes make one.
            columns: of an index that is to be made: name and kind of the metadata that filters may name, as
                {"year": "int", "lang": "string", "tags": "list of strings"}.
            collection: instead of the others, which are refused beside it; the caller closes it.
            options: further ones of :class:`hybridindex.rag.collection.Collection`: metric, codec, nprobe, router, …

        Raises:
            InvalidInputError, DocumentStoreError, IndexFormatError, BuildError: as the collection.
        """
        super().__init__(stores_text=True)
        if (path is None) == (collection is None):
            raise InvalidInputError("path and collection are both given, or missing; expected one of them")
        if collection is not None and (named := [*options, *(["columns"] if columns else [])]):
            raise InvalidInputError(f"a collection has its own {', '.join(named)}; give them to it, and not beside it")
        self._owns = collection is None
        self._collection = collection or Collection(path or "", columns=columns, **options)

    @classmethod
    def class_name(cls) -> str:
        return "HybridIndexVectorStore"

    @property
    def client(self) -> Collection:
        """What it is a face of."""
        return self._collection

    # Changes

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Writes nodes, which have embeddings, in the place of those with their ids; the ids. Of nodes with one id, the
        last one stays.

        Raises:
            InvalidInputError: a node without an embedding, or metadata that do not fit the columns.
            DocumentStoreError, BuildError, FileError: earlier batches of 512 are written.
        """
        columns = self._collection.columns
        once = list({node.node_id: node for node in nodes}.values())
        for start in range(0, len(once), _BATCH):
            batch = once[start : start + _BATCH]
            if lacking := [node.node_id for node in batch if node.embedding is None]:
                raise InvalidInputError(f"node {lacking[0]!r} has no embedding; expected one of each node")
            self._collection.put([_item_of(node, columns) for node in batch], [node.get_embedding() for node in batch])
        return [node.node_id for node in nodes]

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        return await asyncio.to_thread(self.add, nodes)

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Deletes all nodes of a document."""
        # A node that is of no document has the empty name for one.
        if ref_doc_id and not self._collection.is_empty_path:
            self._collection.delete(self._collection.store.ids_of_refs([ref_doc_id]))

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        await asyncio.to_thread(self.delete, ref_doc_id)

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Deletes nodes by their ids, by metadata, or those that meet both.

        Raises:
            InvalidInputError: there is neither, or filters without a filter: for all nodes there is clear().
        """
        if node_ids is None and (filters is None or _condition(filters) is None):
            raise InvalidInputError("node_ids and filters are both missing; expected one of them, or clear()")
        self._collection.delete([item.id for item in self._items(node_ids, filters) if item.id is not None])

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        await asyncio.to_thread(self.delete_nodes, node_ids, filters)

    def clear(self) -> None:
        self._collection.clear()

    async def aclear(self) -> None:
        await asyncio.to_thread(self.clear)

    # Searches

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Nodes by their ids, by metadata, or those that meet both; neither: all."""
        return [_node_of(item) for item in self._items(node_ids, filters)]

    def _items(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> Iterable[Item]:
        if isinstance(node_ids, str):
            raise InvalidInputError(f"node_ids is {node_ids!r}; expected a list of ids")
        items: Iterable[Item] = (
            self._collection.items() if node_ids is None else self._collection.get(node_ids).values()
        )
        if filters is not None and (condition := _condition(filters)) is not None:
            wanted = set(self._collection.matching(condition))
            items = [item for item in items if item.id in wanted]
        return items

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        return await asyncio.to_thread(self.get_nodes, node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nearest nodes; of ``node_ids`` and ``doc_ids``, where these are given. ``kwargs``: nprobe.

        Raises:
            InvalidInputError: another mode than the default, no embedding, or a filter that names no column.
        """
        if query.mode != VectorStoreQueryMode.DEFAULT:
            raise InvalidInputError(f"mode is {query.mode.value!r}; expected 'default'")
        if query.query_embedding is None:
            raise InvalidInputError("query_embedding is None; expected the query's embedding")
        collection, ids = self._collection, None
        # LlamaIndex's retrievers give empty lists where they ask for nothing.
        if query.doc_ids and not collection.is_empty_path:
            ids = collection.store.ids_of_refs([name for name in query.doc_ids if name])
        if query.node_ids and not collection.is_empty_path:
            named = list(collection.store.ids_of(query.node_ids).values())
            ids = named if ids is None else sorted(set(ids) & set(named))
        (hits,) = collection.search(
            [query.query_embedding],
            query.similarity_top_k,
            condition=None if query.filters is None else _condition(query.filters),
            ids=ids,
            nprobe=kwargs.get("nprobe"),
        )
        nodes = [_node_of(hit.item) for hit in hits]
        similar = [1 / (1 + hit.score) if collection.metric == "l2" else hit.score for hit in hits]
        return VectorStoreQueryResult(nodes=nodes, similarities=similar, ids=[node.node_id for node in nodes])

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        return await asyncio.to_thread(self.query, query, **kwargs)

    def close(self) -> None:
        """Twice is harmless. A collection that was given stays open."""
        if self._owns:
            self._collection.close()


def _item_of(node: BaseNode, columns: Mapping[str, str]) -> Item:
    kept = node_to_metadata_dict(node, remove_text=True)
    metadata = {name: node.metadata[name] for name in columns if name in node.metadata}
    return Item(
        key=node.node_id,
        text=node.get_content(metadata_mode=MetadataMode.NONE),
        ref=node.ref_doc_id or "",
        metadata={**metadata, _NODE: kept[_NODE], _TYPE: kept[_TYPE]},
    )


def _node_of(item: Item) -> BaseNode:
    if _NODE in item.metadata:
        node: BaseNode = metadata_dict_to_node(dict(item.metadata), text=item.text)
        return node
    # Written by something else than LlamaIndex.
    key = item.key if item.key is not None else str(item.id)
    return TextNode(id_=key, text=item.text, metadata=dict(item.metadata))


def _condition(filters: MetadataFilters) -> Condition | None:
    """None: it asks nothing.

    Raises:
        InvalidInputError: an operator that columns do not have.
    """
    parts = [_compare(each) if isinstance(each, MetadataFilter) else _condition(each) for each in filters.filters]
    known = tuple(part for part in parts if part is not None)
    if not known:
        return None
    if filters.condition == FilterCondition.NOT:
        # None of them.
        return Together("not", (Together("or", known),))
    return Together("or" if filters.condition == FilterCondition.OR else "and", known)


def _compare(asked: MetadataFilter) -> Condition:
    name, operator, value = asked.key, asked.operator, asked.value
    if operator in (FilterOperator.TEXT_MATCH, FilterOperator.TEXT_MATCH_INSENSITIVE):
        if not isinstance(value, str):
            raise InvalidInputError(f"filter matches {name!r} with {value!r}; expected a text")
        for special in ("\\", "%", "_"):
            value = value.replace(special, f"\\{special}")
        return Compare(name, "like" if operator == FilterOperator.TEXT_MATCH else "ilike", f"%{value}%")
    if operator in (FilterOperator.ANY, FilterOperator.ALL):
        if not isinstance(value, list) or not value:
            raise InvalidInputError(f"filter asks {operator.value} of {value!r} for {name!r}; expected a list")
        parts = tuple(Compare(name, "has", each) for each in value)
        return Together("or" if operator == FilterOperator.ANY else "and", parts)
    if operator == FilterOperator.IS_EMPTY:
        return Compare(name, "empty", True)
    if operator.value not in _OPERATORS:
        raise InvalidInputError(f"filter asks {operator.value!r}; expected one of {', '.join(_OPERATORS)}")
    return Compare(name, _OPERATORS[operator.value], value)
