"""Plan and router of commands that search in their own process."""

from __future__ import annotations

from collections.abc import Sequence

import hybridindex as hx
from hybridindex.cli.console import err, parse_bytes, require_store
from hybridindex.cli.options import MachineOptions, PlanOptions, SearchOptions
from hybridindex.config import PrecisionName, RouterConfig
from hybridindex.errors import InvalidInputError, ProfileError, StoreError
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.precision import choose_view, view_of_profile, view_to_plan
from hybridindex.plans.stored import resume_plan
from hybridindex.router.precision import CandidateCount, choose_precision
from hybridindex.router.router import Router
from hybridindex.store.control import ControlStore
from hybridindex.types import Profile

__all__ = ["choose_plan", "open_router", "profile_to_plan"]


def choose_plan(
    index: hx.Index,
    choice: str,
    devices: Sequence[str] = (),
    store: str | None = None,
    precision: PrecisionName = "auto",
) -> tuple[int | None, Plan | None]:
    """The plan that ``--plan`` names and its id; see :func:`hybridindex.plans.stored.resume_plan`.

    Where "latest" or "current" cannot be had, it is said, and the host searches without one.

    Raises:
        InvalidInputError: ``choice`` or ``store`` names none.
    """
    if choice == "none":
        return None, None
    require_store(store)
    try:
        with index.store(store) as control:
            view = choose_view(index.ivf, control, choice, precision)
            found = resume_plan(view, choice, control, tuple(devices))
    except (StoreError, ProfileError) as error:
        if choice not in ("latest", "current"):
            raise
        err.print(f"no plan: the host searches; nprobe defaults to the index's ({error})", highlight=False)
        return None, None
    if found is None:
        return None, None
    if not devices and (n := int(found[1].resident_lists.size)):
        err.print(f"plan {found[0]} places {n} lists on devices; without --device the host scans them", highlight=False)
    return found


def open_router(index: hx.Index, plan: Plan | None, asked: SearchOptions, machine: MachineOptions) -> Router:
    """A router that searches as ``asked``; without a budget it takes the plan's.

    Raises:
        InvalidInputError: candidates are given for a search by rows, or fewer than ``k``. Then no list was read.
    """
    config = RouterConfig(
        devices=tuple(machine.device or ()),
        threads=machine.threads,
        device_budget_bytes=None if asked.budget is None else parse_bytes(asked.budget),
        precision=asked.precision,  # type: ignore[arg-type]
        candidates=asked.candidates,
        rows=asked.rows,  # type: ignore[arg-type]
    )
    if asked.candidates is not None:
        chosen = choose_precision(index.ivf, config, None if plan is None else plan.index_fingerprint)
        if chosen.codes is None:
            raise InvalidInputError(
                f"--candidates is {asked.candidates}, but searches scan {chosen.describe_rows()}; expected --precision "
                "codes and an index with codes (hybridindex compress)"
            )
        CandidateCount(chosen.codes.spec, asked.candidates).of(asked.k, asked.nprobe or index.nprobe, None)
    return index.router(plan, config=config)


def profile_to_plan(opened: hx.Index, control: ControlStore, goal: PlanOptions, here: str | None) -> Profile:
    """The profile that is named, or the newest of what is to be planned."""
    precision: PrecisionName = goal.precision  # type: ignore[assignment]
    if goal.profile_id is None:
        view = view_to_plan(opened.ivf, control, precision, any_hardware=here is None)
    else:
        view = view_of_profile(opened.ivf, control.load_profile(goal.profile_id), precision)
    return control.load_profile(goal.profile_id, index_fingerprint=view.fingerprint, hardware_fingerprint=here)
