"""The service without HTTP: an index, its router and control store, sessions, admission, maybe a refresher.

Searches are coroutines of one event loop; all other calls may block and belong on a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from hybridindex.api import Index
from hybridindex.errors import (
    HybridIndexError,
    InvalidInputError,
    OverloadedError,
    ProfileError,
)
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.current import applied_plans, current_plan_id, make_current, save_plan, stored_as
from hybridindex.plans.placed import expected_hit_rate
from hybridindex.plans.planner import devices_of, plan_next, request_next
from hybridindex.plans.proposal import Proposal, Served, Weigh, propose
from hybridindex.plans.replan import PlanChanges
from hybridindex.plans.stored import load_plan, plan_summary, resume_plan
from hybridindex.processes import OfOneProcess
from hybridindex.refresh.config import RefreshConfig, UpdateRecord
from hybridindex.refresh.planning import Planning
from hybridindex.refresh.refresher import Refresher
from hybridindex.refresh.updater import arenas_of
from hybridindex.router.batch.stages import BatchReport
from hybridindex.router.router import Router
from hybridindex.router.session import Session
from hybridindex.service.admission import Admission
from hybridindex.service.config import ServiceConfig
from hybridindex.service.describe import describe
from hybridindex.service.reload import Generations
from hybridindex.service.search_request import SearchRequest
from hybridindex.service.serving import (
    MakeRefresher,
    PlanChoice,
    Prepared,
    Serving,
    close_serving,
    open_serving,
    prepare,
)
from hybridindex.service.sessions import SessionTable
from hybridindex.service.warmup import warm_up
from hybridindex.store.control import ControlStore
from hybridindex.tiers.contract.copy_queue import check_share
from hybridindex.types import F32, HitRateChoice, SearchResult

__all__ = ["Division", "Observation", "SearchTrace", "Service", "Shares", "Traces"]

_log = logging.getLogger(__name__)

#: Larger queries are checked and copied on a thread, not on the event loop.
_LARGE_BYTES = 1 << 20
#: How long the end of the service waits for a reload to notice it.
_RELOAD_ENDS_S = 60.0


class SearchTrace(Protocol):
    """Records one search."""

    def asked(self, *, n: int, k: int, nprobe: int, plan_id: int | None, session_id: str | None) -> None: ...

    def admitted(self) -> None: ...

    def on_batch(self, report: BatchReport) -> None: ...

    def answered(self, result: SearchResult) -> None: ...


class Traces(Protocol):
    """Makes the spans of one service."""

    def request(
        self, method: str, headers: Mapping[bytes, bytes], request_id: str
    ) -> AbstractContextManager[Callable[[str, int], None]]:
        """Around one HTTP request; yields a function to be called at its end with the route and the status."""

    def search(self) -> SearchTrace | None: ...


class Division(Protocol):
    """One budget divided anew, of which one index's plan is about to be applied."""

    @property
    def plan(self) -> Plan:
        """Of that index, within its new share."""

    @property
    def room_bytes(self) -> tuple[int, ...]:
        """What its lists may take of each device."""

    def refuse(self, *, force: bool) -> None:
        """Raises InfeasiblePlanError where another index would lose its SLO, unless ``force``."""

    def carried_out(self) -> AbstractContextManager[None]:
        """Around the change: the others give their bytes before it, and take theirs after it."""

    def to_data(self) -> dict[str, Any]:
        """JSON-able, by the index's name."""


class Shares(Protocol):
    """Who divides one budget of device bytes between this service's index and others."""

    #: Held while any of their plans or generations changes.
    changing: threading.Lock

    def divide(self, service: Service, plan: Plan, budget: int | tuple[int, ...] | None) -> Division:
        """With what ``plan`` is asked for, in place of the plan in force; ``budget``: another one to divide."""

    def refit(self, service: Service, choice: PlanChoice) -> PlanChoice:
        """The plan with which the devices of another generation may be opened; the others have made room for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One answered search. Times in seconds."""

    queries: F32
    queue_s: float
    search_s: float
    result: SearchResult
    #: The queue was so full that nprobe was lowered.
    lowered: bool
    #: Over the queries; summed once for all observers.
    hit_rate_sum: float = field(init=False)

    def __post_init__(self) -> None:
        rates = self.result.hit_rate
        object.__setattr__(self, "hit_rate_sum", float(rates[0] if len(rates) == 1 else rates.sum()))

    @property
    def latency_s(self) -> float:
        return self.queue_s + self.search_s


