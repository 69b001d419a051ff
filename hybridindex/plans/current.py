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

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hybridindex.errors import ProfileMismatchError
from hybridindex.partitioner.decision import refuse_infeasible
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.profiler.check import check_profile
from hybridindex.profiler.hardware import hardware_info

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
    "latest_plan_id",
    "make_current",
    "same_decision",
    "save_plan",
    "stored_as",
]

#: Kind of the events that say which plan is current.
PLAN_CURRENT = "plan_current"
#: Newest plans of one profile that are compared with one.
_MAX_COMPARED = 20


class HasFingerprint(Protocol):
    """An index, for whom only needs its name."""

    @property
    def fingerprint(self) -> str: ...


def save_plan(
    store: ControlStore, plan: Plan, *, parent: Profile | None = None, trial: bool = False
) -> tuple[Plan, int]:
    """Stores ``plan``, and its profile where that has no id yet; the plan with that profile, and the plan's id.

    Args:
        parent: the stored profile that it was renewed from; see :meth:`ControlStore.save_profile`.
        trial: a refresh tries it: no restart resumes it before it is committed.
    """
    if plan.analysis.profile.id is None:
        profile = store.save_profile(plan.analysis.profile, parent=parent)
        plan = replace(plan, profile_id=profile.id, analysis=replace(plan.analysis, profile=profile))
    profile_id = plan.analysis.profile.id
    assert profile_id is not None
    return plan, store.save_plan(plan.to_record(), profile_id, trial=trial)


def stored_as(store: ControlStore, plan: Plan) -> int | None:
    """The newest row that holds the decision of ``plan`` from the same stored profile; None: there is none."""
    profile_id = plan.analysis.profile.id
    rows = store.list_plans(index_fingerprint=plan.index_fingerprint)
    for row in [row for row in reversed(rows) if row.profile_id == profile_id][:_MAX_COMPARED]:
        record = store.load_plan(row.id).record
        if PlanRequest.from_data(record["data"]["request"]) == plan.request and np.array_equal(
            record["arrays"]["list_device"], plan.list_device
        ):
            return row.id
    return None


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


def current_plan_id(store: ControlStore, index_fingerprint: str) -> int | None:
    """The plan that :func:`make_current` named last for this index."""
    return next((event.payload["plan_id"] for event in _events(store, index_fingerprint, 10)), None)


def latest_plan_id(store: ControlStore, index_fingerprint: str) -> int | None:
    """The "latest" plan, by the table above."""
    stored = store.newest_plan(index_fingerprint)
    event = next(iter(_events(store, index_fingerprint, 10)), None)
    if event is not None and (stored is None or event.at > stored.created_at):
        plan_id: int = event.payload["plan_id"]
        return plan_id
    return None if stored is None else stored.id


def current_plan(store: ControlStore, index: HasFingerprint, *, allow_other_hardware: bool = False) -> Plan | None:
    """The plan that :func:`make_current` named last; None where there is none for this index.

    Raises:
        ProfileMismatchError: it was made for another machine, unless that is allowed.
        ProfileError, StoreError: what is stored is incomplete or damaged.
    """
    plan_id = current_plan_id(store, index.fingerprint)
    if plan_id is None:
        return None
    stored = store.load_plan(plan_id, index_fingerprint=index.fingerprint)
    profile = store.load_profile(stored.profile_id)
    check_profile(profile, index.fingerprint, hardware_info().fingerprint, allow_other_hardware=allow_other_hardware)
    return Plan.from_record(stored.record, profile)


def applied_plans(store: ControlStore, index_fingerprint: str) -> list[dict[str, Any]]:
    """Which plans of an index became the current one and when, oldest first; of the newest events alone."""
    events = _events(store, index_fingerprint, 100)
    return [{"at": event.at, "plan_id": event.payload["plan_id"]} for event in reversed(events)]


def same_decision(one: Plan, other: Plan) -> bool:
    """Whether both put the same lists on the same devices for the same request."""
    return one.request == other.request and np.array_equal(one.list_device, other.list_device)
