"""The plan and the router of commands that search."""

from __future__ import annotations

import hybridindex as hx
from hybridindex.cli.console import parse_bytes
from hybridindex.cli.options import MachineOptions
from hybridindex.errors import ProfileMismatchError
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.stored import load_plan
from hybridindex.profiler.hardware import hardware_info
from hybridindex.router.router import Router

__all__ = ["choose_plan", "open_router"]


def choose_plan(index: hx.Index, choice: str, devices: list[str] | None, store: str | None) -> Plan | None:
    """The plan that ``--plan`` names. Without devices it only gives nprobe, so "latest" may be missing: None."""
    with index.store(store) as control:
        if choice == "latest" and not devices and not control.list_plans(index_fingerprint=index.fingerprint):
            return None
        found = load_plan(index, choice, control)
    if found is None:
        return None
    number, plan = found
    here = hardware_info().fingerprint
    if devices and plan.hardware_fingerprint != here:
        raise ProfileMismatchError(
            f"plan {number} was made from a profile of machine {plan.hardware_fingerprint}, this is machine {here}; "
            "run profile and plan here"
        )
    return plan


def open_router(index: hx.Index, plan: Plan | None, budget: str | None, machine: MachineOptions) -> Router:
    """A router with ``budget`` bytes on each device; None: the plan's."""
    nbytes = None if budget is None else parse_bytes(budget)
    return index.router(plan, machine.device or (), threads=machine.threads, device_budget_bytes=nbytes)
