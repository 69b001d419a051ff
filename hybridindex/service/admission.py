"""A bounded queue, counted in queries, in front of the router.

A request that finds room starts at once. The others wait in fair order: the client that was given the fewest queries
goes first (start-time fair queueing: Goyal, Vin, Cheng 1996, with queries as the length of a packet); within a client,
first come, first served. A request that cannot start before its deadline, at the current pace, is refused at once; one
that was admitted and is late is answered without a search. An admitted request is never dropped for another.
:mod:`hybridindex.partitioner.fair_shares` says how much of the queue one client may fill. A large request takes several
turns, so that others need not wait for the whole of it.

Threading: one event loop, no locks. The caller searches.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from hybridindex.errors import DeadlineExceededError, OverloadedError
from hybridindex.partitioner.fair_shares import ShareRule
from hybridindex.service.config import Limits

__all__ = ["UNKNOWN_RETRY_S", "Admission", "Lack"]

#: Why a request is refused: the daemon stops, the queue or the client's share of it is full, the deadline is too near.
Lack = Literal["draining", "queue", "client", "deadline"]

#: Time constant: after so many seconds of work, earlier measurements count for a third.
_PACE_S = 2.0
#: Accounts of clients that are kept before idle ones are removed.
_MAX_ACCOUNTS = 4096
_MIN_RETRY_S, _MAX_RETRY_S = 0.03, 30.0
#: Advised wait while no pace is known.
UNKNOWN_RETRY_S = 1.0


@dataclass(slots=True, eq=False)
class _Waiter:
    n: int
    load: int
    turn: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Client:
    #: Virtual time at which its next request starts: load it was given, or the queue's time after it was idle.
    due: float = 0.0
    waiting: deque[_Waiter] = field(default_factory=deque)
    n_waiting: int = 0
    #: It has an entry in the order, maybe with nothing waiting any more.
    listed: bool = False


class _Pace:
    """How fast queries are answered while others wait, that is, while the router is fully loaded.

    Without a backlog, the time between answers only tells how often clients ask.
    """

    def __init__(self) -> None:
        self._seconds = self._queries = 0.0
        #: When the last query was answered while others waited.
        self._since: float | None = None

    @property
    def seconds_per_query(self) -> float:
        """0 until a query had to wait."""
        return self._seconds / self._queries if self._queries else 0.0

    def left(self, n: int, now: float, *, waiting: bool) -> None:
        """``n`` queries were answered. ``waiting``: others wait."""
        if self._since is not None and waiting:
            passed = now - self._since
            kept = math.exp(-passed / _PACE_S)
            self._seconds = self._seconds * kept + passed
            self._queries = self._queries * kept + n
        self._since = now if waiting else None


class Admission:
    """The queue. All methods on the event loop."""

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        *,
        draw: Callable[[], float] = random.random,
        unit: str = "queries",
    ) -> None:
        """
        Args:
            clock: monotonic seconds, the event loop's own.
            draw: uniform in [0, 1).
            unit: what is counted, for messages.
        """
        self._unit = unit
        self._limits = limits
        self._rule = ShareRule(limits.queue_queries, alone=limits.client_share)
        #: Queries of one client that may wait, while nobody else's do.
        self.share = self._rule.most
        self._clock = clock
        self._clients: dict[str, _Client] = {}
        #: (due, order of arrival, client), one entry per client with waiting requests.
        self._order: list[tuple[float, int, str]] = []
        self._arrivals = itertools.count()
        self._now = 0.0
        self._n_waiting = 0
        self._n_in_flight = 0
        self._pace = _Pace()
        self._draw = draw
        #: The latest time at which a refused request was told to come back.
        self._given_s = -math.inf
        self._draining = False
        #: Requests refused, by reason: "client" share, whole "queue", "draining", "deadline".
        self.refused = dict.fromkeys(("client", "queue", "draining", "deadline"), 0)

    @property
    def n_waiting(self) -> int:
        """Queries that wait."""
        return self._n_waiting

    @property
    def n_in_flight(self) -> int:
        """Load that was handed to the router and is not answered: queries, of which wide ones count for several."""
        return self._n_in_flight

    @property
    def draining(self) -> bool:
        return self._draining

    def retry_after_s(self, n: int) -> float:
        """Seconds after which a refused request of ``n`` queries should come back, in two digits. 1 without a pace.

        Each request gets a time of its own: after half of the queue, behind those refused before it, at the pace of
        answers. So no more come back than are answered. Clients that ignore this are counted each time they ask, so no
        wait is longer than twice the time of the queue and a second.
        """
        pace_s = self._pace.seconds_per_query
        if not pace_s:
            return UNKNOWN_RETRY_S
        now, backlog_s = self._clock(), (self._n_waiting + self._n_in_flight) * pace_s
        self._given_s = min(max(self._given_s, now + backlog_s / 2), now + 2 * backlog_s + 1) + n * pace_s
        spread_s = _MIN_RETRY_S * (1 + self._draw())
        return float(f"{min(max(self._given_s - now, spread_s), _MAX_RETRY_S):.2g}")

    def nprobe_under_load(self, nprobe: int) -> int:
        """``nprobe``, or less where the configuration allows it: linear from a half full queue down to the floor."""
        floor = self._limits.overload_min_nprobe
        fill = self._n_waiting / self._limits.queue_queries
        if floor is None or fill <= 0.5 or nprobe <= floor:
            return nprobe
        return max(floor, round(nprobe - (nprobe - floor) * min(1.0, 2 * fill - 1)))

    def lack_of_room(self, client: str, n: int, left_s: float | None = None, *, n_coming: int = 0) -> Lack | None:
        """Why ``n`` queries of ``client`` are refused now; None: they may start or wait. Counts nothing.

        The only decision: :meth:`enter` follows it, and load shedding asks it before a body is read.

        Args:
            left_s: seconds until the search must have started.
            n_coming: queries of others that were let in and have not called :meth:`enter` yet.
        """
        if self._draining:
            return "draining"
        if not self._order and self._fits(n + n_coming):
            return None
        n_own = self._n_waiting_of(client)
        if (lack := self._rule.lack(n, own=n_own, used=self._n_waiting + n_coming)) is not None:
            return "queue" if lack == "full" else "client"
        return "deadline" if left_s is not None and self._least_wait_s(n_own, n) > left_s else None

    def _n_waiting_of(self, client: str) -> int:
        state = self._clients.get(client)
        return 0 if state is None else state.n_waiting

    def _least_wait_s(self, n_own: int, n: int) -> float:
        """Until ``n`` more queries of a client can start, of which ``n_own`` wait already: each waiting client gets as
        many as these first, and those in flight have to make room."""
        ahead = min(self._n_waiting, n_own * len(self._order))
        return max(0, ahead + self._n_in_flight + n - self._limits.in_flight_queries) * self._pace.seconds_per_query

    def _refused(self, lack: Lack, client: str, n: int) -> OverloadedError:
        """Counts the refusal of ``n`` queries and makes its error."""
        self.refused[lack] += 1
        if lack == "draining":
            return OverloadedError("the daemon is about to stop; ask another one", retry_after_s=UNKNOWN_RETRY_S)
        if lack == "queue":
            words = f"{self._n_waiting} {self._unit} wait and the queue holds {self._limits.queue_queries}"
        elif lack == "deadline":
            words = f"{self._n_waiting} {self._unit} wait, so deadline_ms would pass before the search could start"
        else:
            words = f"{self._n_waiting_of(client)} of your {self._unit} wait and one client may have {self.share}"
        return OverloadedError(words, retry_after_s=self.retry_after_s(n), own_share=lack == "client")

    async def enter(
        self,
        client: str,
        n: int,
        deadline_s: float | None = None,
        *,
        load: int | None = None,
        admitted: bool = False,
    ) -> None:
        """Waits for the right to search ``n`` queries; :meth:`leave` gives it back.

        Args:
            client: fairness is between clients.
            deadline_s: time of the clock by which the search must have started.
            load: what this turn takes of the router's time, in queries; default ``n``.
            admitted: a further turn of a request that was let in before: it is not refused.

        Raises:
            OverloadedError: no room in the queue, or none in time, or draining.
            DeadlineExceededError: the deadline passed first.
        """
        load = n if load is None else load
        left_s = None if deadline_s is None else deadline_s - self._clock()
        if left_s is not None and left_s <= 0 and not self._draining:
            raise self._too_late()
        if not admitted and (lack := self.lack_of_room(client, n, left_s)) is not None:
            raise self._refused(lack, client, n)
        if not self._order and self._fits(load):
            self._start(self._clients.get(client), load)
        else:
            await self._wait(client, _Waiter(n, load, asyncio.get_running_loop().create_future()), left_s)

    def _fits(self, load: int) -> bool:
        # A turn larger than the limit goes alone.
        return self._n_in_flight == 0 or self._n_in_flight + load <= self._limits.in_flight_queries

    def _start(self, state: _Client | None, load: int) -> None:
        self._n_in_flight += load
        if state is not None:
            state.due = max(state.due, self._now) + load

    async def _wait(self, client: str, waiter: _Waiter, left_s: float | None) -> None:
        state = self._clients.setdefault(client, _Client())
        loop = asyncio.get_running_loop()
        if not state.listed:
            state.due = max(state.due, self._now)
            self._list(client, state)
        state.waiting.append(waiter)
        state.n_waiting += waiter.n
        self._n_waiting += waiter.n
        timer = None
        if left_s is not None:
            timer = loop.call_later(left_s, self._expire, waiter)
        try:
            await waiter.turn
        except BaseException:
            # Cancelled, or too late. A turn that was given at the same moment goes to the next request.
            if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self.leave(waiter.load)
            else:
                self._withdraw(client, state, waiter)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _too_late(self) -> DeadlineExceededError:
        self.refused["deadline"] += 1
        return DeadlineExceededError("deadline_ms passed before the search could start")

    def _expire(self, waiter: _Waiter) -> None:
        if not waiter.turn.done():
            waiter.turn.set_exception(self._too_late())

    def _withdraw(self, client: str, state: _Client, waiter: _Waiter) -> None:
        """Removes a waiting request. The client's entry in the order is dropped when it comes up."""
        if waiter in state.waiting:
            state.waiting.remove(waiter)
            state.n_waiting -= waiter.n
            self._n_waiting -= waiter.n
            self._hand_over()

    def leave(self, load: int) -> None:
        """Ends a turn of so much load."""
        self._pace.left(load, self._clock(), waiting=self._n_waiting > 0)
        self._n_in_flight -= load
        self._hand_over()

    def _hand_over(self) -> None:
        while self._order:
            due, _, client = self._order[0]
            state = self._clients[client]
            if state.waiting and not self._fits(state.waiting[0].load):
                return
            heapq.heappop(self._order)
            state.listed = False
            if not state.waiting:
                self._forget(client, state)
                continue
            waiter = state.waiting.popleft()
            state.n_waiting -= waiter.n
            self._n_waiting -= waiter.n
            self._now = max(self._now, due)
            if not waiter.turn.done():
                self._start(state, waiter.load)
                waiter.turn.set_result(None)
            if state.waiting:
                self._list(client, state)
            else:
                self._forget(client, state)
        if self._n_in_flight == 0 and self._n_waiting == 0:
            self._clients.clear()

    def _list(self, client: str, state: _Client) -> None:
        heapq.heappush(self._order, (state.due, next(self._arrivals), client))
        state.listed = True

    def _forget(self, client: str, state: _Client) -> None:
        """Drops an account that carries no information: a client that is not ahead starts at the queue's time."""
        if not state.listed and state.due <= self._now:
            self._clients.pop(client, None)
        if len(self._clients) > _MAX_ACCOUNTS:
            kept = {name: c for name, c in self._clients.items() if c.listed or c.due > self._now}
            # In place: waiting requests hold their accounts.
            self._clients.clear()
            self._clients.update(kept)

    def drain(self) -> None:
        """Refuses new requests from now on; waiting ones are served."""
        self._draining = True

    def check_invariants(self) -> None:
        """Asserts what must hold between two callbacks."""
        assert self._n_waiting == sum(c.n_waiting for c in self._clients.values()) >= 0
        assert all(c.n_waiting == sum(w.n for w in c.waiting) for c in self._clients.values())
        assert self._n_in_flight >= 0
        listed = [name for _, _, name in self._order]
        assert sorted(listed) == sorted(name for name, c in self._clients.items() if c.listed)
        assert all(c.listed for c in self._clients.values() if c.waiting)
