"""A router in a simulation: searches, sessions, plans and devices out of order, and an end at any time."""

from __future__ import annotations

import asyncio
import gc
import math
import random
from collections.abc import Callable

import numpy as np

from hybridindex.config import HealthPolicy
from hybridindex.errors import InvalidInputError, RouterClosedError
from hybridindex.index.ivf import IVFIndex
from hybridindex.partitioner.plan import Plan
from hybridindex.router import Router
from hybridindex.router.session import Session
from hybridindex.types import SearchResult
from tests.clustered import DIM, hand_made_plan
from tests.simulation.answers import N_QUERIES, Answers
from tests.simulation.virtual.event_loop import SimLoop, on_loop
from tests.simulation.virtual.scheduler import ViolationError
from tests.simulation.world import LONGEST_FAULT_S, Outcome, World, simulated

__all__ = ["run_router"]

PAGE_BYTES = 1024
STUCK_S = 10.0
#: Failed devices are tried a minute after each other.
_SETTLES_S = 300.0
#: A search takes no longer where devices are judged: one that is stuck, and one that waited for it.
_ANSWER_S = 3 * STUCK_S + 10
#: Whatever is predicted, a search waits for lists a second at most.
_WAIT_S = 1.1
#: No longer than this where no scan stalls, whatever copies do.
_PLAIN_S = 30.0


Asked = tuple[np.ndarray, int, int, dict[str, float]]


