"""Which batches may be in flight."""

from __future__ import annotations

import queue

__all__ = ["Slot", "share_slot"]


class Slot:
    """Permission for one batch to be in flight. Given back once: at its end, when the host takes over a part, or when
    only other nodes have something left to scan."""

    __slots__ = ("_held",)

    def __init__(self, left: list[queue.SimpleQueue[None] | None]) -> None:
        """``left``: one entry for each slot that is still held, the first with the token for all."""
        self._held = [left]

    def give_back(self) -> None:
        try:
            left = self._held.pop()
        except IndexError:
            return
        if (slots := left.pop()) is not None:
            slots.put(None)


def share_slot(slots: queue.SimpleQueue[None], n: int = 1) -> list[Slot]:
    """For ``n`` batches of one turn: the token, of which one was taken from ``slots``, goes back with the last."""
    left: list[queue.SimpleQueue[None] | None] = [slots, *[None] * (n - 1)]
    return [Slot(left) for _ in range(n)]
