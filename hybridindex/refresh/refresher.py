"""Keeps the served plan up to date: watches the load, makes a new plan in the background, applies and verifies it.

Threads and clock are here. :mod:`hybridindex.refresh.drift` decides when, :mod:`hybridindex.refresh.update_cycle` in
which order, and :mod:`hybridindex.plans.replan` what is asked for; :mod:`hybridindex.refresh.updater` does the stages.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError, MissingDependencyError, ProfileError, how_to_install
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.inherit import share_newer
from hybridindex.plans.precision import view_of
from hybridindex.plans.proposal import Proposal
from hybridindex.plans.replan import PlanChanges
from hybridindex.processes import OfOneProcess
from hybridindex.refresh import drift
from hybridindex.refresh.config import RefreshConfig, RefreshStatus, UpdateRecord, window_data
from hybridindex.refresh.drift import DriftMonitor, Expectation, Window
from hybridindex.refresh.reservoir import QueryReservoir
from hybridindex.refresh.timetable import timetable_of
from hybridindex.refresh.update_cycle import CycleStage, Outcome
from hybridindex.refresh.updater import PlanUpdates, ServedIndex, expect
from hybridindex.router.router import Router
from hybridindex.tiers.contract.copy_queue import check_share
from hybridindex.types import F32

if TYPE_CHECKING:
    from apscheduler.schedulers.background import BackgroundScheduler

    from hybridindex.store.control import ControlStore

__all__ = ["PlanChanges", "Proposal", "RefreshConfig", "RefreshStatus", "Refresher", "UpdateRecord"]

_log = logging.getLogger(__name__)

#: Closed windows that the status shows.
_SHOWN_WINDOWS = 20


class Refresher(OfOneProcess):
    """Watches one router and changes its plan. Close it before the router.

    Threads: :meth:`observe` and :meth:`status` may be called from any thread and never wait for an update.
    :meth:`propose`, :meth:`apply` and :meth:`step` exclude each other. :meth:`start` makes a thread that looks at the
    load, a scheduler thread and two workers; :meth:`close` joins them.
    """

    def __init__(
        self,
        index: ServedIndex,
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
            store: records plans and events; the caller closes it afterwards. None: nothing is recorded.
            clock: monotonic seconds.

        Raises:
            InvalidInputError: the router has no plan or no device, or serves another index.
        """
        if router.plan is None or not router.devices:
            raise InvalidInputError("router has no plan or no devices; expected one that has lists to move")
        if view_of(index.ivf, router.plan.index_fingerprint) is None:
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
        self._monitor = DriftMonitor(expect(router.plan, router, self._config), self._config.drift, now_s=clock())
        self._observed: SimpleQueue[drift.DriftAction] = SimpleQueue()
        self._requests = self._observe_errors = self._triggers = 0
        self._windows: deque[Window] = deque(maxlen=_SHOWN_WINDOWS)
        #: Held during an update, a proposal or a step.
        self._work = threading.Lock()
        self._updates = PlanUpdates(
            router,
            store,
            self._config,
            self._reservoir,
            clock=clock,
            on_served=self._expect_from_now,
            on_ended=self._update_ended,
        )
        #: Why an update was asked for while no update ran and other work was under way: for the next step.
        self._postponed: str | None = None
        #: The plan whose rows were too new.
        self._asked_for: Plan | None = None
        self._scheduler: BackgroundScheduler | None = None
        self._looking: threading.Thread | None = None
        #: Stored rows that are followed, and why others are not.
        self._schedule: tuple[str, ...] = ()
        self._schedule_refused: tuple[str, ...] = ()

    # What callers do

    def observe(self, queries: F32, latency_s: float, hit_rate: npt.ArrayLike) -> None:
        """Takes note of one served request. Never raises and never waits; requests it cannot use are counted.

        Args:
            queries: (n, dim) or (dim,) float32, as the user gave them.
            latency_s: from arrival to answer.
            hit_rate: (n,) by bytes, of :class:`hybridindex.types.SearchResult`.
        """
        if self._updates.closed.is_set():
            return
        try:
            rates = np.atleast_1d(np.asarray(hit_rate, dtype=np.float64))
            total, squares = float(rates.sum()), float(rates @ rates)
            if not (rates.size and math.isfinite(total) and math.isfinite(latency_s)):
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
        except Exception:  # noqa: BLE001 - the request was served; this must not fail it
            with self._lock:
                self._observe_errors += 1
                first = self._observe_errors == 1
            if first:
                _log.exception("a request could not be observed; later ones are only counted")

    def offer(self, queries: F32) -> int:
        """Takes ``queries`` (n, dim) float32, finite, that were asked elsewhere or earlier, as if they came now.

        Plans are made from them too; windows of the load do not count them. Returns how many recent queries are kept.

        Raises:
            ProfileError: queries are not kept (``reservoir_queries`` is 0).
            RouterClosedError: after :meth:`close`.
        """
        self._updates.refuse_closed()
        if not self._reservoir.capacity:
            raise ProfileError("reservoir_queries is 0: queries are not kept, and no plan is made from any")
        self._reservoir.offer(queries, self._clock())
        return len(self._reservoir)

    def propose(
        self,
        reason: str = "asked for",
        changes: PlanChanges = PlanChanges(),  # noqa: B008 - a frozen value
        *,
        bandwidth_share: float | None = None,
    ) -> Proposal:
        """Makes a plan from recent queries and says what it would bring. Does not apply it.

        Args:
            reason: why, for the records.
            changes: other values than those of the served plan; see :mod:`hybridindex.plans.replan`.
            bandwidth_share: part of the time that its move may copy; None: as configured.

        Raises:
            InvalidInputError: a change or the share is out of its range, or contradicts a fixed coverage.
            ProfileError: too few recent queries are known.
            DeviceError: a device has failed.
            RouterClosedError: after :meth:`close`.
        """
        share = self._config.bandwidth_share if bandwidth_share is None else bandwidth_share
        check_share(share)
        with self._work:
            return self._updates.propose(reason, changes, share)

    def apply(self, proposal: Proposal, *, plan_id: int | None = None, force: bool = False) -> UpdateRecord:
        """Applies a proposal, also one with an objection, and returns when its lists have moved.

        The update is then ``verifying``: the next windows commit it or roll it back; see :meth:`status`. A move that
        fails is rolled back, and the record says so.

        Args:
            plan_id: of its plan, where the store has it already.
            force: also where the plan is infeasible.

        Raises:
            InfeasiblePlanError: it is infeasible, and ``force`` is false.
            RefreshError: another update is running, or the plan in force is not the one that was proposed against.
            RouterClosedError: after :meth:`close`.
        """
        with self._work:
            return self._updates.choose(proposal, plan_id, force=force)

    def status(self) -> RefreshStatus:
        """A reading of everything; cheap."""
        now_s = self._clock()
        with self._lock:
            expectation = self._monitor.expectation
            return RefreshStatus(
                drift_state=self._monitor.state,
                stage=self._updates.stage,
                running=self._scheduler is not None and not self._updates.closed.is_set(),
                plan_id=self._updates.plan_id,
                predicted_hit_rate=expectation.hit_rate.mean,
                attainment_target=expectation.attainment,
                slo_ms=expectation.slo_s * 1e3,
                requests=self._requests,
                queries_kept=len(self._reservoir),
                observe_errors=self._observe_errors,
                store_errors=self._updates.store_errors,
                updates=dict(self._updates.outcomes),
                triggers=self._triggers,
                back_off_s=max(0.0, self._updates.not_before_s - now_s),
                windows=tuple(self._windows),
                last_update=self._updates.last,
                schedule=self._schedule,
                schedule_refused=self._schedule_refused,
            )

    def settled(self) -> tuple[Plan, int | None]:
        """The plan that is not on trial, and its id in the store: what another router is to begin with. Also after
        :meth:`close`.
        """
        return self._updates.settled()

    # Life

    def start(self) -> None:
        """Makes the served plan the current one in the store, unless it is already, and starts the schedule: the tick
        and the rows of the store. A row that is damaged or makes no sense is logged, shown in the status and left out.

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
                f"a schedule needs APScheduler: {how_to_install('refresh')}", name="apscheduler"
            ) from error
        with self._work:
            self._updates.refuse_closed()
            if self._scheduler is not None:
                return
            self._updates.commit_served()
            # Of the rows alone, whose times are those of the wall clock. Two workers: while one carries out an update,
            # the other finds it busy and returns.
            scheduler = BackgroundScheduler(
                timezone=UTC,
                executors={"default": ThreadPoolExecutor(2)},
                job_defaults={"coalesce": True, "misfire_grace_time": None, "max_instances": 2},
            )
            self._add_schedule(scheduler)
            scheduler.start()
            self._scheduler = scheduler
            self._looking = threading.Thread(target=self._look, name="hybridindex-refresh", daemon=True)
            self._looking.start()

    def _look(self) -> None:
        """Steps every ``tick_s`` seconds, and asks for an update every ``interval_s``.

        By the monotonic clock: after the wall clock is set back, APScheduler does nothing until its old time comes
        again.
        """
        interval_s = self._config.interval_s or math.inf
        due_s = time.monotonic() + interval_s
        while not self._updates.closed.wait(min(self._config.tick_s, max(0.0, due_s - time.monotonic()))):
            if time.monotonic() < due_s:
                self.step()
            else:
                self.step("the schedule")
                due_s = time.monotonic() + interval_s

    def _add_schedule(self, scheduler: BackgroundScheduler) -> None:
        if self._store is None:
            return
        now, followed = datetime.now(UTC), []
        entries, damaged = self._store.read_schedule()
        for error in damaged.values():
            _log.error("a schedule is ignored: %s", error)
        # Clients read these: without paths.
        refused = [f"schedule {name!r}: its row is damaged; remove it and set it again" for name in damaged]
        for entry in entries:
            if not entry.enabled:
                continue
            try:
                row = timetable_of(entry, now)
            except InvalidInputError as error:
                refused.append(str(error))
                _log.error("a schedule is ignored: %s", error)
                continue
            first = {} if row.first is None else {"next_run_time": row.first}
            scheduler.add_job(
                self._follow_schedule, row.trigger, id=f"schedule {entry.name}", args=(entry.name,), **first
            )
            followed.append(entry.name)
        self._schedule, self._schedule_refused = tuple(followed), tuple(refused)

    def _follow_schedule(self, name: str) -> None:
        self._updates.note_schedule_run(name)
        self.step(f"schedule {name}")

    def keep_plan(self) -> bool:
        """The store was opened, and may be another one: makes the plan that serves its current one, and starts the
        schedule where that could not be read before. False: an update runs; ask again when it has ended.

        Raises:
            StoreError: the store does not take the plan.
        """
        if self._scheduler is None:
            self.start()
        if not self._work.acquire(blocking=False):
            return False
        try:
            return self._updates.commit_again()
        finally:
            self._work.release()

    def stop(self) -> None:
        """Begins no further stage and gives up a plan that is being made. Returns at once; from any thread. Call
        :meth:`close` afterwards."""
        self._updates.stop()

    def close(self) -> None:
        """Joins what was started. A plan that is being made is given up; a move is finished first, unless the router is
        told to settle. A plan that was not committed keeps serving, and a restart resumes the one before. Closing twice
        is harmless.
        """
        self.stop()
        with self._work:
            scheduler, self._scheduler = self._scheduler, None
            looking, self._looking = self._looking, None
        if scheduler is not None:
            scheduler.shutdown(wait=True)
        if looking is not None:
            looking.join()
        with self._work:
            self._updates.interrupt()
            self._reservoir.clear()

    def __enter__(self) -> Refresher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Steps

    def step(self, reason: str | None = None) -> None:
        """Does what is due now, on the calling thread; the schedule calls it. Returns at once while another call works.

        ``reason``: also begins an update, unless one is running or the last one failed a short while ago. Where another
        call works on something else, a proposal for one, the next step begins it.
        """
        if not self._work.acquire(blocking=False):
            if reason is not None and self._updates.stage is CycleStage.IDLE:
                self._postponed = reason
            return
        try:
            reason, self._postponed = reason or self._postponed, None
            if not self._updates.closed.is_set():
                self._step(reason)
        except Exception:  # noqa: BLE001 - the next step must come; failures of an update are handled where they occur
            _log.exception("a step of the refresh failed")
        finally:
            self._work.release()

    def _step(self, reason: str | None) -> None:
        self._updates.follow_router()
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
                    with self._lock:
                        self._windows.append(action.window)
                    self._updates.see(action)
                case drift.Trigger():
                    self._follow(action)
        self._updates.tick()
        if reason is not None:
            self._updates.request(reason)
        elif (outgrown := self._outgrown()) is not None:
            plan = self._router.plan
            self._updates.request(outgrown)
            last = self._updates.last
            if last is None or last.outcome is not Outcome.FAILED:  # else once more, when the pause is over
                self._asked_for = plan

    def _outgrown(self) -> str | None:
        """Why an update should begin, and can, although the load has not changed: rows have. Once for each plan."""
        plan, updates = self._router.plan, self._updates
        if plan is None or plan is self._asked_for or len(self._reservoir) < self._config.min_queries:
            return None
        if updates.stage is not CycleStage.IDLE or self._clock() < updates.not_before_s:
            return None
        share = share_newer(plan.analysis.profile)
        if share <= self._config.max_newer:
            return None
        return f"{share:.0%} of the rows came since the plan's lists were measured"

    def _follow(self, trigger: drift.Trigger) -> None:
        with self._lock:
            self._triggers += 1
            waiting = self._monitor.state is drift.DriftState.DRIFTING
        if waiting:  # else an update ended since
            windows = [window_data(w) for w in trigger.windows]
            self._updates.record("refresh_trigger", {"reason": trigger.reason, "windows": windows})
            self._updates.request(trigger.reason, trigger.windows, since_s=trigger.windows[0].began_s)

    def _expect_from_now(self, expectation: Expectation, now_s: float) -> None:
        with self._lock:
            self._monitor.handle(drift.UpdateEnded(now_s=now_s, expectation=expectation))

    def _update_ended(self) -> None:
        with self._lock:
            # The plan did not change: a trigger may come again after the cool-down.
            if self._monitor.state is drift.DriftState.DRIFTING:
                self._monitor.handle(drift.UpdateEnded(now_s=self._clock()))

    def check_invariants(self) -> None:
        """Asserts what must hold while no update runs."""
        with self._lock:
            self._monitor.check_invariants()
        self._updates.check_invariants()
        self._reservoir.check_invariants()
