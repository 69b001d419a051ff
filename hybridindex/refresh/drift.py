"""Detects that a plan no longer fits the load, from windows of requests and the hit rate that the plan promised.

Pure: times are arguments; no clock, thread or I/O. :mod:`hybridindex.refresh.update_cycle` does what follows a trigger.
VectorLiteRAG, "Adaptive Runtime Index Update".

**The interval.** A plan predicts the mean hit rate by bytes from n_held held-back queries, with mean m and variance
s² across queries. A window of n queries of the same load has a mean of variance D·s²/n around the true one, and m one
of s²/n_held; so their difference stays within z·s·sqrt(D/n + 1/n_held). D, the design effect, says how many queries of
a conversation count as one independent query. A tolerance is added for changes that no sample of one time shows.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import numpy as np

from hybridindex.config import Setting
from hybridindex.errors import InvalidInputError
from hybridindex.types import F64, I64

if TYPE_CHECKING:
    from hybridindex.partitioner.models.coverage import CoverageCurve

__all__ = [
    "DriftAction",
    "DriftEvent",
    "DriftMonitor",
    "DriftPolicy",
    "DriftState",
    "Expectation",
    "HitRatePrediction",
    "Served",
    "Tick",
    "Trigger",
    "UpdateEnded",
    "Window",
    "WindowClosed",
    "pool_windows",
    "predict_hit_rate",
]


class DriftState(StrEnum):
    """State of the monitor. Equal to its plain string."""

    #: No recent window was off.
    STABLE = "stable"
    #: Some were, too few to act.
    SUSPECT = "suspect"
    #: An update was asked for and has not ended.
    DRIFTING = "drifting"
    #: An update ended a short while ago; windows do not count yet.
    COOLING_DOWN = "cooling_down"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftPolicy:
    """When a window closes, and what makes a trigger. Raises InvalidInputError for values that make no sense."""

    window_requests: Annotated[int, Setting(help="Requests after which a window of the load closes.")] = 1000
    window_s: Annotated[float, Setting(help="Seconds after which it closes, if that is earlier.")] = 60.0
    min_queries: Annotated[int, Setting(help="A window with fewer queries is thin and does not count.")] = 50
    z: Annotated[float, Setting(help="Half width of the hit rate's interval, in standard errors.")] = 3.0
    design_effect: Annotated[
        float, Setting(help="How much queries that resemble each other widen the hit rate's interval.")
    ] = 2.0
    tolerance: Annotated[float, Setting(help="Added to both sides of the hit rate's interval, absolute.")] = 0.01
    off_windows: Annotated[int, Setting(help="Windows that must be off to trigger an update.")] = 2
    of_windows: Annotated[int, Setting(help="Newest windows among which off windows are counted.")] = 3
    cool_down_s: Annotated[float, Setting(help="Seconds after an update without a trigger.")] = 300.0

    def __post_init__(self) -> None:
        for name in ("window_requests", "min_queries", "off_windows", "of_windows"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name in ("window_s", "z", "design_effect"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidInputError(f"{name} is {getattr(self, name)}; expected a positive number")
        for name in ("tolerance", "cool_down_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidInputError(f"{name} is {getattr(self, name)}; expected 0 or more")
        if self.off_windows > self.of_windows:
            raise InvalidInputError(
                f"off_windows is {self.off_windows} of of_windows {self.of_windows}; expected no more than there are"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRatePrediction:
    """Hit rate by bytes of one query, measured on held-back queries."""

    mean: float
    #: Across queries, unbiased.
    variance: float
    n_held: int

    def interval(self, n_queries: int, policy: DriftPolicy) -> tuple[float, float]:
        """Bounds of the mean of ``n_queries`` >= 1 queries of the same load, within [0, 1]."""
        spread = math.sqrt(self.variance * (policy.design_effect / n_queries + 1.0 / self.n_held))
        half = policy.z * spread + policy.tolerance
        return max(0.0, self.mean - half), min(1.0, self.mean + half)


def predict_hit_rate(curve: CoverageCurve, lists: I64) -> HitRatePrediction:
    """The prediction when ``lists`` (m,) are resident, from a profile's held-back queries."""
    rates: F64 = curve.of_lists(lists).hit_rate
    return HitRatePrediction(mean=float(rates.mean()), variance=float(np.var(rates, ddof=1)), n_held=curve.n_held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a plan promised."""

    slo_s: float
    #: Fraction of requests within the SLO.
    attainment: float
    hit_rate: HitRatePrediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Requests that were served between two times, summed."""

    #: Count of windows since the start; of pooled windows the last one's.
    number: int
    began_s: float
    ended_s: float
    requests: int
    #: Requests within the SLO.
    within_slo: int
    queries: int
    #: Sum and sum of squares of the queries' hit rates by bytes.
    hit_rate_sum: float
    hit_rate_squares: float
    #: The interval that was predicted for so many queries.
    interval: tuple[float, float]
    #: Too few queries to say anything.
    thin: bool
    #: Attainment below what was promised.
    late: bool
    #: Hit rate outside the interval.
    outside: bool

    @property
    def off(self) -> bool:
        """Counts towards a trigger: late and outside together."""
        return self.late and self.outside and not self.thin

    @property
    def attainment(self) -> float:
        return self.within_slo / self.requests

    @property
    def hit_rate(self) -> float:
        """Mean over queries, by bytes."""
        return self.hit_rate_sum / self.queries

    @property
    def hit_rate_variance(self) -> float:
        return max(0.0, self.hit_rate_squares / self.queries - self.hit_rate**2)


def pool_windows(windows: tuple[Window, ...]) -> Window | None:
    """One window of all of them; None of none. Late and outside where one of them was; thin where all were."""
    if not windows:
        return None
    return Window(
        number=windows[-1].number,
        began_s=windows[0].began_s,
        ended_s=windows[-1].ended_s,
        requests=sum(w.requests for w in windows),
        within_slo=sum(w.within_slo for w in windows),
        queries=sum(w.queries for w in windows),
        hit_rate_sum=sum(w.hit_rate_sum for w in windows),
        hit_rate_squares=sum(w.hit_rate_squares for w in windows),
        interval=windows[-1].interval,
        thin=all(w.thin for w in windows),
        late=any(w.late for w in windows),
        outside=any(w.outside for w in windows),
    )


# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A request was answered."""

    now_s: float
    latency_s: float
    #: Queries of the request, and the sums of their hit rates by bytes.
    queries: int
    hit_rate_sum: float
    hit_rate_squares: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time went by."""

    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateEnded:
    """An update came to an end, or another plan is served from now on."""

    now_s: float
    #: Of the plan that is served now; None: the same plan as before.
    expectation: Expectation | None = None


DriftEvent = Served | Tick | UpdateEnded

# Actions


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowClosed:
    window: Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """An update should begin; the monitor waits for :class:`UpdateEnded`."""

    now_s: float
    #: The windows that were off, oldest first.
    windows: tuple[Window, ...]

    @property
    def reason(self) -> str:
        last = self.windows[-1]
        return (
            f"{len(self.windows)} windows were off: attainment {last.attainment:.3f} and hit rate {last.hit_rate:.3f}, "
            f"predicted {last.interval[0]:.3f} to {last.interval[1]:.3f}"
        )


DriftAction = WindowClosed | Trigger


class DriftMonitor:
    """Windows and state of one served plan. Has no lock; the owner calls under its own."""

    def __init__(self, expectation: Expectation, policy: DriftPolicy, *, now_s: float) -> None:
        self._expectation = expectation
        self._policy = policy
        self._state = DriftState.STABLE
        self._cool_until_s = now_s
        #: Those that count, oldest first.
        self._recent: deque[Window] = deque(maxlen=policy.of_windows)
        self._closed = 0
        self._begin(now_s)

    @property
    def state(self) -> DriftState:
        return self._state

    @property
    def expectation(self) -> Expectation:
        return self._expectation

    @property
    def recent(self) -> tuple[Window, ...]:
        """The last windows that count, oldest first."""
        return tuple(self._recent)

    def handle(self, event: DriftEvent) -> list[DriftAction]:
        """What follows from one event. Times never go back."""
        match event:
            case Served():
                return self._served(event)
            case Tick():
                return self._advance(event.now_s)
            case UpdateEnded():
                return self._end_update(event)

    def _begin(self, now_s: float) -> None:
        self._began_s = now_s
        self._requests = self._within = self._queries = 0
        self._sum = self._squares = 0.0

    def _served(self, event: Served) -> list[DriftAction]:
        actions = self._advance(event.now_s)
        self._requests += 1
        self._within += event.latency_s <= self._expectation.slo_s
        self._queries += event.queries
        self._sum += event.hit_rate_sum
        self._squares += event.hit_rate_squares
        if self._requests >= self._policy.window_requests:
            actions += self._close(event.now_s)
        return actions

    def _advance(self, now_s: float) -> list[DriftAction]:
        if self._state is DriftState.COOLING_DOWN and now_s >= self._cool_until_s:
            self._state = DriftState.STABLE
        if now_s < self._began_s + self._policy.window_s:
            return []
        return self._close(now_s)

    def _close(self, now_s: float) -> list[DriftAction]:
        if not self._queries:
            self._begin(now_s)
            return []
        low, high = self._expectation.hit_rate.interval(self._queries, self._policy)
        window = Window(
            number=self._closed,
            began_s=self._began_s,
            ended_s=now_s,
            requests=self._requests,
            within_slo=self._within,
            queries=self._queries,
            hit_rate_sum=self._sum,
            hit_rate_squares=self._squares,
            interval=(low, high),
            thin=self._queries < self._policy.min_queries,
            late=self._within < self._expectation.attainment * self._requests,
            outside=not low <= self._sum / self._queries <= high,
        )
        self._closed += 1
        self._begin(now_s)
        return [WindowClosed(window=window), *self._weigh(window)]

    def _weigh(self, window: Window) -> list[DriftAction]:
        if window.thin or self._state in (DriftState.DRIFTING, DriftState.COOLING_DOWN):
            return []
        self._recent.append(window)
        off = tuple(w for w in self._recent if w.off)
        if len(off) < self._policy.off_windows:
            self._state = DriftState.SUSPECT if off else DriftState.STABLE
            return []
        self._state = DriftState.DRIFTING
        return [Trigger(now_s=window.ended_s, windows=off)]

    def _end_update(self, event: UpdateEnded) -> list[DriftAction]:
        if event.expectation is not None:
            self._expectation = event.expectation
        # A window across two plans would speak of neither.
        self._begin(event.now_s)
        self._recent.clear()
        self._cool_until_s = event.now_s + self._policy.cool_down_s
        self._state = DriftState.COOLING_DOWN
        return []

    def check_invariants(self) -> None:
        """Asserts what must hold between two events."""
        off = sum(w.off for w in self._recent)
        assert 0 <= self._within <= self._requests < self._policy.window_requests
        assert not any(w.thin for w in self._recent)
        assert self._state is not DriftState.STABLE or off == 0
        assert self._state is not DriftState.SUSPECT or 0 < off < self._policy.off_windows
        assert self._state is not DriftState.DRIFTING or off >= self._policy.off_windows
        assert self._state is not DriftState.COOLING_DOWN or not self._recent
