"""Carries out updates of one router's plan: what :mod:`hybridindex.refresh.update_cycle` asks for, stage by stage.

Moves, commits and records. :mod:`hybridindex.refresh.planner` profiles and plans;
:mod:`hybridindex.refresh.refresher` decides when an update begins.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from hybridindex.errors import DeviceError, ProfileError, RefreshError, RouterClosedError, StoreError
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.plans.current import (
    HasFingerprint,
    keep_current,
    make_current,
    save_plan,
)
from hybridindex.plans.planner import Arenas
from hybridindex.plans.proposal import Proposal, Served, held_now
from hybridindex.plans.replan import PlanChanges, replan
from hybridindex.processes import short_switch_interval
from hybridindex.refresh import update_cycle as cycle
from hybridindex.refresh.config import RefreshConfig, UpdateRecord
from hybridindex.refresh.drift import Expectation, Tick, Window, WindowClosed, predict_hit_rate
from hybridindex.refresh.planner import RenewOptions
from hybridindex.refresh.planning import Planning
from hybridindex.refresh.reservoir import QueryReservoir
from hybridindex.refresh.update_cycle import CycleStage, Outcome, UpdateCycle
from hybridindex.router.router import Router
from hybridindex.types import F32, I64, Profile

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex
    from hybridindex.store.control import ControlStore

__all__ = ["PlanUpdates", "ServedIndex", "arenas_of", "expect"]

_log = logging.getLogger(__name__)


class ServedIndex(HasFingerprint, Protocol):
    """What a refresh needs of a :class:`hybridindex.Index`."""

    @property
    def dim(self) -> int: ...

    @property
    def ivf(self) -> IVFIndex: ...


def expect(plan: Plan, router: Router, config: RefreshConfig) -> Expectation:
    """What ``plan`` promises, counting only its lists that fit on the devices."""
    lists: I64 = plan.resident_lists
    came = lists[router.residency.list_device[lists] >= 0]
    slo_ms, attainment = config.slo_ms, config.attainment
    return Expectation(
        slo_s=plan.request.search_slo_s if slo_ms is None else slo_ms / 1e3,
        attainment=plan.request.percentile / 100 if attainment is None else attainment,
        hit_rate=predict_hit_rate(plan.analysis.curve, came),
    )


def arenas_of(router: Router) -> Arenas | None:
    """What the open devices may take; None where no budget is configured and each plan's own counts."""
    if router.config.device_budget_bytes is None:
        return None
    return Arenas(
        scratch=tuple(tier.reserved_bytes for tier in router.devices),
        room=tuple(tier.budget_bytes for tier in router.devices),
    )


@dataclass(slots=True, kw_only=True)
class _Draft:
    """The running update."""

    number: int
    reason: str
    base: Plan
    began_at: str
    base_plan_id: int | None
    #: When the load began to change, if known: older queries would blur the new load.
    since_s: float | None = None
    profile: Profile | None = None
    plan: Plan | None = None
    plan_id: int | None = None
    proposal: Proposal | None = None
    verified: bool | None = None
    seconds: dict[str, float] = field(default_factory=dict)


