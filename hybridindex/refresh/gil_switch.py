"""The switch interval of the GIL, for the time of a block: how long a thread that runs Python keeps others waiting.

A search takes the GIL several times, and waits for up to an interval each time that another thread runs Python. The
process has one interval. Who shortens it restores it, also while it only waits: busy threads would switch for nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["SHORT_S", "short_switch_interval", "usual_switch_interval"]

#: A small part of a small search. A thread that ran Python beside searches did as much in a second as at 0.5 ms.
SHORT_S = 0.00005


class _SwitchInterval:
    """Owner of the interval. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Blocks of all threads that want it short, and the interval before the first.
        self._users = 0
        self._usual_s = 0.0
        #: ``depth``: blocks that this thread is in.
        self._own = threading.local()

    def shorten(self) -> None:
        with self._lock:
            if not self._users:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_s, SHORT_S))
            self._users += 1

    def restore(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                sys.setswitchinterval(self._usual_s)

    @contextmanager
    def short(self) -> Iterator[None]:
        """Threads that wait for the GIL get it after :data:`SHORT_S`; its usual interval is 5 ms."""
        self.shorten()
        self._own.depth = self._depth() + 1
        try:
            yield
        finally:
            self._own.depth -= 1
            self.restore()

    @contextmanager
    def usual(self) -> Iterator[None]:
        """Within :meth:`short` on the same thread: the interval as it was, as far as this thread is concerned."""
        if not self._depth():
            yield
            return
        self.restore()
        try:
            yield
        finally:
            self.shorten()

    def _depth(self) -> int:
        depth: int = getattr(self._own, "depth", 0)
        return depth


_interval = _SwitchInterval()
short_switch_interval = _interval.short
usual_switch_interval = _interval.usual
