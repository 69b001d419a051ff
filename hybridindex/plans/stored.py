"""Plans as the daemon and the commands speak of them: loaded by choice, summed up, compared with what is resident."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from hybridindex.api import Index
from hybridindex.errors import InvalidInputError, ProfileMismatchError
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.tradeoff import Tradeoff, tradeoff_of
from hybridindex.profiler.hardware import hardware_info
from hybridindex.store.control import ControlStore

__all__ = [
    "PLAN_APPLIED",
    "applied_plans",
    "load_plan",
    "plan_difference",
    "plan_summary",
    "plan_tradeoff",
    "resume_plan",
]

#: Kind of the event that records a plan that took effect; its payload has ``plan_id`` and ``index``.
PLAN_APPLIED = "plan_applied"


def load_plan(index: Index, choice: str, store: ControlStore) -> tuple[int, Plan] | None:
    """The plan named by ``--plan``: an id, "latest", or None for "none".

    Raises:
        InvalidInputError: not an id. ProfileError: there is no such plan.
    """
    if choice == "none":
        return None
    if choice != "latest" and not choice.isdecimal():
        raise InvalidInputError(f"--plan is {choice!r}; expected a plan id, 'latest' or 'none'")
    plan_id = None if choice == "latest" else int(choice)
    stored = store.load_plan(plan_id, index_fingerprint=index.fingerprint)
    profile = store.load_profile(stored.profile_id, index_fingerprint=index.fingerprint)
    return stored.id, Plan.from_record(stored.record, profile)


def resume_plan(index: Index, choice: str, store: ControlStore, devices: tuple[str, ...]) -> tuple[int, Plan] | None:
    """The plan that a daemon starts with.

    "latest" is what happened last to this index: a plan was applied by a daemon, or one was stored. (A plan that was
    stored, applied and taken back is not the latest: taking it back applied the one before.) Without devices a plan
    only gives nprobe, and a missing one is no error.

    Raises:
        InvalidInputError, ProfileError. ProfileMismatchError: it was made for another machine.
    """
    if choice == "latest":
        stored = store.list_plans(index_fingerprint=index.fingerprint)
        if not stored:
            if devices:
                load_plan(index, choice, store)  # says what is missing
            return None
        choice = str(_applied_after(stored[-1].created_at, index, store) or stored[-1].id)
    found = load_plan(index, choice, store)
    if found is not None and devices:
        number, plan = found
        here = hardware_info().fingerprint
        if plan.hardware_fingerprint != here:
            raise ProfileMismatchError(
                f"plan {number} was made from a profile of machine {plan.hardware_fingerprint}, this is machine "
                f"{here}; run profile and plan here"
            )
    return found


def _applied_after(moment: str, index: Index, store: ControlStore) -> int | None:
    for event in store.list_events(kind=PLAN_APPLIED, index_fingerprint=index.fingerprint, limit=1):
        plan_id = event.payload.get("plan_id")
        return plan_id if event.at > moment and isinstance(plan_id, int) else None
    return None


def applied_plans(index_fingerprint: str, store: ControlStore) -> list[dict[str, Any]]:
    """Which plans of an index took effect and when, oldest first; of the newest events alone."""
    events = store.list_events(kind=PLAN_APPLIED, index_fingerprint=index_fingerprint)
    return [{"at": e.at, "plan_id": e.payload.get("plan_id")} for e in reversed(events)]


def plan_summary(plan: Plan) -> dict[str, Any]:
    """A plan's numbers, without its arrays."""
    return {
        "verdict": str(plan.verdict),
        "reason": plan.reason,
        "slo_ms": plan.request.slo_ms,
        "coverage": plan.coverage,
        "coverage_bytes": plan.coverage_bytes,
        "device_bytes": plan.device_bytes,
        "n_resident": len(plan.resident_lists),
        "n_devices": plan.n_devices,
        "predicted_hit_rate": plan.predicted_hit_rate,
        "batch": plan.batch,
        "predicted_latency_ms": plan.predicted_latency_ms(max(1, plan.batch)),
        "rate_qps": plan.rate_qps,
        "max_sustainable_qps": plan.max_sustainable_qps,
        "nearest_slo_ms": plan.nearest_slo_ms,
        "hit_rate_model": plan.hit_rate_model,
        "host_model": plan.host_model,
    }


def plan_difference(plan: Plan, current: Plan | None, list_device: Any, list_bytes: Any) -> dict[str, Any]:
    """What changing to ``plan`` would move, and what it would gain.

    Args:
        list_device: (nlist,) int16 where lists are now, -1 = host.
        list_bytes: (nlist,) int64.
    """
    arriving = (plan.list_device >= 0) & (plan.list_device != list_device)
    leaving = (list_device >= 0) & (plan.list_device < 0)
    gain: dict[str, Any] = {}
    if current is not None:
        batch = max(1, plan.batch)
        gain = {
            "latency_ms": current.predicted_latency_ms(batch) - plan.predicted_latency_ms(batch),
            "hit_rate": plan.predicted_hit_rate - current.predicted_hit_rate,
            "device_bytes": current.device_bytes - plan.device_bytes,
            "batch": batch,
        }
    return {
        "lists_to_move": int(np.count_nonzero(arriving)),
        "bytes_to_move": int(list_bytes[arriving].sum()),
        "lists_to_drop": int(np.count_nonzero(leaving)),
        "gain": gain,
    }


@lru_cache(maxsize=1)
def plan_tradeoff(plan: Plan | None) -> Tradeoff | None:
    """The curve that a plan was chosen on; computed once for each plan that serves. None without a plan."""
    return None if plan is None else tradeoff_of(plan)
