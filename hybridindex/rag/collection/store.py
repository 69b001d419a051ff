"""The document store of an index whose rows change: one SQLite file that one writer changes while others read.

Beside the passages it holds what the caller wants of them back (key, metadata), and what was begun: a change is written
down with all that it needs before the index is touched, and crossed out when both have it. After a crash it is made
again, which changes nothing where it was made before.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
from filelock import Timeout

from hybridindex import filesystem
from hybridindex.errors import BuildError, DocumentStoreError, FileError
from hybridindex.index.storage.beside import changes_lock
from hybridindex.rag.collection.items import Item, metadata_json
from hybridindex.rag.documents import LIVE_VERSION, DocumentStore, is_live, passage_rows
from hybridindex.rag.tokens import TokenStarts, word_starts
from hybridindex.types import F32, I64

__all__ = ["Begun", "LiveDocuments", "Noted", "SourceFacts", "make_live"]

#: Root, size, time of change in ns, digest, how it was read.
SourceFacts = tuple[str, int, int, str, str]

#: How long another process may change the documents before a change is refused.
_WAIT_S = 30.0
#: A row, as a key.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
#: Ids or keys per SQL statement.
_ASKED = 500
_TABLES = (
    "CREATE TABLE IF NOT EXISTS details (id INTEGER PRIMARY KEY, key TEXT UNIQUE, ref TEXT NOT NULL,"
    " digest BLOB NOT NULL, metadata TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS details_by_ref ON details (ref)",
    # Texts that have no vector, and so no row.
    "CREATE TABLE IF NOT EXISTS unrowed (id INTEGER PRIMARY KEY)",
    # Attributes of a put follow from the metadata of its texts; older versions kept them here, too.
    "CREATE TABLE IF NOT EXISTS begun (number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL,"
    " ids BLOB NOT NULL, vectors BLOB NOT NULL, attributes BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS sources (name TEXT PRIMARY KEY, root TEXT NOT NULL, size INTEGER NOT NULL,"
    " mtime_ns INTEGER NOT NULL, digest TEXT NOT NULL, options TEXT NOT NULL)",
)
_COLUMNS = "p.id, p.text, p.source, p.successor, d.key, d.ref, d.digest, d.metadata"
_FROM = "FROM passages p LEFT JOIN details d ON d.id = p.id"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Begun:
    """A change that was written down and may have reached the index, or not."""

    number: int
    #: "unrow": the rows go, and the texts stay.
    kind: Literal["put", "delete", "unrow"]
    ids: I64
    #: (n, d) of a put.
    vectors: F32


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """What is written together with a change of rows."""

    #: Row -> the row of the passage that follows it now. With the texts that come.
    successors: Mapping[int, int | None] = field(default_factory=dict)
    #: Name of each source -> what is known of it; None: it is gone. With the end of the change.
    sources: Mapping[str, SourceFacts | None] = field(default_factory=dict)


def make_live(path: Path) -> None:
    """Lets a document store change from now on. For who is alone with the file.

    Raises:
        DocumentStoreError: it is none, or cannot be written.
    """
    DocumentStore(path).close()
    try:
        with contextlib.closing(_connected(path)) as db:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("BEGIN IMMEDIATE")
            for table in _TABLES:
                db.execute(table)
            about = {"version": str(LIVE_VERSION).encode(), "next_id": str(_largest(db) + 1).encode()}
            db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", about.items())
            db.execute("COMMIT")
    except (FileError, sqlite3.Error) as error:
        raise DocumentStoreError(f"{path} cannot be made to change ({error}); it is as it was") from error


def _largest(db: sqlite3.Connection) -> int:
    (found,) = db.execute("SELECT max(id) FROM passages").fetchone()
    return -1 if found is None else int(found)


def _connected(path: Path) -> sqlite3.Connection:
    uri = f"file:{quote(str(path.resolve()))}?mode=rw"
    with filesystem.performing("sqlite", path):
        db = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None, timeout=_WAIT_S)
    # A transaction is on disk when it is committed: else a row might have no text after a power cut.
    db.execute("PRAGMA synchronous=FULL")
    return db


class LiveDocuments(DocumentStore):
    """Opened for changes. Any thread; several processes, one change at a time."""

    def __init__(self, path: Path, *, token_starts: TokenStarts = word_starts) -> None:
        """
        Args:
            path: of a store that :func:`make_live` has seen.
            token_starts: that of the store's passages.

        Raises:
            DocumentStoreError: as :class:`hybridindex.rag.documents.DocumentStore`.
        """
        self._token_starts = token_starts
        self._changing = threading.RLock()
        self._depth = 0
        super().__init__(path)

    def _connect(self, *, immutable: bool) -> sqlite3.Connection:
        if immutable:
            make_live(self._path)
            self.is_live = is_live(self._path)
        return _connected(self._path)

    # Changes

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Nobody else changes the documents within.

        Raises:
            BuildError: another process does, for half a minute already.
        """
        with self._changing:
            if self._depth:
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1
                return
            file = self._path.resolve()
            lock = changes_lock(file, _WAIT_S)
            try:
                lock.acquire()
            except Timeout as error:
                raise BuildError(f"another process changes {self._path}; try again when it is done") from error
            self._depth = 1
            try:
                yield
            finally:
                self._depth = 0
                lock.release()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._named_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            with filesystem.performing("sqlite", self._path):
                yield
        except (FileError, sqlite3.Error) as error:
            raise DocumentStoreError(
                f"{self._path} cannot be changed ({error}); make room, or see to the rights and the disk of its folder"
            ) from error

    def begin_put(
        self,
        items: Sequence[Item],
        ids: I64,
        vectors: F32 | None,
        *,
        gone: I64 | None = None,
        noted: Noted | None = None,
    ) -> int:
        """Writes texts, and down what the index has yet to do; the number of the change.

        Args:
            vectors: None: they have none, and shall have no rows.
            gone: rows that go after they came: a change of its own, with the next number.
        """
        documents = [item.document(row) for item, row in zip(items, ids.tolist(), strict=True)]
        # What is wrong with a text is said before anything changes.
        rows = list(passage_rows(documents, self._token_starts))
        details = [
            (row, item.key, item.ref, item.digest, metadata_json(item.metadata))
            for item, row in zip(items, ids.tolist(), strict=True)
        ]
        with self._transaction() as db:
            self._write(db, rows)
            self._link(db, noted)
            db.executemany("INSERT OR REPLACE INTO details VALUES (?, ?, ?, ?, ?)", details)
            largest = int(ids.max(initial=-1))
            if largest >= self._said(db, "next_id"):
                self._say(db, "next_id", largest + 1)
            marks = [(row,) for row in ids.tolist()]
            if vectors is None:
                db.executemany("INSERT OR REPLACE INTO unrowed VALUES (?)", marks)
                number = self._begin(db, "unrow", ids)
            else:
                db.executemany("DELETE FROM unrowed WHERE id = ?", marks)
                number = self._begin(db, "put", ids, vectors.astype("<f4").tobytes())
            if gone is not None and len(gone):
                self._begin(db, "delete", gone)
            return number

    def begin_delete(self, ids: I64, noted: Noted | None = None) -> int:
        """Writes down that rows shall go, and their texts after them; the number of the change."""
        with self._transaction() as db:
            self._link(db, noted)
            return self._begin(db, "delete", ids)

    def end(self, begun: Begun | int, gone: Iterable[int] = (), noted: Noted | None = None) -> None:
        """The index has it: crosses the change out, and removes the texts of rows that are ``gone``.

        Args:
            begun: a number: of the change that is under way, with those that began after it.
        """
        with self._transaction() as db:
            self._remove(db, gone)
            self._note(db, noted)
            if isinstance(begun, int):
                db.execute("DELETE FROM begun WHERE number >= ?", [begun])
            else:
                db.execute("DELETE FROM begun WHERE number = ?", [begun.number])

    def take_back(self, number: int, ids: I64, before: Mapping[int, tuple[Any, ...]]) -> None:
        """The index refused it: puts ``before`` (:meth:`as_they_are`) in the place of the texts of ``ids``, and of what
        it has beside them. The changes that began after it are crossed out, too."""
        with self._transaction() as db:
            self._remove(db, [row for row in ids.tolist() if row not in before])
            for passage, detail, unrowed in before.values():
                which = "INSERT OR REPLACE INTO unrowed VALUES (?)" if unrowed else "DELETE FROM unrowed WHERE id = ?"
                db.execute(which, [passage[0]])
                self._write(db, [passage])
                if detail is None:
                    db.execute("DELETE FROM details WHERE id = ?", [passage[0]])
                else:
                    db.execute("INSERT OR REPLACE INTO details VALUES (?, ?, ?, ?, ?)", detail)
            db.execute("DELETE FROM begun WHERE number >= ?", [number])

    def as_they_are(self, ids: Sequence[int]) -> dict[int, tuple[Any, ...]]:
        """What :meth:`take_back` takes, of the ids that have texts."""
        passages = {row[0]: row for row in self._rows("SELECT * FROM passages WHERE id IN ({})", ids)}
        details = {row[0]: row for row in self._rows("SELECT * FROM details WHERE id IN ({})", ids)}
        unrowed = {row for (row,) in self._rows("SELECT id FROM unrowed WHERE id IN ({})", ids)}
        return {row: (passages[row], details.get(row), row in unrowed) for row in passages}

    def remove(self, ids: Iterable[int]) -> int:
        """Removes texts whose rows are gone already; how many."""
        wanted = list(ids)
        with self._transaction() as db:
            self._remove(db, wanted)
        return len(wanted)

    def next_id(self) -> int:
        """The first of the numbers that no text has, or had since the store changes."""
        with self._lock, self._named_errors():
            return max(self._said(self._db, "next_id"), _largest(self._db) + 1)

    def note(self, noted: Noted) -> None:
        """Without a change of rows."""
        with self._transaction() as db:
            self._link(db, noted)
            self._note(db, noted)

    def successors_of(self, ids: Iterable[int]) -> dict[int, int | None]:
        """Row -> the row of the passage that follows it, of those that are there."""
        return dict(self._rows("SELECT id, successor FROM passages WHERE id IN ({})", list(ids)))

    def reserve_ids(self, first: int, count: int) -> None:
        """Nobody else gets the ``count`` numbers from ``first`` on, which is :meth:`next_id` or more."""
        with self._transaction() as db:
            self._say(db, "next_id", first + count)

    def describe(self, facts: Iterable[tuple[int, str, bytes, Mapping[str, Any]]]) -> None:
        """(id, ref, digest, metadata) of passages that were written without."""
        said = ((row, ref, digest, metadata_json(metadata)) for row, ref, digest, metadata in facts)
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO details VALUES (?, NULL, ?, ?, ?)", said)

    @staticmethod
    def _link(db: sqlite3.Connection, noted: Noted | None) -> None:
        links = () if noted is None else [(following, row) for row, following in noted.successors.items()]
        db.executemany("UPDATE passages SET successor = ? WHERE id = ?", links)

    @staticmethod
    def _note(db: sqlite3.Connection, noted: Noted | None) -> None:
        for name, said in () if noted is None else noted.sources.items():
            if said is None:
                db.execute("DELETE FROM sources WHERE name = ?", [name])
            else:
                db.execute("INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?, ?, ?)", [name, *said])

    @staticmethod
    def _begin(db: sqlite3.Connection, kind: str, ids: I64, vectors: bytes = b"") -> int:
        found = db.execute(
            "INSERT INTO begun (kind, ids, vectors, attributes) VALUES (?, ?, ?, x'')",
            [kind, ids.astype("<i8").tobytes(), vectors],
        )
        assert found.lastrowid is not None
        return found.lastrowid

    @classmethod
    def _write(cls, db: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        replaced = db.executemany("DELETE FROM passages WHERE id = ?", [row[:1] for row in rows]).rowcount
        db.executemany("INSERT INTO passages VALUES (?, ?, ?, ?, ?, ?)", rows)
        cls._say(db, "count", cls._said(db, "count") + len(rows) - max(0, replaced))

    @classmethod
    def _remove(cls, db: sqlite3.Connection, ids: Iterable[int]) -> None:
        each = [(row,) for row in ids]
        if each:
            gone = db.executemany("DELETE FROM passages WHERE id = ?", each).rowcount
            for table in ("details", "unrowed"):
                db.executemany(f"DELETE FROM {table} WHERE id = ?", each)  # noqa: S608 - names of ours
            cls._say(db, "count", cls._said(db, "count") - max(0, gone))

    @staticmethod
    def _said(db: sqlite3.Connection, name: str) -> int:
        (found,) = db.execute("SELECT value FROM about WHERE name = ?", [name]).fetchone()
        return int(found)

    @staticmethod
    def _say(db: sqlite3.Connection, name: str, value: int) -> None:
        db.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", [name, str(value).encode()])

    # What is there

    def begun(self) -> list[Begun]:
        """Changes that were begun and not ended, in their order."""
        found = self._rows("SELECT number, kind, ids, vectors FROM begun ORDER BY number")
        return [
            Begun(
                number=number,
                kind=kind,
                ids=np.frombuffer(ids, dtype="<i8").astype(np.int64),
                vectors=np.frombuffer(vectors, dtype="<f4").astype(np.float32).reshape(-1, self.info.dim),
            )
            for number, kind, ids, vectors in found
        ]

    def count(self) -> int:
        """Passages now."""
        return int(self._rows("SELECT value FROM about WHERE name = 'count'")[0][0])

    def ids_of(self, keys: Sequence[str]) -> dict[str, int]:
        """Rows by key, of those that are there. A row without a key has its number for one, unless that is another's
        key."""
        found: dict[str, int] = dict(self._rows("SELECT key, id FROM details WHERE key IN ({})", keys))
        numbers = [int(key) for key in keys if key not in found and _NUMBER.fullmatch(key)]
        keyless = f"SELECT p.id {_FROM} WHERE d.key IS NULL AND p.id IN ({{}})"
        return found | {str(row): row for (row,) in self._rows(keyless, [row for row in numbers if row < 1 << 63])}

    def ids_of_refs(self, refs: Sequence[str]) -> list[int]:
        """Rows of all parts of these."""
        return [row for (row,) in self._rows("SELECT id FROM details WHERE ref IN ({}) ORDER BY id", refs)]

    def rows_of_refs(self, refs: Sequence[str]) -> dict[int, str]:
        """The row of each part of these that shall have one -> which it is a part of."""
        but = "id NOT IN (SELECT id FROM unrowed)"
        return dict(self._rows(f"SELECT id, ref FROM details WHERE ref IN ({{}}) AND {but}", refs))  # noqa: S608 - ours

    def digests_of(self, ref: str) -> list[tuple[int, bytes, int | None]]:
        """(row, digest, successor) of each part of this."""
        return self._rows(
            "SELECT d.id, d.digest, p.successor FROM details d JOIN passages p ON p.id = d.id"
            " WHERE d.ref IN ({}) ORDER BY d.id",
            [ref],
        )

    def items(self, ids: Sequence[int]) -> dict[int, Item]:
        """By row, of those that are there."""
        found = self._rows(f"SELECT {_COLUMNS} {_FROM} WHERE p.id IN ({{}})", [int(row) for row in ids])
        return dict(zip((row[0] for row in found), self._items(found), strict=True))

    def all_items(self, batch: int = 1000) -> Iterator[Item]:
        """By row; what comes meanwhile may be among them."""
        last = -1
        while found := self._rows(f"SELECT {_COLUMNS} {_FROM} WHERE p.id > {last} ORDER BY p.id LIMIT {batch}"):
            last = int(found[-1][0])
            yield from self._items(found)

    def _items(self, found: Sequence[tuple[Any, ...]]) -> Iterator[Item]:
        for row in found:
            try:
                item = _item(row)
            except (ValueError, TypeError, RecursionError) as error:  # of JSON
                raise DocumentStoreError(
                    f"{self._path}: the metadata of passage {row[0]} are damaged ({error}); restore the file, or "
                    "delete the passage and add it again"
                ) from error
            yield item

    def all_ids(self, *, rowed: bool = False) -> I64:
        """(n,) int64 ascending; ``rowed``: of those that shall have rows."""
        but = " WHERE id NOT IN (SELECT id FROM unrowed)" if rowed else ""
        found = self._rows(f"SELECT id FROM passages{but} ORDER BY id")  # noqa: S608 - words of ours
        return np.array([row for (row,) in found], dtype=np.int64)

    def sources(self, names: Sequence[str] | None = None) -> dict[str, SourceFacts]:
        """What is known of each source. ``names``: of these alone, if they are there."""
        asked = "SELECT * FROM sources" if names is None else "SELECT * FROM sources WHERE name IN ({})"
        return {row[0]: tuple(row[1:]) for row in self._rows(asked, names)}

    def ways_of_reading(self) -> list[str]:
        """How the sources were read, the most frequent way first; of many, as a thousand of them say."""
        found = self._rows(
            "SELECT options FROM (SELECT options FROM sources LIMIT 1000)"
            " GROUP BY options ORDER BY count(*) DESC, options"
        )
        return [row for (row,) in found]

    def _rows(self, statement: str, values: Sequence[Any] | None = None) -> list[Any]:
        """``{}`` in the statement stands for the values."""
        try:
            with self._lock:
                if values is None:
                    return self._db.execute(statement).fetchall()
                found = []
                for start in range(0, len(values), _ASKED):
                    part = values[start : start + _ASKED]
                    found += self._db.execute(statement.format(",".join("?" * len(part))), part).fetchall()
                return found
        except (sqlite3.Error, OverflowError) as error:
            raise DocumentStoreError(f"{self._path} cannot be read ({error}); or it is damaged") from error


def _item(row: tuple[Any, ...]) -> Item:
    number, text, source, successor, key, ref, digest, metadata = row
    return Item(
        id=number,
        text=text,
        source=source,
        successor=successor,
        key=key,
        ref=ref or "",
        digest=digest or b"",
        metadata=json.loads(metadata) if metadata else {},
    )
