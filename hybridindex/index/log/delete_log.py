"""The log of deletions of one generation: ``deletes.log``, records of ids, one after the other, each with a checksum.

    64 bytes   magic, version, XXH3-128 of the rows they are of; XXH3-64 of the 56 bytes before
    each record, a multiple of 8 bytes:
        8      magic
        8      number, from 1
        8      how many ids
        8      XXH3-64 of number, how many, and the ids
        8 * n  ids that were there and are deleted from then on, int64

Numbers are little-endian. A record is synced before anybody is told, and before the next one is written: only the last
one can be torn. What is no record and has none behind it was torn, and never acknowledged; with one behind it, it is
damage, and rows would come back.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from hybridindex import filesystem
from hybridindex.errors import CorruptIndexError, FileError, MissingFileError, UnsupportedIndexError
from hybridindex.index.storage.generation import unreadable
from hybridindex.index.storage.manifest import DELETE_LOG
from hybridindex.types import I64

__all__ = ["DELETE_LOG", "Records", "append_record", "log_state", "read_records", "render_log"]

_MAGIC, _VERSION = b"HXDELLOG", 1
_HEAD = struct.Struct("<8sII16s24xQ")
_RECORD_MAGIC = b"HXDELREC"
_RECORD = struct.Struct("<8sQQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What was read."""

    #: Of each record, (n,) int64.
    ids: list[I64]
    #: Where the last whole record ends, bytes; 0: there is no log.
    end: int
    #: Bytes behind it, of a write that was interrupted.
    torn: int


def log_state(path: Path) -> tuple[int, int]:
    """What differs when the log does: its size in bytes, 0: there is none; and when it was changed."""
    try:
        found = filesystem.stat(path)
    except MissingFileError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def read_records(path: Path, rows_xxh3_128: str) -> Records:
    """All records.

    Args:
        rows_xxh3_128: digest of the rows that the ids have to be of.

    Raises:
        CorruptIndexError: damaged, or of other rows. UnsupportedIndexError: of a newer version. UnreadableIndexError.
    """
    try:
        raw = filesystem.read_bytes(path)
    except MissingFileError:
        return Records(ids=[], end=0, torn=0)
    except FileError as error:
        raise unreadable(error, path) from error
    _check_head(raw, path, rows_xxh3_128)
    ids: list[I64] = []
    at = _HEAD.size
    while (found := _record_at(raw, at, len(ids) + 1)) is not None:
        ids.append(found)
        at += _RECORD.size + found.nbytes
    if any(_record_at(raw, later, None) is not None for later in _magics(raw, at + 1)):
        raise CorruptIndexError(
            f"{path} is damaged at byte {at}, behind record {len(ids)}, and has whole records behind that; the "
            "deletions between are lost, so that rows would come back: restore the file, or cut it there "
            f"(truncate -s {at} {path.name}) and delete again what was deleted since"
        )
    return Records(ids=ids, end=at, torn=len(raw) - at)


def append_record(path: Path, rows_xxh3_128: str, ids: I64, *, end: int, number: int) -> int:
    """Writes one record behind ``end``, in the place of what was torn there, and syncs it; returns where it ends.

    Where it fails, nothing was written as far as that can be undone; the next call writes over what is left.

    Raises:
        FileError: the record is not on disk. DiskFullError: for want of room.
    """
    if not end:
        log = render_log(rows_xxh3_128, ids)
        filesystem.replace_file(path, log)
        return len(log)
    record = _render_record(ids, number)
    with filesystem.File(path, "r+") as file:
        try:
            file.cut(end)
            file.write_at(record, end)
            file.sync()
        except BaseException:
            file.cut(end)
            raise
    return end + len(record)


def render_log(rows_xxh3_128: str, ids: I64) -> bytes:
    """A log with one record, number 1."""
    head = _HEAD.pack(_MAGIC, _VERSION, 0, bytes.fromhex(rows_xxh3_128), 0)[:-8]
    return head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little") + _render_record(ids, 1)


def _render_record(ids: I64, number: int) -> bytes:
    body = np.ascontiguousarray(ids, dtype="<i8").tobytes()
    said = struct.pack("<QQ", number, len(ids))
    return _RECORD.pack(_RECORD_MAGIC, number, len(ids), xxhash.xxh3_64_intdigest(said + body)) + body


def _check_head(raw: bytes, path: Path, rows_xxh3_128: str) -> None:
    if len(raw) < _HEAD.size or raw[:8] != _MAGIC:
        raise CorruptIndexError(f"{path} is no log of deletions")
    _, version, _, rows, check = _HEAD.unpack_from(raw)
    if check != xxhash.xxh3_64_intdigest(raw[: _HEAD.size - 8]):
        raise CorruptIndexError(f"{path} differs from its own checksum in its first {_HEAD.size} bytes")
    if version > _VERSION:
        raise UnsupportedIndexError(
            f"{path} has version {version}; this hybridindex reads up to {_VERSION}: upgrade it"
        )
    if rows.hex() != rows_xxh3_128:
        raise CorruptIndexError(f"{path} is of other rows: of {rows.hex()}, and the index holds {rows_xxh3_128}")


def _record_at(raw: bytes, at: int, number: int | None) -> I64 | None:
    """The ids of the record there, which has this number, or any; None where there is none."""
    if len(raw) - at < _RECORD.size:
        return None
    magic, own, count, check = _RECORD.unpack_from(raw, at)
    body = at + _RECORD.size
    if magic != _RECORD_MAGIC or (number is not None and own != number) or count * 8 > len(raw) - body:
        return None
    if check != xxhash.xxh3_64_intdigest(raw[at + 8 : at + 24] + raw[body : body + 8 * count]):
        return None
    return np.frombuffer(raw, dtype="<i8", count=count, offset=body).astype(np.int64)


def _magics(raw: bytes, at: int) -> list[int]:
    found = []
    while (at := raw.find(_RECORD_MAGIC, at)) >= 0:
        found.append(at)
        at += 1
    return found
