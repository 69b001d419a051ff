"""Which batches may be in flight."""

from __future__ import annotations

import queue

__all__ = ["Slot"]


class Slot:
    """Permission for one batch to be in flight. Given back once: at its end, when the host takes over a part, or when
    only other nodes have something left to scan."""

    __slots__ = ("_held",)

    def __init__(self, slots: queue.SimpleQueue[None]) -> None:
        """``slots``: a token of which was taken."""
        self._held = [slots]

    def give_back(self) -> None:
        try:
            slots = self._held.pop()
        except IndexError:
            return
        slots.put(None)
