"""From files of texts to passages, and from passages to vectors with their ids: what an index is built from."""

from hybridindex.rag.ingest.batches import embedded, mean_of
from hybridindex.rag.ingest.texts import TextFile

__all__ = ["TextFile", "embedded", "mean_of"]
