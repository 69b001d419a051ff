"""Serving: batching, probe split, dispatch, merge, lookahead."""

from hybridindex.router.router import Router
from hybridindex.router.session import Session, SessionStats
from hybridindex.router.stats import RouterStats

__all__ = ["Router", "RouterStats", "Session", "SessionStats"]
