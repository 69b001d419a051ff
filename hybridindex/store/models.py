"""The tables. What the migrations build and what this module declares are equal; a test compares them.

Text, double precision, 64-bit integers, JSON and blobs only, so that SQLite and PostgreSQL hold the same. Rows are
written once and never changed, but for those of the schedule. Times are ISO 8601 UTC text. What the columns of a sample
mean is said in :mod:`hybridindex.types`.
"""

from __future__ import annotations

from typing import Annotated, Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    Text,
    UniqueConstraint,
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

__all__ = [
    "Base",
    "EventRow",
    "HardwareRow",
    "LatencySampleRow",
    "PlanArrayRow",
    "PlanRow",
    "ProfileArrayRow",
    "ProfileRow",
    "RecallPointRow",
    "ScheduleRow",
    "TransferSampleRow",
]

_Big = Annotated[int, mapped_column(BigInteger)]
_Json = Annotated[dict[str, Any], mapped_column(JSON)]
_Id = Annotated[int, mapped_column(primary_key=True)]
_OfProfile = Annotated[int, mapped_column(ForeignKey("profiles.id", ondelete="CASCADE"), primary_key=True)]
#: See :mod:`hybridindex.store.digests`; None: written by an older version.
_Digest = Annotated[str | None, mapped_column()]
#: Place in the tuple that the row came from.
_Position = Annotated[int, mapped_column(primary_key=True, autoincrement=False)]


class Base(DeclarativeBase):
    """Owner of the metadata, with names for every constraint so that later migrations can address them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {str: Text(), float: Double(), bytes: LargeBinary()}  # noqa: RUF012


class HardwareRow(Base):
    """A machine as it was seen. One fingerprint may have several rows: what it does not cover (versions) can differ."""

    __tablename__ = "hardware"
    __table_args__ = (UniqueConstraint("fingerprint", "digest"),)

    id: Mapped[_Id]
    fingerprint: Mapped[str]
    #: SHA-256 of ``data`` as canonical JSON.
    digest: Mapped[str]
    data: Mapped[_Json]


class ProfileRow(Base):
    """The scalars of a profile."""

    __tablename__ = "profiles"

    id: Mapped[_Id]
    created_at: Mapped[str]
    index_fingerprint: Mapped[str] = mapped_column(index=True)
    hardware_id: Mapped[int] = mapped_column(ForeignKey("hardware.id"), index=True)
    metric: Mapped[str]
    codec: Mapped[str]
    dim: Mapped[_Big]
    count: Mapped[_Big]
    nlist: Mapped[_Big]
    nprobe: Mapped[_Big]
    k: Mapped[_Big]
    scanner: Mapped[str]
    threads: Mapped[_Big]
    omp_wait_policy: Mapped[str]
    load_average: Mapped[float]
    seed: Mapped[_Big]
    notes: Mapped[_Json]
    #: Of each group of samples.
    sample_digests: Mapped[dict[str, str] | None] = mapped_column(JSON(none_as_null=True))
    digest: Mapped[_Digest]


class ProfileArrayRow(Base):
    """list_bytes, list_sizes, list_accesses, fit_probes, held_probes; see :mod:`hybridindex.store.arrays`."""

    __tablename__ = "profile_arrays"

    profile_id: Mapped[_OfProfile]
    name: Mapped[str] = mapped_column(primary_key=True)
    data: Mapped[bytes]


class LatencySampleRow(Base):
    """One StageSample of a profile."""

    __tablename__ = "latency_samples"

    profile_id: Mapped[_OfProfile]
    position: Mapped[_Position]
    stage: Mapped[str]
    batch: Mapped[_Big]
    seconds: Mapped[float]
    probes: Mapped[_Big]
    work_bytes: Mapped[_Big]
    max_work_bytes: Mapped[_Big]
    unique_bytes: Mapped[_Big]
    coverage: Mapped[float]
    min_hit_rate: Mapped[float]
    device: Mapped[str]


class TransferSampleRow(Base):
    """One TransferSample of a profile."""

    __tablename__ = "transfer_samples"

    profile_id: Mapped[_OfProfile]
    position: Mapped[_Position]
    device: Mapped[str]
    pinned: Mapped[bool]
    nbytes: Mapped[_Big]
    seconds: Mapped[float]


class RecallPointRow(Base):
    """One RecallPoint of a profile."""

    __tablename__ = "recall_points"

    profile_id: Mapped[_OfProfile]
    position: Mapped[_Position]
    nprobe: Mapped[_Big]
    recall: Mapped[float]
    ndcg: Mapped[float]
    k: Mapped[_Big]
    n_queries: Mapped[_Big]


class PlanRow(Base):
    """A decision: ``data`` is the record's JSON, the other columns repeat what one wants to query."""

    __tablename__ = "plans"

    id: Mapped[_Id]
    profile_id: Mapped[int] = mapped_column(ForeignKey("profiles.id"), index=True)
    created_at: Mapped[str]
    verdict: Mapped[str]
    slo_ms: Mapped[float | None]
    coverage: Mapped[float | None]
    device_bytes: Mapped[int | None] = mapped_column(BigInteger)
    #: A refresh stored it to try it; whether it was committed is said by an event.
    trial: Mapped[bool] = mapped_column(server_default=false())
    data: Mapped[_Json]
    digest: Mapped[_Digest]


class PlanArrayRow(Base):
    """One array of a plan's record."""

    __tablename__ = "plan_arrays"

    plan_id: Mapped[int] = mapped_column(ForeignKey("plans.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    data: Mapped[bytes]


class EventRow(Base):
    """Something that happened: a refresh, a device that failed, a plan that was applied."""

    __tablename__ = "events"
    __table_args__ = (Index(None, "kind", "id"), Index(None, "index_fingerprint", "id"))

    id: Mapped[_Id]
    at: Mapped[str]
    kind: Mapped[str]
    #: That ``data`` names; None: it is about no index, or about all.
    index_fingerprint: Mapped[str | None]
    data: Mapped[_Json]
    digest: Mapped[_Digest]


class ScheduleRow(Base):
    """An update that is made at set times; see :mod:`hybridindex.refresh.timetable`."""

    __tablename__ = "refresh_schedule"

    name: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    spec: Mapped[str]
    action: Mapped[str]
    enabled: Mapped[bool]
    last_run_at: Mapped[str | None]
    created_at: Mapped[str | None]
    digest: Mapped[_Digest]
