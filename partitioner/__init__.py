"""Decides which lists live on devices. Pure functions of measured data: no I/O, clock, threads, torch or SQL.

Start at :func:`hybridindex.partitioner.plan.make_plan`. ``models/`` holds what is fitted to a profile: it knows nothing
of plans.
"""

from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.partitioner.lookahead_budget import (
    LookaheadBudget,
    MissCurve,
    deadline_nprobe,
    lookahead_budget,
    miss_curve_of,
)
from hybridindex.partitioner.models.hitrate import hit_rate_to_coverage
from hybridindex.partitioner.plan import Plan, Verdict, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.partitioner.tradeoff import slo_curve

__all__ = [
    "Analysis",
    "LookaheadBudget",
    "MissCurve",
    "Plan",
    "PlanRequest",
    "Verdict",
    "analyse",
    "deadline_nprobe",
    "hit_rate_to_coverage",
    "lookahead_budget",
    "make_plan",
    "miss_curve_of",
    "slo_curve",
]
