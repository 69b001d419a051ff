"""Calls that wait for their changes, and those that prepare some: what comes together shares a record and a sync."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from hybridindex.index.live.state import LiveState
from hybridindex.index.log.change import Change

__all__ = ["Coming", "Resolve", "Ticket", "WaitingCalls"]

_T = TypeVar("_T")

#: What a change waits for others at most: about as long as a sync takes. And between two looks.
_GATHER_S, _LOOK_S = 0.001, 0.00005

#: Makes a change of what is asked for, from what is there now; None: nothing changes. And what the caller is told.
Resolve = Callable[[LiveState], tuple[Change | None, _T]]


class Ticket:
    """One call that waits for its change."""

    def __init__(self, resolve: Resolve[Any], ids: Collection[int] | None, *, sync: bool) -> None:
        self.resolve, self.ids, self.sync = resolve, ids, sync
        self.settled = False
        self.result: Any = None
        self.error: BaseException | None = None

    def settle(self, result: Any = None, error: BaseException | None = None) -> None:
        if not self.settled:
            self.result, self.error, self.settled = result, error, True


class Coming:
    """One call that prepares a change: others may wait for it. A context manager."""

    def __init__(self, calls: set[Coming]) -> None:
        self._calls = calls

    def __enter__(self) -> Coming:
        self._calls.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """It comes no more: its change waits, or it failed."""
        self._calls.discard(self)


class WaitingCalls:
    """Of one store. Any thread; :meth:`gather` by the one that writes."""

    def __init__(self) -> None:
        self._waiting: deque[Ticket] = deque()
        self._coming: set[Coming] = set()
        #: Calls that shared the last record.
        self._n_together = 1

    @property
    def n_coming(self) -> int:
        return len(self._coming)

    def coming(self) -> Coming:
        return Coming(self._coming)

    def put(self, ticket: Ticket, coming: Coming | None) -> None:
        """``coming``: of this call; nobody waits for it any more."""
        self._waiting.append(ticket)
        if coming is not None:
            coming.end()

    def gather(self) -> list[Ticket]:
        """All that wait. Before, it waits for moments itself: for changes that are being prepared, and for those of
        callers who were answered together just now. They would wait for this sync, and then for their own."""
        until = time.perf_counter() + _GATHER_S
        while (self._coming or len(self._waiting) < self._n_together) and time.perf_counter() < until:
            time.sleep(_LOOK_S)
        tickets: list[Ticket] = []
        try:
            while True:
                tickets.append(self._waiting.popleft())
        except IndexError:
            pass
        self._n_together = len(tickets)
        return tickets