class RouterWorld:
    """One router and its users."""

    def __init__(self, seed: int, seconds: float, index: IVFIndex, answers: Answers, *, quiet: bool) -> None:
        """``index``: or a view of its codes, which are searched. ``quiet``: calls come minutes apart."""
        self.world = World(seed, seconds)
        self._index = index
        self._answers = answers
        draw = self.world.draw
        self.n_devices = draw.choice((0, 1, 1, 2))
        self.budget = draw.choice((48 << 10, 128 << 10, 512 << 10))
        if index.rows is not index:
            # An eighth is scratch, which shall suffice for candidates.
            self.budget = draw.choice((704 << 10, 1 << 20))
        self.queue_bytes = draw.choice((8 << 10, 32 << 10, 1 << 20)) * index.dim // DIM
        #: Mean seconds between two calls of a user.
        self.rest_s = 10 ** (draw.uniform(2.2, 3.2) if quiet else draw.uniform(0.5, 1.6))
        self.judged = draw.random() < (0.2 if quiet else 0.5)
        self.settles = draw.random() < 0.5
        self.resting = False
        #: Scans do, of some device.
        self._stalls_until = 0.0
        if draw.random() < 0.4:
            # Searches wait for lists that come.
            machine = self.world.machine
            machine.host_pace, machine.device_pace, machine.copy_pace = 1e6, 1e8, 3e6

    # Life

    def live(self) -> None:
        world, draw = self.world, self.world.draw
        plan = self._plan(draw) if draw.random() < 0.7 else None
        self.router = router = Router(
            self._index.rows,
            plan=plan,
            precision="rows" if self._index.rows is self._index else "codes",
            devices=["cpu"] * self.n_devices,
            device_budget_bytes=self.budget,
            lookahead_queue_bytes=self.queue_bytes,
            cache_fraction=draw.choice((0, 0.5, 1)),
            max_batch=draw.choice((None, None, 16)),
            threads=1,
            pin_host_lists=draw.choice((0, 0, 64 << 10)),
            health=HealthPolicy(judge="all" if self.judged else "none", stuck_s=STUCK_S, slow_parts=4),
        )
        world.bound("bytes of waiting lookaheads", lambda: router._served.lookahead.waiting_bytes, self.queue_bytes)
        for tier in router.devices:
            world.bound(f"bytes of device {tier.ordinal}", lambda tier=tier: tier.arena.nbytes, self.budget)  # type: ignore[misc]
        world.bound("seconds that a search waits for lists", self._longest_wait_s, _WAIT_S)
        users: list[tuple[str, Callable[[random.Random], None]]] = [
            ("searching", self._searching),
            ("searching too", self._searching),
            ("steady", lambda draw: self._with_sessions(draw, "steady")),
            ("other", lambda draw: self._with_sessions(draw, "other")),
            ("flooding", self._flooding),
            ("on a loop", self._on_loop),
            ("planning", self._planning),
            ("reading", self._reading),
            ("breaking", self._breaking),
        ]
        for name, life in users:
            world.user(name, life)
        world.sim.sleep(world.seconds * draw.choice((1.0, 1.0, draw.random())))
        if self.settles:
            self._settle()
        world.end()
        # A scan and a move of each device, a change of plan, and what was queued.
        with world.within("close", (3 + 2 * self.n_devices) * STUCK_S + 30):
            router.close()
        world.machine.heal()
        world.join_users(400.0)
        world.at_end.append(self._check_end)

    def _settle(self) -> None:
        """Nothing is wrong any more and nobody asks for anything: devices come back, and so do lists of the plan."""
        self.resting = True
        self.world.machine.heal()
        self.world.sim.sleep(_SETTLES_S)
        router = self.router
        for tier in router.devices:
            if tier.failure is not None:
                raise ViolationError(f"device {tier.ordinal} has not come back: {tier.failure!r}")
            if router.plan is not None and (missing := router._served.placement._missing_that_fit(router.plan, tier)):  # type: ignore[arg-type]
                raise ViolationError(
                    f"lists {missing} of the plan have room on device {tier.ordinal} and are not there"
                )

    def _check_end(self) -> None:
        """What was left behind, in a scan or a copy that did not end, has ended."""
        router = self.router
        gc.collect()
        router._served.lookahead.close()  # also of sessions that were collected just now
        if n := router._served.lookahead.n_held:
            raise ViolationError(f"{n} lists are held by sessions that have ended")
        for tier in router.devices:
            used = router._served.residency.current.resident_lists(tier.ordinal)
            pages = tier.arena.pages  # type: ignore[attr-defined]
            # What a failed copy may still write is out of use.
            taken = pages.n_pages - pages.n_free - tier._copier.kept_pages  # type: ignore[attr-defined]
            expected = int(router._served.residency.current.page_counts[used].sum())
            if taken != expected and pages.n_pages:
                raise ViolationError(f"{taken} pages of device {tier.ordinal} are taken; its lists have {expected}")
        if router._served.lookahead.waiting_bytes:
            raise ViolationError(f"{router._served.lookahead.waiting_bytes} bytes of lookaheads are left after the end")
        if n := router._served.residency.n_leases:
            raise ViolationError(f"{n} leases are left after the end")
        router._served.lookahead.check_invariants()
        router._served.residency.check_invariants()

    def _longest_wait_s(self) -> float:
        waiting = self.router._served.wait_for_loads._waiting
        return self.world.sim.now - min((each.since_s for each in waiting), default=self.world.sim.now)

    def _plan(self, draw: random.Random) -> Plan:
        device = np.full(self._index.nlist, -1)
        for ordinal in range(self.n_devices):
            lists = draw.sample(range(self._index.nlist), draw.randrange(self._index.nlist // 3))
            device[lists] = ordinal
        budget = self.budget if draw.random() < 0.7 else self.budget // 2
        plan = hand_made_plan(self._index, device, n_devices=self.n_devices, budget=budget)
        plan.request.page_bytes = PAGE_BYTES  # type: ignore[misc]
        return plan

    # What every call comes to

    def _ask(self, draw: random.Random) -> Asked:
        rows = np.array(draw.choices(range(N_QUERIES), k=draw.choice((1, 1, 1, 2, 8))))
        options = {"deadline_ms": draw.choice((1.0, 20.0, 500.0)), "min_nprobe": 2} if draw.random() < 0.2 else {}
        return rows, draw.choice((1, 5, 10, 40)), draw.randrange(2, 17), options

    def _answered(self, asked: Asked, result: SearchResult, began_s: float) -> None:
        rows, k, nprobe, options = asked
        limit_s = _PLAIN_S if began_s > self._stalls_until else _ANSWER_S if self.judged else math.inf
        if (took := self.world.sim.now - began_s) > limit_s:
            raise ViolationError(f"a search took {took:.1f} s; expected {limit_s:g} s at most")
        self._answers.check(rows, k, nprobe, result, least=2 if options else None)
        self.world.done["answers"] += 1

    def _unless_closed(self, call: Callable[[], None]) -> bool:
        """False: the router has been closed."""
        try:
            call()
        except RouterClosedError:
            if not self.world.ending:
                raise
            return False
        return True

    def _repeat(self, draw: random.Random, rest_s: float, call: Callable[[], None]) -> None:
        while not self.world.ending:
            self.world.pause(draw, rest_s)
            if self.resting:
                continue
            for _ in range(draw.choice((1, 1, 1, 4))):
                if not self._unless_closed(call):
                    return

    # Users

    def _searching(self, draw: random.Random) -> None:
        def call() -> None:
            asked, began_s = self._ask(draw), self.world.sim.now
            rows, k, nprobe, options = asked
            if draw.random() < 0.5:
                result = self.router.search(self._answers.pool[rows], k, nprobe, **options)  # type: ignore[arg-type]
                self._answered(asked, result, began_s)
                return
            many = [self._ask(draw) for _ in range(draw.choice((1, 3, 20)))]
            futures = [self.router.submit(self._answers.pool[r], k, p, **o) for r, k, p, o in many]  # type: ignore[arg-type]
            for asked, future in zip(many, futures, strict=True):
                self._answered(asked, future.result(300), began_s)

        self._repeat(draw, self.rest_s, call)

    def _on_loop(self, draw: random.Random) -> None:
        def call() -> None:
            many, began_s = [self._ask(draw) for _ in range(draw.choice((1, 3, 20)))], self.world.sim.now

            async def ask(_loop: SimLoop) -> None:
                searches = [self.router.asearch(self._answers.pool[r], k, p, **o) for r, k, p, o in many]  # type: ignore[arg-type]
                found = await asyncio.gather(*searches, return_exceptions=True)
                for asked, result in zip(many, found, strict=True):
                    if isinstance(result, BaseException):
                        raise result
                    self._answered(asked, result, began_s)

            on_loop(ask)

        self._repeat(draw, self.rest_s, call)

    def _with_sessions(self, draw: random.Random, owner: str) -> None:
        def call() -> None:
            session = self.router.session(owner=owner)
            for _ in range(draw.randrange(1, 5)):
                asked = self._ask(draw)
                rows, k, nprobe, options = asked
                queries = self._answers.pool[rows]
                landed = session.lookahead(queries, nprobe=nprobe)
                self.world.pause(draw, draw.choice((0.001, 0.05, 2)))
                began_s = self.world.sim.now
                result = session.search(queries, k, nprobe, **options)  # type: ignore[arg-type]
                self._answered(asked, result, began_s)
                if draw.random() < 0.3:
                    landed.result(300)
            if draw.random() < 0.8:
                session.close()
            else:  # dropped
                del session
                gc.collect()
            self.world.done["sessions"] += 1

        self._repeat(draw, 2 * self.rest_s, call)

    def _flooding(self, draw: random.Random) -> None:
        """Lookaheads without a search, many at once."""

        def call() -> None:
            sessions: list[Session] = [self.router.session(owner="flooding") for _ in range(draw.randrange(1, 4))]
            futures = []
            for _ in range(draw.choice((5, 30, 100))):
                rows = draw.choices(range(N_QUERIES), k=draw.choice((1, 4, 12)))
                try:
                    started = draw.choice(sessions).start_lookahead(self._answers.pool[rows], nprobe=8)
                except InvalidInputError:
                    continue  # more than the queue holds
                futures.append(started.moving)
            if draw.random() < 0.5:
                for future in futures:
                    future.result(600)
            for session in sessions:
                session.close()
            self.world.done["floods"] += 1

        self._repeat(draw, 8 * self.rest_s, call)

    def _planning(self, draw: random.Random) -> None:
        def call() -> None:
            self.router.apply_plan(self._plan(draw), bandwidth_share=draw.choice((1.0, 0.3, 0.05)), force=True)
            self.world.done["plans"] += 1

        self._repeat(draw, 20 * self.rest_s, call)

    def _reading(self, draw: random.Random) -> None:
        def call() -> None:
            self.router.stats()
            self.router.arena_use()
            self.router._served.residency.check_invariants()
            self.router._served.lookahead.check_invariants()
            self.world.done["looks"] += 1

        self._repeat(draw, 5 * self.rest_s, call)

    def _breaking(self, draw: random.Random) -> None:
        world, machine = self.world, self.world.machine
        world.expected_errors += ["out of order", "is slow", "could not be tried", "does not end"]
        while not self.world.ending and self.n_devices:
            world.pause(draw, 8 * self.rest_s)
            if self.resting:
                continue
            ordinal, lasts_s = draw.randrange(self.n_devices), draw.choice((0.5, 5.0, LONGEST_FAULT_S))
            fault = draw.choice((machine.scans_stall, machine.copies_stall, machine.scans_fail, machine.copies_fail))
            fault[ordinal] = world.sim.now + lasts_s
            if fault is machine.scans_stall:
                self._stalls_until = max(self._stalls_until, fault[ordinal])
            world.done["faults"] += 1


def run_router(seed: int, seconds: float, index: IVFIndex, answers: Answers, *, quiet: bool = False) -> Outcome:
    """Raises ViolationError."""
    scene = RouterWorld(seed, seconds, index, answers, quiet=quiet)
    with simulated(scene.world):
        outcome = scene.world.run(scene.live)
    outcome.seed = seed
    return outcome
