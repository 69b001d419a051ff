"""The document store: texts of passages under the ids of an index, in one SQLite file. What is written here is only
read; :mod:`hybridindex.rag.collection` changes texts together with the rows of the index.

Every passage has the offsets of its tokens and the id of the passage that follows it in its document, so that PipeRAG
can shift results (:mod:`hybridindex.rag.shift`). The file also says how queries must be embedded. Embeds and searches
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from hybridindex import filesystem
from hybridindex.errors import DocumentStoreError, FileError, InvalidInputError, io_cure
from hybridindex.rag.tokens import WORDS, TokenStarts, word_starts
from hybridindex.types import F32

__all__ = [
    "DOCUMENTS_FILE",
    "LIVE_VERSION",
    "MAX_TEXT",
    "Document",
    "DocumentStore",
    "DocumentsInfo",
    "StoredPassage",
    "is_live",
    "passage_rows",
    "tokens_of_store",
    "write_documents",
]

#: In the folder of an index, or in that of the generation that it belongs to, with a link in that of the index.
DOCUMENTS_FILE = "documents.sqlite"
_FORMAT, _VERSION = b"hybridindex-documents", 1
#: Of a store that changes with its index.
LIVE_VERSION = 2
#: Where the header of a SQLite file says that it has a write-ahead log, and how.
_WAL_AT, _WAL = 18, 2
#: How long a reader waits for a store that is being recovered.
_WAIT_S = 30.0
#: Longest text of one passage, in characters.
MAX_TEXT = 1 << 20
_BATCH = 2048
#: Ids per SQL statement: SQLite takes 32,766 at most.
_ASKED = 500
#: Passages whose stored token offsets are compared.
_COMPARED = 8
#: What helps. SQLite does not say which error of the system it met.
_ROOM, _RIGHT, _DISK = (io_cure(OSError(number, "")) for number in (errno.ENOSPC, errno.EACCES, errno.EIO))


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One passage."""

    id: int
    text: str
    source: str = ""
    #: Id of the passage that follows in the same document.
    successor: int | None = None
    #: Characters at the start that repeat a title; shifts leave them out.
    lead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentsInfo:
    """Facts about a store."""

    count: int
    index_fingerprint: str
    #: Name of the embedder of the passages.
    embedder: str
    dim: int
    #: (dim,) float32 to subtract from a query's unit vector before it is normalised again; None: nothing.
    mean: F32 | None
    #: Name of the tokenizer of the passages; empty: not known, as in older stores.
    tokenizer: str


def write_documents(
    path: Path,
    documents: Iterable[Document],
    *,
    index_fingerprint: str,
    embedder: str,
    dim: int,
    mean: F32 | None = None,
    token_starts: TokenStarts = word_starts,
    tokenizer: str = "",
) -> int:
    """Writes a store beside ``path`` and renames it there; returns how many passages it has.

    Args:
        tokenizer: the name of what ``token_starts`` finds; words have theirs.

    Raises:
        InvalidInputError: an id twice or negative, a text too long, a lead beyond its text, a mean of another shape.
        DocumentStoreError: the file cannot be written, or changes with its index.
    """
    if mean is not None and mean.shape != (dim,):
        raise InvalidInputError(f"mean has shape {mean.shape}; expected ({dim},)")
    # A link leads into the generation that the store belongs to.
    path = path.resolve()
    if filesystem.is_file(path) and is_live(path):
        raise DocumentStoreError(
            f"{path} changes with its index and cannot be rewritten alone; change it with "
            "hybridindex.rag.collection, or rebuild the index (ingest --rebuild)"
        )
    try:
        with (
            filesystem.replacing(path) as draft,
            filesystem.performing("sqlite", draft),
            contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as db,
        ):
            # Nobody reads the draft, so it needs no journal; it is synced as a whole.
            db.executescript(
                "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;"
                "CREATE TABLE about (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;"
                "CREATE TABLE passages (id INTEGER PRIMARY KEY, text TEXT NOT NULL, source TEXT NOT NULL,"
                " successor INTEGER, lead INTEGER NOT NULL, starts BLOB NOT NULL);"
                "BEGIN;"
            )
            rows = passage_rows(documents, token_starts)
            count = db.executemany("INSERT INTO passages VALUES (?, ?, ?, ?, ?, ?)", rows).rowcount
            about = {
                "format": _FORMAT,
                "version": str(_VERSION).encode(),
                "count": str(max(0, count)).encode(),
                "index_fingerprint": index_fingerprint.encode(),
                "embedder": embedder.encode(),
                "dim": str(dim).encode(),
                "mean": b"" if mean is None else mean.astype("<f4").tobytes(),
                "tokenizer": (WORDS if token_starts is word_starts else tokenizer).encode(),
            }
            db.executemany("INSERT INTO about VALUES (?, ?)", about.items())
            db.execute("COMMIT")
    except sqlite3.IntegrityError as error:
        raise InvalidInputError(f"documents hold an id twice ({error}); expected each once") from error
    except FileError as error:
        raise DocumentStoreError(f"{error}; {path} is as it was") from error
    except sqlite3.Error as error:
        raise DocumentStoreError(f"{path} cannot be written ({error}): {_ROOM}; or {_DISK}; it is as it was") from error
    return max(0, count)


