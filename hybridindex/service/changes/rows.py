"""Who adds, replaces and deletes the rows of a served index: one open index, beside those that serve.

What it writes, routers of every open generation see when the call returns. It outlives generations: a compaction puts
the next one in its place, and the service lets that one serve.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hybridindex.api import Index
from hybridindex.errors import (
    BuildError,
    BusyWritingError,
    ClaimedError,
    DiskFullError,
    DuplicateIdError,
    EmbeddingError,
    FileError,
    HybridIndexError,
    InvalidInputError,
    NoDocumentsError,
    NoEmbedderError,
    NotWritableError,
    OverloadedError,
    ServiceError,
    SupersededError,
    UnsupportedIndexError,
    without_path,
)
from hybridindex.index import Manifest, read_manifest
from hybridindex.index import open_index as open_directory
from hybridindex.service.changes.attribute_values import columns_of
from hybridindex.types import F32, I64

__all__ = ["Durability", "RowCounts", "RowWriter", "WritesOffError"]

_log = logging.getLogger(__name__)

Durability = Literal["synced", "written"]

#: Of a cluster.
_CURE = "try again when its nodes have gone on to the generation that was compacted last"
#: How long another process may keep the right to write. A node asks again which one writes, which may be another by
#: then.
_CLAIM_S, _NODE_CLAIM_S = 10.0, 1.0
#: How long the end of the service waits for a compaction. One that goes on leaves the old generation or the new one.
_CLOSES_S = 20.0


class WritesOffError(ServiceError):
    """The service takes no changes of rows."""


@dataclass(slots=True, kw_only=True)
class RowCounts:
    """What was done since the start."""

    added: int = 0
    replaced: int = 0
    deleted: int = 0
    #: Reason -> calls that changed nothing.
    refused: Counter[str] = field(default_factory=Counter)


class RowWriter:
    """Of one service. From any thread; changes block on the disk."""

    def __init__(
        self,
        path: Path,
        *,
        allowed: bool = True,
        durability: Durability = "synced",
        served: Callable[[], Manifest] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens nothing: the first change does.

        Args:
            served: the generation that a node of a cluster serves. An index that was built anew since is not written,
                and nothing is compacted but what serves: nodes go on from one to the next. None: it is no node.
        """
        self._path = path
        self._served = served
        self.allowed = allowed
        #: That lists may take on a node; rows that came, which every node has in memory, may take a quarter as much, or
        #: what any index may get. None: as much as the lists of the index.
        self.memory_bytes: int | None = None
        self._durability = durability
        self._clock = clock
        self.counts = RowCounts()
        self._idle = threading.Condition()
        self._opening = threading.Lock()
        self._index: Index | None = None
        #: Calls under way in it; those of them that have the index number rows; and whether none may begin.
        self._users = self._numberers = 0
        self._numbers_alone = False
        self._closed = self._stopping = False
        #: When the last opening failed, and why.
        self._failed: tuple[float, HybridIndexError] | None = None
        #: Of indexes that were closed since.
        self._compactions_before = 0
        #: Fingerprint and number of lists of the last generation that was looked at.
        self._shape: tuple[str, int] | None = None
        #: Lists that compactions split and dissolved.
        self._split = self._dissolved = 0

    # Changes

    def add(self, vectors: F32, ids: Any = None, attributes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """See :meth:`hybridindex.api.Index.add`. The ids are in the answer where nobody gave them.

        Raises:
            WritesOffError: this service takes no changes. BuildError: another process writes; names it.
            Whatever Index.add raises.
        """
        # Who gives ids is told where one is there.
        with self._writing() as index, self._numbering() if ids is None else nullcontext():
            made: I64 = index.add(vectors, ids, self._columns(index, attributes))
            self.count(added=len(made))
            return self._answer(index, added=len(made), replaced=0, ids=made.tolist() if ids is None else None)

    def upsert(self, vectors: F32, ids: Any, attributes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """See :meth:`hybridindex.api.Index.upsert`; raises as :meth:`add`."""
        with self._writing() as index:
            there = index.upsert(vectors, ids, self._columns(index, attributes))
            self.count(added=len(vectors) - there, replaced=there)
            return self._answer(index, added=len(vectors) - there, replaced=there, ids=None)

    def delete(self, *, ids: I64 | list[int] | None = None, where: str | None = None) -> dict[str, Any]:
        """See :meth:`hybridindex.api.Index.delete`; raises as :meth:`add`."""
        with self._writing() as index:
            n = index.delete(ids, where=where)
            self.count(deleted=n)
            _log.info("deleted %d ids, %d in all", n, index.n_deleted)
            return self._answer(index, deleted=n, deleted_in_all=index.n_deleted)

    @contextmanager
    def numbering_alone(self) -> Iterator[None]:
        """Within the block no other call of this service gives rows numbers of its own choice."""
        with self._idle:
            self._idle.wait_for(lambda: not self._numbers_alone)
            self._numbers_alone = True
            self._idle.wait_for(lambda: not self._numberers)
        try:
            yield
        finally:
            with self._idle:
                self._numbers_alone = False
                self._idle.notify_all()

    @contextmanager
    def _numbering(self) -> Iterator[None]:
        with self._idle:
            self._idle.wait_for(lambda: not self._numbers_alone)
            self._numberers += 1
        try:
            yield
        finally:
            with self._idle:
                self._numberers -= 1
                self._idle.notify_all()

    def compact(self) -> dict[str, Any]:
        """See :meth:`hybridindex.api.Index.compact`; raises as :meth:`add`. The generation that it made does not serve
        yet."""
        with self._writing() as index:
            done = index.writer.compact(self._stop)
            self._note_shape(index)
            rows = {} if done is None else {"count": done.count, "split": done.n_split, "dissolved": done.n_dissolved}
            return {"compacted": done is not None, "generation": index.ivf.generation, **rows}

    def _stop(self, _stage: str, _done: int, _total: int | None) -> None:
        """Ends a compaction with the service: everything stays as it was."""
        if self._stopping:
            raise OverloadedError("the daemon is about to stop", retry_after_s=1)

    def _columns(self, index: Index, attributes: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        return None if attributes is None else columns_of(attributes, index.attributes)

    def _answer(self, index: Index, **facts: Any) -> dict[str, Any]:
        return {**facts, "number": index.ivf.live.number}

    def count(self, *, added: int = 0, replaced: int = 0, deleted: int = 0) -> None:
        with self._idle:
            self.counts.added += added
            self.counts.replaced += replaced
            self.counts.deleted += deleted

    @contextmanager
    def _writing(self) -> Iterator[Index]:
        with self.refusing(), self.using() as index:
            yield index

    @contextmanager
    def using(self) -> Iterator[Index]:
        """The open index, for one call that changes it. Within :meth:`refusing`."""
        index = self._enter()
        try:
            yield index
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Errors within the block name no path, and are counted.

        Raises:
            WritesOffError: this service takes no changes.
        """
        try:
            if not self.allowed:
                raise WritesOffError("this daemon refuses changes of rows: its setting write is false")
            yield
        except HybridIndexError as error:
            self.counts.refused[_reason(error)] += 1
            if isinstance(error, DiskFullError | NotWritableError | FileError):
                # Its client is not told the path.
                _log.error("nothing was written: %s", error)
            if (words := self._without_path(str(error))) == str(error):
                raise
            raise _saying(words, error) from error

    def _without_path(self, text: str) -> str:
        for path in (self._path.absolute(), self._path.resolve(), self._path):
            text = without_path(text, path)
        return text

    def _enter(self) -> Index:
        while True:
            with self._idle:
                if self._closed:
                    raise OverloadedError("the daemon is about to stop", retry_after_s=1)
                if self._index is not None:
                    self._users += 1
                    return self._index
            self._open()

    def _open(self) -> None:
        began_s = self._clock()
        with self._opening:
            if self._index is not None:
                return
            if self._failed is not None and self._failed[0] >= began_s:
                raise self._failed[1]  # who waits for another process waits once
            try:
                index = self._opened()
            except HybridIndexError as error:
                self._failed = self._clock(), error
                raise
            self._failed = None
            if (served := self._served) is not None:
                index.writer.compacts, index.writer.cure = lambda newest: newest.manifest == served(), _CURE
                index.writer.most_bytes = None if self.memory_bytes is None else self.memory_bytes // 4
                if index.ivf.generation < served().generation:
                    index.close()
                    raise BuildError("the index went back to an older generation; try again when its nodes serve it")
                if index.ivf.manifest.lineage != served().lineage:
                    index.close()
                    raise BuildError(
                        "the index was rebuilt after the nodes of the cluster opened it; make them serve it with: "
                        "hybridindex cluster repartition"
                    )
            self._note_shape(index)
            with self._idle:
                kept = None if self._closed else index
                self._index = kept
            if kept is None:
                index.close()
                return
            _log.info("this daemon now writes to the index; no other process may")

    def _opened(self) -> Index:
        """The index, with the right to write."""
        index = Index(open_directory(self._path, verify="quick"), durability=self._durability)
        try:
            index.writer.keep(_CLAIM_S if self._served is None else _NODE_CLAIM_S)
        except BaseException:
            index.close()
            raise
        return index

    # What serves

    @property
    def keeps(self) -> bool:
        """Whether nobody else may write."""
        index = self._index
        return index is not None and index.writer.keeps

    def is_ahead_of(self, generation: int) -> bool:
        """Whether a compaction made another generation than the one that serves."""
        index = self._index
        return self._served is None and index is not None and index.writer.newest.generation != generation

    def follow(self, _generation: int) -> None:
        """After another generation began to serve: an index that was built anew or rolled back takes no changes by way
        of what was opened before."""
        index = self._index
        if index is None:
            return
        if index.writer.newest.generation == read_manifest(self._path).generation:
            self._note_shape(index)
            return
        self.let_go()
        _log.info("the index was replaced: changes go to the generation that serves now")

    def let_go(self) -> None:
        """Others may write from now on; the next change asks for the right again."""
        with self._opening:
            with self._idle:
                index, self._index = self._index, None
                self._idle.wait_for(lambda: not self._users)
            if index is not None:
                self._compactions_before += index.writer.compactions
                index.close()

    def _note_shape(self, index: Index) -> None:
        """What the compaction that made the newest generation did to its lists, once: the generation tells."""
        newest = index.writer.newest
        with self._idle:
            before, self._shape = self._shape, (newest.fingerprint, newest.nlist)
            notes = newest.manifest.notes
            if before is None or before == self._shape or notes.get("compacted") != before[0]:
                return
            if (parents := notes.get("parents")) is not None:
                children = Counter(parents)
                self._split += sum(n > 1 for n in children.values())
                self._dissolved += before[1] - len(children)

    def state(self, served: Index) -> dict[str, Any]:
        """Of the rows, as plain values. ``served``: says it while nothing was written."""
        opened = self._index
        index = served if opened is None else opened
        live, rows = index.ivf.live, index.ivf.live.current()
        deleted = 0 if rows is None or rows.deleted is None else len(rows.deleted.ids)
        added = 0 if rows is None or rows.added is None else rows.added.count
        problem = "" if opened is None else opened.writer.problem
        return {
            "writes": self.allowed,
            "writer": opened is not None and opened.writer.keeps,
            "added": added,
            "deleted": deleted,
            "live": index.ivf.count - deleted + added,
            "changed_share": (added + deleted) / max(1, index.ivf.count),
            "added_bytes": live.added.nbytes,
            "log_bytes": live.log_bytes,
            "number": live.number,
            "compactions": self._compactions_before + (0 if opened is None else opened.writer.compactions),
            "split": self._split,
            "dissolved": self._dissolved,
            "problem": self._without_path(problem) or None,
        }

    def stop(self) -> None:
        """Ends a compaction that was asked for. Returns at once."""
        self._stopping = True

    def close(self) -> None:
        """Ends what runs, and gives up the claim to write. Closing twice is harmless."""
        with self._idle:
            self._closed = self._stopping = True
            index, self._index = self._index, None
            self._idle.wait_for(lambda: not self._users, _CLOSES_S)
        if index is None:
            return
        # It waits for a compaction, which may take minutes, and which a crash may interrupt at any moment.
        closing = threading.Thread(target=index.close, name="hybridindex-close-writer", daemon=True)
        closing.start()
        closing.join(_CLOSES_S)
        if closing.is_alive():
            _log.warning("a compaction is under way; this process ends and interrupts it; nothing is lost")


def _reason(error: HybridIndexError) -> str:
    """For a metric: few of them."""
    for kind, name in (
        (WritesOffError, "off"),
        (BusyWritingError, "backpressure"),
        (DuplicateIdError, "duplicate id"),
        (InvalidInputError, "invalid"),
        (UnsupportedIndexError, "codec"),
        (NoDocumentsError, "no documents"),
        (NoEmbedderError, "no embedder"),
        (EmbeddingError, "embedder failed"),
        (BuildError, "another writer"),
    ):
        if isinstance(error, kind):
            return name
    return "other"


def _saying(words: str, error: HybridIndexError) -> HybridIndexError:
    if isinstance(error, BusyWritingError):
        return BusyWritingError(words, retry_after_s=error.retry_after_s)
    for kind in (
        ClaimedError,
        DuplicateIdError,
        InvalidInputError,
        UnsupportedIndexError,
        SupersededError,
        NoEmbedderError,
    ):
        if isinstance(error, kind):
            return kind(words)
    return BuildError(words) if type(error) is BuildError else error
