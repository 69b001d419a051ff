"""Runs what may wait for the control store or a disk, on threads of its own: searches, sessions and health never wait.

Fair between clients, like the queue of searches: reads and changes of rows have a few threads each, changes of the plan
go one after the other, and so do changes of documents.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from hybridindex.errors import DeadlineExceededError, OverloadedError
from hybridindex.service.admission import Admission
from hybridindex.service.config import Limits

__all__ = ["StoreCalls"]

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = 4
#: Changes of rows that are under way at once share one write to the disk.
_WRITERS = 8
#: Calls that may wait, over all clients.
_QUEUE = 64
#: Longest wait for the change of another client; moving its lists may take minutes.
_CHANGE_S = 5.0


class StoreCalls:
    """The threads and the lines in front of them. Methods on the event loop."""

    def __init__(self, clock: Callable[[], float], *, client_share: float) -> None:
        """``clock``: monotonic seconds. ``client_share``: part of each line that one client may fill."""
        self._clock = clock
        limits = Limits(queue_queries=_QUEUE, in_flight_queries=_THREADS, client_share=client_share)
        self._reads = Admission(limits, clock, unit="calls")
        limits = Limits(queue_queries=_QUEUE, in_flight_queries=1, client_share=client_share)
        self._changes = Admission(limits, clock, unit="changes")
        limits = Limits(queue_queries=_QUEUE, in_flight_queries=_WRITERS, client_share=client_share)
        self._writes = Admission(limits, clock, unit="changes")
        limits = Limits(queue_queries=_QUEUE, in_flight_queries=1, client_share=client_share)
        self._documents = Admission(limits, clock, unit="changes")
        self._texts = ThreadPoolExecutor(1, "hybridindex-documents")
        self._writers = ThreadPoolExecutor(_WRITERS, "hybridindex-rows")
        self._readers = ThreadPoolExecutor(_THREADS, "hybridindex-store")
        self._changer = ThreadPoolExecutor(1, "hybridindex-change")

    async def read(self, client: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``call`` returns.

        Raises:
            OverloadedError: too many wait.
        """
        await self._reads.enter(client, 1)
        return await _run(self._readers, self._reads, call, *args, **kwargs)

    async def write(self, client: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As :meth:`read`, for changes of rows."""
        await self._writes.enter(client, 1)
        return await _run(self._writers, self._writes, call, *args, **kwargs)

    async def write_documents(self, client: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As :meth:`read`, for changes of documents: embedding takes long, and rows do not wait for it."""
        await self._documents.enter(client, 1)
        return await _run(self._texts, self._documents, call, *args, **kwargs)

    async def change(self, client: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As :meth:`read`, for what only one may do at a time.

        Raises:
            OverloadedError: the one that is under way takes long, or too many wait.
        """
        try:
            await self._changes.enter(client, 1, self._clock() + _CHANGE_S)
        except DeadlineExceededError:
            raise OverloadedError("another change of the plan or index is under way", retry_after_s=5) from None
        return await _run(self._changer, self._changes, call, *args, **kwargs)

    def close(self) -> None:
        """Lets the threads end when their calls do."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(wait=False, cancel_futures=True)
        self._texts.shutdown(wait=False, cancel_futures=True)
        self._changer.shutdown(wait=False, cancel_futures=True)


def _run(
    threads: ThreadPoolExecutor, line: Admission, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> asyncio.Future[T]:
    """The turn ends with the call, also where nobody waits for it any more."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()

    def ended(_future: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(line.leave, 1)

    try:
        running = threads.submit(context.run, functools.partial(call, *args, **kwargs))
    except RuntimeError:
        line.leave(1)
        raise OverloadedError("the daemon is about to stop", retry_after_s=1) from None
    running.add_done_callback(ended)
    return asyncio.wrap_future(running)
