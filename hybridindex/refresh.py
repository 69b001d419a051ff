"""Keeps the served plan up to date: watches the load, makes a new plan in the background, applies and verifies it.

The shell around :mod:`hybridindex.router.drift` (when), :mod:`hybridindex.router.update_cycle` (in which order) and
:mod:`hybridindex.proposal` (what). Threads, clock and store are here; decisions are there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridindex.committed import commit_plan, last_commit, last_committed_plan, same_decision, save_plan
from hybridindex.errors import (
    DeviceError,
    InvalidInputError,
    MissingDependencyError,
    RefreshError,
    RouterClosedError,
)
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.profiler.recent import renew_profile
from hybridindex.proposal import Proposal, change_request, compare_plans, plan_again
from hybridindex.refresh_records import RefreshConfig, RefreshStatus, UpdateRecord, window_data
from hybridindex.router import drift
from hybridindex.router import update_cycle as cycle
from hybridindex.router.drift import DriftMonitor, Expectation, Window
from hybridindex.router.reservoir import QueryReservoir
from hybridindex.router.router import Router
from hybridindex.router.update_cycle import CycleStage, Outcome, UpdateCycle
from hybridindex.types import F32, I64, Profile

if TYPE_CHECKING:
    from hybridindex.facade import Index
    from hybridindex.store.control import ControlStore

__all__ = ["Proposal", "RefreshConfig", "RefreshStatus", "Refresher", "UpdateRecord", "last_committed_plan"]

_log = logging.getLogger(__name__)

#: Closed windows that the status shows.
_SHOWN_WINDOWS = 20


@dataclass(slots=True, kw_only=True)
class _Draft:
    """The update that goes on."""

    number: int
    reason: str
    base: Plan
    began_at: str
    base_plan_id: int | None
    #: When the load began to be another, as far as is known: queries from before would blur the new one.
    since_s: float | None = None
    profile: Profile | None = None
    plan: Plan | None = None
    plan_id: int | None = None
    proposal: Proposal | None = None
    verified: bool | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    moved_s: float = 0.0


class Refresher:
    """Watches one router and changes its plan. Close it before the router.

    Threads: :meth:`observe` and :meth:`status` from any thread, they wait for nobody's work. :meth:`propose`,
    :meth:`apply` and :meth:`step` take turns. :meth:`start` makes a scheduler thread and two workers; :meth:`close`
    joins them.
    """

    def __init__(
        self,
        index: Index,
        router: Router,
        store: ControlStore | None,
        config: RefreshConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            index: what the router serves.
            router: with a plan and at least one device.
            store: where plans and events are recorded; the caller closes it afterwards. None: nowhere.
            clock: monotonic seconds.

        Raises:
            InvalidInputError: the router has no plan or no device, or serves another index.
        """
        if router.plan is None or not router.devices:
            raise InvalidInputError("router has no plan or no devices; expected one that has lists to move")
        if router.plan.index_fingerprint != index.fingerprint:
            raise InvalidInputError(f"router serves index {router.plan.index_fingerprint}, not {index.fingerprint}")
        self._index = index
        self._router = router
        self._store = store
        self._config = config or RefreshConfig()
        self._clock = clock
        self._reservoir = QueryReservoir(
            self._config.reservoir_queries, retention_s=self._config.retention_s, seed=self._config.seed
        )
        #: Guards the monitor and the counters; held for arithmetic only.
        self._lock = threading.Lock()
        self._monitor = DriftMonitor(self._expect(router.plan), self._config.drift, now_s=clock())
        self._observed: SimpleQueue[drift.DriftAction] = SimpleQueue()
        self._requests = self._observe_errors = self._store_errors = self._triggers = 0
        self._windows: deque[Window] = deque(maxlen=_SHOWN_WINDOWS)
        #: Held while an update, a proposal or a step goes on.
        self._work = threading.Lock()
        self._cycle = UpdateCycle(self._config.update, self._config.drift)
        self._draft: _Draft | None = None
        self._last: UpdateRecord | None = None
        self._outcomes: Counter[str] = Counter()
        self._proposals = self._updates = 0
        #: Rows of the committed plan and its profile, where there is a store.
        self._plan_id: int | None = None
        self._profile_id: int | None = router.plan.analysis.profile.id
        #: Windows of the plan that serves, to compare the next one with.
        self._own_windows: deque[Window] = deque(maxlen=self._config.drift.of_windows)
        self._scheduler: Any = None
        self._closed = threading.Event()

    # What callers do

    def observe(self, queries: F32, latency_s: float, hit_rate: Any) -> None:
        """Takes note of one served request. Never raises, waits for no work; what it cannot use is counted.

        Args:
            queries: (n, dim) or (dim,) float32, as the user gave them.
            latency_s: from arrival to answer.
            hit_rate: (n,) by bytes, of :class:`hybridindex.types.SearchResult`.
        """
        if self._closed.is_set():
            return
        try:
            rates = np.atleast_1d(np.asarray(hit_rate, dtype=np.float64))
            total, squares = float(rates.sum()), float(rates @ rates)
            if not (rates.size and np.isfinite(total) and np.isfinite(latency_s)):
                raise InvalidInputError(f"latency {latency_s} s and {rates.size} hit rates of sum {total}")
            if queries.shape[-1] != self._index.dim or queries.size != rates.size * self._index.dim:
                raise InvalidInputError(f"queries has shape {queries.shape}, hit_rate {rates.shape}")
            now_s = self._clock()
            served = drift.Served(
                now_s=now_s,
                latency_s=float(latency_s),
                queries=rates.size,
                hit_rate_sum=total,
                hit_rate_squares=squares,
            )
            with self._lock:
                self._requests += 1
                actions = self._monitor.handle(served)
            for action in actions:
                self._observed.put(action)
            self._reservoir.offer(queries, now_s)
        except Exception:  # noqa: BLE001 - a caller's request was served; this must not fail it
            with self._lock:
                self._observe_errors += 1
                first = self._observe_errors == 1
            if first:
                _log.exception("a request could not be observed; later ones are only counted")

    def propose(self, reason: str = "asked for", **request_changes: Any) -> Proposal:
        """Makes a plan from recent queries and says what it would bring. Applies nothing.

        Args:
            reason: why, for the records.
            request_changes: other values than those the served plan was asked for; see
                :data:`hybridindex.proposal.CHANGES`.

        Raises:
            InvalidInputError: a change that is not known, or out of its range.
            ProfileError: too few recent queries are known.
            DeviceError: a device has failed.
            RouterClosedError: after :meth:`close`.
        """
        with self._work:
            self._refuse_closed()
            base = self._served()
            request = change_request(base.request, request_changes)
            seconds: dict[str, float] = {}
            with _timed(seconds, "profiling"):
                profile = self._renew(base)
            with _timed(seconds, "solving"):
                plan = plan_again(profile, request, self._router)
            with _timed(seconds, "weighing"):
                proposal = self._weigh(plan, base, reason, seconds)
            proposal = replace(proposal, stage_seconds=seconds)
            self._record("refresh_proposal", proposal.to_data())
            return proposal

    def apply(self, proposal: Proposal) -> UpdateRecord:
        """Applies a proposal, whatever the gate says, and returns when its lists have moved.

        The update is then ``verifying``: the next windows commit it or roll it back; :meth:`status` tells. A move that
        fails is rolled back, and the record says so.

        Raises:
            RefreshError: another update goes on, or another plan serves than the proposal was made for.
            RouterClosedError: after :meth:`close`.
        """
        with self._work:
            self._refuse_closed()
            if self._cycle.stage is not CycleStage.IDLE:
                raise RefreshError(f"an update is {self._cycle.stage}; apply the proposal when it has ended")
            if proposal.base is not self._served():
                raise RefreshError(f"proposal {proposal.number} was made for a plan that serves no more; propose again")
            self._begin(proposal.reason)
            assert self._draft is not None
            self._draft.plan, self._draft.proposal = proposal.plan, proposal
            self._draft.seconds.update(proposal.stage_seconds)
            chosen = cycle.Chosen(now_s=self._clock(), reason=proposal.reason, before=tuple(self._own_windows))
            self._carry_out(self._cycle.handle(chosen))
            assert self._last is not None
            return self._last

    def status(self) -> RefreshStatus:
        """A reading of everything; cheap."""
        now_s = self._clock()
        with self._lock:
            expectation = self._monitor.expectation
            return RefreshStatus(
                drift_state=self._monitor.state,
                stage=self._cycle.stage,
                running=self._scheduler is not None and not self._closed.is_set(),
                plan_id=self._plan_id,
                predicted_hit_rate=expectation.hit_rate.mean,
                attainment_target=expectation.attainment,
                slo_ms=expectation.slo_s * 1e3,
                requests=self._requests,
                queries_kept=len(self._reservoir),
                observe_errors=self._observe_errors,
                store_errors=self._store_errors,
                updates=dict(self._outcomes),
                triggers=self._triggers,
                back_off_s=max(0.0, self._cycle.not_before_s - now_s),
                windows=tuple(self._windows),
                last_update=self._last,
            )

    # Life

    def start(self) -> None:
        """Commits the served plan to the store where it is another than the last one, and starts the schedule.

        Raises:
            MissingDependencyError: APScheduler is not installed.
            RouterClosedError: after :meth:`close`.
            StoreError: the store does not take the plan.
        """
        try:
            from apscheduler.executors.pool import ThreadPoolExecutor
            from apscheduler.schedulers.background import BackgroundScheduler
        except ImportError as error:
            raise MissingDependencyError(
                "a schedule needs APScheduler; install hybridindex[refresh]", name="apscheduler"
            ) from error
        with self._work:
            self._refuse_closed()
            if self._scheduler is not None:
                return
            self._commit_served()
            # Two workers: while one carries out an update, the other finds that out and returns.
            scheduler = BackgroundScheduler(
                timezone=UTC,
                executors={"default": ThreadPoolExecutor(2)},
                job_defaults={"coalesce": True, "misfire_grace_time": None, "max_instances": 2},
            )
            scheduler.add_job(self.step, "interval", seconds=self._config.tick_s, id="tick")
            if self._config.interval_s is not None:
                scheduler.add_job(
                    self.step, "interval", seconds=self._config.interval_s, id="update", args=("the schedule",)
                )
            scheduler.start()
            self._scheduler = scheduler

    def close(self) -> None:
        """Joins what was started; a stage that goes on is finished first, later ones are not begun.

        An update that was not committed keeps serving, and a restart resumes with the plan before. Closing twice is
        harmless.
        """
        self._closed.set()
        with self._work:
            scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            scheduler.shutdown(wait=True)
        with self._work:
            if self._draft is not None:
                self._record("refresh_interrupted", {"update": self._draft.number, "stage": str(self._cycle.stage)})
                self._draft = None
            self._reservoir.clear()

    def __enter__(self) -> Refresher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _refuse_closed(self) -> None:
        if self._closed.is_set():
            raise RouterClosedError("the refresher is closed")

    # Steps

    def step(self, reason: str | None = None) -> None:
        """Does what is due now, on the calling thread; the schedule calls it. Returns at once while work goes on.

        ``reason``: also begins an update, unless one goes on or the last one failed a short while ago.
        """
        if not self._work.acquire(blocking=False):
            return
        try:
            if not self._closed.is_set():
                self._step(reason)
        except Exception:  # noqa: BLE001 - the next step must come; failures of an update are handled where they occur
            _log.exception("a step of the refresh failed")
        finally:
            self._work.release()

    def _step(self, reason: str | None) -> None:
        now_s = self._clock()
        with self._lock:
            actions = self._monitor.handle(drift.Tick(now_s=now_s))
        for action in actions:
            self._observed.put(action)
        while True:
            try:
                action = self._observed.get_nowait()
            except Empty:
                break
            match action:
                case drift.WindowClosed():
                    self._take_window(action)
                case drift.Trigger():
                    self._triggers += 1
                    if self._monitor.state is not drift.DriftState.DRIFTING:
                        continue  # an update ended since
                    self._record(
                        "refresh_trigger",
                        {"reason": action.reason, "windows": [window_data(w) for w in action.windows]},
                    )
                    self._request(action.reason, action.windows, since_s=action.windows[0].began_s)
        self._carry_out(self._cycle.handle(drift.Tick(now_s=self._clock())))
        if reason is not None:
            self._request(reason, tuple(self._own_windows))

    def _take_window(self, action: drift.WindowClosed) -> None:
        with self._lock:
            self._windows.append(action.window)
        if not action.window.thin:
            self._own_windows.append(action.window)
        self._carry_out(self._cycle.handle(action))

    def _request(self, reason: str, before: tuple[Window, ...], *, since_s: float | None = None) -> None:
        if self._cycle.stage is CycleStage.IDLE:
            self._begin(reason, since_s)
        self._carry_out(self._cycle.handle(cycle.Requested(now_s=self._clock(), reason=reason, before=before)))

    def _begin(self, reason: str, since_s: float | None = None) -> None:
        self._updates += 1
        self._draft = _Draft(
            number=self._updates,
            reason=reason,
            base=self._served(),
            began_at=_now(),
            base_plan_id=self._plan_id,
            since_s=since_s,
        )

    def _carry_out(self, actions: Sequence[cycle.CycleAction]) -> None:
        """Does what the cycle asks for until it waits for something else."""
        waiting = deque(actions)
        while waiting:
            action = waiting.popleft()
            try:
                event = self._perform(action)
            except Exception as error:  # noqa: BLE001 - becomes the outcome of the update
                _log.warning("update %s: %s failed: %r", self._number, self._cycle.stage, error)
                event = cycle.Failed(now_s=self._clock(), why=f"{type(error).__name__}: {error}")
            if event is not None:
                waiting.extend(self._cycle.handle(event))

    @property
    def _number(self) -> int:
        return self._draft.number if self._draft is not None else 0

    def _perform(self, action: cycle.CycleAction) -> cycle.CycleEvent | None:
        match action:
            case cycle.Transition():
                self._note(action)
                return None
            case cycle.Ended():
                self._end(action)
                return None
        draft = self._draft
        assert draft is not None
        if not isinstance(action, cycle.RollBack | cycle.Commit):
            self._refuse_closed()
        match action:
            case cycle.CollectProfile():
                self._commit_served()
                with _timed(draft.seconds, "profiling"):
                    draft.profile = self._renew(draft.base, draft.since_s)
                return cycle.Profiled(now_s=self._clock())
            case cycle.Solve():
                assert draft.profile is not None
                with _timed(draft.seconds, "solving"):
                    draft.plan = plan_again(draft.profile, draft.base.request, self._router)
                return cycle.Solved(now_s=self._clock())
            case cycle.Weigh():
                assert draft.plan is not None
                with _timed(draft.seconds, "weighing"):
                    draft.proposal = self._weigh(draft.plan, draft.base, draft.reason, draft.seconds)
                self._record("refresh_proposal", {"update": draft.number, **draft.proposal.to_data()})
                return cycle.Weighed(now_s=self._clock(), comparison=draft.proposal.comparison)
            case cycle.Move():
                with _timed(draft.seconds, "moving"):
                    expectation = self._move(draft)
                draft.moved_s = self._clock()
                return cycle.Moved(now_s=draft.moved_s, expectation=expectation)
            case cycle.Commit():
                draft.seconds["verifying"] = self._clock() - draft.moved_s
                self._commit(draft, verified=action.verified)
                return cycle.Committed(now_s=self._clock())
            case cycle.RollBack():
                with _timed(draft.seconds, "rolling_back"):
                    self._router.apply_plan(draft.base, bandwidth_share=self._config.bandwidth_share)
                self._serve_now(draft.base)
                return cycle.RolledBack(now_s=self._clock())

    # The stages

    def _served(self) -> Plan:
        plan = self._router.plan
        assert plan is not None, "a plan is never taken away"
        return plan

    def _renew(self, base: Plan, since_s: float | None = None) -> Profile:
        for tier in self._router.devices:
            if tier.failure is not None:
                raise DeviceError(f"device {tier.label} has failed; its lists come back with it, not with a new plan")
        now_s, span_s = self._clock(), self._config.retention_s
        queries = self._reservoir.sample(now_s)
        if since_s is not None:
            lately = self._reservoir.sample(now_s, since_s=since_s)
            if len(lately) >= self._config.min_queries:
                queries, span_s = lately, now_s - since_s
        return renew_profile(
            base.analysis.profile,
            self._index.ivf,
            queries,
            n_hot=int(base.resident_lists.size),
            decay=self._config.decay,
            seed=self._config.seed,
            min_queries=self._config.min_queries,
            notes={"parent": self._profile_id, "span_s": span_s},
        )

    def _weigh(self, plan: Plan, base: Plan, reason: str, seconds: Mapping[str, float]) -> Proposal:
        comparison, lists_in, lists_out = compare_plans(
            plan, base, self._router, bandwidth_share=self._config.bandwidth_share
        )
        self._proposals += 1
        access = plan.analysis.profile.access
        return Proposal(
            number=self._proposals,
            reason=reason,
            created_at=_now(),
            plan=plan,
            base=base,
            n_queries=len(access.fit_probes) + len(access.held_probes),
            comparison=comparison,
            lists_in=lists_in,
            lists_out=lists_out,
            objection=comparison.objection(self._config.update),
            stage_seconds=dict(seconds),
        )

    def _move(self, draft: _Draft) -> Expectation:
        """Saves the plan, then brings its lists; the promise that goes with what really came."""
        assert draft.plan is not None
        if self._store is not None:
            # A restart must find what served before.
            self._commit_served()
            draft.base_plan_id = self._plan_id
            draft.plan, draft.plan_id = save_plan(self._store, draft.plan)
        before = sum(tier.n_failures for tier in self._router.devices)
        self._router.apply_plan(draft.plan, bandwidth_share=self._config.bandwidth_share)
        if sum(tier.n_failures for tier in self._router.devices) > before:
            raise DeviceError("a device failed while lists moved to it")
        return self._serve_now(draft.plan)

    def _serve_now(self, plan: Plan) -> Expectation:
        """``plan`` serves from now on: windows begin anew."""
        expectation = self._expect(plan)
        with self._lock:
            self._monitor.handle(drift.UpdateEnded(now_s=self._clock(), expectation=expectation))
        self._own_windows.clear()
        return expectation

    def _expect(self, plan: Plan) -> Expectation:
        """What the plan promises with the lists that found room."""
        lists: I64 = plan.resident_lists
        came = lists[self._router.residency.list_device[lists] >= 0]
        request: PlanRequest = plan.request
        slo_ms, attainment = self._config.slo_ms, self._config.attainment
        return Expectation(
            slo_s=request.search_slo_s if slo_ms is None else slo_ms / 1e3,
            attainment=request.percentile / 100 if attainment is None else attainment,
            hit_rate=drift.predict_hit_rate(plan.analysis.curve, came),
        )

    def _commit_served(self) -> None:
        """The plan that serves is the current one in the store, with a row of its own or that of the same decision."""
        if self._store is None or self._plan_id is not None:
            return
        served = self._served()
        commit = last_commit(self._store, self._index.fingerprint)
        if commit is not None:
            known = last_committed_plan(self._store, self._index, allow_other_hardware=True)
            if known is not None and same_decision(known, served) and known.profile_id == served.profile_id:
                self._plan_id = commit["plan_id"]
                return
        saved, plan_id = save_plan(self._store, served)
        commit_plan(self._store, saved, plan_id, verified=False, why="it served when the refresh began")
        self._plan_id, self._profile_id = plan_id, saved.profile_id

    def _commit(self, draft: _Draft, *, verified: bool) -> None:
        if self._store is not None:
            assert draft.plan is not None
            assert draft.plan_id is not None
            commit_plan(self._store, draft.plan, draft.plan_id, verified=verified, why=draft.reason)
            self._plan_id, self._profile_id = draft.plan_id, draft.plan.profile_id
        draft.verified = verified

    def _end(self, ended: cycle.Ended) -> None:
        self._update_last(ended.outcome, ended.why)
        self._outcomes[ended.outcome] += 1
        assert self._last is not None
        self._record("refresh_ended", self._last.to_data())
        with self._lock:
            # Nothing changed: who asked may ask again after a while.
            if self._monitor.state is drift.DriftState.DRIFTING:
                self._monitor.handle(drift.UpdateEnded(now_s=self._clock()))
        self._draft = None

    def _note(self, transition: cycle.Transition) -> None:
        self._update_last(None, transition.why)
        facts = {"source": str(transition.source), "target": str(transition.target), "why": transition.why}
        self._record("refresh_stage", {"update": self._number, **facts})

    def _update_last(self, outcome: Outcome | None, why: str) -> None:
        draft = self._draft
        assert draft is not None
        self._last = UpdateRecord(
            number=draft.number,
            reason=draft.reason,
            began_at=draft.began_at,
            stage=self._cycle.stage,
            outcome=outcome,
            why=why,
            plan_id=draft.plan_id,
            base_plan_id=draft.base_plan_id,
            proposal=None if draft.proposal is None else draft.proposal.to_data(),
            verified=draft.verified,
            stage_seconds=dict(draft.seconds),
        )

    def _record(self, kind: str, payload: Mapping[str, Any]) -> None:
        """What is told but decides nothing: a store that does not take it stops no update."""
        if self._store is None:
            return
        try:
            self._store.record_event(kind, {"index_fingerprint": self._index.fingerprint, **payload})
        except Exception:  # noqa: BLE001 - counted and logged
            self._store_errors += 1
            _log.exception("the control store did not take an event of kind %s", kind)

    def check_invariants(self) -> None:
        """Asserts what must hold while nothing goes on."""
        with self._lock:
            self._monitor.check_invariants()
        self._cycle.check_invariants()
        self._reservoir.check_invariants()
        assert (self._draft is None) == (self._cycle.stage is CycleStage.IDLE)


class _timed:  # noqa: N801 - reads as a verb
    """Adds the seconds of a block to ``seconds[name]``."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._name] = time.perf_counter() - self._began_s


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
