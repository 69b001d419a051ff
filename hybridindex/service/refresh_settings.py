"""The table [refresh] of a settings file: what follows the load of a served index, where it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from hybridindex.api import Index
from hybridindex.refresh.config import RefreshConfig
from hybridindex.refresh.refresher import Refresher
from hybridindex.router.router import Router
from hybridindex.service.settings import Settings, Table
from hybridindex.store.control import ControlStore

__all__ = ["MakeRefresher", "refresher_of"]

MakeRefresher = Callable[[Index, Router, ControlStore], Refresher]


def refresher_of(settings: Settings, given: Table, *, asked: bool | None) -> MakeRefresher | None:
    """How to make a refresher; None where neither the table nor ``asked`` wants one.

    Args:
        settings: of a file.
        given: what overrides it, as its tables.
        asked: None: what the file says.

    Raises:
        InvalidInputError: a bad value, also where none is wanted.
    """
    config = settings.only("refresh").build(RefreshConfig, given.get("refresh"), table="refresh")
    if not ("refresh" in settings.names() if asked is None else asked):
        return None
    return lambda index, router, store: Refresher(index, router, store, config)
