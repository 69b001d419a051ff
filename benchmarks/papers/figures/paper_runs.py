"""Loads of :mod:`benchmarks.papers.figures.paper_server`, simulated once each: attainment, rates within the SLO,
gains.
"""

from __future__ import annotations

from functools import cache

from benchmarks.papers.figures.paper_server import INDEXES, LLMS, POLICIES, Panel
from hybridindex.studies.simulator import EngineRules, Outcome, System, Unservable, compliant_rate, poisson, simulate

__all__ = ["compliant", "gain", "panels", "run", "system_of"]

REQUESTS = 2000


@cache
def system_of(panel: Panel, policy: str, early: bool = True) -> System | Unservable:
    return panel.system(policy, EngineRules(early_dispatch=early))


def run(panel: Panel, policy: str, rate: float, *, early: bool = True) -> Outcome:
    """One simulated load of a panel; the same requests for every policy."""
    system = system_of(panel, policy, early)
    assert isinstance(system, System), system
    return simulate(system, poisson(rate, REQUESTS, seed=1), slo_s=panel.slo_s)


@cache
def compliant(panel: Panel, policy: str) -> float:
    """Highest rate at which the panel's percentile of requests meets the SLO; 0 where none does or none can."""
    system = system_of(panel, policy)
    if isinstance(system, Unservable) or system.llm is None:
        return 0.0
    ceiling = 1.2 * min(system.table.capacity(), system.llm.capacity_rps)
    found = compliant_rate(lambda rate: run(panel, policy, rate), attainment=panel.percentile / 100.0, ceiling=ceiling)
    # Below a fiftieth of the LLM's throughput only lone requests meet it.
    return found.rate if found.rate > panel.profile.throughput_rps / 50 else 0.0


def panels() -> list[Panel]:
    """Figure 11's nine."""
    return [Panel(index=index, llm=llm) for index in INDEXES for llm in LLMS]


def gain(panel: Panel) -> float:
    """Our rate within the SLO over the best baseline's."""
    return compliant(panel, "ours") / max(compliant(panel, policy) for policy in POLICIES[1:])
