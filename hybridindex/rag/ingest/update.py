"""Sources that were ingested before: what is new is embedded and written, what is gone is removed, the rest stays.

A source with the same size and time of change, or the same bytes, is not read. Of one that changed, chunks that are as
they were keep their rows. A source is noted when all of its chunks are written; so a run that was broken off is
continued by the next one, which finds the chunks that are there.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hybridindex.errors import DuplicateIdError, FileError, InvalidInputError
from hybridindex.rag.collection import Collection, Item
from hybridindex.rag.documents import Document
from hybridindex.rag.ingest.batches import embedded
from hybridindex.rag.ingest.readers import Chunk, Reading, read_chunks
from hybridindex.rag.ingest.sources import Source
from hybridindex.rag.ingest.spool import SourceFacts
from hybridindex.rag.retriever import Embedder

__all__ = ["Outcome", "update"]

#: Chunks that are embedded and written at a time.
_BATCH = 512
Progress = Callable[[str, int, int | None], None]


@dataclass(slots=True)
class Outcome:
    """What an update found and did."""

    #: Sources: added, changed, removed, unchanged, failed.
    sources: Counter[str] = field(default_factory=Counter)
    #: Chunks: added, removed, unchanged (of sources that were read).
    chunks: Counter[str] = field(default_factory=Counter)
    #: Name of each source that could not be read -> why; it is as it was.
    failed: dict[str, str] = field(default_factory=dict)


def update(
    collection: Collection,
    sources: Sequence[Source],
    roots: Sequence[Path],
    embedder: Embedder,
    reading: Reading,
    *,
    checksum: bool = False,
    progress: Progress = lambda *_: None,
) -> Outcome:
    """
    Args:
        sources: all that there are now.
        roots: what was named; sources from before below them that are gone are removed.
        checksum: read all of each source, also where size and time of change say that it is as it was.

    Raises:
        InvalidInputError: a source that was named itself cannot be read. What the embedder and the collection raise;
        what is written stays, and the next call goes on.
    """
    with collection.store.changing():
        # Also texts whose rows somebody deleted.
        collection.recover()
        return _Update(collection, roots, embedder, reading, checksum=checksum).run(sources, progress)


class _UnreadableError(Exception):
    """A source cannot be read. Never leaves this module."""

    def __init__(self, reason: InvalidInputError | FileError) -> None:
        super().__init__(str(reason))
        self.reason = reason


#: A chunk, its digest, its row, and whether that has to be written.
_Placed = tuple[Chunk, bytes, tuple[int, bool]]


@dataclass(slots=True)
class _Done:
    """A source whose chunks are read, and will be written with the next batch."""

    name: str
    facts: SourceFacts | None
    gone: list[int]
    successors: dict[int, int | None]


class _Update:
    def __init__(
        self, collection: Collection, roots: Sequence[Path], embedder: Embedder, reading: Reading, *, checksum: bool
    ) -> None:
        self._collection, self._store = collection, collection.store
        self._roots = [root.expanduser().resolve() for root in roots]
        self._embedder, self._reading, self._checksum = embedder, reading, checksum
        self._items: list[Item] = []
        self._done: list[_Done] = []
        self._outcome = Outcome()
        self._reserved: Iterator[int] = iter(())

    def run(self, sources: Sequence[Source], progress: Progress) -> Outcome:
        known = self._store.sources()
        there = {source.name for source in sources}
        for number, source in enumerate(sources):
            progress("sources", number, len(sources))
            try:
                self._look(source, known.get(source.name))
            except _UnreadableError as error:
                if source.is_named:
                    raise error.reason from None
                self._outcome.failed[source.name] = str(error.reason)
                self._outcome.sources["failed"] += 1
        for name in known:
            if name not in there and any(Path(name).is_relative_to(root) for root in self._roots):
                self._outcome.sources["removed"] += 1
                self._done.append(_Done(name, None, self._store.ids_of_refs([name]), {}))
                self._flush(least=_BATCH)
        self._flush()
        progress("sources", len(sources), len(sources))
        return self._outcome

    def _look(self, source: Source, before: SourceFacts | None) -> None:
        with _reading():
            size, mtime = source.size_and_time()
        said = self._reading.said(source)
        same = before is not None and before[4] == said
        if before is not None and same and not self._checksum and before[1:3] == (size, mtime):
            self._outcome.sources["unchanged"] += 1
            return
        with _reading():
            digest = source.digest()
        facts = (str(source.root), size, mtime, digest, said)
        if before is not None and same and before[3] == digest:
            self._outcome.sources["unchanged"] += 1
            self._done.append(_Done(source.name, facts, [], {}))
            return
        self._read(source, facts)
        self._outcome.sources["added" if before is None else "changed"] += 1

    def _read(self, source: Source, facts: SourceFacts) -> None:
        rows: dict[bytes, list[int]] = defaultdict(list)
        successors: dict[int, int | None] = {}
        for row, digest, successor in reversed(self._store.digests_of(source.name)):
            rows[digest].append(row)
            successors[row] = successor
        relinked: dict[int, int | None] = {}
        kept: set[int] = set()
        stream = ((chunk, chunk.digest()) for chunk in _readable(read_chunks(source, self._reading)))
        placed = ((chunk, digest, self._row_of(chunk, digest, rows)) for chunk, digest in stream)
        try:
            self._take(source, placed, successors, kept, relinked)
        except _UnreadableError:
            # It is as it was, but for texts that took the place of others under ids of their own.
            self._items = [item for item in self._items if item.ref != source.name]
            self._collection.delete(sorted(kept - set(successors)))
            raise
        gone = sorted(row for row in successors if row not in kept)
        self._done.append(_Done(source.name, facts, gone, relinked))

    def _take(
        self,
        source: Source,
        placed: Iterator[_Placed],
        successors: dict[int, int | None],
        kept: set[int],
        relinked: dict[int, int | None],
    ) -> None:
        """Holds chunks that are new, and finds out what else changes."""
        for (chunk, digest, (row, is_new)), following in itertools.zip_longest(*_with_next(placed)):
            successor = following[2][0] if following is not None and following[0].continues else None
            if row in kept:
                raise DuplicateIdError(f"{source.path} has id {row} twice; expected once")
            kept.add(row)
            if not is_new:
                self._outcome.chunks["unchanged"] += 1
                if successors.get(row) != successor:
                    relinked[row] = successor
                continue
            self._outcome.chunks["added"] += 1
            self._items.append(
                Item(
                    id=row, text=chunk.text, source=chunk.source, ref=source.name, digest=digest,
                    metadata=chunk.metadata, successor=successor,
                )
            )  # fmt: skip
            self._flush(least=_BATCH)

    def _row_of(self, chunk: Chunk, digest: bytes, rows: dict[bytes, list[int]]) -> tuple[int, bool]:
        """The row of a chunk, and whether it has to be written."""
        same = rows.get(digest)
        if chunk.id is not None:
            if same and chunk.id in same:
                same.remove(chunk.id)
                return chunk.id, False
            return chunk.id, True
        if same:
            return same.pop(), False
        row = next(self._reserved, None)
        if row is None:
            self._reserved = iter(self._store.reserve_ids(_BATCH).tolist())
            row = next(self._reserved)
        return row, True

    def _flush(self, *, least: int = 0) -> None:
        """Embeds and writes what is held, and then ends the sources that are read."""
        if least and len(self._items) < least and sum(len(done.gone) for done in self._done) < least:
            return
        if self._items:
            self._refuse_others_rows()
            passages = (Document(id=item.id or 0, text=item.text) for item in self._items)
            vectors = np.concatenate([batch for batch, _ in embedded(passages, self._embedder)])
            self._collection.put(self._items, vectors)
            self._items = []
        if gone := [row for done in self._done for row in done.gone]:
            self._outcome.chunks["removed"] += self._collection.delete(gone)
        for done in self._done:
            if done.successors:
                self._store.relink(done.successors)
        if self._done:
            self._store.note_sources({done.name: done.facts for done in self._done})
        self._done = []

    def _refuse_others_rows(self) -> None:
        """Ids that files give must be theirs alone."""
        there = self._store.items([item.id for item in self._items if item.id is not None])
        for item in self._items:
            other = there.get(item.id or 0)
            if other is not None and other.ref != item.ref:
                raise DuplicateIdError(
                    f"{item.ref} has id {item.id}, which {other.ref or 'another text'} has; expected once"
                )


def _with_next(stream: Iterator[_Placed]) -> tuple[Iterator[_Placed], Iterator[_Placed]]:
    """The stream, and the stream without its first."""
    first, second = itertools.tee(stream)
    next(second, None)
    return first, second


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except (InvalidInputError, FileError) as error:
        raise _UnreadableError(error) from error


def _readable(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """What goes wrong is of the file, not of what is done with its chunks."""
    while True:
        with _reading():
            chunk = next(chunks, None)
        if chunk is None:
            return
        yield chunk
