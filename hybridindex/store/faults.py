"""Database exceptions to the errors of :mod:`hybridindex.errors`. Names the store in every message."""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from hybridindex.errors import FileError, StoreError, StoreLockedError, io_cure

__all__ = ["is_of_one_row", "store_fault", "translated"]

#: PostgreSQL: lock_not_available, query_canceled, deadlock_detected, serialization_failure.
_PG_LOCKED = frozenset({"55P03", "57014", "40P01", "40001"})
_ROOM, _RIGHT, _DISK = (io_cure(OSError(number, "")) for number in (errno.ENOSPC, errno.EPERM, errno.EIO))
_SQLITE_WORDS = {
    sqlite3.SQLITE_READONLY: f"it or its directory is read-only: {_RIGHT}",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; its directory must exist and be writable",
    sqlite3.SQLITE_PERM: f"access is denied: {_RIGHT}",
    sqlite3.SQLITE_FULL: f"the disk is full; nothing was written: {_ROOM}",
    # A full disk shows as this too, where the file of shared memory beside the store has no room.
    sqlite3.SQLITE_IOERR: (
        f"the disk is full, or reports an input/output error; nothing was written: {_ROOM}; or {_DISK}"
    ),
    sqlite3.SQLITE_CORRUPT: "the file is corrupt; restore it from a copy, or move it away to begin anew",
    sqlite3.SQLITE_NOTADB: "the file is not a SQLite database; restore it from a copy, or move it away to begin anew",
}


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn errors of database and files raised inside, and those of damaged rows, into StoreError or StoreLockedError
    that name ``where``."""
    try:
        yield
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(
            f"control store {where}: a row is damaged ({type(error).__name__}: {error}); restore the store from a "
            "copy, or move it away to begin anew"
        ) from error
    except FileError as error:
        raise StoreError(f"control store {where}: {error}") from error
    except (SQLAlchemyError, sqlite3.Error) as error:  # the driver's own come from connection set-up
        raise store_fault(error, where) from error


def store_fault(error: SQLAlchemyError | sqlite3.Error, where: str) -> StoreError:
    """The StoreError that says what ``error`` means for the store at ``where``."""
    if isinstance(error, PoolTimeoutError):
        return StoreLockedError(f"control store {where}: all connections of this process are busy")
    cause = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None)
    if isinstance(code, int):
        primary = code & 0xFF
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreLockedError(f"control store {where}: another process holds it; try again, or raise the timeout")
        if primary in _SQLITE_WORDS:
            return StoreError(f"control store {where}: {_SQLITE_WORDS[primary]} ({cause})")
    if getattr(cause, "sqlstate", None) in _PG_LOCKED:
        return StoreLockedError(f"control store {where}: another process holds it ({_first_line(cause)})")
    return StoreError(f"control store {where}: {_first_line(cause)}")


def is_of_one_row(error: StoreError) -> bool:
    """Whether ``error`` is damage of a row, and others of its store can be read."""
    cause = error.__cause__
    of_database = isinstance(cause, SQLAlchemyError | sqlite3.Error | FileError)
    return not of_database or "Could not decode to UTF-8" in str(cause)


def _first_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
