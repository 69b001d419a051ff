"""Drift and refresh in virtual time: the hot set moves, the monitor triggers, a new plan is made, moved and verified.

The drift monitor and the update cycle of :mod:`hybridindex.refresh` decide; their actions take the given seconds. The
hot set moves once. A plan is made from the exact profile of the load at that moment; a refresher has a noisy sample.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.models.coverage import build_coverage_curve
from hybridindex.partitioner.plan import Plan
from hybridindex.plans import proposal
from hybridindex.refresh import update_cycle as cycle
from hybridindex.refresh.drift import (
    DriftMonitor,
    DriftPolicy,
    DriftState,
    Expectation,
    Served,
    Tick,
    Trigger,
    UpdateEnded,
    WindowClosed,
    predict_hit_rate,
)
from hybridindex.studies.simulator.arrivals import check_number
from hybridindex.studies.simulator.policies import Inputs
from hybridindex.studies.simulator.query_pool import QueryPool, move_hot_set, query_pool
from hybridindex.studies.simulator.stage_table import StageTable, stage_table

__all__ = ["DriftRules", "MovingLoad"]

I16 = npt.NDArray[np.int16]
#: Steps in which a move becomes visible: lists are published while the others are still copied.
_MOVE_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftRules:
    """When the hot set moves, and how long an update takes. Raises InvalidInputError, which names the field."""

    at_s: float
    #: Positions down the hot order that it moves, as a part of all lists.
    shift: float = 0.5
    #: False: the plan stays.
    refresh: bool = True
    profile_s: float = 1.0
    solve_s: float = 1.0
    #: Copy bandwidth of all devices together.
    bytes_per_s: float = 1e9
    drift: DriftPolicy = field(default_factory=DriftPolicy)
    update: cycle.UpdatePolicy = field(default_factory=cycle.UpdatePolicy)

    def __post_init__(self) -> None:
        check_number("at_s", self.at_s, least=0.0)
        check_number("profile_s", self.profile_s, least=0.0)
        check_number("solve_s", self.solve_s, least=0.0)
        check_number("bytes_per_s", self.bytes_per_s, above=0.0)
        if not 0 <= self.shift <= 1:
            raise InvalidInputError(f"shift is {self.shift}; give a part of the hot order in [0, 1]")

    def assumptions(self) -> tuple[str, ...]:
        """Assumptions on the load and on an update, in words."""
        return (
            f"assumed: every access moves {self.shift:g} of all lists down the hot order at {self.at_s:g} s",
            f"assumed: an update profiles {self.profile_s:g} s, solves {self.solve_s:g} s and moves "
            f"{self.bytes_per_s / 1e9:g} GB/s",
        )


class MovingLoad:
    """Watches one run: which queries come, what is resident, and what the refresher does. Not thread-safe."""

    def __init__(self, inputs: Inputs, rules: DriftRules) -> None:
        self._inputs, self._rules = inputs, rules
        before = inputs.analysis
        moved = move_hot_set(before.profile, rules.shift)
        after = replace(before, profile=moved, curve=build_coverage_curve(moved, page_bytes=self._page_bytes()))
        self._analyses = (before, after)
        self._pools: tuple[QueryPool, ...] = tuple(query_pool(a.curve, a.profile.dim) for a in self._analyses)
        self._plan = inputs.plan or self._planned(0)
        self._next: Plan | None = None
        self._list_device: I16 = self._plan.list_device
        #: Counts changes of residency.
        self._epoch = 0
        self._tables: dict[tuple[int, int], StageTable] = {}
        self._monitor = DriftMonitor(self._expectation(self._plan, 0), rules.drift, now_s=0.0)
        self._cycle = cycle.UpdateCycle(rules.update, rules.drift)
        #: (time, order, event of the cycle or step of a move).
        self._due: list[tuple[float, int, cycle.CycleEvent | I16]] = []
        self._numbers = itertools.count()
        self._now = 0.0
        #: (time, what) of triggers, transitions and ends.
        self.history: list[tuple[float, str]] = []

    def _page_bytes(self) -> int:
        return self._inputs.analysis.curve.geometry.page_bytes

    # The Watch protocol

    def table_at(self, now_s: float) -> StageTable:
        self._advance(now_s)
        key = (self._phase(now_s), self._epoch)
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) > 4:
                self._tables.clear()
            found = self._tables[key] = stage_table(
                self._pools[key[0]],
                self._inputs.analysis.latency,
                self._list_device,
                self._inputs.n_devices,
                resident_bytes=0,
            )
        return found

    def answered(self, now_s: float, latency_s: float, hit_rate: float) -> None:
        # Answers come in the order of their batches, of which two may overlap; the monitor's time never goes back.
        self._now = max(self._now, now_s)
        self._monitored(
            Served(
                now_s=self._now,
                latency_s=latency_s,
                queries=1,
                hit_rate_sum=hit_rate,
                hit_rate_squares=hit_rate * hit_rate,
            )
        )

    # The refresher

    def _phase(self, now_s: float) -> int:
        return int(now_s >= self._rules.at_s)

    def _advance(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            at, _, what = heapq.heappop(self._due)
            self._now = max(self._now, at)
            if isinstance(what, np.ndarray):
                self._list_device, self._epoch = what, self._epoch + 1
                continue
            if isinstance(what, cycle.Moved | cycle.RolledBack):
                self._serve(what)
            self._follow(self._cycle.handle(what))
        self._now = max(self._now, now_s)
        self._monitored(Tick(now_s=self._now))
        self._follow(self._cycle.handle(Tick(now_s=self._now)))

    def _monitored(self, event: Served | Tick) -> None:
        for action in self._monitor.handle(event):
            match action:
                case WindowClosed():
                    self._follow(self._cycle.handle(action))
                case Trigger():
                    self.history.append((action.now_s, action.reason))
                    if self._rules.refresh:
                        asked = cycle.Requested(now_s=action.now_s, reason="drift", before=action.windows)
                        self._follow(self._cycle.handle(asked))

    def _later(self, seconds: float, what: cycle.CycleEvent | I16) -> None:
        heapq.heappush(self._due, (self._now + seconds, next(self._numbers), what))

    def _follow(self, actions: list[cycle.CycleAction]) -> None:
        rules = self._rules
        for action in actions:
            match action:
                case cycle.CollectProfile():
                    self._later(rules.profile_s, cycle.Profiled(now_s=self._now + rules.profile_s))
                case cycle.Solve():
                    self._next = self._planned(self._phase(self._now))
                    self._later(rules.solve_s, cycle.Solved(now_s=self._now + rules.solve_s))
                case cycle.Weigh():
                    self._later(0.0, cycle.Weighed(now_s=self._now, comparison=self._comparison()))
                case cycle.Move():
                    assert self._next is not None
                    expectation = self._expectation(self._next, self._phase(self._now))
                    took = self._move(self._next.list_device)
                    self._later(took, cycle.Moved(now_s=self._now + took, expectation=expectation))
                case cycle.Commit():
                    self._later(0.0, cycle.Committed(now_s=self._now))
                case cycle.RollBack():
                    took = self._move(self._plan.list_device)
                    self._later(took, cycle.RolledBack(now_s=self._now + took))
                case cycle.Transition():
                    self.history.append((action.now_s, f"{action.source} -> {action.target}: {action.why}"))
                case cycle.Ended():
                    self._end(action)

    def _serve(self, event: cycle.Moved | cycle.RolledBack) -> None:
        """Another plan serves from now on: the monitor expects what it predicts."""
        if isinstance(event, cycle.Moved):
            expectation = event.expectation
        else:
            expectation = self._expectation(self._plan, self._phase(self._now))
        self._monitor.handle(UpdateEnded(now_s=self._now, expectation=expectation))

    def _end(self, ended: cycle.Ended) -> None:
        if ended.outcome is cycle.Outcome.COMMITTED:
            assert self._next is not None
            self._plan = self._next
        if self._monitor.state is DriftState.DRIFTING:
            self._monitor.handle(UpdateEnded(now_s=self._now))
        self.history.append((ended.now_s, f"{ended.outcome}: {ended.why}"))

    def _move(self, target: I16) -> float:
        """Schedules the steps of a move: unwanted lists leave, missing ones come, hottest first; its seconds."""
        curve = self._analyses[self._phase(self._now)].curve
        here = np.where(self._list_device == target, self._list_device, np.int16(-1))
        coming = curve.order[(target != here)[curve.order]]
        nbytes = np.cumsum(curve.pages_by_rank[curve.rank[coming]]) * self._page_bytes()
        took = float(nbytes[-1]) / self._rules.bytes_per_s if coming.size else 0.0
        self._later(0.0, here)
        for step in range(1, _MOVE_STEPS + 1):
            arrived = here.copy()
            come = coming[: np.searchsorted(nbytes, took * step / _MOVE_STEPS * self._rules.bytes_per_s, side="right")]
            arrived[come] = target[come]
            self._later(took * step / _MOVE_STEPS, target if step == _MOVE_STEPS else arrived)
        return took

    def _planned(self, phase: int) -> Plan:
        given = self._inputs
        return given.make_plan(self._analyses[phase], None if given.plan is None else given.plan.coverage)

    def _expectation(self, plan: Plan, phase: int) -> Expectation:
        return Expectation(
            slo_s=self._inputs.slo_s,
            attainment=self._inputs.percentile / 100,
            hit_rate=predict_hit_rate(self._analyses[phase].curve, plan.resident_lists),
        )

    def _comparison(self) -> proposal.Comparison:
        assert self._next is not None
        here = self._list_device
        base = proposal.Served(resident_lists=np.flatnonzero(here >= 0), list_device=here, present=here)
        found, _, _ = proposal.compare_plans(self._next, base, bandwidth_share=1.0)
        return replace(found, move_s=found.bytes_to_move / self._rules.bytes_per_s)

    def check_invariants(self) -> None:
        """Asserts what must hold between two batches."""
        self._monitor.check_invariants()
        self._cycle.check_invariants()
