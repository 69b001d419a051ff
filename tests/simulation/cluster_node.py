"""A node of a cluster in a simulation: a share, a router with its remote tier, and a server of pings and channels.

The server answers as ``hybridindex/service/http/nodes`` does, unless it is told to do worse.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl

import httptools
import numpy as np
import numpy.typing as npt

from hybridindex.errors import NotHeldError, OverloadedError
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.share.share import create_share
from hybridindex.index.share.source import FolderSource
from hybridindex.router import Router
from hybridindex.router.remote.frames import CHANNEL_PATH
from hybridindex.router.remote.loop_thread import HedgeBudget, LoopThread
from hybridindex.router.remote.peer import NOT_SEEN, PING_PATH, SEEN
from hybridindex.router.remote.remote_lists import RemoteLists
from hybridindex.router.remote.scan_codec import decode_asked, decode_comparison, encode_found
from hybridindex.service.config import Limits
from hybridindex.service.http.nodes.channel import ScanChannel
from hybridindex.service.intake.request_memory import Charge, RequestMemory
from tests.simulation.rows.changing import Changing
from tests.simulation.rows.node_rows import NodeRows, open_with_changes
from tests.simulation.virtual.event_loop import SimLoop
from tests.simulation.virtual.network import End, Network
from tests.simulation.virtual.scheduler import ViolationError
from tests.simulation.world import World

__all__ = ["GARBLED", "Node", "make_empty_share"]

#: What a node says that is out of its mind.
GARBLED = ("short", "twaddle", "not-held", "failed")


def make_empty_share(index: IVFIndex, path: Path) -> None:
    """A folder that nodes copy."""
    create_share(path, FolderSource(index.path))


class _Hedges(HedgeBudget):
    """Knows when it refused one."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.refused_s = 0.0
        self.n_earned = self.n_spent = 0

    def earn(self) -> None:
        self.n_earned += 1
        super().earn()

    def spend(self, n_late: int, n_other: int) -> bool:
        if super().spend(n_late, n_other):
            self.n_spent += 1
            return True
        self.refused_s = self._world.sim.now
        return False


