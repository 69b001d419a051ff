"""A whole daemon in a simulation, with keys that compete and clients that stall, until SIGTERM."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from hybridindex.answer_codec import decode_answer
from hybridindex.config import HealthPolicy, RouterConfig
from hybridindex.refresh.config import RefreshConfig
from hybridindex.service.auth import KeyFile, Keyring, Role
from hybridindex.service.config import Limits, ServiceConfig
from hybridindex.service.daemon import Daemon
from hybridindex.service.several.config import IndexConfig
from hybridindex.service.several.indexes import Indexes
from hybridindex.store.control import ControlStore
from tests.simulation.answers import N_QUERIES, Answers
from tests.simulation.http_client import Answer, Client, GoneError, query_bytes
from tests.simulation.planned import BUDGET
from tests.simulation.virtual.event_loop import SimLoop
from tests.simulation.virtual.scheduler import ViolationError
from tests.simulation.world import LONGEST_FAULT_S, Outcome, World, simulated

__all__ = ["DaemonWorld", "run_daemon"]

DRAIN_S = 10.0
#: Longer than the drain: that must not wait for bodies that stall.
CLIENT_S = 25.0
STUCK_S = 5.0
MAX_SESSIONS = 12
QUEUE = 256
#: A search has begun after 30 s, or is refused.
ANSWER_S = 40.0
#: What a daemon under load may say to whoever asks for too much.
BUSY = frozenset({429, 503, 504})
NAMES = ("steady", "other", "sessions", "flooding", "lookaheads", "stalling", "opening", "reading", "admin")
#: So many keys that a body of each is more than there is room for.
GUESTS = tuple(f"guest-{number}" for number in range(16))
#: Until a probe has its answer, and from SIGTERM on a client whose body has not come.
_TOLD_S = 2.0
#: Clients that stall at the same time, and what one of them may leave unread.
_UNREAD = 40
_LARGEST_ANSWER = 32 * 1000 * 16
#: Load of the largest request: 32 queries with a k of 1,000.
_LARGEST_TURN = 32 * 1000 // 128
_JSON = "application/json"
_RAW = "application/octet-stream"


class DaemonWorld:
    """One daemon and its clients."""

    def __init__(self, seed: int, seconds: float, planned: Path, answers: Answers, *, quiet: bool = False) -> None:
        """``quiet``: calls come minutes apart."""
        self.world = World(seed, seconds)
        self._planned = planned
        self._answers = answers
        draw = self.world.draw
        self.faults = draw.random() < 0.5
        self.rest_s = 10 ** (draw.uniform(1.5, 2.5) if quiet else draw.uniform(0.3, 1.2))
        self.config = ServiceConfig(
            port=0,
            drain_timeout_s=DRAIN_S,
            router=RouterConfig(
                devices=("cpu",),
                device_budget_bytes=BUDGET,
                lookahead_queue_bytes=draw.choice((16 << 10, 128 << 10)),
                threads=1,
                health=HealthPolicy(judge=draw.choice(("all", "none")), stuck_s=STUCK_S, slow_parts=4),
            ),
            limits=Limits(
                request_memory_bytes=256 << 20,
                max_sessions=MAX_SESSIONS,
                session_ttl_s=draw.choice((20.0, 300.0)),
                queue_queries=QUEUE,
                in_flight_queries=draw.choice((8, 64)),
                client_timeout_s=CLIENT_S,
                overload_min_nprobe=draw.choice((None, 2)),
            ),
        )
        #: Of the time, after which SIGTERM comes.
        self.part = draw.choice((1.0, 1.0, draw.random()))
        self._store_stalls_until = 0.0
        self._last_fault_ends = 0.0

    # Life

    def live(self, tasks: Callable[[DaemonWorld], list[Awaitable[None]]]) -> None:
        with tempfile.TemporaryDirectory(prefix="sim-", dir=self._planned.parent) as folder, self._stalling_store():
            path = Path(folder) / "idx"
            shutil.copytree(self._planned, path)
            keys = KeyFile(Path(folder) / "keys.json")
            self._keys = {
                name: keys.add(name, Role.ADMIN if name == "admin" else Role.SEARCH) for name in (*NAMES, *GUESTS)
            }
            self.served = Indexes.open(
                {"idx": IndexConfig(path=path)}, self.config, planning=RefreshConfig(planning="here")
            )
            self.service = self.served.services["idx"]
            self._bound()
            with asyncio.Runner(loop_factory=SimLoop) as runner:
                self.loop = cast("SimLoop", runner.get_loop())
                runner.run(self._serve(Keyring(keys.path), tasks))
            self.served.close()
            self._check_stop()
            self._check_end()

    async def _serve(self, keyring: Keyring, tasks: Callable[[DaemonWorld], list[Awaitable[None]]]) -> None:
        world = self.world
        listening = SimpleNamespace(family=socket.AF_INET, close=lambda: None)
        daemon = Daemon(self.served, keyring, [cast("socket.socket", listening)])
        self._rested = asyncio.Event()
        serving = asyncio.ensure_future(daemon.run())
        while not self.loop.listening or not self.service.ready:
            await asyncio.sleep(0.05)
            if serving.done():
                serving.result()
                raise ViolationError("the daemon has ended by itself")
        users = [asyncio.ensure_future(task) for task in tasks(self)]
        await asyncio.sleep(world.seconds * self.part)
        self.stopped_s = world.sim.now
        world.end()
        self.loop.send_signal(signal.SIGTERM)
        await serving
        self._rested.set()
        _, left = await asyncio.wait(users, timeout=2 * CLIENT_S + LONGEST_FAULT_S)
        if left:
            raise ViolationError(f"{len(left)} clients still wait after the daemon has stopped")
        for user in users:
            user.result()

    def _bound(self) -> None:
        world, service, limits = self.world, self.service, self.config.limits
        assert limits.request_memory_bytes is not None
        memory, admission, sessions = service.memory, service.admission, service.sessions
        # Answers come on top: they are there before they are counted.
        room = memory._shares.capacity + _UNREAD * _LARGEST_ANSWER
        world.bound("request memory", lambda: memory.taken_bytes, room)
        world.bound("queries that wait", lambda: admission.n_waiting, QUEUE)
        world.bound("queries in flight", lambda: admission.n_in_flight, max(limits.in_flight_queries, _LARGEST_TURN))
        world.bound("open sessions", lambda: len(sessions), MAX_SESSIONS)
        world.bound(
            "bytes of waiting lookaheads",
            lambda: service.router._served.lookahead.waiting_bytes,
            self.config.router.lookahead_queue_bytes,
        )

    def _check_stop(self) -> None:
        took = self.world.sim.now - self.stopped_s
        limit = DRAIN_S + 5
        if self._last_fault_ends > self.stopped_s:
            limit += 5 * STUCK_S + LONGEST_FAULT_S
        if took > limit:
            raise ViolationError(f"SIGTERM took {took:.1f} s; expected {limit:g} s at most")

    def _check_end(self) -> None:
        service = self.service
        service.admission.check_invariants()
        service.memory.check_invariants()
        left = {
            "request memory": service.memory.taken_bytes,
            "queries that wait": service.admission.n_waiting,
            "queries in flight": service.admission.n_in_flight,
            "open sessions": len(service.sessions),
            "bytes of waiting lookaheads": service.router._served.lookahead.waiting_bytes,
        }
        for name, n in left.items():
            if n:
                raise ViolationError(f"{name}: {n} are left after the end")
        service.router._served.residency.check_invariants()
        service.router._served.lookahead.check_invariants()

    @contextmanager
    def _stalling_store(self) -> Iterator[None]:
        """Calls of the control store do not end for a while."""
        transaction = ControlStore._transaction

        def later(store: ControlStore, *, writes: bool = False) -> Any:
            if (left := self._store_stalls_until - self.world.sim.now) > 0:
                self.world.sim.sleep(left)
            return transaction(store, writes=writes)

        with mock.patch.object(ControlStore, "_transaction", later):
            yield

    # Clients

    def client(self, name: str) -> Client:
        return Client(self.loop, self._keys[name], ANSWER_S + (2 * LONGEST_FAULT_S if self.faults else 0))

    async def rest(self, draw: random.Random, mean_s: float) -> None:
        """Some time, but not beyond the end."""
        try:
            async with asyncio.timeout(draw.expovariate(1 / mean_s)):
                await self._rested.wait()
        except TimeoutError:
            pass

    async def repeat(self, name: str, rest_s: float, call: Callable[[random.Random, Client], Awaitable[None]]) -> None:
        """Until the daemon is gone."""
        draw = random.Random(f"{name} {self.world.draw.random()}")
        client = self.client(name)
        while not self._rested.is_set():
            await self.rest(draw, rest_s)
            try:
                await call(draw, client)
            except GoneError:
                client.leave()
                if not self.world.ending:
                    self.world.done["connections lost"] += 1
        client.leave()

    def expect(self, answer: Answer, *statuses: int) -> bool:
        """Whether it is the first of ``statuses``; raises ViolationError where it is none, nor the daemon's end."""
        self.world.done[f"status {answer.status}"] += 1
        if answer.status in statuses or (answer.status == 503 and self.world.ending):
            return answer.status == statuses[0]
        raise ViolationError(f"status {answer.status}, expected {statuses}: {answer.body[:300]!r}")

    async def search(
        self, draw: random.Random, client: Client, *allowed: int, session: str = "", rows: list[int] | None = None
    ) -> bool:
        """One search, whose answer is checked; whether there was one."""
        rows = draw.choices(range(N_QUERIES), k=draw.choice((1, 1, 2, 8))) if rows is None else rows
        k, nprobe = draw.choice((1, 5, 10)), draw.randrange(2, 13)
        path = f"/v1{session}/search?k={k}&nprobe={nprobe}"
        answer = await client.ask("POST", path, query_bytes(self._answers.pool[rows]))
        if not self.expect(answer, 200, *allowed):
            return False
        lowered = self.config.limits.overload_min_nprobe is not None
        self._answers.check(rows, k, nprobe, decode_answer(answer.body), least=2 if lowered else None)
        self.world.done["answers"] += 1
        return True

    # Kinds of users

    async def searching(self, name: str) -> None:
        async def call(draw: random.Random, client: Client) -> None:
            await self.search(draw, client, *BUSY)

        await self.repeat(name, self.rest_s, call)

    async def flooding(self) -> None:
        async def call(draw: random.Random, _client: Client) -> None:
            async def one() -> None:
                client = self.client("flooding")
                try:
                    for _ in range(draw.choice((1, 3))):
                        await self.search(draw, client, *BUSY)
                except GoneError:
                    pass
                finally:
                    client.leave()

            await asyncio.gather(*(one() for _ in range(draw.choice((5, 40, 150)))))
            self.world.done["floods"] += 1

        await self.repeat("flooding", 12 * self.rest_s, call)

    async def in_sessions(self, name: str) -> None:
        async def call(draw: random.Random, client: Client) -> None:
            opened = await client.ask("POST", "/v1/sessions", b"{}", _JSON)
            if not self.expect(opened, 201, *BUSY):
                return
            session = f"/sessions/{json.loads(opened.body)['session']}"
            # It may be displaced by others' sessions, or expire.
            for _ in range(draw.randrange(1, 4)):
                rows = draw.choices(range(N_QUERIES), k=draw.choice((1, 4)))
                drafts = query_bytes(self._answers.pool[rows])
                self.expect(await client.ask("POST", f"/v1{session}/lookahead", drafts), 202, 404, *BUSY)
                await self.rest(draw, draw.choice((0.01, 1.0)))
                await self.search(draw, client, 404, *BUSY, session=session, rows=rows)
            if draw.random() < 0.8:
                self.expect(await client.ask("GET", f"/v1{session}"), 200, 404)
                self.expect(await client.ask("DELETE", f"/v1{session}"), 204, 404, *BUSY)

        await self.repeat(name, 2 * self.rest_s, call)

    async def opening(self) -> None:
        """Sessions that nobody uses."""

        async def call(draw: random.Random, client: Client) -> None:
            for _ in range(draw.randrange(1, 20)):
                self.expect(await client.ask("POST", "/v1/sessions", b"{}", _JSON), 201, *BUSY)

        await self.repeat("opening", 20 * self.rest_s, call)

    async def lookaheads(self) -> None:
        """Drafts without a search, many at once."""

        async def call(draw: random.Random, client: Client) -> None:
            opened = await client.ask("POST", "/v1/sessions", b"{}", _JSON)
            if not self.expect(opened, 201, *BUSY):
                return
            session = f"/v1/sessions/{json.loads(opened.body)['session']}"
            for _ in range(draw.choice((10, 60))):
                rows = draw.choices(range(N_QUERIES), k=draw.choice((1, 8, 16)))
                drafts = query_bytes(self._answers.pool[rows])
                self.expect(await client.ask("POST", f"{session}/lookahead", drafts), 202, 404, 400, *BUSY)

        await self.repeat("lookaheads", 15 * self.rest_s, call)

    async def stalling(self) -> None:
        """Bodies that do not come, come late, or whose client goes; answers that nobody reads."""

        async def call(draw: random.Random, _client: Client) -> None:
            async def one() -> None:
                client = self.client("stalling")
                declared = draw.choice((96, 1 << 20, 15 << 20))
                how = draw.choice(("head", "never", "late", "goes", "unread"))
                try:
                    if how == "unread":
                        rows = list(range(16)) * 2
                        body = query_bytes(self._answers.pool[rows])
                        client.send(client.head("POST", "/v1/search?k=1000&nprobe=4", _RAW, len(body)) + body)
                        await self.rest(draw, draw.choice((1.0, 30.0)))
                        return
                    head = client.head("POST", "/v1/search", _RAW, declared)
                    client.send(head[:40] if how == "head" else head + b"\0" * 48)
                    await self.rest(draw, draw.choice((0.5, 20.0)))
                    if how == "late" and declared == 96:
                        client.send(b"\0" * 48)
                    if how != "goes":
                        answer = await asyncio.wait_for(client.read(), 4 * CLIENT_S + LONGEST_FAULT_S)
                        self.expect(answer, 200, 400, 408, 413, *BUSY)
                except GoneError:
                    pass
                finally:
                    client.leave()

            await asyncio.gather(*(one() for _ in range(draw.choice((1, 6, _UNREAD)))))
            self.world.done["stalls"] += 1

        await self.repeat("stalling", 15 * self.rest_s, call)

    async def filling(self) -> None:
        """Keys with a large body each, all at once."""

        async def call(draw: random.Random, _client: Client) -> None:
            clients = [self.client(name) for name in GUESTS]
            try:
                for client in clients:
                    client.send(client.head("POST", "/v1/search", _RAW, 15 << 20) + b"\0")
                await self.rest(draw, 2.0)
            finally:
                for client in clients:
                    client.leave()

        await self.repeat(GUESTS[0], 10 * self.rest_s, call)

    async def holding(self) -> None:
        """At any time a body that does not come; SIGTERM ends it at once."""

        async def call(_draw: random.Random, client: Client) -> None:
            stopped = self.world.ending
            try:
                client.send(client.head("POST", "/v1/search", _RAW, 96) + b"\0" * 48)
                self.expect(await client.read(), 408, *BUSY)
            finally:
                client.leave()
                if not stopped and self.world.ending and (late := self.world.sim.now - self.stopped_s) > _TOLD_S:
                    raise ViolationError(f"a body that had not come was waited for {late:.1f} s after SIGTERM")

        await self.repeat("stalling", 0.1, call)

    async def reading(self) -> None:
        paths = (
            "/v1/status",
            "/v1/plan",
            "/v1/plans",
            "/v1/series",
            "/v1/events",
            "/metrics",
            "/v1/indexes",
        )

        async def call(draw: random.Random, client: Client) -> None:
            for path in draw.sample(paths, 3):
                answer = await client.ask("GET", path)
                # With a store that stalls, those that read it wait, or are refused.
                self.expect(answer, 200, *(BUSY if self.faults else ()))

        await self.repeat("reading", 2 * self.rest_s, call)

    async def probing(self) -> None:
        """Whether it is well, at any time: that never waits."""

        async def call(_draw: random.Random, client: Client) -> None:
            began = self.world.sim.now
            answer = await client.ask("GET", "/healthz")
            if answer.status == 503 and self._waits_for_sessions(json.loads(answer.body)):
                self.world.done["plans that wait for sessions"] += 1
            else:
                self.expect(answer, 200, *(BUSY if self.faults else ()))
            if (took := self.world.sim.now - began) > _TOLD_S:
                raise ViolationError(f"/healthz took {took:.1f} s")

        await self.repeat("reading", self.rest_s, call)

    def _waits_for_sessions(self, health: dict[str, Any]) -> bool:
        """Whether all that is wrong is that sessions have pages that lists of a new plan are for: these come later."""
        router = self.service.router
        if {check["name"] for check in health.get("checks", ()) if not check["ok"]} != {"fallbacks"}:
            return False
        # They may have come since the answer, or be coming.
        sessions = any(use.lookahead_bytes or use.other_bytes for use in router.arena_use())
        return sessions or router.stats().unplaced_lists == 0

    async def planning(self) -> None:
        async def call(draw: random.Random, client: Client) -> None:
            kind = draw.choice(("repartition", "apply", "reload"))
            if kind == "repartition":
                asked = {"apply": True, "force": True, "coverage": draw.choice((0.1, 0.3, 0.6))}
                answer = await client.ask("POST", "/v1/repartition", json.dumps(asked).encode(), _JSON)
            elif kind == "apply":
                path = f"/v1/plans/{draw.choice((1, 2))}/apply"
                answer = await client.ask("POST", path, json.dumps({"force": True}).encode(), _JSON)
            else:
                answer = await client.ask("POST", "/v1/reload")
            self.expect(answer, 200, 409, *BUSY)
            self.world.done["plans"] += answer.status == 200

        await self.repeat("admin", 25 * self.rest_s, call)

    async def breaking(self) -> None:
        world, machine, draw = self.world, self.world.machine, random.Random(f"faults {self.world.draw.random()}")
        world.expected_errors += ["out of order", "is slow", "could not be tried", "does not end", "Cancel "]
        # A look at the store that stalls ends after the daemon has.
        world.expected_errors += ["graceful shutdown exceeded", "it was closed"]
        while not world.ending:
            await self.rest(draw, 12 * self.rest_s)
            ends = world.sim.now + draw.choice((0.5, 5.0, LONGEST_FAULT_S))
            if draw.random() < 0.3:
                self._store_stalls_until = ends
            else:
                names = (machine.scans_stall, machine.copies_stall, machine.scans_fail, machine.copies_fail)
                draw.choice(names)[0] = ends
            self._last_fault_ends = max(self._last_fault_ends, ends)
            world.done["faults"] += 1

    def everybody(self) -> list[Awaitable[None]]:
        all_of_them: list[Awaitable[None]] = [
            self.searching("steady"),
            self.searching("other"),
            self.in_sessions("sessions"),
            self.flooding(),
            self.lookaheads(),
            self.stalling(),
            self.holding(),
            self.filling(),
            self.opening(),
            self.reading(),
            self.probing(),
            self.planning(),
        ]
        return [*all_of_them, self.breaking()] if self.faults else all_of_them


def run_daemon(seed: int, seconds: float, planned: Path, answers: Answers, *, quiet: bool = False) -> Outcome:
    """Raises ViolationError."""
    scene = DaemonWorld(seed, seconds, planned, answers, quiet=quiet)
    with simulated(scene.world):
        outcome = scene.world.run(lambda: scene.live(DaemonWorld.everybody))
    outcome.seed = seed
    return outcome
