"""A LangChain retriever over a :class:`hybridindex.rag.Retriever`. Needs the extra ``langchain``.

::

    retriever = HybridIndexRetriever(retriever=hybridindex.rag.Retriever(router, embedder, documents))
    chain = retriever | format_documents | prompt | llm
"""

from __future__ import annotations

from hybridindex.errors import MissingDependencyError, how_to_install
from hybridindex.rag.records import Passage
from hybridindex.rag.retriever import Retriever

try:
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever
except ImportError as error:
    raise MissingDependencyError(
        f"the LangChain retriever needs langchain-core: {how_to_install('langchain')}"
    ) from error

__all__ = ["HybridIndexRetriever"]


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
