"""The log of changes of one generation, ``changes.log``: what was deleted and added since it was written.

    64 bytes   magic, version, bytes of a row's code, XXH3-128 of the rows that the generation holds, a number, how many
               records at the beginning say all that had changed until that number; XXH3-64 of the 56 bytes before
    each record, a multiple of 8 bytes:
        64     magic, number, how many ids go, how many rows come, bytes of their attributes, the checksum of the record
               before (of the head, for the first), number of the last change that was on disk when this one was
               written; XXH3-64 of these 56 bytes and of what follows
        8 * m  ids whose rows go, int64
        8 * n  ids of rows that come, int64
        8 * n  their lists, int64
        codes  of the rows, then zeros up to a multiple of 8 bytes
        ...    their attributes, an Arrow IPC stream, then zeros up to a multiple of 8 bytes

Numbers are little-endian. Changes are numbered through all generations of a compacted index. Records are synced before
anybody is told of them, unless the caller does without: only those that were never synced can be torn, and a disk may
tear the first of them and keep the others. What is no record was torn, and never acknowledged, unless a record behind
it says that it was on disk: then it is damage, and rows would be lost or come back.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from hybridindex import filesystem
from hybridindex.errors import CorruptIndexError, FileError, MissingFileError, UnsupportedIndexError
from hybridindex.index.log.change import Change
from hybridindex.index.storage.generation import unreadable
from hybridindex.index.storage.manifest import CHANGE_LOG, LISTS_FILE, Manifest
from hybridindex.types import I64, U8

__all__ = ["CHANGE_LOG", "LogFile", "LogPart", "LogPlace", "LogState", "apart", "has_own", "log_file", "render_log"]

_MAGIC, _VERSION = b"HXCHANGE", 1
_HEAD = struct.Struct("<8sII16sQQ8xQ")
_RECORD_MAGIC = b"HXRECORD"
_RECORD = struct.Struct("<8sQQQQQQQ")
#: Of a record at most, so that a damaged length reads no memory away.
_MOST_BYTES = 1 << 40

#: What differs when the file does: its number on the file system, its size, when it was changed. All 0: there is none.
LogState = tuple[int, int, int]


class LogPlace(NamedTuple):
    """Behind a record."""

    #: Bytes from the beginning; 0: there is no log.
    end: int
    #: Of the last change, and its checksum.
    number: int
    check: int


class _Record(NamedTuple):
    number: int
    #: The checksum of the record before, the last change that was on disk, its own checksum, and bytes.
    before: int
    on_disk: int
    check: int
    nbytes: int
    change: Change


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """What was read."""

    changes: list[Change]
    #: The first of these say together all that had changed until change ``base``.
    base: int
    #: Where it ends.
    place: LogPlace
    #: Bytes behind it, of a write that is under way or was interrupted.
    torn: int

    def after(self, number: int) -> list[Change] | None:
        """Those after change ``number``; None: the log does not say them one by one, for it was written anew since, or
        there is no such change."""
        if not self.base <= number <= self.place.number:
            return None
        return self.changes[len(self.changes) - (self.place.number - number) :]


def apart(older: LogPart, newer: LogPart, first: int) -> tuple[int, int] | None:
    """Changes that each of two logs has, and the other has not, where ``newer`` is of the generation that was compacted
    from the other's with change ``first``; None: a log does not say them one by one any more."""
    before, after = older.after(first), newer.after(first)
    if before is None or after is None:
        return None
    pairs = enumerate(zip(before, after, strict=False))
    same = next((at for at, pair in pairs if not _are_alike(*pair)), min(len(before), len(after)))
    return len(before) - same, len(after) - same


def _are_alike(one: Change, other: Change) -> bool:
    """In all but lists, which are numbered otherwise, and codes, which may be of them."""
    same = np.array_equal(one.gone, other.gone) and np.array_equal(one.ids, other.ids)
    return same and one.attributes == other.attributes