def passage_rows(
    documents: Iterable[Document], token_starts: TokenStarts
) -> Iterator[tuple[int, str, str, int | None, int, bytes]]:
    """Rows of the table of passages. Raises InvalidInputError: names the document."""
    stream = iter(documents)
    while batch := list(itertools.islice(stream, _BATCH)):
        for document in batch:
            if document.id < 0:
                raise InvalidInputError(f"id is {document.id}; expected 0 or more, as in an index")
            if len(document.text) > MAX_TEXT:
                raise InvalidInputError(
                    f"text of {document.id} has {len(document.text)} characters; expected {MAX_TEXT} at most"
                )
            if not 0 <= document.lead <= len(document.text):
                raise InvalidInputError(f"lead of {document.id} is {document.lead}; expected 0..{len(document.text)}")
        for document, starts in zip(batch, token_starts([d.text for d in batch]), strict=True):
            blob = np.asarray(starts).astype(_starts_dtype(document.text)).tobytes()
            yield document.id, document.text, document.source, document.successor, document.lead, blob


def _starts_dtype(text: str) -> str:
    """Two bytes a token where they are enough; four would be larger than the text."""
    return "<u2" if len(text) < 1 << 16 else "<u4"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPassage:
    """A passage as the store has it."""

    document: Document
    #: (tokens,) uint16, or uint32 of a long text; ascending, characters.
    starts: npt.NDArray[np.unsignedinteger]


def is_live(path: Path) -> bool:
    """Whether a file is a database that changes while it is read. Raises FileError."""
    with filesystem.open_for_reading(path) as file:
        header = file.read(_WAL_AT + 1)
    return len(header) > _WAL_AT and header[_WAL_AT] == _WAL


