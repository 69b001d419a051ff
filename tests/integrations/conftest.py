"""The world of the pipelines' tests, for retrievers of other frameworks."""

from tests.rag.conftest import documents, retriever, router, source, world

__all__ = ["documents", "retriever", "router", "source", "world"]
