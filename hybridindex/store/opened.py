"""One opening of a store, and whether its files still lie where they were opened.

SQLite goes on writing to a file that was deleted, moved or replaced, and nobody who opens the path sees it. So the
files at the path are compared, by device and inode, with those that were opened. The write-ahead log and the shared
memory beside the database count, too: a commit is in the log, and locks are in the memory. A server watches its own
files.
"""

from __future__ import annotations

import errno
import sqlite3
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Final

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from hybridindex import filesystem
from hybridindex.errors import FileError, StoreError
from hybridindex.store.engine import Location, make_engine, reading, writing
from hybridindex.store.faults import translated
from hybridindex.store.migrate import file_lock, upgrade_store

__all__ = ["OpenedStore"]

#: Device and inode.
_Identity = tuple[int, int]
_DATABASE: Final = ""
_LOG: Final = "-wal"
_SHARED: Final = "-shm"
_FILES: Final = (_DATABASE, _LOG, _SHARED)
#: A file is not there, or what should be its folder is a file.
_MISSING: Final = frozenset({errno.ENOENT, errno.ENOTDIR})


class OpenedStore:
    """The engine of a store that was created or upgraded, and its files, which stay open until :meth:`close`."""

    def __init__(self, location: Location, engine: Engine, revision: str, busy_timeout_s: float) -> None:
        """For :meth:`open`.

        Raises:
            StoreError: it cannot be read, or its files change meanwhile.
        """
        self._location = location
        self._busy_timeout_s = busy_timeout_s
        self.engine = engine
        #: The same, for transactions that only read, and for those that write.
        self.reader = reading(engine)
        self.writer = writing(engine)
        #: Version of the schema, as Alembic names it.
        self.revision = revision
        #: Transactions under way; guarded by who owns this.
        self.users = 0
        before = _files(location.path)
        #: Of SQLite: while one connection is open, it keeps the files beside the database.
        self._kept = engine.raw_connection() if location.path is not None else None
        try:
            if self._kept is not None:
                # They are made by the first read.
                self._kept.cursor().execute("SELECT version_num FROM alembic_version")
            self._files = _files(location.path)
            if before.get(_DATABASE) != self._files.get(_DATABASE) or len(self._files) not in (0, len(_FILES)):
                raise StoreError(f"control store {location.name}: its files changed while it was opened; try again")
        except BaseException:
            self.disconnect()
            raise

    @classmethod
    def open(cls, location: Location, *, busy_timeout_s: float) -> OpenedStore:
        """Raises as :meth:`hybridindex.store.control.ControlStore.open`."""
        revision = upgrade_store(location, busy_timeout_s=busy_timeout_s)
        engine = make_engine(location, busy_timeout_s=busy_timeout_s)
        try:
            with translated(location.name):
                return cls(location, engine, revision, busy_timeout_s)
        except BaseException:
            engine.dispose()
            raise

    def check_place(self) -> None:
        """Raises StoreError: a file was deleted, moved or replaced since it was opened, or its folder was; or it cannot
        be looked at."""
        now = _files(self._location.path)
        changed = next((suffix for suffix, opened in self._files.items() if now.get(suffix) != opened), None)
        if changed is None:
            return
        file = f"{self._location.path}{changed}"
        what = "another file is in its place" if changed in now else "it was deleted or moved away"
        raise StoreError(
            f"control store {self._location.name}: {file} was open, and {what}: further writes would be lost, so this "
            "call is refused. The next call opens the file at that path, or creates a new store: to keep the old one, "
            "or a copy, rename it into place first"
        )

    def close(self) -> None:
        """Closes connections; what they committed goes with the database, wherever it was moved.

        Where files beside the database were removed, SQLite itself writes what they held into it. Where another
        database took its place, what is left of them is moved aside: SQLite would read it as part of that one.

        Raises:
            StoreError: that failed. A second call goes on.
        """
        path = self._location.path
        with translated(self._location.name):
            if path is not None and self._left(_files(path)):
                # Nobody makes another database here meanwhile.
                with file_lock(path, self._busy_timeout_s):
                    self._move_aside(path)
        self.disconnect()

    def disconnect(self) -> None:
        """Closes connections, and leaves all files as they are."""
        if self._kept is not None:
            self._kept.close()
        self.engine.dispose()

    def _left(self, now: dict[str, _Identity]) -> list[str]:
        """Files beside the database that are still there, while it is not."""
        gone = now.get(_DATABASE) != self._files[_DATABASE]
        return [suffix for suffix in (_LOG, _SHARED) if gone and now.get(suffix) == self._files[suffix]]

    def _move_aside(self, path: Path) -> None:
        now = _files(path)
        left = self._left(now)
        if _DATABASE not in now and len(left) == 2:
            # Nobody can have opened another database beside them. SQLite does it at closing only in the same place.
            with suppress(SQLAlchemyError, sqlite3.Error), closing(self.engine.raw_connection()) as connection:
                connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.disconnect()
        for suffix in left:
            file = Path(f"{path}{suffix}")
            if suffix == _LOG and filesystem.stat(file).st_size:
                aside = (Path(f"{path}.replaced{number or ''}{_LOG}") for number in count())
                filesystem.replace(file, next(name for name in aside if not filesystem.exists(name)))
            else:
                filesystem.unlink(file)


def _files(path: Path | None) -> dict[str, _Identity]:
    """Those that are there. Raises StoreError: it cannot be seen."""
    found: dict[str, _Identity] = {}
    for suffix in () if path is None else _FILES:
        try:
            status = filesystem.stat(f"{path}{suffix}")
        except FileError as error:
            if error.errno in _MISSING:
                continue
            raise StoreError(f"control store {path}: {error}") from error
        found[suffix] = (status.st_dev, status.st_ino)
    return found
