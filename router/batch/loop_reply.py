"""Answers for asyncio. However many requests of a batch are answered together, their event loop is woken once.

Waking a loop costs more than settling a request: a system call, during which the loop's thread takes the interpreter,
and the engine waits to get it back.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable

from hybridindex.router.batch.replies import without_frames
from hybridindex.types import SearchResult

__all__ = ["LoopMailbox", "LoopReply", "Mailboxes"]

_log = logging.getLogger(__name__)


class LoopMailbox:
    """Answers on their way to one event loop. :meth:`put` and :meth:`wake` from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrived: deque[tuple[LoopReply, SearchResult | BaseException]] = deque()
        #: A delivery is due that will see whatever was put before.
        self._woken = False

    def put(self, reply: LoopReply, outcome: SearchResult | BaseException) -> None:
        """Delivered after the next :meth:`wake`, or before."""
        self._arrived.append((reply, outcome))

    def wake(self) -> None:
        """Never raises: a loop that is closed has nobody waiting."""
        if self._woken or not self._arrived:
            return
        self._woken = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            self._arrived.clear()
            _log.warning("answers came after their event loop was closed")

    def _deliver(self) -> None:
        # First: who puts from now on wakes again.
        self._woken = False
        while True:
            try:
                reply, outcome = self._arrived.popleft()
            except IndexError:
                return
            reply.deliver(outcome)


class LoopReply:
    """A request's reply as a future of the event loop that asked. Made there; settled from any thread."""

    __slots__ = ("_mailbox", "_on_result", "future")

    def __init__(self, mailbox: LoopMailbox, on_result: Callable[[SearchResult], None] | None = None) -> None:
        """``on_result``: told an answer before anybody who waits for it, on the loop, unless that was cancelled."""
        self._mailbox = mailbox
        self._on_result = on_result
        self.future: asyncio.Future[SearchResult] = mailbox.loop.create_future()

    @property
    def wanted(self) -> bool:
        return not self.future.cancelled()

    def settle(self, result: SearchResult) -> None:
        self._mailbox.put(self, result)

    def announce(self) -> None:
        self._mailbox.wake()

    def fail(self, error: BaseException) -> None:
        self._mailbox.put(self, without_frames(error))
        self._mailbox.wake()

    def deliver(self, outcome: SearchResult | BaseException) -> None:
        """On the event loop."""
        if self.future.done():
            return
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
            return
        try:
            if self._on_result is not None:
                self._on_result(outcome)
        finally:
            self.future.set_result(outcome)


class Mailboxes:
    """One mailbox for each event loop that searches. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[asyncio.AbstractEventLoop, LoopMailbox] = {}

    def of_running_loop(self) -> LoopMailbox:
        """Raises RuntimeError outside one."""
        loop = asyncio.get_running_loop()
        found = self._of.get(loop)
        if found is None:
            with self._lock:
                # Programs that make loops again and again must not keep them all.
                self._of = {other: box for other, box in self._of.items() if not other.is_closed()}
                found = self._of[loop] = LoopMailbox(loop)
        return found