class DocumentStore:
    """A store opened for reading. Any thread; close it once. A file that is open may only be replaced by rename.

    Of a store that changes with its index, each call reads what is there then.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            DocumentStoreError: missing, not a document store, of a newer version, or damaged.
        """
        self._path = path
        self._lock = threading.Lock()
        self._closed = False
        try:
            is_there = filesystem.is_file(path)
        except FileError as error:
            raise DocumentStoreError(str(error)) from error
        if not is_there:
            raise DocumentStoreError(f"{path} does not exist; expected a document store (write_documents makes one)")
        self._open()

    def _open(self) -> None:
        try:
            #: Whether texts come and go while it is open.
            self.is_live = is_live(self._path)
            self._db = self._connect(immutable=not self.is_live)
            found = filesystem.stat(self._path)
        except FileError as error:
            raise DocumentStoreError(str(error)) from error
        except sqlite3.Error as error:
            raise DocumentStoreError(f"{self._path} cannot be opened ({error}): {_RIGHT}; or {_DISK}") from error
        self._file = (found.st_dev, found.st_ino)
        try:
            self.info = self._read_info()
        except BaseException:
            self._db.close()
            raise

    def _connect(self, *, immutable: bool) -> sqlite3.Connection:
        # Immutable: no locks, no journal, nothing written beside it.
        end = "&immutable=1" if immutable else ""
        uri = f"file:{quote(str(self._path.resolve()))}?mode=ro{end}"
        with filesystem.performing("sqlite", self._path):
            db = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None, timeout=_WAIT_S)
        if immutable:
            return db
        try:
            db.execute("SELECT 1 FROM about").fetchone()
        except sqlite3.OperationalError as error:
            log = self._path.resolve().with_name(f"{self._path.resolve().name}-wal")
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY) or (
                filesystem.exists(log) and filesystem.stat(log).st_size
            ):
                return db  # the next call says what is wrong
            # Nothing can be written beside it, and nobody wrote: all is in the file.
            db.close()
            return self._connect(immutable=True)
        return db

    def _read_info(self) -> DocumentsInfo:
        try:
            about: dict[str, bytes] = dict(self._db.execute("SELECT name, value FROM about"))
        except sqlite3.Error as error:
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
                raise DocumentStoreError(f"{self._path} cannot be read ({error}): {_RIGHT}; or {_DISK}") from error
            raise DocumentStoreError(
                f"{self._path} is not a document store, or is damaged ({error}): write it anew"
            ) from error
        try:
            if about["format"] != _FORMAT or int(about["version"]) not in (_VERSION, LIVE_VERSION):
                raise DocumentStoreError(
                    f"{self._path} is {about['format']!r} version {about['version']!r}; expected {_FORMAT!r} {_VERSION}"
                    f" or {LIVE_VERSION}"
                )
            dim = int(about["dim"])
            mean = np.frombuffer(about["mean"], dtype="<f4").astype(np.float32) if about["mean"] else None
            if mean is not None and mean.shape != (dim,):
                raise ValueError(f"mean of shape {mean.shape} for {dim} dimensions")
            return DocumentsInfo(
                count=int(about["count"]),
                index_fingerprint=about["index_fingerprint"].decode(),
                embedder=about["embedder"].decode(),
                dim=dim,
                mean=mean,
                tokenizer=about.get("tokenizer", b"").decode(),
            )
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise DocumentStoreError(f"{self._path} is damaged: {error!r} in its table 'about'") from error

    def check_index(self, fingerprint: str, lineage: str | None = None) -> None:
        """Raises DocumentStoreError where the store was written for another index than ``fingerprint`` names, or, of
        one that was compacted, than its ``lineage``."""
        if self.info.index_fingerprint not in (fingerprint, lineage):
            raise DocumentStoreError(
                f"{self._path} belongs to index {self.info.index_fingerprint}, this is index {fingerprint}; "
                "write it anew from the texts of this index"
            )

    def read(self, ids: Sequence[int]) -> Mapping[int, StoredPassage]:
        """The passages of ``ids``, whatever their order; repeated ids once.

        Raises:
            DocumentStoreError: an id without a passage, or a damaged file.
        """
        found = self.find(ids)
        for one in sorted({int(i) for i in ids}):
            if one not in found:
                raise DocumentStoreError(
                    f"{self._path} has no passage {one}; it was written for another index, or for part of one"
                )
        return found

    def find(self, ids: Sequence[int]) -> Mapping[int, StoredPassage]:
        """As :meth:`read`, without those that are not there."""
        self._follow()
        wanted = sorted({int(i) for i in ids})
        found: dict[int, StoredPassage] = {}
        for start in range(0, len(wanted), _ASKED):
            part = wanted[start : start + _ASKED]
            found |= {p.document.id: p for p in self._select(f"WHERE id IN ({','.join('?' * len(part))})", part)}
        return found

    def _follow(self) -> None:
        """Opens what took the file's place, if it is of the same index: its first change gives it to its lineage."""
        if self.is_live:
            return
        try:
            found = filesystem.stat(self._path)
            if (found.st_dev, found.st_ino) == self._file:
                return
            newer = DocumentStore(self._path)
        except (FileError, DocumentStoreError):
            return  # what is open stays whole
        if newer.info.index_fingerprint != self.info.index_fingerprint:
            newer.close()
            return
        with self._lock:
            if self._closed:
                newer.close()
                return
            before, self._db, self._file = self._db, newer._db, newer._file
            self.info, self.is_live = newer.info, newer.is_live
            before.close()

    def first(self, count: int) -> list[StoredPassage]:
        """The ``count`` passages of lowest id; fewer where there are fewer. Raises DocumentStoreError."""
        return self._select("ORDER BY id LIMIT ?", [count])

    def _select(self, which: str, values: Sequence[int]) -> list[StoredPassage]:
        try:
            with self._lock:
                rows = self._db.execute(
                    f"SELECT id, text, source, successor, lead, starts FROM passages {which}",  # noqa: S608 - question marks alone
                    values,
                ).fetchall()
            return [
                StoredPassage(
                    document=Document(id=row[0], text=row[1], source=row[2], successor=row[3], lead=row[4]),
                    starts=np.frombuffer(row[5], dtype=_starts_dtype(row[1])),
                )
                for row in rows
            ]
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            cure = f"write it anew, or, if its bytes are whole, {_DISK}"
            raise DocumentStoreError(f"{self._path} cannot be read ({error}): {cure}") from error

    def close(self) -> None:
        """Closing twice is harmless."""
        with self._lock:
            self._closed = True
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def tokens_of_store(documents: DocumentStore, tried: Sequence[TokenStarts]) -> TokenStarts:
    """The first of ``tried`` whose token offsets are those that the store has for its first passages.

    PipeRAG counts windows and shifts in the store's tokens; another tokenizer would silently shift too far or too
    little. The offsets decide, not the name of the store's tokenizer: older stores have none.

    Raises:
        InvalidInputError: none does. DocumentStoreError: a damaged file.
    """
    stored = documents.first(_COMPARED)
    texts = [passage.document.text for passage in stored]
    counts: list[int] = []
    for token_starts in tried:
        found = token_starts(texts)
        if len(found) == len(stored) and all(
            np.array_equal(theirs, passage.starts) for theirs, passage in zip(found, stored, strict=True)
        ):
            return token_starts
        counts.append(sum(map(len, found)))
    name = repr(documents.info.tokenizer) if documents.info.tokenizer else "a tokenizer that it does not name"
    raise InvalidInputError(
        f"token_starts finds {' or '.join(map(str, counts))} tokens in the first {len(stored)} passages, for which the "
        f"document store has {sum(len(passage.starts) for passage in stored)} tokens of {name}; give the token_starts "
        "that the store was written with"
    )