class Node:
    """One node, which may stop and start again."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        folder: Path,
        whole: IVFIndex,
        settings: dict[str, Any],
        changing: Changing,
    ) -> None:
        """``whole``: gives what it holds. ``settings``: of its router, and ``timeout_s`` of its remote tier.
        ``changing``: makes its changes."""
        self.world, self.name = world, name
        self._network = network
        self._folder, self._source = folder, FolderSource(whole.path)
        self._whole, self._n_lives = whole.path.absolute(), 0
        self._timeout_s = settings.pop("timeout_s")
        self._settings, self._changing = settings, changing
        self._draw = random.Random(f"{name} {world.draw.random()}")
        self.keep_alive_s = world.draw.choice((0.5, 5.0, 60.0))
        #: Until when it answers nothing; scans nothing; says what it should not.
        self.hangs = self.stuck = self.garbles = 0.0
        #: Until when scans wait, and for how long.
        self.slow, self.slow_s = 0.0, 0.0
        self.garbled = GARBLED[0]
        #: Pings that each other node was answered since this one was started.
        self.pings: Counter[str] = Counter()
        #: When each other node pinged this one last.
        self.pinged_s: dict[str, float] = {}
        self.is_up = False
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://{self.name}:{self.port}"

    def start(self, port: int, held: npt.NDArray[np.bool_] | None) -> None:
        """``held``: what is on its disk; None: what was there."""
        if held is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            shutil.copytree(self._folder.parent / "empty", self._folder)
        # Other processes, and other lives, have other memory: they know the index by other names.
        self._n_lives += 1
        own = self._folder.parent / f"{self.name}-{self._n_lives}-whole"
        own.symlink_to(self._whole)
        whole, self.index = open_with_changes(own, self._folder)
        if held is not None:
            self.hold(held)
        self.remote = RemoteLists(self.index, self.name, timeout_s=self._timeout_s)
        self.remote.hedges = self.hedges = _Hedges(self.world)
        self.router = Router(self.index, remote=self.remote, scrub_bytes_per_s=0, threads=1, **self._settings)
        self.rows = rows = NodeRows(
            whole,
            self.world,
            self.remote,
            self._draw,
            lambda: self.hangs > self.world.sim.now,
            lambda change: self._changing.make(rows, lambda: self.is_up, change),
        )
        rows.chosen = lambda: self.chosen()  # type: ignore[method-assign]
        rows.told = lambda number, began_s: self.told(number, began_s)  # type: ignore[method-assign]
        self._serving = LoopThread(name=f"serving {self.name}")
        for loop in (cast("SimLoop", self.remote.loop), cast("SimLoop", self._serving.loop)):
            loop.set_exception_handler(self._fail)
            loop.dial = self._network.dialler(loop, self.name)
        self.pings.clear()
        self.port, self.is_up = port, True
        self._network.listen(port, cast("SimLoop", self._serving.loop), self.name, lambda: _Server(self))

    def _fail(self, _loop: Any, context: dict[str, Any]) -> None:
        error = ViolationError(f"on a loop of {self.name}: {context.get('message')}: {context.get('exception')!r}")
        error.__cause__ = context.get("exception")
        self.world.sim.fail(error)

    def hold(self, held: npt.NDArray[np.bool_]) -> None:
        assert self.index.share is not None
        self.index.share.hold(np.flatnonzero(held).tolist(), self._source)

    def drop(self, gone: npt.NDArray[np.bool_]) -> None:
        assert self.index.share is not None
        self.index.share.drop(np.flatnonzero(gone).tolist())

    def stop(self) -> None:
        """As a process that is killed, for the others: its connections end at once."""
        with self._changing.nobody_writes():
            self.is_up = False
        self._network.go_away(self.name)
        # For who asks it: no process ends in a simulation.
        self.router.close()
        self._check_end()
        self._serving.run(self._end_tasks())
        self.remote.close()
        self._serving.close()
        self.rows.close()
        self.index.close()

    def _check_end(self) -> None:
        remote = self.remote
        left = {"scans": len(remote._asked), "parts": remote._n_open}
        for peer in remote._view.peers:
            if peer is not None:
                left[f"scans of {peer.node.name}"] = peer.n_open
                if not self.rows.waits:
                    left[f"waits for {peer.node.name}"] = len(peer._waiting)
        for what, n in left.items():
            if n:
                raise ViolationError(f"{self.name} has closed its router, and {n} {what} are open")
        # Some peers have left.
        hedged = sum(peer["hedged"] for peer in remote.status())
        if hedged > 20 + 0.1 * self.hedges.n_earned:
            raise ViolationError(f"{self.name} asked {hedged} of {self.hedges.n_earned} scans twice")
        self.world.done["hedges"] += hedged

    async def _end_tasks(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        # In the order in which they were made.
        for task in sorted(tasks, key=lambda task: (len(task.get_name()), task.get_name())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._serving.loop.shutdown_default_executor()

    # On the loop of the server

    async def pause_until(self, name: str) -> None:
        while (left := getattr(self, name) - self.world.sim.now) > 0:
            await asyncio.sleep(left)

    async def answer(
        self, asker: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes, left: Callable[[], bool]
    ) -> tuple[int, bytes]:
        """Status and body of what is asked otherwise than on a channel; ``left``: whether who asked has gone away."""
        await self.pause_until("hangs")
        if target == f"{PING_PATH}?of={asker}":
            self.pings[asker] += 1
            self.pinged_s[asker] = self.world.sim.now
            return SEEN if self.remote.pinged_by(asker) else NOT_SEEN, b""
        # Who asked may go away meanwhile: what was begun goes on.
        return await asyncio.shield(asyncio.ensure_future(self.rows.answer(target, headers, body, left)))

    async def answer_scan(self, asker: str, options: str, body: bytes | memoryview) -> bytes:
        """Raises what a daemon's refusal is made of."""
        await self.pause_until("hangs")
        self.world.done["scans for others"] += 1
        self.asked(asker)
        given = dict(parse_qsl(options))
        if given["of"] != f"{self.index.fingerprint}.{self.index.generation}":
            self.world.sim.fail(ViolationError(f"{self.name} was asked for {given['of']}"))
        await self.pause_until("stuck")
        if self.slow > self.world.sim.now:
            await asyncio.sleep(self._draw.uniform(0.5, 1) * self.slow_s)
        n, d, w, k, r = (int(given.get(name, 0)) for name in "ndwkr")
        try:
            if r:
                self.world.done["comparisons for others"] += 1
                queries, positions = decode_comparison(body, n=n, d=d, r=r, list_sizes=self.index.list_sizes)
                compared = await asyncio.to_thread(self.router.compare, queries, positions, k)
                assert compared is not None
                return encode_found(*compared)
            asked = decode_asked(body, n=n, d=d, w=w, n_filters=int(given.get("f", 0)), index=self.index)
            found = await self.router.ascan(asked.queries, k, asked.given())
        except NotHeldError:
            self.world.done["scans of lists that are not held"] += 1
            raise
        return encode_found(found.distances, found.ids)

    def asked(self, asker: str) -> None:
        """Told of each scan that another node asks for."""

    def chosen(self) -> None:
        """Told that it takes itself for the node that writes."""

    def told(self, number: int, began_s: float) -> None:
        """Told when the other nodes know of a change that it made, or could not be told."""


