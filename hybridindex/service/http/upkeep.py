"""What goes on beside the requests of one service, from its warm-up until the application ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from hybridindex.errors import OverloadedError, ReloadError
from hybridindex.service.changes.members import Members
from hybridindex.service.core import Service
from hybridindex.service.http.store_calls import StoreCalls
from hybridindex.service.observe.events import DeviceWatch
from hybridindex.service.observe.series import Series
from hybridindex.service.pruning import prune_now_and_then

__all__ = ["keep_running"]

_log = logging.getLogger(__name__)

#: Time between two samples of the series.
_SAMPLE_S = 1.0
#: Time between two checks for another generation, where that is followed.
_FOLLOW_S = 1.0
#: Time between two checks for a generation into which rows were compacted.
_COMPACTED_S = 0.5
#: Time between two checks that the control store is open and in its place.
_STORE_S = 2.0


async def _repeat(every_s: float, what: str, step: Callable[[], Awaitable[None]]) -> None:
    """Runs ``step`` every ``every_s`` seconds until it is cancelled; no failure ends it."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await step()
        except OverloadedError as error:
            _log.info("%s must wait: %s", what, error)
        except ReloadError:
            pass  # the reload logged and counted it, and the status shows it
        except Exception:  # noqa: BLE001 - the next step must come
            _log.exception("%s failed; it is tried again", what)


@contextlib.asynccontextmanager
async def keep_running(service: Service, series: Series, calls: StoreCalls) -> AsyncIterator[None]:
    """Runs a service's periodic work while the context is open; the service is warmed up meanwhile."""
    watch = DeviceWatch(service)

    async def sample() -> None:
        await asyncio.to_thread(series.sample)

    async def watch_devices() -> None:
        await calls.read("", watch.look)

    async def sweep() -> None:
        await asyncio.to_thread(service.sessions.sweep)
        await asyncio.to_thread(service.generations.close_unused)

    async def follow() -> None:
        if await asyncio.to_thread(service.generations.changed):
            await calls.change("", service.reload, "auto")

    async def follow_compactions() -> None:
        if await asyncio.to_thread(_compacted, service):
            await calls.change("", service.reload, "compaction")

    async def leave_writing(members: Members) -> None:
        member = members.current
        if service.rows.keeps and member.changes.writer() != member.remote.name:
            await asyncio.to_thread(service.rows.let_go)

    async def keep_store() -> None:
        if await calls.read("", service.store_changed):
            await calls.change("", service.take_up_store)

    async def warm_up() -> None:
        try:
            await asyncio.to_thread(service.warm_up)
        except Exception:  # nobody awaits this before the daemon ends: it is told now
            _log.exception("warming up failed: this daemon will not become ready")
            raise

    service.start()
    endless = [
        _repeat(min(10.0, service.config.limits.session_ttl_s / 4), "closing unused sessions and generations", sweep),
        _repeat(_SAMPLE_S, "taking a sample", sample),
        _repeat(_SAMPLE_S, "checking the devices", watch_devices),
        _repeat(_STORE_S, "checking the control store", keep_store),
        _repeat(_COMPACTED_S, "checking for a compacted generation", follow_compactions),
        prune_now_and_then(service, partial(calls.read, "")),
    ]
    if service.members is not None:
        endless.append(_repeat(_FOLLOW_S, "giving up the right to write", partial(leave_writing, service.members)))
    if service.config.reload == "auto":
        endless.append(_repeat(_FOLLOW_S, "checking for another generation", follow))
    tasks = [asyncio.create_task(work) for work in (warm_up(), *endless)]
    try:
        yield
    finally:
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        calls.close()


def _compacted(service: Service) -> bool:
    """Whether the service's own compaction made another generation, or those of other processes left the one that
    serves behind, so that it cannot know of changes any more; and no reload has met it. Blocks."""
    current = service.generations.current
    changes = current.index.ivf.rows.live
    # Also where nobody searches: what it does not read in time is lost.
    changes.current()
    left = service.rows.is_ahead_of(current.generation) or changes.lost is not None
    return left and service.generations.changed()
