"""Algorithm 1 of VectorLiteRAG, corrected: the fewest bytes of hot lists with which search meets its latency target.

Searches over prefixes of the hot order. Their memory is the page bytes of *those* lists. Where searches scan codes, it
also searches over orders in which rows come beside the codes (:mod:`hybridindex.partitioner.forms`), each for itself,
and takes the fewest bytes. Places no list on a device.

On-demand batching settles at the smallest batch size that is sustained: whose mean latency is within B / mu. A resident
set is accepted when its answers are then in time, waiting included. Predicted batch sizes depend on neither target,
rate nor budget, and a larger batch is never predicted to take less time. So a larger SLO, a larger budget or a lower
rate never takes more lists, and the verdict is the same comparison as the highest sustainable rate (ADR 0021).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.forms import Path, paths_of, scanned_alone
from hybridindex.partitioner.models.coverage import CoverageCurve, QueryWork
from hybridindex.partitioner.models.hitrate import HitRateName, modelled
from hybridindex.partitioner.models.latency import LatencyModel
from hybridindex.partitioner.models.throughput import Queue, ThroughputModel, throughput_model, waiting_factor
from hybridindex.partitioner.request import PlanRequest
from hybridindex.types import I64

__all__ = [
    "LARGEST_SLO_S",
    "Problem",
    "Settled",
    "Solution",
    "SolverStep",
    "fewest",
    "in_words",
    "problem_of",
    "rate_in_words",
    "solve",
]

#: Prefixes that are tried for the nearest target.
_NEAREST_PREFIXES = 8
#: A larger one counts as none that can be met.
LARGEST_SLO_S = 1e7
#: A target that is missed by less is met.
_ROUNDING = 1e-12
#: Relative precision of the highest rate, and the smallest one that is told from 0.
_RATE_PRECISION = 1e-7
_LEAST_RATE = 1e-9
#: A list is large that takes more than this part of the largest device; and of how many sizes of such lists paths are
#: tried without them.
_LARGE, _MOST_LARGE = 0.25, 3


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
    #: Batch size that search settles at, rounded down; where no size sustains the rate, the largest.
    batch: int
    #: Its latency at the SLO's percentile, and its mean.
    latency_s: float
    mean_s: float
    #: What a request takes with its waiting and the headroom, ``None`` where the rate is not sustained; and the SLO.
    response_s: float | None
    bound_s: float
    accepted: bool
    #: Lists whose rows are resident beside codes.
    rows: int = 0

    def to_data(self) -> list[Any]:
        """JSON-able values in field order."""
        return [getattr(self, name) for name in self.__dataclass_fields__]

    @property
    def sustained(self) -> bool:
        """Some batch size sustains the rate, in time or not."""
        return self.response_s is not None

    @classmethod
    def from_data(cls, values: Sequence[Any]) -> SolverStep:
        """Inverse of :meth:`to_data`; earlier steps have no rows."""
        return cls(**dict(zip(cls.__dataclass_fields__, values, strict=False)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The prefix of fewest bytes that meets the target, or the best there is."""

    #: Pieces of ``path``: so many lists, and lists whose rows lie beside codes. And bytes with pages and scratch.
    place: int
    path: Path
    count: int
    rows: int
    device_bytes: int
    feasible: bool
    #: Why it is infeasible; empty when feasible.
    reason: str
    #: What search may take, waiting included.
    slo_s: float
    #: Requests/s at the solution; ``None`` when no rate is known.
    rate_qps: float | None
    #: Batch size that search settles at.
    batch: int
    #: Smallest ``slo_s`` that could be met within the same budget; ``None`` when none can.
    nearest_s: float | None
    trace: tuple[SolverStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Where on-demand batching settles under one load, between two batch sizes."""

    batch: float
    #: Latency of a batch at the SLO's percentile, and its mean.
    slowest_s: float
    mean_s: float
    #: What a request takes at the SLO's percentile, waiting and headroom included; infinite where the load is not
    #: sustained.
    response_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
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
    #: Pages of the largest device: no device holds a list of more.
    largest_pages: int = 1 << 60
    #: Queueing time over the latency of a batch (Eq. 3); ``None``: from the batching model, at the load.
    epsilon: float | None = None
    hit_rates: HitRateName = "empirical"
    #: What a resident set must have to spare, as a fraction: of the rate that it sustains, and of the SLO.
    headroom: float = 0.0
    #: What prefixes are of; ``None``: of the hot order, without rows beside codes.
    given_path: Path | None = None
    _timings: dict[tuple[tuple[int, int] | QueryWork, int], tuple[float, float]] = field(
        init=False, repr=False, default_factory=dict
    )
    _works: dict[tuple[int, int], QueryWork] = field(init=False, repr=False, default_factory=dict)
    #: Of paths that leave lists out.
    _path_works: dict[tuple[Path, int], QueryWork] = field(init=False, repr=False, default_factory=dict)

    def work_at(self, place: int) -> QueryWork:
        """The work of the first ``place`` pieces of the path, under the hit-rate model."""
        if self.path.list_ranks is None:
            return self._work_at(int(self.path.lists[place]), int(self.path.rows[place]))
        work = self._path_works.get((self.path, place))
        if work is None:
            lists, rows = self.path.pieces(np.arange(place, dtype=np.int64))
            beside = None if self.curve.rows is None else self.curve.rows.order[rows]
            work = self._path_works[self.path, place] = self.work_of(self.curve.order[lists], beside)
        return work

    def _work_at(self, lists: int, rows: int) -> QueryWork:
        work = self._works.get((lists, rows))
        if work is None:
            work = self._works[lists, rows] = modelled(self.curve, self.curve.at(lists, rows), self.hit_rates)
        return work

    def work_of(self, lists: I64, rows: I64 | None = None) -> QueryWork:
        """The same for the list ids (m,), and those whose rows are there."""
        work = self.curve.of_lists(lists, rows)
        if work.prefix is not None and work.row_prefix is not None:
            return self._work_at(work.prefix, work.row_prefix)
        return modelled(self.curve, work, self.hit_rates)

    @cached_property
    def path(self) -> Path:
        """What prefixes are of."""
        return self.given_path or scanned_alone(self.curve)

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """All, without what fits on no device. Where devices hold nothing at all, with it."""
        every = paths_of(self.curve, self.latency)
        return tuple(path.without_larger(self.largest_pages) for path in every) if self.largest_pages else every

    @cached_property
    def paths_without_large(self) -> tuple[Path, ...]:
        """The same paths without the largest lists that fit, as they were for devices that could not hold these. A
        large list may leave no room for lists that save more together."""
        sizes = {size for path in self.paths for size in np.diff(path.pages[: path.useful + 1]).tolist()}
        large = sorted(size for size in sizes if _LARGE * self.largest_pages < size <= self.largest_pages)
        limits = [size - 1 for size in large[: -_MOST_LARGE - 1 : -1]]
        return tuple(path.without_larger(limit) for limit in limits for path in self.paths)

    @cached_property
    def batches(self) -> I64:
        """(b,) batch sizes that are predicted, ascending from 1: those measured, and one between each two."""
        measured = np.array(sorted({1, self.latency.max_batch, *self.latency.host.batches}), dtype=np.float64)
        measured = measured[measured <= max(self.latency.max_batch, 1)]
        between = np.sqrt(measured[1:] * measured[:-1])
        return np.unique(np.round(np.concatenate((measured, between)))).astype(np.int64)

    def timing(self, work: QueryWork, batch: int) -> tuple[float, float]:
        """(seconds at the SLO's percentile, mean seconds) of a batch; predicted once per resident set and size."""
        prefix = None if work.prefix is None or work.row_prefix is None else (work.prefix, work.row_prefix)
        key = (work if prefix is None else prefix, batch)
        known = self._timings.get(key)
        if known is None:
            known = self._timings[key] = self.latency.both(self.curve, work, batch, self.percentile)
        return known

    def at_rate(self, rate_qps: float) -> Problem:
        """The same resident sets under another offered load, without the LLM."""
        return self._but(rate_qps=rate_qps, llm=None)

    def at_epsilon(self, epsilon: float | None) -> Problem:
        """The same with another queueing factor."""
        return self._but(epsilon=epsilon)

    def without_limit(self) -> Problem:
        """The same on devices that hold every list."""
        return self._but(limit_pages=1 << 60, largest_pages=1 << 60)

    def along(self, path: Path) -> Problem:
        """The same with prefixes of another path."""
        return self._but(given_path=path)

    def _but(self, **changes: Any) -> Problem:
        """Shares the caches: no timing depends on what changes. Not thread-safe."""
        other = replace(self, **changes)
        for name in ("_timings", "_works", "_path_works"):
            object.__setattr__(other, name, getattr(self, name))
        return other

    def prefix_bytes(self, place: int) -> int:
        """Device bytes of the first ``place`` pieces: pages, and scratch where there are any."""
        return self.with_scratch(int(self.path.pages[place]))

    def with_scratch(self, pages: int) -> int:
        """Device bytes of so many pages: scratch of every device, as which ones hold the pages is not known."""
        return pages * self.curve.geometry.page_bytes + self.scratch_bytes if pages > 0 else 0

    def rate_at(self, device_bytes: int) -> float | None:
        """Requests/s that search must serve when the index takes ``device_bytes``."""
        rates = [r for r in (self.rate_qps, self.llm.at(device_bytes) if self.llm else None) if r is not None]
        return min(rates) if rates else None

    def why_left_out(self, path: Path) -> str:
        """What is wrong with the lists that ``path`` leaves out, in words."""
        assert path.most_pages is not None
        return (
            "are larger than a device"
            if path.most_pages >= self.largest_pages
            else "would leave too little room beside them"
        )

    @property
    def most_pages(self) -> int:
        """Pages that lists may take: the devices' limit and, beside an LLM, what leaves it some KV cache."""
        return min(self.limit_pages, self._llm_pages)

    @property
    def _llm_pages(self) -> int:
        """Pages that leave an LLM some KV cache."""
        if self.llm is None:
            return 1 << 60
        left = self.llm.total_bytes - self.scratch_bytes - 1
        return max(left, 0) // self.curve.geometry.page_bytes

    def useful_count(self) -> int:
        """Longest prefix worth a try, whether the devices hold it or not: all lists that are ever probed, or those that
        leave an LLM some KV cache."""
        beside = int(np.searchsorted(self.path.pages, self._llm_pages, side="right")) - 1
        return min(self.path.useful, beside)

    def cap_count(self) -> int:
        """Longest prefix that fits :attr:`most_pages`."""
        return int(np.searchsorted(self.path.pages, self.most_pages, side="right")) - 1

    def settle(self, work: QueryWork, rate: float | None) -> Settled:
        """Where batching settles when ``work``'s lists are resident and ``rate`` requests/s arrive.

        A request waits for the batch before it (epsilon of the mean), takes longer than the mean itself, and waits for
        bursts as at a single server (M/D/1). These add up like independent deviations. Without a rate, and with an
        epsilon that is given, the wait is epsilon times the slowest batch, as in Eq. 3: 1 is the worst case.
        """
        beyond = 1.0 + self.headroom
        if rate is None:
            slowest_s, mean_s = self.timing(work, 1)
            epsilon = 1.0 if self.epsilon is None else self.epsilon
            return Settled(
                batch=1.0, slowest_s=slowest_s, mean_s=mean_s, response_s=(1.0 + epsilon) * slowest_s * beyond
            )
        wanted = rate * beyond
        wait_s = self._queue(work).wait_s(wanted)
        slowest_s, mean_s, batch = 0.0, 0.0, 1.0
        below: tuple[float, float, float, float] | None = None
        for size in self.batches.tolist() if rate > 0 and math.isfinite(wait_s) else ():
            # A larger batch never takes less time.
            slowest_s, mean_s = (max(pair) for pair in zip((slowest_s, mean_s), self.timing(work, size), strict=True))
            batch, spare = float(size), size - wanted * mean_s
            if spare >= 0:
                break
            below = batch, slowest_s, mean_s, spare
        else:
            top = int(self.batches[-1])
            slowest_s, mean_s = self.timing(work, top)
            return Settled(batch=float(top), slowest_s=slowest_s, mean_s=mean_s, response_s=math.inf)
        if below is not None:
            # Straight between two sizes, because on-demand batches vary around their mean.
            part = spare / (spare - below[3])
            batch, slowest_s, mean_s = (
                high + part * (low - high) for high, low in zip((batch, slowest_s, mean_s), below[:3], strict=True)
            )
        if self.epsilon is None:
            waits_s = waiting_factor(wanted, mean_s, self.percentile) * mean_s
            response_s = mean_s + math.hypot(waits_s, slowest_s - mean_s, wait_s)
        else:
            response_s = max((1.0 + self.epsilon) * slowest_s, self.timing(work, 1)[0] + wait_s)
        return Settled(batch=batch, slowest_s=slowest_s, mean_s=mean_s, response_s=response_s * beyond)

    def _queue(self, work: QueryWork) -> Queue:
        """Requests that each take as long as one more query in a batch."""
        top = int(self.batches[-1])
        first_s, last_s = self.timing(work, 1)[1], self.timing(work, top)[1]
        each_s = (last_s - first_s) / (top - 1) if top > 1 else first_s
        return Queue(each_s=max(each_s, 0.0), late=1.0 - self.percentile / 100.0)

    def max_qps(self, work: QueryWork, device_bytes: int, slo_s: float) -> float:
        """Highest requests/s that ``work``'s resident set serves within ``slo_s``, less the headroom; 0 when a single
        query takes longer. Beside an LLM, at most what the LLM takes next to ``device_bytes``.
        """
        most = max(batch / max(self.timing(work, batch)[1], 1e-300) for batch in self.batches.tolist())
        low, high = 0.0, most / (1.0 + self.headroom)
        if self.settle(work, high).response_s <= slo_s:
            low = high
        while high - low > _RATE_PRECISION * high:
            middle = (low + high) / 2.0
            low, high = (middle, high) if self.settle(work, middle).response_s <= slo_s else (low, middle)
            if high < _LEAST_RATE:
                return 0.0
        return min(low, self.llm.at(device_bytes)) if self.llm is not None else low

    def step(self, work: QueryWork, count: int, device_bytes: int, slo_s: float, rows: int = 0) -> SolverStep:
        """Test one resident set, of ``count`` lists and the rows of ``rows``: does search answer in time at the
        rate?"""
        rate = self.rate_at(device_bytes)
        found = self.settle(work, rate)
        return SolverStep(
            count=count,
            coverage=count / self.curve.nlist,
            device_bytes=device_bytes,
            rate_qps=rate,
            batch=math.floor(found.batch + 1e-9),
            latency_s=found.slowest_s,
            mean_s=found.mean_s,
            response_s=found.response_s if math.isfinite(found.response_s) else None,
            bound_s=slo_s,
            accepted=found.response_s <= slo_s * (1.0 + _ROUNDING),
            rows=rows,
        )

    def prefix_step(self, place: int, slo_s: float) -> SolverStep:
        """:meth:`step` for the first ``place`` pieces of the path."""
        lists, rows = int(self.path.lists[place]), int(self.path.rows[place])
        return self.step(self.work_at(place), lists, self.prefix_bytes(place), slo_s, rows)

    def nearest(self, work: QueryWork, device_bytes: int, least_s: float = 0.0) -> float | None:
        """Smallest SLO >= ``least_s`` in seconds that ``work``'s resident set meets; ``None`` when none can be met."""
        nearest_s = max(self.settle(work, self.rate_at(device_bytes)).response_s, least_s)
        return nearest_s if nearest_s <= LARGEST_SLO_S else None


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
        largest_pages=max(pages),
        epsilon=request.epsilon,
        hit_rates=analysis.hit_rates.best if request.hit_rate_model == "best" else request.hit_rate_model,
        headroom=request.headroom,
    )


def solve(problem: Problem, slo_s: float) -> Solution:
    """The prefix of fewest bytes that answers within ``slo_s``; the most useful one when none does. Never raises.

    Each path is searched for itself, and of the prefixes that were found the one of fewest bytes counts. Latency need
    not fall along a path: the device's own time rises, and the first resident list brings the cost of a second tier. So
    prefixes are tried upwards on a coarse grid. The first that meets the target is narrowed down to a piece. While no
    list takes more than a quarter of a device, neither paths, grid nor bisection depend on the budget, which only
    decides whether the prefix that was found fits.
    """
    found = [_solve_along(problem.along(path), slo_s) for path in (*problem.paths, *problem.paths_without_large)]
    return min(found, key=lambda one: _worse(problem.along(one.path), one))


def _worse(problem: Problem, found: Solution) -> tuple[float, float]:
    """What is least for the best of several; of equal ones the first is taken."""
    if found.feasible:
        return 0.0, found.device_bytes
    if found.nearest_s is not None:
        return 1.0, found.nearest_s
    return 2.0, -problem.max_qps(problem.work_at(found.place), found.device_bytes, math.inf)


def _solve_along(problem: Problem, slo_s: float) -> Solution:
    trace: list[SolverStep] = []
    tried, cap = _prefixes(problem), problem.cap_count()
    needed = _smallest(problem, tried, slo_s, trace)
    reason, nearest_s = "", None
    if needed is not None and needed <= cap:
        place, step = needed, problem.prefix_step(needed, slo_s)
    else:
        place, nearest_s = _nearest(problem, tried, cap, slo_s)
        step = problem.prefix_step(place, slo_s)
        trace.append(step)
        reason = _why(problem, place, step, cap, slo_s)
    return Solution(
        place=place,
        path=problem.path,
        count=step.count,
        rows=step.rows,
        device_bytes=step.device_bytes,
        feasible=not reason,
        reason=reason,
        slo_s=slo_s,
        rate_qps=step.rate_qps,
        batch=step.batch,
        nearest_s=nearest_s,
        trace=tuple(trace),
    )


def fewest(problem: Problem, slo_s: float) -> int | None:
    """The smallest prefix of the path that answers within ``slo_s``, whether memory holds it or not; None: none
    does."""
    return _smallest(problem, _prefixes(problem), slo_s, [])


def _smallest(problem: Problem, tried: list[int], slo_s: float, trace: list[SolverStep]) -> int | None:
    """The first of ``tried`` that is accepted, narrowed down; whether it fits or not."""
    refused = -1
    for place in tried:
        step = problem.prefix_step(place, slo_s)
        trace.append(step)
        if not step.accepted:
            refused = place
            continue
        while place - refused > 1:
            middle = (place + refused) // 2
            step = problem.prefix_step(middle, slo_s)
            trace.append(step)
            if step.accepted:
                place = middle
            else:
                refused = middle
        return place
    return None


def _prefixes(problem: Problem) -> list[int]:
    """Counts to try, ascending from 0 to all that are useful; denser among the hottest."""
    most = problem.useful_count()
    if most < 1:
        return [0]
    counts = np.concatenate(([0], np.geomspace(1, most, 9), np.linspace(0, most, 11)))
    return [int(count) for count in np.unique(np.round(counts))]


def _nearest(problem: Problem, tried: list[int], cap: int, slo_s: float) -> tuple[int, float | None]:
    """The prefix up to ``cap`` that meets the smallest target from ``slo_s`` on, and that target.

    When the rate is too high for every prefix: the one that sustains the most, and ``None``. Looks at few of ``tried``,
    and at ``cap``: the target is near the best, and :func:`solve` meets it.
    """
    within = [count for count in tried if count <= cap]
    places = np.unique(np.round(np.linspace(0, len(within) - 1, _NEAREST_PREFIXES)).astype(int))
    few = sorted({*(within[place] for place in places.tolist()), min(cap, tried[-1])})
    targets: dict[int, float] = {}
    for count in few:
        nearest_s = problem.nearest(problem.work_at(count), problem.prefix_bytes(count), slo_s)
        if nearest_s is not None:
            targets[count] = nearest_s
    for count in sorted(targets, key=targets.__getitem__):
        found = None if count in tried else _smallest(problem, tried, targets[count], [])
        if count in tried or (found is not None and found <= cap):
            return count, targets[count]
    most = {count: problem.max_qps(problem.work_at(count), problem.prefix_bytes(count), math.inf) for count in few}
    return max(most, key=most.__getitem__), None


def _why(problem: Problem, place: int, step: SolverStep, cap: int, slo_s: float) -> str:
    rate = step.rate_qps
    if problem.llm is not None and (rate or 0.0) <= 0:
        return "the LLM has no throughput left at any coverage"
    coarse = problem.latency.coarse
    fixed = float(coarse.predict(step.batch)) if coarse is not None else 0.0
    if step.sustained and fixed > slo_s:
        return (
            f"coarse quantization alone takes {fixed * 1e3:.3g} ms at batch {step.batch}, "
            f"more than the {slo_s * 1e3:.3g} ms that search may take"
        )
    useful, beside = problem.path.useful, f" and the rows of {step.rows}" if step.rows else ""
    larger = 0 if problem.path.list_ranks is None else problem.curve.nlist - problem.path.list_ranks.size
    if cap == 0:
        what = "the device budget holds no list, and the host alone"
    elif place < min(cap, useful):
        what = f"more than {step.count} resident lists{beside} do not make it faster; with them search"
    elif cap < useful:
        held = int(problem.path.lists[cap])
        what = f"the device memory holds {held} of {problem.curve.nlist} lists{beside}; with them search"
    elif larger:
        of = f"{larger} of {problem.curve.nlist} lists {problem.why_left_out(problem.path)}"
        what = f"{of}; with the others resident search"
    else:
        what = "even with every useful list resident search"
    if step.response_s is None:
        most = problem.max_qps(problem.work_at(place), step.device_bytes, math.inf)
        return f"{what} sustains {rate_in_words(most)} where {rate:.4g} are asked for"
    return f"{what} {in_words(step)} where {slo_s * 1e3:.3g} ms are allowed"


def rate_in_words(rate_qps: float) -> str:
    """Four digits, and never an exponent."""
    return f"{f'{rate_qps:.4g}' if rate_qps < 9999.5 else f'{rate_qps:,.0f}'} requests/s"


def in_words(step: SolverStep) -> str:
    """How fast search answers, where it sustains the rate."""
    assert step.response_s is not None
    return (
        f"answers in {step.response_s * 1e3:.3g} ms, waiting and headroom included "
        f"(batches of {step.batch} take {step.latency_s * 1e3:.3g} ms)"
    )