class _Server(asyncio.Protocol):
    """One connection: requests, one at a time, and an end when nothing came for a while; or a channel."""

    def __init__(self, node: Node) -> None:
        self._node = weakref.proxy(node)
        self._parser = httptools.HttpRequestParser(self)
        self._target = ""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = b""
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, End)
        self._end = transport
        self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._wake()
        if self._task is not None:
            self._task.cancel()

    def _rest(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._node.keep_alive_s, self._end.close)

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def data_received(self, data: bytes) -> None:
        self._wake()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            _Channel(self._node, self._end)

    def on_url(self, url: bytes) -> None:
        self._target += url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        target, headers, body = self._target, self._headers, self._body
        self._target, self._headers, self._body = "", [], b""
        if target == CHANNEL_PATH:
            return
        if self._task is not None:
            self._node.world.sim.fail(ViolationError("a request came before the last one was answered"))
        self._task = asyncio.ensure_future(self._answer(target, headers, body))

    async def _answer(self, target: str, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        node = self._node
        asker = self._end.get_extra_info("peername")[0]
        status, answer = await node.answer(asker, target, headers, body, lambda: self._lost)
        stays = node._draw.random() < 0.95
        self._task = None
        head = f"HTTP/1.1 {status} .\r\ncontent-length: {len(answer)}\r\n"
        head += "" if stays else "connection: close\r\n"
        self._end.write(head.encode() + b"\r\n" + answer)
        if stays:
            self._rest()
        else:
            # Whoever believes that it stays open asks in vain.
            self._end.close()


class _Channel(ScanChannel):
    """A daemon's, of a node that may be out of its mind."""

    def __init__(self, node: Node, end: End) -> None:
        memory = RequestMemory(1 << 30, client_share=1.0)
        super().__init__(
            self._scan,
            lambda: memory.open("node"),
            Limits(),
            is_allowed=lambda: True,
            on_answer=lambda _status, _seconds: None,
        )
        self._node, self._end = node, end
        end.write(b"HTTP/1.1 101 .\r\n\r\n")
        end.set_protocol(self)
        self.connection_made(end)

    async def _scan(self, options: str, body: bytes | memoryview, _charge: Charge) -> bytes:
        node, kind = self._node, ""
        found = await node.answer_scan(self._end.get_extra_info("peername")[0], options, body)
        if node.garbles > node.world.sim.now:
            kind = node.garbled
        if kind == "not-held":
            raise NotHeldError("lists are not here")
        if kind == "failed":
            raise OverloadedError("out of its mind", retry_after_s=1)
        if kind == "twaddle":
            self._end.write(b"twaddle, and no frame")
            await asyncio.Event().wait()
        if node._draw.random() > 0.95:
            # Whoever believes that it stays open asks in vain.
            self.shutdown()
        return found[:-12] if kind == "short" else found
