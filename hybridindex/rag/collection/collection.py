"""Texts, their vectors and their metadata, changed together: an index and the document store of its lineage.

A change is written down in the document store first. Of a put, texts come before rows; of a delete, rows go before
texts. So no row is ever without its text. What a crash interrupts is made again by the next one that changes or opens
the collection for writing.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from hybridindex import filesystem
from hybridindex.api import Index, open_index
from hybridindex.errors import (
    AccessDeniedError,
    BuildError,
    DamagedListsError,
    DocumentStoreError,
    DuplicateIdError,
    FileError,
    IndexFormatError,
    InvalidInputError,
    OverloadedError,
)
from hybridindex.index.build import default_nprobe
from hybridindex.index.changes.compact import needs_compaction
from hybridindex.index.changes.write import largest_id
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.storage.beside import generation_file, lineage_of, share
from hybridindex.index.storage.generation import CURRENT_FILE
from hybridindex.rag.collection.conditions import Condition, where_of
from hybridindex.rag.collection.items import (
    Hit,
    Item,
    check_columns,
    column_values,
    matrix_of,
    refuse_twice,
)
from hybridindex.rag.collection.make import alone_with, make_collection
from hybridindex.rag.collection.present import are_there, ids_where
from hybridindex.rag.collection.store import Begun, LiveDocuments, Noted
from hybridindex.rag.documents import DOCUMENTS_FILE
from hybridindex.rag.tokens import WORDS, TokenStarts, word_starts
from hybridindex.types import F32, I64, Metric, SearchResult

__all__ = ["Collection", "RowTarget", "Searching"]

#: Beyond which nobody gets numbers: some are left for those who ask for many at once.
_MOST_NUMBER = (1 << 63) - (1 << 32)
#: After these the index is as it was.
_REFUSALS = (
    AccessDeniedError,
    BuildError,
    DamagedListsError,
    FileError,
    IndexFormatError,
    InvalidInputError,
    OverloadedError,
)
#: Of a search by a router of our own: of its k, and rows that the lists which it probes have, about.
_MOST_K, _FEWEST_ROWS = 2048, 2048


class RowTarget(Protocol):
    """Where rows go: an index, or the client of the daemon that serves it."""

    def upsert(self, vectors: Any, ids: Any, attributes: Any = None) -> int: ...

    def delete(self, ids: Any = None) -> int: ...


class Searching(Protocol):
    """A router, or the client of a daemon."""

    def search(
        self,
        queries: Any,
        /,
        k: int = 10,
        nprobe: int | None = None,
        *,
        where: str | None = None,
        allow_ids: Any = None,
    ) -> SearchResult: ...


class Collection:
    """Any thread; several processes, of which one changes at a time. Close it once."""

    def __init__(
        self,
        path: str | Path,
        *,
        columns: Mapping[str, str] | None = None,
        metric: Metric = "ip",
        normalize: bool | None = None,
        codec: str = "flat",
        embedder: str = "",
        nprobe: int | None = None,
        write: bool = False,
        router: Searching | None = None,
        target: RowTarget | None = None,
        index: Index | None = None,
        token_starts: TokenStarts = word_starts,
    ) -> None:
        """
        Args:
            path: of an index with a document store; where nothing is, the first put makes both.
            columns: of an index that is to be made: name and kind of the metadata that searches can filter by, as
                {"year": "int", "lang": "string"}.
            metric, normalize, codec: of an index that is to be made; normalize: cosine similarity, the default for
                "ip".
            embedder: name of what embeds; kept with a new index, compared with that of an older one. Empty: unknown.
            nprobe: lists per query; None: the index's.
            write: nobody else may write until it is closed.
            router: what searches; the caller closes it. None: one of our own, on the host.
            target: what changes rows, where that is not the index itself: the client of the daemon that serves it.
            index: that at ``path``, open already; the caller closes it. None: the collection opens it.
            token_starts: those of the store's passages.

        Raises:
            InvalidInputError: names the argument. DocumentStoreError: the index has no document store, or another's.
            IndexFormatError, BuildError: as :func:`hybridindex.open`.
        """
        self.path = Path(path)
        self._wanted = check_columns(columns or {})
        self._metric: Metric = metric
        self._normalize = metric == "ip" if normalize is None else normalize
        self._codec, self._embedder, self._nprobe = codec, embedder, nprobe
        self._write, self._target, self._token_starts = write, target, token_starts
        self._given = router
        self._lent = index
        self._index: Index | None = None
        self._store: LiveDocuments | None = None
        self._router: Any = None
        self._opening = threading.RLock()
        self._closed = False
        if filesystem.exists(self.path / CURRENT_FILE):
            self._open()

    # What it is

    @property
    def is_empty_path(self) -> bool:
        """Whether nothing was put yet, so that there is no index."""
        return self._opened(required=False) is None

    @property
    def index(self) -> Index:
        """Raises InvalidInputError where nothing was put yet."""
        return self._both()[0]

    @property
    def store(self) -> LiveDocuments:
        """Raises InvalidInputError where nothing was put yet."""
        return self._both()[1]

    @property
    def columns(self) -> dict[str, str]:
        """Metadata that searches filter by: name and kind."""
        opened = self._opened(required=False)
        return self._wanted if opened is None else opened[0].attributes

    @property
    def metric(self) -> Metric:
        """Of the index; before there is one, of the index that the first items make."""
        opened = self._opened(required=False)
        return self._metric if opened is None else opened[0].metric

    @property
    def normalize(self) -> bool:
        """Whether the index compares by cosine similarity."""
        opened = self._opened(required=False)
        return self._normalize if opened is None else opened[0].ivf.manifest.normalized

    def count(self) -> int:
        """Texts that are there now."""
        opened = self._opened(required=False)
        return 0 if opened is None else opened[1].count()

    # Changes

    def put(
        self,
        items: Sequence[Item],
        vectors: Any,
        *,
        replace: bool = True,
        gone: Sequence[int] = (),
        noted: Noted | None = None,
    ) -> list[int]:
        """Writes items, in the place of those that have their keys or ids; durable when it returns. The rows.

        Args:
            vectors: (n, d) float32; None: they have none, and searches by vectors do not find them.
            replace: False: a key or an id that is there is an error, and nothing changes.
            gone: rows that go with their texts when the items have come. A crash leaves neither or both.
            noted: what is written together with the change.

        Raises:
            DuplicateIdError: a key or an id twice, or, without ``replace``, one that is there. InvalidInputError: names
            what is wrong. DocumentStoreError, BuildError, FileError: nothing has changed.
        """
        vectors = None if vectors is None else matrix_of(vectors, len(items))
        if not items:
            return []
        refuse_twice("key", [item.key for item in items if item.key is not None])
        refuse_twice("id", [item.id for item in items if item.id is not None])
        with self._opening:
            if self._opened(required=False) is None:
                if vectors is None:
                    raise InvalidInputError(f"{self.path} has no index yet, and the first items have no vectors")
                if (made := self._make(items, vectors)) is not None:
                    return made
        index, store = self._both()
        if vectors is not None and vectors.shape[1] != index.dim:
            raise InvalidInputError(f"vectors have {vectors.shape[1]} dimensions; the index has {index.dim}")
        with store.changing():
            self._finish_begun()
            ids = self._numbered(items, replace=replace)
            table = column_values(index.attributes, [item.metadata for item in items])
            before = store.as_they_are([*ids.tolist(), *(noted.successors if noted is not None else ())])
            leaving = np.array(sorted(store.items(gone)), dtype=np.int64)
            number = store.begin_put(items, ids, vectors, gone=leaving, noted=noted)
            try:
                if vectors is None:
                    self._rows.delete(ids)
                else:
                    self._rows.upsert(vectors, ids, table)
            except _REFUSALS:
                store.take_back(number, ids, before)
                raise
            try:
                if len(leaving):
                    self._rows.delete(leaving)
            except _REFUSALS:
                # What came stays, and what should go stays, too.
                store.end(number)
                raise
            store.end(number, leaving.tolist(), noted)
        self._after_change()
        return [int(row) for row in ids]

    def delete(
        self,
        ids: Sequence[int] | I64 | None = None,
        *,
        keys: Sequence[str] | None = None,
        noted: Noted | None = None,
    ) -> int:
        """Removes rows and then their texts; how many there were. What is not there changes nothing. ``noted``: as of
        :meth:`put`."""
        opened = self._opened(required=False)
        if opened is None:
            return 0
        store = opened[1]
        with store.changing():
            self._finish_begun()
            wanted = store.ids_of(keys).values() if keys is not None else () if ids is None else ids
            gone = np.array(sorted(store.items(list(wanted))), dtype=np.int64)
            if not len(gone):
                if noted is not None:
                    store.note(noted)
                return 0
            before = store.successors_of(noted.successors if noted is not None else ())
            number = store.begin_delete(gone, noted)
            try:
                self._rows.delete(gone)
            except _REFUSALS:
                store.end(number)
                store.note(Noted(successors=before))
                raise
            store.end(number, gone.tolist(), noted)
        self._after_change()
        return len(gone)

    def clear(self) -> int:
        """Removes all; how many there were. The index stays."""
        opened = self._opened(required=False)
        return 0 if opened is None else self.delete(opened[1].all_ids().tolist())

    def recover(self) -> int:
        """Ends what a crash interrupted, and removes texts without rows; how many texts these were.

        Raises:
            DocumentStoreError, BuildError, FileError. It can be called again.
        """
        opened = self._opened(required=False)
        if opened is None:
            return 0
        index, store = opened
        with store.changing():
            self._finish_begun()
            ids = store.all_ids(rowed=True)
            lost = ids[~are_there(index.ivf, ids)].tolist()
            if not lost:
                return 0
            # Their sources are as nobody has read them: who sends or reads one again gets all of it.
            names = {item.ref for item in store.items(lost).values() if item.ref}
            known = store.sources(sorted(names))
            unread = {name: (root, -1, 0, "", said) for name, (root, _, _, _, said) in known.items()}
            store.note(Noted(sources=unread))
            return store.remove(lost)

    def remove_lost(self, refs: Sequence[str]) -> set[str]:
        """As :meth:`recover`, of the parts of these alone; those of which rows were gone."""
        index, store = self._both()
        with store.changing():
            self._finish_begun()
            rows = store.rows_of_refs(refs)
            there = are_there(index.ivf, np.array(list(rows), dtype=np.int64))
            lost = {row: ref for (row, ref), is_there in zip(rows.items(), there, strict=True) if not is_there}
            store.remove(lost)
            return set(lost.values())

    def compact(self) -> bool:
        """See :meth:`hybridindex.api.Index.compact`; searches go on."""
        return self.index.compact()

    @property
    def _rows(self) -> RowTarget:
        return self.index if self._target is None else self._target

    def _numbered(self, items: Sequence[Item], *, replace: bool) -> I64:
        store = self.store
        known = store.ids_of([item.key for item in items if item.key is not None])
        given = [item.id for item in items if item.id is not None]
        if not replace:
            if known:
                raise DuplicateIdError(f"{len(known)} keys exist already, among them {next(iter(known))!r}")
            if there := store.items(given):
                raise DuplicateIdError(f"{len(there)} ids exist already, among them {min(there)}")
        rows: list[int] = []
        taken = set(given)
        fresh = (row for row in itertools.count(self.next_id()) if row not in taken)
        for item in items:
            of_key = None if item.key is None else known.get(item.key)
            if item.id is not None and of_key not in (None, item.id):
                raise DuplicateIdError(f"key {item.key!r} is that of row {of_key}; expected it, not {item.id}")
            of_item = of_key if item.id is None else item.id
            rows.append(next(fresh) if of_item is None else of_item)
        refuse_twice("id", rows)
        return np.array(rows, dtype=np.int64)

    def rowed(self, ids: Sequence[int]) -> set[int]:
        """Which of these have rows now, of whomever."""
        given = np.array(ids, dtype=np.int64)
        return set(given[are_there(self.index.ivf, given)].tolist()) if len(given) else set()

    def next_id(self) -> int:
        """The first of the numbers that no text and no row has, for who is within ``store.changing()``."""
        live = self.index.ivf.live.read_now()
        largest = largest_id(self.index.ivf.rows, None if live is None else live.added)
        number = max(self.store.next_id(), largest + 1)
        if number >= _MOST_NUMBER:
            raise InvalidInputError(f"the largest id that was ever there is {number - 1}; no number above it is left")
        return number

    def _finish_begun(self) -> None:
        """Makes what was begun and not ended, by anybody. Within ``changing``."""
        store = self.store
        for begun in store.begun():
            self._redo(begun)

    def _redo(self, begun: Begun) -> None:
        if begun.kind == "put":
            items = self.store.items(begun.ids.tolist())
            rows = [items[row].metadata for row in begun.ids.tolist()]
            # The columns may be others than when it was begun.
            table = column_values(self.index.attributes, rows, refuse=False)
            self._rows.upsert(begun.vectors, begun.ids, table)
            self.store.end(begun)
        else:
            self._rows.delete(begun.ids)
            self.store.end(begun, begun.ids.tolist() if begun.kind == "delete" else ())

    def _after_change(self) -> None:
        if self._target is None and not self._write and needs_compaction(self.index.ivf):
            with contextlib.suppress(BuildError):  # another process writes: it or the next change does it
                self.compact()

    def create(self, dim: int) -> bool:
        """Makes an empty index for vectors of ``dim``, where nothing was put yet; whether it did."""
        with self._opening:
            if self._opened(required=False) is not None:
                return False
            if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
                raise InvalidInputError(f"dim is {dim!r}; expected 1 or more")
            # An index is built from rows: one stands in for those to come, and goes.
            return self._make([Item(text="")], np.eye(1, dim, dtype=np.float32), keep=False) is not None

    def _make(self, items: Sequence[Item], vectors: F32, *, keep: bool = True) -> list[int] | None:
        """The first put; None: another's was. ``keep``: with the items."""
        with alone_with(self.path):
            if self._opened(required=False) is not None:
                return None
            rows = make_collection(
                self.path,
                items,
                vectors,
                columns=self._wanted,
                embedder=self._embedder,
                token_starts=self._token_starts,
                keep=keep,
                metric=self._metric,
                normalize=self._normalize,
                codec=self._codec,
            )
            self._open()
        return rows

    # Searches

    def search(
        self,
        vectors: Any,
        k: int,
        *,
        condition: Condition | None = None,
        where: str | None = None,
        keys: Sequence[str] | None = None,
        ids: Sequence[int] | None = None,
        nprobe: int | None = None,
    ) -> list[list[Hit]]:
        """The k nearest items of each vector, nearest first; fewer where there are fewer.

        Args:
            condition, where: which metadata they must have, of columns of the index: one of the two.
            keys, ids: which may be found; None: all.

        Raises:
            InvalidInputError: names the argument.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise InvalidInputError(f"k is {k!r}; expected 1 or more")
        if condition is not None:
            if where is not None:
                raise InvalidInputError("a filter and where are both given; expected one of them")
            where = where_of(condition, self.columns)
        opened = self._opened(required=False)
        try:
            queries = np.atleast_2d(np.asarray(vectors, dtype=np.float32))
        except (ValueError, TypeError) as error:
            raise InvalidInputError(f"vectors are not numbers: {error}") from None
        if opened is None:
            return [[] for _ in queries]
        index, store = opened
        options: dict[str, Any] = {} if where is None else {"where": where}
        if keys is not None or ids is not None:
            allowed = [] if keys is None else list(store.ids_of(keys).values())
            options["allow_ids"] = np.array([*allowed, *(() if ids is None else ids)], dtype=np.int64)
        if k > _MOST_K and index.n_live > _MOST_K:
            raise InvalidInputError(f"k is {k}; expected 1..{_MOST_K}, where there are more items")
        most = min(k, _MOST_K)
        searching, nprobe = self._searching(nprobe or self._nprobe)
        found = searching.search(queries, most, nprobe, **options)
        items = store.items(found.ids[found.ids >= 0].tolist())
        return [
            [
                # What was deleted since the search has no text any more.
                Hit(item=items[row], score=score, nprobe_used=int(used))
                for row, score in zip(rows.tolist(), scores.tolist(), strict=True)
                if row in items
            ]
            for rows, scores, used in zip(found.ids, found.distances, found.nprobe_used, strict=True)
        ]

    def get(self, keys: Sequence[str]) -> dict[str, Item]:
        """Items by key, of those that are there; an item without a key has its row's number for one."""
        opened = self._opened(required=False)
        if opened is None:
            return {}
        rows = opened[1].ids_of(keys)
        items = opened[1].items(list(rows.values()))
        return {key: items[row] for key, row in rows.items() if row in items}

    def matching(self, condition: Condition) -> list[int]:
        """Rows whose metadata meet a condition.

        Raises:
            InvalidInputError: it names no column.
        """
        opened = self._opened(required=False)
        where = where_of(condition, self.columns)
        if opened is None or where is None:
            return [] if opened is None else [int(row) for row in opened[1].all_ids(rowed=True)]
        return [int(row) for row in ids_where(opened[0].ivf, where)]

    def items(self) -> Iterator[Item]:
        """All, by row."""
        opened = self._opened(required=False)
        return iter(()) if opened is None else opened[1].all_items()

    def _searching(self, nprobe: int | None) -> tuple[Searching, int | None]:
        """What searches, and how many lists it probes."""
        if self._given is not None:
            return self._given, nprobe
        with self._opening:
            if self._router is None:
                self._router = self.index.router(devices=(), warm_bytes=0, scrub_bytes_per_s=0)
            return self._router, nprobe or self._enough_lists(self._router.index)

    def _enough_lists(self, routed: IVFIndex) -> int:
        """How many our own router probes: an index that began with few rows has more lists since, and the nprobe of the
        beginning."""
        rows = max(1, self.index.n_live)
        grown = default_nprobe(routed.nlist) if "compacted" in routed.manifest.notes else 1
        return min(routed.nlist, max(routed.nprobe, grown, math.ceil(min(rows, _FEWEST_ROWS) * routed.nlist / rows)))

    # Opening and closing

    def _both(self) -> tuple[Index, LiveDocuments]:
        opened = self._opened(required=True)
        assert opened is not None
        return opened

    def _opened(self, *, required: bool) -> tuple[Index, LiveDocuments] | None:
        with self._opening:
            if self._closed:
                raise InvalidInputError(f"the collection at {self.path} is closed")
            if self._index is None and filesystem.exists(self.path / CURRENT_FILE):
                self._open()  # another process has made it
            if self._index is None or self._store is None:
                if required:
                    raise InvalidInputError(f"{self.path} has no index yet; put something first")
                return None
            return self._index, self._store

    def _open(self) -> None:
        index = open_index(self.path, verify="quick", write=self._write) if self._lent is None else self._lent
        try:
            number = index.ivf.generation
            if not filesystem.is_file(generation_file(self.path, number, DOCUMENTS_FILE)):
                raise DocumentStoreError(
                    f"{self.path} has no {DOCUMENTS_FILE}, and so no texts of its rows; ingest makes one with the index"
                )
            store = LiveDocuments(share(self.path, number, DOCUMENTS_FILE), token_starts=self._token_starts)
            try:
                store.check_index(index.fingerprint, lineage_of(self.path, index.fingerprint))
                self._check(index, store)
            except BaseException:
                store.close()
                raise
        except BaseException:
            if index is not self._lent:
                index.close()
            raise
        self._index, self._store = index, store
        if self._write:
            self.recover()

    def _check(self, index: Index, store: LiveDocuments) -> None:
        if self._embedder and store.info.embedder and store.info.embedder != self._embedder:
            raise InvalidInputError(
                f"the embedder is {self._embedder!r}, but the documents were embedded by {store.info.embedder!r}; use "
                "that one"
            )
        if self._token_starts is word_starts and store.info.tokenizer not in ("", WORDS):
            raise InvalidInputError(
                f"the passages of {self.path} have tokens of {store.info.tokenizer!r}; give its token_starts"
            )
        for name, kind in self._wanted.items():
            if index.attributes.get(name) != kind:
                known = ", ".join(f"{n} ({k})" for n, k in index.attributes.items()) or "none"
                raise InvalidInputError(
                    f"column {name!r} ({kind}) is wanted, but the index has {known}; omit columns, or see "
                    "Index.set_attributes"
                )

    def close(self) -> None:
        """Twice is harmless."""
        with self._opening:
            self._closed = True
            if self._router is not None:
                self._router.close()
                self._router = None
            if self._store is not None:
                self._store.close()
            if self._index is not None and self._index is not self._lent:
                self._index.close()
            self._store = self._index = None

    def __enter__(self) -> Collection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
