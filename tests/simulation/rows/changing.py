"""Users of a simulated cluster who add, replace and delete rows, and what must come of that."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from hybridindex.index.changes.write import add, delete, upsert
from hybridindex.index.ivf import IVFIndex
from hybridindex.router.remote.changes import KNOWN_WITHIN_S
from hybridindex.router.remote.connection import Address, Connections, Exchange
from hybridindex.types import F32
from tests.simulation.answers import N_QUERIES
from tests.simulation.rows.node_rows import ROWS_PATH, NodeRows
from tests.simulation.rows.states import States
from tests.simulation.virtual.event_loop import SimLoop, on_loop
from tests.simulation.virtual.network import Network
from tests.simulation.virtual.primitives import Lock
from tests.simulation.virtual.scheduler import ViolationError
from tests.simulation.world import World

__all__ = ["Changing"]

#: Within which a change is made where all nodes are well: one of three users waits for the others.
_MADE_S = 8.0
#: Nothing takes longer: until nodes agree, or until the one that writes is given up, and until others were told.
_AGREE_S = 5.0
#: Beside limits: threads take turns.
_SLACK_S = 0.5
#: Rows below which no more than a few are deleted at once.
_FEWEST_ROWS = 1500
_CLIENT = "client"


class Changing:
    """What is changed in one run, and by whom."""

    def __init__(
        self,
        world: World,
        network: Network,
        states: States,
        pool: F32,
        *,
        timeout_s: float,
        is_well: Callable[[float], bool],
    ) -> None:
        """``is_well``: whether nothing was wrong with any node, or between two, and no map came, since a time."""
        self.states = states
        self._world, self._network, self._pool = world, network, pool
        self._timeout_s, self._is_well = timeout_s, is_well
        draw = random.Random(f"changes {world.draw.random()}")
        #: Mean seconds between two changes of a user.
        self._rest_s = draw.choice((0.1, 0.5, 2.0))
        self._draw = draw
        #: As the right to write, which one process has.
        self._claim = Lock()
        #: Number of each change that was made, and those that were refused, by what their users call them.
        self._made: dict[int, int] = {}
        self._refused: set[int] = set()
        self._n_tokens = 0
        self._next_id = 10_000
        self._ever: list[int] = []

    # As a process that writes

    def make(self, node: NodeRows, is_up: Callable[[], bool], change: dict[str, Any]) -> int:
        """Makes a change by way of ``node``; its number."""
        token, ids, whole = change["token"], change["ids"], node.whole
        rows = np.array(change["rows"], dtype=np.float32)
        with self._claim:
            if not is_up():
                raise ConnectionError("the process was killed")
            if token in self._made or token in self._refused:
                before = "made" if token in self._made else "refused"
                self._fail(f"change {token} is made, and was {before} before")
            goes = change["kind"] == "delete"
            if goes and not any(each in self.states for each in ids):  # they went meanwhile
                if delete(whole, ids, sync=False) or whole.live.number != self.states.newest:
                    self._fail(f"change {token} deletes nothing, and is change {whole.live.number}")
                self._made[token] = self.states.newest
                return self.states.newest
            self.states.begin(ids if goes else [], [] if goes else ids, rows)
            try:
                self._apply(whole, change["kind"], ids, rows)
            except BaseException:
                self.states.withdraw()
                raise
            number = self._made[token] = whole.live.number
            # What nobody added yet, nobody replaces: its user would be told that the ids are there.
            self._ever += [each for each in ids[:10] if each not in self._ever]
            if number != self.states.newest:
                self._fail(f"change {self.states.newest} has number {number}")
            if self._draw.random() < 0.1 and whole.live.rewrite(least_bytes=1):
                self._world.done["logs written anew"] += 1
        self._world.done["changes"] += 1
        return number

    @staticmethod
    def _apply(whole: IVFIndex, kind: str, ids: list[int], rows: F32) -> None:
        if kind == "delete":
            delete(whole, ids, sync=False)
        elif kind == "add":
            add(whole, rows, ids, sync=False)
        else:
            upsert(whole, rows, ids, sync=False)

    def nobody_writes(self) -> Lock:
        """To be held while a process is killed."""
        return self._claim

    def _fail(self, words: str) -> NoReturn:
        self._world.sim.fail(ViolationError(words))

    def told(self, number: int, began_s: float, others: Sequence[tuple[str, NodeRows]]) -> None:
        """A node has told the others; ``others``: that something was never wrong with since then."""
        took_s = self._world.sim.now - began_s
        if took_s > KNOWN_WITHIN_S + _SLACK_S:
            self._fail(f"change {number} was told for {took_s:.2f} s; expected {KNOWN_WITHIN_S:g} s at most")
        if took_s < KNOWN_WITHIN_S:
            self._world.done["changes that all know"] += 1
            for name, rows in others:
                if rows.number < number:
                    self._fail(f"change {number} was told, and {name}, which is well, knows {rows.number}")

    # Users

    def user(self, draw: random.Random, choose: Callable[[random.Random], str | None]) -> None:
        """``choose``: the address of some node that is up; None: there is none."""
        while not self._world.ending:
            self._world.pause(draw, self._rest_s)
            url = choose(draw)
            if url is not None and not self._world.ending and (change := self._some(draw)) is not None:
                self._one(url, change)

    def _some(self, draw: random.Random) -> dict[str, Any] | None:
        """A change; None: of rows that are gone already."""
        kind = draw.choice(("add", "replace", "replace", "again", "delete", "delete", "many"))
        near = self.states.nearest(draw.randrange(N_QUERIES), 300)
        n = draw.choice((1, 1, 3, 10))
        if kind == "many" and len(self.states) < _FEWEST_ROWS:
            kind = "add"
        if kind == "add":
            ids = list(range(self._next_id, self._next_id + 4 * n))
            self._next_id += 4 * n
        elif kind == "again":  # some of them were deleted
            ids = draw.sample(self._ever, min(n, len(self._ever)))
        elif kind == "many":
            ids = draw.sample(near, draw.choice((30, 150)))
        else:
            ids = draw.sample(near[:30], n)
        self._n_tokens += 1
        goes = kind in ("delete", "many")
        if not ids:
            return None
        centres = self._pool[[draw.randrange(N_QUERIES) for _ in ids]]
        noise = np.random.default_rng(draw.getrandbits(32)).standard_normal(centres.shape)
        rows = (centres + draw.choice((0.05, 0.5)) * noise).astype(np.float32)
        return {
            "token": self._n_tokens,
            "kind": "delete" if goes else "add" if kind == "add" else "upsert",
            "ids": ids,
            "rows": [] if goes else rows.tolist(),
        }

    def _one(self, url: str, change: dict[str, Any]) -> None:
        began_s, token = self._world.sim.now, change["token"]
        body = json.dumps(change).encode()
        status, answer, error = on_loop(lambda loop: self._post(loop, url, body))
        took_s = self._world.sim.now - began_s
        what = f"change {token} by way of {url}"
        is_well = self._is_well(began_s)
        if is_well and took_s > _MADE_S:
            raise ViolationError(f"{what} took {took_s:.1f} s, and all nodes are well")
        if status == 200:
            if json.loads(answer)["number"] != self._made.get(token):
                raise ViolationError(f"{what} was answered with {answer!r}; it is {self._made.get(token)}")
            self._world.done["acknowledged changes"] += 1
            return
        name = "" if error is not None else json.loads(answer)["type"].rpartition(":")[2]
        if is_well:
            raise ViolationError(f"{what} failed, and all nodes are well: {error!r} {answer!r}")
        if name in ("overloaded", "not-the-writer"):
            if token in self._made:
                raise ViolationError(f"{what} is change {self._made[token]}, and was refused: {answer!r}")
            self._refused.add(token)
        elif error is None and name != "unknown-outcome":
            raise ViolationError(f"{what} failed: {answer!r}")
        self._world.done["changes without an answer"] += 1

    async def _post(self, loop: SimLoop, url: str, body: bytes) -> tuple[int, bytes, Exception | None]:
        loop.dial = self._network.dialler(loop, _CLIENT)
        connections = Connections(loop, Address(url, None))
        answered: asyncio.Future[tuple[int, bytes, Exception | None]] = loop.create_future()

        def told(*answer: Any) -> None:
            if not answered.done():
                answered.set_result(answer)

        connections.request("POST", ROWS_PATH, body, Exchange(told, 1 << 20))
        try:
            async with asyncio.timeout(2 * (self._timeout_s + _AGREE_S) + 60):
                return await answered
        except TimeoutError:
            raise ViolationError(f"a change by way of {url} was never answered") from None
        finally:
            connections.close()
            await asyncio.sleep(0)
