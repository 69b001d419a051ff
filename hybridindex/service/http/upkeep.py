"""What goes on beside the requests of one service, from its warm-up until the application ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
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
#: Time between two looks for another generation, where that is followed.
_FOLLOW_S = 1.0
#: Time between two looks whether rows were compacted into another generation.
_COMPACTED_S = 0.5
#: Time between two looks whether the control store is open and in its place.
_STORE_S = 2.0


@contextlib.asynccontextmanager
async def keep_running(service: Service, series: Series, calls: StoreCalls) -> AsyncIterator[None]:
    watch = DeviceWatch(service)

    async def sample() -> None:
        while True:
            await asyncio.sleep(_SAMPLE_S)
            try:
                await asyncio.to_thread(series.sample)
            except Exception:  # noqa: BLE001 - one sample is missing; searches go on
                _log.exception("a sample could not be taken; the next one is tried")

    async def watch_devices() -> None:
        while True:
            await asyncio.sleep(_SAMPLE_S)
            try:
                await calls.read("", watch.look)
            except OverloadedError as error:
                _log.info("devices are looked at later: %s", error)
            except Exception:  # noqa: BLE001 - the next event must be recorded
                _log.exception("devices could not be looked at; it is tried again")

    async def sweep() -> None:
        while True:
            await asyncio.sleep(min(10.0, service.config.limits.session_ttl_s / 4))
            try:
                await asyncio.to_thread(service.sessions.sweep)
                await asyncio.to_thread(service.generations.close_unused)
            except Exception:  # noqa: BLE001 - the next sweep must come
                _log.exception("sessions could not be swept; it is tried again")

    async def follow() -> None:
        while True:
            await asyncio.sleep(_FOLLOW_S)
            try:
                if await asyncio.to_thread(service.generations.changed):
                    await calls.change("", service.reload, "auto")
            except OverloadedError as error:
                _log.info("another generation is there, and waits: %s", error)
            except ReloadError:
                pass  # it is logged, counted and in the status
            except Exception:  # noqa: BLE001 - the next generation must be seen
                _log.exception("the index could not be looked at; it is tried again")

    async def follow_compactions() -> None:
        while True:
            await asyncio.sleep(_COMPACTED_S)
            try:
                if await asyncio.to_thread(_compacted, service):
                    await calls.change("", service.reload, "compaction")
            except OverloadedError as error:
                _log.info("a compacted generation is there, and waits: %s", error)
            except ReloadError:
                pass  # as above
            except Exception:  # noqa: BLE001 - the next generation must be seen
                _log.exception("the index could not be looked at; it is tried again")

    async def leave_writing(members: Members) -> None:
        while True:
            await asyncio.sleep(_FOLLOW_S)
            member = members.current
            if service.rows.keeps and member.changes.writer() != member.remote.name:
                try:
                    await asyncio.to_thread(service.rows.let_go)
                except Exception:  # noqa: BLE001 - another node waits for it
                    _log.exception("the right to write could not be given up; it is tried again")

    async def keep_store() -> None:
        while True:
            await asyncio.sleep(_STORE_S)
            try:
                if await calls.read("", service.store_changed):
                    await calls.change("", service.take_up_store)
            except OverloadedError as error:
                _log.info("the control store is looked at later: %s", error)
            except Exception:  # noqa: BLE001 - no failure ends the looks; the next one tries again
                _log.exception("the control store could not be looked at; it is tried again")

    async def warm_up() -> None:
        try:
            await asyncio.to_thread(service.warm_up)
        except Exception:  # nobody awaits this before the daemon ends: it is told now
            _log.exception("warming up failed: this daemon will not become ready")
            raise

    service.start()
    endless = [sweep(), sample(), watch_devices(), keep_store(), follow_compactions()]
    endless.append(prune_now_and_then(service, partial(calls.read, "")))
    if service.members is not None:
        endless.append(leave_writing(service.members))
    if service.config.reload == "auto":
        endless.append(follow())
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
