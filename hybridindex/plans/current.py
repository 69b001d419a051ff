"""Which plan is the current one, kept in the control store so that a restart resumes with it.

A plan is saved before it serves; an event of kind :data:`COMMITTED` makes it the current one, in one transaction, when
it has proved itself. A crash in between leaves the one before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.profiler.check import check_profile
from hybridindex.profiler.hardware import hardware_info

if TYPE_CHECKING:
    from hybridindex.api import Index
    from hybridindex.store.control import ControlStore
    from hybridindex.types import Profile

__all__ = ["COMMITTED", "commit_plan", "last_commit", "last_committed_plan", "same_decision", "save_plan", "stored_as"]

#: Kind of the events that say which plan is current.
COMMITTED = "plan_committed"
#: Newest commits that are looked through; a store may hold several indexes.
_MAX_COMMITS = 10_000
#: Newest plans of one profile that are compared with one.
_MAX_COMPARED = 20


def save_plan(store: ControlStore, plan: Plan, *, parent: Profile | None = None) -> tuple[Plan, int]:
    """Stores ``plan``, and its profile where that has no id yet; the plan with that profile, and the plan's id.

    ``parent``: the stored profile that it was renewed from; see :meth:`ControlStore.save_profile`.
    """
    if plan.analysis.profile.id is None:
        profile = store.save_profile(plan.analysis.profile, parent=parent)
        plan = replace(plan, profile_id=profile.id, analysis=replace(plan.analysis, profile=profile))
    profile_id = plan.analysis.profile.id
    assert profile_id is not None
    return plan, store.save_plan(plan.to_record(), profile_id)


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


def commit_plan(store: ControlStore, plan: Plan, plan_id: int, *, verified: bool, why: str) -> None:
    """Makes a saved plan the current one of its index."""
    facts = {
        "plan_id": plan_id,
        "profile_id": plan.profile_id,
        "index_fingerprint": plan.index_fingerprint,
        "verified": verified,
        "why": why,
    }
    store.record_event(COMMITTED, facts)


def last_commit(store: ControlStore, index_fingerprint: str) -> dict[str, Any] | None:
    """What :func:`commit_plan` recorded last for this index."""
    for event in store.list_events(kind=COMMITTED, limit=_MAX_COMMITS):
        if event.payload["index_fingerprint"] == index_fingerprint:
            return dict(event.payload)
    return None


def last_committed_plan(store: ControlStore, index: Index, *, allow_other_hardware: bool = False) -> Plan | None:
    """The plan that served last and had proved itself; None where none was ever committed for this index.

    Raises:
        ProfileMismatchError: it was made for another machine, unless that is allowed.
        ProfileError, StoreError: what is stored is incomplete or damaged.
    """
    commit = last_commit(store, index.fingerprint)
    if commit is None:
        return None
    stored = store.load_plan(commit["plan_id"], index_fingerprint=index.fingerprint)
    profile = store.load_profile(stored.profile_id)
    check_profile(profile, index.fingerprint, hardware_info().fingerprint, allow_other_hardware=allow_other_hardware)
    return Plan.from_record(stored.record, profile)


def same_decision(one: Plan, other: Plan) -> bool:
    """Whether both put the same lists on the same devices for the same request."""
    return one.request == other.request and np.array_equal(one.list_device, other.list_device)
