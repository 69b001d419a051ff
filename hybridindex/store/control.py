"""The control store: profiles, plans and events of one or more indexes, in SQLite or PostgreSQL.

Covers opening (which creates or upgrades the schema), transactions and closing; what the rows mean is said in
``profiles.py`` and ``plans.py``. A SQLite store must lie on a local file system.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy import delete, func, select, text
from sqlalchemy.orm import Session

from hybridindex import filesystem
from hybridindex.errors import FileError, InvalidInputError, ProfileError, StoreError, StoreLockedError
from hybridindex.processes import OfOneProcess
from hybridindex.store import plans, profiles
from hybridindex.store.checks import check_scalar, check_time
from hybridindex.store.digests import check_digest, digest_of_row
from hybridindex.store.engine import Location, locate
from hybridindex.store.faults import store_fault, translated
from hybridindex.store.models import PlanRow, ProfileRow, ScheduleRow
from hybridindex.store.opened import OpenedStore
from hybridindex.store.records import PlanSummary, ProfileSummary, ScheduleEntry, StoredEvent, StoredPlan
from hybridindex.store.retention import Pruned, Retention, prune_rows
from hybridindex.types import Profile

__all__ = ["ControlStore"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: Rows of the refresh's schedule in one store.
_MAX_SCHEDULE = 64
#: More than a store keeps.
_ALL_EVENTS = 1 << 31
#: Findings of SQLite about its own structure that are told.
_MOST_FINDINGS = 20
#: Time between two tries to open a store that could not be opened; calls meanwhile say why it could not.
_RETRY_S = 1.0


def _utc_now() -> datetime:
    return datetime.now(UTC)


class ControlStore(OfOneProcess):
    """An open control store. Make one with :meth:`open`.

    Threading: every method may be called from any thread; each call is one transaction on a connection of its own, and
    writers wait for one another. Processes may share a store, each with its own ControlStore: one that is carried
    across a fork raises ForkedError. Every method raises StoreLockedError when another writer held the store past the
    busy timeout, and StoreError when the store is closed, damaged or out of reach. All methods write completely or not
    at all.

    A SQLite file that is deleted, moved or replaced while it is open takes nothing more: the call that notices raises
    StoreError, and the next one opens what lies at the path then, or makes a new store there.
    """

    def __init__(self, location: Location, busy_timeout_s: float, clock: Callable[[], datetime]) -> None:
        """For :meth:`open`."""
        self._location = location
        self._busy_timeout_s = busy_timeout_s
        self._clock = clock
        self._idle = threading.Condition()
        #: Calls under way. This and what follows is guarded by ``_idle``.
        self._running = 0
        self._closed = False
        self._opened: OpenedStore | None = None
        #: What was opened before, and its files are gone; closed before another is opened.
        self._lost: OpenedStore | None = None
        self._opening = False
        self._retry_s = 0.0
        self._problem: StoreError | None = None
        #: How often it was opened. What was written before the last time may be in another file.
        self.openings = 0

    @classmethod
    def open(
        cls,
        url_or_path: str | os.PathLike[str],
        *,
        busy_timeout_s: float = 10.0,
        clock: Callable[[], datetime] = _utc_now,
        required: bool = True,
    ) -> Self:
        """Open the store at a file path, ``sqlite:///file`` or ``postgresql+psycopg://…``; create or upgrade it first.

        Args:
            url_or_path: where it is; the directory of a file must exist.
            busy_timeout_s: longest wait for another process, at opening and at each later call.
            clock: gives the time in UTC that plans and events are stamped with.
            required: False: where it cannot be opened now, later calls try again, and raise what this would have.

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
        store = cls(locate(url_or_path), busy_timeout_s, clock)
        try:
            store.check_place()
        except StoreError:
            if required:
                raise
        return store

    @property
    def revision(self) -> str | None:
        """Version of the schema, as Alembic names it; None: it is not open."""
        opened = self._opened
        return None if opened is None else opened.revision

    @property
    def problem(self) -> str | None:
        """Why it is not open; None: it is."""
        problem = self._problem
        return None if problem is None else str(problem)

    @property
    def name(self) -> str:
        """The file, or the URL without its password."""
        return self._location.name

    @property
    def file(self) -> Path | None:
        """The SQLite file; None on PostgreSQL."""
        return self._location.path

    def close(self) -> None:
        """Wait for calls under way in other threads, then close the connections. A second call does nothing.

        That files of a store that was replaced cannot be moved aside is logged.
        """
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: self._running == 0)
            left, self._opened, self._lost = (self._opened, self._lost), None, None
        for opened in left:
            if opened is None:
                continue
            try:
                opened.close()
            except StoreError as error:
                # What was acknowledged is committed. Connections are closed in any case.
                _log.error("%s", error)
                opened.disconnect()

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
        with self._transaction(writes=True) as session:
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
        with self._transaction() as session:
            return profiles.select_profile(session, self.name, profile_id, index_fingerprint, hardware_fingerprint)

    def list_profiles(
        self, *, index_fingerprint: str | None = None, codes_of: str | None = None
    ) -> list[ProfileSummary]:
        """All profiles (of that index), in the order of saving, without samples and arrays.

        ``codes_of``: fingerprint of rows: all profiles of codes that they have or had.
        """
        with self._transaction() as session:
            return profiles.select_summaries(session, index_fingerprint=index_fingerprint, codes_of=codes_of)

    def save_plan(self, record: Mapping[str, Any], profile_id: int, *, trial: bool = False) -> int:
        """Store a plan's record (see :class:`~hybridindex.store.records.PlanRecord`) and return its id.

        ``trial``: a refresh tries it; see :meth:`newest_plan`.

        Raises:
            InvalidInputError: the record lacks a verdict or holds what is not stored; nothing is written.
            ProfileError: there is no profile ``profile_id``.
        """
        check_scalar(profile_id, "profile_id", int)
        at = self._now()
        with self._transaction(writes=True) as session:
            return plans.insert_plan(session, record, profile_id, at, self.name, trial=trial)

    def load_plan(self, plan_id: int | None = None, *, index_fingerprint: str | None = None) -> StoredPlan:
        """The plan with that id, else the one saved last (of that index).

        Raises:
            ProfileError: there is none.
            ProfileMismatchError: the one asked for rests on a profile of another index.
        """
        if plan_id is not None:
            check_scalar(plan_id, "plan_id", int)
        with self._transaction() as session:
            return plans.select_plan(session, plan_id, index_fingerprint, self.name)

    def list_plans(self, *, index_fingerprint: str | None = None) -> list[PlanSummary]:
        """All plans (of that index), in the order of saving, without their records."""
        with self._transaction() as session:
            return plans.select_plan_summaries(session, index_fingerprint=index_fingerprint)

    def newest_plan(self, index_fingerprint: str) -> PlanSummary | None:
        """The plan of an index that was saved last and not for a trial."""
        with self._transaction() as session:
            return plans.select_newest_plan(session, index_fingerprint)

    def record_event(self, kind: str, payload: Mapping[str, Any]) -> int:
        """Store that something happened now, and return its id.

        It is about the index that ``payload`` names as ``index`` or ``index_fingerprint``; else about none, or all.

        Raises:
            InvalidInputError: an empty kind, or a payload that is not JSON-able.
        """
        at = self._now()
        with self._transaction(writes=True) as session:
            return plans.insert_event(session, kind, payload, at)

    def list_events(
        self,
        *,
        kind: str | None = None,
        index_fingerprint: str | Sequence[str] | None = None,
        after_id: int = 0,
        limit: int = 100,
    ) -> list[StoredEvent]:
        """The newest ``limit`` events, newest first.

        Args:
            kind: of this kind alone.
            index_fingerprint: about this index, or one of these, or about none in particular.
            after_id: with a greater id than this.
        """
        with self._transaction() as session:
            return plans.select_events(
                session, self.name, kind=kind, index_fingerprint=index_fingerprint, after_id=after_id, limit=limit
            )

    def read_events(
        self, *, kind: str | None = None, limit: int = 100
    ) -> tuple[list[StoredEvent], dict[int, StoreError]]:
        """The newest ``limit`` events (of a kind), newest first, but for those that are damaged, and these by id."""
        with self._transaction() as session:
            return plans.select_whole_events(session, self.name, kind=kind, limit=limit)

    def set_schedule(self, entry: ScheduleEntry) -> None:
        """Store a row of the refresh's schedule, in place of the one of that name; it counts as never run.

        Raises:
            InvalidInputError: a field that is not stored, or too many rows.
        """
        for name in ("name", "kind", "spec", "action"):
            check_scalar(getattr(entry, name), f"schedule {entry.name!r}: {name}", str)
        check_scalar(entry.enabled, f"schedule {entry.name!r}: enabled", bool)
        at = self._now()
        with self._transaction(writes=True) as session:
            if session.get(ScheduleRow, entry.name) is None:
                rows = session.scalar(select(func.count()).select_from(ScheduleRow)) or 0
                if rows >= _MAX_SCHEDULE:
                    words = f"there are {rows} rows, and {_MAX_SCHEDULE} are allowed"
                    raise InvalidInputError(f"schedule {entry.name!r}: {words}")
            row = ScheduleRow(**{**asdict(entry), "last_run_at": None, "created_at": at})
            row.digest = digest_of_row(row)
            session.merge(row)

    def list_schedule(self) -> list[ScheduleEntry]:
        """All rows of the schedule, by name. What they mean, :mod:`hybridindex.refresh.timetable` checks.

        A store keeps what another version wrote.
        """
        rows, damaged = self.read_schedule()
        for error in damaged.values():
            raise error
        return rows

    def read_schedule(self) -> tuple[list[ScheduleEntry], dict[str, StoreError]]:
        """Rows of the schedule as :meth:`list_schedule` has them, but for those that are damaged, and these by name."""
        names = [field.name for field in fields(ScheduleEntry)]
        found, damaged = [], {}
        with self._transaction() as session:
            for row in session.scalars(select(ScheduleRow).order_by(ScheduleRow.name)):
                try:
                    self._checked(row)
                except StoreError as error:
                    damaged[row.name] = error
                else:
                    found.append(ScheduleEntry(**{name: getattr(row, name) for name in names}))
        return found, damaged

    def remove_schedule(self, name: str) -> None:
        """Remove a row of the schedule.

        Raises:
            InvalidInputError: there is none of that name.
        """
        with self._transaction(writes=True) as session:
            gone = delete(ScheduleRow).where(ScheduleRow.name == name).returning(ScheduleRow.name)
            if not session.execute(gone).all():
                raise InvalidInputError(f"schedule {name!r}: there is no such row in {self.name}")

    def mark_schedule_run(self, name: str) -> None:
        """Note that a row's time came now; a row that was removed meanwhile stays away."""
        at = self._now()
        with self._transaction(writes=True) as session:
            row = session.get(ScheduleRow, name)
            if row is not None:
                self._checked(row).last_run_at = at
                if row.digest is not None:
                    row.digest = digest_of_row(row)

    def _checked(self, row: ScheduleRow) -> ScheduleRow:
        otherwise = "remove the row and set it again"
        check_digest(row.digest, digest_of_row(row), f"schedule {row.name!r}", self.name, otherwise=otherwise)
        return row

    def prune(self, retention: Retention, *, keep_plans: Collection[int] = (), dry_run: bool = False) -> Pruned:
        """Delete old rows; see :mod:`hybridindex.store.retention` for what always stays.

        Args:
            keep_plans: plans that stay with all they refer to: what a daemon serves.
            dry_run: delete nothing, only count.

        Raises:
            StoreError: the event that says which plan of an index is current is damaged; nothing is deleted.
        """
        with self._transaction(writes=not dry_run) as session:
            return prune_rows(session, self.name, retention, keep_plans=keep_plans, dry_run=dry_run)

    def copy_to(self, file: Path) -> None:
        """Copy the whole store, as it is at one moment, to a SQLite file that does not exist yet.

        Raises:
            InvalidInputError: the store is no SQLite file, or ``file`` is there.
            StoreError: it cannot be read, or ``file`` cannot be written; nothing is left of it.
        """
        try:
            if self.file is None or filesystem.exists(file):
                words = f"{self.name} can be copied from SQLite alone, to a new file"
                raise InvalidInputError(f"file {str(file)!r}: {words}")
            with (
                filesystem.replacing(file) as beside,
                filesystem.performing("sqlite", beside),
                closing(sqlite3.connect(beside)) as other,
                self._transaction() as session,
            ):
                mine = session.connection().connection.driver_connection
                assert isinstance(mine, sqlite3.Connection)
                mine.backup(other)
        except (sqlite3.Error, FileError) as error:
            why = store_fault(error, str(file)) if isinstance(error, sqlite3.Error) else error
            raise StoreError(f"control store {self.name} could not be copied to {file}: {why}") from error

    def check_writable(self) -> None:
        """Write a page and commit it, so that a full disk or a lost permission shows before a plan is lost to it.

        Raises:
            StoreError: it cannot be written, and why.
        """
        with self._transaction(writes=True) as session:
            if self._location.backend == "sqlite":
                # Setting a field of the header to its own value dirties the first page; nothing else changes.
                version = session.execute(text("PRAGMA user_version")).scalar_one()
                session.execute(text(f"PRAGMA user_version={int(version)}"))
            elif session.execute(text("SHOW transaction_read_only")).scalar_one() == "on":
                raise StoreError(f"control store {self.name}: the server takes no writes now (read only)")

    def check_place(self) -> None:
        """Open it where it is not open, and compare its files with those at its path. Reads and writes nothing.

        Raises:
            StoreError: as every method.
        """
        with self._transaction():
            pass

    def check_invariants(self) -> None:
        """As :meth:`find_damage`.

        Raises:
            StoreError: damage, with the first finding.
        """
        for problem in self.find_damage():
            raise problem

    def find_damage(self) -> list[StoreError]:
        """Read the whole store: every row against its digest, and of SQLite page structure and references. What is not
        as it was written, or cannot be read.

        Raises:
            StoreLockedError.
        """
        found: list[StoreError] = []
        if self._location.backend == "sqlite":
            structure = self._whole(found, self._read_structure) or ()
            found += [StoreError(f"control store {self.name}: damaged ({words})") for words in structure]
        for kind, table, load in (("profile", ProfileRow, self.load_profile), ("plan", PlanRow, self.load_plan)):
            for number in self._whole(found, partial(self._ids, table)) or ():
                with suppress(ProfileError):  # it was pruned meanwhile
                    self._whole(found, partial(load, number), f"{kind} {number}")
        _, damaged = self._whole(found, partial(self.read_events, limit=_ALL_EVENTS)) or ((), {})
        _, spoilt = self._whole(found, self.read_schedule) or ((), {})
        # A store out of reach says the same each time.
        return list({str(error): error for error in (*found, *damaged.values(), *spoilt.values())}.values())

    def _whole(self, found: list[StoreError], read: Callable[[], T], what: str = "") -> T | None:
        """What ``read`` answers; None, and one more in ``found`` that names ``what``, where it cannot."""
        try:
            return read()
        except StoreLockedError:
            raise
        except StoreError as error:
            found.append(error if what in str(error) else StoreError(f"{error}; it is of {what}"))
            return None

    def _read_structure(self) -> list[str]:
        """What SQLite says against its pages and references."""
        with self._transaction() as session:
            pages = session.scalars(text(f"PRAGMA integrity_check({_MOST_FINDINGS})")).all()
            references = session.execute(text("PRAGMA foreign_key_check")).fetchmany(_MOST_FINDINGS)
        return [*(words for words in pages if words != "ok"), *(str(tuple(row)) for row in references)]

    def _ids(self, table: type[ProfileRow | PlanRow]) -> Sequence[int]:
        with self._transaction() as session:
            return session.scalars(select(table.id).order_by(table.id)).all()

    def _now(self) -> str:
        now = self._clock()
        value = now.isoformat(timespec="microseconds")
        check_time(value, "clock")
        return value

    @contextmanager
    def _transaction(self, *, writes: bool = False) -> Iterator[Session]:
        with self._idle:
            if self._closed:
                raise StoreError(f"control store {self.name}: it was closed")
            self._running += 1
        opened: OpenedStore | None = None
        try:
            opened = self._connected()
            engine = opened.writer if writes else opened.reader
            with translated(self.name), Session(engine, expire_on_commit=False) as session, session.begin():
                session.connection()
                # Only now: a connection that was made for this call has opened what lies at the path.
                opened.check_place()
                yield session
            if writes:
                opened.check_place()
        except StoreError:
            if opened is not None:
                self._check_place(opened)  # which explains an error of SQLite
            raise
        finally:
            with self._idle:
                self._running -= 1
                if opened is not None:
                    opened.users -= 1
                self._idle.notify_all()

    def _check_place(self, opened: OpenedStore) -> None:
        """Raises StoreError: the files of ``opened`` are gone. It is used no more."""
        try:
            opened.check_place()
        except StoreError as error:
            with self._idle:
                if self._opened is opened:
                    self._opened, self._lost, self._problem = None, opened, error
                    _log.error("%s", error)
            raise

    def _connected(self) -> OpenedStore:
        """What is open; opened where it is not. The caller gives ``users`` of it back."""
        with self._idle:
            if self._opened is not None:
                self._opened.users += 1
                return self._opened
            if self._problem is not None and (self._opening or time.monotonic() < self._retry_s):
                raise type(self._problem)(str(self._problem))
            lost, self._opening = self._lost, True
        try:
            if lost is not None:
                with self._idle:
                    ended = self._idle.wait_for(lambda: not lost.users, self._busy_timeout_s)
                if not ended:
                    raise StoreLockedError(f"control store {self.name}: calls from before its files changed do not end")
                lost.close()
            with self._idle:
                self._lost = None
            opened = OpenedStore.open(self._location, busy_timeout_s=self._busy_timeout_s)
        except (StoreError, OSError) as error:
            problem = error if isinstance(error, StoreError) else StoreError(f"control store {self.name}: {error}")
            with self._idle:
                if self._problem is not None and str(self._problem) != str(problem):
                    _log.error("%s", problem)
                self._problem, self._retry_s = problem, time.monotonic() + _RETRY_S
            if problem is error:
                raise
            raise problem from error
        finally:
            with self._idle:
                self._opening = False
        with self._idle:
            if self._problem is not None:
                _log.info("control store %s: it is open again", self.name)
            self._opened, self._problem = opened, None
            self.openings += 1
            opened.users += 1
        return opened
