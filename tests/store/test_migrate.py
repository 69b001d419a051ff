"""Opening: creating, upgrading, refusing; alone and with others at the same time; with a kill in the middle."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from filelock import FileLock
from sqlalchemy import create_engine, inspect, text

from hybridindex.errors import StoreError, StoreLockedError, StoreVersionError
from hybridindex.filesystem import watched_by
from hybridindex.plans.current import applied_plans, current_plan_id, latest_plan_id
from hybridindex.store import ControlStore
from hybridindex.store.engine import Location, locate, make_engine
from hybridindex.store.migrate import SCRIPTS, alembic_config, upgrade_store
from hybridindex.store.models import Base
from hybridindex.store.records import ScheduleEntry
from hybridindex.types import Profile
from tests.faults import FaultyDisk, of

Starter = Callable[..., Any]
Maker = Callable[..., Profile]

FUTURE = """
import sqlalchemy as sa
from alembic import op
revision, down_revision, branch_labels, depends_on = "{revision}", "{after}", None, None
def upgrade():
{body}
"""


#: The newest version, and the one after it.
HEAD = max(p.name[:4] for p in (SCRIPTS / "versions").glob("[0-9]*.py"))
NEXT = f"{int(HEAD) + 1:04}"


def scripts_with(folder: Path, *bodies: str) -> Path:
    """A copy of the migrations with later versions, from ``NEXT`` on, that run ``bodies``."""
    scripts = folder / "scripts %(x)s"  # a path that Alembic's configuration would interpolate
    shutil.copytree(SCRIPTS, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    for number, body in enumerate(bodies, start=int(NEXT)):
        source = FUTURE.format(revision=f"{number:04}", after=f"{number - 1:04}", body=f"    {body}")
        (scripts / "versions" / f"{number:04}_later.py").write_text(source)
    return scripts


ADD_COLUMN = "op.add_column('events', sa.Column('extra', sa.Text(), nullable=True))"
FAIL = "raise RuntimeError('broken migration')"


def columns_of(location: Location, table: str) -> set[str]:
    engine = make_engine(location, busy_timeout_s=5, migrating=True)
    try:
        return {c["name"] for c in inspect(engine).get_columns(table)}
    finally:
        engine.dispose()


def upgrade(address: str | Path, scripts: Path = SCRIPTS, *, timeout: float = 5) -> str:
    return upgrade_store(locate(address), busy_timeout_s=timeout, scripts=scripts)


def test_migrations_build_what_the_models_declare(store_url: str) -> None:
    upgrade(store_url)
    engine = make_engine(locate(store_url), busy_timeout_s=5, migrating=True)
    try:
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            assert compare_metadata(context, Base.metadata) == []
            assert set(inspect(connection).get_table_names()) == {*Base.metadata.tables, "alembic_version"}
    finally:
        engine.dispose()


def test_comparison_with_the_models_can_fail(store_url: str, tmp_path: Path) -> None:
    upgrade(store_url, scripts_with(tmp_path, ADD_COLUMN))
    engine = make_engine(locate(store_url), busy_timeout_s=5, migrating=True)
    try:
        with engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), Base.metadata) != []
    finally:
        engine.dispose()


def test_a_new_version_can_be_drafted(sqlite_path: Path, tmp_path: Path) -> None:
    scripts = scripts_with(tmp_path)
    upgrade(sqlite_path, scripts)
    engine = make_engine(locate(sqlite_path), busy_timeout_s=5, migrating=True)
    with engine.begin() as connection:
        connection.execute(text("DROP INDEX ix_profiles_index_fingerprint"))
        config = alembic_config(connection, scripts=scripts)
        command.revision(config, "add it again", autogenerate=True, rev_id=NEXT)
    engine.dispose()
    assert upgrade(sqlite_path, scripts) == NEXT
    with sqlite3.connect(sqlite_path) as connection:
        found = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'ix_profiles_index_fingerprint'")
        assert found.fetchone() == (1,)
    connection.close()


def test_versions_form_one_line() -> None:
    names = sorted(p.name for p in (SCRIPTS / "versions").glob("[0-9]*.py"))
    numbers = [f"{i:04}" for i in range(1, len(names) + 1)]
    assert [n[:4] for n in names] == numbers
    line = ScriptDirectory.from_config(alembic_config()).walk_revisions()
    assert [script.revision for script in line] == numbers[::-1]


def test_upgrade_runs_once_and_keeps_content(store_url: str, tmp_path: Path, profile_of: Maker) -> None:
    with ControlStore.open(store_url) as store:
        assert store.revision == HEAD
        saved = store.save_profile(profile_of())
    later = scripts_with(tmp_path, ADD_COLUMN)
    assert upgrade(store_url, later) == NEXT
    assert upgrade(store_url, later) == NEXT
    assert "extra" in columns_of(locate(store_url), "events")
    location = locate(store_url)
    engine = create_engine(location.url)
    prefix = "" if location.path else "hybridindex."
    with engine.connect() as connection:
        assert connection.execute(text(f"SELECT id FROM {prefix}profiles")).scalars().all() == [saved.id]
    engine.dispose()
    if location.path:
        copy = Path(f"{location.path}.before-{NEXT}")
        with ControlStore.open(copy) as before:
            assert [p.id for p in before.list_profiles()] == [saved.id]
        assert not Path(f"{copy}.tmp").exists()


def test_a_store_of_the_first_version_gets_a_schedule(store_url: str, tmp_path: Path) -> None:
    first = tmp_path / "first"
    shutil.copytree(SCRIPTS, first, ignore=shutil.ignore_patterns("__pycache__", "000[2-9]*"))
    assert upgrade(store_url, first) == "0001"
    location = locate(store_url)
    engine = make_engine(location, busy_timeout_s=5, migrating=True)
    with engine.begin() as connection:
        prefix = "" if location.path else "hybridindex."
        connection.execute(text(f"INSERT INTO {prefix}events (at, kind, data) VALUES ('t', 'kept', '{{}}')"))
    engine.dispose()
    with ControlStore.open(store_url) as store:
        assert store.revision == HEAD
        assert [e.kind for e in store.list_events()] == ["kept"]
        assert store.list_schedule() == []
        store.set_schedule(ScheduleEntry(name="nightly", kind="cron", spec="0 3 * * *", action="update"))
    with ControlStore.open(store_url) as store:
        assert [row.name for row in store.list_schedule()] == ["nightly"]


def test_rows_of_a_schedule_from_before_count_from_the_upgrade(store_url: str, tmp_path: Path) -> None:
    second = tmp_path / "second"
    shutil.copytree(SCRIPTS, second, ignore=shutil.ignore_patterns("__pycache__", "000[3-9]*"))
    assert upgrade(store_url, second) == "0002"
    location = locate(store_url)
    engine = make_engine(location, busy_timeout_s=5, migrating=True)
    with engine.begin() as connection:
        prefix = "" if location.path else "hybridindex."
        columns = "(name, kind, spec, action, enabled, last_run_at)"
        values = "('hourly', 'interval', '3600', 'update', true, '2030-01-31T12:00:00+00:00')"
        connection.execute(text(f"INSERT INTO {prefix}refresh_schedule {columns} VALUES {values}"))
    engine.dispose()
    began = datetime.now(UTC)
    with ControlStore.open(store_url) as store:
        (row,) = store.list_schedule()
    assert (row.name, row.spec, row.last_run_at) == ("hourly", "3600", "2030-01-31T12:00:00+00:00")
    assert began <= datetime.fromisoformat(row.created_at or "") <= datetime.now(UTC)


def test_events_of_the_second_version_say_which_index_they_are_about(store_url: str, tmp_path: Path) -> None:
    second = tmp_path / "second"
    shutil.copytree(SCRIPTS, second, ignore=shutil.ignore_patterns("__pycache__", "000[3-9]*"))
    assert upgrade(store_url, second) == "0002"
    location = locate(store_url)
    engine = make_engine(location, busy_timeout_s=5, migrating=True)
    payloads = [{"index": "a"}, {"index_fingerprint": "a"}, {"index": "b"}, {"index": "b", "index_fingerprint": "a"}]
    with engine.begin() as connection:
        table = f"{'' if location.path else 'hybridindex.'}events"
        for payload in [*payloads, {}, {"index": 3}]:
            row = {"data": json.dumps(payload)}
            connection.execute(text(f"INSERT INTO {table} (at, kind, data) VALUES ('t', 'x', :data)"), row)
    engine.dispose()
    with ControlStore.open(store_url) as store:
        assert [e.id for e in store.list_events(index_fingerprint="a")] == [6, 5, 2, 1]
        assert [e.id for e in store.list_events(index_fingerprint="b")] == [6, 5, 4, 3]
        assert len(store.list_events()) == 6


def test_rows_of_the_first_version_with_digests_are_whole(sqlite_path: Path, tmp_path: Path) -> None:
    """A later version that adds a column or changes rows, and leaves their digests, makes them damaged: see
    ``hybridindex/migrations/__init__.py``."""
    sixth = tmp_path / "sixth"
    later = [p.name for p in (SCRIPTS / "versions").glob("[0-9]*.py") if p.name > "0007"]
    shutil.copytree(SCRIPTS, sixth, ignore=shutil.ignore_patterns("__pycache__", *later))
    assert upgrade(sqlite_path, sixth) == "0006"
    with sqlite3.connect(sqlite_path) as connection:
        connection.executescript(Path(__file__).with_name("rows_0006.sql").read_text())
    connection.close()
    with ControlStore.open(sqlite_path) as store:
        store.check_invariants()
        assert [row.id for row in store.list_profiles()] == [1, 2]
        assert len(store.list_plans()) == len(store.list_events()) == len(store.list_schedule()) == 1


@pytest.mark.parametrize("forgets", [True, False])
def test_a_version_that_changes_rows_drops_their_digests(sqlite_path: Path, tmp_path: Path, forgets: bool) -> None:
    with ControlStore.open(sqlite_path) as store:
        store.record_event("test", {"old": 1})
    digest = "" if forgets else ", digest = NULL"
    later = scripts_with(tmp_path, f"""op.execute("UPDATE events SET data = '{{}}'{digest}")""")
    assert upgrade(sqlite_path, later) == NEXT
    with sqlite3.connect(sqlite_path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (HEAD,))
    connection.close()
    with ControlStore.open(sqlite_path) as store:
        if forgets:
            with pytest.raises(StoreError, match=r"event 1 \(test\): damaged"):
                store.list_events()
        else:
            assert [event.payload for event in store.list_events()] == [{}]


def test_failed_upgrade_leaves_the_old_content(store_url: str, tmp_path: Path, profile_of: Maker) -> None:
    with ControlStore.open(store_url) as store:
        saved = store.save_profile(profile_of())
    with pytest.raises(StoreError, match=r"upgrade failed and was undone \(RuntimeError: broken migration\)"):
        upgrade(store_url, scripts_with(tmp_path, ADD_COLUMN, FAIL))
    assert "extra" not in columns_of(locate(store_url), "events")
    with ControlStore.open(store_url) as store:
        assert store.revision == HEAD
        assert [p.id for p in store.list_profiles()] == [saved.id]


def test_upgrade_that_breaks_references_is_undone(sqlite_path: Path, tmp_path: Path, profile_of: Maker) -> None:
    with ControlStore.open(sqlite_path) as store:
        store.save_profile(profile_of())
    with pytest.raises(StoreError, match="would break"):
        upgrade(sqlite_path, scripts_with(tmp_path, "op.execute('DELETE FROM hardware')"))
    with ControlStore.open(sqlite_path) as store:
        assert store.load_profile().hardware.fingerprint == "hw-a"


def test_newer_store_is_refused_and_untouched(store_url: str, tmp_path: Path) -> None:
    upgrade(store_url, scripts_with(tmp_path, ADD_COLUMN))
    with pytest.raises(StoreVersionError, match=f"schema version '{NEXT}' is newer"):
        ControlStore.open(store_url)
    assert "extra" in columns_of(locate(store_url), "events")


def test_store_being_migrated_elsewhere_is_locked(sqlite_path: Path) -> None:
    lock = FileLock(f"{sqlite_path}.lock")
    with lock, pytest.raises(StoreLockedError, match=r"held .*control\.sqlite\.lock for 0\.05 s"):
        ControlStore.open(sqlite_path, busy_timeout_s=0.05)
    ControlStore.open(sqlite_path).close()


def test_postgresql_being_migrated_elsewhere_is_locked(postgresql_url: str) -> None:
    engine = create_engine(locate(postgresql_url).url)
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(x'68796278'::int)"))
        with pytest.raises(StoreLockedError, match="another process holds it"):
            ControlStore.open(postgresql_url, busy_timeout_s=0.05)
    engine.dispose()
    ControlStore.open(postgresql_url).close()


def test_writer_of_a_foreign_tool_blocks_the_upgrade_only_until_the_timeout(sqlite_path: Path, tmp_path: Path) -> None:
    ControlStore.open(sqlite_path).close()
    other = sqlite3.connect(sqlite_path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    later = scripts_with(tmp_path, ADD_COLUMN)
    with pytest.raises(StoreLockedError, match="another process holds it"):
        upgrade(sqlite_path, later, timeout=0.05)
    other.close()
    assert upgrade(sqlite_path, later) == NEXT


def test_postgresql_tables_live_in_their_own_schema(postgresql_url: str) -> None:
    ControlStore.open(postgresql_url).close()
    engine = create_engine(locate(postgresql_url).url)
    with engine.connect() as connection:
        assert inspect(connection).get_table_names(schema="public") == []
        assert "profiles" in inspect(connection).get_table_names(schema="hybridindex")
    engine.dispose()


def test_other_files_are_refused_by_name_and_untouched(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<html>" * 2000)
    page.chmod(0o644)
    with pytest.raises(StoreError, match=r"page\.html: the file is not a SQLite database"):
        ControlStore.open(page)
    assert page.read_text() == "<html>" * 2000
    assert stat.S_IMODE(page.stat().st_mode) == 0o644

    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES ('abc')")
    connection.close()
    foreign.chmod(0o644)
    before = foreign.read_bytes()
    with pytest.raises(StoreError, match=r"foreign\.sqlite: a SQLite file of another program"):
        ControlStore.open(foreign)
    assert foreign.read_bytes() == before
    assert stat.S_IMODE(foreign.stat().st_mode) == 0o644


def test_a_store_that_others_could_read_is_kept_to_writers(sqlite_path: Path) -> None:
    ControlStore.open(sqlite_path).close()
    sqlite_path.chmod(0o644)
    with ControlStore.open(sqlite_path):
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in sqlite_path.parent.iterdir()}
    assert set(modes.values()) == {0o600}, modes


def test_corrupt_file_is_an_error_that_names_it(sqlite_path: Path, profile_of: Maker) -> None:
    with ControlStore.open(sqlite_path) as store:
        for seed in range(20):
            store.save_profile(profile_of(seed=seed))
    size = sqlite_path.stat().st_size
    with sqlite_path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))
    with pytest.raises(StoreError, match=r"control\.sqlite: the file is corrupt"):  # noqa: PT012
        store = ControlStore.open(sqlite_path)
        try:
            store.list_profiles()
        finally:
            store.close()


def test_truncated_file_is_found(sqlite_path: Path, profile_of: Maker) -> None:
    with ControlStore.open(sqlite_path) as store:
        for seed in range(20):
            store.save_profile(profile_of(seed=seed))
    os.truncate(sqlite_path, sqlite_path.stat().st_size // 2 // 4096 * 4096)
    with pytest.raises(StoreError, match=r"control\.sqlite"):  # noqa: PT012
        store = ControlStore.open(sqlite_path)
        try:
            store.check_invariants()
        finally:
            store.close()


def test_missing_directory_and_directory_as_file_are_errors(tmp_path: Path) -> None:
    for address in (tmp_path / "none" / "c.sqlite", tmp_path):
        with pytest.raises(StoreError, match=str(address)):
            ControlStore.open(address)
    assert not (tmp_path / "none").exists()


def test_a_file_system_without_locks_is_an_error(sqlite_path: Path) -> None:
    disk = FaultyDisk(counts=of("lock"), allowed=0, number=errno.ENOSYS)
    words = r"control\.sqlite: .* on a file system with locks \(.*Function not implemented.*use a local one"
    with watched_by(disk), pytest.raises(StoreError, match=words):
        ControlStore.open(sqlite_path)


def test_read_only_directory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.mkdtemp(prefix="hx-ro-"))
    try:
        folder.chmod(0o555)
        # Root may write everywhere: look through the eyes of somebody else.
        changed = os.geteuid() == 0
        if changed:
            os.seteuid(65534)
        try:
            with pytest.raises(StoreError, match=r"c\.sqlite: its directory must be writable"):
                ControlStore.open(folder / "c.sqlite")
        finally:
            if changed:
                os.seteuid(0)
        assert list(folder.iterdir()) == []
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


MANY = """
import sys
from hybridindex.plans.current import applied_plans, current_plan_id, latest_plan_id
from hybridindex.store import ControlStore
template, address, number = sys.argv[1:]
with ControlStore.open(template) as store:
    profile = store.load_profile()
