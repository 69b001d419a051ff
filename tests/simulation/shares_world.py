"""A well-behaved key of a daemon, first alone and then beside keys that flood it: how many of its calls are in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable
from pathlib import Path

from tests.simulation.answers import Answers
from tests.simulation.daemon_world import BUSY, CLIENT_S, DaemonWorld
from tests.simulation.http_client import Client, GoneError, query_bytes
from tests.simulation.virtual.scheduler import ViolationError
from tests.simulation.world import Outcome, simulated

__all__ = ["run_shares"]

#: Between two calls of the well-behaved key, and in which time each should be answered.
_EVERY_S = 0.25
_SLO_S = 0.25
#: Bodies that do not come: all together they fill the memory for requests to the last byte.
_BODIES = (*(15 << 20,) * 5, *(7 << 20, 3 << 20, 1 << 20) * 2, *(1 << at for at in range(19, 13, -1)), *(96,) * 8)
#: Part of the attainment alone.
_LEAST = 0.95


class _Shares(DaemonWorld):
    def __init__(self, seed: int, seconds: float, planned: Path, answers: Answers, floods: tuple[str, ...]) -> None:
        super().__init__(seed, seconds, planned, answers)
        self.floods = floods
        self.faults, self.part = False, 1.0
        machine = self.world.machine
        machine.host_pace, machine.device_pace, machine.copy_pace = 1e8, 5e8, 1e5
        self.n_called = self.n_in_time = 0

    @property
    def attainment(self) -> float:
        """Raises ViolationError: nothing was due."""
        if not self.n_called:
            raise ViolationError("no call of the well-behaved key was due before the end")
        return self.n_in_time / self.n_called

    def everybody(self) -> list[Awaitable[None]]:
        floods = {
            "searches": [self._searches() for _ in range(24)],
            "lookaheads": [self._drafts() for _ in range(2)],
            "bodies": [self._bodies(number, declared) for number, declared in enumerate(_BODIES)],
            "sessions": [self._sessions()],
        }
        every: list[Awaitable[None]] = [self._steady()]
        for name, tasks in floods.items():
            if name in self.floods:
                every += tasks
            else:
                for task in tasks:
                    task.close()
        return every

    async def _steady(self) -> None:
        draw = random.Random("steady")
        await asyncio.sleep(2.0)
        calls = []
        opened = await self.client("steady").ask("POST", "/v1/sessions", b"{}", "application/json")
        if not self.expect(opened, 201):
            return
        session = f"/sessions/{json.loads(opened.body)['session']}"
        while not self.world.ending:
            calls.append(asyncio.ensure_future(self._in_time(draw, draw.choice(("", session)))))
            await asyncio.sleep(_EVERY_S)
        await asyncio.gather(*calls)

    async def _in_time(self, draw: random.Random, session: str) -> None:
        """One call, which counts if it was due before the end, answered or not."""
        client, due_s = self.client("steady"), self.world.sim.now + _SLO_S
        rows = draw.choices(range(16), k=2)
        try:
            found = await self._ahead(client, session, rows) if session else True
            found = found and await self.search(draw, client, *BUSY, session=session, rows=rows)
        except GoneError:
            found = False
        finally:
            client.leave()
        if not self.world.ending or due_s <= self.stopped_s:
            self.n_called += 1
            self.n_in_time += found and self.world.sim.now <= due_s

    async def _ahead(self, client: Client, session: str, rows: list[int]) -> bool:
        """Whether a lookahead was taken and made nobody give way."""
        answer = await client.ask("POST", f"/v1{session}/lookahead", query_bytes(self._answers.pool[rows]))
        return self.expect(answer, 202, *BUSY) and not json.loads(answer.body)["dropped"]

    async def _again_and_again(self, name: str, call: str, body: bytes, *allowed: int) -> None:
        client = self.client(name)
        while not self.world.ending:
            try:
                answer = await client.ask("POST", call, body)
                self.expect(answer, *allowed, *BUSY)
                await asyncio.sleep(0.02 if answer.status < 400 else 0.1)
            except GoneError:
                pass
        client.leave()

    async def _searches(self) -> None:
        body = query_bytes(self._answers.pool[:8])
        await self._again_and_again("flooding", "/v1/search?k=10&nprobe=12", body, 200)

    async def _drafts(self) -> None:
        client = self.client("lookaheads")
        opened = await client.ask("POST", "/v1/sessions", b"{}", "application/json")
        if self.expect(opened, 201, *BUSY):
            session = json.loads(opened.body)["session"]
            body = query_bytes(self._answers.pool[:4])
            await self._again_and_again("lookaheads", f"/v1/sessions/{session}/lookahead", body, 202)
        client.leave()

    async def _bodies(self, number: int, declared: int) -> None:
        await asyncio.sleep(0.05 * number)
        while not self.world.ending:
            client: Client = self.client("stalling")
            try:
                client.send(client.head("POST", "/v1/search", "application/octet-stream", declared) + b"\0")
                self.expect(await asyncio.wait_for(client.read(), 2 * CLIENT_S), 408, *BUSY)
            except GoneError:
                pass
            client.leave()
            await asyncio.sleep(0.2)

    async def _sessions(self) -> None:
        client = self.client("opening")
        while not self.world.ending:
            with contextlib.suppress(GoneError):
                self.expect(await client.ask("POST", "/v1/sessions", b"{}", "application/json"), 201, *BUSY)
            await asyncio.sleep(0.2)
        client.leave()


def run_shares(seed: int, seconds: float, planned: Path, answers: Answers) -> Outcome:
    """Raises ViolationError: the well-behaved key attains less than 0.95 of what it attains alone."""
    draw = random.Random(f"shares {seed}")
    kinds = ("searches", "lookaheads", "bodies", "sessions")
    floods = kinds if draw.random() < 0.5 else (draw.choice(kinds),)
    scenes = [_Shares(seed, seconds, planned, answers, which) for which in ((), floods)]
    outcomes = []
    for scene in scenes:
        with simulated(scene.world):
            outcomes.append(scene.world.run(lambda scene=scene: scene.live(type(scene).everybody)))  # type: ignore[misc]
    alone, beside = (scene.attainment for scene in scenes)
    if alone < _LEAST:
        raise ViolationError(f"alone {alone:.3f} of the calls are in time")
    if beside < _LEAST * alone:
        raise ViolationError(
            f"beside a flood of {', '.join(floods)} {beside:.3f} of the calls are in time, alone {alone:.3f}"
        )
    outcome = outcomes[1]
    outcome.seed = seed
    outcome.seconds += outcomes[0].seconds
    outcome.n_turns += outcomes[0].n_turns
    outcome.done["attainment in thousandths"] = round(1000 * beside / alone)
    return outcome
