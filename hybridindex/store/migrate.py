"""Creates or upgrades a store when it is opened; the first process does it, others wait.

SQLite: under an exclusive lock file (``<file>.lock``), after a copy of the old content through SQLite's backup API
(``<file>.before-<revision>``). PostgreSQL: under an advisory lock. Both: the whole upgrade is one transaction, so a
failure or a crash leaves the old content. A store of a newer version is refused.

The SQLite file itself is only ever touched through SQLite: closing any other descriptor of it would drop the locks that
this process holds on it.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from filelock import Timeout
from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import SQLAlchemyError

from hybridindex import filesystem
from hybridindex.errors import FileError, StoreError, StoreLockedError, StoreVersionError
from hybridindex.processes import keep_to_writers, lock_file
from hybridindex.store.engine import PG_SCHEMA, Location, make_engine, writing
from hybridindex.store.faults import store_fault, translated

# Alembic is loaded only where something is to be migrated.
if TYPE_CHECKING:
    from alembic.config import Config

__all__ = ["SCRIPTS", "alembic_config", "file_lock", "upgrade_store"]

#: Folder of ``env.py`` and ``versions/``.
SCRIPTS: Final = Path(__file__).parents[1] / "migrations"
#: Marks a SQLite file as ours ("hybx"); ``file(1)`` shows it.
APPLICATION_ID: Final = 0x68796278
#: Key of the advisory lock, of the same letters.
_ADVISORY_KEY: Final = 0x68796278
#: Alembic's ``context`` and ``op`` are global to the process.
_alembic_lock = threading.Lock()


def alembic_config(connection: Connection | None = None, *, scripts: Path = SCRIPTS) -> Config:
    """Alembic's configuration, without a file."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def upgrade_store(location: Location, *, busy_timeout_s: float, scripts: Path = SCRIPTS) -> str:
    """Create or upgrade the store and return its revision.

    Raises:
        StoreVersionError: written by a newer version.
        StoreLockedError: another process migrated or wrote for longer than ``busy_timeout_s``.
        StoreError: not a store, corrupt, not writable, or an upgrade that failed (the old content is intact).
    """
    engine = make_engine(location, busy_timeout_s=busy_timeout_s, migrating=True)
    try:
        if location.path is not None:
            _check_place(location.path)
            with file_lock(location.path, busy_timeout_s), translated(location.name):
                return _upgrade_sqlite(engine, location.path, scripts)
        with translated(location.name):
            return _upgrade_postgresql(engine, location.name, scripts)
    finally:
        engine.dispose()


def _check_place(path: Path) -> None:
    try:
        is_folder, above = filesystem.is_dir(path), filesystem.is_dir(path.parent)
    except FileError as error:
        raise StoreError(f"control store {path}: {error}") from error
    if is_folder:
        raise StoreError(f"control store {path}: a directory; give the path of a file in it, like control.sqlite")
    if not above:
        raise StoreError(f"control store {path}: the directory {path.parent} does not exist; make it first")


