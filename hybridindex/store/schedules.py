"""Rows of the refresh's schedule, inside a session that the caller opened. :mod:`hybridindex.refresh.timetable` checks
what a row means: a store keeps what another version wrote.
"""

from __future__ import annotations

from dataclasses import asdict

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from hybridindex.errors import InvalidInputError
from hybridindex.store.checks import check_scalar
from hybridindex.store.models import ScheduleRow
from hybridindex.store.records import ScheduleEntry

__all__ = ["MAX_ROWS", "delete_schedule", "mark_schedule_run", "put_schedule", "select_schedule"]

#: Of one store.
MAX_ROWS = 64


def put_schedule(session: Session, entry: ScheduleEntry, at: str) -> None:
    """Writes the row of that name, in place of an earlier one. It has not run yet, and was made at ``at``.

    Raises:
        InvalidInputError: a field that a column does not hold, or too many rows.
    """
    for name in ("name", "kind", "spec", "action"):
        check_scalar(getattr(entry, name), f"schedule {entry.name!r}: {name}", str)
    check_scalar(entry.enabled, f"schedule {entry.name!r}: enabled", bool)
    if session.get(ScheduleRow, entry.name) is None:
        rows = session.scalar(select(func.count()).select_from(ScheduleRow)) or 0
        if rows >= MAX_ROWS:
            raise InvalidInputError(f"schedule {entry.name!r}: there are {rows} rows, and {MAX_ROWS} are allowed")
    session.merge(ScheduleRow(**{**asdict(entry), "last_run_at": None, "created_at": at}))


def select_schedule(session: Session) -> list[ScheduleEntry]:
    """All rows, by name."""
    rows = session.execute(select(ScheduleRow.__table__).order_by(ScheduleRow.name)).mappings()
    return [ScheduleEntry(**row) for row in rows]


def delete_schedule(session: Session, name: str) -> bool:
    """Whether there was such a row."""
    return bool(session.execute(delete(ScheduleRow).where(ScheduleRow.name == name).returning(ScheduleRow.name)).all())


def mark_schedule_run(session: Session, name: str, at: str) -> None:
    """Notes that a row's time came; a row that was removed meanwhile stays away."""
    session.execute(update(ScheduleRow).where(ScheduleRow.name == name).values(last_run_at=at))
