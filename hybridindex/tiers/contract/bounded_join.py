"""Closing in bounded time: a thread whose scan or copy never ends is left behind, with the memory it may still use.

Work on a device cannot be cancelled, so memory under a running scan or copy is never freed. Our threads are daemons and
hold what they use: it is freed when they end, or with the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["LOOK_S", "join_within"]

#: Longest time between two checks.
LOOK_S = 0.25


def join_within(thread: threading.Thread, limit_s: float | None, may_leave: Callable[[], bool] = lambda: True) -> bool:
    """Joins a thread; False when it did not end in time and is left behind.

    Args:
        limit_s: longest wait; None: no limit. Counted in checks, not by the clock: a process that was stopped for a
            while does not give up for that.
        may_leave: asked at each check after the limit; while it is False, the wait goes on.
    """
    if limit_s is None:
        thread.join()
        return True
    look_s = min(LOOK_S, limit_s / 4)
    waited_s = 0.0
    while True:
        thread.join(look_s)
        if not thread.is_alive():
            return True
        waited_s += look_s
        if waited_s >= limit_s and may_leave():
            return False
        look_s = look_s or LOOK_S
