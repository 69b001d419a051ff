"""Compares policies under one workload: a run of each, and the highest rate at which it meets the SLO."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridindex.studies.simulator.arrivals import Workload
from hybridindex.studies.simulator.outcome import Outcome
from hybridindex.studies.simulator.policies import Inputs, Unservable, build_system
from hybridindex.studies.simulator.rates import RateFound, compliant_rate
from hybridindex.studies.simulator.system import System, simulate

__all__ = ["Compared", "compare_policies"]

#: Highest rate that is tried, over the rate that the stages sustain.
_CEILING = 1.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """One policy's outcome, or why there is none."""

    policy: str
    outcome: Outcome | None
    compliant: RateFound | None
    #: Bytes of the resident lists with pages and scratch.
    index_bytes: int
    refused: str

    def meets(self, attainment: float) -> bool:
        return self.outcome is not None and (self.outcome.attainment or 0.0) >= attainment

    def to_data(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "refused": self.refused,
            "index_bytes": self.index_bytes,
            "outcome": None if self.outcome is None else self.outcome.to_data(),
            "compliant_rate": None if self.compliant is None else self.compliant.to_data(),
        }


def compare_policies(
    names: Sequence[str],
    inputs: Inputs,
    workload: Callable[[float], Workload],
    *,
    attainment: float = 0.9,
    find_rate: bool = True,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> list[Compared]:
    """Simulates every policy at ``inputs.rate`` with the same requests; ``workload`` gives the requests at a rate.

    Raises:
        InvalidInputError: an unknown policy, or an input that is out of range.
    """
    found = []
    for number, name in enumerate(names):
        if progress is not None:
            progress("simulate", number, len(names))
        system = build_system(name, inputs)
        if isinstance(system, Unservable):
            found.append(Compared(policy=name, outcome=None, compliant=None, index_bytes=0, refused=system.reason))
            continue
        found.append(_compared(system, inputs, workload, attainment, find_rate))
    if progress is not None:
        progress("simulate", len(names), len(names))
    return found


def _compared(
    system: System, inputs: Inputs, workload: Callable[[float], Workload], attainment: float, find_rate: bool
) -> Compared:
    def run(rate: float) -> Outcome:
        return simulate(system, workload(rate), slo_s=inputs.slo_s, seed=inputs.seed)

    limits = [system.table.capacity(), math.inf if system.llm is None else system.llm.capacity_rps]
    return Compared(
        policy=system.name,
        outcome=run(inputs.rate),
        compliant=compliant_rate(run, attainment=attainment, ceiling=_CEILING * min(limits)) if find_rate else None,
        index_bytes=system.table.resident_bytes,
        refused="",
    )
