"""What all worlds of a simulation share: a seed's own draws, users that come and go, limits that are watched."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.simulation.machine import Machine
from tests.simulation.virtual.patching import patched
from tests.simulation.virtual.scheduler import Scheduler, SimThread, ViolationError

__all__ = ["LONGEST_FAULT_S", "Outcome", "World", "simulated"]

#: What is out of order is so for no longer.
LONGEST_FAULT_S = 60.0
#: Whatever waits for ever, beside threads that look at the clock, is over by then.
_OVERTIME_S = 3600.0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One run."""

    seed: int
    #: Virtual seconds.
    seconds: float
    n_turns: int
    #: Of the order of all turns.
    digest: int
    #: What was done, and how often.
    done: Counter[str] = field(default_factory=Counter)


class World:
    """One run: its scheduler, machine and draws."""

    def __init__(self, seed: int, seconds: float) -> None:
        self.draw = random.Random(f"world {seed}")
        self.sim = Scheduler(seed, switch=self.draw.choice((0.02, 0.1, 0.3)))
        self.machine = Machine(self.sim, self.draw)
        self.seconds = seconds
        self.done: Counter[str] = Counter()
        #: The end has begun: users stop.
        self.ending = False
        #: Called when all threads have ended.
        self.at_end: list[Callable[[], None]] = []
        self._resting: list[SimThread] = []
        self._users: list[SimThread] = []
        #: Names of what is bounded, what it has and what it may have.
        self._bounds: list[tuple[str, Callable[[], float], float]] = []
        self._log = _ErrorLog(self)
        #: Words of logged errors that an injected fault explains.
        self.expected_errors: list[str] = []

    def user(self, name: str, life: Callable[[random.Random], None]) -> None:
        """Lives on a thread of its own, with its own draws."""
        draw = random.Random(f"{name} {self.draw.random()}")
        self._users.append(SimThread(target=life, args=(draw,), name=name))
        self._users[-1].start()

    def join_users(self, limit_s: float) -> None:
        ends = self.sim.now + limit_s
        for user in self._users:
            user.join(max(0.0, ends - self.sim.now))
            if user.is_alive():
                raise ViolationError(f"{user.name} has not ended {limit_s:g} s after the end")

    def pause(self, draw: random.Random, mean_s: float) -> None:
        """Some time, but not beyond the end."""
        self.sim.wait_in(self._resting, draw.expovariate(1 / mean_s), lambda: self.ending)

    def end(self) -> None:
        self.ending = True
        self.sim.wake_all(self._resting)

    def bound(self, name: str, has: Callable[[], float], most: float) -> None:
        """What ``has`` says must stay within ``most``, from now on."""
        self._bounds.append((name, has, most))

    def look(self) -> None:
        """Raises ViolationError: something is out of its bound."""
        for name, has, most in self._bounds:
            if not 0 <= (now := has()) <= most:
                raise ViolationError(f"{name}: {now:,.0f}; expected 0 to {most:,.0f}")

    @contextlib.contextmanager
    def within(self, what: str, limit_s: float) -> Iterator[None]:
        """The block must end in so much virtual time."""
        began = self.sim.now
        yield
        if (took := self.sim.now - began) > limit_s:
            raise ViolationError(f"{what} took {took:.2f} s; expected {limit_s:g} s at most")

    def run(self, main: Callable[[], None]) -> Outcome:
        """Raises ViolationError."""

        def whole() -> None:
            main()
            ends = self.sim.now + LONGEST_FAULT_S + 1
            while left := [thread.name for thread in self.sim.threads if thread.name != "main"]:
                if self.sim.now > ends:
                    raise ViolationError(f"threads are left: {', '.join(left)}")
                self.sim.sleep(1.0)
            for check in self.at_end:
                check()

        began = self.sim.now
        self.bound("seconds of the run", lambda: self.sim.now - began, self.seconds + _OVERTIME_S)
        self.sim.watch = self.look
        logger = logging.getLogger("hybridindex")
        before = logger.level, logger.propagate
        logger.addHandler(self._log)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        # Finalizers run where the world collects garbage, and look at what it made alone.
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            self.sim.run(whole)
        finally:
            gc.enable()
            gc.unfreeze()
            logger.removeHandler(self._log)
            logger.level, logger.propagate = before
        return Outcome(
            seed=0,
            seconds=self.sim.now - began,
            n_turns=self.sim.n_steps,
            digest=self.sim.digest,
            done=self.done,
        )


class _ErrorLog(logging.Handler):
    """An error that nobody expects ends the run."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info is not None and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        if not any(words in text for words in self._world.expected_errors):
            error = ViolationError(f"logged as an error: {text}")
            error.__cause__ = None if record.exc_info is None else record.exc_info[1]
            self._world.sim.fail(error)


@contextlib.contextmanager
def simulated(world: World) -> Iterator[None]:
    """The product in this world."""
    with patched(), world.machine.applied():
        yield