class PlanUpdates:
    """At most one update at a time. The owner calls under one lock; members that may be read without it say so."""

    def __init__(
        self,
        router: Router,
        store: ControlStore | None,
        config: RefreshConfig,
        reservoir: QueryReservoir,
        *,
        clock: Callable[[], float],
        on_served: Callable[[Expectation, float], None],
        on_ended: Callable[[], None],
    ) -> None:
        """
        Args:
            clock: monotonic seconds.
            on_served: called when another plan serves, with what to expect of it and since when.
            on_ended: called when an update is over, whatever its outcome.
        """
        self._router, self._store, self._config = router, store, config
        self._reservoir, self._clock = reservoir, clock
        self._on_served, self._on_ended = on_served, on_ended
        self._cycle = UpdateCycle(config.update, config.drift)
        self._draft: _Draft | None = None
        #: The update that was under way when the refresh ended.
        self._interrupted: _Draft | None = None
        self._proposals = self._updates = 0
        #: Windows of the plan that serves, to compare the next one with.
        self._windows: deque[Window] = deque(maxlen=config.drift.of_windows)
        #: The plan that ``on_served`` was called for last, and the row of its profile.
        self._known = self._served()
        #: When the plan began to serve; its windows begin then or later.
        self._since_s = -math.inf
        self._profile_id: int | None = self._known.analysis.profile.id
        #: The router was given a plan directly, and the store does not know yet.
        self._to_commit = False
        self._planning = Planning(config)
        #: Set from any thread: no further stage begins.
        self.closed = self._planning.closed
        # Read from any thread.
        self.plan_id: int | None = None
        self.last: UpdateRecord | None = None
        self.outcomes: Counter[str] = Counter()
        self.store_errors = 0

    @property
    def stage(self) -> CycleStage:
        """From any thread."""
        return self._cycle.stage

    @property
    def not_before_s(self) -> float:
        """From any thread."""
        return self._cycle.not_before_s

    def settled(self) -> tuple[Plan, int | None]:
        """The plan that no update is about, and its row: what serves, or what served before another was tried. From any
        thread, also after the end.
        """
        draft = self._draft or self._interrupted
        return (self._served(), self.plan_id) if draft is None else (draft.base, draft.base_plan_id)

    def refuse_closed(self) -> None:
        if self.closed.is_set():
            raise RouterClosedError("the refresher is closed")

    # What begins and drives an update

    def propose(self, reason: str, changes: PlanChanges, bandwidth_share: float) -> Proposal:
        """A plan from recent queries, not applied; see
        :meth:`hybridindex.refresh.refresher.Refresher.propose`.
        """
        self.refuse_closed()
        self._notice_served()
        base = self._served()
        request = replan(base.request, changes, None)
        seconds: dict[str, float] = {}
        try:
            with short_switch_interval():
                with _timed(seconds, "profiling"):
                    profile = self._renew(base)
                with _timed(seconds, "solving"):
                    plan = self._solve(profile, request)
                with _timed(seconds, "weighing"):
                    proposal = self._weigh(plan, base, reason, seconds, bandwidth_share)
        finally:
            self._planning.end()
        proposal = replace(proposal, stage_seconds=seconds)
        self.record("refresh_proposal", proposal.to_data())
        return proposal

    def choose(self, proposal: Proposal, plan_id: int | None, *, force: bool) -> UpdateRecord:
        """Applies a proposal; see :meth:`hybridindex.refresh.refresher.Refresher.apply`."""
        self.refuse_closed()
        proposal.refuse_infeasible(force=force)
        if self.stage is not CycleStage.IDLE:
            raise RefreshError(f"an update is {self.stage}; apply the proposal when it has ended")
        if proposal.base is not self._served():
            raise RefreshError(f"proposal {proposal.number} was made for a plan that no longer serves; propose again")
        self._notice_served()
        draft = self._begin(proposal.reason)
        draft.plan, draft.plan_id, draft.proposal = proposal.plan, plan_id, proposal
        draft.seconds.update(proposal.stage_seconds)
        chosen = cycle.Chosen(now_s=self._clock(), reason=proposal.reason, before=tuple(self._windows))
        self._carry_out(self._cycle.handle(chosen))
        assert self.last is not None
        return self.last

    def request(self, reason: str, before: tuple[Window, ...] = (), *, since_s: float | None = None) -> None:
        """Begins an update unless one is running or the last one failed a short while ago.

        Args:
            before: windows to compare the new plan with; by default the last ones of the plan in force.
            since_s: when the load began to change, if known.
        """
        if self.stage is CycleStage.IDLE:
            self._begin(reason, since_s)
        asked = cycle.Requested(now_s=self._clock(), reason=reason, before=before or tuple(self._windows))
        self._carry_out(self._cycle.handle(asked))

    def see(self, closed: WindowClosed) -> None:
        """A window closed."""
        # An earlier one was served, at least in part, by the plan before.
        if not closed.window.thin and closed.window.began_s >= self._since_s:
            self._windows.append(closed.window)
        self._carry_out(self._cycle.handle(closed))

    def tick(self) -> None:
        """Time went by."""
        self._carry_out(self._cycle.handle(Tick(now_s=self._clock())))

    def follow_router(self) -> None:
        """Makes a plan that the router was given directly the current one, and ends an update that it overtook. Before
        anything else of a step: what was observed under the plan before says nothing of it.
        """
        draft, served = self._draft, self._served()
        if draft is not None and served is not draft.base and served is not draft.plan:
            compacted = served.index_fingerprint != draft.base.index_fingerprint
            why = "the index was compacted meanwhile" if compacted else "the router was given another plan meanwhile"
            self._carry_out(self._cycle.handle(cycle.Overtaken(now_s=self._clock(), why=why)))
        self._notice_served()
        if self._to_commit:
            # Tried once; where the store fails, the next update does it.
            self._to_commit = False
            self.commit_served()

    def _notice_served(self) -> None:
        if self.stage is CycleStage.IDLE and self._served() is not self._known:
            self.plan_id, self._profile_id = None, self._served().analysis.profile.id
            self._serve_now(self._served())
            self._to_commit = True

    def stop(self) -> None:
        """Begins no further stage and gives up a plan that is being made; from any thread."""
        self._planning.stop()

    def interrupt(self) -> None:
        """The running update will not be continued."""
        if self._draft is not None:
            self.record("refresh_interrupted", {"update": self._number, "stage": str(self.stage)})
            self._interrupted, self._draft = self._draft, None

    def _begin(self, reason: str, since_s: float | None = None) -> _Draft:
        self._updates += 1
        self._draft = _Draft(
            number=self._updates,
            reason=reason,
            base=self._served(),
            began_at=_now(),
            base_plan_id=self.plan_id,
            since_s=since_s,
        )
        return self._draft

    def _carry_out(self, actions: Sequence[cycle.CycleAction]) -> None:
        """Does what the cycle asks for, until it waits for time or windows."""
        waiting = deque(actions)
        with short_switch_interval():
            self._work_off(waiting)

    def _work_off(self, waiting: deque[cycle.CycleAction]) -> None:
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
            self.refuse_closed()
        match action:
            case cycle.CollectProfile():
                self.commit_served()
                with _timed(draft.seconds, "profiling"):
                    draft.profile = self._renew(draft.base, draft.since_s)
                return cycle.Profiled(now_s=self._clock())
            case cycle.Solve():
                assert draft.profile is not None
                with _timed(draft.seconds, "solving"):
                    draft.plan = self._solve(draft.profile, draft.base.request)
                return cycle.Solved(now_s=self._clock())
            case cycle.Weigh():
                assert draft.plan is not None
                with _timed(draft.seconds, "weighing"):
                    draft.proposal = self._weigh(
                        draft.plan, draft.base, draft.reason, draft.seconds, self._config.bandwidth_share
                    )
                self._planning.end()
                self.record("refresh_proposal", {"update": draft.number, **draft.proposal.to_data()})
                return cycle.Weighed(now_s=self._clock(), comparison=draft.proposal.comparison)
            case cycle.Move():
                self._save(draft)
                with _timed(draft.seconds, "moving"):
                    self._move(draft)
                assert draft.plan is not None
                expectation = self._serve_now(draft.plan)
                return cycle.Moved(now_s=self._since_s, expectation=expectation)
            case cycle.Commit():
                draft.seconds["verifying"] = self._clock() - self._since_s
                with _timed(draft.seconds, "committing"):
                    self._commit(draft, verified=action.verified)
                return cycle.Committed(now_s=self._clock())
            case cycle.RollBack():
                with _timed(draft.seconds, "rolling_back"):
                    self._router.apply_plan(draft.base, bandwidth_share=self._config.bandwidth_share, force=True)
                self._serve_now(draft.base)
                self._take_back_commit()
                return cycle.RolledBack(now_s=self._clock())

    # The stages

    def _served(self) -> Plan:
        plan = self._router.plan
        assert plan is not None, "a plan is never taken away"
        return plan

    def _renew(self, base: Plan, since_s: float | None = None) -> Profile:
        for tier in self._router.devices:
            if tier.failure is not None:
                raise DeviceError(
                    f"device {tier.label} has failed; its lists return when the device does; a new plan does not "
                    "bring them back"
                )
        if len(self._reservoir) < self._config.min_queries:  # before a process is started in vain
            raise self._too_few(len(self._reservoir))
        planner = self._planning.start(self._router.index)
        planner.prepare()
        # Only now: after a change of the load, many new queries came while the process started.
        queries, span_s = self._recent(since_s)
        options = RenewOptions(
            n_hot=int(base.resident_lists.size),
            decay=self._config.decay,
            seed=self._config.seed,
            min_queries=self._config.min_queries,
            notes={"parent": self._profile_id, "span_s": span_s},
        )
        return planner.renew(base.analysis.profile, self._router.index.check_queries(queries), options)

    def _recent(self, since_s: float | None) -> tuple[F32, float]:
        """(n, dim) queries and the seconds that they span: those since ``since_s``, with older ones where they are too
        few; a sample of all where ``since_s`` is None, or the newest where it is too small.

        Raises:
            ProfileError: too few are known.
        """
        now_s, enough = self._clock(), self._config.min_queries
        if since_s is not None:
            lately = self._reservoir.sample_since(now_s, since_s)
            if len(lately) >= enough:
                return lately, now_s - since_s
        newest, newest_s = self._reservoir.newest(now_s, enough)
        if since_s is not None and len(newest) >= enough:
            return newest, now_s - newest_s
        queries = self._reservoir.sample(now_s)
        if len(queries) >= enough:
            return queries, self._config.retention_s
        if len(newest) < enough:
            raise self._too_few(max(len(queries), len(newest)))
        return newest, now_s - newest_s

    def _too_few(self, n_queries: int) -> ProfileError:
        return ProfileError(f"{n_queries} recent queries are known; at least {self._config.min_queries} are needed")

    def _solve(self, profile: Profile, request: PlanRequest) -> Plan:
        assert self._planning.planner is not None
        # A plan may have been applied that was made for pages of another size than the open devices have.
        request = replace(request, page_bytes=self._router.page_bytes)
        return self._planning.planner.solve(profile, request, arenas_of(self._router))

    def _weigh(
        self, plan: Plan, base: Plan, reason: str, seconds: Mapping[str, float], bandwidth_share: float
    ) -> Proposal:
        assert self._planning.planner is not None
        router = self._router
        served = Served.by(base, router.piece_device, router.page_locked_lists)
        weighed = self._planning.planner.weigh(plan, served, bandwidth_share)
        self._proposals += 1
        access = plan.analysis.profile.access
        return Proposal(
            number=self._proposals,
            reason=reason,
            created_at=_now(),
            plan=plan,
            base=base,
            # It was decided within the open arenas.
            placed=weighed.placed,
            resident=held_now(plan, served.present),
            n_queries=len(access.fit_probes) + len(access.held_probes),
            comparison=weighed.comparison,
            lists_in=weighed.lists_in,
            lists_out=weighed.lists_out,
            bandwidth_share=bandwidth_share,
            objection=cycle.objection(weighed.comparison, self._config.update),
            stage_seconds=dict(seconds),
        )

    def _save(self, draft: _Draft) -> None:
        """Stores the plan before it moves anything."""
        assert draft.plan is not None
        if self._store is not None:
            with _timed(draft.seconds, "saving"):
                # A restart must find what served before.
                self.commit_served()
                draft.base_plan_id = self.plan_id
                if draft.plan_id is not None:
                    return  # it was stored before
                parent = replace(draft.base.analysis.profile, id=self._profile_id)
                draft.plan, draft.plan_id = save_plan(self._store, draft.plan, parent=parent, trial=True)

    def _move(self, draft: _Draft) -> None:
        """Loads the plan's lists."""
        assert draft.plan is not None
        assert draft.proposal is not None
        before = sum(tier.n_failures for tier in self._router.devices)
        # Whether it may be infeasible was decided when it was proposed.
        self._router.apply_plan(draft.plan, bandwidth_share=draft.proposal.bandwidth_share, force=True)
        if sum(tier.n_failures for tier in self._router.devices) > before:
            raise DeviceError("a device failed while lists moved to it")

    def _serve_now(self, plan: Plan) -> Expectation:
        """``plan`` serves from now on: windows begin anew. Returns what it promises with the lists that came."""
        expectation = expect(plan, self._router, self._config)
        self._since_s = self._clock()
        self._on_served(expectation, self._since_s)
        self._windows.clear()
        self._known = plan
        return expectation

    def commit_served(self) -> None:
        """Makes the plan that serves the current one in the store, under its own row or one of the same decision."""
        if self._store is None or self.plan_id is not None:
            return
        saved, plan_id = keep_current(self._store, self._served(), why="it served when the refresh began")
        self.plan_id, self._profile_id = plan_id, saved.profile_id

    def commit_again(self) -> bool:
        """:meth:`commit_served` in a store that may be another one since. False: an update runs, which knows its rows
        of before."""
        if self.stage is not CycleStage.IDLE:
            return False
        self.plan_id = None
        self.commit_served()
        return True

    def _commit(self, draft: _Draft, *, verified: bool) -> None:
        if self._store is not None:
            assert draft.plan is not None
            assert draft.plan_id is not None
            # Until the store has said so, either may be the current one.
            self.plan_id = None
            make_current(self._store, draft.plan, draft.plan_id, verified=verified, why=draft.reason)
            self.plan_id, self._profile_id = draft.plan_id, draft.plan.profile_id
        draft.verified = verified

    def _take_back_commit(self) -> None:
        """After a commit that failed and may be in the store all the same: what serves again is the current plan."""
        if self._store is None or self.plan_id is not None:
            return
        try:
            self.commit_served()
        except StoreError:
            self.store_errors += 1
            _log.exception("the plan that was restored could not be made current; a later step tries again")
            self._to_commit = True

    def _end(self, ended: cycle.Ended) -> None:
        self._planning.end()
        self._update_last(ended.outcome, ended.why)
        self.outcomes[str(ended.outcome)] += 1
        assert self.last is not None
        self.record("refresh_ended", self.last.to_data())
        self._on_ended()
        self._draft = None

    def _note(self, transition: cycle.Transition) -> None:
        self._update_last(None, transition.why)
        facts = {"source": str(transition.source), "target": str(transition.target), "why": transition.why}
        self.record("refresh_stage", {"update": self._number, **facts})

    def _update_last(self, outcome: Outcome | None, why: str) -> None:
        draft = self._draft
        assert draft is not None
        self.last = UpdateRecord(
            number=draft.number,
            reason=draft.reason,
            began_at=draft.began_at,
            stage=self.stage,
            outcome=outcome,
            why=why,
            plan_id=draft.plan_id,
            base_plan_id=draft.base_plan_id,
            proposal=None if draft.proposal is None else draft.proposal.to_data(),
            verified=draft.verified,
            stage_seconds=dict(draft.seconds),
        )

    def record(self, kind: str, payload: Mapping[str, Any]) -> None:
        """Stores an event that decides nothing: a store that fails stops no update."""
        if self._store is None:
            return
        try:
            self._store.record_event(kind, {"index_fingerprint": self._router.index.fingerprint, **payload})
        except Exception:  # noqa: BLE001 - counted and logged
            self.store_errors += 1
            _log.exception("the control store did not take an event of kind %s", kind)

    def note_schedule_run(self, name: str) -> None:
        """Notes that a row of the schedule ran; from any thread."""
        assert self._store is not None
        try:
            self._store.mark_schedule_run(name)
        except Exception:  # noqa: BLE001 - counted and logged; the row runs all the same
            self.store_errors += 1
            _log.exception("the control store did not take the run of schedule %s", name)

    def check_invariants(self) -> None:
        """Asserts what must hold while no update runs."""
        self._cycle.check_invariants()
        assert (self._draft is None) == (self.stage is CycleStage.IDLE)
        assert self._planning.planner is None


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
