from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from hybridindex.errors import InvalidInputError, MissingDependencyError
from hybridindex.store.engine import locate, make_engine, writing


def test_paths_and_sqlite_urls_mean_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = tmp_path.resolve() / "c.sqlite"
    for address in ("c.sqlite", Path("c.sqlite"), "sqlite:///c.sqlite", f"sqlite:///{wanted}", str(wanted)):
        assert locate(address).path == wanted
    link = tmp_path / "link.sqlite"
    link.symlink_to(wanted)
    assert locate(link).path == wanted


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://u:secret@h/db",
        "postgres://u:secret@h/db",
        "postgresql+psycopg://u:secret@h/db",
        "postgresql://u@h/db?password=secret&sslmode=require",
    ],
)
def test_postgresql_uses_psycopg_and_never_shows_the_password(address: str) -> None:
    location = locate(address)
    assert location.url.drivername == "postgresql+psycopg"
    assert location.backend == "postgresql"
    assert "secret" in (location.url.password, location.url.query.get("password"))
    assert "secret" not in location.name


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":memory:",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///c?mode=ro",
        "sqlite:///file:c",
        "mysql://h/d",
        "://",
        "postgresql+asyncpg://h/d",
    ],
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(InvalidInputError, match="store address"):
        locate(address)


def test_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingDependencyError, match=r"pip install \'psycopg\[binary\]"):
        make_engine(locate("postgresql://h/db"), busy_timeout_s=1)


def test_a_file_that_is_missing_is_made_by_a_migration_alone(sqlite_path: Path) -> None:
    engine = make_engine(locate(sqlite_path), busy_timeout_s=1)
    with pytest.raises(OperationalError, match="unable to open"):
        engine.connect()
    assert not sqlite_path.exists()
    make_engine(locate(sqlite_path), busy_timeout_s=1, migrating=True).connect().close()
    assert sqlite_path.exists()


def test_transactions_begin_as_they_should(sqlite_path: Path) -> None:
    sqlite_path.touch()
    engine = make_engine(locate(sqlite_path), busy_timeout_s=1)
    seen: list[str] = []
    try:
        for target in (engine, writing(engine)):
            with target.connect() as connection:
                raw = connection.connection.driver_connection
                assert raw is not None
                raw.set_trace_callback(seen.append)
                connection.execute(text("SELECT 1"))
                assert raw.in_transaction
                connection.rollback()
                raw.set_trace_callback(None)
    finally:
        engine.dispose()
    assert [s for s in seen if s != "SELECT 1"] == ["BEGIN", "ROLLBACK", "BEGIN IMMEDIATE", "ROLLBACK"]


def test_sqlite_connections_are_durable_and_keep_references(sqlite_path: Path) -> None:
    sqlite_path.touch()
    engine = make_engine(locate(sqlite_path), busy_timeout_s=1.5)
    try:
        with engine.connect() as connection:
            pragmas = {
                p: connection.exec_driver_sql(f"PRAGMA {p}").scalar_one()
                for p in ("foreign_keys", "synchronous", "busy_timeout")
            }
    finally:
        engine.dispose()
    assert pragmas == {"foreign_keys": 1, "synchronous": 2, "busy_timeout": 1500}
