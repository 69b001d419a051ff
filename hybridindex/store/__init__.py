"""Control store: what was measured, decided and happened. SQLAlchemy over SQLite or PostgreSQL."""

from __future__ import annotations

from hybridindex.store.control import ControlStore
from hybridindex.store.records import PlanRecord, PlanSummary, ProfileSummary, StoredEvent, StoredPlan

__all__ = ["ControlStore", "PlanRecord", "PlanSummary", "ProfileSummary", "StoredEvent", "StoredPlan"]
