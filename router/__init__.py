"""Serving: batching, probe split, dispatch, merge, lookahead."""

from hybridindex.config import HealthPolicy
from hybridindex.router.batch.stages import BatchReport, StageSum, StageTime
from hybridindex.router.batch.stats import RouterStats
from hybridindex.router.router import Router
from hybridindex.router.session import Session, SessionStats

__all__ = ["BatchReport", "HealthPolicy", "Router", "RouterStats", "Session", "SessionStats", "StageSum", "StageTime"]
