"""A load whose hot set moves, with and without a refresher that follows it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.studies.simulator.arrivals import Workload
from hybridindex.studies.simulator.moving_load import DriftRules, MovingLoad
from hybridindex.studies.simulator.outcome import Outcome
from hybridindex.studies.simulator.policies import Inputs, Unservable, build_system
from hybridindex.studies.simulator.system import simulate

__all__ = ["Followed", "follow_drift"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Followed:
    """One run of ``ours``."""

    refreshed: bool
    outcome: Outcome
    #: Attainment of the requests that came before the hot set moved, of all that came after, and of the last quarter
    #: of these.
    before: float
    after: float
    at_end: float
    #: (time in seconds, what happened).
    history: tuple[tuple[float, str], ...]

    def to_data(self) -> dict[str, Any]:
        return {
            "refreshed": self.refreshed,
            "attainment": {"before": self.before, "after": self.after, "at_end": self.at_end},
            "outcome": self.outcome.to_data(),
            "history": [{"at_s": at, "what": what} for at, what in self.history],
        }


def follow_drift(inputs: Inputs, workload: Workload, rules: DriftRules) -> tuple[Followed, Followed]:
    """Simulates ``ours`` under the same requests with the refresher of ``rules``, and without it.

    Raises:
        InvalidInputError: an LLM or lookahead is given (drift does not model them), the hot set moves before the first
            request or after the last, or the resources do not allow the policy.
    """
    if inputs.llm is not None or inputs.lookahead.window_s > 0:
        raise InvalidInputError("drift is simulated of searches alone; give neither an LLM nor a lookahead window")
    last = float(workload.arrivals[-1])
    if not workload.arrivals[0] < rules.at_s < last:
        raise InvalidInputError(f"at_s is {rules.at_s:g}; the requests come until {last:.4g} s: give a time before")
    system = build_system("ours", inputs)
    if isinstance(system, Unservable):
        raise InvalidInputError(system.reason)
    found = []
    for refresh in (True, False):
        load = MovingLoad(inputs, replace(rules, refresh=refresh))
        outcome = simulate(system, workload, slo_s=inputs.slo_s, seed=inputs.seed, watch=load)
        met = outcome.search_s <= inputs.slo_s
        moved = workload.arrivals >= rules.at_s
        late = workload.arrivals >= rules.at_s + (last - rules.at_s) * 0.75
        found.append(
            Followed(
                refreshed=refresh,
                outcome=outcome,
                before=float(np.mean(met[~moved])),
                after=float(np.mean(met[moved])),
                at_end=float(np.mean(met[late])),
                history=tuple(load.history),
            )
        )
    return found[0], found[1]
