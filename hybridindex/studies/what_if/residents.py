"""The rate that a resident set sustains within the SLO, for prefixes of the hot order beside an LLM.

Search is the planner's (:meth:`hybridindex.partitioner.solver.Problem.max_qps`). The LLM takes what its KV cache
allows, and has no queue below that rate.
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
    #: Search alone.
    _search: Problem = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._search = self.problem.at_rate(self.setting.rate_qps)

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
                hit_rate=float(curve.at(count).hit_rate.mean()),
                ttft_ms=self._ttft_ms(count) if llm >= self.setting.rate_qps else None,
                search_qps=self._search.max_qps(work, nbytes, self.setting.request().search_slo_s),
                llm_qps=llm,
            )
        return known

    def _ttft_ms(self, count: int) -> float | None:
        """TTFT with batches as large as gather while one is served."""
        search_s = self._search.nearest(self.problem.work_at(count), self.problem.prefix_bytes(count))
        return None if search_s is None else self.setting.request().slo_ms_of(search_s)


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
