"""Serving: batching, probe split, dispatch, merge, lookahead."""

from hybridindex.router.health import HealthPolicy
from hybridindex.router.router import Router
from hybridindex.router.session import Session, SessionStats
from hybridindex.router.stages import BatchReport, StageSum, StageTime
from hybridindex.router.stats import RouterStats

__all__ = ["BatchReport", "HealthPolicy", "Router", "RouterStats", "Session", "SessionStats", "StageSum", "StageTime"]