def has_own(older: LogFile, newer: LogFile, first: int) -> bool:
    """Whether a log has changes, since a rollback, that a newer one has not; ``first``: as of :func:`apart`."""
    if not filesystem.exists(older.path):
        return False
    known = apart(older.read(), newer.read(), first)
    return known is not None and known[0] > 0


class LogFile:
    """The log of one generation. Knows nothing of what was read before."""

    def __init__(self, path: Path, *, rows_xxh3_128: str, code_size: int, nlist: int, first: int) -> None:
        """
        Args:
            rows_xxh3_128: digest of the rows of the generation.
            code_size: bytes of a row's code.
            nlist: number of lists.
            first: number of the last change that the generation was written with; 0: none.
        """
        self.path = path
        self._rows, self._code_size, self._nlist, self._first = rows_xxh3_128, code_size, nlist, first

    def state(self) -> LogState:
        """Of the file that has the name now.

        Raises:
            UnreadableIndexError.
        """
        try:
            # Opened: what a network's file system remembers of a name may be old.
            with filesystem.File(self.path, "r") as file:
                found = file.status()
        except MissingFileError:
            return 0, 0, 0
        except FileError as error:
            raise unreadable(error, self.path) from error
        return found.st_ino, found.st_size, found.st_mtime_ns

    def read(self) -> LogPart:
        """All of it.

        Raises:
            CorruptIndexError: damaged, or of other rows. UnsupportedIndexError: of a newer version.
            UnreadableIndexError.
        """
        try:
            raw = filesystem.read_bytes(self.path)
        except MissingFileError:
            return LogPart(changes=[], base=self._first, place=LogPlace(0, self._first, 0), torn=0)
        except FileError as error:
            raise unreadable(error, self.path) from error
        number, n_state, check = self._head(raw)
        changes, place = self._records(raw, LogPlace(_HEAD.size, number, check), 0, n_state)
        if len(changes) < n_state:
            raise CorruptIndexError(
                f"{self.path} is damaged at byte {place.end}, in what it was written with; restore the file"
            )
        behind = (self._record(raw, later) for later in _magics(raw, place.end + 1))
        if any(found is not None and found.on_disk > place.number for found in behind):
            raise CorruptIndexError(
                f"{self.path} is damaged at byte {place.end}, behind change {place.number}, and has whole changes "
                "behind that; those between are lost, so that rows would be missing or come back: restore the file, "
                f"or cut it there (truncate -s {place.end} {self.path.name}) and repeat what was changed since"
            )
        return LogPart(changes=changes, base=number, place=place, torn=len(raw) - place.end)

    def read_on(self, place: LogPlace) -> LogPart:
        """What comes behind ``place``, of a file that was not replaced since.

        Raises:
            UnreadableIndexError.
        """
        try:
            with filesystem.File(self.path, "r") as file:
                file.seek(place.end)
                raw = file.readall()
        except FileError as error:
            raise unreadable(error, self.path) from error
        changes, found = self._records(raw, place, place.end, 0)
        torn = len(raw) - (found.end - place.end)
        return LogPart(changes=changes, base=place.number, place=found, torn=torn)

    def append(
        self, changes: Sequence[Change], place: LogPlace, *, sync: bool = True, on_disk: int | None = None
    ) -> LogPlace:
        """Writes changes behind ``place``, over what was torn there, and syncs them; returns where they end.

        Where it fails, nothing was written as far as that can be undone; the next call writes over what is left.

        Args:
            sync: False: a power cut may take them away.
            on_disk: number of the last change that no power cut takes away; None: the last one.

        Raises:
            FileError: the changes are not on disk. DiskFullError: for want of room.
        """
        if not place.end:
            log = render_log(changes, rows_xxh3_128=self._rows, code_size=self._code_size, number=place.number)
            try:
                filesystem.replace_file(self.path, log)
            except BaseException:
                filesystem.discard(self.path)
                raise
            return self._end_of(log)
        raw, after = _render(changes, place, on_disk=place.number if on_disk is None else on_disk)
        with filesystem.File(self.path, "r+") as file:
            try:
                file.cut(place.end)
                file.write_at(raw, place.end)
                if sync:
                    file.sync()
            except BaseException:
                file.cut(place.end)
                raise
        return after

    def sync(self) -> None:
        """What is in the file, and its name, survive a power cut, whoever wrote them."""
        if filesystem.exists(self.path):
            raw = filesystem.read_bytes(self.path)
            start, end = self._unsure(raw)
            with filesystem.File(self.path, "r+") as file:
                # Where a sync failed, the system may take for written what is on no disk; not what is written again.
                file.write_at(raw[start:end], start)
                file.sync()
            filesystem.sync_folder(self.path.parent)

    def _unsure(self, raw: bytes) -> tuple[int, int]:
        """Where the records begin and end of which the last one does not say that they were on disk."""
        number, _, _ = self._head(raw)
        start, end, ends = _HEAD.size, _HEAD.size, list[tuple[int, int]]()
        on_disk = number
        while (found := self._record(raw, end)) is not None:
            end += found.nbytes
            ends.append((found.number, end))
            on_disk = max(on_disk, found.on_disk)
        start = max((at for each, at in ends if each <= on_disk), default=start)
        return start, end

    def renew(self, place: LogPlace) -> None:
        """Writes all until ``place`` anew: where a sync failed, another one says nothing of what came before."""
        if place.end:
            filesystem.replace_file(self.path, filesystem.read_bytes(self.path)[: place.end])

    def rewrite(self, state: Sequence[Change], number: int) -> LogPlace:
        """Puts a log in the place of this one that says in few records what has changed until ``number``."""
        log = render_log([], rows_xxh3_128=self._rows, code_size=self._code_size, number=number, state=state)
        filesystem.replace_file(self.path, log)
        return self._end_of(log)

    def _end_of(self, log: bytes) -> LogPlace:
        number, n_state, check = self._head(log)
        return self._records(log, LogPlace(_HEAD.size, number, check), 0, n_state)[1]

    def _head(self, raw: bytes) -> tuple[int, int, int]:
        if len(raw) < _HEAD.size or raw[:8] != _MAGIC:
            raise CorruptIndexError(f"{self.path} is not a log of changes")
        _, version, code_size, rows, number, n_state, check = _HEAD.unpack_from(raw)
        if check != xxhash.xxh3_64_intdigest(raw[: _HEAD.size - 8]):
            raise CorruptIndexError(f"{self.path} differs from its own checksum in its first {_HEAD.size} bytes")
        if version > _VERSION:
            raise UnsupportedIndexError(
                f"{self.path} has version {version}; this hybridindex reads up to {_VERSION}: upgrade it"
            )
        if rows.hex() != self._rows or code_size != self._code_size:
            raise CorruptIndexError(
                f"{self.path} is of other rows: of {rows.hex()} with {code_size} bytes each, and the index holds "
                f"{self._rows} with {self._code_size}"
            )
        return number, n_state, check

    def _records(self, raw: bytes, place: LogPlace, start: int, n_state: int) -> tuple[list[Change], LogPlace]:
        """The records from ``place`` on, and where they end; ``raw`` begins at byte ``start`` of the file. The first
        ``n_state`` have the number of ``place``."""
        changes: list[Change] = []
        while (found := self._record(raw, place.end - start)) is not None:
            if found.number != place.number + (len(changes) >= n_state) or found.before != place.check:
                break
            changes.append(found.change)
            place = LogPlace(place.end + found.nbytes, found.number, found.check)
        return changes, place

    def _record(self, raw: bytes, at: int) -> _Record | None:
        """The record there; None: there is none."""
        if at < 0 or len(raw) - at < _RECORD.size:
            return None
        magic, number, n_gone, n_rows, n_attributes, before, on_disk, check = _RECORD.unpack_from(raw, at)
        code_bytes = n_rows * self._code_size
        nbytes = _RECORD.size + 8 * n_gone + 16 * n_rows + _padded(code_bytes) + _padded(n_attributes)
        if magic != _RECORD_MAGIC or nbytes > min(len(raw) - at, _MOST_BYTES):
            return None
        digest = xxhash.xxh3_64(memoryview(raw)[at : at + _RECORD.size - 8])
        digest.update(memoryview(raw)[at + _RECORD.size : at + nbytes])
        if digest.intdigest() != check:
            return None
        at += _RECORD.size
        gone = _integers(raw, at, n_gone)
        ids = _integers(raw, at := at + 8 * n_gone, n_rows)
        lists = _integers(raw, at := at + 8 * n_rows, n_rows)
        if n_rows and (ids.min() < 0 or lists.min() < 0 or lists.max() >= self._nlist):
            raise CorruptIndexError(
                f"{self.path} is damaged: change {number} has ids or lists that cannot be; expected ids of 0 or more, "
                f"in lists 0 to {self._nlist - 1}"
            )
        codes: U8 = np.frombuffer(raw, np.uint8, code_bytes, at := at + 8 * n_rows).reshape(n_rows, self._code_size)
        attributes = raw[(at := at + _padded(code_bytes)) : at + n_attributes]
        change = Change(gone=gone, ids=ids, lists=lists, codes=codes, attributes=attributes)
        return _Record(number, before, on_disk, check, nbytes, change)


