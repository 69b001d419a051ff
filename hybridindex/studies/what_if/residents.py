"""The rate that a resident set sustains within the SLO, for prefixes of the hot order beside an LLM.

As in a plan, it is the largest batch whose latency fits the SLO over its mean time. Sizes between two whole ones are
interpolated, because on-demand batches vary around their mean. Where larger batches save little, as on one device,
batches grow with every burst: a request then also waits for those before it, as at a single server (M/D/1 in heavy
traffic). The LLM takes what its KV cache allows, and has no queue below that rate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hybridindex.partitioner.models.throughput import throughput_model
from hybridindex.partitioner.solver import Problem, problem_of
from hybridindex.studies.what_if.setting import Setting

__all__ = ["CurvePoint", "Resident", "best_split", "curve_of", "least_split", "split_residents"]

_GRID = 14
_REFINEMENTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The hottest ``count`` lists on devices, beside the LLM."""

    count: int
    #: Fraction of lists.
    coverage: float
    #: Pages and scratch of all devices.
    device_bytes: int
    #: Mean, by bytes.
    hit_rate: float
    #: TTFT at the requested rate and percentile; None where search or LLM do not sustain the rate.
    ttft_ms: float | None
    #: Requests/s within the SLO that search sustains, and that the LLM takes beside these bytes.
    search_qps: float
    llm_qps: float

    @property
    def compliant_qps(self) -> float:
        return min(self.search_qps, self.llm_qps)

    @property
    def limited_by(self) -> str:
        return "search" if self.search_qps <= self.llm_qps else "llm"


@dataclass(slots=True, kw_only=True)
class Resident:
    """Prefixes of the hot order under one setting. Cached, so not thread-safe."""

    setting: Setting
    problem: Problem
    #: Index bytes -> requests/s.
    llm_qps: Callable[[int], float]
    _points: dict[int, CurvePoint] = field(init=False, repr=False, default_factory=dict)

    @property
    def _search_slo_s(self) -> float:
        return self.setting.request().search_slo_s

    @property
    def tau_s(self) -> float:
        """Most seconds of one batch."""
        return self._search_slo_s / (1.0 + self.setting.epsilon)

    @property
    def most(self) -> int:
        """The longest prefix that fits and helps."""
        return min(self.problem.cap_count(), self.problem.curve.useful_count())

    def point(self, count: int) -> CurvePoint:
        """The hottest ``count`` lists."""
        known = self._points.get(count)
        if known is None:
            curve = self.problem.curve
            work = self.problem.work_at(count)
            nbytes = self.problem.prefix_bytes(count)
            llm = self.llm_qps(nbytes)
            known = self._points[count] = CurvePoint(
                count=count,
                coverage=count / curve.nlist,
                device_bytes=nbytes,
                hit_rate=float(work.hit_rate.mean()),
                ttft_ms=self._ttft_ms(count) if llm >= self.setting.rate_qps else None,
                search_qps=self._search_qps(count),
                llm_qps=llm,
            )
        return known

    @property
    def _top(self) -> int:
        """The largest batch that was measured."""
        return max(self.problem.latency.max_batch, 1)

    def _ladder(self) -> list[tuple[int, int]]:
        """Neighbouring batch sizes 1, 2, 4 … up to the largest."""
        sizes = [*(1 << i for i in range(self._top.bit_length()) if 1 << i < self._top), self._top]
        return list(itertools.pairwise(sizes))

    def _timing(self, count: int, batch: float) -> tuple[float, float]:
        """(seconds at the percentile, mean seconds) at a batch size between two whole ones."""
        work, low = self.problem.work_at(count), math.floor(batch)
        slowest, mean = self.problem.timing(work, low)
        if batch > low:
            above = self.problem.timing(work, low + 1)
            part = batch - low
            slowest, mean = slowest + part * (above[0] - slowest), mean + part * (above[1] - mean)
        return slowest, mean

    def _search_qps(self, count: int) -> float:
        def late(batch: int) -> float:
            return self._timing(count, batch)[0] - self.tau_s

        if self.tau_s <= 0 or late(1) > 0:
            return 0.0
        largest = next((_crossing(late, low, high) for low, high in self._ladder() if late(high) > 0), float(self._top))
        # Larger batches need not be the more efficient ones.
        sizes = [*(low for low, _ in self._ladder() if low < largest), largest]
        sustained = max(batch / self._timing(count, batch)[1] for batch in sizes)
        return min(sustained, self._queue(count).rate_within(self._search_slo_s - self._timing(count, 1)[0]))

    def _queue(self, count: int) -> _Queue:
        """A queue of requests that each take as long as one more query in a batch."""
        more = self._timing(count, self._top)[1] - self._timing(count, 1)[1]
        each_s = more / (self._top - 1) if self._top > 1 else self._timing(count, 1)[1]
        return _Queue(each_s=max(each_s, 0.0), late=1.0 - self.setting.percentile / 100.0)

    def _ttft_ms(self, count: int) -> float | None:
        """TTFT with batches as large as gather while one is served."""

        def spare(batch: int) -> float:
            return batch - self.setting.rate_qps * self._timing(count, batch)[1]

        if spare(1) >= 0:
            batch = 1.0
        else:
            gathered = (_crossing(spare, low, high) for low, high in self._ladder() if spare(high) >= 0)
            batch = next(gathered, math.nan)
        if math.isnan(batch):
            return None
        search_s = (1.0 + self.setting.epsilon) * self._timing(count, batch)[0]
        queued_s = self._timing(count, 1)[0] + self._queue(count).wait_s(self.setting.rate_qps)
        search_s = max(search_s, queued_s)
        return self.setting.request().slo_ms_of(search_s, 0.0) if math.isfinite(search_s) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queue:
    """Poisson arrivals, service time ``each_s``: P(wait > t) = exp(-2 (1 - u) t / (u each_s)) at load u."""

    each_s: float
    #: Part of the requests that may wait longer than the SLO allows.
    late: float

    def wait_s(self, rate: float) -> float:
        load = rate * self.each_s
        return math.log(1.0 / self.late) * self.each_s / 2.0 * load / (1.0 - load) if load < 1 else math.inf

    def rate_within(self, wait_s: float) -> float:
        """The inverse of :meth:`wait_s`."""
        if wait_s <= 0:
            return 0.0
        if self.each_s <= 0:
            return math.inf
        return wait_s / (wait_s + math.log(1.0 / self.late) * self.each_s / 2.0) / self.each_s


