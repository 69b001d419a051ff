"""What an index whose device bytes are a share asks of who divides them; ``service/several`` does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hybridindex.partitioner.plan import Plan
from hybridindex.service.serving import PlanChoice

__all__ = ["Division", "Shares"]


class Division(Protocol):
    """One budget divided anew, of which one index's plan is about to be applied."""

    @property
    def plan(self) -> Plan:
        """Of that index, within its new share."""

    @property
    def room_bytes(self) -> tuple[int, ...]:
        """What its lists may take of each device."""

    def refuse(self, *, force: bool) -> None:
        """Raises InfeasiblePlanError where another index would lose its SLO, unless ``force``."""

    def carried_out(self) -> AbstractContextManager[None]:
        """Around the change: the others give their bytes before it, and take theirs after it."""

    def to_data(self) -> dict[str, Any]:
        """JSON-able, by the index's name."""


class Shares(Protocol):
    """Who divides one budget of device bytes between several indexes, each known by its name."""

    #: Held while any of their plans or generations changes.
    changing: threading.Lock

    def divide(self, own: str, plan: Plan, budget: int | Sequence[int] | None) -> Division:
        """With what ``plan`` is asked for, in place of the plan in force; ``budget``: another one to divide."""

    def refit(self, own: str, choice: PlanChoice) -> PlanChoice:
        """The plan with which the devices of another generation may be opened; the others have made room for it."""
