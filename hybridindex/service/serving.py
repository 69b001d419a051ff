"""One opened generation of the index with its router, and the plan that it starts with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hybridindex.api import Index, open_index
from hybridindex.errors import HybridIndexError, InfeasiblePlanError, ProfileError, ProfileMismatchError
from hybridindex.partitioner.decision import refuse_infeasible
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.current import current_plan_id
from hybridindex.plans.llm_profiles import step_times
from hybridindex.plans.stored import how_to_apply, resume_plan
from hybridindex.refresh.config import RefreshConfig
from hybridindex.refresh.refresher import Refresher
from hybridindex.router.router import Router
from hybridindex.service.config import ServiceConfig
from hybridindex.service.settings import Settings, Table
from hybridindex.store.control import ControlStore

__all__ = [
    "CURE",
    "MakeRefresher",
    "PlanChoice",
    "Prepared",
    "RefreshConfig",
    "Serving",
    "choose_plan",
    "close_serving",
    "open_serving",
    "prepare",
    "refresh_config",
    "refresher_of",
]

_log = logging.getLogger(__name__)

MakeRefresher = Callable[[Index, Router, ControlStore], Refresher]

#: What to do where there is no plan; INDEX stands for the directory, which no answer names.
CURE = (
    "the host serves. To plan: hybridindex profile INDEX --queries FILE; hybridindex plan INDEX --slo-ms MS --budget "
    "BYTES; hybridindex apply INDEX"
)


@dataclass(slots=True, eq=False, kw_only=True)
class Serving:
    """One opened generation, and what serves it."""

    index: Index
    router: Router
    plan_id: int | None = None
    refresher: Refresher | None = None
    #: Why it serves without a plan or devices that were asked for; empty where it does not.
    note: str = ""
    #: Calls under way; guarded by :class:`hybridindex.service.reload.Generations`.
    users: int = 0

    @property
    def generation(self) -> int:
        return self.index.ivf.generation


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """The plan that a generation starts with."""

    plan: Plan | None = None
    plan_id: int | None = None
    origin: Literal["none", "stored", "carried over", "made anew"] = "none"
    #: Why there is none.
    note: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class Prepared:
    """What a service is opened from; nothing serves yet."""

    index: Index
    store: ControlStore
    choice: PlanChoice

    def close(self) -> None:
        self.store.close()
        self.index.close()


def prepare(path: Path, config: ServiceConfig) -> Prepared:
    """Opens an index directory and its store, and chooses the plan.

    Raises:
        HybridIndexError: whatever is wrong with them.
    """
    index = open_index(path)
    try:
        store = index.store(config.store_url)
        try:
            return Prepared(index=index, store=store, choice=choose_plan(index, config.plan, config, store))
        except BaseException:
            store.close()
            raise
    except BaseException:
        index.close()
        raise


def choose_plan(index: Index, choice: str, config: ServiceConfig, store: ControlStore) -> PlanChoice:
    """The plan that ``choice`` names, or none and why: a plan of another index or machine is no reason not to serve.

    Raises:
        InvalidInputError: ``choice`` is no id. ProfileError: there is no plan of that id.
        InfeasiblePlanError: a plan that is not the current one was named by its id, is infeasible and not forced.
    """
    try:
        found = _resumed(index, choice, config, store)
    except ProfileMismatchError as error:
        return PlanChoice(note=f"plan {choice} is not for this index and machine: {error}; {CURE}")
    except ProfileError:
        if choice.isdecimal():
            raise
        found = None
    if found is not None:
        return PlanChoice(plan_id=found[0], plan=found[1], origin="stored")
    if choice == "none" or not config.router.devices:
        return PlanChoice()
    others = [plan for plan in store.list_plans() if plan.index_fingerprint != index.fingerprint]
    last = others[-1] if others else None
    older = (
        "" if last is None else f" (plan {last.id} is for index {last.index_fingerprint}, this is {index.fingerprint})"
    )
    return PlanChoice(note=f"{how_to_apply(index, store)}{older}")


def _resumed(index: Index, choice: str, config: ServiceConfig, store: ControlStore) -> tuple[int, Plan] | None:
    found = resume_plan(index, choice, store, config.router.devices)
    if found is None or found[0] == current_plan_id(store, index.fingerprint):
        return found
    try:
        refuse_infeasible(found[1], force=config.force)
    except InfeasiblePlanError as error:
        if choice != "latest":
            raise
        # What somebody tried must not keep a daemon from starting again.
        _log.warning("plan %d: %s; the plan applied last is resumed", found[0], error)
        return resume_plan(index, "current", store, config.router.devices)
    return found


def open_serving(
    index: Index,
    choice: PlanChoice,
    config: ServiceConfig,
    store: ControlStore,
    make_refresher: MakeRefresher | None,
    *,
    on_host: bool = False,
) -> Serving:
    """A router over ``index``, and its refresher. Without a plan and a budget, devices stay closed.

    ``on_host``: without devices in any case; the plan then only gives nprobe.
    """
    settings = config.router
    if settings.devices and (on_host or (choice.plan is None and settings.device_budget_bytes is None)):
        settings = replace(settings, devices=(), device_budget_bytes=None, pin_host_lists=0)
    router = index.router(choice.plan, config=settings, llm=step_times(store, choice.plan))
    try:
        refresher = None
        if make_refresher is not None and not on_host:
            if choice.plan is None:
                _log.warning("nothing is refreshed without a plan")
            else:
                refresher = make_refresher(index, router, store)
    except BaseException:
        router.close()
        raise
    return Serving(index=index, router=router, plan_id=choice.plan_id, refresher=refresher, note=choice.note)


def close_serving(serving: Serving, *, index: bool = True) -> None:
    """Closes all of it. An error of one must not keep the others open."""
    closing = [serving.router.close, *([serving.index.close] if index else [])]
    if serving.refresher is not None:
        closing.insert(0, serving.refresher.close)
    for close in closing:
        try:
            close()
        except HybridIndexError:
            _log.exception("closing generation %d", serving.generation)


def refresh_config(settings: Settings, given: Table) -> RefreshConfig:
    """The table [refresh] of a file, which also says where plans are made that are asked for; ``given``: what overrides
    it, as its tables.

    Raises:
        InvalidInputError: a bad value.
    """
    return settings.only("refresh").build(RefreshConfig, given.get("refresh"), table="refresh")


def refresher_of(settings: Settings, config: RefreshConfig, *, asked: bool | None) -> MakeRefresher | None:
    """How to make a refresher; None where ``asked``, or for None the table [refresh] in the file, wants none."""
    if not ("refresh" in settings.names() if asked is None else asked):
        return None
    return lambda index, router, store: Refresher(index, router, store, config)