for i in range(3):
    with ControlStore.open(address, busy_timeout_s=30) as store:
        mine = store.save_profile(profile)
        store.save_plan({"data": {"verdict": "feasible", "who": number}, "arrays": {}}, mine.id)
        store.record_event("hello", {"who": number, "i": i})
"""


def test_several_processes_create_and_fill_one_store(
    store_url: str, tmp_path: Path, profile_of: Maker, run_python: Starter
) -> None:
    template = tmp_path / "template.sqlite"
    with ControlStore.open(template) as store:
        store.save_profile(profile_of())
    processes = [run_python(MANY, template, store_url, n) for n in range(4)]
    for process in processes:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, output + errors
    with ControlStore.open(store_url) as store:
        assert len(store.list_profiles()) == len(store.list_plans()) == len(store.list_events()) == 12
        plans = [store.load_plan(p.id).record["data"]["who"] for p in store.list_plans()]
        assert sorted(plans) == sorted(str(n) for n in range(4) for _ in range(3))
        store.check_invariants()


KILLED_WRITE = """
import os, signal, sys
from sqlalchemy import event
from hybridindex.plans.current import applied_plans, current_plan_id, latest_plan_id
from hybridindex.store import ControlStore
from hybridindex.store.models import LatencySampleRow
store = ControlStore.open(sys.argv[1])
profile = store.load_profile()
@event.listens_for(store._opened.engine, "connect")
def small_cache(connection, record):
    connection.execute("PRAGMA cache_size=1")  # dirty pages reach the WAL before the commit
