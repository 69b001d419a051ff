"""Closing in bounded time: a thread whose scan or copy never ends is left behind, with the memory it may still use.

Nothing on a device can be called back, so memory under a scan or a copy that goes on is never freed. Our threads are
daemons, and hold what they use: what is left behind goes when they end, or with the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["LOOK_S", "join_within"]

#: Longest time between two looks at what does not end.
LOOK_S = 0.25


def join_within(thread: threading.Thread, limit_s: float | None, may_leave: Callable[[], bool] = lambda: True) -> bool:
    """Joins a thread; False where it is to be left behind.

    Args:
        limit_s: None: it ends. Else it is left after so long. Counted in looks and not by the clock: a process that
            was stopped for a while gives nobody up.
        may_leave: asked then at each look; while it is False the thread is waited for.
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
