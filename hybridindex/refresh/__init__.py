"""Keeps the served plan up to date: when (drift), what (planner), in which order (update_cycle), verified.

:class:`Refresher` is what a serving process holds. Names are loaded when first used: the planning process needs few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridindex.plans.proposal import Proposal
    from hybridindex.plans.replan import PlanChanges
    from hybridindex.refresh.config import RefreshConfig, RefreshStatus, UpdateRecord
    from hybridindex.refresh.refresher import Refresher

__all__ = ["PlanChanges", "Proposal", "RefreshConfig", "RefreshStatus", "Refresher", "UpdateRecord"]

_HOMES = {
    "PlanChanges": "hybridindex.plans.replan",
    "Proposal": "hybridindex.plans.proposal",
    "Refresher": "hybridindex.refresh.refresher",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "last_committed_plan":
        import warnings

        text = "hybridindex.refresh.last_committed_plan is now hybridindex.plans.current.current_plan; it ends with 0.3"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return import_module("hybridindex.plans.current").current_plan
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "hybridindex.refresh.config")), name)
