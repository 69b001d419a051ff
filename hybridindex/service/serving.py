"""One opened generation of the index with its router, and the plan that it starts with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hybridindex.api import Index
from hybridindex.config import PrecisionName, RouterConfig
from hybridindex.errors import (
    HybridIndexError,
    InfeasiblePlanError,
    InvalidInputError,
    ProfileError,
    ProfileMismatchError,
    StoreError,
)
from hybridindex.index import Manifest, open_index, read_manifest, remove_replaced
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.rabitq.codes import read_spec
from hybridindex.index.rabitq.spec import RabitqSpec
from hybridindex.index.storage.generation import generation_name
from hybridindex.partitioner.decision import refuse_infeasible
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.current import current_plan_id
from hybridindex.plans.llm_profiles import step_times
from hybridindex.plans.precision import choose_view, view_of
from hybridindex.plans.stored import how_to_apply, resume_plan
from hybridindex.refresh.config import RefreshConfig
from hybridindex.refresh.refresher import Refresher
from hybridindex.router.precision import without_devices
from hybridindex.router.router import Router
from hybridindex.service.cluster.member import Member
from hybridindex.service.config import ServiceConfig
from hybridindex.service.settings import Settings, Table
from hybridindex.store.control import ControlStore

__all__ = [
    "CURE",
    "MakeRefresher",
    "PlanChoice",
    "Prepared",
    "RefreshConfig",
    "ServedIndex",
    "Serving",
    "choose_plan",
    "close_serving",
    "look_at",
    "open_serving",
    "precision_asked",
    "prepare",
    "refresh_config",
    "refresher_of",
    "same_questions",
    "without_paths",
]

_log = logging.getLogger(__name__)

MakeRefresher = Callable[[Index, Router, ControlStore], Refresher]

#: What to do where there is no plan; INDEX stands for the directory, which no answer names.
CURE = (
    "the host serves. To plan: hybridindex profile INDEX --queries FILE; hybridindex plan INDEX --slo-ms MS --budget "
    "BYTES; hybridindex apply INDEX"
)


class ServedIndex(Index):
    """One generation of an index, for reading: a compaction does not put another one in its place. Its routers see all
    changes, also those behind a compaction."""

    def __init__(self, ivf: IVFIndex) -> None:
        super().__init__(ivf)
        self._generation = ivf
        #: What connects it to other nodes; None: it is of no cluster. Closed with it.
        self.member: Member | None = None

    def close(self) -> None:
        """After its routers."""
        if self.member is not None:
            self.member.close()
        super().close()

    @property
    def ivf(self) -> IVFIndex:
        return self._generation

    @property
    def _ivf(self) -> IVFIndex:
        return self._generation


@dataclass(slots=True, eq=False, kw_only=True)
class Serving:
    """One opened generation, and what serves it."""

    index: Index
    router: Router
    #: The plan that it was opened with, and where that came from.
    choice: PlanChoice
    plan_id: int | None = None
    refresher: Refresher | None = None
    #: Why it serves without a plan or devices that were asked for; empty where it does not.
    note: str = ""
    #: The store could not say which plan to start with; it is asked again.
    pending: bool = False
    #: Of devices that are not open yet, as another index that shares their budget was busy.
    deferred: PlanChoice | None = None
    #: What the codes beside its rows said of themselves before the index was opened, usable or not.
    codes: RabitqSpec | None = None
    #: Calls under way; guarded by :class:`hybridindex.service.reload.Generations`.
    users: int = 0

    @property
    def planned(self) -> IVFIndex:
        """What plans that may serve here are of: the rows of the index, or its codes."""
        return view_of(self.index.ivf, self.router.index_fingerprint) or self.index.ivf

    @property
    def generation(self) -> int:
        return self.index.ivf.generation

    @property
    def member(self) -> Member | None:
        """What connects it to the other nodes of its cluster; None: it is of none."""
        return _member_of(self.index)

    def carried_over(self) -> PlanChoice:
        """Its plan, for what takes its place. One on trial ends with its refresh."""
        plan, plan_id = (self.router.plan, self.plan_id) if self.refresher is None else self.refresher.settled()
        return PlanChoice(plan=plan, plan_id=plan_id, origin="carried over")

    @property
    def written(self) -> Path:
        """The index that its changes go to: of a node the one of which it has a share."""
        return self.index.path if self.member is None else self.member.source or self.index.path


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """The plan that a generation starts with."""

    plan: Plan | None = None
    plan_id: int | None = None
    origin: Literal["none", "stored", "carried over", "made anew"] = "none"
    #: Where it was made anew: the plan of another generation whose request it keeps.
    instead_of: Plan | None = None
    #: Why there is none.
    note: str = ""
    #: The store could not be asked.
    pending: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Prepared:
    """What a service is opened from; nothing serves yet."""

    index: Index
    store: ControlStore
    choice: PlanChoice
    codes: RabitqSpec | None

    def close(self) -> None:
        self.store.close()
        self.index.close()


def prepare(path: Path, config: ServiceConfig) -> Prepared:
    """Opens an index directory and its store, and chooses the plan. Searches do not need the store: one that cannot be
    opened is tried again while the host serves.

    Raises:
        HybridIndexError: whatever is wrong with the index; or with the store, where a plan of it was named by its id.
    """
    _, codes = look_at(path, config.router)
    node = config.node
    index = ServedIndex(open_index(path, changes_of=None if node.name is None else node.source))
    try:
        if node.name is not None:
            index.member = Member(index.ivf, node.name, source=node.source, memory_bytes=node.memory_bytes, ca=node.ca)
            try:
                remove_replaced(path)  # what the last start of this node was about to go on to, or had left
            except HybridIndexError as error:
                _log.warning("%s", error)
        store = index.store(config.store_url, required=False)
        try:
            choice = choose_plan(index, config.plan, config, store)
            if store.problem is not None:
                _log.error("searches continue without the control store; it is tried again: %s", store.problem)
            return Prepared(index=index, store=store, choice=choice, codes=codes)
        except BaseException:
            store.close()
            raise
    except BaseException:
        index.close()
        raise


def same_questions(before: Manifest, after: Manifest) -> None:
    """Raises InvalidInputError where clients of one generation could not go on with the other."""
    for name in ("dim", "metric"):
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            raise InvalidInputError(
                f"{name} is {new!r} where clients of this daemon expect {old!r}; expected the same, or a daemon of its "
                "own: restart it, or go back with: hybridindex rollback INDEX"
            )


def look_at(path: Path, config: RouterConfig, generation: int | None = None) -> tuple[Manifest, RabitqSpec | None]:
    """The current generation in an index directory, or that of a number, and what the codes beside its rows say of
    themselves; None: nothing, or routers of ``config`` do not scan them.

    Raises:
        HybridIndexError: the manifest cannot be read.
    """
    manifest = read_manifest(path, generation)
    if precision_asked(config) == "rows":
        return manifest, None
    try:
        return manifest, read_spec(path / generation_name(manifest.generation), manifest)
    except HybridIndexError:
        return manifest, None


def choose_plan(index: Index, choice: str, config: ServiceConfig, store: ControlStore) -> PlanChoice:
    """The plan that ``choice`` names, or none and why: a plan of another index or machine, or a store that cannot be
    read, is no reason not to serve.

    Raises:
        InvalidInputError: ``choice`` is no id.
        ProfileError, StoreError: the plan of that id is not there, or cannot be read.
        InfeasiblePlanError: a plan that is not the current one was named by its id, is infeasible and not forced.
    """
    try:
        return _choose_plan(index, choice, config, store)
    except StoreError as error:
        if choice.isdecimal():
            raise
        words = f"the control store gives no plan, and is asked again: {without_paths(store, error)}"
        return PlanChoice(note=words, pending=True)


def without_paths(store: ControlStore, problem: StoreError | str) -> str:
    """What is wrong with a store, for clients."""
    file = store.file
    if file is None:
        return "see the log"
    return str(problem).replace(f"{file.parent}/", "").replace(str(file.parent), "its directory")


def _choose_plan(index: Index, choice: str, config: ServiceConfig, store: ControlStore) -> PlanChoice:
    try:
        if config.router.precision != "rows":
            codes = index.ivf.load_codes()  # those that turn out to be damaged have no plans
            if codes is None and config.router.rows == "mapped":
                return PlanChoice()  # the router is refused, and says why
        view = choose_view(index.ivf, store, choice, precision_asked(config.router))
        found = _resumed(view, choice, config, store)
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
    others = [plan for plan in store.list_plans() if plan.index_fingerprint != view.fingerprint]
    last = others[-1] if others else None
    older = (
        "" if last is None else f" (plan {last.id} is for index {last.index_fingerprint}, this is {view.fingerprint})"
    )
    return PlanChoice(note=f"{how_to_apply(view, store)}{older}{_whose_store(config)}")


def _whose_store(config: ServiceConfig) -> str:
    """What a node's own control store lacks: plans of the whole index are in that of the index."""
    if config.node.name is None or config.store_url is not None:
        return ""
    return (
        "; a node of a cluster has a control store of its own, and is given a plan by: hybridindex cluster apply INDEX"
    )


