"""RAG pipelines over retrieval sessions: HyDE, SubQuestion, Iterative, Iter-RetGen, FLARE, Self-RAG, plain, PipeRAG.

A pipeline needs a :class:`Retriever` (a router or a daemon's client, an embedder, a document store) and a generator
(any OpenAI-compatible server, or a recorded trace). Needs the extra ``client`` (httpx) for a server. See docs/rag.md.
"""

from hybridindex.rag.collection import Collection, Hit, Item
from hybridindex.rag.documents import Document, DocumentsInfo, DocumentStore, write_documents
from hybridindex.rag.embedders import EmbedderOptions, OpenAIEmbedder, SentenceEmbedder, open_embedder
from hybridindex.rag.generator import Generator, OpenAIGenerator, Sampling
from hybridindex.rag.ingest import TextFile, embedded, mean_of
from hybridindex.rag.periodic import PeriodicRetrieval, Schedule
from hybridindex.rag.pipelines import PIPELINES, run_pipeline
from hybridindex.rag.records import Answer, Passage
from hybridindex.rag.retriever import CenteredEmbedder, Embedder, Retriever
from hybridindex.rag.steps import Steps
from hybridindex.rag.trace import ReplayGenerator, TraceWriter, read_traces

__all__ = [
    "PIPELINES",
    "Answer",
    "CenteredEmbedder",
    "Collection",
    "Document",
    "DocumentStore",
    "DocumentsInfo",
    "Embedder",
    "EmbedderOptions",
    "Generator",
    "Hit",
    "Item",
    "OpenAIEmbedder",
    "OpenAIGenerator",
    "Passage",
    "PeriodicRetrieval",
    "ReplayGenerator",
    "Retriever",
    "Sampling",
    "Schedule",
    "SentenceEmbedder",
    "Steps",
    "TextFile",
    "TraceWriter",
    "embedded",
    "mean_of",
    "open_embedder",
    "read_traces",
    "run_pipeline",
    "write_documents",
]