def render_log(
    changes: Sequence[Change],
    *,
    rows_xxh3_128: str,
    code_size: int,
    number: int,
    state: Sequence[Change] = (),
) -> bytes:
    """A whole log: what had changed until ``number``, and the changes since."""
    head = _HEAD.pack(_MAGIC, _VERSION, code_size, bytes.fromhex(rows_xxh3_128), number, len(state), 0)[:-8]
    check = xxhash.xxh3_64_intdigest(head)
    place = LogPlace(_HEAD.size, number, check)
    said, place = _render(state, place, step=0)
    return b"".join([head, check.to_bytes(8, "little"), said, _render(changes, place)[0]])


def _render(changes: Sequence[Change], place: LogPlace, *, step: int = 1, on_disk: int = 0) -> tuple[bytes, LogPlace]:
    """The bytes of records behind ``place``, each with the number before and ``step``, and where they end."""
    parts: list[bytes] = []
    for change in changes:
        number = place.number + step
        counts = (len(change.gone), len(change.ids), len(change.attributes))
        head = _RECORD.pack(_RECORD_MAGIC, number, *counts, place.check, on_disk, 0)[:-8]
        codes = np.ascontiguousarray(change.codes).tobytes()
        body = [np.ascontiguousarray(each, dtype="<i8").tobytes() for each in (change.gone, change.ids, change.lists)]
        for part in (codes, change.attributes):
            body += [part, bytes(_padded(len(part)) - len(part))]
        digest = xxhash.xxh3_64(head)
        for part in body:
            digest.update(part)
        check = digest.intdigest()
        nbytes = _RECORD.size + sum(map(len, body))
        parts += [head, check.to_bytes(8, "little"), *body]
        place = LogPlace(place.end + nbytes, number, check)
    return b"".join(parts), place


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _integers(raw: bytes, at: int, count: int) -> I64:
    return np.frombuffer(raw, dtype="<i8", count=count, offset=at).astype(np.int64)


def _magics(raw: bytes, at: int) -> list[int]:
    found = []
    while (at := raw.find(_RECORD_MAGIC, at)) >= 0:
        found.append(at)
        at += 1
    return found


def log_file(folder: Path, manifest: Manifest) -> LogFile:
    """That of the generation in ``folder``."""
    return LogFile(
        folder / CHANGE_LOG,
        rows_xxh3_128=manifest.files[LISTS_FILE].xxh3_128,
        code_size=manifest.code_size,
        nlist=manifest.nlist,
        first=int(manifest.notes.get("changes", 0)),
    )
