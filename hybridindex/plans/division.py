"""Plans of several indexes that share the bytes of the same devices.

:mod:`hybridindex.partitioner.division` divides the bytes; here each share becomes a plan. A plan's own budgets then are
its share, so that a router that is opened with it takes no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.division import divide
from hybridindex.partitioner.plan import Plan, make_plan
from hybridindex.partitioner.request import PlanRequest

__all__ = ["Divided", "Wanted", "divide_plans"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """What is asked for one index, and what is known of it."""

    analysis: Analysis
    request: PlanRequest

    @classmethod
    def by(cls, plan: Plan) -> Wanted:
        """The same again."""
        return cls(analysis=plan.analysis, request=plan.request)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Divided:
    """One index's part."""

    plan: Plan
    #: Of each device; the plan's own budgets.
    share_bytes: tuple[int, ...]
    #: Fewest bytes of all devices that keep its SLO, or its fixed coverage; None: none do.
    needs_bytes: int | None


def divide_plans(
    wanted: Mapping[str, Wanted], budgets: Sequence[int], *, lookahead_bytes: int = 0
) -> dict[str, Divided]:
    """A plan for each index, all within ``budgets``, the bytes of each device.

    Args:
        lookahead_bytes: of each device, that each index keeps for sessions besides its lists, as far as there are any.
    """
    kept = [min(lookahead_bytes, budget // max(1, len(wanted))) for budget in budgets]
    left = [budget - len(wanted) * own for budget, own in zip(budgets, kept, strict=True)]
    shares = divide([(each.analysis, each.request) for each in wanted.values()], left)
    divided = {}
    for (name, each), share in zip(wanted.items(), shares, strict=True):
        own = tuple(a + b for a, b in zip(share.budgets, kept, strict=True))
        request = share.request.within(own, share.request.fill_bytes)
        plan = make_plan(each.analysis.profile, request, analysis=each.analysis)
        divided[name] = Divided(plan=plan, share_bytes=own, needs_bytes=share.needs_bytes)
    return divided
