"""The order in which moves get their turns: foreground before background, and background at its share of the time.

Pure: no thread, no clock; times are arguments. A move sends one buffer per step, and can be overtaken between steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from hybridindex.errors import InvalidInputError

__all__ = ["CopyQueue", "check_share"]

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class _Background(Generic[M]):
    move: M
    share: float


class CopyQueue(Generic[M]):
    """Two queues, each first come, first served. Not thread-safe: its owner locks."""

    def __init__(self) -> None:
        self._foreground: deque[M] = deque()
        self._background: deque[_Background[M]] = deque()
        #: When the next background step may start.
        self._rest_until_s = float("-inf")

    def put(self, move: M, bandwidth_share: float | None = None) -> None:
        """Queues a move; with a share (0 < share <= 1) it is a background move."""
        if bandwidth_share is None:
            self._foreground.append(move)
        else:
            self._background.append(_Background(move, bandwidth_share))

    def next(self, now_s: float, *, hurry: bool = False) -> tuple[M | None, float | None]:
        """The move whose turn it is; or None and the seconds to rest; or None and None when nothing waits.

        ``hurry``: background moves do not rest any more.
        """
        if self._foreground:
            return self._foreground[0], None
        if not self._background:
            return None, None
        rest_s = self._rest_until_s - now_s
        if rest_s > 0 and not hurry:
            return None, rest_s
        return self._background[0].move, None

    def stepped(self, move: M, *, more: bool, busy_s: float, now_s: float) -> None:
        """Notes that ``move``, given by :meth:`next`, took a step of ``busy_s`` which ended at ``now_s``."""
        if self._foreground and self._foreground[0] is move:
            if not more:
                self._foreground.popleft()
            return
        head = self._background[0]
        assert head.move is move, "a move was stepped out of turn"
        self._rest_until_s = now_s + busy_s * (1 / head.share - 1)
        if not more:
            self._background.popleft()

    def __iter__(self) -> Iterator[M]:
        yield from self._foreground
        for waiting in self._background:
            yield waiting.move

    def __len__(self) -> int:
        return len(self._foreground) + len(self._background)


def check_share(bandwidth_share: float | None) -> float | None:
    """A share of the copy time, or None for a foreground move.

    Raises:
        InvalidInputError: not above 0 and at most 1.
    """
    if bandwidth_share is not None and not 0 < bandwidth_share <= 1:
        raise InvalidInputError(f"bandwidth_share is {bandwidth_share!r}; expected 0 < share <= 1, or None")
    return bandwidth_share
