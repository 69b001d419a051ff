"""Chunks of a first build, kept in a file: they are read several times, and must be the same each time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridindex import filesystem
from hybridindex.errors import DuplicateIdError, FileError, InvalidInputError
from hybridindex.rag.collection import SourceFacts
from hybridindex.rag.documents import Document
from hybridindex.rag.ingest.readers import Reading, check_name, read_chunks
from hybridindex.rag.ingest.sources import Source

__all__ = ["Spool"]

_About = tuple[str, bytes, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Spool:
    """Iterate its documents as often as needed."""

    path: Path
    count: int
    #: First id of chunks that their files give none.
    first: int
    #: Names of sources that could be read in part alone: what is there of them is none of its documents.
    skipped: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[Document]:
        for document, _ in self.chunks():
            yield document

    def chunks(self) -> Iterator[tuple[Document, _About]]:
        """Each with the name of its source, its digest and its metadata."""
        fresh = self.first
        before: tuple[int, str, str, _About] | None = None
        with filesystem.open_text(self.path, newline="\n") as file:
            for line in file:
                given, text, label, continues, ref, digest, metadata = json.loads(line)
                if ref in self.skipped:
                    continue
                row = fresh if given is None else given
                fresh += given is None
                if before is not None:
                    yield _document(before, row if continues else None), before[3]
                before = (row, text, label, (ref, bytes.fromhex(digest), metadata))
        if before is not None:
            yield _document(before, None), before[3]

    @classmethod
    def write(
        cls, path: Path, sources: list[Source], reading: Reading
    ) -> tuple[Spool, dict[str, SourceFacts], dict[str, str]]:
        """Reads all sources; and what to note of each; and of those that cannot be read, why not.

        Raises:
            InvalidInputError, DuplicateIdError, FileError: names the file and what is wrong with it; one that was named
            itself cannot be read.
        """
        facts: dict[str, SourceFacts] = {}
        failed: dict[str, str] = {}
        owners: dict[int, tuple[str, int]] = {}
        n = n_fresh = 0
        with filesystem.open_for_writing(path) as file:
            for source in sources:
                own = list[int | None]()
                try:
                    check_name(source)
                    size, mtime = source.size_and_time()
                    digest = source.digest()
                    for chunk in read_chunks(source, reading):
                        said = [
                            chunk.id, chunk.text, chunk.source, chunk.continues, source.name, chunk.digest().hex(),
                            chunk.metadata,
                        ]  # fmt: skip
                        file.write(json.dumps(said).encode() + b"\n")
                        _claim(chunk.id, source.name, len(own), owners)
                        own.append(chunk.id)
                except (InvalidInputError, FileError) as error:
                    if source.is_named:
                        raise
                    failed[source.name] = str(error)
                    for row in own:
                        owners.pop(-1 if row is None else row, None)
                    continue
                n += len(own)
                n_fresh += own.count(None)
                facts[source.name] = (str(source.root), size, mtime, digest, reading.said(source))
        if not n and failed:
            raise InvalidInputError(f"no text can be read: {next(iter(failed.values()))}")
        if not n:
            raise InvalidInputError(f"{_names(sources)} holds no text; expected one or more")
        first = max(owners, default=-1) + 1
        if first + n_fresh > 1 << 63:
            raise InvalidInputError(
                f"{owners[first - 1][0]} has id {first - 1}; no numbers above it are left for the {n_fresh} passages "
                "without ids"
            )
        return cls(path, n, first, frozenset(failed)), facts, failed


def _document(said: tuple[int, str, str, _About], successor: int | None) -> Document:
    return Document(id=said[0], text=said[1], source=said[2], successor=successor)


def _claim(row: int | None, name: str, at: int, owners: dict[int, tuple[str, int]]) -> None:
    """``owners``: the source that gave each id, and to which of its texts.

    Raises:
        DuplicateIdError: the id was given before.
    """
    if row is None:
        return
    other, before = owners.setdefault(row, (name, at))
    if other != name:
        raise DuplicateIdError(f"{name} has id {row}, which {other} has; expected once")
    if before != at:
        raise DuplicateIdError(f"{name} has id {row} in texts {before} and {at} (from 0); expected once")


def _names(sources: list[Source]) -> str:
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return f"{sources[0].path}{more}" if sources else "what was named"
