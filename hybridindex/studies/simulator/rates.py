"""The highest rate at which enough requests meet the SLO, by bisection over simulated runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridindex.errors import InvalidInputError
from hybridindex.studies.simulator.arrivals import check_number
from hybridindex.studies.simulator.outcome import Outcome

__all__ = ["RateFound", "compliant_rate"]

_PRECISION = 0.01
#: Between the lowest and the highest rate that is tried.
_LEAST_FACTOR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class RateFound:
    """An SLO-compliant rate, and the rates that were tried."""

    #: Requests per second; 0 where no tried rate is compliant.
    rate: float
    attainment_goal: float
    #: (rate, attainment) of every run, in order.
    tried: tuple[tuple[float, float], ...]
    #: True where the highest tried rate is compliant.
    at_ceiling: bool

    def to_data(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "attainment_goal": self.attainment_goal,
            "tried": [list(pair) for pair in self.tried],
            "at_ceiling": self.at_ceiling,
        }


def compliant_rate(run: Callable[[float], Outcome], *, attainment: float = 0.9, ceiling: float) -> RateFound:
    """The largest rate up to ``ceiling`` whose run attains at least ``attainment``, within 1 %.

    ``run`` simulates one rate under an SLO. With the same seed for all rates, attainment falls with the rate but for a
    little noise.

    Raises:
        InvalidInputError: ``attainment`` is no part in (0, 1], or ``ceiling`` is not positive.
    """
    if not 0 < attainment <= 1:
        raise InvalidInputError(f"attainment is {attainment}; give a part of the requests in (0, 1]")
    check_number("ceiling", ceiling, above=0.0)
    tried: list[tuple[float, float]] = []

    def met(rate: float) -> bool:
        reached = run(rate).attainment
        assert reached is not None, "a compliant rate needs an SLO"
        tried.append((rate, reached))
        return reached >= attainment

    def found(rate: float, *, at_ceiling: bool = False) -> RateFound:
        return RateFound(rate=rate, attainment_goal=attainment, tried=tuple(tried), at_ceiling=at_ceiling)

    if met(ceiling):
        return found(ceiling, at_ceiling=True)
    low, high = ceiling * _LEAST_FACTOR, ceiling
    if not met(low):
        return found(0.0)
    while high > low * (1 + _PRECISION):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if met(middle) else (low, middle)
    return found(low)
