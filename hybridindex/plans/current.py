"""The ledger: which plan of an index is the current one, kept in the control store so that a restart resumes it.

A plan that is stored serves nobody: it may be an experiment. An event of kind :data:`PLAN_CURRENT` makes it the current
one. What a restart resumes is the current plan; "latest" is for who looks at plans or tries them:

=====================================================  =================  ========================================
what happened last to the index                        current            "latest"
=====================================================  =================  ========================================
a plan was applied, or committed by a refresh          that plan          that plan, whenever it was stored
a plan was stored                                      as before          that plan
a refresh stored a plan to try, and has not            as before          as before
committed it
nothing                                                none               none
=====================================================  =================  ========================================
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from hybridindex.errors import ProfileMismatchError, StoreError
from hybridindex.partitioner.decision import refuse_infeasible
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.profiler.check import check_profile
from hybridindex.profiler.hardware import hardware_info
from hybridindex.store.records import PLAN_CURRENT

if TYPE_CHECKING:
    from hybridindex.store.control import ControlStore
    from hybridindex.store.records import StoredEvent
    from hybridindex.types import Profile

__all__ = [
    "PLAN_CURRENT",
    "HasFingerprint",
    "applied_plans",
    "apply_offline",
    "current_plan",
    "current_plan_id",
    "keep_current",
    "latest_plan_id",
    "make_current",
    "newest_current",
    "newest_plan_at",
    "same_decision",
    "save_plan",
    "stored_as",
]

_log = logging.getLogger(__name__)

#: Newest plans of one profile that are compared with one.
_MAX_COMPARED = 20


class HasFingerprint(Protocol):
    """An index, for whom only needs its name."""

    @property
    def fingerprint(self) -> str: ...


def save_plan(
    store: ControlStore, plan: Plan, *, parent: Profile | None = None, trial: bool = False
) -> tuple[Plan, int]:
    """Stores ``plan``, and its profile where the store does not hold it; the plan with that profile, and the plan's id.

    Args:
        parent: the stored profile that it was renewed from; see :meth:`ControlStore.save_profile`.
        trial: a refresh tries it: no restart resumes it before it is committed.
    """
    profile_id = _row_of_profile(store, plan)
    if profile_id is None:
        profile = store.save_profile(plan.analysis.profile, parent=parent)
        profile_id = profile.id
        assert profile_id is not None
        plan = replace(plan, profile_id=profile_id, analysis=replace(plan.analysis, profile=profile))
    return plan, store.save_plan(plan.to_record(), profile_id, trial=trial)


def stored_as(store: ControlStore, plan: Plan) -> int | None:
    """The newest row that holds the decision of ``plan`` from the same stored profile; None: there is none."""
    return next(iter(_rows_of(store, plan)), None)


def keep_current(store: ControlStore, plan: Plan, *, why: str) -> tuple[Plan, int]:
    """Makes a plan that serves the current one, unless it is, and stores it where the store does not hold it: this may
    be another store than the one that it was saved in. The plan with its profile there, and its id."""
    rows = _rows_of(store, plan)
    try:
        current = current_plan_id(store, plan.index_fingerprint)
    except StoreError as error:
        # It is damaged; another one takes its place.
        _log.warning("%s", error)
        current = None
    if current is not None and current in rows:
        return plan, current
    plan_id = next(iter(rows), None)
    if plan_id is None:
        plan, plan_id = save_plan(store, plan)
    make_current(store, plan, plan_id, verified=False, why=why)
    return plan, plan_id


def _rows_of(store: ControlStore, plan: Plan) -> list[int]:
    """Rows that hold the decision of ``plan`` from the same stored profile, the newest first. Damaged ones do not."""
    profile_id = _row_of_profile(store, plan)
    rows = store.list_plans(index_fingerprint=plan.index_fingerprint)
    found = []
    for row in [row for row in reversed(rows) if row.profile_id == profile_id][:_MAX_COMPARED]:
        try:
            record = store.load_plan(row.id).record
        except StoreError as error:
            _log.warning("%s", error)
            continue
        if _decides(plan, PlanRequest.from_data(record["data"]["request"]), record["arrays"]):
            found.append(row.id)
    return found


def _row_of_profile(store: ControlStore, plan: Plan) -> int | None:
    """The row of its profile; None: it is not stored here. An id may be of another store, which was lost."""
    profile = plan.analysis.profile
    if profile.id is None:
        return None
    rows = store.list_profiles(index_fingerprint=plan.index_fingerprint)
    return next((row.id for row in rows if (row.id, row.created_at) == (profile.id, profile.created_at)), None)


def make_current(store: ControlStore, plan: Plan, plan_id: int, *, verified: bool, why: str) -> None:
    """Makes a stored plan the current one of its index.

    ``verified``: it served requests as well as it promised.
    """
    facts = {
        "plan_id": plan_id,
        "profile_id": plan.profile_id,
        "index_fingerprint": plan.index_fingerprint,
        "verified": verified,
        "why": why,
    }
    store.record_event(PLAN_CURRENT, facts)


def apply_offline(
    index: HasFingerprint, store: ControlStore, plan: Plan | int, *, force: bool, why: str = "applied by hand"
) -> int:
    """Makes ``plan`` (an id, or a plan that may not be stored yet) the current one where nothing serves; its id.

    Raises:
        InfeasiblePlanError: it is infeasible, and ``force`` is false.
        ProfileError, ProfileMismatchError: there is no such plan, or it is another index's. StoreError.
    """
    plan_id = plan if isinstance(plan, int) else stored_as(store, plan)
    if isinstance(plan, int):
        stored = store.load_plan(plan, index_fingerprint=index.fingerprint)
        plan = Plan.from_record(stored.record, store.load_profile(stored.profile_id))
    elif plan.index_fingerprint != index.fingerprint:
        raise ProfileMismatchError(f"the plan was made for index {plan.index_fingerprint}, not {index.fingerprint}")
    refuse_infeasible(plan, force=force)
    if plan_id is None:
        plan, plan_id = save_plan(store, plan)
    make_current(store, plan, plan_id, verified=False, why=why)
    return plan_id


def _events(store: ControlStore, index_fingerprint: str, limit: int) -> list[StoredEvent]:
    """Newest first; only those that name a plan of this index."""
    found = store.list_events(kind=PLAN_CURRENT, index_fingerprint=index_fingerprint, limit=limit)
    # Asked for one index, the store also gives events that name none.
    return [
        event
        for event in found
        if event.payload.get("index_fingerprint") == index_fingerprint and isinstance(event.payload.get("plan_id"), int)
    ]


def newest_current(store: ControlStore, index_fingerprint: str) -> StoredEvent | None:
    """The event that made a plan of this index the current one last. It alone counts: damage of those before it does
    not hide it."""
    found = (event for limit in (1, 10) for event in _events(store, index_fingerprint, limit))
    return next(found, None)


def current_plan_id(store: ControlStore, index_fingerprint: str) -> int | None:
    """The plan that :func:`make_current` named last for this index."""
    event = newest_current(store, index_fingerprint)
    return None if event is None else event.payload["plan_id"]


def latest_plan_id(store: ControlStore, index_fingerprint: str) -> int | None:
    """The "latest" plan, by the table above."""
    stored, event = store.newest_plan(index_fingerprint), newest_current(store, index_fingerprint)
    if event is not None and (stored is None or event.at > stored.created_at):
        plan_id: int = event.payload["plan_id"]
        return plan_id
    return None if stored is None else stored.id


def newest_plan_at(store: ControlStore, index_fingerprint: str) -> str | None:
    """When a plan of this index was stored or applied last; None: never."""
    stored, event = store.newest_plan(index_fingerprint), newest_current(store, index_fingerprint)
    times = [*([] if stored is None else [stored.created_at]), *([] if event is None else [event.at])]
    return max(times, default=None)


def current_plan(store: ControlStore, index: HasFingerprint) -> Plan | None:
    """The plan that :func:`make_current` named last; None where there is none for this index.

    Raises:
        ProfileMismatchError: it was made for another machine.
        ProfileError, StoreError: what is stored is incomplete or damaged.
    """
    plan_id = current_plan_id(store, index.fingerprint)
    if plan_id is None:
        return None
    stored = store.load_plan(plan_id, index_fingerprint=index.fingerprint)
    profile = store.load_profile(stored.profile_id)
    check_profile(profile, index.fingerprint, hardware_info().fingerprint, allow_other_hardware=False)
    return Plan.from_record(stored.record, profile)


def applied_plans(store: ControlStore, index_fingerprint: str) -> list[dict[str, Any]]:
    """Which plans of an index became the current one and when, oldest first; of the newest events alone."""
    events = _events(store, index_fingerprint, 100)
    return [{"at": event.at, "plan_id": event.payload["plan_id"]} for event in reversed(events)]


def same_decision(one: Plan, other: Plan) -> bool:
    """Whether both put the same lists on the same devices for the same request."""
    return _decides(one, other.request, {"list_device": other.list_device, "row_device": other.row_device})


def _decides(plan: Plan, request: PlanRequest, arrays: Mapping[str, npt.ArrayLike]) -> bool:
    # Records of earlier versions have no rows beside codes.
    return (
        plan.request == request
        and np.array_equal(plan.list_device, arrays["list_device"])
        and np.array_equal(plan.row_device, arrays.get("row_device", np.full(plan.nlist, -1)))
    )
