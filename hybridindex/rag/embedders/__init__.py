"""Embedders by name: the demo's, sentence-transformers', and those behind an OpenAI-compatible ``/v1/embeddings``."""

from hybridindex.rag.embedders.named import EmbedderOptions, open_embedder
from hybridindex.rag.embedders.openai import OpenAIEmbedder
from hybridindex.rag.embedders.transformers import SentenceEmbedder

__all__ = ["EmbedderOptions", "OpenAIEmbedder", "SentenceEmbedder", "open_embedder"]
