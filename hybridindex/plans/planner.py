"""Makes plans: the next one of an index, and one within arenas that are open already.

Every plan that is not a study's is made here, for a request of :func:`hybridindex.plans.replan.replan`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hybridindex.errors import ProfileError
from hybridindex.partitioner.plan import Plan, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.plans.replan import ALL_IN_MEMORY, PlanChanges, PlanDevices, replan
from hybridindex.profiler.check import check_profile
from hybridindex.profiler.hardware import hardware_info
from hybridindex.types import Profile

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex
    from hybridindex.store.control import ControlStore

__all__ = ["Arenas", "devices_of", "plan_again", "plan_index", "plan_next", "request_next", "request_other_content"]


def devices_of(
    ivf: IVFIndex,
    n_devices: int,
    device_budget_bytes: int | tuple[int, ...] | None = None,
    page_bytes: int | None = None,
) -> PlanDevices:
    """Devices of the kind that this machine has, and how they hold the lists of ``ivf``.

    Args:
        page_bytes: of devices that are open (:attr:`hybridindex.router.router.Router.page_bytes`), whose pages stay as
            they are; None: the plan is for devices that are opened with it, and pages fit the lists.
    """
    from hybridindex.tiers.contract.devices import kind_here
    from hybridindex.tiers.serving import tier_of

    choice = tier_of(ivf, kind_here())
    return PlanDevices(
        n_devices=n_devices,
        device_budget_bytes=device_budget_bytes,
        page_bytes=choice.page_bytes if page_bytes is None else page_bytes,
        fixed_bytes=choice.fixed_bytes,
        centroid_bytes=choice.centroid_bytes,
        code_bytes=choice.code_bytes,
        scannable=choice.tier != "host",
        unscannable=choice.reason,
    )


def plan_index(
    ivf: IVFIndex,
    profile: Profile,
    changes: PlanChanges,
    devices: PlanDevices,
    *,
    current: PlanRequest | None = None,
    allow_other_hardware: bool = False,
) -> Plan:
    """The plan of an index that :func:`hybridindex.plans.replan.replan` asks for.

    Raises:
        ProfileMismatchError: ``profile`` is of another index, or of another machine and that is not allowed.
        InvalidInputError: see :func:`hybridindex.plans.replan.replan`.
        ProfileError: the profile is too small or incomplete.
    """
    here = hardware_info().fingerprint
    check_profile(profile, ivf.fingerprint, here, allow_other_hardware=allow_other_hardware)
    return make_plan(profile, replan(current, changes, devices))


def plan_next(
    ivf: IVFIndex, store: ControlStore, current: Plan | None, changes: PlanChanges, devices: PlanDevices
) -> Plan:
    """The plan of :func:`request_next`. Raises as it does."""
    return make_plan(*request_next(ivf, store, current, changes, devices))


def request_next(
    ivf: IVFIndex, store: ControlStore, current: Plan | None, changes: PlanChanges, devices: PlanDevices
) -> tuple[Profile, PlanRequest]:
    """What the next plan is made of: the stored profile of ``current``, or without a plan the newest profile of the
    index; and what is asked for.

    Raises:
        ProfileError: there is no profile, or it is not stored. And as :func:`plan_index`.
    """
    if current is None:
        here = hardware_info().fingerprint
        profile = store.load_profile(index_fingerprint=ivf.fingerprint, hardware_fingerprint=here)
    else:
        profile = current.analysis.profile
    if profile.id is None:
        raise ProfileError("the profile of the plan in force is not stored; profile the index again")
    check_profile(profile, ivf.fingerprint, hardware_info().fingerprint, allow_other_hardware=False)
    return profile, replan(None if current is None else current.request, changes, devices)


def request_other_content(
    ivf: IVFIndex, store: ControlStore, request: PlanRequest, devices: PlanDevices
) -> tuple[Profile, PlanRequest]:
    """As :func:`request_next`, for an index that has other content than the one that ``request`` was made for: its own
    newest profile here.

    Raises:
        ProfileError: there is none. And as :func:`plan_index`.
    """
    here = hardware_info().fingerprint
    profile = store.load_profile(index_fingerprint=ivf.fingerprint, hardware_fingerprint=here)
    # What reading rows takes is not known where the new profile did not measure it.
    measured = any(sample.stage == "row_faults" for sample in profile.stages)
    return profile, replan(request, PlanChanges(row_cache_bytes=None if measured else ALL_IN_MEMORY), devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arenas:
    """What the arenas of an open router may take, by device: they grow and shrink within it."""

    scratch: tuple[int, ...]
    #: Scratch included.
    room: tuple[int, ...]


def plan_again(profile: Profile, request: PlanRequest, arenas: Arenas | None) -> Plan:
    """What ``request`` asks for, decided from ``profile`` within what the open arenas may take; None: its own budgets.

    The plan keeps the request's own budgets, for a router that is opened with it later. Its reason says where the
    arenas may take less.
    """
    if arenas is None:
        return make_plan(profile, request)
    room = arenas.room
    within = tuple(min(pair) for pair in zip(request.budgets, room, strict=True))
    plan = make_plan(profile, replace(request, budgets=within, scratch=arenas.scratch))
    if plan.request == request:
        return plan
    small = any(have < asked for have, asked in zip(room, request.budgets, strict=True))
    note = f"; decided for the {sum(room):,} bytes that the open devices may take, scratch included" if small else ""
    return replace(plan, request=request, reason=plan.reason + note)
