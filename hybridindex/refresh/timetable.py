"""The schedule of updates: rows of the control store, checked and turned into APScheduler triggers.

A row names an interval in seconds or a cron line. A refresher reads the rows when it starts; APScheduler stores none.
Times are UTC.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from hybridindex.errors import InvalidInputError, MissingDependencyError, how_to_install
from hybridindex.store.records import ScheduleEntry

if TYPE_CHECKING:
    from apscheduler.triggers.base import BaseTrigger

__all__ = ["ACTIONS", "KINDS", "Timetable", "check_schedule", "timetable_of"]

KINDS = ("interval", "cron")
#: What a row may ask for. "update": renew the profile, plan, and apply what is worth its move.
ACTIONS = ("update",)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_SPEC = 200
_MIN_S, _MAX_S = 1.0, 366 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """A checked row."""

    entry: ScheduleEntry
    #: An APScheduler trigger.
    trigger: BaseTrigger
    #: The first time; None: the trigger's own.
    first: datetime | None


def check_schedule(entry: ScheduleEntry) -> None:
    """
    Raises:
        InvalidInputError: a field makes no sense; names row and field.
        MissingDependencyError: APScheduler is not installed.
    """
    timetable_of(entry, datetime.now(UTC))


def timetable_of(entry: ScheduleEntry, now: datetime) -> Timetable:
    """When ``entry`` runs. An interval counts from its last run, or from when the row was written; if it was missed, it
    runs once at the start. A missed cron line waits for its next time.

    Raises:
        InvalidInputError: a field makes no sense; names row and field.
        MissingDependencyError: APScheduler is not installed.
    """
    try:
        from apscheduler.triggers.cron import CronTrigger
        from apscheduler.triggers.interval import IntervalTrigger
    except ImportError as error:
        raise MissingDependencyError(
            f"a schedule needs APScheduler: {how_to_install('refresh')}", name="apscheduler"
        ) from error

    def wrong(field: str, expected: str) -> InvalidInputError:
        return InvalidInputError(f"schedule {entry.name!r}: {field} is {getattr(entry, field)!r}; expected {expected}")

    if not _NAME.fullmatch(entry.name):
        raise wrong("name", "1 to 64 letters, digits, '.', '_' or '-'")
    if entry.action not in ACTIONS:
        raise wrong("action", " or ".join(ACTIONS))
    if entry.kind not in KINDS:
        raise wrong("kind", " or ".join(KINDS))
    if len(entry.spec) > _MAX_SPEC:
        raise wrong("spec", f"at most {_MAX_SPEC} characters")
    since = None
    for field in ("created_at", "last_run_at"):
        text = getattr(entry, field)
        if text is not None and (since := _past(text, now)) is None:
            raise wrong(field, "a time in UTC that is over, in ISO 8601")
    if entry.kind == "cron":
        try:
            trigger = CronTrigger.from_crontab(entry.spec, timezone=UTC)
        except (ValueError, TypeError) as error:
            raise wrong("spec", f"a cron line such as '0 3 * * *' ({error})") from error
        if trigger.get_next_fire_time(None, now) is None:
            raise wrong("spec", "a cron line whose time comes")
        return Timetable(entry=entry, trigger=trigger, first=None)
    try:
        seconds = float(entry.spec)
    except ValueError:
        seconds = math.nan
    if not _MIN_S <= seconds <= _MAX_S:
        raise wrong("spec", f"seconds, {_MIN_S:g} to {_MAX_S:g}")
    first = None if since is None else max(now, since + timedelta(seconds=seconds))
    return Timetable(entry=entry, trigger=IntervalTrigger(seconds=seconds, timezone=UTC), first=first)


def _past(text: str, now: datetime) -> datetime | None:
    """The time, of a clock that may be some minutes ahead of ours; None where it is none or has no zone."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if at.tzinfo is None or at > now + timedelta(minutes=5) else at
