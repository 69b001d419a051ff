"""Runs threads one at a time, in an order drawn from a seed, on virtual time.

Each simulated thread is a greenlet. Whoever waits, in :mod:`tests.simulation.virtual.primitives`, hands the turn to one
of those that can go on, drawn at random. Time stands still while anybody can; then it jumps to the next timer. So an
hour without work costs nothing, a seed gives the same run again, and waiting for ever is found at once: nobody can go
on, and no timer is set.

A turn ends at a primitive only. What two threads do between two primitives is never mixed.
"""

from __future__ import annotations

import heapq
import random
import threading
from asyncio import _get_running_loop, _set_running_loop
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from greenlet import getcurrent, greenlet

__all__ = ["Scheduler", "SimThread", "ViolationError", "current", "running"]

T = TypeVar("T")

#: What reading the clock takes, in seconds: loops that wait for a time to come end.
_CLOCK_S = 1e-6
_TRACE = 400
_SHOWN = 24
#: Turns between two looks at what is bounded.
_WATCH_EVERY = 16


class ViolationError(AssertionError):
    """What must hold did not."""


class SimThread:
    """As :class:`threading.Thread`, in a simulation."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._sim = running()
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self._sim.n_threads += 1
        self.name = name or f"thread-{self._sim.n_threads}"
        self.daemon = bool(daemon)
        self.started = self.ended = False
        #: It can go on only when somebody wakes it, or its timer does.
        self.waiting = False
        self.woken = False
        #: Of its last wait: older timers mean nothing.
        self.wait_number = 0
        self._joining: list[SimThread] = []
        self.greenlet = greenlet(self._run, self._sim.root)
        self.ident = self._sim.n_threads

    def start(self) -> None:
        if self.started:
            raise RuntimeError("threads can only be started once")
        self.started = True
        self._sim.threads.append(self)
        self._sim.make_ready(self)
        self._sim.maybe_switch()

    def _run(self, _from_who_ended: object = None) -> None:
        sim = self._sim
        _set_running_loop(None)
        try:
            if self._target is not None:
                self._target(*self._args, **self._kwargs)
        except BaseException as error:  # noqa: BLE001 - ends the simulation
            sim.fail(error if isinstance(error, ViolationError) else _unhandled(self, error))
        finally:
            del self._target, self._args, self._kwargs
        self.ended = True
        sim.threads.remove(self)
        for thread in self._joining:
            sim.wake(thread)
        sim.leave()

    def is_alive(self) -> bool:
        return self.started and not self.ended

    def join(self, timeout: float | None = None) -> None:
        if not self.started:
            raise RuntimeError("cannot join thread before it is started")
        self._sim.maybe_switch()
        self._sim.wait_in(self._joining, timeout, lambda: self.ended)

    def __repr__(self) -> str:
        return f"<SimThread {self.name}>"


_active: list[Scheduler] = []
#: Threads of simulations that failed: without them, they would be told to end, and go on.
_abandoned: list[SimThread] = []


def running() -> Scheduler:
    """The simulation that goes on."""
    assert _active, "no simulation runs"
    return _active[-1]


def current() -> SimThread | None:
    """The simulated thread that calls; None for any other, and after the end."""
    if not _active or (sim := _active[-1]).system_thread != threading.get_ident():
        return None
    return sim.turn


def _unhandled(thread: SimThread, error: BaseException) -> ViolationError:
    violation = ViolationError(f"{thread.name} ended with {error!r}")
    violation.__cause__ = error
    return violation


class Scheduler:
    """One run. Everything but :meth:`run` is called by the thread whose turn it is."""

    def __init__(self, seed: int, *, switch: float = 0.2, most_steps: int = 20_000_000) -> None:
        """
        Args:
            switch: how likely a thread that could go on makes way for another one, at each primitive.
            most_steps: of turns; more are a loop that never ends.
        """
        self.random = random.Random(seed)
        self.switch = switch
        self.now = 1000.0
        self.n_threads = 0
        self.n_steps = 0
        self._most_steps = most_steps
        #: Started and not ended.
        self.threads: list[SimThread] = []
        self._ready: list[SimThread] = []
        #: Whose turn it is.
        self.turn: SimThread | None = None
        self.root = getcurrent()
        self.system_thread = threading.get_ident()
        self._timers: list[tuple[float, int, int, SimThread]] = []
        self._n_timers = 0
        self._error: BaseException | None = None
        #: The last turns: time, thread.
        self.trace: deque[tuple[float, str]] = deque(maxlen=_TRACE)
        #: Of all turns: two runs of a seed are equal.
        self.digest = 0
        #: Called every few turns.
        self.watch: Callable[[], None] = lambda: None

    # From outside

    def run(self, main: Callable[[], T]) -> T:
        """What ``main`` returns, as a simulated thread.

        Raises:
            ViolationError: nobody can go on, a thread ended with an exception, threads are left, or ``main`` says so.
        """
        assert not _active, "another simulation runs"
        found: list[T] = []
        self.root, self.system_thread = getcurrent(), threading.get_ident()
        _active.append(self)
        try:
            first = SimThread(target=lambda: found.append(main()), name="main")
            first.started = True
            self.threads.append(first)
            self.turn = first
            first.greenlet.switch()
        finally:
            self.turn = None
            _active.remove(self)
            _abandoned.extend(self.threads)
        if self._error is not None:
            last = [f"  {now - self.trace[-1][0]:+.6f} s {name}" for now, name in [*self.trace][-_SHOWN:]]
            self._error.add_note("\n".join(["the last turns:", *last]))
            raise self._error
        return found[0]

    # Turns

    def maybe_switch(self) -> None:
        """Lets another thread go on first, now and then."""
        me = current()
        if me is None:
            return
        if self.random.random() < self.switch:
            self._ready.append(me)
            self._hand_over(me)

    def wait(self, timeout: float | None = None) -> bool:
        """Until another thread calls :meth:`wake`: True; or until the time is over: False."""
        me = current()
        if me is None:
            raise RuntimeError("a thread outside the simulation would wait for one inside")
        me.wait_number += 1
        me.waiting, me.woken = True, False
        if timeout is not None:
            self._n_timers += 1
            due = self.now + max(0.0, min(timeout, 1e9))
            heapq.heappush(self._timers, (due, self._n_timers, me.wait_number, me))
        self._hand_over(me)
        return me.woken

    def wait_in(self, line: list[SimThread], timeout: float | None, until: Callable[[], bool]) -> bool:
        """Waits in ``line`` until ``until()``; whoever makes that true wakes those in the line. False: too late."""
        if until():
            return True
        ends = None if timeout is None else self.now + timeout
        while not until():
            left = None if ends is None else ends - self.now
            if left is not None and left <= 0:
                return False
            me = current()
            assert me is not None, "a thread outside the simulation would wait for one inside"
            line.append(me)
            try:
                self.wait(left)
            finally:
                if me in line:
                    line.remove(me)
        return True

    def wake(self, thread: SimThread) -> None:
        if thread.waiting:
            thread.waiting, thread.woken = False, True
            self.make_ready(thread)

    def wake_one(self, line: list[SimThread]) -> None:
        """Any of them: locks are not fair."""
        if line:
            self.wake(line.pop(self.random.randrange(len(line))))

    def wake_all(self, line: list[SimThread]) -> None:
        while line:
            self.wake(line.pop())

    def make_ready(self, thread: SimThread) -> None:
        self._ready.append(thread)

    def sleep(self, seconds: float) -> None:
        self.wait(seconds)

    def read_clock(self) -> float:
        self.now += _CLOCK_S
        return self.now

    def leave(self) -> None:
        """The calling thread has ended."""
        if self.threads:
            me, self.turn = self.turn, self._next()
            assert me is not None
            # A greenlet that ends gives way to its parent.
            me.greenlet.parent = self.turn.greenlet

    def fail(self, error: BaseException) -> NoReturn:
        """Ends the simulation; all its threads stop where they are, for good."""
        self._error = error
        self.root.switch()
        raise AssertionError("a simulation that failed goes on")

    def _hand_over(self, me: SimThread) -> None:
        following = self._next()
        if following is not me:
            self.turn = following
            loop = _get_running_loop()
            following.greenlet.switch()
            _set_running_loop(loop)

    def _next(self) -> SimThread:
        ready, timers = self._ready, self._timers
        self.n_steps += 1
        if self.n_steps > self._most_steps:
            self.fail(ViolationError(f"{self.n_steps} turns and no end"))
        if self.n_steps % _WATCH_EVERY == 0:
            try:
                self.watch()
            except ViolationError as error:
                self.fail(error)
        while True:
            while timers and timers[0][0] <= self.now:
                _, _, number, thread = heapq.heappop(timers)
                if thread.waiting and thread.wait_number == number:
                    thread.waiting = False
                    ready.append(thread)
            if ready:
                at = self.random.randrange(len(ready)) if len(ready) > 1 else 0
                ready[at], ready[-1] = ready[-1], ready[at]
                following = ready.pop()
                self.trace.append((self.now, following.name))
                self.digest = (31 * self.digest + following.ident + int(1e6 * self.now)) & 0xFFFF_FFFF
                return following
            if not timers:
                names = ", ".join(thread.name for thread in self.threads)
                self.fail(ViolationError(f"nobody can go on and no timer is set: {names} wait for ever"))
            self.now = max(self.now, timers[0][0])
