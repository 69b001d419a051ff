"""The service without HTTP: an index, its router and control store, sessions, admission, maybe a refresher.

Searches are coroutines of one event loop; all other calls may block and belong on a thread.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hybridindex.api import Index
from hybridindex.errors import (
    HybridIndexError,
    InvalidInputError,
    OverloadedError,
    ReloadError,
    StoreError,
)
from hybridindex.index import Manifest
from hybridindex.plans.current import current_plan_id, make_current
from hybridindex.plans.placed import expected_hit_rate
from hybridindex.plans.precision import choose_view, stored_history
from hybridindex.plans.replan import PlanChanges
from hybridindex.plans.stored import load_plan, plan_summary
from hybridindex.processes import OfOneProcess
from hybridindex.refresh.config import RefreshConfig
from hybridindex.refresh.planning import Planning
from hybridindex.refresh.refresher import Refresher
from hybridindex.router.router import Router
from hybridindex.router.session import Session
from hybridindex.service.admission import Admission
from hybridindex.service.changes.documents import DocumentWriter
from hybridindex.service.changes.members import Members
from hybridindex.service.changes.rows import RowWriter
from hybridindex.service.changes.served_plan import ServedPlan
from hybridindex.service.cluster.member import Member
from hybridindex.service.config import ServiceConfig
from hybridindex.service.describe import describe
from hybridindex.service.intake.machine_memory import default_request_memory
from hybridindex.service.intake.request_memory import RequestMemory
from hybridindex.service.reload import Generations
from hybridindex.service.searches import (
    TURN_CELLS,
    Observation,
    RouterSearches,
    SearchRequest,
    SearchTrace,
    Traces,
    joined,
    load_of,
)
from hybridindex.service.serving import MakeRefresher, Prepared, Serving, open_serving, prepare, without_paths
from hybridindex.service.sessions import SessionTable
from hybridindex.service.warmup import warm_up_current
from hybridindex.store.control import ControlStore
from hybridindex.types import F32, HitRateChoice, SearchResult

__all__ = ["Service"]

_log = logging.getLogger(__name__)

#: How long the end of the service waits for a reload to notice it.
_RELOAD_ENDS_S = 60.0


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
        limits = config.limits
        self.admission = Admission(limits, clock)
        self.memory = RequestMemory(
            limits.request_memory_bytes or default_request_memory(), client_share=limits.client_share
        )
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
        self.changes = ServedPlan(self.generations, store, self._planning, open_devices=partial(self.reload, stay=True))
        #: Who adds and deletes rows.
        path = first.written
        served = None if path == first.index.path else self._served_manifest
        self.rows = RowWriter(path, allowed=config.write, durability=config.durability, served=served)
        self.rows.memory_bytes = config.node.memory_bytes
        self.documents = DocumentWriter(path, self.rows, config.documents, most=config.limits.max_rows)
        self.generations.on_generation.append(self.rows.follow)
        self._reloading = threading.Lock()
        #: What connects it to the other nodes of its cluster; None: it is of none.
        self.members = None if first.member is None else Members(self.generations, self._one_change)
        #: Of the store's openings, the one that knows the plan in force; None: none does.
        self._taken_up: int | None = store.openings
        self._warm = False
        self._closed = False
        #: Large queries and filters are prepared here: a long condition holds nobody up but others.
        self._preparing = ThreadPoolExecutor(2, thread_name_prefix="hybridindex-prepare")
        self._searches = RouterSearches(self._preparing)
        self.n_observer_errors = 0  # that raised

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
            first.codes = prepared.codes
        except BaseException:
            prepared.close()
            raise
        if first.note:
            _log.warning("serving on the host: %s", re.sub(r"\bINDEX\b", lambda _: str(index.path), first.note))
        service = cls(first, store, config, make_refresher=make_refresher, planning=planning, traces=traces)
        try:
            if choice.plan is None or choice.plan_id is None:
                return service
            if choice.plan_id != current_plan_id(store, choice.plan.index_fingerprint):
                make_current(store, choice.plan, choice.plan_id, verified=False, why="named at the start")
        except StoreError as error:
            service._note_untaken(error)
        except BaseException:
            service.close()
            raise
        return service

    # What serves now

    @property
    def index(self) -> Index:
        return self.generations.current.index

    def _served_manifest(self) -> Manifest:
        return self.index.ivf.manifest

    @property
    def member(self) -> Member | None:
        """Of :attr:`members`, that of the generation that serves."""
        return self.generations.current.member

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
        n, width = len(request.queries), self.router.width(request.k, request.nprobe, request.candidates)
        # A request whose arrays would be large is searched in parts, each in a turn of its own.
        step = min(n, max(1, TURN_CELLS // width))
        load, at, parts = load_of(step, width), 0, []
        await self.admission.enter(client, n, deadline_s, load=load)
        entered = answered = self.clock()
        generations = self.generations
        serving = generations.enter() if session is None else generations.of_session(session)
        try:
            asked = serving.router.nprobe if request.nprobe is None else request.nprobe
            nprobe = max(self.admission.nprobe_under_load(asked), min(asked, request.min_nprobe or 1))
            options: dict[str, Any] = {}
            if request.candidates is not None:
                options["candidates"] = request.candidates
            if request.allow_partial is not None:
                options["allow_partial"] = request.allow_partial
            options |= request.row_filter
            if trace is not None:
                trace.admitted()
                options["on_batch"] = trace.on_batch
            while True:
                if request.deadline_ms is not None and deadline_s is not None:
                    # The client's deadline may lower nprobe; the daemon's default only bounds the wait.
                    options["deadline_ms"] = max((deadline_s - self.clock()) * 1e3, 1e-3)
                    options["min_nprobe"] = request.min_nprobe or 1
                queries = request.queries if step == n else request.queries[at : at + step]
                parts.append(await self._searches(queries, request.k, nprobe, options, session or serving.router))
                at += step
                if at >= n:
                    break
                self.admission.leave(load)
                load = 0
                more = load_of(min(step, n - at), width)
                await self.admission.enter(client, n - at, load=more, admitted=True)
                load = more
        finally:
            if session is None:
                generations.leave(serving)
            answered = self.clock()
            if load:
                self.admission.leave(load)
        result = parts[0] if len(parts) == 1 else joined(parts)
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
            filtered=bool(request.row_filter),
        )
        return result

    def _tell(self, seen: Observation, refresher: Refresher | None, *, filtered: bool) -> None:
        try:
            for tell in self.on_search:
                tell(seen)
            # A search with a filter is the host's alone, and says nothing of what devices should hold.
            if refresher is not None and not filtered:
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
    ) -> int:
        """Starts to copy lists for ``drafts`` (n, d) float32; returns at once how many older lookaheads of this client
        made way in the queue.

        Raises:
            UnknownSessionError, InvalidInputError, ProfileError.
            OverloadedError: the daemon drains: nothing would be moved.
        """
        if self.admission.draining:
            raise OverloadedError("the daemon is about to stop; ask another one", retry_after_s=1)
        with self.sessions.use(session_id, client) as session:
            started = session.start_lookahead(drafts, nprobe=nprobe, budget_bytes=budget_bytes, window_ms=window_ms)
        return started.n_dropped

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
        found = load_plan(choose_view(self.index.ivf, self.store, choice), choice, self.store)
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
        found: dict[str, Any] = describe(stored_history(self.index.ivf, self.store, self.committed_plan_id()))
        return found

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
        row_cache_bytes: int | Literal["all"] | None = None,
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
        changes = PlanChanges(
            slo_ms=slo_ms,
            device_budget_bytes=device_budget_bytes,
            rate_qps=rate_qps,
            coverage=coverage,
            hit_rate_model=hit_rate_model,
            headroom=headroom,
            row_cache_bytes=row_cache_bytes,
        )
        return self.changes.repartition(changes, apply=apply, bandwidth_share=bandwidth_share, force=force)

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
        return self.changes.apply_plan(choice, apply=apply, bandwidth_share=bandwidth_share, force=force)

    def set_budget(self, budgets: tuple[int, ...] | None) -> None:
        """Other bytes of each device than were configured, from the next change of plan or generation on; None: none,
        and devices stay closed."""
        self.config = replace(self.config, router=replace(self.config.router, device_budget_bytes=budgets))
        self.generations.set_budget(self.config)

    # Generations

    def reload(self, reason: str = "requested", *, stay: bool = False) -> dict[str, Any]:
        """Lets the current generation of the index directory serve, without a failed search; see
        :meth:`hybridindex.service.reload.Generations.reload`. Blocks.

        Raises:
            ReloadError: what serves goes on, and why.
            OverloadedError: a change of the plan or another reload is under way, or the daemon is about to stop.
        """
        if self.member is not None and not stay:
            raise ReloadError("a node of a cluster changes its generation only when its cluster does")
        with self._one_change():
            return self.generations.reload(reason, stay=stay)

    @contextmanager
    def _one_change(self) -> Iterator[None]:
        """Of what serves. OverloadedError: another one is under way."""
        with self.changes.one_change("plan or index"), self._reloading:
            yield

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
        stop, reload = lambda: self.admission.draining, partial(self.reload, "compaction")
        tiers = warm_up_current(lambda: self.generations.current, reload, stop)
        self._warm = True
        self.generations.remove_replaced()
        _log.info("warmed up %d tier(s) in %.2f s", len(tiers), self.clock() - started)

    def start(self) -> None:
        """Starts the refresher, where there is one."""
        if self.refresher is not None:
            try:
                self.refresher.start()
            except StoreError as error:
                self._note_untaken(error)

    # The control store

    @property
    def note(self) -> str:
        """What is missing, without paths; empty: nothing."""
        now, problem = self.generations.current, self.store.problem
        if problem is None or now.pending:
            return now.note
        words = f"no plan can be stored or applied, searches go on: {without_paths(self.store, problem)}"
        return f"{now.note}; {words}" if now.note else words

    def store_changed(self) -> bool:
        """Opens the store where it is not open. Whether :meth:`take_up_store` has something to do. Blocks."""
        if self.generations.current.deferred is not None:
            return True
        try:
            self.store.check_place()
        except StoreError:
            return False  # it is logged, and in the health
        return self.generations.current.pending or self.store.openings != self._taken_up

    def take_up_store(self) -> None:
        """Opens devices that waited for another index; and after the store was opened, which may be another one, see
        :meth:`hybridindex.service.reload.Generations.take_up_store`. Blocks.

        Raises:
            OverloadedError: another change is under way.
        """
        openings = self.store.openings
        try:
            with self._one_change():
                self.generations.open_deferred()
                if self.generations.current.pending or openings != self._taken_up:
                    self.generations.take_up_store()
        except StoreError as error:
            self._note_untaken(error)
        else:
            self._taken_up = openings

    def _note_untaken(self, error: StoreError) -> None:
        if self._taken_up is not None:
            _log.error(
                "the plan that serves could not be recorded, so a restart would not resume it; it is tried again: %s",
                error,
            )
        self._taken_up = None

    def drain(self) -> None:
        """Refuses new work from now on, also whose body has not come, and drops lookaheads that wait; what was admitted
        is answered. On the event loop; returns at once."""
        self.admission.drain()
        self.memory.stop_reading()
        self.router.drop_lookaheads()

    def stop_changes(self) -> None:
        """Stops a running change of the plan or a compaction, and refuses new ones; searches go on. Returns at once."""
        self.rows.stop()
        self.documents.stop()
        self._planning.stop()
        if self.refresher is not None:
            self.refresher.stop()
        self.router.settle()

    def close(self) -> None:
        """Answers what is queued, then closes everything. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._preparing.shutdown(wait=False, cancel_futures=True)
        self.admission.drain()
        # A reload ends by itself once it sees that the service is closed; a device may keep it.
        if self._reloading.acquire(timeout=_RELOAD_ENDS_S):
            self._reloading.release()
        self.stop_changes()
        self.rows.close()
        self.documents.close()
        self.sessions.close_all()
        if self.members is not None:
            self.members.close()
        self.generations.close()
        try:
            self.store.close()
        except HybridIndexError:
            _log.exception("closing the service")
