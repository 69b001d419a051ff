"""From files of texts to passages, and from passages to vectors with their ids: what an index is built from, and what
changes in it when the files do."""

from hybridindex.rag.ingest.batches import embedded, mean_of
from hybridindex.rag.ingest.readers import Chunk, Reading, read_chunks
from hybridindex.rag.ingest.sources import ENDINGS, GivenText, Source, find_sources
from hybridindex.rag.ingest.spool import Spool
from hybridindex.rag.ingest.texts import TextFile
from hybridindex.rag.ingest.update import Outcome, put_texts, remove_texts, update

__all__ = [
    "ENDINGS",
    "Chunk",
    "GivenText",
    "Outcome",
    "Reading",
    "Source",
    "Spool",
    "TextFile",
    "embedded",
    "find_sources",
    "mean_of",
    "put_texts",
    "read_chunks",
    "remove_texts",
    "update",
]
