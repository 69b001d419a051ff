"""Profiles to rows and back, inside a session that the caller opened. Knows no engines, locks or files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

import numpy.typing as npt
from sqlalchemy import RowMapping, Select, func, insert, literal, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from hybridindex.errors import ProfileError, ProfileMismatchError, StoreError
from hybridindex.store.arrays import decode_array, encode_array
from hybridindex.store.checks import check_profile
from hybridindex.store.digests import check_digest, digest_of_blobs, digest_of_json, digest_of_row, digest_of_samples
from hybridindex.store.jsondata import from_json, to_json_object
from hybridindex.store.models import (
    Base,
    HardwareRow,
    LatencySampleRow,
    ProfileArrayRow,
    ProfileRow,
    RecallPointRow,
    TransferSampleRow,
)
from hybridindex.store.records import ProfileSummary
from hybridindex.types import AccessSample, HardwareInfo, Profile, RecallPoint, StageSample, TransferSample

__all__ = ["insert_profile", "select_profile", "select_summaries"]

#: Columns of ``profiles`` that are fields of Profile, letter by letter.
_SCALARS: Final = tuple(
    c.key
    for c in ProfileRow.__table__.columns
    if c.key not in ("id", "hardware_id", "notes", "sample_digests", "digest") and c.key is not None
)
#: Groups of samples, by field of Profile.
_GROUPS: Final[Mapping[str, type[Base]]] = {
    "stages": LatencySampleRow,
    "transfers": TransferSampleRow,
    "recall": RecallPointRow,
}
_KINDS: Final[Mapping[str, type[StageSample | TransferSample | RecallPoint]]] = {
    "stages": StageSample,
    "transfers": TransferSample,
    "recall": RecallPoint,
}


def insert_profile(session: Session, profile: Profile, parent: Profile | None = None) -> Profile:
    """Write a new row for ``profile``, whatever its id was, and return it with the new id.

    The samples of a stored ``parent`` that are ``profile``'s too, the very same tuples, are copied by the database:
    there are thousands of them, and searches wait for an interpreter that looks at each.

    Raises:
        InvalidInputError: a field that cannot be stored, by name.
    """
    stored = [] if parent is None else _stored_groups(session, profile, parent)
    check_profile(profile, stored=stored)
    scalars = {name: getattr(profile, name) for name in _SCALARS}
    notes = to_json_object(profile.notes, "profile.notes")
    hardware_id = _hardware_id(session, profile.hardware)
    row = ProfileRow(**scalars, hardware_id=hardware_id, notes=notes)
    session.add(row)
    session.flush()
    arrays: dict[str, npt.NDArray[Any]] = {
        "list_bytes": profile.list_bytes,
        "list_sizes": profile.list_sizes,
        "list_accesses": profile.access.list_accesses,
        "fit_probes": profile.access.fit_probes,
        "held_probes": profile.access.held_probes,
    }
    if profile.access.list_candidates is not None and profile.access.held_candidates is not None:
        arrays["list_candidates"] = profile.access.list_candidates
        arrays["held_candidates"] = profile.access.held_candidates
    blobs = {n: encode_array(a, name=n) for n, a in arrays.items()}
    session.execute(
        insert(ProfileArrayRow), [{"profile_id": row.id, "name": n, "data": blob} for n, blob in blobs.items()]
    )
    digests = {}
    for group, table in _GROUPS.items():
        samples = getattr(profile, group)
        if parent is not None and parent.id is not None and group in stored:
            _copy_samples(session, table, parent.id, row.id)
            known = session.get_one(ProfileRow, parent.id).sample_digests or {}
        else:
            _insert_samples(session, table, row.id, samples)
            known = {}
        digests[group] = known.get(group) or digest_of_samples(table, samples)
    row.sample_digests = digests
    row.digest = digest_of_row(row, hardware=digest_of_json(_data_of(profile.hardware)), arrays=digest_of_blobs(blobs))
    return replace(profile, id=row.id)


def _stored_groups(session: Session, profile: Profile, parent: Profile) -> list[str]:
    """Groups that ``profile`` shares with ``parent`` and that the store holds whole: none where that was pruned."""
    row = None if parent.id is None else session.get(ProfileRow, parent.id)
    if row is None or (row.created_at, row.index_fingerprint) != (parent.created_at, parent.index_fingerprint):
        return []
    shared = [group for group in _GROUPS if getattr(profile, group) is getattr(parent, group)]
    return [group for group in shared if _n_samples(session, _GROUPS[group], row.id) == len(getattr(parent, group))]


def _n_samples(session: Session, table: type[Base], profile_id: int) -> int:
    columns = table.__table__.c
    return session.scalar(select(func.count()).where(columns["profile_id"] == profile_id)) or 0


def _copy_samples(session: Session, table: type[Base], source_id: int, profile_id: int) -> None:
    columns = [column for column in table.__table__.c if column.name != "profile_id"]
    theirs = select(literal(profile_id), *columns).where(table.__table__.c["profile_id"] == source_id)
    session.execute(insert(table).from_select(["profile_id", *(column.name for column in columns)], theirs))


def _insert_samples(
    session: Session, table: type[Base], profile_id: int, samples: Sequence[StageSample | TransferSample | RecallPoint]
) -> None:
    # Not asdict, which copies deeply: there are thousands of samples, and searches wait for the interpreter.
    names = [f.name for f in fields(samples[0])] if samples else []
    rows = [
        {"profile_id": profile_id, "position": i, **{name: getattr(sample, name) for name in names}}
        for i, sample in enumerate(samples)
    ]
    if rows:
        session.execute(insert(table), rows)


def _data_of(hardware: HardwareInfo) -> dict[str, Any]:
    return to_json_object({f.name: getattr(hardware, f.name) for f in fields(hardware)}, "hardware")


def _hardware_id(session: Session, hardware: HardwareInfo) -> int:
    data = _data_of(hardware)
    digest = digest_of_json(data)
    values = {"fingerprint": hardware.fingerprint, "digest": digest, "data": data}
    if session.get_bind().dialect.name == "sqlite":
        session.execute(sqlite.insert(HardwareRow).values(values).on_conflict_do_nothing())
    else:
        session.execute(postgresql.insert(HardwareRow).values(values).on_conflict_do_nothing())
    same = (HardwareRow.fingerprint == hardware.fingerprint) & (HardwareRow.digest == digest)
    return session.execute(select(HardwareRow.id).where(same)).scalar_one()


def select_summaries(
    session: Session, *, index_fingerprint: str | None = None, codes_of: str | None = None
) -> list[ProfileSummary]:
    """Summaries in the order of saving."""
    query = _summary_query().order_by(ProfileRow.id)
    if index_fingerprint is not None:
        query = query.where(ProfileRow.index_fingerprint == index_fingerprint)
    if codes_of is not None:
        query = query.where(ProfileRow.notes["codes"]["of"].as_string() == codes_of)
    return [_summary(row) for row in session.execute(query).mappings()]


def _summary_query() -> Select[Any]:
    names = [f.name for f in fields(ProfileSummary) if f.name != "hardware_fingerprint"]
    columns = [ProfileRow.__table__.c[name] for name in names]
    return select(*columns, HardwareRow.fingerprint.label("hardware_fingerprint")).join(
        HardwareRow, HardwareRow.id == ProfileRow.hardware_id
    )


def _summary(row: RowMapping) -> ProfileSummary:
    return ProfileSummary(**row)


def select_profile(
    session: Session,
    where: str,
    profile_id: int | None,
    index_fingerprint: str | None,
    hardware_fingerprint: str | None,
) -> Profile:
    """The profile with that id, or the one saved last that matches both fingerprints.

    Raises:
        ProfileError: there is none.
        ProfileMismatchError: the one asked for, or all there are, belong to another index or machine.
        StoreError: what is stored is damaged.
    """
    newest = _summary_query().order_by(ProfileRow.id.desc()).limit(1)
    wanted = {"index": index_fingerprint, "machine": hardware_fingerprint}
    if profile_id is not None:
        row = session.execute(newest.where(ProfileRow.id == profile_id)).mappings().first()
        if row is None:
            raise ProfileError(f"control store {where}: it holds no profile {profile_id}")
    else:
        matching = newest
        if index_fingerprint is not None:
            matching = matching.where(ProfileRow.index_fingerprint == index_fingerprint)
        if hardware_fingerprint is not None:
            matching = matching.where(HardwareRow.fingerprint == hardware_fingerprint)
        row = session.execute(matching).mappings().first()
        if row is None:
            closest = newest
            if index_fingerprint is not None:
                # Of this index on another machine, before of another index.
                closest = newest.order_by(None).order_by(
                    (ProfileRow.index_fingerprint == index_fingerprint).desc(), ProfileRow.id.desc()
                )
            row = session.execute(closest).mappings().first()
        if row is None:
            raise ProfileError(f"control store {where}: it holds no profile yet; run profile first")
    summary = _summary(row)
    refuse_mismatch(summary.id, {"index": summary.index_fingerprint, "machine": summary.hardware_fingerprint}, wanted)
    return _load(session, summary.id, where)


def refuse_mismatch(profile_id: int, actual: Mapping[str, str], wanted: Mapping[str, str | None]) -> None:
    """Raise ProfileMismatchError unless each wanted fingerprint is ``None`` or equal to the actual one."""
    wrong = [
        f"{what} {actual[what]!r}, not {value!r}"
        for what, value in wanted.items()
        if value is not None and value != actual[what]
    ]
    if wrong:
        found = " and ".join(wrong)
        raise ProfileMismatchError(
            f"profile {profile_id} was measured on {found}; run profile again on this index here"
        )


def _load(session: Session, profile_id: int, store: str) -> Profile:
    row = session.get_one(ProfileRow, profile_id)
    hardware = session.get_one(HardwareRow, row.hardware_id)
    query = select(ProfileArrayRow.name, ProfileArrayRow.data).where(ProfileArrayRow.profile_id == profile_id)
    blobs: dict[str, bytes] = {r.name: r.data for r in session.execute(query)}
    machine = digest_of_json(hardware.data)
    whole = digest_of_row(row, hardware=machine, arrays=digest_of_blobs(blobs))
    otherwise = "profile the index again"
    check_digest(hardware.digest, machine, f"the machine of profile {profile_id}", store, otherwise=otherwise)
    check_digest(row.digest, whole, f"profile {profile_id}", store, otherwise=otherwise)

    def array(name: str, dtype: str, *shape: int | None) -> Any:
        where = f"control store {store}: profile {profile_id}, {name}"
        return decode_array(blobs.get(name, b""), name=where, dtype=dtype, shape=shape)

    groups: dict[str, Any] = {
        group: _select_samples(session, table, _KINDS[group], profile_id) for group, table in _GROUPS.items()
    }
    for group, digest in (row.sample_digests or {}).items():
        found = digest_of_samples(_GROUPS[group], groups[group])
        check_digest(digest, found, f"{group} of profile {profile_id}", store, otherwise=otherwise)
    return Profile(
        id=profile_id,
        **{name: getattr(row, name) for name in _SCALARS},
        hardware=_hardware(from_json(hardware.data), profile_id),
        list_bytes=array("list_bytes", "int64", row.nlist),
        list_sizes=array("list_sizes", "int64", row.nlist),
        access=AccessSample(
            fit_probes=array("fit_probes", "int32", None, row.nprobe),
            held_probes=array("held_probes", "int32", None, row.nprobe),
            list_accesses=array("list_accesses", "float64", row.nlist),
            # Profiles of rows, and of before 0.3, have none.
            list_candidates=array("list_candidates", "float64", row.nlist) if "list_candidates" in blobs else None,
            held_candidates=array("held_candidates", "float32", None, row.nprobe)
            if "held_candidates" in blobs
            else None,
        ),
        **groups,
        notes=from_json(row.notes),
    )


def _hardware(data: Any, profile_id: int) -> HardwareInfo:
    try:
        known = {f.name: data[f.name] for f in fields(HardwareInfo) if f.name in data}
        return HardwareInfo(**{**known, "cpu_flags": tuple(data["cpu_flags"]), "devices": tuple(data["devices"])})
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"profile {profile_id}: its hardware is a damaged row ({error!r})") from error


def _select_samples(
    session: Session, table: type[Base], kind: type[StageSample | TransferSample | RecallPoint], profile_id: int
) -> tuple[StageSample | TransferSample | RecallPoint, ...]:
    columns = table.__table__.c
    query = select(*(columns[f.name] for f in fields(kind)))
    rows = session.execute(query.where(columns["profile_id"] == profile_id).order_by(columns["position"])).mappings()
    return tuple(kind(**row) for row in rows)