@contextmanager
def file_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Held by who makes, upgrades or clears away the store at ``path``. Raises StoreError, StoreLockedError."""
    lock = lock_file(Path(f"{path}.lock"), timeout_s=timeout_s)
    try:
        lock.acquire(poll_interval=0.01)
    except Timeout as error:
        message = f"control store {path}: another process held {path}.lock for {timeout_s:g} s"
        raise StoreLockedError(message) from error
    except FileError as error:
        message = f"control store {path}: its directory must be writable, on a file system with locks ({error})"
        raise StoreError(message) from error
    try:
        yield
    finally:
        lock.release()


def _make_missing(path: Path) -> None:
    try:
        if not filesystem.exists(path):
            # Made before SQLite does: it gives its other files this mode. Nobody else has it open yet.
            filesystem.open_for_writing(path, "x", permissions=keep_to_writers(path)).close()
    except FileError as error:
        raise StoreError(f"control store {path}: it cannot be made: {error}") from error


def _keep_to_writers(path: Path) -> None:
    """SQLite locks bytes of its files, which whoever can read them can lock, too."""
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        keep_to_writers(name)


def _upgrade_sqlite(engine: Engine, path: Path, scripts: Path) -> str:
    """Held under the file lock."""
    _make_missing(path)
    with engine.connect() as connection:
        tables = inspect(connection).get_table_names()
        mark = connection.exec_driver_sql("PRAGMA application_id").scalar_one()
        if mark != APPLICATION_ID and (tables or mark != 0):
            raise StoreError(
                f"control store {path}: a SQLite file of another program; move it away, or give another path"
            )
        revision = _known_revision(connection, str(path), scripts)
    # Only now: the file of another program keeps its mode.
    _keep_to_writers(path)
    _use_wal(engine, path)
    head = _head(scripts)
    if revision == head:
        return head
    if revision is not None:
        _back_up(path, Path(f"{path}.before-{head}"))
    with writing(engine).begin() as connection:
        _run(connection, str(path), scripts)
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        if broken:
            raise StoreError(
                f"control store {path}: the upgrade to {head} would break {len(broken)} references; undone"
            )
        connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
    return head


def _use_wal(engine: Engine, path: Path) -> None:
    # WAL is a property of the file. Switching needs it alone, hence here under the lock and outside any transaction.
    with closing(engine.raw_connection()) as raw:
        mode = raw.cursor().execute("PRAGMA journal_mode=WAL").fetchone()
    if mode is None or mode[0] != "wal":
        raise StoreError(f"control store {path}: WAL is not available here ({mode}); use a local file system")


def _back_up(path: Path, target: Path) -> None:
    try:
        with (
            filesystem.replacing(target) as draft,
            filesystem.performing("sqlite", draft),
            closing(sqlite3.connect(path)) as source,
            closing(sqlite3.connect(draft)) as copy,
        ):
            source.backup(copy)
    except (sqlite3.Error, FileError) as error:
        raise StoreError(f"control store {path}: no copy before the upgrade, so no upgrade ({error})") from error


def _upgrade_postgresql(engine: Engine, name: str, scripts: Path) -> str:
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_KEY})
        found = connection.execute(text("SELECT 1 FROM pg_namespace WHERE nspname = :n"), {"n": PG_SCHEMA}).first()
        if found is None:
            connection.exec_driver_sql(f"CREATE SCHEMA {PG_SCHEMA}")
        revision, head = _known_revision(connection, name, scripts), _head(scripts)
        if revision is None and inspect(connection).get_table_names(schema=PG_SCHEMA):
            raise StoreError(f"control store {name}: schema {PG_SCHEMA} holds tables of another program")
        if revision != head:
            _run(connection, name, scripts)
    return head


def _versions(scripts: Path) -> list[str]:
    """All revisions, the oldest first: a file's name begins with its own."""
    return sorted(
        entry.name[:4]
        for entry in filesystem.list_folder(scripts / "versions")
        if entry.suffix == ".py" and entry.name[0].isdigit()
    )


def _head(scripts: Path) -> str:
    return _versions(scripts)[-1]


def _known_revision(connection: Connection, name: str, scripts: Path) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    if revision is not None and revision not in _versions(scripts):
        raise StoreVersionError(
            f"control store {name}: schema version {revision!r} is newer than this hybridindex knows "
            f"(up to {_head(scripts)!r}); upgrade hybridindex, or give another store"
        )
    return revision


def _run(connection: Connection, name: str, scripts: Path) -> None:
    from alembic import command

    try:
        with _alembic_lock:
            command.upgrade(alembic_config(connection, scripts=scripts), "head")
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, SQLAlchemyError):
            fault = store_fault(error, name)
            if isinstance(fault, StoreLockedError):
                raise
            why = str(fault)
        raise StoreError(f"control store {name}: the schema upgrade failed and was undone ({why})") from error
