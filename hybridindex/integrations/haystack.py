"""Haystack: a component over a :class:`hybridindex.rag.Retriever`; the document store is in
:mod:`hybridindex.integrations.haystack_store`. Needs the extra ``haystack``.

::

    pipeline.add_component("retriever", HybridIndexRetriever(hybridindex.rag.Retriever(router, embedder, documents)))
    pipeline.connect("retriever.documents", "prompt.documents")
"""

from __future__ import annotations

from hybridindex.errors import MissingDependencyError, how_to_install
from hybridindex.rag.records import Passage
from hybridindex.rag.retriever import Retriever

try:
    from haystack import Document, component
except ImportError as error:
    raise MissingDependencyError(f"the Haystack retriever needs haystack-ai: {how_to_install('haystack')}") from error

__all__ = ["HybridIndexRetriever"]


@component
class HybridIndexRetriever:
    """Documents with the index's scores, and ``id``, ``source`` and ``nprobe_used`` as meta. The caller closes
    the inner retriever. Any thread or event loop. It holds an open index: pipelines cannot be serialised."""

    def __init__(
        self,
        retriever: Retriever,
        *,
        top_k: int | None = None,
        deadline_ms: float | None = None,
        min_nprobe: int = 1,
    ) -> None:
        """
        Args:
            top_k: documents per query; None: the inner retriever's.
            deadline_ms: time limit of a search; nprobe may fall to ``min_nprobe`` to meet it.
        """
        self._retriever = retriever
        self._top_k = top_k
        self._deadline_ms = deadline_ms
        self._min_nprobe = min_nprobe

    @component.output_types(documents=list[Document])
    def run(self, query: str, top_k: int | None = None) -> dict[str, list[Document]]:
        """Raises InvalidInputError, ServiceError, RouterError, DocumentStoreError."""
        (passages,) = self._retriever.search(
            [query],
            k=self._top_k if top_k is None else top_k,
            deadline_ms=self._deadline_ms,
            min_nprobe=self._min_nprobe,
        )
        return {"documents": [_document(passage) for passage in passages]}

    @component.output_types(documents=list[Document])
    async def run_async(self, query: str, top_k: int | None = None) -> dict[str, list[Document]]:
        """:meth:`run` for asynchronous pipelines."""
        (passages,) = await self._retriever.asearch(
            [query],
            k=self._top_k if top_k is None else top_k,
            deadline_ms=self._deadline_ms,
            min_nprobe=self._min_nprobe,
        )
        return {"documents": [_document(passage) for passage in passages]}


def _document(passage: Passage) -> Document:
    meta = {"id": passage.id, "source": passage.source, "nprobe_used": passage.nprobe_used}
    return Document(id=str(passage.id), content=passage.text, score=passage.score, meta=meta)
