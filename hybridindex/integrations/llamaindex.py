"""A LlamaIndex retriever over a :class:`hybridindex.rag.Retriever`. Needs the extra ``llamaindex``.

::

    retriever = HybridIndexRetriever(hybridindex.rag.Retriever(router, embedder, documents))
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm)
"""

from __future__ import annotations

from hybridindex.errors import MissingDependencyError, how_to_install
from hybridindex.rag.records import Passage
from hybridindex.rag.retriever import Retriever

try:
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
except ImportError as error:
    raise MissingDependencyError(
        f"the LlamaIndex retriever needs llama-index-core: {how_to_install('llamaindex')}"
    ) from error

__all__ = ["HybridIndexRetriever"]


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
