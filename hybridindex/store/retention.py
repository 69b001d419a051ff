"""Which rows of a control store may go: old plans, profiles and events, and never what a restart or a reason needs.

Kept whatever the limits say: of each index the current plan, the event that says so, and the plan stored last (not
counting those that a refresh tries); the plans that the caller names; the profile of every plan that stays, and the
profiles that it was renewed from. Rows go in one transaction. The file of a SQLite store keeps its size, its pages are
used again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from typing import Annotated

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from hybridindex.config import Setting
from hybridindex.errors import InvalidInputError
from hybridindex.store.models import Base, EventRow, HardwareRow, PlanRow, ProfileRow
from hybridindex.store.plans import event_of
from hybridindex.store.records import MEASURED, PLAN_CURRENT

__all__ = ["Pruned", "Retention", "prune_rows"]

#: Ids in one statement; SQLite and PostgreSQL bound their number.
_CHUNK = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How many of the newest rows stay: plans and profiles of each index, events of all. Of measurements (of an LLM,
    of a ``bench``) as many more."""

    plans: Annotated[int, Setting(help="Newest plans to keep of each index.", flag="--keep-plans")] = 500
    profiles: Annotated[int, Setting(help="Newest profiles to keep of each index.", flag="--keep-profiles")] = 100
    events: Annotated[int, Setting(help="Newest events to keep.", flag="--keep-events")] = 20_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
                raise InvalidInputError(f"{field.name} is {value!r}; expected how many to keep, 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """How many rows went, or would go."""

    plans: int
    profiles: int
    events: int

    def __bool__(self) -> bool:
        return bool(self.plans or self.profiles or self.events)


def prune_rows(
    session: Session, where: str, retention: Retention, *, keep_plans: Collection[int], dry_run: bool
) -> Pruned:
    """Deletes what the retention does not keep; ``dry_run``: only counts it.

    Raises:
        StoreError: an event that says which plan is current is damaged, so that nobody knows which has to stay.
    """
    deciding, current = _current(session, where)
    plans = session.execute(
        select(PlanRow.id, PlanRow.profile_id, PlanRow.trial, ProfileRow.index_fingerprint)
        .join(ProfileRow, ProfileRow.id == PlanRow.profile_id)
        .order_by(PlanRow.id.desc())
    ).all()
    kept_plans = _newest(((p.id, p.index_fingerprint) for p in plans), retention.plans) | current | set(keep_plans)
    kept_plans |= _newest(((p.id, p.index_fingerprint) for p in plans if not p.trial), 1)
    profiles = session.execute(
        select(ProfileRow.id, ProfileRow.index_fingerprint, ProfileRow.notes).order_by(ProfileRow.id.desc())
    ).all()
    kept_profiles = _newest(((p.id, p.index_fingerprint) for p in profiles), retention.profiles)
    kept_profiles |= {p.profile_id for p in plans if p.id in kept_plans}
    # A parent has a smaller id than what was renewed from it: newest first, one pass finds the whole line.
    for profile in profiles:
        renewed = profile.notes.get("renewed") if isinstance(profile.notes, dict) else None
        parent = renewed.get("parent") if isinstance(renewed, dict) else None
        if profile.id in kept_profiles and isinstance(parent, int):
            kept_profiles.add(parent)
    newest_first, measured = select(EventRow.id).order_by(EventRow.id.desc()), EventRow.kind.in_(MEASURED)
    events = [
        number
        for of_kind in (measured, ~measured)
        for number in session.scalars(newest_first.where(of_kind).offset(retention.events))
    ]
    gone_plans = [p.id for p in plans if p.id not in kept_plans]
    gone_profiles = [p.id for p in profiles if p.id not in kept_profiles]
    gone_events = [number for number in events if number not in deciding]
    if not dry_run:
        # Arrays and samples go with their plan or profile.
        _delete(session, PlanRow, gone_plans)
        _delete(session, ProfileRow, gone_profiles)
        _delete(session, EventRow, gone_events)
        session.execute(delete(HardwareRow).where(HardwareRow.id.not_in(select(ProfileRow.hardware_id))))
    return Pruned(plans=len(gone_plans), profiles=len(gone_profiles), events=len(gone_events))


def _current(session: Session, where: str) -> tuple[set[int], set[int]]:
    """The newest event of each index that names its current plan, and those plans."""
    newest = select(func.max(EventRow.id)).where(EventRow.kind == PLAN_CURRENT).group_by(EventRow.index_fingerprint)
    events = [event_of(row, where) for row in session.scalars(select(EventRow).where(EventRow.id.in_(newest)))]
    plans = {event.payload.get("plan_id") for event in events if isinstance(event.payload, dict)}
    return {event.id for event in events}, {plan_id for plan_id in plans if isinstance(plan_id, int)}


def _newest(rows: Iterable[tuple[int, str]], count: int) -> set[int]:
    """The first ``count`` ids of each index; ``rows`` are (id, index), newest first."""
    kept: dict[str, list[int]] = defaultdict(list)
    for number, index in rows:
        if len(kept[index]) < count:
            kept[index].append(number)
    return {number for numbers in kept.values() for number in numbers}


def _delete(session: Session, table: type[Base], ids: list[int]) -> None:
    for start in range(0, len(ids), _CHUNK):
        session.execute(delete(table).where(table.__table__.c["id"].in_(ids[start : start + _CHUNK])))
