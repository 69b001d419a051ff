"""Addresses of stores and engines for them: URL parsing, connection settings, explicit transactions.

SQLite: WAL, foreign keys on, ``synchronous=FULL`` (a committed plan survives a power cut), a busy timeout, explicit
``BEGIN``: the driver's own transaction control is switched off, and the engine's begin hook says ``BEGIN IMMEDIATE``
for writers, so that a writer waits at the start and never fails half-way. WAL needs shared memory and
working file locks: network file systems are not supported.

PostgreSQL: everything lives in a schema of its own (``hybridindex``), so that a shared database is safe; lock waits are
bounded by the same timeout. Readers see the state of one moment, as those of SQLite do: rows of a profile do not go
between two statements.
"""

from __future__ import annotations

import os
import sqlite3
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool

from hybridindex import filesystem
from hybridindex.errors import InvalidInputError, MissingDependencyError, how_to_install

__all__ = ["PG_SCHEMA", "Location", "locate", "make_engine", "reading", "writing"]

PG_SCHEMA: Final = "hybridindex"
_BEGIN: Final = "hybridindex_begin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A parsed store address."""

    backend: Literal["sqlite", "postgresql"]
    url: URL
    #: For messages: the file, or the URL without its password.
    name: str
    #: The SQLite file, links resolved; ``None`` on PostgreSQL.
    path: Path | None


def locate(url_or_path: str | os.PathLike[str]) -> Location:
    """Parse a file path, ``sqlite:///file`` or ``postgresql[+psycopg]://...``; touches nothing.

    Raises:
        InvalidInputError: another database, an in-memory SQLite, or an address that cannot be read.
    """
    text = os.fspath(url_or_path)
    if "://" not in text:
        if not text or text == ":memory:":
            raise InvalidInputError(f"store address {text!r}: give the path of a file, or a postgresql:// URL")
        return _sqlite(text)
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:
        raise InvalidInputError("store address: not a URL that can be read; give a path or postgresql://…") from error
    # Of a server, a password may stand in the query, too.
    bare = url if url.get_backend_name() == "sqlite" else url.set(query={})
    shown = bare.render_as_string(hide_password=True)
    if url.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        url = url.set(drivername="postgresql+psycopg")
        return Location(backend="postgresql", url=url, name=shown, path=None)
    if url.drivername in ("sqlite", "sqlite+pysqlite"):
        if not url.database or url.database == ":memory:" or url.database.startswith("file:") or url.query:
            raise InvalidInputError(f"store address {shown!r}: only plain files, as in sqlite:///dir/control.sqlite")
        return _sqlite(url.database)
    raise InvalidInputError(f"store address {shown!r}: use a file path, sqlite:/// or postgresql+psycopg://")


def _sqlite(text: str) -> Location:
    # Links are resolved: SQLite puts its WAL beside the real file, so our lock file must stand there too.
    path = Path(os.path.realpath(text))
    return Location(backend="sqlite", url=URL.create("sqlite", database=str(path)), name=str(path), path=path)


def make_engine(location: Location, *, busy_timeout_s: float, migrating: bool = False) -> Engine:
    """An engine with the settings above. ``migrating``: unpooled, makes a file that is missing, and leaves SQLite's
    foreign keys off until the final check.

    Raises:
        MissingDependencyError: PostgreSQL without its driver.
    """
    pool: dict[str, Any] = {"poolclass": NullPool} if migrating else {"pool_timeout": busy_timeout_s}
    if location.backend == "sqlite":
        connect = partial(_connect_sqlite, location, busy_timeout_s, make=migrating)
        engine = create_engine(location.url, creator=connect, **pool)
        _prepare_sqlite(engine, foreign_keys=not migrating)
        return engine
    if not migrating:
        pool["pool_pre_ping"] = True
    try:
        engine = create_engine(location.url, connect_args={"connect_timeout": max(2, round(busy_timeout_s))}, **pool)
    except ImportError as error:
        raise MissingDependencyError(f"PostgreSQL needs psycopg: {how_to_install('postgres')}") from error
    _prepare_postgresql(engine, lock_timeout_ms=max(1, round(busy_timeout_s * 1000)))
    return engine


def reading(engine: Engine) -> Engine:
    """The same engine and pool, all statements of whose transactions see the same state."""
    # SQLite's transactions do by themselves.
    return engine.execution_options(isolation_level="REPEATABLE READ") if engine.name == "postgresql" else engine


def writing(engine: Engine) -> Engine:
    """The same engine and pool, whose transactions take SQLite's write lock when they begin."""
    return engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})


def _connect_sqlite(location: Location, timeout_s: float, *, make: bool) -> sqlite3.Connection:
    assert location.path is not None
    uri = f"{location.path.as_uri()}?mode={'rwc' if make else 'rw'}"
    # The pool hands a connection to one thread at a time.
    with filesystem.performing("sqlite", location.path):
        return sqlite3.connect(uri, uri=True, timeout=timeout_s, check_same_thread=False)


def _prepare_sqlite(engine: Engine, *, foreign_keys: bool) -> None:
    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, record: object) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself; _on_begin does
        connection.execute(f"PRAGMA foreign_keys={'ON' if foreign_keys else 'OFF'}")
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))


def _prepare_postgresql(engine: Engine, *, lock_timeout_ms: int) -> None:
    # insert=True: before SQLAlchemy asks for the default schema.
    @event.listens_for(engine, "connect", insert=True)
    def _on_connect(connection: Any, record: object) -> None:
        autocommit, connection.autocommit = connection.autocommit, True
        with connection.cursor() as cursor:
            cursor.execute(f"SET search_path = {PG_SCHEMA}")
            cursor.execute(f"SET lock_timeout = {lock_timeout_ms}")
        connection.autocommit = autocommit
