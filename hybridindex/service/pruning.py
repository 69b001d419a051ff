"""Removes old plans, profiles and events from the control store; :mod:`hybridindex.store.retention` says which."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from hybridindex.errors import StoreError
from hybridindex.service.core import Service

__all__ = ["prune", "prune_now_and_then"]

_log = logging.getLogger(__name__)

_EVERY_S = 3600.0


def prune(service: Service) -> None:
    """Prunes once; a failure of the store is logged. Blocks."""
    current = service.plan()["plan_id"]
    try:
        gone = service.store.prune(service.config.retention, keep_plans=() if current is None else (current,))
    except StoreError as error:
        _log.warning("the control store was not pruned: %s", error)
        return
    if gone:
        _log.info("pruned %d plans, %d profiles and %d events", gone.plans, gone.profiles, gone.events)


async def prune_now_and_then(
    service: Service, run: Callable[[Callable[[Service], None], Service], Awaitable[None]]
) -> None:
    """Prunes every hour until cancelled, first an hour after the start. ``run``: where it may wait for the store."""
    while True:
        await asyncio.sleep(_EVERY_S)
        try:
            await run(prune, service)
        except Exception:  # noqa: BLE001 - without pruning the disk fills: the next one must come
            _log.exception("pruning failed; it is tried again in an hour")
