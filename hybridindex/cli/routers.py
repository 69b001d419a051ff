"""Plan and router of commands that search in their own process."""

from __future__ import annotations

from collections.abc import Sequence

import hybridindex as hx
from hybridindex.cli.console import parse_bytes
from hybridindex.cli.options import MachineOptions
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.stored import resume_plan
from hybridindex.router.router import Router

__all__ = ["choose_plan", "open_router"]


def choose_plan(index: hx.Index, choice: str, devices: Sequence[str] = (), store: str | None = None) -> Plan | None:
    """The plan that ``--plan`` names; see :func:`hybridindex.plans.stored.resume_plan`."""
    with index.store(store) as control:
        found = resume_plan(index, choice, control, tuple(devices))
    return None if found is None else found[1]


def open_router(index: hx.Index, plan: Plan | None, budget: str | None, machine: MachineOptions) -> Router:
    """A router with ``budget`` bytes on each device; None: the plan's."""
    nbytes = None if budget is None else parse_bytes(budget)
    return index.router(plan, machine.device or (), threads=machine.threads, device_budget_bytes=nbytes)
