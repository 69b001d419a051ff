"""Sources that were ingested before: what is new is embedded and written, what is gone is removed, the rest stays.

A source with the same size and time of change, or the same bytes, is not read. Of one that changed, chunks that are as
they were keep their rows. A source is noted when all of its chunks are written; so a run that was broken off is
continued by the next one, which finds the chunks that are there; what is written of it in part is noted as unread.

Texts that come by themselves are sources, too. All of a call are embedded before anything changes, and are written
together.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from hybridindex.errors import DuplicateIdError, FileError, InvalidInputError
from hybridindex.rag.collection import Collection, Item, Noted, SourceFacts
from hybridindex.rag.collection.items import column_values, refuse_twice
from hybridindex.rag.documents import Document
from hybridindex.rag.ingest.batches import embedded
from hybridindex.rag.ingest.readers import Chunk, Reading, check_name, read_chunks
from hybridindex.rag.ingest.sources import GivenText, Source
from hybridindex.rag.retriever import Embedder

__all__ = ["Outcome", "put_texts", "remove_texts", "update"]

#: Chunks that are embedded and written at a time.
_BATCH = 512
#: Size and time of a source that has to be read, whatever they are; and of one that never was written to its end.
_UNREAD, _NEVER_WHOLE = (-1, 0), (-1, -1)
#: Kinds of files that may give ids.
_WITH_IDS = ("jsonl", "parquet")
Progress = Callable[[str, int, int | None], None]
#: From a source to its chunks.
Read = Callable[[GivenText, Reading], Iterable[Chunk]]


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
        known, there = collection.store.sources(), {source.name for source in sources}
        below = [root.expanduser().resolve() for root in roots]
        # What has no root came by itself, and not from a file.
        gone = [
            name
            for name, (root, *_) in known.items()
            if root and name not in there and any(Path(name).is_relative_to(each) for each in below)
        ]
        made = _Update(collection, embedder, checksum=checksum)
        # First those that may give ids: numbers of the others are above them.
        ordered = sorted(sources, key=lambda source: source.kind not in _WITH_IDS)
        return made.run([(source, reading) for source in ordered], known, gone, progress)


def put_texts(
    collection: Collection,
    texts: Sequence[GivenText],
    embedder: Embedder,
    *,
    read: Read = read_chunks,
    most: int = 1 << 16,
    numbering: AbstractContextManager[object] | None = None,
) -> Outcome:
    """Texts as sources of their own: new ones, or in the place of those of the same names.

    Args:
        texts: with different names. Those that say no number of words are read as they were before, or else as most
            sources of the collection were.
        read: from a text to its chunks.
        most: chunks that may be new.
        numbering: within it nobody gives rows numbers.

    Raises:
        DuplicateIdError: two texts of one name. InvalidInputError: more chunks are new than ``most``, or metadata do
        not fit the columns of the index: names the source. What the embedder and the collection raise. In each case
        nothing has changed, unless it is the disk that fails between the rows that come and those that go.
    """
    names = [text.name for text in texts]
    refuse_twice("source", names)
    with collection.store.changing():
        lost = collection.remove_lost(names)
        known = collection.store.sources(names)
        # Rows were deleted past them, or lost with the power: who sends a text again wants all of it.
        known |= {name: (*known[name][:3], "", known[name][4]) for name in lost & known.keys()}
        is_new = any(text.words is None and text.name not in known for text in texts)
        usual = collection.store.ways_of_reading()[:1] if is_new else []
        sources = []
        for text in texts:
            said = [known[text.name][4]] if text.name in known else usual
            words = text.words if text.words is not None or not said else Reading.as_said(said[0]).words
            sources.append((replace(text, words=words), Reading(words=words)))
        made = _Update(collection, embedder, checksum=True, read=read, most=most, numbering=numbering)
        return made.run(sources, known, [], lambda *_: None)


def remove_texts(collection: Collection, names: Sequence[str]) -> Outcome:
    """Sources and all their chunks, at once. Names of which there is nothing change nothing.

    Raises:
        What the collection raises: nothing has changed.
    """
    outcome = Outcome()
    with collection.store.changing():
        store = collection.store
        there = [name for name in dict.fromkeys(names) if name in store.sources([name]) or store.ids_of_refs([name])]
        if there:
            rows = store.ids_of_refs(there)
            outcome.chunks["removed"] = collection.delete(rows, noted=Noted(sources=dict.fromkeys(there)))
            outcome.sources["removed"] = len(there)
    return outcome


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
        self,
        collection: Collection,
        embedder: Embedder,
        *,
        checksum: bool,
        read: Read | None = None,
        most: int | None = None,
        numbering: AbstractContextManager[object] | None = None,
    ) -> None:
        """
        Args:
            read: of texts.
            most: all is one change, of so many new chunks at most. None: a change after each :data:`_BATCH`.
            numbering: of one change: around it.
        """
        self._collection, self._store = collection, collection.store
        self._embedder, self._checksum = embedder, checksum
        self._read_text: Read = read_chunks if read is None else read
        self._most, self._numbering = most, numbering or contextlib.nullcontext()
        self._columns = collection.index.attributes
        self._items: list[Item] = []
        self._done: list[_Done] = []
        self._outcome = Outcome()
        self._reserved: Iterator[int] = iter(())
        #: Of one change: the first of the numbers that its new chunks have.
        self._first: int | None = None
        #: Else: numbers that new chunks got; of those that others' rows have by now, what they became; rows that are
        #: written; and of these, by the number of a chunk that is not, the one that it follows.
        self._given_out: set[int] = set()
        self._moved: dict[int, int] = {}
        self._written: set[int] = set()
        self._before: dict[int, int] = {}
        #: Ids that sources of this run gave to chunks that are new -> which source; of those, whose row it was.
        self._claimed: dict[int, str] = {}
        self._taken: dict[int, str] = {}
        #: What was known of all sources, and those that go.
        self._known: dict[str, SourceFacts] = {}
        self._leaving: frozenset[str] = frozenset()
        #: The source that is being read, and what is noted of it where it is written in part.
        self._under_way: tuple[str, SourceFacts] | None = None

    def run(
        self,
        sources: Sequence[tuple[Source | GivenText, Reading]],
        known: dict[str, SourceFacts],
        gone: Sequence[str],
        progress: Progress,
    ) -> Outcome:
        self._known, self._leaving = known, frozenset(gone)
        for number, (source, reading) in enumerate(sources):
            progress("sources", number, len(sources))
            try:
                self._look(source, reading, known.get(source.name))
            except _UnreadableError as error:
                if source.is_named:
                    raise error.reason from None
                self._outcome.failed[source.name] = str(error.reason)
                self._outcome.sources["failed"] += 1
        for name in gone:
            self._outcome.sources["removed"] += 1
            self._done.append(_Done(name, None, self._store.ids_of_refs([name]), {}))
            self._flush(least=_BATCH)
        self._flush()
        progress("sources", len(sources), len(sources))
        return self._outcome

    def _look(self, source: Source | GivenText, reading: Reading, before: SourceFacts | None) -> None:
        with _reading():
            check_name(source)
            size, mtime = source.size_and_time()
        said = reading.said(source)
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
        is_new = before is None or before[1:3] == _NEVER_WHOLE
        self._read(source, reading, facts, None if is_new else before)
        self._outcome.sources["added" if is_new else "changed"] += 1

    def _read(
        self, source: Source | GivenText, reading: Reading, facts: SourceFacts, before: SourceFacts | None
    ) -> None:
        """``before``: what is noted of it; None: it was never written to its end."""
        rows: dict[bytes, list[int]] = defaultdict(list)
        successors: dict[int, int | None] = {}
        for row, digest, successor in reversed(self._store.digests_of(source.name)):
            rows[digest].append(row)
            successors[row] = successor
        relinked: dict[int, int | None] = {}
        kept: set[int] = set()
        chunks = self._read_text(source, reading) if isinstance(source, GivenText) else read_chunks(source, reading)
        stream = ((chunk, chunk.digest()) for chunk in _readable(iter(chunks)))
        placed = ((chunk, digest, self._row_of(chunk, digest, rows)) for chunk, digest in stream)
        counts = self._outcome.chunks
        counted = {name: counts[name] for name in ("added", "unchanged")}
        in_part = facts[0], *(_NEVER_WHOLE if before is None else _UNREAD), "", facts[4]
        self._under_way, claimed = (source.name, in_part), len(self._claimed)
        try:
            self._take(source, placed, successors, kept, relinked)
        except _UnreadableError:
            counts.update({name: counted[name] - counts[name] for name in counted})
            # It is as it was, but for texts that took the place of others under ids of their own.
            self._items = [item for item in self._items if item.ref != source.name]
            new = {self._moved.get(row, row) for row in kept - set(successors)}
            has_others = any(row in self._written for row in successors)
            noted = Noted(sources={source.name: in_part if has_others else before})
            self._collection.delete(sorted(new & self._written), noted=noted)
            for row in list(itertools.islice(self._claimed, claimed, None)):
                del self._claimed[row]
            raise
        finally:
            self._under_way = None
        gone = sorted(row for row in successors if row not in kept)
        self._done.append(_Done(source.name, facts, gone, relinked))

    def _take(
        self,
        source: Source | GivenText,
        placed: Iterator[_Placed],
        successors: dict[int, int | None],
        kept: set[int],
        relinked: dict[int, int | None],
    ) -> None:
        """Holds chunks that are new, and finds out what else changes."""
        for (chunk, digest, (row, is_new)), following in itertools.zip_longest(*_with_next(placed)):
            successor = following[2][0] if following is not None and following[0].continues else None
            with _reading():
                if row in kept:
                    raise DuplicateIdError(f"{source.name} has id {row} twice; expected once")
                if is_new and chunk.id is not None:
                    self._refuse_others_row(source.name, row)
            kept.add(row)
            if not is_new:
                self._outcome.chunks["unchanged"] += 1
                if successors.get(row) != successor:
                    relinked[row] = successor
                continue
            self._outcome.chunks["added"] += 1
            self._check_metadata(source, chunk)
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
        row = self._next_reserved()
        if row is None:
            first = self._first_number()
            if self._most is None:
                # Chunks name the next one, which may be written with the next batch.
                self._store.reserve_ids(first, _BATCH)
                self._reserved = iter(range(first, first + _BATCH))
            else:
                self._reserved, self._first = itertools.count(first), first
            row = self._next_reserved()
            assert row is not None
        self._given_out.add(row)
        return row, True

    def _next_reserved(self) -> int | None:
        return next((row for row in self._reserved if row not in self._claimed), None)

    def _first_number(self) -> int:
        """Of those that nobody has, and no chunk that is not written yet."""
        first = max(self._collection.next_id(), max(self._claimed, default=-1) + 1)
        if first + _BATCH > 1 << 63:
            raise InvalidInputError(f"the largest id that a text has is {first - 1}; no number above it is left")
        return first

    def _check_metadata(self, source: Source | GivenText, chunk: Chunk) -> None:
        """What is wrong with them is wrong with their source."""
        if self._columns and chunk.metadata:
            try:
                column_values(self._columns, [chunk.metadata])
            except InvalidInputError as error:
                raise _UnreadableError(InvalidInputError(f"{source.name}: {error}")) from error

    def _flush(self, *, least: int = 0) -> None:
        """Embeds and writes what is held, and ends the sources that are read."""
        if least and (
            self._most is not None or (len(self._items) < least and sum(len(done.gone) for done in self._done) < least)
        ):
            return
        if self._most is not None and len(self._items) > self._most:
            raise InvalidInputError(
                f"the texts make {len(self._items)} new chunks; expected {self._most} at most: send fewer at a time"
            )
        vectors = None
        if self._items:
            passages = (Document(id=item.id or 0, text=item.text) for item in self._items)
            vectors = np.concatenate([batch for batch, _ in embedded(passages, self._embedder)])
        with self._numbering:
            if self._first is not None:
                self._renumber(self._collection.next_id() - self._first)
            here = {item.id for item in self._items}
            # But for those that another source has now.
            gone = [row for done in self._done for row in done.gone if row not in here]
            links = {row: following for done in self._done for row, following in done.successors.items()}
            if self._most is None:
                links |= self._avoid_others_rows()
            noted = Noted(successors=links, sources=self._facts())
            if self._items:
                self._collection.put(self._items, vectors, gone=gone, noted=noted)
                self._outcome.chunks["removed"] += len(gone)
                self._written.update(item.id for item in self._items if item.id is not None)
            elif self._done:
                self._outcome.chunks["removed"] += self._collection.delete(gone, noted=noted)
        self._items, self._done = [], []

    def _renumber(self, by: int) -> None:
        """Rows came while texts were embedded, and have the numbers that new chunks should have had."""
        if not by:
            return
        first = self._first or 0

        def moved(row: int | None) -> int | None:
            return row if row is None or row < first else row + by

        self._items = [replace(item, id=moved(item.id), successor=moved(item.successor)) for item in self._items]
        for done in self._done:
            done.successors = {row: moved(following) for row, following in done.successors.items()}

    def _avoid_others_rows(self) -> dict[int, int | None]:
        """Rows came while texts were embedded, and may have numbers that were reserved for new chunks alone: these get
        others. Rows that are written, and the chunk that follows each now."""
        own = [item.id for item in self._items if item.id in self._given_out]
        taken = self._collection.rowed([row for row in own if row is not None])
        if taken:
            first = self._collection.next_id()
            self._store.reserve_ids(first, len(taken))
            self._moved |= dict(zip(sorted(taken), itertools.count(first), strict=False))

        def moved(row: int | None) -> int | None:
            return row if row is None else self._moved.get(row, row)

        self._items = [replace(item, id=moved(item.id), successor=moved(item.successor)) for item in self._items]
        for done in self._done:
            done.successors = {row: moved(following) for row, following in done.successors.items()}
        links: dict[int, int | None] = {self._before.pop(row): moved(row) for row in taken if row in self._before}
        here = {item.id for item in self._items}
        self._before |= {
            item.successor: item.id
            for item in self._items
            if item.id is not None and item.successor is not None and item.successor not in here
        }
        return links

    def _facts(self) -> dict[str, SourceFacts | None]:
        """Of sources that end with this batch, of the one of which it has a part, and of those that lose a part."""
        facts = dict[str, SourceFacts | None]()
        for item in self._items:
            if (whose := self._known.get(self._taken.get(item.id or 0, ""))) is not None:
                facts[self._taken[item.id or 0]] = (whose[0], *_UNREAD, "", whose[4])
        facts |= {done.name: done.facts for done in self._done}
        if (
            self._most is None
            and self._under_way is not None
            and any(item.ref == self._under_way[0] for item in self._items)
        ):
            facts[self._under_way[0]] = self._under_way[1]
        return facts

    def _refuse_others_row(self, name: str, row: int) -> None:
        """An id that a file gives must be its alone.

        Raises:
            DuplicateIdError: another source has it, and keeps it.
        """
        there = self._store.items([row]).get(row)
        is_leaving = there is None or there.ref in self._leaving or any(row in done.gone for done in self._done)
        other = self._claimed.get(row, "" if row in self._given_out else None)
        if other is None and there is not None and there.ref != name and not is_leaving:
            other = there.ref
        if other is not None and other != name:
            raise DuplicateIdError(f"{name} has id {row}, which {other or 'another text'} has; expected once")
        self._claimed[row] = name
        if there is not None and there.ref != name:
            self._taken[row] = there.ref


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
