"""The schedule of updates: rows of the control store, checked and turned into APScheduler triggers.

A row names an interval in seconds or a cron line, which means what it means to cron: 0 and 7 are Sunday, and where day
of month and day of week are both given, either is enough. A refresher reads the rows when it starts; APScheduler stores
none. Times are UTC.
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
#: By their numbers in a cron line; APScheduler's begin with Monday.
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAYS_OF_WEEK = re.compile(r"(?:(?P<first>[0-7])(?:-(?P<last>[0-7]))?|\*)(?:/(?P<step>[1-9]\d?))?")


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
            trigger = _cron_trigger(entry.spec)
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


def _cron_trigger(spec: str) -> BaseTrigger:
    """
    Raises:
        ValueError, TypeError: it is no cron line.
    """
    from apscheduler.triggers.combining import OrTrigger
    from apscheduler.triggers.cron import CronTrigger

    fields = spec.split()
    if len(fields) != 5:
        raise ValueError(f"{len(fields)} fields, not 5")
    *time, day, month, weekday = fields
    weekday = ",".join(_days_named(part) for part in weekday.lower().split(","))
    either = not day.startswith("*") and not fields[4].startswith("*")
    days = [(day, "*"), ("*", weekday)] if either else [(day, weekday)]
    lines = [" ".join((*time, of_month, month, of_week)) for of_month, of_week in days]
    triggers = [CronTrigger.from_crontab(line, timezone=UTC) for line in lines]
    return OrTrigger(triggers) if either else triggers[0]


def _days_named(part: str) -> str:
    """A part of a day-of-week field, with names of days for numbers; names and what is wrong stay as they are."""
    if part == "*" or not re.search(r"\d", part):
        return part
    found = _DAYS_OF_WEEK.fullmatch(part)
    if found is None or (found["first"] and found["step"] and not found["last"]):
        raise ValueError(f"day of week {part!r}; 0 to 7 (0 and 7: Sunday), '1-5', '*/2' or names such as 'mon-fri'")
    first = int(found["first"] or 0)
    last = int(found["last"] or found["first"] or 6)
    if first > last:
        raise ValueError(f"day of week {part!r} ends before it begins")
    return ",".join(dict.fromkeys(_WEEKDAYS[first : last + 1 : int(found["step"] or 1)]))


def _past(text: str, now: datetime) -> datetime | None:
    """The time, of a clock that may be some minutes ahead of ours; None where it is none or has no zone."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if at.tzinfo is None or at > now + timedelta(minutes=5) else at
