"""A thread with an asyncio loop of its own, and how many requests may be made twice: what asks other nodes has both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["HedgeBudget", "LoopThread", "new_event_loop"]

_T = TypeVar("_T")

#: Requests that may be made twice: one in ten, and so many at once.
_SHARE, _MOST = 0.1, 20.0


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, where it is installed (the extra ``speed``): it wakes in half the time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class LoopThread:
    """Owner of both. Methods may be called from other threads."""

    def __init__(self, *, name: str) -> None:
        self.loop = new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Has it called there; does not wait."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Has it run there, and waits for what it returns or raises."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def is_current(self) -> bool:
        """Whether this thread asks."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Ends both. Once."""
        self.call(self.loop.stop)
        self._thread.join()


class HedgeBudget:
    """Keeps nodes that are all slow from being asked twice as much. On one thread."""

    def __init__(self) -> None:
        self._left = _MOST

    def earn(self) -> None:
        """A request was made."""
        self._left = min(_MOST, self._left + _SHARE)

    def spend(self, n_late: int, n_other: int) -> bool:
        """Whether one more may be made twice; it is counted. Not where the other node has much more than half as much
        to do: it would hardly be faster, and where all nodes are busy hedges make all of them slower.

        Args:
            n_late: requests under way at the node that is late.
            n_other: at the one that would be asked, too.
        """
        if self._left < 1 or 2 * n_other >= n_late + 2:
            return False
        self._left -= 1
        return True
