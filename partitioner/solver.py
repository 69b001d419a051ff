"""Algorithm 1 of VectorLiteRAG, corrected: the fewest hot lists with which search meets its latency target.

Searches over prefixes of the hot order. Their memory is the page bytes of *those* lists. Places no list on a device.
Three corrections: the printed update overshoots, so we bisect for the smallest coverage rho with
infer(mu(rho)) <= rho; a batch that rounds down to 0 has no branch of its own; throughput falls with real bytes.

A batch size B is accepted at rho when its latency meets the bound of its branch. Latency on the host never rises with
rho, so infer(mu(rho)) <= rho holds exactly when one branch accepts rho. One test of rho therefore costs two latency
predictions instead of an inner search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.models.coverage import CoverageCurve, QueryWork
from hybridindex.partitioner.models.latency import LatencyModel
from hybridindex.partitioner.models.throughput import ThroughputModel, throughput_model
from hybridindex.partitioner.request import PlanRequest

__all__ = ["Problem", "Solution", "SolverStep", "problem_of", "solve"]

#: Largest batch that is tried; latency is a straight line long before.
MAX_BATCH = 1 << 24
#: Relative step that puts a target above a limit which it must exceed.
_HAIR = 1e-6
#: Prefixes that are tried for the nearest target, and its relative precision.
_NEAREST_PREFIXES = 8
_NEAREST_PRECISION = 1e-2
_LARGEST_TAU_S = 1e7


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverStep:
    """One coverage tried."""

    #: Resident lists, as a number and as a fraction.
    count: int
    coverage: float
    #: Device bytes with pages and scratch.
    device_bytes: int
    #: Requests/s to serve; ``None`` when no rate is known.
    rate_qps: float | None
    #: ceil(tau mu), its latency, and its bound tau.
    batch_up: int
    latency_up_s: float
    bound_up_s: float
    #: floor(tau mu), its mean latency, and its bound B / mu; 0 and NaN where that branch is undefined or the same.
    batch_down: int
    latency_down_s: float
    bound_down_s: float
    accepted: bool
    #: The batch size that was accepted, ``batch_up`` if both are; 0 when refused.
    accepted_batch: int

    def to_data(self) -> list[Any]:
        """JSON-able values in field order; NaN becomes null."""
        values = [getattr(self, name) for name in self.__dataclass_fields__]
        return [None if isinstance(v, float) and math.isnan(v) else v for v in values]

    @classmethod
    def from_data(cls, values: Sequence[Any]) -> SolverStep:
        """Inverse of :meth:`to_data`."""
        pairs = zip(cls.__dataclass_fields__, values, strict=True)
        named: dict[str, Any] = {n: math.nan if v is None and n != "rate_qps" else v for n, v in pairs}
        return cls(**named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The smallest prefix that meets the target, or the best there is."""

    count: int
    feasible: bool
    #: Why it is infeasible; empty when feasible.
    reason: str
    #: Search latency target after queueing: tau_s = SLO / (1 + epsilon).
    tau_s: float
    #: Requests/s at the solution; ``None`` when no rate is known.
    rate_qps: float | None
    #: Batch size that the accepted branch runs at.
    batch: int
    #: Smallest tau_s that could be met within the same budget; ``None`` when no latency target can.
    nearest_tau_s: float | None
    trace: tuple[SolverStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """What coverage is solved for. Every method is a function of its arguments; timings are cached."""

    curve: CoverageCurve
    latency: LatencyModel
    percentile: float
    #: Offered load, and the LLM's throughput: the smaller counts. Both ``None``: solve for one query at a time.
    rate_qps: float | None
    llm: ThroughputModel | None
    #: Scan scratch of all devices, taken once anything is resident.
    scratch_bytes: int
    #: Pages that all devices hold.
    limit_pages: int
    _timings: dict[tuple[int, int], tuple[float, float]] = field(init=False, repr=False, default_factory=dict)
    _works: dict[int, QueryWork] = field(init=False, repr=False, default_factory=dict)

    def work_at(self, count: int) -> QueryWork:
        """The work of the first ``count`` lists of the hot order."""
        work = self._works.get(count)
        if work is None:
            work = self._works[count] = self.curve.at(count)
        return work

    def timing(self, work: QueryWork, batch: int) -> tuple[float, float]:
        """(seconds at the SLO's percentile, mean seconds) of a batch; predicted once per prefix and batch size."""
        if work.prefix is None:
            return self.latency.both(self.curve, work, batch, self.percentile)
        key = (work.prefix, batch)
        known = self._timings.get(key)
        if known is None:
            known = self._timings[key] = self.latency.both(self.curve, work, batch, self.percentile)
        return known

    def at_rate(self, rate_qps: float) -> Problem:
        """The same resident sets under another offered load, without the LLM. Shares the caches: no timing depends on
        the load. Not thread-safe.
        """
        other = replace(self, rate_qps=rate_qps, llm=None)
        object.__setattr__(other, "_timings", self._timings)
        object.__setattr__(other, "_works", self._works)
        return other

    def prefix_bytes(self, count: int) -> int:
        """Device bytes of the first ``count`` lists: pages, and scratch where there are any."""
        pages = int(self.curve.prefix_pages[count])
        return pages * self.curve.geometry.page_bytes + self.scratch_bytes if pages > 0 else 0

    def rate_at(self, device_bytes: int) -> float | None:
        """Requests/s that search must serve when the index takes ``device_bytes``."""
        rates = [r for r in (self.rate_qps, self.llm.at(device_bytes) if self.llm else None) if r is not None]
        return min(rates) if rates else None

    @property
    def most_pages(self) -> int:
        """Pages that lists may take: the devices' limit and, beside an LLM, what leaves it some KV cache."""
        if self.llm is None:
            return self.limit_pages
        left = self.llm.total_bytes - self.scratch_bytes - 1
        return min(self.limit_pages, max(left, 0) // self.curve.geometry.page_bytes)

    def cap_count(self) -> int:
        """Longest prefix that fits :attr:`most_pages`."""
        return int(np.searchsorted(self.curve.prefix_pages, self.most_pages, side="right")) - 1

    def step(self, work: QueryWork, count: int, device_bytes: int, tau_s: float, *, measured_too: bool) -> SolverStep:
        """Test one resident set with the two branches of INFERPARTITION: is this coverage enough?

        Rounded up, B = ceil(tau mu) must stay within tau. Rounded down, B = floor(tau mu) must stay within tau at the
        SLO's percentile and within B / mu on average, so that the rate is sustained. ``measured_too`` also tries the
        measured batch sizes below: on-demand batching settles there when they sustain the rate.
        """
        rate = self.rate_at(device_bytes)
        expected = min(tau_s * rate, float(MAX_BATCH)) if rate is not None else 0.0
        up = max(1, math.ceil(expected - 1e-9))
        down = math.floor(expected + 1e-9)
        latency_up, mean_up = self.timing(work, up)
        sustained = rate is None or rate <= 0 or mean_up <= up / rate
        accepted = up if latency_up <= tau_s and sustained else 0
        latency_down = bound_down = math.nan
        if rate is not None and rate > 0 and 1 <= down < up:
            slowest, latency_down = self.timing(work, down)
            bound_down = down / rate
            if not accepted and slowest <= tau_s and latency_down <= bound_down:
                accepted = down
        if not accepted and measured_too and rate is not None and rate > 0:
            for batch in self.latency.host.batches:
                if batch >= down:
                    break
                slowest, mean = self.timing(work, batch)
                if slowest <= tau_s and mean <= batch / rate:
                    accepted = down = batch
                    latency_down, bound_down = mean, batch / rate
                    break
        if self.llm is not None and rate is not None and rate <= 0:
            accepted = 0
        return SolverStep(
            count=count,
            coverage=count / self.curve.nlist,
            device_bytes=device_bytes,
            rate_qps=rate,
            batch_up=up,
            latency_up_s=latency_up,
            bound_up_s=tau_s,
            batch_down=down if not math.isnan(bound_down) else 0,
            latency_down_s=latency_down,
            bound_down_s=bound_down,
            accepted=accepted > 0,
            accepted_batch=accepted,
        )

    def prefix_step(self, count: int, tau_s: float, *, measured_too: bool = False) -> SolverStep:
        """:meth:`step` for the first ``count`` lists of the hot order."""
        return self.step(self.work_at(count), count, self.prefix_bytes(count), tau_s, measured_too=measured_too)

    def nearest_tau(self, work: QueryWork, device_bytes: int, least_s: float = 0.0) -> float | None:
        """Smallest latency target >= ``least_s`` that ``work``'s resident set meets; ``None`` when none can be met.

        :meth:`step` accepts a sustained batch B for targets from max(latency(B), (B - 1) / mu) on: for all larger ones
        when B was measured, otherwise below (B + 1) / mu. So the smallest sustained batch decides, measured or not.
        """
        rate = self.rate_at(device_bytes)
        if rate is not None and rate <= 0 and self.llm is not None:
            return None
        if rate is None or rate <= 0:
            return max(self.timing(work, 1)[0], least_s)
        arrivals_per_s = rate

        def target(batch: int) -> float:
            return max(self.timing(work, batch)[0], (batch - 1 + _HAIR) / arrivals_per_s, least_s)

        def sustained(batch: int) -> bool:
            return self.timing(work, batch)[1] <= batch / arrivals_per_s

        def settles(batch: int) -> bool:
            return sustained(batch) and target(batch) * (1.0 + _HAIR) < (batch + 1) / arrivals_per_s

        first = next((target(batch) for batch in self.latency.host.batches if sustained(batch)), math.inf)
        found = [first]
        low = max(0, math.floor(min(least_s * rate, float(MAX_BATCH))) - 1)
        high = low + 1
        # A batch that takes longer to fill than the best target so far cannot improve on it.
        while high <= MAX_BATCH and (high - 1) / rate < first and not settles(high):
            low, high = high, high * 4
        if high <= MAX_BATCH and (high - 1) / rate < first:
            while high - low > 1 and (high - low) * 128 > high:
                middle = (low + high) // 2
                low, high = (low, middle) if settles(middle) else (middle, high)
            found.append(target(high))
        for tau_s in sorted(t for t in found if t <= _LARGEST_TAU_S):
            if self.step(work, 0, device_bytes, tau_s, measured_too=True).accepted:
                return tau_s
        return None


def problem_of(analysis: Analysis, request: PlanRequest) -> Problem:
    """What a request asks of the solver."""
    pages = request.capacity_pages(analysis.curve.geometry.page_bytes)
    return Problem(
        curve=analysis.curve,
        latency=analysis.latency,
        percentile=request.percentile,
        rate_qps=request.rate_qps,
        llm=throughput_model(request.llm) if request.llm is not None else None,
        scratch_bytes=sum(s for s, p in zip(request.scratch, pages, strict=True) if p > 0),
        limit_pages=sum(pages),
    )


def solve(problem: Problem, tau_s: float) -> Solution:
    """Smallest hot prefix whose latency meets ``tau_s``; the most useful one when none does. Never raises.

    Latency need not fall with coverage: the device's own time rises, and the first resident list brings the cost of a
    second tier. So prefixes are tried upwards on a coarse grid. The first that meets the target is narrowed down to a
    list.
    """
    trace: list[SolverStep] = []

    def attempt(count: int) -> SolverStep:
        trace.append(problem.prefix_step(count, tau_s, measured_too=True))
        return trace[-1]

    refused = -1
    tried = _prefixes(problem)
    for count in tried:
        step = attempt(count)
        if not step.accepted:
            refused = count
            continue
        while step.count - refused > 1:
            middle = attempt((step.count + refused) // 2)
            if middle.accepted:
                step = middle
            else:
                refused = middle.count
        return Solution(
            count=step.count,
            feasible=True,
            reason="",
            tau_s=tau_s,
            rate_qps=step.rate_qps,
            batch=step.accepted_batch,
            nearest_tau_s=None,
            trace=tuple(trace),
        )
    count, nearest_tau_s = _nearest(problem, tried, tau_s)
    step = problem.prefix_step(count, tau_s)
    trace.append(step)
    return Solution(
        count=count,
        feasible=False,
        reason=_why(problem, step, problem.cap_count(), tau_s),
        tau_s=tau_s,
        rate_qps=step.rate_qps,
        batch=step.batch_up,
        nearest_tau_s=nearest_tau_s,
        trace=tuple(trace),
    )


def _prefixes(problem: Problem) -> list[int]:
    """Counts to try, ascending from 0 to all lists that fit and are ever probed; denser among the hottest."""
    most = min(problem.cap_count(), problem.curve.useful_count())
    if most < 1:
        return [0]
    counts = np.concatenate(([0], np.geomspace(1, most, 9), np.linspace(0, most, 11)))
    return [int(count) for count in np.unique(np.round(counts))]


def _nearest(problem: Problem, counts: list[int], tau_s: float) -> tuple[int, float | None]:
    """The prefix that meets the smallest target from ``tau_s`` on, and that target.

    When the rate is too high for every prefix: the one that sustains the most, and ``None``. Tries few of ``counts``,
    both ends included: the target is near the best, and is met by a prefix that :func:`solve` tries.
    """
    places = np.unique(np.round(np.linspace(0, len(counts) - 1, _NEAREST_PREFIXES)).astype(int))
    works = {counts[place]: problem.work_at(counts[place]) for place in places.tolist()}
    targets: dict[int, float] = {}
    for count, work in works.items():
        nearest_s = problem.nearest_tau(work, problem.prefix_bytes(count), tau_s)
        if nearest_s is not None:
            targets[count] = nearest_s
    if targets:
        winner = min(targets, key=lambda count: targets[count])
        # Timings that do not rise evenly with the batch may allow a smaller target: bisect down to the next edge.
        low, high = tau_s, targets[winner]
        while high > low * (1.0 + _NEAREST_PRECISION):
            middle = math.sqrt(low * high)
            met = problem.prefix_step(winner, middle, measured_too=True).accepted
            low, high = (low, middle) if met else (middle, high)
        return winner, high
    batch = max(problem.latency.max_batch, 1)
    means = {count: problem.timing(work, batch)[1] for count, work in works.items()}
    return min(means, key=lambda count: means[count]), None


def _why(problem: Problem, step: SolverStep, cap: int, tau_s: float) -> str:
    if problem.llm is not None and (step.rate_qps or 0.0) <= 0:
        return "the LLM has no throughput left at any coverage"
    coarse = problem.latency.coarse
    fixed = float(coarse.predict(step.batch_up)) if coarse is not None else 0.0
    if fixed > tau_s:
        return (
            f"coarse quantization alone takes {fixed * 1e3:.3g} ms at batch {step.batch_up}, "
            f"more than the {tau_s * 1e3:.3g} ms that search may take"
        )
    if cap == 0:
        what = "the device budget holds no list, and the host alone"
    elif step.count < min(cap, problem.curve.useful_count()):
        what = f"more than {step.count} resident lists do not make it faster; with them search"
    elif cap < problem.curve.useful_count():
        what = f"the device memory holds {cap} of {problem.curve.nlist} lists; with them search"
    else:
        what = "even with every useful list resident search"
    return (
        f"{what} takes {step.latency_up_s * 1e3:.3g} ms at batch {step.batch_up} where {tau_s * 1e3:.3g} ms are allowed"
    )
