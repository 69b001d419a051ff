"""Calls that wait for their changes, and those that prepare some: what comes together shares a record and a sync."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, TypeVar

from hybridindex.index.live.state import LiveState
from hybridindex.index.log.change import Change

__all__ = ["Coming", "Resolve", "Ticket", "WaitingCalls"]

_T = TypeVar("_T")

#: What a change waits at most for others that are being prepared, and for those that may come: about as long as a sync
#: takes. And between two looks.
_PREPARED_S, _GATHER_S, _LOOK_S = 0.004, 0.001, 0.0001

#: Makes a change of what is asked for, from what is there now; None: nothing changes. And what the caller is told.
Resolve = Callable[[LiveState], tuple[Change | None, _T]]


class Ticket:
    """One call that waits for its change."""

    def __init__(self, resolve: Resolve[Any], ids: Collection[int] | None, *, sync: bool) -> None:
        self.resolve, self.ids, self.sync = resolve, ids, sync
        self.settled = self.leads = False
        self.result: Any = None
        self.error: BaseException | None = None
        #: Free when the call goes on.
        self._waits = threading.Lock()
        self._waits.acquire()

    def settle(self, result: Any = None, error: BaseException | None = None) -> None:
        if not self.settled:
            self.result, self.error, self.settled = result, error, True
            self.wake()

    def wait(self) -> None:
        """Until it is settled, or leads."""
        self._waits.acquire()

    def wake(self) -> None:
        with suppress(RuntimeError):  # nobody waits any more
            self._waits.release()


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
    """Of one store. One call at a time leads: it writes for all that wait. Any thread; :meth:`gather` by who leads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_led = False
        self._waiting: deque[Ticket] = deque()
        self._coming: set[Coming] = set()
        #: Calls that shared the last record.
        self._n_together = 1

    @property
    def n_coming(self) -> int:
        return len(self._coming)

    def coming(self) -> Coming:
        return Coming(self._coming)

    def put(self, ticket: Ticket, coming: Coming | None) -> bool:
        """Waits until the ticket is settled, or leads; whether it leads. Then comes :meth:`leave`, in any case.

        ``coming``: of this call; nobody waits for it any more.
        """
        with self._lock:
            self._waiting.append(ticket)
            if not self._is_led:
                self._is_led = ticket.leads = True
        if coming is not None:
            coming.end()
        if not ticket.leads:
            ticket.wait()
        return ticket.leads

    def leave(self, ticket: Ticket) -> None:
        """Its call ends, done or interrupted. Where it led, that which has waited longest leads now."""
        if ticket.settled and not ticket.leads:
            return
        with self._lock:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            if ticket.leads:
                ticket.leads, self._is_led = False, bool(self._waiting)
                if self._is_led:
                    self._waiting[0].leads = True
                    self._waiting[0].wake()

    def gather(self, tickets: list[Ticket]) -> None:
        """Appends all that wait. Before, it waits for moments itself: for changes that are being prepared, and for
        those of callers who were answered together just now. They would wait for this sync, and then for their own."""
        began = time.perf_counter()
        while self._coming or len(self._waiting) < self._n_together:
            if time.perf_counter() - began > (_PREPARED_S if self._coming else _GATHER_S):
                break
            time.sleep(_LOOK_S)
        with self._lock:
            tickets += self._waiting
            self._waiting.clear()
        self._n_together = len(tickets)
