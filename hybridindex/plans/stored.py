"""Stored plans as the daemon and the commands speak of them: loaded by choice, and summed up."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hybridindex.errors import InvalidInputError, ProfileMismatchError
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.tradeoff import Tradeoff, tradeoff_of
from hybridindex.plans.current import HasFingerprint, latest_plan_id
from hybridindex.profiler.hardware import hardware_info

if TYPE_CHECKING:
    from hybridindex.store.control import ControlStore

__all__ = ["load_plan", "plan_summary", "plan_tradeoff", "resume_plan"]


def load_plan(index: HasFingerprint, choice: str, store: ControlStore) -> tuple[int, Plan] | None:
    """The plan named by ``--plan``: an id, "latest" (see :mod:`hybridindex.plans.current`), or None for "none".

    Raises:
        InvalidInputError: not an id. ProfileError: there is no such plan.
    """
    if choice == "none":
        return None
    if choice != "latest" and not choice.isdecimal():
        raise InvalidInputError(f"--plan is {choice!r}; expected a plan id, 'latest' or 'none'")
    plan_id = latest_plan_id(store, index.fingerprint) if choice == "latest" else int(choice)
    stored = store.load_plan(plan_id, index_fingerprint=index.fingerprint)
    profile = store.load_profile(stored.profile_id, index_fingerprint=index.fingerprint)
    return stored.id, Plan.from_record(stored.record, profile)


def resume_plan(
    index: HasFingerprint, choice: str, store: ControlStore, devices: tuple[str, ...]
) -> tuple[int, Plan] | None:
    """The plan that a daemon starts with. Without devices a plan only gives nprobe, and a missing one is no error.

    Raises:
        InvalidInputError, ProfileError. ProfileMismatchError: it was made for another machine.
    """
    if choice == "latest" and not devices and latest_plan_id(store, index.fingerprint) is None:
        return None
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


@lru_cache(maxsize=1)
def plan_tradeoff(plan: Plan | None) -> Tradeoff | None:
    """The curve that a plan was chosen on; computed once for each plan that serves. None without a plan."""
    return None if plan is None else tradeoff_of(plan)
