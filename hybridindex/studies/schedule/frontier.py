"""Schedules, and the Pareto frontier of those that no other beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.studies.schedule.stages.decoding import Decoding
from hybridindex.studies.schedule.stages.stage_pipeline import Subsystem
from hybridindex.types import F64

__all__ = ["Frontier", "Incumbents", "Schedule"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """One point of a frontier: what runs where, and its performance."""

    subsystems: tuple[Subsystem, ...]
    decoding: Decoding
    #: Servers for retrieval.
    servers: int
    #: Until the last request of a burst as large as the largest batch has its first token.
    ttft_s: float
    requests_per_s: float
    #: Chips (idle ones too with ``whole_servers``), and servers at ``server_cost_chips`` each.
    cost_chips: float

    @property
    def chips(self) -> int:
        """Chips of all subsystems and of decoding."""
        return sum(s.chips for s in self.subsystems) + self.decoding.chips

    @property
    def qps_per_chip(self) -> float:
        """Requests/s over ``cost_chips``."""
        return self.requests_per_s / self.cost_chips

    @property
    def placement(self) -> str:
        """The groups of stages; + joins stages that share chips."""
        return " | ".join("+".join(run.stage for run in s.runs) for s in self.subsystems) + " | decode"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frontier:
    """Schedules that no other beats in both time to first token and throughput per chip; fastest first, never empty."""

    schedules: tuple[Schedule, ...]
    servers: int

    @property
    def best_throughput(self) -> Schedule:
        """The schedule with the most throughput per chip."""
        return self.schedules[-1]

    @property
    def best_ttft(self) -> Schedule:
        """The schedule with the least time to first token."""
        return self.schedules[0]

    def within(self, ttft_s: float) -> Schedule | None:
        """The schedule with the most throughput per chip within ``ttft_s``; None where none is so fast."""
        return next((s for s in reversed(self.schedules) if s.ttft_s <= ttft_s), None)

    def nearest(self, ttft_s: float) -> Schedule:
        """:meth:`within`, or the fastest schedule where none meets the goal."""
        return self.within(ttft_s) or self.best_ttft


#: Relative. Sums of the same terms in another order differ by less: such schedules are as good as each other.
_SAME = 1e-12


class Incumbents:
    """The frontier so far. Not thread-safe."""

    def __init__(self) -> None:
        self.schedules: list[Schedule] = []
        self._ttft = np.empty(0)
        self._value = np.empty(0)

    def beat(self, ttft: F64, value: F64) -> npt.NDArray[np.bool_]:
        """(n,) whether a known schedule is at least as good in both ``ttft`` (n,) seconds and ``value`` (n,)."""
        if not len(self._ttft):
            return np.zeros(len(ttft), dtype=bool)
        # Sorted by time: the last one that is not slower has the most throughput among those.
        at = np.searchsorted(self._ttft, ttft, side="right") - 1
        return np.asarray((at >= 0) & (self._value[np.maximum(at, 0)] >= value * (1 - _SAME)))

    def add(self, schedules: Sequence[Schedule]) -> None:
        """Adds schedules and drops what they beat."""
        kept: list[Schedule] = []
        for schedule in sorted([*self.schedules, *schedules], key=lambda s: (s.ttft_s, -s.qps_per_chip)):
            if not kept or schedule.qps_per_chip > kept[-1].qps_per_chip * (1 + _SAME):
                if kept and schedule.ttft_s <= kept[-1].ttft_s * (1 + _SAME):
                    kept.pop()
                kept.append(schedule)
        self.schedules = kept
        self._ttft = np.array([s.ttft_s for s in kept])
        self._value = np.array([s.qps_per_chip for s in kept])
