"""Nodes of a cluster in a simulation: searches on any of them while others hang, stop, lose lists or cannot be reached,
and while lists move and rows come and go.

An answer is one machine's, or says what it lacks where a part was asked for, or there is none and the error says so.
Where each list that a search needs is on a node that nothing was wrong with meanwhile, only the first is right, and
soon. It is of one state of the index: no older than the last change that its node knew of when it began, and no newer
than the last one that its node knows of when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from hybridindex.errors import IncompleteAnswerError, RouterClosedError
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.opening import open_index
from hybridindex.router.remote import connection, peer, remote_lists
from hybridindex.router.remote.cluster_map import ClusterMap, MapNode
from hybridindex.types import SearchResult
from tests.clustered import hand_made_plan
from tests.simulation.answers import N_QUERIES, Answers
from tests.simulation.cluster_node import GARBLED, Node, make_empty_share
from tests.simulation.rows.changing import Changing
from tests.simulation.rows.node_rows import NodeRows
from tests.simulation.rows.states import States
from tests.simulation.virtual.event_loop import SimLoop, on_loop
from tests.simulation.virtual.network import Network
from tests.simulation.virtual.scheduler import ViolationError
from tests.simulation.world import Outcome, World, simulated

__all__ = ["run_nodes"]

#: After a fault others ask a node again.
_SETTLE_S = 3.0
#: Longest fault; and how long a node is away at least: others notice.
_FAULT_S, _AWAY_S = 20.0, 1.5
#: A search takes no longer where all nodes are well; and for each that is not: a second until that is seen, and two for
#: which a node is waited for that may only be busy.
_SOON_S, _SILENT_S = 1.5, 3.5
#: Bytes that it waits for besides, where too many rows are gone: it and all before it are searched a second time.
_AGAIN_BYTES = 1e8
#: With a deadline and ``allow_partial``: beyond the deadline.
_AFTER_DEADLINE_S = 1.0

_KINDS = ("hangs", "stuck", "garbles", "slow", "cut", "losing")

_Held = npt.NDArray[np.bool_]


class _Ordered(dict[Any, None]):
    """A set whose order is the same in each run: that of others follows addresses."""

    def add(self, each: Any) -> None:
        self[each] = None

    def discard(self, each: Any) -> None:
        self.pop(each, None)


@dataclass(slots=True, kw_only=True)
class _InForce:
    """A map, and until when a search may have begun with it."""

    #: (n_nodes, nlist) bool.
    holders: _Held
    until_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    rows: npt.NDArray[np.int64]
    k: int
    nprobe: int
    options: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Began:
    """A search, when it began."""

    at_s: float
    #: Of the life of the node that was asked.
    rows: NodeRows
    #: The last change that it knew of.
    number: int


class NodesWorld:
    """One cluster and its users."""

    def __init__(self, seed: int, seconds: float, index: IVFIndex, answers: Answers, folder: Path) -> None:
        self.world = World(seed, seconds)
        self._index, self._answers, self._folder = index, answers, folder
        draw = self.world.draw
        self.n_nodes = draw.choice((2, 3, 3, 4))
        self.replicas = min(self.n_nodes, draw.choice((1, 2, 2, 2, 3)))
        self.timeout_s = draw.choice((20.0, 30.0))
        #: Mean seconds between two calls of a user.
        self.rest_s = draw.choice((0.15, 0.5, 1.5, 5.0))
        self.faults = draw.random() < 0.85
        #: Which faults there are.
        self.kinds = draw.choice((_KINDS, _KINDS, ("hangs", "cut"), ("garbles", "losing"), ("stuck", "slow")))
        #: One fault at a time, or as they come.
        self.one_by_one = draw.random() < 0.5
        self.network = Network(self.world.sim, random.Random(f"network {draw.random()}"))
        self._states = States(index, answers)
        # Of codes all rows are candidates: each query reads its own, where a scan reads a list once for many.
        again_bytes = (1 if index.rabitq is None else 3) * _AGAIN_BYTES
        self._soon_s = _SOON_S + again_bytes / self.world.machine.host_pace
        self._version = 0
        self._published_s = 0.0
        self._maps: list[_InForce] = []
        #: Nodes that the map says are not to be asked.
        self._set_aside: set[str] = set()
        #: Until when something is, or may be, wrong with a node, or between two.
        self._wrong: dict[Any, float] = {}
        #: Of these, until when a node answers pings and no scans, or late.
        self._dawdles: dict[str, float] = {}
        #: When a node was last killed and started.
        self._stopped_s: dict[str, float] = {}
        self._started_s: dict[str, float] = {}
        self._n_ports = 9000

    # Life

    def live(self) -> None:
        world, draw = self.world, self.world.draw
        self._changing = Changing(
            world, self.network, self._states, self._answers.pool, timeout_s=self.timeout_s, is_well=self._is_well
        )
        self.nodes = [self._node(f"node-{number}", draw) for number in range(self.n_nodes)]
        holders = self._place(draw)
        for node, held in zip(self.nodes, holders, strict=True):
            node.start(self._port(), held)
            self._started_s[node.name] = world.sim.now
        self._publish(draw, holders)
        world.sim.sleep(_SETTLE_S)
        self._check_up()
        users: list[tuple[str, Callable[[random.Random], None]]] = [
            *((f"searching {number}", self._searching) for number in range(3)),
            ("flooding", self._flooding),
            ("on a loop", self._on_loop),
            ("moving", self._moving),
            ("looking", self._looking),
            *((f"changing {number}", lambda draw: self._changing.user(draw, self._some_url)) for number in range(2)),
        ]
        if self.faults:
            users.append(("breaking", self._breaking))
        for name, life in users:
            world.user(name, life)
        world.sim.sleep(world.seconds)
        world.end()
        self._heal()
        world.join_users(4 * self.timeout_s + 60)
        world.sim.sleep(_SETTLE_S + 10)
        self._check_up()
        for node in self.nodes:
            self._check_newest(node)
        for node in self.nodes:
            with world.within(f"the end of {node.name}", 2 * self.timeout_s + 30):
                node.stop()

    def _node(self, name: str, draw: random.Random) -> Node:
        settings: dict[str, Any] = {"timeout_s": self.timeout_s, "max_batch": draw.choice((None, None, 16))}
        scanned = self._index
        if scanned.rabitq is not None:
            # With candidates for all rows answers are those of rows, whoever scans which.
            settings |= {"precision": "codes", "candidates": self._index.count}
            if draw.random() < 0.2:
                settings["precision"] = "rows"
            else:
                scanned = self._index.by_codes()
        if draw.random() < 0.3:
            lists = draw.sample(range(self._index.nlist), draw.randrange(self._index.nlist // 2))
            device = np.full(self._index.nlist, -1)
            device[lists] = 0
            settings |= {"devices": ["cpu"], "plan": hand_made_plan(scanned, device)}
        node = Node(self.world, self.network, name, self._folder / name, self._index, settings, self._changing)
        node.asked = lambda asker: self._asked_by(node, asker)  # type: ignore[method-assign]
        node.chosen = lambda: self._check_writer(node)  # type: ignore[method-assign]
        node.told = lambda number, began_s: self._told(node, number, began_s)  # type: ignore[method-assign]
        return node

    def _port(self) -> int:
        self._n_ports += 1
        return self._n_ports

    def _place(self, draw: random.Random) -> _Held:
        """(n_nodes, nlist): each list on some nodes, a few on all."""
        holders = np.zeros((self.n_nodes, self._index.nlist), dtype=np.bool_)
        for each in range(self._index.nlist):
            n = self.n_nodes if draw.random() < 0.1 else self.replicas
            holders[draw.sample(range(self.n_nodes), n), each] = True
        return holders

    def _publish(self, draw: random.Random, holders: _Held) -> None:
        """Gives all nodes that are there a new map, one after the other."""
        self._version += 1
        before = self._maps[-1] if self._maps else None
        self._maps.append(_InForce(holders=holders))
        self._map = self._map_of(holders)
        for node in self.nodes:
            if node.is_up:
                node.remote.apply(self._map)
                self.world.sim.sleep(draw.choice((0.0, 0.01, 0.5)))
        self._published_s = self.world.sim.now
        if before is not None:
            before.until_s = self.world.sim.now

    def _map_of(self, holders: _Held) -> ClusterMap:
        bits = np.zeros(self._index.nlist, dtype=np.uint64)
        for number, held in enumerate(holders):
            bits |= held.astype(np.uint64) << np.uint64(number)
        return ClusterMap(
            cluster="simulated",
            version=self._version,
            fingerprint=self._index.fingerprint,
            generation=self._index.generation,
            nodes=tuple(
                MapNode(name=node.name, url=node.url, serving=node.name not in self._set_aside) for node in self.nodes
            ),
            holders=bits,
            replicas=self.replicas,
        )

    def _heal(self) -> None:
        self.network.heal()
        for node in self.nodes:
            node.hangs = node.stuck = node.garbles = node.slow = 0.0

    def _check_up(self) -> None:
        """Nothing is wrong: everybody asks everybody."""
        for node in self.nodes:
            for other in node.remote.status():
                if other["state"] != "up":
                    raise ViolationError(f"{node.name} takes {other['name']} to be {other['state']}, which is well")
            if len(nobody := node.remote.nobody_has()):
                raise ViolationError(f"{node.name} says that nobody has lists {nobody}")

    def _is_well(self, began_s: float) -> bool:
        """Whether nothing has been wrong since then, nobody moved, and some node may write."""
        return (
            max(self._wrong.values(), default=0.0) < began_s
            and self._published_s < began_s
            and self._maps[-1].until_s == math.inf
            and any(node.serving for node in self._map.nodes)
        )

    # What is known of changes

    def _check_newest(self, node: Node) -> None:
        """Nobody changes anything any more, and all is well."""
        newest = self._states.newest
        if node.rows.number != newest:
            raise ViolationError(f"{node.name} knows of change {node.rows.number}; {newest} were made")
        asked = _Asked(rows=np.arange(N_QUERIES), k=10, nprobe=16, options={})
        found = node.router.search(self._answers.pool[asked.rows], asked.k, asked.nprobe)
        self._states.check(newest, newest, lambda answers: answers.check(asked.rows, asked.k, asked.nprobe, found))

    def _check_writer(self, node: Node) -> None:
        """Who a node takes for the one that writes: the first that serves and answers it, where most of them do."""
        found, map_ = node.rows.changes.writer(), node.remote.map
        answering = {node.name, *(peer["name"] for peer in node.remote.status() if peer["state"] in ("up", "late"))}
        serving = [] if map_ is None else [each.name for each in map_.nodes if each.serving]
        there = [name for name in serving if name in answering]
        wanted = there[0] if len(there) > len(serving) / 2 else None
        if found != wanted:
            raise ViolationError(f"{node.name} takes {found} for the node that writes; expected {wanted} of {serving}")
        self.world.done[f"{'no' if wanted is None else 'a'} node writes"] += 1

    def _told(self, node: Node, number: int, began_s: float) -> None:
        wrong = self._wrong_for(node, began_s)
        if self._wrong.get(node.name, 0.0) <= began_s and node.is_up:
            others = [other for i, other in enumerate(self.nodes) if other is not node and i not in wrong]
            self._changing.told(number, began_s, [(other.name, other.rows) for other in others])

    def _some_url(self, draw: random.Random) -> str | None:
        node = draw.choice(self.nodes)
        return node.url if node.is_up else None

    def _looking(self, draw: random.Random) -> None:
        while not self.world.ending:
            self.world.pause(draw, 0.3)
            for node in self.nodes:
                if node.is_up:
                    self._check_writer(node)

    def _asked_by(self, node: Node, asker: str) -> None:
        """Whoever has seen a node go asks it again when it has answered two pings, or one and has pinged itself."""
        gone_s = self._stopped_s.get(node.name)
        if (
            gone_s is None
            or self._started_s[asker] > gone_s
            or self._wrong.get(frozenset((node.name, asker)), 0.0) > gone_s
        ):
            return
        own = next(each for each in self.nodes if each.name == asker)
        pinged = own.pinged_s.get(node.name, -1.0) >= self._started_s[node.name]
        if (n := node.pings[asker]) < 1 or n + pinged < 2:
            raise ViolationError(
                f"{asker} asks {node.name} for a scan, which came back, has answered {n} pings and sent "
                f"{'some' if pinged else 'none'}"
            )

    # What a search comes to

    def _ask(self, draw: random.Random) -> _Asked:
        rows = np.array(draw.choices(range(N_QUERIES), k=draw.choice((1, 1, 1, 2, 8))))
        options: dict[str, float] = {}
        if draw.random() < 0.15:
            options |= {"deadline_ms": draw.choice((1.0, 20.0, 500.0)), "min_nprobe": 2}
        if draw.random() < 0.3:
            options["allow_partial"] = draw.choice((0.01, 0.5, 0.9, 1.0))
        return _Asked(rows=rows, k=draw.choice((1, 5, 10, 40)), nprobe=draw.randrange(2, 17), options=options)

    def _begin(self, node: Node) -> _Began:
        number = max(node.rows.number, node.rows.acknowledged)
        return _Began(at_s=self.world.sim.now, rows=node.rows, number=number)

    def _ended(self, node: Node, asked: _Asked, began: _Began, outcome: SearchResult | BaseException) -> None:
        """Raises ViolationError: this must not come of a search, or not so late."""
        began_s, last = began.at_s, began.rows.number
        took_s = self.world.sim.now - began_s
        partial, deadline = "allow_partial" in asked.options, asked.options.get("deadline_ms")
        what = f"a search for {asked.rows} on {node.name} with k {asked.k}, nprobe {asked.nprobe}, {asked.options}"
        killed = self._wrong.get(node.name + " is killed", 0.0) > began_s
        must = not killed and self._is_held(node, asked, began, last)
        # A search whose lists moved meanwhile begins anew.
        tries = sum(each.until_s >= began_s for each in self._maps)
        most_s = self._soon_s + _SILENT_S * len(self._wrong_for(node, began_s)) * tries
        if killed or (not must and any(ends_s > began_s for ends_s in self._dawdles.values())):
            most_s = 3 * self.timeout_s + 30
        if partial and deadline is not None and not killed:
            most_s = min(most_s, deadline / 1e3 + (_AFTER_DEADLINE_S + self._soon_s - _SOON_S) * tries)
            must = False
        if took_s > most_s:
            raise ViolationError(f"{what} took {took_s:.1f} s; expected {most_s:g} s at most")
        if isinstance(outcome, SearchResult):
            self.world.done["answers"] += 1
            if outcome.coverage is None:
                least = None if deadline is None else 2
                self._states.check(
                    began.number,
                    last,
                    lambda answers: answers.check(asked.rows, asked.k, asked.nprobe, outcome, least=least),
                )
                return
            self.world.done["partial answers"] += 1
            if not partial or (outcome.coverage < asked.options["allow_partial"]).any():
                raise ViolationError(f"{what} was answered with coverage {outcome.coverage}")
            self._states.check(began.number, last, lambda answers: answers.check_partial(asked.rows, asked.k, outcome))
        elif isinstance(outcome, IncompleteAnswerError):
            self.world.done["incomplete answers"] += 1
            if not 0 <= outcome.coverage < 1:
                raise ViolationError(f"{what} failed with coverage {outcome.coverage}")
        elif killed and isinstance(outcome, RouterClosedError):
            return
        else:
            raise ViolationError(f"{what} failed with {outcome!r}") from outcome
        if must:
            raise ViolationError(f"{what} is incomplete, and nodes that are well have all of its lists: {outcome!r}")

    def _wrong_for(self, asker: Node, began_s: float) -> list[int]:
        """Nodes that something was wrong with since then, as far as ``asker`` can see."""
        return [
            number
            for number, node in enumerate(self.nodes)
            if node is not asker
            and max(self._wrong.get(node.name, 0.0), self._wrong.get(frozenset((node.name, asker.name)), 0.0)) > began_s
        ]

    def _is_held(self, asker: Node, asked: _Asked, began: _Began, last: int) -> bool:
        """Whether each of its lists was on a node that was well all the time, by each map that it may have used."""
        began_s = began.at_s
        wrong = self._wrong_for(asker, began_s)
        if wrong and asker.hedges.refused_s >= began_s:
            return False  # what is late is waited for
        well = np.ones(self.n_nodes, dtype=np.bool_)
        well[wrong] = False
        lists = self._states.reached(began.number, last, asked.rows, asked.k, asked.nprobe)
        if any(self._dawdles.get(self.nodes[number].name, 0.0) > began_s for number in wrong):
            # Others are asked, too, where they have all lists of a part, which may be of other searches as well.
            lists = np.arange(self._index.nlist)
        return all(
            bool(each.holders[well][:, lists].any(axis=0).all()) for each in self._maps if each.until_s >= began_s
        )

    # Users

    def _repeat(self, draw: random.Random, rest_s: float, call: Callable[[Node], None]) -> None:
        while not self.world.ending:
            self.world.pause(draw, rest_s)
            for _ in range(draw.choice((1, 1, 1, 4))):
                node = draw.choice(self.nodes)
                if node.is_up and not self.world.ending:
                    call(node)

    def _one(self, node: Node, asked: _Asked, began: _Began, wait: Callable[[], SearchResult]) -> None:
        outcome: SearchResult | BaseException
        try:
            outcome = wait()
        except ViolationError:
            raise
        except Exception as error:  # noqa: BLE001 - judged
            outcome = error
        self._ended(node, asked, began, outcome)

    def _searching(self, draw: random.Random) -> None:
        def call(node: Node) -> None:
            asked, router = self._ask(draw), node.router
            queries = self._answers.pool[asked.rows]
            self._one(
                node,
                asked,
                self._begin(node),
                lambda: router.search(queries, asked.k, asked.nprobe, **asked.options),  # type: ignore[arg-type]
            )

        self._repeat(draw, self.rest_s, call)

    def _flooding(self, draw: random.Random) -> None:
        """So many at once that not all of them may be asked twice."""

        def call(node: Node) -> None:
            began, router = self._begin(node), node.router
            many = [self._ask(draw) for _ in range(draw.choice((3, 20, 60)))]
            futures = []
            for each in many:
                try:
                    queries = self._answers.pool[each.rows]
                    futures.append(router.submit(queries, each.k, each.nprobe, **each.options))  # type: ignore[arg-type]
                except RouterClosedError:
                    many = many[: len(futures)]  # it is being killed
                    break

            def ended(asked: _Asked, done: Future[SearchResult]) -> None:
                try:
                    self._one(node, asked, began, done.result)
                except ViolationError as error:
                    # Whoever calls back would log it.
                    self.world.sim.fail(error)

            for asked, future in zip(many, futures, strict=True):
                # Each ends when it ends, not when it is its turn here.
                future.add_done_callback(partial(ended, asked))
            for future in futures:
                with contextlib.suppress(Exception):
                    future.result(4 * self.timeout_s + 60)

        self._repeat(draw, 4 * self.rest_s, call)

    def _on_loop(self, draw: random.Random) -> None:
        def call(node: Node) -> None:
            began, router = self._begin(node), node.router

            async def one(asked: _Asked) -> None:
                queries = self._answers.pool[asked.rows]
                outcome: SearchResult | BaseException
                try:
                    outcome = await router.asearch(queries, asked.k, asked.nprobe, **asked.options)  # type: ignore[arg-type]
                except Exception as error:  # noqa: BLE001 - judged
                    outcome = error
                self._ended(node, asked, began, outcome)

            async def ask(_loop: SimLoop) -> None:
                await asyncio.gather(*(one(self._ask(draw)) for _ in range(draw.choice((1, 3, 20)))))

            on_loop(ask)

        self._repeat(draw, 2 * self.rest_s, call)

    # What happens to nodes

    def _moving(self, draw: random.Random) -> None:
        """Lists move, and nodes are killed and started again."""
        while True:
            self.world.pause(draw, draw.choice((0.5, 10.0)))
            if self.world.ending:
                return
            if self.faults and draw.random() < 0.5:
                self._restart(draw, draw.choice(self.nodes))
            else:
                self._move(draw)

    def _move(self, draw: random.Random) -> None:
        before, after = self._maps[-1].holders, self._place(draw)
        for node, held in zip(self.nodes, after, strict=True):
            node.hold(held)
        self._set_aside = {node.name for node in self.nodes if draw.random() < 0.1}
        self._publish(draw, after)
        if draw.random() < 0.3:
            self.world.pause(draw, 5.0)
        for node, gone in zip(self.nodes, before & ~after, strict=True):
            node.drop(gone)
        self.world.done["moves"] += 1

    def _restart(self, draw: random.Random, node: Node) -> None:
        sim, killed = self.world.sim, node.name + " is killed"
        self._wrong[killed] = self._wrong[node.name] = math.inf
        self._stopped_s[node.name] = sim.now
        node.stop()
        sim.sleep(draw.uniform(_AWAY_S, _FAULT_S))
        held, port = self._maps[-1].holders[self.nodes.index(node)], node.port
        lost = np.array([draw.random() < 0.5 for _ in held]) if draw.random() < 0.4 else np.zeros_like(held)
        moves = draw.random() < 0.2
        if moves:
            port = self._port()
            del self._stopped_s[node.name]  # for others it is a new one
        node.start(port, held & ~lost if lost.any() else None)
        self._started_s[node.name] = sim.now
        node.remote.apply(self._map)
        if moves:
            self._publish(draw, self._maps[-1].holders)
        if lost.any():
            self.world.pause(draw, 5.0)
            node.hold(held)
        self._wrong[killed] = sim.now + _SETTLE_S
        self._wrong[node.name] = max(sim.now, node.hangs, node.stuck, node.garbles, node.slow) + _SETTLE_S
        self.world.done["restarts"] += 1

    def _breaking(self, draw: random.Random) -> None:
        sim = self.world.sim
        while True:
            self.world.pause(draw, 5.0)
            if self.world.ending:
                return
            ends = sim.now + draw.choice((0.5, 5.0, _FAULT_S))
            fault = draw.choice(self.kinds)
            node, other = draw.sample(self.nodes, 2)
            about: Any = node.name
            if fault in ("cut", "losing"):
                about = frozenset((node.name, other.name))
                links = getattr(self.network, fault)
                links[about] = max(ends, links.get(about, 0.0))
            else:
                node.garbled, node.slow_s = draw.choice(GARBLED), draw.choice((0.1, 1.0, 10.0))
                # A short fault does not end a long one.
                setattr(node, fault, max(ends, getattr(node, fault)))
            self._wrong[about] = max(self._wrong.get(about, 0.0), ends + _SETTLE_S)
            if fault in ("stuck", "slow"):
                self._dawdles[node.name] = max(self._dawdles.get(node.name, 0.0), ends + _SETTLE_S)
            self.world.done["faults"] += 1
            if self.one_by_one:
                sim.sleep(max(0.0, ends + _SETTLE_S - sim.now))


@contextlib.contextmanager
def _ordered_sets() -> Iterator[None]:
    with contextlib.ExitStack() as patches:
        for module in (connection, peer, remote_lists):
            patches.enter_context(mock.patch.object(module, "set", _Ordered, create=True))
        yield


def run_nodes(seed: int, seconds: float, index: IVFIndex, answers: Answers) -> Outcome:
    """Raises ViolationError."""
    with tempfile.TemporaryDirectory(prefix="sim-", dir=index.path.parent) as folder:
        # Its rows are changed.
        shutil.copytree(index.path, Path(folder) / "whole")
        with open_index(Path(folder) / "whole", verify="quick") as whole:
            make_empty_share(whole, Path(folder) / "empty")
            scene = NodesWorld(seed, seconds, whole, answers, Path(folder))
            with simulated(scene.world), _ordered_sets():
                outcome = scene.world.run(scene.live)
    outcome.seed = seed
    return outcome
