"""What the store returns besides :class:`hybridindex.types.Profile`. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

__all__ = [
    "BENCH",
    "LLM_PROFILED",
    "MEASURED",
    "PLAN_CURRENT",
    "PlanRecord",
    "PlanSummary",
    "ProfileSummary",
    "ScheduleEntry",
    "StoredEvent",
    "StoredPlan",
]

#: Kind of the events that say which plan of an index is current; :mod:`hybridindex.plans.current` writes them.
PLAN_CURRENT = "plan_current"
#: Of measurements of an LLM (:mod:`hybridindex.plans.llm_profiles`), and of loads (:mod:`hybridindex.plans.benches`).
LLM_PROFILED, BENCH = "llm_profiled", "bench"
#: Events that somebody made on purpose and that took time: others do not take their places.
MEASURED = frozenset({LLM_PROFILED, BENCH})


class PlanRecord(TypedDict):
    """A plan as plain data: what ``Plan.to_record()`` makes and ``Plan.from_record()`` reads."""

    #: JSON-able; ``verdict`` (a string) is required; ``request.slo_ms`` (or ``slo_ms``), ``coverage`` and
    #: ``device_bytes`` are repeated in the summary where they are numbers. Tuples come back as lists.
    data: dict[str, Any]
    #: Name -> array of bools, integers or floats of at most 8 bytes.
    arrays: dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """One stored profile, without samples and arrays."""

    id: int
    #: ISO 8601, UTC.
    created_at: str
    index_fingerprint: str
    hardware_fingerprint: str
    metric: str
    codec: str
    dim: int
    count: int
    nlist: int
    nprobe: int
    k: int
    scanner: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """A plan as it was saved."""

    id: int
    profile_id: int
    index_fingerprint: str
    #: ISO 8601, UTC.
    created_at: str
    record: PlanRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """One stored plan, without its record; ``None`` where the record's data has no such number."""

    id: int
    profile_id: int
    index_fingerprint: str
    created_at: str
    verdict: str
    slo_ms: float | None
    coverage: float | None
    device_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """Something that happened, as it was recorded."""

    id: int
    #: ISO 8601, UTC.
    at: str
    kind: str
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleEntry:
    """One row of the refresh's schedule, as it was stored; :mod:`hybridindex.refresh.timetable` says what is right."""

    name: str
    #: "interval": ``spec`` is seconds; "cron": ``spec`` is a cron line, UTC.
    kind: str
    spec: str
    #: What is done then: "update".
    action: str
    enabled: bool = True
    #: ISO 8601, UTC; None: its time has not come yet.
    last_run_at: str | None = None
    #: ISO 8601, UTC; given by the store when it writes the row.
    created_at: str | None = None
