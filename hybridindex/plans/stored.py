"""Stored plans as the daemon and the commands speak of them: loaded by choice, and summed up."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hybridindex.errors import InvalidInputError, ProfileError, ProfileMismatchError
from hybridindex.partitioner.plan import Plan, Verdict
from hybridindex.partitioner.tradeoff import Tradeoff, tradeoff_of
from hybridindex.plans.current import HasFingerprint, current_plan_id, latest_plan_id
from hybridindex.profiler.hardware import hardware_info

if TYPE_CHECKING:
    from hybridindex.store.control import ControlStore

__all__ = [
    "MOST_DIGITS",
    "how_to_apply",
    "load_plan",
    "plan_summary",
    "plan_tradeoff",
    "refuse_other_machine",
    "resume_plan",
]

#: Of an id.
MOST_DIGITS = 18


def load_plan(index: HasFingerprint, choice: str, store: ControlStore) -> tuple[int, Plan] | None:
    """The plan named by ``--plan``: an id, "current" or "latest" (see :mod:`hybridindex.plans.current`), or None for
    "none".

    Raises:
        InvalidInputError: not an id. ProfileError: there is no such plan.
    """
    if choice == "none":
        return None
    # A larger number is no id of the store's, and may be one of thousands of digits.
    if choice not in ("current", "latest") and not (choice.isdecimal() and len(choice) <= MOST_DIGITS):
        raise InvalidInputError(f"plan is {choice[:40]!r}; expected a plan id, 'current' or 'latest'")
    if choice == "current":
        plan_id = current_plan_id(store, index.fingerprint)
        if plan_id is None:
            raise ProfileError(f"no plan of index {index.fingerprint!r} was applied; {how_to_apply(index, store)}")
    else:
        plan_id = latest_plan_id(store, index.fingerprint) if choice == "latest" else int(choice)
    stored = store.load_plan(plan_id, index_fingerprint=index.fingerprint)
    profile = store.load_profile(stored.profile_id, index_fingerprint=index.fingerprint)
    return stored.id, Plan.from_record(stored.record, profile)


def how_to_apply(index: HasFingerprint, store: ControlStore, path: object = "INDEX") -> str:
    """What to do where no plan was applied: the command."""
    newest = store.newest_plan(index.fingerprint)
    if newest is None:
        return f"no plan is stored: run profile and plan, then: hybridindex apply {path}"
    force = "" if newest.verdict == Verdict.FEASIBLE else " --force"
    command = f"hybridindex apply {path} --plan {newest.id}{force}"
    return f"plan {newest.id} is stored ({newest.verdict}); apply it with: {command}"


def resume_plan(
    index: HasFingerprint, choice: str, store: ControlStore, devices: tuple[str, ...]
) -> tuple[int, Plan] | None:
    """The plan that a router starts with; None: the host serves alone. Without devices a plan only gives nprobe.

    Raises:
        InvalidInputError, ProfileError. ProfileMismatchError: it was made for another machine.
    """
    fingerprint = index.fingerprint
    if choice == "current" and current_plan_id(store, fingerprint) is None:
        return None
    if choice == "latest" and not devices and latest_plan_id(store, fingerprint) is None:
        return None
    found = load_plan(index, choice, store)
    if found is not None and devices:
        refuse_other_machine(*found)
    return found


def refuse_other_machine(number: int, plan: Plan) -> None:
    """Raises ProfileMismatchError: plan ``number`` was made for another machine."""
    here = hardware_info().fingerprint
    if plan.hardware_fingerprint != here:
        raise ProfileMismatchError(
            f"plan {number} was made from a profile of machine {plan.hardware_fingerprint}, this is machine "
            f"{here}; run profile and plan here"
        )


def plan_summary(plan: Plan) -> dict[str, Any]:
    """A plan's numbers, without its arrays."""
    return {
        "verdict": str(plan.verdict),
        "reason": plan.reason,
        "slo_ms": plan.request.slo_ms,
        "coverage": plan.coverage,
        "coverage_bytes": plan.coverage_bytes,
        "device_bytes": plan.device_bytes,
        "page_bytes": plan.page_bytes,
        "n_resident": len(plan.resident_lists),
        "n_resident_rows": len(plan.resident_rows),
        "bytes_by_precision": plan.bytes_by_precision,
        "predicted_row_hit_rate": plan.predicted_row_hit_rate,
        "row_cache_bytes": plan.request.row_cache_bytes,
        "predicted_row_faults": plan.predicted_row_faults,
        "n_devices": plan.n_devices,
        "predicted_hit_rate": plan.predicted_hit_rate,
        "batch": plan.batch,
        "predicted_latency_ms": plan.predicted_latency_ms(max(1, plan.batch)),
        "rate_qps": plan.rate_qps,
        "max_sustainable_qps": plan.max_sustainable_qps,
        "nearest_slo_ms": plan.nearest_slo_ms,
        "hit_rate_model": plan.hit_rate_model,
        "host_model": plan.host_model,
        "precision": "rows" if plan.bits is None else "codes",
        "bits": plan.bits,
    }


@lru_cache(maxsize=1)
def plan_tradeoff(plan: Plan | None) -> Tradeoff | None:
    """The curve that a plan was chosen on; computed once for each plan that serves. None without a plan."""
    return None if plan is None else tradeoff_of(plan)
