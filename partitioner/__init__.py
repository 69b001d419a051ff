"""Decides which lists live on devices. Pure functions of measured data: no I/O, clock, threads, torch or SQL.

Start at :func:`hybridindex.partitioner.plan.make_plan`. Beside it, schedules of whole RAG pipelines on machines that
are not here (:mod:`hybridindex.studies.schedule`), from profiles of chips, servers and models. Only those two read
files: ``hardware/__init__.py`` the profiles, ``schedule/schema.py`` the pipelines.
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
from hybridindex.partitioner.reportdata import coverage_series, latency_series, slo_curve
from hybridindex.partitioner.request import PlanRequest

__all__ = [
    "Analysis",
    "LookaheadBudget",
    "MissCurve",
    "Plan",
    "PlanRequest",
    "Verdict",
    "analyse",
    "coverage_series",
    "deadline_nprobe",
    "hit_rate_to_coverage",
    "latency_series",
    "lookahead_budget",
    "make_plan",
    "miss_curve_of",
    "slo_curve",
]
