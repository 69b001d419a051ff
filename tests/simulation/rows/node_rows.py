"""What a node does about changes of rows: it follows those of the index, and makes, hands on or tells of some.

With the product's parts, as ``hybridindex/service/cluster/member.py`` and the daemon's routes put them together.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from starlette.requests import Request

from hybridindex.index.ivf import IVFIndex
from hybridindex.index.opening import open_index
from hybridindex.router.remote.changes import CHANGED_PATH, KNOWN_WITHIN_S, PeerChanges
from hybridindex.router.remote.remote_lists import RemoteLists
from hybridindex.service.auth import Caller, Role
from hybridindex.service.cluster.following import Following
from hybridindex.service.http.middleware import CALLER
from hybridindex.service.http.nodes.writes import NodeWrites
from hybridindex.service.http.problems import problem_of
from tests.simulation.virtual.scheduler import ViolationError
from tests.simulation.world import World

__all__ = ["ROWS_PATH", "NodeRows", "open_with_changes"]

#: Where a node takes changes of clients and of other nodes.
ROWS_PATH = "/v1/rows"
#: Part of the looks that take long, and how long at most.
_SLOW_LOOKS, _SLOW_S = 0.05, 0.3


def open_with_changes(whole: Path, share: Path) -> tuple[IVFIndex, IVFIndex]:
    """The whole index and the share of one process: no other one that opened them by another path has their memory."""
    opened = open_index(whole, verify="quick")
    index = open_index(share, changes_of=whole)
    assert index.live is opened.live
    return opened, index


class _Following(Following):
    """A thread that does not look while its process hangs, and now and then waits for a file."""

    def __init__(self, index: IVFIndex, world: World, draw: random.Random, hangs: Callable[[], bool]) -> None:
        self._sim, self._draw, self._hangs = world.sim, draw, hangs
        super().__init__(index.live)

    def _look(self) -> None:
        if self._hangs():
            return
        if self._draw.random() < _SLOW_LOOKS:
            self._sim.sleep(self._draw.uniform(0, _SLOW_S))
        super()._look()


class NodeRows:
    """Of one life of a node. For :class:`NodeWrites` it is the daemon's members, of which there is one: itself."""

    def __init__(
        self,
        whole: IVFIndex,
        world: World,
        remote: RemoteLists,
        draw: random.Random,
        hangs: Callable[[], bool],
        make: Callable[[dict[str, Any]], int],
    ) -> None:
        """``make``: makes a change, and says its number."""
        self.whole, self.remote, self._make = whole, remote, make
        self.changes = PeerChanges(remote)
        self._world = world
        self._following = _Following(whole, world, draw, hangs)
        self._writes = NodeWrites(cast("Any", None), cast("Any", self))
        #: Of the last change that it said it knows.
        self.acknowledged = 0
        self._n_open = 0

    @property
    def current(self) -> NodeRows:
        """The member of the generation that serves."""
        return self

    def all(self) -> list[NodeRows]:
        """Of every generation that is open."""
        return [self]

    @property
    def number(self) -> int:
        """Of the last change that searches see."""
        return self._following.number

    @property
    def waits(self) -> bool:
        """Whether other nodes may be asked for something."""
        return self._n_open > 0 or any(known.asking for known in self.changes._known.values())

    def know(self, number: int) -> int:
        return self._following.until(number, KNOWN_WITHIN_S)

    # Requests, on the loop of the server

    async def answer(
        self, target: str, headers: list[tuple[bytes, bytes]], body: bytes, left: Callable[[], bool]
    ) -> tuple[int, bytes]:
        """Status and body; ``left``: whether who asked has gone away."""

        async def receive() -> dict[str, str]:
            if not left():
                await asyncio.Future[None]()  # until who looks gives up
            return {"type": "http.disconnect"}

        if target.startswith(CHANGED_PATH):
            known = await asyncio.to_thread(self.know, int(target.partition("=")[2]))
            self.acknowledged = max(self.acknowledged, known)
            return 200, str(known).encode()
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": target,
            "query_string": b"",
            "headers": headers,
        }
        # Nodes and clients have one name here: an admin's key says that a change was forwarded.
        scope[CALLER] = Caller(name="node", role=Role.ADMIN)
        self._n_open += 1
        try:
            return 200, await self._change(Request(scope, receive), body)
        except Exception as error:  # noqa: BLE001 - as the daemon
            problem = problem_of(error)
            if problem.status == 500:
                self._world.sim.fail(ViolationError(f"a change failed with {error!r}"))
            return problem.status, problem.body("")
        finally:
            self._n_open -= 1

    async def _change(self, request: Request, body: bytes) -> bytes:
        if (made := await self._writes.elsewhere(request, body, None)) is not None:
            return made
        self.chosen()
        number = await asyncio.to_thread(self._make, json.loads(body))
        began_s = self._world.sim.now
        await self._writes.tell(number)
        self.told(number, began_s)
        return json.dumps({"number": number}).encode()

    def chosen(self) -> None:
        """Told that this node takes itself for the one that writes."""

    def told(self, number: int, began_s: float) -> None:
        """Told that others know of change ``number``, or could not be told; ``began_s``: since when they were."""

    def close(self) -> None:
        """After the router and the server."""
        self._following.close()
        self.whole.close()
