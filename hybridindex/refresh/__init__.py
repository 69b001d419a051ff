"""Keeps the served plan up to date: when (drift), what (proposal, planner), in which order (update_cycle), verified.

:class:`Refresher` is what a serving process holds. Loaded when first used: the planning process needs little of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridindex.refresh.config import RefreshConfig, RefreshStatus, UpdateRecord
    from hybridindex.refresh.proposal import Proposal
    from hybridindex.refresh.refresher import Refresher

__all__ = ["Proposal", "RefreshConfig", "RefreshStatus", "Refresher", "UpdateRecord"]

_HOMES = {"Proposal": "proposal", "Refresher": "refresher"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'config')}"), name)
