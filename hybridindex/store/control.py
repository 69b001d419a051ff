"""The control store: profiles, plans and events of one or more indexes, in SQLite or PostgreSQL.

Covers opening (which creates or upgrades the schema), transactions and closing; what the rows mean is said in
``profiles.py`` and ``plans.py``. A SQLite store must lie on a local file system.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Engine, delete, func, select, text, update
from sqlalchemy.orm import Session

from hybridindex.errors import InvalidInputError, StoreError
from hybridindex.processes import OfOneProcess
from hybridindex.store import plans, profiles
from hybridindex.store.checks import check_scalar, check_time
from hybridindex.store.engine import Location, locate, make_engine, writing
from hybridindex.store.faults import translated
from hybridindex.store.migrate import upgrade_store
from hybridindex.store.models import ScheduleRow
from hybridindex.store.records import PlanSummary, ProfileSummary, ScheduleEntry, StoredEvent, StoredPlan
from hybridindex.store.retention import Pruned, Retention, prune_rows
from hybridindex.types import Profile

__all__ = ["ControlStore"]

#: Rows of the refresh's schedule in one store.
_MAX_SCHEDULE = 64


def _utc_now() -> datetime:
    return datetime.now(UTC)


class ControlStore(OfOneProcess):
    """An open control store. Make one with :meth:`open`.

    Threading: every method may be called from any thread; each call is one transaction on a connection of its own, and
    writers wait for one another. Processes may share a store, each with its own ControlStore: one that is carried
    across a fork raises ForkedError. Every method raises StoreLockedError when another writer held the store past the
    busy timeout, and StoreError when the store is closed, damaged or out of reach. All methods write completely or not
    at all.
    """

    def __init__(self, location: Location, engine: Engine, revision: str, clock: Callable[[], datetime]) -> None:
        """For :meth:`open`."""
        self._location = location
        self._engine = engine
        self._writer = writing(engine)
        self._clock = clock
        self._idle = threading.Condition()
        #: Transactions under way; guarded by ``_idle``.
        self._running = 0
        self._closed = False
        #: Version of the schema, as Alembic names it.
        self.revision = revision

    @classmethod
    def open(
        cls,
        url_or_path: str | os.PathLike[str],
        *,
        busy_timeout_s: float = 10.0,
        clock: Callable[[], datetime] = _utc_now,
    ) -> Self:
        """Open the store at a file path, ``sqlite:///file`` or ``postgresql+psycopg://…``; create or upgrade it first.

        Args:
            url_or_path: where it is; the directory of a file must exist.
            busy_timeout_s: longest wait for another process, at opening and at each later call.
            clock: gives the time in UTC that plans and events are stamped with.

        Raises:
            InvalidInputError: an address or timeout that cannot be used.
            StoreVersionError: written by a newer hybridindex.
            StoreLockedError: held by another process past the timeout.
            StoreError: no store, corrupt, not writable, unreachable, or its upgrade failed (old content intact).
            MissingDependencyError: PostgreSQL without psycopg.
        """
        check_scalar(busy_timeout_s, "busy_timeout_s", float)
        if not 0 < busy_timeout_s <= 86_400:
            raise InvalidInputError(f"busy_timeout_s: {busy_timeout_s} given, more than 0 and at most 86400 is needed")
        location = locate(url_or_path)
        revision = upgrade_store(location, busy_timeout_s=busy_timeout_s)
        return cls(location, make_engine(location, busy_timeout_s=busy_timeout_s), revision, clock)

    @property
    def name(self) -> str:
        """The file, or the URL without its password."""
        return self._location.name

    @property
    def file(self) -> Path | None:
        """The SQLite file; None on PostgreSQL."""
        return self._location.path

    def close(self) -> None:
        """Wait for calls under way in other threads, then close the connections. A second call does nothing."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: self._running == 0)
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def save_profile(self, profile: Profile, *, parent: Profile | None = None) -> Profile:
        """Store a profile as a new row, whatever its ``id`` is, and return it with the new id.

        Args:
            parent: one with the id of its row here; samples that are the same objects in both are copied in the store.

        Raises:
            InvalidInputError: a field that cannot be stored, by name; nothing is written.
        """
        with self._transaction(self._writer) as session:
            return profiles.insert_profile(session, profile, parent)

    def load_profile(
        self,
        profile_id: int | None = None,
        *,
        index_fingerprint: str | None = None,
        hardware_fingerprint: str | None = None,
    ) -> Profile:
        """The profile with that id, else the one saved last that matches the fingerprints given.

        Raises:
            ProfileError: there is none.
            ProfileMismatchError: the one asked for, or every one there is, is of another index or machine.
        """
        if profile_id is not None:
            check_scalar(profile_id, "profile_id", int)
        with self._transaction(self._engine) as session:
            return profiles.select_profile(session, self.name, profile_id, index_fingerprint, hardware_fingerprint)

    def list_profiles(self, *, index_fingerprint: str | None = None) -> list[ProfileSummary]:
        """All profiles (of that index), in the order of saving, without samples and arrays."""
        with self._transaction(self._engine) as session:
            return profiles.select_summaries(session, index_fingerprint=index_fingerprint)

    def save_plan(self, record: Mapping[str, Any], profile_id: int, *, trial: bool = False) -> int:
        """Store a plan's record (see :class:`~hybridindex.store.records.PlanRecord`) and return its id.

        ``trial``: a refresh tries it; see :meth:`newest_plan`.

        Raises:
            InvalidInputError: the record lacks a verdict or holds what is not stored; nothing is written.
            ProfileError: there is no profile ``profile_id``.
        """
        check_scalar(profile_id, "profile_id", int)
        at = self._now()
        with self._transaction(self._writer) as session:
            return plans.insert_plan(session, record, profile_id, at, self.name, trial=trial)

    def load_plan(self, plan_id: int | None = None, *, index_fingerprint: str | None = None) -> StoredPlan:
        """The plan with that id, else the one saved last (of that index).

        Raises:
            ProfileError: there is none.
            ProfileMismatchError: the one asked for rests on a profile of another index.
        """
        if plan_id is not None:
            check_scalar(plan_id, "plan_id", int)
        with self._transaction(self._engine) as session:
            return plans.select_plan(session, plan_id, index_fingerprint, self.name)

    def list_plans(self, *, index_fingerprint: str | None = None) -> list[PlanSummary]:
        """All plans (of that index), in the order of saving, without their records."""
        with self._transaction(self._engine) as session:
            return plans.select_plan_summaries(session, index_fingerprint=index_fingerprint)

    def newest_plan(self, index_fingerprint: str) -> PlanSummary | None:
        """The plan of an index that was saved last and not for a trial."""
        with self._transaction(self._engine) as session:
            return plans.select_newest_plan(session, index_fingerprint)

    def record_event(self, kind: str, payload: Mapping[str, Any]) -> int:
        """Store that something happened now, and return its id.

        It is about the index that ``payload`` names as ``index`` or ``index_fingerprint``; else about none, or all.

        Raises:
            InvalidInputError: an empty kind, or a payload that is not JSON-able.
        """
        at = self._now()
        with self._transaction(self._writer) as session:
            return plans.insert_event(session, kind, payload, at)

    def list_events(
        self, *, kind: str | None = None, index_fingerprint: str | None = None, after_id: int = 0, limit: int = 100
    ) -> list[StoredEvent]:
        """The newest ``limit`` events, newest first.

        Args:
            kind: of this kind alone.
            index_fingerprint: about this index, or about none in particular.
            after_id: with a greater id than this.
        """
        with self._transaction(self._engine) as session:
            return plans.select_events(
                session, kind=kind, index_fingerprint=index_fingerprint, after_id=after_id, limit=limit
            )

    def set_schedule(self, entry: ScheduleEntry) -> None:
        """Store a row of the refresh's schedule, in place of the one of that name; it counts as never run.

        Raises:
            InvalidInputError: a field that is not stored, or too many rows.
        """
        for name in ("name", "kind", "spec", "action"):
            check_scalar(getattr(entry, name), f"schedule {entry.name!r}: {name}", str)
        check_scalar(entry.enabled, f"schedule {entry.name!r}: enabled", bool)
        at = self._now()
        with self._transaction(self._writer) as session:
            if session.get(ScheduleRow, entry.name) is None:
                rows = session.scalar(select(func.count()).select_from(ScheduleRow)) or 0
                if rows >= _MAX_SCHEDULE:
                    words = f"there are {rows} rows, and {_MAX_SCHEDULE} are allowed"
                    raise InvalidInputError(f"schedule {entry.name!r}: {words}")
            session.merge(ScheduleRow(**{**asdict(entry), "last_run_at": None, "created_at": at}))

    def list_schedule(self) -> list[ScheduleEntry]:
        """All rows of the schedule, by name. What they mean, :mod:`hybridindex.refresh.timetable` checks.

        A store keeps what another version wrote.
        """
        with self._transaction(self._engine) as session:
            rows = session.execute(select(ScheduleRow.__table__).order_by(ScheduleRow.name)).mappings()
            return [ScheduleEntry(**row) for row in rows]

    def remove_schedule(self, name: str) -> None:
        """Remove a row of the schedule.

        Raises:
            InvalidInputError: there is none of that name.
        """
        with self._transaction(self._writer) as session:
            gone = delete(ScheduleRow).where(ScheduleRow.name == name).returning(ScheduleRow.name)
            if not session.execute(gone).all():
                raise InvalidInputError(f"schedule {name!r}: there is no such row in {self.name}")

    def mark_schedule_run(self, name: str) -> None:
        """Note that a row's time came now; a row that was removed meanwhile stays away."""
        at = self._now()
        with self._transaction(self._writer) as session:
            session.execute(update(ScheduleRow).where(ScheduleRow.name == name).values(last_run_at=at))

    def prune(self, retention: Retention, *, keep_plans: Collection[int] = (), dry_run: bool = False) -> Pruned:
        """Delete old rows; see :mod:`hybridindex.store.retention` for what always stays.

        Args:
            keep_plans: plans that stay with all they refer to: what a daemon serves.
            dry_run: delete nothing, only count.
        """
        with self._transaction(self._engine if dry_run else self._writer) as session:
            return prune_rows(session, retention, keep_plans=keep_plans, dry_run=dry_run)

    def copy_to(self, file: Path) -> None:
        """Copy the whole store, as it is at one moment, to a SQLite file that does not exist yet.

        Raises:
            InvalidInputError: the store is no SQLite file, or ``file`` is there.
            StoreError: it cannot be read, or ``file`` cannot be written; nothing is left of it.
        """
        if self.file is None or file.exists():
            raise InvalidInputError(f"file {str(file)!r}: {self.name} can be copied from SQLite alone, to a new file")
        beside = file.with_name(f"{file.name}.new")
        try:
            beside.unlink(missing_ok=True)
            # Within a transaction: nobody closes the store meanwhile.
            with (
                self._transaction(self._engine),
                closing(sqlite3.connect(self.file)) as mine,
                closing(sqlite3.connect(beside)) as other,
            ):
                mine.backup(other)
            beside.rename(file)
        except (sqlite3.Error, OSError) as error:
            beside.unlink(missing_ok=True)
            raise StoreError(f"control store {self.name} could not be copied to {file}: {error}") from error

    def check_writable(self) -> None:
        """Write a page and commit it, so that a full disk or a lost permission shows before a plan is lost to it.

        Raises:
            StoreError: it cannot be written, and why.
        """
        with self._transaction(self._writer) as session:
            if self._location.backend == "sqlite":
                # Setting a field of the header to its own value dirties the first page; nothing else changes.
                version = session.execute(text("PRAGMA user_version")).scalar_one()
                session.execute(text(f"PRAGMA user_version={int(version)}"))
            elif session.execute(text("SHOW transaction_read_only")).scalar_one() == "on":
                raise StoreError(f"control store {self.name}: the server takes no writes now (read only)")

    def check_invariants(self) -> None:
        """Read the whole store: page structure and references (SQLite only; PostgreSQL watches its own).

        Raises:
            StoreError: damage, with the first finding.
        """
        if self._location.backend != "sqlite":
            return
        with self._transaction(self._engine) as session:
            verdict = session.execute(text("PRAGMA integrity_check(1)")).scalar_one()
            broken = session.execute(text("PRAGMA foreign_key_check")).first()
        if verdict != "ok" or broken is not None:
            raise StoreError(f"control store {self.name}: damaged ({verdict if verdict != 'ok' else broken})")

    def _now(self) -> str:
        now = self._clock()
        value = now.isoformat(timespec="microseconds")
        check_time(value, "clock")
        return value

    @contextmanager
    def _transaction(self, engine: Engine) -> Iterator[Session]:
        with self._idle:
            if self._closed:
                raise StoreError(f"control store {self.name}: it was closed")
            self._running += 1
        try:
            with translated(self.name), Session(engine, expire_on_commit=False) as session, session.begin():
                yield session
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()