def precision_asked(config: RouterConfig) -> PrecisionName:
    """What plans have to be of that ``config`` can serve."""
    if config.precision != "auto":
        return config.precision
    return "codes" if config.rows == "mapped" else "rows" if config.host_scanner == "faiss" else "auto"


def _resumed(view: IVFIndex, choice: str, config: ServiceConfig, store: ControlStore) -> tuple[int, Plan] | None:
    found = resume_plan(view, choice, store, config.router.devices)
    if found is None or found[0] == current_plan_id(store, view.fingerprint):
        return found
    try:
        refuse_infeasible(found[1], force=config.force)
    except InfeasiblePlanError as error:
        if choice != "latest":
            raise
        # What somebody tried must not keep a daemon from starting again.
        _log.warning("plan %d: %s; the plan applied last is resumed", found[0], error)
        return resume_plan(view, "current", store, config.router.devices)
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

    ``on_host``: without devices in any case; the plan then only gives nprobe. A host that stands in for devices scans
    what they would: answers stay the same.
    """
    settings = config.router
    if settings.devices and (on_host or (choice.plan is None and settings.device_budget_bytes is None)):
        planned = None if choice.plan is None else choice.plan.index_fingerprint
        settings = without_devices(settings, index.ivf, planned)
    # Another generation gets a router of its own here.
    member = _member_of(index)
    remote = None if member is None else member.remote
    router = index.router(choice.plan, config=settings, llm=step_times(store, choice.plan), follow=False, remote=remote)
    try:
        refresher = None
        if make_refresher is not None and not on_host:
            if choice.plan is None:
                _log.warning("refresh is off: there is no plan")
            else:
                refresher = make_refresher(index, router, store)
    except BaseException:
        router.close()
        raise
    return Serving(
        index=index,
        router=router,
        choice=choice,
        plan_id=choice.plan_id,
        refresher=refresher,
        note=choice.note,
        pending=choice.pending,
    )


def _member_of(index: Index) -> Member | None:
    """What connects an index that is served to the other nodes of its cluster."""
    return index.member if isinstance(index, ServedIndex) else None


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
