"""Plans and events to rows and back, inside a session that the caller opened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import Select, insert, select, union_all
from sqlalchemy.orm import Session

from hybridindex.errors import InvalidInputError, ProfileError, StoreError
from hybridindex.store.arrays import decode_array, encode_array
from hybridindex.store.checks import check_scalar
from hybridindex.store.digests import check_digest, digest_of_blobs, digest_of_row
from hybridindex.store.faults import is_of_one_row, translated
from hybridindex.store.jsondata import from_json, to_json_object
from hybridindex.store.models import EventRow, PlanArrayRow, PlanRow, ProfileRow
from hybridindex.store.profiles import refuse_mismatch
from hybridindex.store.records import PLAN_CURRENT, PlanSummary, StoredEvent, StoredPlan

__all__ = [
    "event_of",
    "insert_event",
    "insert_plan",
    "select_events",
    "select_newest_plan",
    "select_plan",
    "select_plan_summaries",
    "select_whole_events",
]


def insert_plan(
    session: Session, record: Mapping[str, Any], profile_id: int, created_at: str, where: str, *, trial: bool
) -> int:
    """Write a record and return its id.

    Raises:
        InvalidInputError: the record is not ``{"data": …, "arrays": …}`` with a verdict, or holds what is not stored.
        ProfileError: there is no such profile.
    """
    if not isinstance(record, Mapping) or set(record) != {"data", "arrays"}:
        raise InvalidInputError("plan record: a mapping with exactly the keys 'data' and 'arrays' is needed")
    data, arrays = to_json_object(record["data"], "plan.data"), record["arrays"]
    check_scalar(data.get("verdict"), "plan.data.verdict", str)
    if not isinstance(arrays, Mapping):
        raise InvalidInputError(f"plan.arrays: {type(arrays).__name__} given, a mapping of names to arrays is needed")
    for name in arrays:
        check_scalar(name, "plan.arrays: name", str)
    blobs = {n: encode_array(a, name=f"plan.arrays.{n}") for n, a in arrays.items()}
    if session.get(ProfileRow, profile_id) is None:
        raise ProfileError(f"control store {where}: it holds no profile {profile_id!r} for this plan")
    row = PlanRow(
        profile_id=profile_id,
        created_at=created_at,
        verdict=data["verdict"],
        slo_ms=_number(_slo_ms(data)),
        coverage=_number(data.get("coverage")),
        device_bytes=_whole(data.get("device_bytes")),
        trial=trial,
        data=data,
    )
    session.add(row)
    session.flush()
    if blobs:
        session.execute(insert(PlanArrayRow), [{"plan_id": row.id, "name": n, "data": b} for n, b in blobs.items()])
    row.digest = digest_of_row(row, arrays=digest_of_blobs(blobs))
    return row.id


def _slo_ms(data: Mapping[str, Any]) -> object:
    request = data.get("request")
    return request.get("slo_ms") if isinstance(request, Mapping) else data.get("slo_ms")


def _number(value: object) -> float | None:
    # The columns are for queries only; the data keeps what these cannot hold.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _whole(value: object) -> int | None:
    is_int = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
    return value if is_int and isinstance(value, int) else None


def select_plan(session: Session, plan_id: int | None, index_fingerprint: str | None, where: str) -> StoredPlan:
    """The plan with that id, or the one saved last (for that index, where given).

    Raises:
        ProfileError: there is none.
        ProfileMismatchError: the plan asked for rests on a profile of another index.
        StoreError: what is stored is damaged.
    """
    query = select(PlanRow, ProfileRow.index_fingerprint).join(ProfileRow, ProfileRow.id == PlanRow.profile_id)
    if plan_id is not None:
        query = query.where(PlanRow.id == plan_id)
    elif index_fingerprint is not None:
        query = query.where(ProfileRow.index_fingerprint == index_fingerprint)
    found = session.execute(query.order_by(PlanRow.id.desc()).limit(1)).first()
    if found is None:
        if plan_id is not None:
            raise ProfileError(f"control store {where}: it holds no plan {plan_id}; 'hybridindex history' lists plans")
        of_index = f" of index {index_fingerprint!r}" if index_fingerprint is not None else ""
        raise ProfileError(
            f"control store {where}: it holds no plan{of_index}; store one with 'hybridindex plan'. In Python "
            "Index.plan stores nothing: Index.apply_plan stores the plan and makes it the one that serves"
        )
    row, fingerprint = found
    stored = select(PlanArrayRow.name, PlanArrayRow.data).where(PlanArrayRow.plan_id == row.id)
    blobs = {r.name: r.data for r in session.execute(stored)}
    digest = digest_of_row(row, arrays=digest_of_blobs(blobs))
    check_digest(row.digest, digest, f"plan {row.id}", where, otherwise="make and apply another plan")
    refuse_mismatch(row.profile_id, {"index": fingerprint}, {"index": index_fingerprint})
    named = f"control store {where}: plan {row.id}"
    arrays = {name: decode_array(blob, name=f"{named}, {name}") for name, blob in blobs.items()}
    return StoredPlan(
        id=row.id,
        profile_id=row.profile_id,
        index_fingerprint=fingerprint,
        created_at=row.created_at,
        record={"data": from_json(row.data), "arrays": arrays},
    )


def select_plan_summaries(session: Session, *, index_fingerprint: str | None = None) -> list[PlanSummary]:
    """Summaries in the order of saving."""
    query = _summaries(index_fingerprint).order_by(PlanRow.id)
    return [PlanSummary(**row) for row in session.execute(query).mappings()]


def select_newest_plan(session: Session, index_fingerprint: str) -> PlanSummary | None:
    """The plan of an index that was saved last and not for a trial."""
    query = _summaries(index_fingerprint).where(PlanRow.trial.is_(False)).order_by(PlanRow.id.desc()).limit(1)
    return next((PlanSummary(**row) for row in session.execute(query).mappings()), None)


def _summaries(index_fingerprint: str | None) -> Select[Any]:
    columns = [PlanRow.__table__.c[f.name] for f in fields(PlanSummary) if f.name != "index_fingerprint"]
    query = select(*columns, ProfileRow.index_fingerprint).join(ProfileRow, ProfileRow.id == PlanRow.profile_id)
    return query if index_fingerprint is None else query.where(ProfileRow.index_fingerprint == index_fingerprint)


def insert_event(session: Session, kind: str, payload: Mapping[str, Any], at: str) -> int:
    """Write an event and return its id.

    Raises:
        InvalidInputError: an empty kind, or a payload that is not JSON-able.
    """
    check_scalar(kind, "event kind", str)
    if not kind:
        raise InvalidInputError("event kind: '' given, a word is needed")
    data = to_json_object(payload, "event payload")
    row = EventRow(at=at, kind=kind, index_fingerprint=_index_of(data), data=data)
    session.add(row)
    session.flush()
    row.digest = digest_of_row(row)
    return row.id


def _index_of(payload: Mapping[str, Any]) -> str | None:
    """The index that an event says it is about."""
    named = payload.get("index", payload.get("index_fingerprint"))
    return named if isinstance(named, str) else None


def select_events(
    session: Session,
    where: str,
    *,
    kind: str | None,
    index_fingerprint: str | Sequence[str] | None,
    after_id: int,
    limit: int,
) -> list[StoredEvent]:
    """As :meth:`hybridindex.store.control.ControlStore.list_events`."""
    if limit <= 0:
        raise InvalidInputError(f"limit: {limit} given, at least 1 is needed")
    query = select(EventRow).where(EventRow.id > after_id).order_by(EventRow.id.desc()).limit(limit)
    if kind is not None:
        query = query.where(EventRow.kind == kind)
    if index_fingerprint is not None:
        # Each part is the end of one range of an index; "or" would read and sort both ranges whole.
        of_index = EventRow.index_fingerprint
        ids = query.with_only_columns(EventRow.id)
        names = (index_fingerprint,) if isinstance(index_fingerprint, str) else index_fingerprint
        parts = [ids.where(of_index == name).subquery() for name in names] + [ids.where(of_index.is_(None)).subquery()]
        found = union_all(*(select(part) for part in parts))
        query = select(EventRow).where(EventRow.id.in_(found)).order_by(EventRow.id.desc()).limit(limit)
    return [event_of(row, where) for row in session.scalars(query)]


def select_whole_events(
    session: Session, where: str, *, kind: str | None, limit: int
) -> tuple[list[StoredEvent], dict[int, StoreError]]:
    """As :meth:`hybridindex.store.control.ControlStore.read_events`."""
    found, damaged = [], {}
    # Row by row: a row that cannot be decoded ends the query that meets it.
    newest = select(EventRow.id).order_by(EventRow.id.desc()).limit(limit)
    if kind is not None:
        newest = newest.where(EventRow.kind == kind)
    for number in session.scalars(newest).all():
        try:
            with translated(f"{where}: event {number}"):
                found.append(event_of(session.get_one(EventRow, number), where))
        except StoreError as error:
            if not is_of_one_row(error):
                raise
            damaged[number] = error
    return found, damaged


def event_of(row: EventRow, where: str) -> StoredEvent:
    """Raises StoreError: the row is not what was written."""
    otherwise = "apply the plan again" if row.kind == PLAN_CURRENT else "move it away to begin anew"
    check_digest(row.digest, digest_of_row(row), f"event {row.id} ({row.kind})", where, otherwise=otherwise)
    return StoredEvent(id=row.id, at=row.at, kind=row.kind, payload=from_json(row.data))