def _crossing(rising: Callable[[int], float], low: int, high: int) -> float:
    """Where ``rising``, < 0 at ``low`` and >= 0 at ``high``, crosses 0; linear between whole numbers."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rising(middle) >= 0 else (middle, high)
    below, above = rising(low), rising(high)
    return low + (-below / (above - below) if above > below else 0.0)


def split_residents(setting: Setting) -> Resident:
    """Lists on all devices, beside the LLM."""
    model = None if setting.llm is None else throughput_model(setting.llm)
    return Resident(
        setting=setting,
        problem=problem_of(setting.analysis, setting.request()),
        llm_qps=(lambda nbytes: math.inf) if model is None else model.at,
    )


def _grid(residents: Resident) -> list[int]:
    """Counts from 0 to all lists that fit, denser among the hottest."""
    most = residents.most
    if most < 1:
        return [0]
    counts = np.concatenate(([0], np.geomspace(1, most, _GRID // 2), np.linspace(0, most, _GRID // 2)))
    return [int(count) for count in np.unique(np.round(counts))]


def curve_of(residents: Resident) -> tuple[CurvePoint, ...]:
    """Points from no list to all that fit."""
    return tuple(residents.point(count) for count in _grid(residents))


def least_split(residents: Resident) -> CurvePoint | None:
    """The fewest hot lists that meet rate and SLO; None where none do."""
    rate, refused = residents.setting.rate_qps, -1
    for count in _grid(residents):
        if residents.point(count).compliant_qps < rate:
            refused = count
            continue
        while count - refused > 1:
            middle = (count + refused) // 2
            if residents.point(middle).compliant_qps >= rate:
                count = middle
            else:
                refused = middle
        return residents.point(count)
    return None


def best_split(residents: Resident) -> CurvePoint:
    """The hot lists that allow the highest rate within the SLO: more lists speed up search and take the LLM's cache."""
    counts = _grid(residents)
    for _ in range(_REFINEMENTS):
        rates = [residents.point(count).compliant_qps for count in counts]
        top = int(np.argmax(rates))
        around = counts[max(top - 1, 0) : top + 2]
        halves = [(a + b) // 2 for a, b in itertools.pairwise(around)]
        if set(halves) <= set(counts):
            break
        counts = sorted({*counts, *halves})
    return max((residents.point(count) for count in counts), key=lambda p: (p.compliant_qps, -p.device_bytes))
