"""Schedules, and those of them that no other beats. Holds results; searches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.studies.schedule.costs.decoding import Decoding
from hybridindex.studies.schedule.stage_pipeline import Subsystem
from hybridindex.types import F64

__all__ = ["Frontier", "Incumbents", "Schedule"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """One point: what runs where, and what it gives."""

    subsystems: tuple[Subsystem, ...]
    decoding: Decoding
    #: For retrieval.
    servers: int
    #: Until the last of a burst as large as the largest batch has its first token.
    ttft_s: float
    requests_per_s: float
    #: Chips, idle ones of the servers where those are counted, and servers where they are charged.
    cost_chips: float

    @property
    def chips(self) -> int:
        """Of all subsystems and decoding."""
        return sum(s.chips for s in self.subsystems) + self.decoding.chips

    @property
    def qps_per_chip(self) -> float:
        """Requests/s over ``cost_chips``."""
        return self.requests_per_s / self.cost_chips

    @property
    def placement(self) -> str:
        """Stages that share chips are joined by +."""
        return " | ".join("+".join(run.stage for run in s.runs) for s in self.subsystems) + " | decode"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frontier:
    """Schedules that no other beats in both time to first token and throughput per chip; fastest first, never empty."""

    schedules: tuple[Schedule, ...]
    servers: int

    @property
    def best_throughput(self) -> Schedule:
        """The most throughput per chip, whatever the time to first token."""
        return self.schedules[-1]

    @property
    def best_ttft(self) -> Schedule:
        """The least time to first token, whatever the throughput."""
        return self.schedules[0]

    def within(self, ttft_s: float) -> Schedule | None:
        """The most throughput per chip with that time to first token; None: none is so fast."""
        return next((s for s in reversed(self.schedules) if s.ttft_s <= ttft_s), None)

    def nearest(self, ttft_s: float) -> Schedule:
        """As :meth:`within`; where the goal cannot be met, the schedule that misses it by least."""
        return self.within(ttft_s) or self.best_ttft


class Incumbents:
    """The frontier so far. Not for several threads."""

    def __init__(self) -> None:
        self.schedules: list[Schedule] = []
        self._ttft = np.empty(0)
        self._value = np.empty(0)

    def beat(self, ttft: F64, value: F64) -> npt.NDArray[np.bool_]:
        """(n,) whether a known schedule is at least as good as (n,) ``ttft`` seconds and (n,) ``value``."""
        if not len(self._ttft):
            return np.zeros(len(ttft), dtype=bool)
        # Sorted by time: the last one that is not slower has the most throughput of those.
        at = np.searchsorted(self._ttft, ttft, side="right") - 1
        return np.asarray((at >= 0) & (self._value[np.maximum(at, 0)] >= value))

    def add(self, schedules: Sequence[Schedule]) -> None:
        """Takes in new schedules and drops what they beat."""
        kept: list[Schedule] = []
        for schedule in sorted([*self.schedules, *schedules], key=lambda s: (s.ttft_s, -s.qps_per_chip)):
            if not kept or schedule.qps_per_chip > kept[-1].qps_per_chip:
                kept.append(schedule)
        self.schedules = kept
        self._ttft = np.array([s.ttft_s for s in kept])
        self._value = np.array([s.qps_per_chip for s in kept])