class Service(OfOneProcess):
    """One served index. Searches on one event loop, other methods on any thread."""

    def __init__(
        self,
        first: Serving,
        store: ControlStore,
        config: ServiceConfig,
        *,
        make_refresher: MakeRefresher | None = None,
        planning: RefreshConfig | None = None,
        traces: Traces | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """:meth:`close` closes what serves and the store, but not ``traces``. ``clock``: monotonic seconds.

        ``make_refresher``: for later generations. ``planning``: its ``planning`` and what begins with it say where
        plans are made without a refresher; default in a process of low priority.
        """
        self.store = store
        self.config = config
        self.traces = traces
        self.clock = clock
        self.started_s = clock()
        self.admission = Admission(config.limits, clock)
        self.sessions = SessionTable(config.limits, clock)
        self._planning = Planning(planning)
        self.generations = Generations(
            first,
            config,
            store,
            self.sessions,
            planning=self._planning,
            make_refresher=make_refresher,
            stopping=lambda: self._closed or self.admission.draining,
        )
        #: Called on the event loop after each search; must not block.
        self.on_search: list[Callable[[Observation], None]] = []
        self._changing = threading.Lock()
        self._shares: Shares | None = None
        self._reloading = threading.Lock()
        self._warm = False
        self._closed = False
        #: Observers that raised.
        self.n_observer_errors = 0

    @classmethod
    def open(
        cls,
        path: Path,
        config: ServiceConfig,
        *,
        make_refresher: MakeRefresher | None = None,
        planning: RefreshConfig | None = None,
        traces: Traces | None = None,
    ) -> Service:
        """Opens an index directory, resumes its plan and starts the router. Without a plan for this index and machine
        it serves on the host and says so.

        Raises:
            HybridIndexError: whatever is wrong with index, store, plan or devices.
        """
        return cls.begin(prepare(path, config), config, make_refresher=make_refresher, planning=planning, traces=traces)

    @classmethod
    def begin(
        cls,
        prepared: Prepared,
        config: ServiceConfig,
        *,
        make_refresher: MakeRefresher | None = None,
        planning: RefreshConfig | None = None,
        traces: Traces | None = None,
    ) -> Service:
        """:meth:`open` from what is prepared, which is the service's to close, or closed where it cannot be opened."""
        index, store, choice = prepared.index, prepared.store, prepared.choice
        try:
            first = open_serving(index, choice, config, store, make_refresher)
            try:
                if choice.plan_id not in (None, current_plan_id(store, index.fingerprint)):
                    assert choice.plan is not None
                    make_current(store, choice.plan, choice.plan_id, verified=False, why="named at the start")
            except BaseException:
                close_serving(first, index=False)
                raise
        except BaseException:
            prepared.close()
            raise
        if first.note:
            _log.warning("serving on the host: %s", first.note.replace("INDEX", str(index.path)))
        return cls(first, store, config, make_refresher=make_refresher, planning=planning, traces=traces)

    def join(self, shares: Shares) -> None:
        """Before it serves: its device bytes are a share of one budget from now on."""
        self._shares, self._changing = shares, shares.changing
        self.generations.refit = lambda choice: shares.refit(self, choice)

    # What serves now

    @property
    def index(self) -> Index:
        return self.generations.current.index

    @property
    def router(self) -> Router:
        return self.generations.current.router

    @property
    def refresher(self) -> Refresher | None:
        return self.generations.current.refresher

    @property
    def plan_id(self) -> int | None:
        return self.generations.current.plan_id

    # Searching, on the event loop

    async def search(self, request: SearchRequest, client: str, session_id: str | None = None) -> SearchResult:
        """Waits for its turn and searches, within a session where one is named.

        Raises:
            InvalidInputError: values that the router refuses.
            OverloadedError, DeadlineExceededError: nothing was searched.
            UnknownSessionError: no such session of this client.
        """
        arrived = self.clock()
        trace = None if self.traces is None else self.traces.search()
        if trace is not None:
            trace.asked(
                n=len(request.queries),
                k=request.k,
                nprobe=self.router.nprobe if request.nprobe is None else request.nprobe,
                plan_id=self.committed_plan_id(),
                session_id=session_id,
            )
        limit_ms = request.deadline_ms or self.config.limits.default_deadline_ms
        deadline_s = None if limit_ms is None else arrived + limit_ms / 1e3
        if session_id is None:
            return await self._search(request, client, arrived, deadline_s, None, trace)
        with self.sessions.use(session_id, client) as session:
            return await self._search(request, client, arrived, deadline_s, session, trace)

    async def _search(
        self,
        request: SearchRequest,
        client: str,
        arrived: float,
        deadline_s: float | None,
        session: Session | None,
        trace: SearchTrace | None,
    ) -> SearchResult:
        n = len(request.queries)
        await self.admission.enter(client, n, deadline_s)
        entered = answered = self.clock()
        generations = self.generations
        serving = generations.enter() if session is None else generations.of_session(session)
        try:
            asked = serving.router.nprobe if request.nprobe is None else request.nprobe
            nprobe = max(self.admission.nprobe_under_load(asked), min(asked, request.min_nprobe or 1))
            options: dict[str, Any] = {}
            if request.deadline_ms is not None and deadline_s is not None:
                # The client's deadline may lower nprobe; the daemon's default only bounds the wait.
                options["deadline_ms"] = max((deadline_s - entered) * 1e3, 1e-3)
                options["min_nprobe"] = request.min_nprobe or 1
            if trace is not None:
                trace.admitted()
                options["on_batch"] = trace.on_batch
            result = await self._run(request, nprobe, options, serving.router if session is None else session)
        finally:
            if session is None:
                generations.leave(serving)
            answered = self.clock()
            self.admission.leave(n)
        if trace is not None:
            trace.answered(result)
        self._tell(
            Observation(
                queries=request.queries,
                queue_s=entered - arrived,
                search_s=answered - entered,
                result=result,
                lowered=nprobe < asked,
            ),
            serving.refresher,
        )
        return result

    async def _run(
        self, request: SearchRequest, nprobe: int, options: dict[str, Any], searched: Router | Session
    ) -> SearchResult:
        if request.queries.nbytes <= _LARGE_BYTES:
            return await searched.asearch(request.queries, request.k, nprobe, **options)
        waiting = await asyncio.to_thread(searched.submit, request.queries, request.k, nprobe, **options)
        return await asyncio.wrap_future(waiting)

    def _tell(self, seen: Observation, refresher: Refresher | None) -> None:
        try:
            for tell in self.on_search:
                tell(seen)
            if refresher is not None:
                refresher.observe(seen.queries, seen.latency_s, seen.result.hit_rate)
        except Exception:  # noqa: BLE001 - an observer must not cost a client its answer
            self.n_observer_errors += 1
            _log.exception("an observer of searches raised")

    # Sessions

    def open_session(self, client: str, *, lookahead_bytes: int | None = None, window_ms: float | None = None) -> str:
        """Returns the new session's name.

        Raises:
            OverloadedError: too many are open, or the daemon drains. InvalidInputError, ProfileError: bad options.
        """
        if self.admission.draining:
            raise OverloadedError("the daemon is about to stop; ask another one", retry_after_s=1)
        return self.generations.open_session(client, lookahead_bytes=lookahead_bytes, window_ms=window_ms)

    def lookahead(
        self,
        session_id: str,
        client: str,
        drafts: F32,
        *,
        nprobe: int | None = None,
        budget_bytes: int | None = None,
        window_ms: float | None = None,
    ) -> None:
        """Starts to copy lists for ``drafts`` (n, d) float32; returns at once.

        Raises:
            UnknownSessionError, InvalidInputError, ProfileError.
        """
        with self.sessions.use(session_id, client) as session:
            session.lookahead(drafts, nprobe=nprobe, budget_bytes=budget_bytes, window_ms=window_ms)

    def session_stats(self, session_id: str, client: str) -> dict[str, Any]:
        """Raises UnknownSessionError."""
        with self.sessions.use(session_id, client) as session:
            stats: dict[str, Any] = describe(session.stats)
        return stats

    def close_session(self, session_id: str, client: str) -> None:
        """Raises UnknownSessionError."""
        self.sessions.close(session_id, client)

    # Plans

    def plan(self) -> dict[str, Any]:
        """The plan that is in force: its id, its numbers, and its explanation in words."""
        plan = self.router.plan
        if plan is None:
            return {"plan_id": None, "plan": None, "explanation": "no plan: the host scans everything"}
        return {"plan_id": self.committed_plan_id(), "plan": plan_summary(plan), "explanation": plan.explain()}

    def stored_plan(self, choice: str) -> dict[str, Any]:
        """As :meth:`plan`, of a stored plan: an id, or "latest".

        Raises:
            InvalidInputError: no id. ProfileError: there is no such plan of this index.
        """
        found = load_plan(self.index, choice, self.store)
        if found is None:
            raise InvalidInputError(f"plan is {choice!r}; expected a plan id or 'latest'")
        number, plan = found
        return {"plan_id": number, "plan": plan_summary(plan), "explanation": plan.explain()}

    def committed_plan_id(self) -> int | None:
        """The committed one, where a refresher changes plans."""
        own = None if self.refresher is None else self.refresher.status().plan_id
        return self.plan_id if own is None else own

    def history(self) -> dict[str, Any]:
        """Stored plans of this index and when each was applied, in the order of saving."""
        fingerprint = self.index.fingerprint
        return {
            "current": self.committed_plan_id(),
            "profiles": [describe(p) for p in self.store.list_profiles(index_fingerprint=fingerprint)],
            "plans": [describe(p) for p in self.store.list_plans(index_fingerprint=fingerprint)],
            "applied": applied_plans(self.store, fingerprint),
        }

    def repartition(
        self,
        *,
        apply: bool,
        slo_ms: float | None = None,
        device_budget_bytes: int | tuple[int, ...] | None = None,
        rate_qps: float | None = None,
        coverage: float | Literal["solve"] | None = None,
        hit_rate_model: HitRateChoice | None = None,
        headroom: float | None = None,
        bandwidth_share: float | None = None,
        force: bool = False,
    ) -> dict[str, Any]:
        """Plans anew, says what would change, and changes it where ``apply`` says so. Blocks while lists move.

        :mod:`hybridindex.plans.replan` says what stays as in the plan in force. ``bandwidth_share`` is 1, or the
        refresher's own where that proposes and applies. Where several indexes share one budget, it is divided anew, and
        ``device_budget_bytes`` is that budget.

        Raises:
            InvalidInputError: without devices, a value out of range, or one that contradicts a fixed coverage.
            InfeasiblePlanError: it was to be applied, the SLO cannot be met, and ``force`` is false.
            ProfileError: nothing to plan from.
            PlanningError: the process that plans did not start, ended, or took too long.
            OverloadedError: another change is under way.
        """
        check_share(bandwidth_share)
        changes = PlanChanges(
            slo_ms=slo_ms,
            device_budget_bytes=device_budget_bytes,
            rate_qps=rate_qps,
            coverage=coverage,
            hit_rate_model=hit_rate_model,
            headroom=headroom,
        )
        with self._one_change():
            share = 1.0 if bandwidth_share is None else bandwidth_share
            if self._shares is not None:
                plan = self._plan_next(replace(changes, device_budget_bytes=None))
                return self._divide(plan, "requested", share, device_budget_bytes, apply=apply, force=force)
            recent = self._propose_recent(changes, bandwidth_share)
            if recent is not None:
                return self._answer(recent, None, self.refresher, apply=apply, force=force)
            proposal = self._propose(changes, share)
            return self._answer(proposal, None, None, apply=apply, force=force)

    def apply_plan(
        self, choice: str, *, apply: bool = True, bandwidth_share: float | None = None, force: bool = False
    ) -> dict[str, Any]:
        """Makes a stored plan, by its id or "latest", the one that serves; answers as :meth:`repartition`. Blocks while
        lists move.

        Raises:
            InvalidInputError: no id, no devices, or the plan is for another number of them.
            ProfileError: there is no such plan of this index, or it is another machine's.
            InfeasiblePlanError, OverloadedError: as :meth:`repartition`.
        """
        check_share(bandwidth_share)
        found = resume_plan(self.index, choice, self.store, self.config.router.devices)
        if found is None:
            raise InvalidInputError(f"plan is {choice!r}; expected a plan id or 'latest'")
        plan_id, plan = found
        # Where the daemon started without a plan, its devices open with this one.
        closed = bool(self.generations.current.note and self.config.router.devices and not self.router.devices)
        if not closed:
            self._check_devices()
        n_devices = len(self.config.router.devices if closed else self.router.devices)
        if plan.n_devices != n_devices:
            raise InvalidInputError(f"plan {plan_id} is for {plan.n_devices} device(s); the daemon has {n_devices}")
        with self._one_change():
            share, reason = 1.0 if bandwidth_share is None else bandwidth_share, f"plan {plan_id} was chosen"
            if self._shares is not None and not closed:
                return self._divide(plan, reason, share, apply=apply, force=force)
            proposal = self._beside_current(plan, reason, share)
            if not (closed and apply):
                return self._answer(proposal, plan_id, self.refresher, apply=apply, force=force)
        proposal.refuse_infeasible(force=force)
        make_current(self.store, plan, plan_id, verified=False, why="applied")
        self.reload(f"plan {plan_id} was applied")
        serves = plan_id if self._shares is None else self.plan_id
        return self._told(proposal.placed_as(self.router.residency.list_device), serves, applied=True)

    @contextlib.contextmanager
    def _one_change(self) -> Iterator[None]:
        if not self._changing.acquire(blocking=False):
            raise OverloadedError("another change of the plan is under way", retry_after_s=5)
        try:
            yield
        finally:
            self._changing.release()

    def _answer(
        self,
        proposal: Proposal,
        plan_id: int | None,
        refresher: Refresher | None,
        division: Division | None = None,
        *,
        apply: bool,
        force: bool,
    ) -> dict[str, Any]:
        """Applies ``proposal`` where that is asked for, and tells of it.

        Args:
            plan_id: where its plan is stored.
            refresher: applies it and verifies it afterwards.
            division: that it is a part of.
        """
        update: UpdateRecord | None = None
        if apply:
            proposal.refuse_infeasible(force=force)
            if division is not None:
                division.refuse(force=force)
                with division.carried_out():
                    plan_id = self._apply(proposal, plan_id)
            elif refresher is None:
                plan_id = self._apply(proposal, plan_id)
            else:
                update = refresher.apply(proposal, plan_id=plan_id, force=force)
                plan_id = update.plan_id
            proposal = proposal.placed_as(self.router.residency.list_device)
        return self._told(proposal, plan_id, division, applied=apply, update=update)

    def _told(
        self,
        proposal: Proposal,
        plan_id: int | None,
        division: Division | None = None,
        *,
        applied: bool,
        update: UpdateRecord | None = None,
    ) -> dict[str, Any]:
        return {
            "applied": applied,
            **proposal.to_data(),
            "plan_id": plan_id,
            "unplaced_lists": self.router.stats().unplaced_lists if applied else None,
            "update": None if update is None else update.to_data(),
            **({} if division is None else {"shares": division.to_data()}),
        }

    def _check_devices(self) -> None:
        if not self.router.devices:
            why = f", since {note}" if (note := self.generations.current.note) else "; start it with --device"
            raise InvalidInputError(f"devices is empty: the daemon serves on the host alone{why}")

    def _propose_recent(self, changes: PlanChanges, bandwidth_share: float | None) -> Proposal | None:
        """From recent queries; None without a refresher, or while it has seen too few searches to plan from."""
        if self.refresher is None:
            return None
        try:
            return self.refresher.propose("requested", changes, bandwidth_share=bandwidth_share)
        except ProfileError as error:
            _log.info("planning from the stored profile: %s", error)
            return None

    def _propose(self, changes: PlanChanges, bandwidth_share: float) -> Proposal:
        """From the profile of the plan in force."""
        self._check_devices()
        devices = devices_of(self.index.ivf, len(self.router.devices), self.config.router.device_budget_bytes)
        profile, request = request_next(self.index.ivf, self.store, self.router.plan, changes, devices)
        with self._planning.of(self.index.ivf) as planner:
            plan = planner.solve(profile, request, None)
            return self._beside_current(plan, "requested", bandwidth_share, weigh=planner.weigh)

    def _plan_next(self, changes: PlanChanges) -> Plan:
        """From the profile of the plan in force."""
        self._check_devices()
        devices = devices_of(self.index.ivf, len(self.router.devices), self.config.router.device_budget_bytes)
        return plan_next(self.index.ivf, self.store, self.router.plan, changes, devices)[0]

    def _divide(
        self,
        plan: Plan,
        reason: str,
        bandwidth_share: float,
        budget: int | tuple[int, ...] | None = None,
        *,
        apply: bool,
        force: bool,
    ) -> dict[str, Any]:
        """:meth:`_answer` of what ``plan`` is asked for, within the share that the index then gets."""
        assert self._shares is not None
        division = self._shares.divide(self, plan, budget)
        proposal = self._beside_current(division.plan, reason, bandwidth_share, division.room_bytes)
        plan_id = stored_as(self.store, division.plan)
        return self._answer(proposal, plan_id, None, division, apply=apply, force=force)

    def _beside_current(
        self,
        plan: Plan,
        reason: str,
        bandwidth_share: float,
        room_bytes: Sequence[int] | None = None,
        weigh: Weigh | None = None,
    ) -> Proposal:
        """``room_bytes``: of each device, without scratch; None: what the open arenas may take."""
        current, there, arenas = self.router.plan, self.router.residency.list_device, arenas_of(self.router)
        if room_bytes is None and arenas is not None:
            room_bytes = [a - b for a, b in zip(arenas.room, arenas.scratch, strict=True)]
        return propose(
            plan,
            current,
            Served.by(current, there, self.router.page_locked_lists),
            reason=reason,
            bandwidth_share=bandwidth_share,
            room_bytes=room_bytes,
            weigh=weigh,
        )

    def _apply(self, proposal: Proposal, plan_id: int | None) -> int:
        return self.serve_plan(proposal.plan, plan_id, bandwidth_share=proposal.bandwidth_share, why=proposal.reason)

    def serve_plan(self, plan: Plan, plan_id: int | None, *, bandwidth_share: float = 1.0, why: str) -> int:
        """Stores ``plan`` unless it is stored, moves its lists, and makes it the current one; its id. Blocks. For who
        holds the lock of changes."""
        if plan_id is None:
            _, plan_id = save_plan(self.store, plan)
        self.router.apply_plan(plan, bandwidth_share=bandwidth_share, force=True)
        # It serves, whether or not the store takes the event.
        self.generations.current.plan_id = plan_id
        make_current(self.store, plan, plan_id, verified=False, why=why)
        return plan_id

    def set_budget(self, budgets: tuple[int, ...] | None) -> None:
        """Other bytes of each device than were configured, from the next change of plan or generation on; None: none,
        and devices stay closed."""
        self.config = replace(self.config, router=replace(self.config.router, device_budget_bytes=budgets))
        self.generations.set_budget(self.config)

    # Generations

    def reload(self, reason: str = "requested") -> dict[str, Any]:
        """Lets the current generation of the index directory serve, without a failed search; see
        :class:`hybridindex.service.reload.Generations`. Blocks.

        Raises:
            ReloadError: what serves goes on, and why.
            OverloadedError: a change of the plan or another reload is under way, or the daemon is about to stop.
        """
        if not self._changing.acquire(blocking=False):
            raise OverloadedError("another change of the plan or index is under way", retry_after_s=5)
        try:
            with self._reloading:
                return self.generations.reload(reason)
        finally:
            self._changing.release()

    # State

    @property
    def slo_ms(self) -> float | None:
        """The search latency that attainment is counted against, in milliseconds."""
        if self.config.slo_ms is not None:
            return self.config.slo_ms
        plan = self.router.plan
        return plan.request.slo_ms if plan is not None and plan.request.slo_stage == "search" else None

    @property
    def expected_hit_rate(self) -> float | None:
        """By those lists of the plan in force that devices hold; None without a plan."""
        plan = self.router.plan
        return None if plan is None else expected_hit_rate(plan, self.router.residency.list_device)

    @property
    def ready(self) -> bool:
        """Warmed up, and not about to stop."""
        return self._warm and not self.admission.draining and not self._closed

    def warm_up(self) -> None:
        """Searches through every tier, then sets :attr:`ready`. Its searches are in no statistic; neither are those of
        clients that did not wait for it. Blocks."""
        started = self.clock()
        tiers = warm_up(self.router, self.index.dim, self.index.nlist, stop=lambda: self.admission.draining)
        self._warm = True
        self.generations.remove_replaced()
        _log.info("warmed up %d tier(s) in %.2f s", len(tiers), self.clock() - started)

    def start(self) -> None:
        """Starts the refresher, where there is one."""
        if self.refresher is not None:
            self.refresher.start()

    def stop_changes(self) -> None:
        """Stops a running change of the plan and refuses new ones; searches go on. Returns at once."""
        self._planning.stop()
        if self.refresher is not None:
            self.refresher.stop()
        self.router.settle()

    def close(self) -> None:
        """Answers what is queued, then closes everything. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self.admission.drain()
        # A reload ends by itself once it sees that the service is closed; a device may keep it.
        if self._reloading.acquire(timeout=_RELOAD_ENDS_S):
            self._reloading.release()
        self.stop_changes()
        self.sessions.close_all()
        self.generations.close()
        try:
            self.store.close()
        except HybridIndexError:
            _log.exception("closing the service")