@event.listens_for(store._opened.engine, "commit")
def die(connection):
    os.kill(os.getpid(), signal.SIGKILL)
store._opened.engine.dispose()
store.save_profile(profile)
"""


def test_kill_in_the_middle_of_a_write_leaves_a_valid_store(
    sqlite_path: Path, profile_of: Maker, run_python: Starter
) -> None:
    with ControlStore.open(sqlite_path) as store:
        saved = store.save_profile(profile_of(nlist=20_000))
    process = run_python(KILLED_WRITE, sqlite_path)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == -9, output + errors
    assert Path(f"{sqlite_path}-wal").stat().st_size > 100_000  # it had written, and did not commit
    with ControlStore.open(sqlite_path) as store:
        store.check_invariants()
        assert [p.id for p in store.list_profiles()] == [saved.id]
        assert store.load_profile().seed == saved.seed
        store.save_profile(profile_of(seed=5))
        assert len(store.list_profiles()) == 2


KILLED_MIGRATION = """
import sys
from pathlib import Path
from hybridindex.store.engine import locate
from hybridindex.store.migrate import upgrade_store
upgrade_store(locate(sys.argv[1]), busy_timeout_s=5, scripts=Path(sys.argv[2]))
"""


@pytest.mark.parametrize("fresh", [True, False])
def test_kill_in_the_middle_of_a_migration_leaves_a_valid_store(
    store_url: str, tmp_path: Path, run_python: Starter, fresh: bool
) -> None:
    if not fresh:
        with ControlStore.open(store_url) as store:
            store.record_event("before", {})
    scripts = scripts_with(tmp_path, ADD_COLUMN, "import os; os.kill(os.getpid(), 9)")
    process = run_python(KILLED_MIGRATION, store_url, scripts)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == -9, output + errors
    with ControlStore.open(store_url) as store:
        store.check_invariants()
        assert store.revision == HEAD
        assert [e.kind for e in store.list_events()] == ([] if fresh else ["before"])


def test_threads_may_open_stores_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        paths = [tmp_path / f"{i // 2}.sqlite" for i in range(12)]
        stores = list(pool.map(ControlStore.open, paths))
    for store in stores:
        assert store.revision == HEAD
        store.record_event("x", {})
        store.close()


def store_of_the_fourth_version(store_url: str, folder: Path, events: list[tuple[str, dict[str, Any]]]) -> None:
    """With profiles 1 and (renewed from it) 2, plans 1 to 4 of index "a" (2 is the first of the renewed profile), and
    ``events``."""
    fourth = folder / "fourth"
    shutil.copytree(SCRIPTS, fourth, ignore=shutil.ignore_patterns("__pycache__", "000[5-9]*"))
    assert upgrade(store_url, fourth) == "0004"
    location = locate(store_url)
    prefix = "" if location.path else "hybridindex."
    facts = "'a', 1, 'ip', 'flat', 8, 9, 4, 2, 1, 'native', 1, 'PASSIVE', 0, 0"
    engine = make_engine(location, busy_timeout_s=5, migrating=True)
    with engine.begin() as connection:
        connection.execute(text(f"INSERT INTO {prefix}hardware (fingerprint, digest, data) VALUES ('h', 'd', '{{}}')"))
        for notes in ({}, {"renewed": {"parent": 1}}):
            connection.execute(
                text(
                    f"INSERT INTO {prefix}profiles (created_at, index_fingerprint, hardware_id, metric, codec, dim, "
                    "count, nlist, nprobe, k, scanner, threads, omp_wait_policy, load_average, seed, notes) "
                    f"VALUES ('2026-01-01', {facts}, :notes)"
                ),
                {"notes": json.dumps(notes)},
            )
        for profile_id in (1, 2, 2, 1):
            connection.execute(
                text(
                    f"INSERT INTO {prefix}plans (profile_id, created_at, verdict, data) "
                    "VALUES (:profile_id, '2026-01-01T00:00:00.000000+00:00', 'feasible', '{}')"
                ),
                {"profile_id": profile_id},
            )
        for number, (kind, payload) in enumerate(events, start=1):
            connection.execute(
                text(
                    f"INSERT INTO {prefix}events (at, kind, data, index_fingerprint) VALUES (:at, :kind, :data, :named)"
                ),
                {
                    "at": f"2026-02-{number:02}T00:00:00.000000+00:00",
                    "kind": kind,
                    "data": json.dumps(payload),
                    "named": payload.get("index", payload.get("index_fingerprint")),
                },
            )
    engine.dispose()


APPLIED = ("plan_applied", {"plan_id": 1, "index": "a"})
COMMITTED = (
    "plan_committed",
    {"plan_id": 4, "profile_id": 1, "index_fingerprint": "a", "verified": True, "why": "it drifted"},
)


@pytest.mark.parametrize("events", [(APPLIED, COMMITTED), (COMMITTED, APPLIED)])
def test_both_kinds_of_plan_events_become_one_and_the_newer_is_current(
    store_url: str, tmp_path: Path, events: tuple[tuple[str, dict[str, Any]], ...]
) -> None:
    other = ("plan_applied", {"plan_id": 3, "index": "b"})
    store_of_the_fourth_version(store_url, tmp_path, [*events, ("device_failed", {"index": "a"}), other])
    with ControlStore.open(store_url) as store:
        assert store.revision == HEAD
        assert current_plan_id(store, "a") == latest_plan_id(store, "a") == events[1][1]["plan_id"]
        found = store.list_events()
        assert [(e.id, e.at[:10], e.kind) for e in reversed(found)] == [
            (1, "2026-02-01", "plan_current"),
            (2, "2026-02-02", "plan_current"),
            (3, "2026-02-03", "device_failed"),
            (4, "2026-02-04", "plan_current"),
        ]
        by_plan = {e.payload.get("plan_id"): dict(e.payload) for e in found}
        assert by_plan[4] == COMMITTED[1]
        assert by_plan[1] == {
            "plan_id": 1, "profile_id": 1, "index_fingerprint": "a", "verified": False, "why": "asked for",
        }  # fmt: skip
        assert [e["plan_id"] for e in applied_plans(store, "a")] == [e["plan_id"] for _, e in events]


@pytest.mark.parametrize(("named", "newest"), [((), 4), ((2,), 4)])
def test_plans_that_an_old_refresh_was_trying_are_known(
    store_url: str, tmp_path: Path, named: tuple[int, ...], newest: int
) -> None:
    """Plan 2 is the first of a renewed profile: a trial unless an event names it. Plan 3 was made by hand from it."""
    store_of_the_fourth_version(
        store_url, tmp_path, [("plan_committed", {"plan_id": n, "index_fingerprint": "a"}) for n in named]
    )
    location = locate(store_url)
    with ControlStore.open(store_url) as store:
        summary = store.newest_plan("a")
        assert summary is not None
        assert summary.id == newest
    engine = make_engine(location, busy_timeout_s=5, migrating=True)
    with engine.connect() as connection:
        table = f"{'' if location.path else 'hybridindex.'}plans"
        trials = connection.execute(text(f"SELECT id FROM {table} WHERE trial")).scalars().all()
    engine.dispose()
    assert trials == [n for n in (2,) if n not in named]
