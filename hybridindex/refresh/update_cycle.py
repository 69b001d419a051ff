"""One update of the served plan, as a state machine: profile, solve, weigh, move, verify, then commit or roll back.

Pure: :meth:`UpdateCycle.handle` takes an event and returns actions; times come with the events. The caller
(:mod:`hybridindex.refresh.updater`) carries the actions out, and answers each that asks for work with its own event or
with :class:`Failed`.

::

    idle -> profiling -> solving -> weighing -> moving -> verifying -> committing -> idle
              |            |          |           |           |            |
              +------------+----------+-> idle    +-----------+------------+-> rolling back -> idle

Until a move begins the old plan serves untouched; after that every failure applies it again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from hybridindex.config import Setting
from hybridindex.errors import InvalidInputError
from hybridindex.plans.proposal import Comparison
from hybridindex.refresh.drift import DriftPolicy, Expectation, Tick, Window, WindowClosed, pool_windows

__all__ = [
    "Chosen",
    "CollectProfile",
    "Commit",
    "Committed",
    "CycleAction",
    "CycleEvent",
    "CycleStage",
    "Ended",
    "Failed",
    "Move",
    "Moved",
    "Outcome",
    "Profiled",
    "Requested",
    "RollBack",
    "RolledBack",
    "Solve",
    "Solved",
    "Transition",
    "UpdateCycle",
    "UpdatePolicy",
    "Weigh",
    "Weighed",
    "objection",
    "worse",
]


class CycleStage(StrEnum):
    """Stage of an update. Equal to its plain string."""

    IDLE = "idle"
    PROFILING = "profiling"
    SOLVING = "solving"
    WEIGHING = "weighing"
    MOVING = "moving"
    VERIFYING = "verifying"
    COMMITTING = "committing"
    ROLLING_BACK = "rolling_back"


class Outcome(StrEnum):
    """How an update ended. Equal to its plain string."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    #: The new plan was not worth its move.
    DECLINED = "declined"
    #: A stage before the move failed, or another plan took its place.
    FAILED = "failed"
    #: Asked for too soon after one that failed.
    BACKED_OFF = "backed_off"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePolicy:
    """What a new plan must bring, and how it is verified. Raises InvalidInputError for bad values."""

    min_hit_rate_gain: Annotated[
        float,
        Setting(help="A new plan must raise the mean hit rate by this much (absolute), or bring the gain in latency."),
    ] = 0.02
    min_latency_gain: Annotated[
        float,
        Setting(help="Fraction by which the predicted latency must fall, if the hit rate does not rise enough."),
    ] = 0.05
    min_gain_per_gib: Annotated[
        float, Setting(help="The hit rate must rise by this much per GiB moved, unless latency falls enough.")
    ] = 0.0
    max_move_s: Annotated[
        float | None,
        Setting(help="Seconds; a longer move is declined. Default: no limit; moves of unknown duration are allowed."),
    ] = None
    verify_windows: Annotated[
        int, Setting(help="Windows that decide after a move, not counting thin ones; 0: the plan is committed at once.")
    ] = 2
    verify_timeout_s: Annotated[
        float,
        Setting(
            help="Seconds after which the windows seen so far decide; a plan that saw fewer than `min_queries` of a "
            "window is committed as unverified."
        ),
    ] = 600.0
    back_off_s: Annotated[float, Setting(help="Pause in seconds after a failed update; doubled each time.")] = 60.0
    max_back_off_s: Annotated[float, Setting(help="Longest such pause.")] = 3600.0

    def __post_init__(self) -> None:
        for name in ("min_hit_rate_gain", "min_latency_gain", "min_gain_per_gib", "verify_windows", "back_off_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidInputError(f"{name} is {getattr(self, name)}; expected 0 or more")
        if not self.verify_timeout_s > 0:
            raise InvalidInputError(f"verify_timeout_s is {self.verify_timeout_s}; expected a positive number")
        if self.max_move_s is not None and not self.max_move_s > 0:
            raise InvalidInputError(f"max_move_s is {self.max_move_s}; expected a positive number, or None")
        if not self.max_back_off_s >= self.back_off_s:
            raise InvalidInputError(
                f"max_back_off_s is {self.max_back_off_s}; expected at least back_off_s, {self.back_off_s}"
            )


def objection(comparison: Comparison, policy: UpdatePolicy) -> str:
    """Why a move is not worth it; empty where it is."""
    new = comparison
    if new.loses_feasibility:
        return "the new plan cannot meet the SLO, the one in force does: only a person applies it, with force"
    if new.bytes_to_move == 0:
        return "nothing has to move: the devices hold what the new plan wants"
    faster = new.latency_gain >= policy.min_latency_gain
    if not faster and new.hit_rate_gain < policy.min_hit_rate_gain:
        return (
            f"the hit rate would go from {new.hit_rate_before:.3f} to {new.hit_rate_after:.3f} and latency from "
            f"{new.latency_ms_before:.3g} to {new.latency_ms_after:.3g} ms: less than the gain asked for"
        )
    gib = new.bytes_to_move / 2**30
    if not faster and new.hit_rate_gain < policy.min_gain_per_gib * gib:
        return f"a hit rate higher by {new.hit_rate_gain:.3f} is not worth {gib:.3g} GiB"
    if policy.max_move_s is not None and new.move_s is not None and new.move_s > policy.max_move_s:
        return f"the move would take {new.move_s:.3g} s, more than {policy.max_move_s:.3g} s"
    return ""


# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """The drift monitor or the schedule wants an update. Ignored while one is running."""

    now_s: float
    reason: str
    #: Windows of the plan before, to compare with.
    before: tuple[Window, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A person chose a plan that is made already: objections and back-off do not hold it. The cycle must be idle."""

    now_s: float
    reason: str
    before: tuple[Window, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    now_s: float
    comparison: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The new plan serves."""

    now_s: float
    expectation: Expectation


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """The old plan serves again."""

    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The work of the current stage failed."""

    now_s: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overtaken:
    """A plan serves that is neither the new one nor the old one: there is nothing to verify or to roll back."""

    now_s: float
    why: str


CycleEvent = (
    Requested
    | Chosen
    | Profiled
    | Solved
    | Weighed
    | Moved
    | Committed
    | RolledBack
    | Failed
    | Overtaken
    | WindowClosed
    | Tick
)

# Actions


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectProfile:
    """Count accesses of recent queries; answered by Profiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solve:
    """Make the plan; answered by Solved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weigh:
    """Compare the plans; answered by Weighed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Save the new plan and apply it; answered by Moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Record the new plan as the current one; answered by Committed."""

    #: False: too few requests were seen.
    verified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack:
    """Apply the old plan again; answered by RolledBack."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """To be recorded."""

    now_s: float
    source: CycleStage
    target: CycleStage
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The update is over."""

    now_s: float
    outcome: Outcome
    why: str


CycleAction = CollectProfile | Solve | Weigh | Move | Commit | RollBack | Transition | Ended


def worse(before: Window | None, after: Window, promised: Expectation, policy: DriftPolicy) -> str:
    """Why ``after`` is worse than ``before``; empty where it is not.

    A plan passes if it keeps its promise or is as good as the one before: one that was asked to hold less may hit less.
    Margins are ``policy.z`` standard errors of the difference of two means.
    """
    low, _ = promised.hit_rate.interval(after.queries, policy)
    if after.hit_rate < low:
        if before is None:
            return f"hit rate {after.hit_rate:.3f}, promised at least {low:.3f}"
        both = policy.design_effect * (
            before.hit_rate_variance / before.queries + after.hit_rate_variance / after.queries
        )
        if after.hit_rate < before.hit_rate - policy.z * math.sqrt(both) - policy.tolerance:
            return f"hit rate {after.hit_rate:.3f}, before {before.hit_rate:.3f}, promised at least {low:.3f}"
    if after.attainment < promised.attainment and before is not None:
        pooled = (before.within_slo + after.within_slo) / (before.requests + after.requests)
        scatter = policy.design_effect * pooled * (1 - pooled) * (1 / before.requests + 1 / after.requests)
        if after.attainment < before.attainment - policy.z * math.sqrt(scatter) - policy.tolerance:
            return f"attainment {after.attainment:.3f}, before {before.attainment:.3f}"
    return ""


class UpdateCycle:
    """State of at most one update. Has no lock; the owner calls under its own."""

    def __init__(self, policy: UpdatePolicy, drift: DriftPolicy) -> None:
        """``drift`` gives the margins of verification."""
        self._policy = policy
        self._drift = drift
        self._stage = CycleStage.IDLE
        self._before: Window | None = None
        self._after: tuple[Window, ...] = ()
        self._promised: Expectation | None = None
        self._moved_s = 0.0
        #: Failed or rolled back updates in a row.
        self._failures = 0
        #: Failed attempts to roll the current update back.
        self._stuck = 0
        self._retry_s: float | None = None
        self._not_before_s = -math.inf
        self._why = ""

    @property
    def stage(self) -> CycleStage:
        return self._stage

    @property
    def not_before_s(self) -> float:
        """No update is begun on request before this time."""
        return self._not_before_s

    @property
    def n_verified(self) -> int:
        """Windows seen since the move."""
        return len(self._after)

    def handle(self, event: CycleEvent) -> list[CycleAction]:
        """Actions that follow ``event``. An answer that does not belong to the stage is a bug of the caller."""
        match event:
            case Requested():
                return self._requested(event)
            case Chosen():
                assert self._stage is CycleStage.IDLE, f"a plan was chosen while {self._stage}"
                self._start(event)
                return [self._go(event.now_s, CycleStage.MOVING, event.reason), Move()]
            case Profiled():
                return self._next(event.now_s, CycleStage.PROFILING, CycleStage.SOLVING, Solve())
            case Solved():
                return self._next(event.now_s, CycleStage.SOLVING, CycleStage.WEIGHING, Weigh())
            case Weighed():
                return self._weighed(event)
            case Moved():
                return self._moved(event)
            case WindowClosed():
                return self._seen(event.window)
            case Committed():
                self._expect(CycleStage.COMMITTING)
                self._failures = 0
                return self._end(event.now_s, Outcome.COMMITTED, self._why)
            case RolledBack():
                self._expect(CycleStage.ROLLING_BACK)
                self._back_off(event.now_s)
                return self._end(event.now_s, Outcome.ROLLED_BACK, self._why)
            case Failed():
                return self._failed(event)
            case Overtaken():
                assert self._stage is not CycleStage.IDLE, "nothing was going on that could be overtaken"
                self._retry_s = None
                return self._end(event.now_s, Outcome.FAILED, event.why)
            case Tick():
                return self._tick(event.now_s)

    def _requested(self, event: Requested) -> list[CycleAction]:
        if self._stage is not CycleStage.IDLE:
            return []
        if event.now_s < self._not_before_s:
            left = self._not_before_s - event.now_s
            why = f"the update before failed; the next may begin in {left:.3g} s"
            return [Ended(now_s=event.now_s, outcome=Outcome.BACKED_OFF, why=why)]
        self._start(event)
        return [self._go(event.now_s, CycleStage.PROFILING, event.reason), CollectProfile()]

    def _start(self, event: Requested | Chosen) -> None:
        self._before = pool_windows(event.before)
        self._after = ()
        self._promised = None
        self._stuck = 0
        self._retry_s = None
        self._why = event.reason

    def _weighed(self, event: Weighed) -> list[CycleAction]:
        self._expect(CycleStage.WEIGHING)
        if why := objection(event.comparison, self._policy):
            return self._end(event.now_s, Outcome.DECLINED, why)
        return [self._go(event.now_s, CycleStage.MOVING, "worth its move"), Move()]

    def _moved(self, event: Moved) -> list[CycleAction]:
        self._expect(CycleStage.MOVING)
        self._promised = event.expectation
        self._moved_s = event.now_s
        actions: list[CycleAction] = [self._go(event.now_s, CycleStage.VERIFYING, "the new plan serves")]
        return actions + (self._judge(event.now_s) if self._policy.verify_windows == 0 else [])

    def _seen(self, window: Window) -> list[CycleAction]:
        # A window that began earlier was served by both plans.
        if self._stage is not CycleStage.VERIFYING or window.began_s < self._moved_s:
            return []
        self._after = (*self._after, window)
        enough = sum(not w.thin for w in self._after) >= self._policy.verify_windows
        return self._judge(window.ended_s) if enough else []

    def _judge(self, now_s: float) -> list[CycleAction]:
        after = pool_windows(self._after)
        assert self._promised is not None
        few = after is None or after.queries < self._drift.min_queries
        if after is None:
            self._why = "no request was seen: not verified"
        elif few:
            self._why = f"{after.queries} queries were seen, fewer than {self._drift.min_queries}: not verified"
        else:
            if why := worse(self._before, after, self._promised, self._drift):
                return self._roll_back(now_s, why)
            self._why = f"hit rate {after.hit_rate:.3f}, attainment {after.attainment:.3f}"
        commit = Commit(verified=not few)
        return [self._go(now_s, CycleStage.COMMITTING, self._why), commit]

    def _tick(self, now_s: float) -> list[CycleAction]:
        if self._stage is CycleStage.VERIFYING and now_s >= self._moved_s + self._policy.verify_timeout_s:
            return self._judge(now_s)
        if self._retry_s is not None and now_s >= self._retry_s:
            self._retry_s = None
            return [RollBack(why=self._why)]
        return []

    def _failed(self, event: Failed) -> list[CycleAction]:
        assert self._stage is not CycleStage.IDLE, f"nothing was going on that could fail: {event.why}"
        if self._stage is CycleStage.ROLLING_BACK:
            # Answers do not depend on where lists are: the new plan serves until the old one can be applied.
            self._stuck += 1
            self._retry_s = event.now_s + self._pause_s(self._stuck)
            why = f"not rolled back: {event.why}"
            return [self._go(event.now_s, CycleStage.ROLLING_BACK, why)]
        if self._stage in (CycleStage.MOVING, CycleStage.VERIFYING, CycleStage.COMMITTING):
            return self._roll_back(event.now_s, f"{self._stage} failed: {event.why}")
        self._back_off(event.now_s)
        return self._end(event.now_s, Outcome.FAILED, f"{self._stage} failed: {event.why}")

    def _roll_back(self, now_s: float, why: str) -> list[CycleAction]:
        self._why = why
        return [self._go(now_s, CycleStage.ROLLING_BACK, why), RollBack(why=why)]

    def _pause_s(self, failures: int) -> float:
        return min(self._policy.back_off_s * 2.0 ** min(failures - 1, 60), self._policy.max_back_off_s)

    def _back_off(self, now_s: float) -> None:
        self._failures += 1
        self._not_before_s = now_s + self._pause_s(self._failures)

    def _next(self, now_s: float, source: CycleStage, target: CycleStage, action: CycleAction) -> list[CycleAction]:
        self._expect(source)
        return [self._go(now_s, target, ""), action]

    def _end(self, now_s: float, outcome: Outcome, why: str) -> list[CycleAction]:
        ended = Ended(now_s=now_s, outcome=outcome, why=why)
        return [self._go(now_s, CycleStage.IDLE, why), ended]

    def _go(self, now_s: float, target: CycleStage, why: str) -> Transition:
        transition = Transition(now_s=now_s, source=self._stage, target=target, why=why)
        self._stage = target
        return transition

    def _expect(self, stage: CycleStage) -> None:
        assert self._stage is stage, f"an answer for {stage} came while {self._stage}"

    def check_invariants(self) -> None:
        """Asserts what must hold between two events."""
        serving_new = self._stage in (CycleStage.VERIFYING, CycleStage.COMMITTING)
        assert not serving_new or self._promised is not None
        assert self._retry_s is None or self._stage is CycleStage.ROLLING_BACK
        assert self._stage is not CycleStage.VERIFYING or all(w.began_s >= self._moved_s for w in self._after)
        assert self._failures >= 0
        assert self._failures == 0 or self._not_before_s > -math.inf
