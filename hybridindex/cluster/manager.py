"""The manager of a cluster: places lists on nodes, watches the nodes, copies what was lost, and changes the placement.

It is no part of a search: nodes serve by the map that they got last, and find out by themselves who is away. A change
is made in an order that never leaves a list without its holders: nodes take and verify their new lists, then all get
the new map, then lists are given up that the map does not name. What fails before the new map is undone.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex.cluster.access import Access, read_access
from hybridindex.cluster.node_calls import NodeCalls
from hybridindex.cluster.state import ClusterRequest, ClusterState, NodeEntry, read_state, write_state
from hybridindex.errors import BuildError, HybridIndexError, InvalidInputError, ServiceError, UnreachableError
from hybridindex.index.share.ranges import mask_of
from hybridindex.partitioner.nodes.moves import moves, repair
from hybridindex.partitioner.nodes.node_plan import NodePlan, NodeRequest
from hybridindex.partitioner.nodes.placement import place_lists
from hybridindex.router.remote.cluster_map import U64, ClusterMap, MapNode

__all__ = ["Manager", "Progress"]

_log = logging.getLogger(__name__)

#: Between two looks at a node, and for how long it may be silent. Together below a second.
_LOOK_S, _SILENT_S = 0.2, 0.8
#: Between two looks at lists on their way.
_POLL_S = 0.2
#: For nodes that are new to answer; and for a change that takes a moment to end.
_START_S, _MOMENT_S = 120.0, 5.0

#: Told bytes that were copied so far, and of how many.
Progress = Callable[[int, int], None]


@dataclass(slots=True, eq=False)
class _Node:
    """What is known of one node now."""

    entry: NodeEntry
    calls: NodeCalls
    #: It answers, holds what the map says, and has the newest map.
    up: bool = False
    heard_s: float = field(default_factory=time.monotonic)
    #: Version of the map that it has.
    version: int = 0
    thread: threading.Thread | None = None
    stop: threading.Event = field(default_factory=threading.Event)


class Manager:
    """Owner of the threads that watch nodes. Methods may be called from any thread; changes take turns."""

    def __init__(
        self,
        folder: Path,
        *,
        cluster: str,
        index: Path,
        request: ClusterRequest,
        key: str | None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """
        Args:
            folder: of its state; one that has some goes on with it, and with its request.
            cluster: a name of this cluster that no other one has.
            index: the whole index.
            key: of nodes, with the role admin.

        Raises:
            HybridIndexError: the state or the index cannot be read.
        """
        self._folder, self._key, self._tls = folder, key, tls
        kept = read_state(folder)
        self._state = kept or ClusterState(cluster=cluster, index=str(index), request=request)
        self.access: Access = read_access(Path(self._state.index))
        map_ = self._state.map
        if map_ is not None:
            self._check_serves(self.access, map_.fingerprint, map_.generation)
        self._lock = threading.RLock()
        #: Held by who changes the placement.
        self._changing = threading.Lock()
        self._nodes: dict[str, _Node] = {}
        self._problem = ""
        self._event = threading.Event()
        self._stop = threading.Event()
        self._down_since: dict[str, float] = {}
        #: Who served when lists were copied last: until that changes, what memory was too short for stays too large.
        self._repaired: tuple[bool, ...] | None = None
        self._thread = threading.Thread(target=self._run, name="hybridindex-manager", daemon=True)
        for entry in self._state.nodes:
            self._watch(entry)
        self._thread.start()

    def _check_serves(self, access: Access, fingerprint: str, generation: int) -> None:
        """Raises InvalidInputError: the index is not the one that the cluster serves."""
        if (access.fingerprint, access.generation) != (fingerprint, generation):
            raise InvalidInputError(
                f"{self._state.index} has generation {access.generation} of {access.fingerprint}, and the cluster "
                f"serves generation {generation} of {fingerprint}; stop the cluster and start it anew"
            )

    # Nodes

    def set_nodes(self, entries: Sequence[NodeEntry]) -> None:
        """Says which nodes there are; those that were known keep their place, and may have another address."""
        with self._lock:
            known = {entry.name: entry for entry in self._state.nodes}
            known |= {entry.name: replace(entry, drains=known[entry.name].drains) if entry.name in known else entry
                      for entry in entries}  # fmt: skip
            self._save(nodes=tuple(known.values()))
            for entry in known.values():
                self._watch(entry)

    def _watch(self, entry: NodeEntry) -> None:
        with self._lock:
            before = self._nodes.get(entry.name)
            if before is not None and before.entry.url == entry.url:
                before.entry = entry
                return
            if before is not None:
                before.stop.set()
            node = _Node(entry, NodeCalls(entry.url, self._key, self._tls))
            node.thread = threading.Thread(
                target=self._look, args=(node,), name=f"hybridindex-watch-{entry.name}", daemon=True
            )
            self._nodes[entry.name] = node
            node.thread.start()

    def _look(self, node: _Node) -> None:
        """Looks at one node until it is told to stop."""
        while not node.stop.wait(_LOOK_S) and not self._stop.is_set():
            try:
                node.calls.watch(_SILENT_S)
                node.heard_s = time.monotonic()
                map_ = self._state.map
                if map_ is not None and (not node.up or node.version != map_.version):
                    self._bring_up(node, map_)
            except UnreachableError as error:
                if node.up:
                    _log.warning("node %s is down: %s", node.entry.name, error)
                    node.up = False
                    self._event.set()
            except HybridIndexError as error:
                node.up = False
                self._problem = f"node {node.entry.name}: {error}"
                _log.warning("%s", self._problem)
        node.calls.close()

    def _bring_up(self, node: _Node, map_: ClusterMap) -> None:
        """Gives a node the newest map; one that came back holds what the map says of it, or takes it first."""
        said = node.calls.node()
        self._check_same(node.entry.name, said)
        own = map_.index_of(node.entry.name)
        if own is None:
            return
        held = mask_of(said["held"], len(map_.holders))
        missing = map_.held_by(own) & ~held
        if missing.any():
            job = said["holding"]
            if job is None or not job["running"]:
                node.calls.hold(missing, self._state.request.copy_bytes_per_s)
            return
        if said["map_version"] < map_.version:
            node.calls.apply(map_)
        node.version = map_.version
        if not node.up:
            _log.info("node %s is up", node.entry.name)
            node.up, self._problem = True, ""
            self._event.set()

    def _check_same(self, name: str, said: dict[str, Any]) -> None:
        found, wanted = (said["fingerprint"], said["generation"]), (self.access.fingerprint, self.access.generation)
        if found != wanted:
            raise ServiceError(
                f"{name} has generation {found[1]} of index {found[0]}; expected {wanted[1]} of {wanted[0]}"
            )

    # The manager's own thread: who serves, and what has to be copied again

    def _run(self) -> None:
        while not self._stop.is_set():
            self._event.wait(_LOOK_S)
            self._event.clear()
            try:
                self._follow()
            except HybridIndexError as error:
                self._problem = str(error)
                _log.warning("the placement could not be followed: %s", error)
            except Exception:  # noqa: BLE001 - without this thread nobody copies what was lost
                _log.exception("the manager goes on")

    def _follow(self) -> None:
        """Takes nodes that are down out of the map, and back in; copies their lists when they stay away."""
        map_ = self._state.map
        if map_ is None:
            return
        now = time.monotonic()
        # Also one whose map is a version behind: it gets the new one at the next look.
        serving = tuple(self._is_up(node.name) for node in map_.nodes)
        if serving != tuple(node.serving for node in map_.nodes) and self._changing.acquire(blocking=False):
            try:
                nodes = tuple(replace(node, serving=up) for node, up in zip(map_.nodes, serving, strict=True))
                self._publish(nodes, map_.holders)
            finally:
                self._changing.release()
        for node, up in zip(map_.nodes, serving, strict=True):
            if up:
                self._down_since.pop(node.name, None)
            else:
                self._down_since.setdefault(node.name, now)
        away = [name for name, since in self._down_since.items() if now - since > self._state.request.repair_after_s]
        if not away or not self._below(map_, serving).any():
            self._repaired = None
        elif serving != self._repaired and self._changing.acquire(blocking=False):
            try:
                self._repair(away)
                self._repaired = serving
            finally:
                self._changing.release()

    def _below(self, map_: ClusterMap, serving: Sequence[bool]) -> npt.NDArray[np.bool_]:
        """(nlist,) lists with fewer live holders than there should be, and could be."""
        mask = np.uint64(sum(1 << i for i, up in enumerate(serving) if up))
        live = np.bitwise_count(map_.holders & mask)
        below: npt.NDArray[np.bool_] = live < min(self._state.request.replicas, sum(serving))
        return below

    def _repair(self, away: Sequence[str]) -> None:
        map_ = self._state.map
        assert map_ is not None
        lost = [i for i, node in enumerate(map_.nodes) if node.name in away or not self._is_up(node.name)]
        plan = NodePlan(
            request=self._node_request(), list_bytes=self.access.list_bytes, work=self.access.work, holders=map_.holders
        )
        mended = repair(plan, lost, probes=self.access.probes)
        # What a lost node still has counts again when it comes back.
        gone = np.uint64(sum(1 << i for i in lost))
        holders = mended.holders | (map_.holders & gone)
        self._take(map_, holders, None)
        # Copies of hot lists that had to make room.
        self._drop(holders)
        _log.info("the lists of %s were copied again", ", ".join(away))

    def _is_up(self, name: str) -> bool:
        return name in self._nodes and self._nodes[name].up

    # Plans and changes

    def _node_request(self) -> NodeRequest:
        request = self._state.request
        return NodeRequest(
            node_bytes=tuple(0 if entry.drains else entry.memory_bytes for entry in self._state.nodes),
            replicas=request.replicas,
            replicate=request.replicate,
        )

    def plan(self) -> NodePlan:
        """Where lists would be placed now; nothing is changed.

        Raises:
            InvalidInputError: more replicas than nodes, or too little memory.
        """
        map_ = self._state.map
        return place_lists(
            self.access.list_bytes,
            self.access.work,
            self._node_request(),
            current=None if map_ is None else map_.holders,
            probes=self.access.probes,
        )

    def describe_plan(self) -> dict[str, Any]:
        """:meth:`plan` in words and numbers, and what it would move."""
        plan, map_ = self.plan(), self._state.map
        before = np.zeros_like(plan.holders) if map_ is None else map_.holders
        moving = moves(before, plan.holders, self.access.list_bytes)
        return {
            **self._describe(plan),
            "take_bytes": int(moving.take_bytes.sum()),
            "drop_bytes": int(moving.drop_bytes.sum()),
            "changed_lists": int(np.count_nonzero(before != plan.holders)),
        }

    def repartition(self, progress: Progress | None = None) -> dict[str, Any]:
        """Plans anew from the newest profile, and moves the difference. Returns what changed.

        Raises:
            BuildError: another change goes on. InvalidInputError: as :meth:`plan`. ServiceError, UnreachableError: a
            node could not do its part; the placement before is in force.
        """
        # Telling nodes who is up takes a moment; other changes take longer.
        if not self._changing.acquire(timeout=_MOMENT_S):
            raise BuildError("another change of the cluster goes on; ask again when it has ended")
        try:
            access = read_access(Path(self._state.index))
            self._check_serves(access, self.access.fingerprint, self.access.generation)
            self.access = access
            plan, map_ = self.plan(), self._state.map
            self._wait_for_nodes(map_)
            before = np.zeros_like(plan.holders) if map_ is None else map_.holders
            taken = self._take(map_, plan.holders, progress)
            dropped = self._drop(plan.holders)
            return {
                **self._describe(plan),
                "taken_bytes": taken,
                "dropped_bytes": dropped,
                "changed_lists": int(np.count_nonzero(before != plan.holders)),
            }
        finally:
            self._changing.release()

    def drain(self, name: str, progress: Progress | None = None) -> dict[str, Any]:
        """Moves the lists of a node to others; it may be stopped then.

        Raises:
            InvalidInputError: there is no such node, or the others have too little memory. And as :meth:`repartition`.
        """
        with self._lock:
            if name not in {entry.name for entry in self._state.nodes}:
                raise InvalidInputError(f"node is {name!r}; expected one of {', '.join(self._nodes) or 'none'}")
            self._set_drains(name, drains=True)
        try:
            return self.repartition(progress)
        except BaseException:
            self._set_drains(name, drains=False)
            raise

    def _set_drains(self, name: str, *, drains: bool) -> None:
        with self._lock:
            nodes = [replace(each, drains=drains) if each.name == name else each for each in self._state.nodes]
            self._save(nodes=tuple(nodes))

    def _wait_for_nodes(self, map_: ClusterMap | None) -> None:
        """Until all nodes answer that are new. Lists must not leave for one that is down.

        Raises:
            UnreachableError: some do not answer.
        """
        known = set() if map_ is None else {node.name for node in map_.nodes}
        taking = [entry.name for entry in self._state.nodes if not entry.drains]
        down = [name for name in taking if name in known and not self._is_up(name)]
        if down:
            raise UnreachableError(f"{', '.join(down)} is down; start it, or drain it first")
        ends = time.monotonic() + _START_S
        while True:
            waiting = [name for name in taking if name not in known and not self._answers(self._nodes[name])]
            if not waiting:
                return
            if time.monotonic() > ends or self._stop.is_set():
                raise UnreachableError(f"{', '.join(waiting)} did not answer for {_START_S:g} s")
            time.sleep(_POLL_S)

    @staticmethod
    def _answers(node: _Node) -> bool:
        try:
            node.calls.ping(_SILENT_S)
        except HybridIndexError:
            return False
        return True

    def _take(self, map_: ClusterMap | None, holders: U64, progress: Progress | None) -> int:
        """Has nodes take the lists of ``holders`` that they do not hold, then puts a map of these in force; the bytes.

        Raises:
            ServiceError, UnreachableError: a node could not; the others give up what they took.
        """
        nlist = len(holders)
        wanted: dict[str, npt.NDArray[np.bool_]] = {}
        for i, entry in enumerate(self._state.nodes):
            node = self._nodes[entry.name]
            own = (holders >> np.uint64(i) & np.uint64(1)).astype(np.bool_)
            if map_ is not None and map_.index_of(entry.name) is not None and not node.up:
                continue  # it is asked when it comes back
            missing = own & ~mask_of(node.calls.node()["held"], nlist)
            if missing.any():
                wanted[entry.name] = missing
        total = sum(int(self.access.list_bytes[missing].sum()) for missing in wanted.values())
        try:
            for name, missing in wanted.items():
                rate = None if map_ is None else self._state.request.copy_bytes_per_s
                self._nodes[name].calls.hold(missing, rate, replace=True)
            self._wait_until_taken(wanted, total, progress)
        except HybridIndexError:
            self._undo(wanted)
            raise
        nodes = tuple(
            MapNode(name=entry.name, url=entry.url, serving=self._will_serve(entry.name, map_))
            for entry in self._state.nodes
        )
        self._publish(nodes, holders)
        return total

    def _will_serve(self, name: str, map_: ClusterMap | None) -> bool:
        """A node that is new has just taken its lists."""
        return map_ is None or map_.index_of(name) is None or self._is_up(name)

    def _wait_until_taken(
        self, wanted: dict[str, npt.NDArray[np.bool_]], total: int, progress: Progress | None
    ) -> None:
        left = dict(wanted)
        bytes_left = {name: int(self.access.list_bytes[missing].sum()) for name, missing in wanted.items()}
        while left:
            if self._stop.is_set():
                raise ServiceError("the manager stops")
            for name in list(left):
                job = self._nodes[name].calls.node()["holding"]
                if job is None:
                    raise ServiceError(f"node {name} was started anew while it took lists")
                bytes_left[name] = job["bytes_left"]
                if job["error"]:
                    raise ServiceError(f"node {name} could not take its lists: {job['error']}")
                if not job["running"]:
                    bytes_left[name] = 0
                    del left[name]
            if progress is not None:
                progress(total - sum(bytes_left.values()), total)
            if left:
                time.sleep(_POLL_S)

    def _undo(self, wanted: dict[str, npt.NDArray[np.bool_]]) -> None:
        for name, missing in wanted.items():
            try:
                # Others may be on their way still.
                self._nodes[name].calls.hold(np.zeros_like(missing), None, replace=True)
                self._nodes[name].calls.drop(missing)
            except HybridIndexError as error:
                _log.warning("node %s keeps lists that it took for nothing: %s", name, error)

    def _publish(self, nodes: tuple[MapNode, ...], holders: U64) -> None:
        """Puts a new map in force: it is kept first, then every node that answers gets it."""
        with self._lock:
            before = self._state.map
            map_ = ClusterMap(
                cluster=self._state.cluster,
                version=1 if before is None else before.version + 1,
                fingerprint=self.access.fingerprint,
                generation=self.access.generation,
                nodes=nodes,
                holders=np.ascontiguousarray(holders, dtype=np.uint64),
                replicas=self._state.request.replicas,
            )
            self._save(map=map_)
        sending = [
            threading.Thread(target=self._send, args=(self._nodes[node.name], map_), daemon=True)
            for node in nodes
            if node.serving and node.name in self._nodes
        ]
        for thread in sending:
            thread.start()
        for thread in sending:
            thread.join()

    @staticmethod
    def _send(node: _Node, map_: ClusterMap) -> None:
        try:
            node.calls.apply(map_, 2.0)
        except HybridIndexError as error:
            _log.warning("node %s did not take map %d: %s", node.entry.name, map_.version, error)
        else:
            node.version, node.up = map_.version, True

    def _drop(self, holders: U64) -> int:
        """Has nodes that have the newest map give up what it does not name; the bytes."""
        map_ = self._state.map
        assert map_ is not None
        nbytes = 0
        for i, entry in enumerate(self._state.nodes):
            node = self._nodes[entry.name]
            if node.version != map_.version:
                continue
            try:
                held = mask_of(node.calls.node()["held"], len(holders))
                spare = held & ~(holders >> np.uint64(i) & np.uint64(1)).astype(np.bool_)
                if spare.any():
                    nbytes += node.calls.drop(spare)
            except HybridIndexError as error:
                _log.warning("node %s keeps lists that it does not need: %s", entry.name, error)
        return nbytes

    # What it tells

    def _describe(self, plan: NodePlan) -> dict[str, Any]:
        return {
            "fan_out": plan.fan_out,
            "local_share": plan.local_share,
            "profile_id": self.access.profile_id,
            "explanation": plan.explain(),
            "node_bytes": dict(zip([entry.name for entry in self._state.nodes], plan.node_bytes.tolist(), strict=True)),
        }

    def status(self) -> dict[str, Any]:
        """For people, and for clients that look for nodes."""
        state, map_ = self._state, self._state.map
        bytes_of = self.access.list_bytes
        nodes = []
        for entry in state.nodes:
            own = None if map_ is None else map_.index_of(entry.name)
            held = None if map_ is None or own is None else map_.held_by(own)
            nodes.append(
                {
                    "name": entry.name,
                    "url": entry.url,
                    "state": "up" if self._is_up(entry.name) else "down",
                    "drains": entry.drains,
                    "lists": 0 if held is None else int(held.sum()),
                    "bytes": 0 if held is None else int(bytes_of[held].sum()),
                    "memory_bytes": entry.memory_bytes,
                    "map_version": self._nodes[entry.name].version,
                }
            )
        up = [node["state"] == "up" for node in nodes]
        below = nobody = None
        if map_ is not None and len(map_.nodes) == len(up):
            below = int(self._below(map_, up).sum())
            mask = np.uint64(sum(1 << i for i, each in enumerate(up) if each))
            nobody = int(np.count_nonzero(map_.holders & mask == 0))
        return {
            "cluster": state.cluster,
            "index": state.index,
            "fingerprint": self.access.fingerprint,
            "generation": self.access.generation,
            "map_version": 0 if map_ is None else map_.version,
            "replicas": state.request.replicas,
            "replicate": state.request.replicate,
            "nlist": len(bytes_of),
            "index_bytes": int(bytes_of.sum()),
            "lists_below_replicas": below,
            "lists_of_nobody": nobody,
            "changing": self._changing.locked(),
            "problem": self._problem,
            "nodes": nodes,
        }

    def _save(self, **changes: Any) -> None:
        with self._lock:
            state = replace(self._state, **changes)
            write_state(self._folder, state)
            self._state = state

    def close(self) -> None:
        """Ends the threads; nodes serve on."""
        self._stop.set()
        self._event.set()
        self._thread.join()
        for node in self._nodes.values():
            node.stop.set()
            if node.thread is not None:
                node.thread.join()
