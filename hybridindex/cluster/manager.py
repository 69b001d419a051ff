"""The manager of a cluster: places lists on nodes, watches the nodes, copies what was lost, and changes the placement.

It is no part of a search: nodes serve by the map that they got last, and find out by themselves who is away. A change
is made in an order that never leaves a list without its holders: nodes take and verify their new lists, then all get
the new map, then lists are given up that the map does not name. What fails before the new map is undone.

Longer than other files: all of it changes one state, under one lock. Plans, moves, calls and watches are beside it.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex.cluster.access import Access, access_of, read_access
from hybridindex.cluster.looking import Looking
from hybridindex.cluster.nodes.calls import NodeCalls
from hybridindex.cluster.nodes.taking import Taking, close_left, drop_spare, side_by_side, wait_until_seen
from hybridindex.cluster.nodes.watch import LOOK_S, Watch
from hybridindex.cluster.reports import describe_plan, describe_state, problem_of
from hybridindex.cluster.state import ClusterRequest, ClusterState, NodeEntry, hold_state, read_state, write_state
from hybridindex.errors import BuildError, HybridIndexError, InvalidInputError, ServiceError, UnreachableError
from hybridindex.index import read_manifest
from hybridindex.partitioner.nodes.drift import judge_drift
from hybridindex.partitioner.nodes.moves import moves, repair
from hybridindex.partitioner.nodes.node_plan import NodePlan, NodeRequest
from hybridindex.partitioner.nodes.placement import place_lists
from hybridindex.router.remote.cluster_map import MAX_NODES, U64, ClusterMap, MapNode

__all__ = ["Manager", "Progress"]

_log = logging.getLogger(__name__)

#: Between two looks at lists on their way.
_POLL_S = 0.2
#: Between two looks whether the index was compacted; and after a generation that nodes could not go on to.
_NEWER_S, _NEWER_AGAIN_S = 1.0, 10.0
#: For nodes that are new to answer; for a change that takes a moment to end; and for a node to let another generation
#: of the index serve.
_START_S, _MOMENT_S, _SWITCH_S = 120.0, 5.0, 10.0
#: For a manager before to be gone: a file system of another machine keeps its lock for a while.
_HELD_S = 120.0

#: Told bytes that were copied so far, and of how many.
Progress = Callable[[int, int], None]


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
            HybridIndexError: the state or the index cannot be read. ServiceError: another manager has the state.
        """
        self._folder, self._key, self._tls = folder, key, tls
        with hold_state(folder, timeout_s=_HELD_S) as held:
            kept = read_state(folder)
            self._state = kept or ClusterState(cluster=cluster, index=str(index), request=request)
            #: Of the generation of the map; of the current one while there is no map, or where that one was removed.
            self.access: Access = access_of(Path(self._state.index), self._state.map)
            self._held = held.pop_all()
        self._lock = threading.RLock()
        #: Held by who changes the placement.
        self._changing = threading.Lock()
        #: In the order of the state's.
        self._nodes: dict[str, Watch] = {}
        self._problem = ""
        self._event = threading.Event()
        self._stop = threading.Event()
        #: Who served, and who was away, when lists were copied last: until that changes, memory stays too short for
        #: what it was too short for.
        self._repaired: tuple[tuple[bool, ...], tuple[str, ...]] | None = None
        #: No repair before; after one that failed.
        self._not_before_s = 0.0
        #: Names of nodes that have no generation open that they left.
        self._left_nothing: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="hybridindex-manager", daemon=True)
        for entry in self._state.nodes:
            self._watch(entry)
        self._thread.start()
        #: What recent queries said of the placement; and how often lists moved for it.
        self._drift: dict[str, Any] = {"queries": 0, "local_share": None, "best_local_share": None}
        self._n_refreshes = 0
        self._newer = Looking(
            self._go_on,
            name="hybridindex-newer",
            words="nodes go on with the generation that they serve",
            every_s=_NEWER_S,
            again_s=_NEWER_AGAIN_S,
        )
        self._looking = [self._newer]
        if self._state.request.refresh_s is not None:
            words = "lists were not moved for what is asked lately"
            every_s = self._state.request.refresh_s
            self._looking.append(Looking(self.refresh, name="hybridindex-drift", words=words, every_s=every_s))

    # Nodes

    def set_nodes(self, entries: Sequence[NodeEntry]) -> None:
        """Says which nodes there are; those that were known keep their place, and may have another address.

        Raises:
            InvalidInputError: they are too many.
        """
        with self._lock:
            known = {entry.name: entry for entry in self._state.nodes}
            known |= {entry.name: replace(entry, drains=known[entry.name].drains) if entry.name in known else entry
                      for entry in entries}  # fmt: skip
            if len(known) > MAX_NODES:
                raise InvalidInputError(f"the cluster would have {len(known)} nodes; expected {MAX_NODES} at most")
            for entry in known.values():
                self._watch(entry)
            self._save(nodes=tuple(known.values()))

    def has_moved(self, name: str, url: str) -> None:
        """A node listens there, maybe as before."""
        with self._lock:
            entry = next((entry for entry in self._state.nodes if entry.name == name), None)
            if entry is not None and url and url != entry.url:
                self.set_nodes([replace(entry, url=url)])

    def _watch(self, entry: NodeEntry) -> None:
        with self._lock:
            before = self._nodes.get(entry.name)
            if before is not None and before.entry.url == entry.url:
                before.entry = entry
                return
            if before is not None:
                before.stop(wait=False)
            calls = NodeCalls(entry.url, self._key, self._tls)
            self._nodes[entry.name] = Watch(entry, calls, self._wanted, self._event.set)

    def _wanted(self) -> tuple[ClusterMap | None, int | None]:
        return self._state.map, self._state.request.copy_bytes_per_s

    # The manager's own thread: who serves, and what has to be copied again

    def _run(self) -> None:
        while not self._stop.is_set():
            self._event.wait(LOOK_S)
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
        if self._changing.acquire(blocking=False):
            try:
                self._tell_who_serves()
                self._left_nothing = close_left(self._nodes.values(), map_.generation, self._left_nothing)
            finally:
                self._changing.release()
        with self._lock:
            map_ = self._state.map or map_
            away, serving = self._away(map_), self._serving(map_)
        if not away or not self._below(map_, serving).any():
            self._repaired, self._problem = None, ""
        elif (
            (serving, away) != self._repaired
            and time.monotonic() > self._not_before_s
            and self._changing.acquire(blocking=False)
        ):
            self._not_before_s = time.monotonic() + _MOMENT_S
            try:
                self._repair(away)
            finally:
                self._changing.release()

    def _serving(self, map_: ClusterMap) -> tuple[bool, ...]:
        """Of each node of the map. Also one whose map is a version behind: it gets the new one at the next look. One
        that does not let the manager in, or was not looked at, serves others as before."""
        nodes = [(node, self._nodes[node.name]) for node in map_.nodes]
        return tuple(watch.up or (node.serving and watch.is_unknown) for node, watch in nodes)

    def _tell_who_serves(self) -> None:
        """And where: publishes it where it has changed. By who changes the placement."""
        map_ = self._state.map
        assert map_ is not None
        urls = {entry.name: entry.url for entry in self._state.nodes}
        nodes = tuple(
            replace(node, serving=up, url=urls[node.name])
            for node, up in zip(map_.nodes, self._serving(map_), strict=True)
        )
        if nodes != map_.nodes:
            self._publish(nodes, map_.holders)

    def _away(self, map_: ClusterMap) -> tuple[str, ...]:
        """Nodes whose lists are to be copied: they hold some, and answered nothing for as long as they may. One that
        answers keeps its lists, whatever it refuses or lacks."""
        before_s = time.monotonic() - self._state.request.repair_after_s
        return tuple(
            node.name
            for i, node in enumerate(map_.nodes)
            if (watch := self._nodes[node.name]).heard_s < before_s and not watch.answers and map_.held_by(i).any()
        )

    def _below(self, map_: ClusterMap, serving: Sequence[bool]) -> npt.NDArray[np.bool_]:
        """(nlist,) lists with fewer live holders than there should be, and could be."""
        mask = np.uint64(sum(1 << i for i, up in enumerate(serving) if up))
        live = np.bitwise_count(map_.holders & mask)
        taking = sum(up and not entry.drains for up, entry in zip(serving, self._state.nodes, strict=False))
        below: npt.NDArray[np.bool_] = live < min(self._state.request.replicas, taking)
        return below

    def _repair(self, away: tuple[str, ...]) -> None:
        """Has nodes copy the lists of nodes that are away. What was copied counts, also where a node could not do its
        part, or another one left or came meanwhile, which needs another plan.

        Raises:
            HybridIndexError: why a node could not.
        """
        map_ = self._state.map
        assert map_ is not None
        if self.access.of != map_.of:
            raise ServiceError(f"the lists of {', '.join(away)} cannot be copied: {self._newer.problem}")
        before = self._serving(map_)
        lost = [i for i, node in enumerate(map_.nodes) if node.name in away]
        plan = NodePlan(
            request=replace(self._node_request(self.access), node_bytes=self._room(map_)),
            list_bytes=self.access.list_bytes,
            work=self.access.work,
            holders=map_.holders,
        )
        mended = repair(plan, lost, probes=self.access.probes)
        # What a lost node still has counts again when it comes back.
        gone = np.uint64(sum(1 << i for i in lost))
        planned = mended.holders | (map_.holders & gone)
        names = [entry.name for i, entry in enumerate(self._state.nodes) if i not in lost and self._can_take(i, map_)]
        taking = self._take(map_, self.access, planned, names, None, lambda _taking: self._away(map_) != away)
        if taking.goes_on:
            taking.stop()
        holders = self._taken(map_.holders, planned, taking)
        self._place(holders)
        # Copies of hot lists that had to make room.
        self._drop()
        if taking.errors:
            raise taking.errors[min(taking.errors)]
        self._not_before_s, self._problem = 0.0, ""
        if not taking.goes_on:
            self._repaired = (before, away)
            _log.info("the lists of %s were copied again", ", ".join(away))

    def _can_take(self, number: int, map_: ClusterMap) -> bool:
        node = self._nodes[self._state.nodes[number].name]
        return node.up or (number >= len(map_.nodes) and node.answers)

    def _room(self, map_: ClusterMap) -> tuple[int, ...]:
        """Bytes that each node may hold after a repair. One that is about to come keeps what it has, and takes no more
        now."""
        room = []
        for i, nbytes in enumerate(self._node_request(self.access).node_bytes):
            used = int(self.access.list_bytes[map_.held_by(i)].sum()) if i < len(map_.nodes) else 0
            room.append(nbytes if self._can_take(i, map_) else min(nbytes, used))
        return tuple(room)

    def _taken(self, before: U64, planned: U64, taking: Taking) -> U64:
        """Holders of each list: as planned where all of them took it, and else those before and who took it."""
        lacking = np.zeros_like(planned)
        for i, entry in enumerate(self._state.nodes):
            bit = np.uint64(1 << i)
            has = taking.held.get(entry.name, np.zeros(len(planned), dtype=np.bool_))
            lacking |= np.where(has, np.uint64(0), planned & ~before & bit)
        return np.where(lacking != 0, before | planned & ~lacking, planned)

    def silent_nodes(self) -> list[str]:
        """Names of nodes that do not answer, but for those that may leave."""
        with self._lock:
            nodes = [self._nodes[entry.name] for entry in self._state.nodes if not entry.drains]
        return [node.entry.name for node in nodes if not node.answers]

    # Plans and changes

    def _node_request(self, access: Access) -> NodeRequest:
        request = self._state.request
        return NodeRequest(
            node_bytes=tuple(0 if entry.drains else entry.memory_bytes for entry in self._state.nodes),
            replicas=request.replicas,
            replicate=request.replicate,
            code_bytes=access.code_bytes,
        )

    def _holders_in(self, access: Access) -> U64 | None:
        """(nlist,) who holds the lists of a generation, or those whose place they take, by the map; None: not known."""
        map_ = self._state.map
        if map_ is None or access.of == map_.of:
            return None if map_ is None else map_.holders
        was = access.manifest.lists_in(self.access.manifest) if self.access.of == map_.of else None
        return None if was is None else map_.holders[was]

    def _plan(self, access: Access) -> NodePlan:
        return place_lists(
            access.list_bytes,
            access.work,
            self._node_request(access),
            current=self._holders_in(access),
            probes=access.probes,
        )

    def plan(self) -> NodePlan:
        """Where lists would be placed now; nothing is changed.

        Raises:
            InvalidInputError: more replicas than nodes, or too little memory.
        """
        return self._plan(self.access)

    def describe_plan(self) -> dict[str, Any]:
        """:meth:`plan` in words and numbers, and what it would move."""
        access = self.access
        plan, known = self._plan(access), self._holders_in(access)
        before = np.zeros_like(plan.holders) if known is None else known
        moving = moves(before, plan.holders, access.list_bytes)
        return {
            **describe_plan(plan, access, self._state),
            "take_bytes": int(moving.take_bytes.sum()),
            "drop_bytes": int(moving.drop_bytes.sum()),
            "changed_lists": int(np.count_nonzero(before != plan.holders)),
        }

    def repartition(self, progress: Progress | None = None, *, anew: bool = True) -> dict[str, Any]:
        """Plans anew from the newest profile, and moves the difference; where the index has another generation, nodes
        go on to that. Returns what changed.

        Args:
            anew: also to one that was built anew.

        Raises:
            BuildError: another change goes on. InvalidInputError: as :meth:`plan`. ServiceError, UnreachableError: a
            node could not do its part; the placement before is in force.
        """
        with self._turn():
            return self._move(self._look(anew=anew), progress)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Raises BuildError: another change goes on."""
        # Telling nodes who is up takes a moment; other changes take longer.
        if not self._changing.acquire(timeout=_MOMENT_S):
            raise BuildError("another change of the cluster is under way; try again when it has ended")
        try:
            yield
        finally:
            self._changing.release()

    def _look(self, *, anew: bool) -> Access:
        index, served = Path(self._state.index), self.access.manifest
        if anew or read_manifest(index).lineage == served.lineage:
            return read_access(index)
        return read_access(index, served.generation)

    def _move(self, access: Access, progress: Progress | None = None) -> dict[str, Any]:
        """``access``: what the plan is made from. By who changes the placement."""
        plan, map_ = self._plan(access), self._state.map
        if map_ is not None and access.of.generation == map_.generation and access.of != map_.of:
            raise InvalidInputError(
                f"generation {map_.generation} of {self._state.index} is {access.of.fingerprint}, and the cluster "
                f"serves {map_.fingerprint}; stop the cluster and start it again"
            )
        self._wait_for_nodes(map_, access)
        known = self._holders_in(access)
        before = np.zeros_like(plan.holders) if known is None else known
        taken = self._change(map_, access, plan.holders, progress)
        dropped = self._drop()
        return {
            **describe_plan(plan, access, self._state),
            "generation": access.of.generation,
            "taken_bytes": taken,
            "dropped_bytes": dropped,
            "changed_lists": int(np.count_nonzero(before != plan.holders)),
        }

    def _go_on(self) -> None:
        """Has nodes go on to the generation that the index was compacted into. Raises as :meth:`repartition`."""
        map_, now = self._state.map, read_manifest(Path(self._state.index))
        if map_ is None or (now.fingerprint, now.generation) == map_.of:
            return
        if self.access.of != map_.of or now.lineage != self.access.manifest.lineage:
            why = "was built anew" if self.access.of == map_.of else f"has no generation {map_.generation} any more"
            raise InvalidInputError(
                f"the index {why}: nodes still serve generation {map_.generation} and refuse changes of rows; to make "
                f"them serve generation {now.generation}, run: hybridindex cluster repartition {self._state.index}"
            )
        done = self.repartition(anew=False)
        _log.info("nodes serve generation %d of the index", done["generation"])

    def refresh(self) -> dict[str, Any] | None:
        """Moves lists where recent queries of all nodes scan more of theirs where they are asked then; None: they do
        not, or too few are known, or a node is away. Raises as :meth:`repartition`."""
        with self._lock:
            map_, access = self._state.map, self.access
            drained = {entry.name for entry in self._state.nodes if entry.drains}
            serving = () if map_ is None else self._serving(map_)
        if map_ is None or access.of != map_.of:
            return None
        if not all(up or node.name in drained for up, node in zip(serving, map_.nodes, strict=True)):
            return None
        nlist = len(access.list_bytes)
        told = side_by_side(list(self._nodes.values()), lambda node: node.calls.probes(nlist))
        samples = [probes for probes in told.values() if isinstance(probes, np.ndarray) and len(probes)]
        width = max((probes.shape[1] for probes in samples), default=0)
        padded = [np.pad(probes, ((0, 0), (0, width - probes.shape[1])), constant_values=-1) for probes in samples]
        probes = np.concatenate(padded) if padded else np.empty((0, 1), dtype=np.int64)
        drift = judge_drift(access.list_bytes, access.scanned_bytes, map_.holders, self._node_request(access), probes)
        self._drift = {
            "queries": drift.n_queries,
            "local_share": drift.local_share,
            "best_local_share": None if drift.plan is None else drift.plan.local_share,
        }
        if not drift.pays:
            return None
        with self._turn():
            if self.access.of != access.of:
                raise BuildError("the nodes went on to another generation meanwhile")
            done = self._move(access._replace(work=drift.work, probes=probes, profile_id=None))
        self._n_refreshes += 1
        _log.info("lists were moved to follow recent queries: %s", self._drift)
        return done

    def _change(self, map_: ClusterMap | None, access: Access, holders: U64, progress: Progress | None) -> int:
        """Has all nodes take their lists, and puts the map in force; the bytes. What fails before is undone.

        Raises:
            HybridIndexError: a node could not; or refuses the first map, without which it serves nothing.
        """
        names = [entry.name for entry in self._state.nodes]
        taking = self._take(map_, access, holders, names, progress, lambda taking: bool(taking.errors))
        if taking.errors:
            taking.undo()
            raise taking.errors[min(taking.errors)]
        refused = self._place(holders, access)
        if map_ is None and refused:
            raise refused[min(refused)]
        wait_until_seen(self._nodes.values(), self._stop.is_set)
        self._problem = ""
        return taking.total_bytes

    def drain(self, name: str, progress: Progress | None = None) -> dict[str, Any]:
        """Moves the lists of a node to others; it may be stopped then.

        Raises:
            InvalidInputError: there is no such node, or the others have too little memory. And as :meth:`repartition`.
        """
        with self._turn():
            drained = {entry.name: entry.drains for entry in self._state.nodes}
            if name not in drained:
                raise InvalidInputError(f"node is {name!r}; expected one of {', '.join(self._nodes) or 'none'}")
            self._set_drains(name, drains=True)
            try:
                return self._move(self._look(anew=False), progress)
            except BaseException:
                self._set_drains(name, drains=drained[name])
                raise

    def forget(self, name: str) -> None:
        """Takes a node out of the map that was drained, and has ended: another one may take its place.

        Raises:
            BuildError: another change goes on. InvalidInputError: it was not drained.
        """
        with self._turn():
            map_, names = self._state.map, [entry.name for entry in self._state.nodes if entry.drains]
            at = None if map_ is None else map_.index_of(name)
            if name not in names or (map_ is not None and at is not None and map_.held_by(at).any()):
                raise InvalidInputError(
                    f"node is {name!r}; expected one that was drained: {', '.join(names) or 'none'}"
                )
            left = tuple(entry for entry in self._state.nodes if entry.name != name)
            if map_ is None or at is None:
                self._save(nodes=left)
            else:
                self._publish(*map_.without(name), entries=left)
            with self._lock:
                self._nodes.pop(name).stop(wait=False)

    def _set_drains(self, name: str, *, drains: bool) -> None:
        with self._lock:
            nodes = [replace(each, drains=drains) if each.name == name else each for each in self._state.nodes]
            self._save(nodes=tuple(nodes))

    def _wait_for_nodes(self, map_: ClusterMap | None, access: Access) -> None:
        """Until all nodes answer that are new. Lists must not leave for one that is down; and no node goes on that has
        not got the generation of the map, unless that was removed.

        Raises:
            UnreachableError: some do not answer, or are not so far.
        """
        known = {} if map_ is None else {node.name: self._nodes[node.name] for node in map_.nodes}
        taking = [entry.name for entry in self._state.nodes if not entry.drains]
        for name in taking:
            if map_ is None or name not in known or (self.access.of != map_.of and known[name].answers):
                continue
            if not known[name].up:
                raise UnreachableError(f"{name} is down; start it, or drain it first")
            if access.of != map_.of and known[name].version != map_.version:
                raise UnreachableError(f"{name} has not received the newest map yet; try again")
        ends = time.monotonic() + _START_S
        while True:
            waiting = [name for name in taking if name not in known and not self._nodes[name].answers]
            if not waiting:
                return
            if time.monotonic() > ends or self._stop.is_set():
                raise UnreachableError(f"{', '.join(waiting)} did not answer for {_START_S:g} s")
            if map_ is not None:
                self._tell_who_serves()
            time.sleep(_POLL_S)

    def _take(
        self,
        map_: ClusterMap | None,
        access: Access,
        holders: U64,
        names: Sequence[str],
        progress: Progress | None,
        ends: Callable[[Taking], bool],
    ) -> Taking:
        """Has these nodes take the lists of ``holders`` that they lack, until they have them or ``ends`` says so; those
        of another generation than the map's beside what they serve."""
        wanted = {}
        is_other = map_ is not None and access.of != map_.of
        for i, entry in enumerate(self._state.nodes):
            own = (holders >> np.uint64(i) & np.uint64(1)).astype(np.bool_)
            if entry.name in names and (own.any() or (is_other and not entry.drains)):
                wanted[entry.name] = own
        rate = None if map_ is None else self._state.request.copy_bytes_per_s
        taking = Taking(self._nodes, wanted, access.list_bytes, rate, of=access.of)
        while taking.goes_on and not ends(taking):
            if self._stop.is_set():
                raise ServiceError("the manager stops")
            if map_ is not None:
                self._tell_who_serves()
            taking.look()
            if progress is not None:
                progress(taking.total_bytes - taking.bytes_left, taking.total_bytes)
            if taking.goes_on:
                time.sleep(_POLL_S)
        return taking

    def _place(self, holders: U64, access: Access | None = None) -> dict[str, HybridIndexError]:
        """Puts a map with these in force; ``access``: of another generation, which nodes go on to. As
        :meth:`_publish`."""
        map_ = self._state.map
        serving = {} if map_ is None else dict(zip([n.name for n in map_.nodes], self._serving(map_), strict=True))
        # A node that is new has just taken its lists.
        nodes = [MapNode(name=entry.name, url=entry.url, serving=serving.get(entry.name, True))
                 for entry in self._state.nodes]  # fmt: skip
        return self._publish(tuple(nodes), holders, access)

    def _publish(
        self,
        nodes: tuple[MapNode, ...],
        holders: U64,
        access: Access | None = None,
        *,
        entries: tuple[NodeEntry, ...] | None = None,
    ) -> dict[str, HybridIndexError]:
        """Puts a new map in force: it is kept first, then every node that answers gets it; what those say that did not
        take it. ``entries``: of the nodes; None: as before."""
        known = self._state.map
        of = known.of if access is None and known is not None else (access or self.access).of
        before = self._state.map
        version = self._newest_version() if before is None else before.version
        with self._lock:
            map_ = ClusterMap(
                cluster=self._state.cluster,
                version=version + 1,
                fingerprint=of.fingerprint,
                generation=of.generation,
                nodes=nodes,
                holders=np.ascontiguousarray(holders, dtype=np.uint64),
                replicas=self._state.request.replicas,
            )
            self._save(map=map_, nodes=self._state.nodes if entries is None else entries)
            self.access = access or self.access
        self._left_nothing = set()
        limit_s = _MOMENT_S if known is None or of == known.of else _SWITCH_S
        serving = [self._nodes[node.name] for node in nodes if node.serving and node.name in self._nodes]
        refused: dict[str, HybridIndexError] = {}
        for name, error in side_by_side(serving, lambda node: node.calls.apply(map_, limit_s)).items():
            if isinstance(error, HybridIndexError):
                refused[name] = error
                _log.warning("node %s did not take map %d: %s", name, map_.version, error)
            else:
                self._nodes[name].has(map_)
        return refused

    def _newest_version(self) -> int:
        """Of the maps that nodes kept from an earlier start of the cluster, or of a state that was lost."""
        told = side_by_side(list(self._nodes.values()), lambda node: node.calls.node()["map_version"])
        return max((version for version in told.values() if isinstance(version, int)), default=0)

    def _drop(self) -> int:
        """Has nodes give up what the map in force does not name; the bytes."""
        map_ = self._state.map
        assert map_ is not None
        return drop_spare(self._nodes.values(), map_)

    # What it tells

    def status(self) -> dict[str, Any]:
        """For people, and for clients that look for nodes."""
        with self._lock:
            state, map_, access = self._state, self._state.map, self.access
            watched = [self._nodes[entry.name] for entry in state.nodes]
            up = [False] * len(watched) if map_ is None else self._serving(map_)
        list_bytes = access.list_bytes
        if map_ is not None and access.of != map_.of:
            list_bytes = np.zeros(len(map_.holders), dtype=np.int64)  # not known
        nodes = [node.describe(map_, list_bytes) for node in watched]
        return {
            **describe_state(state, access, up, None if map_ is None else self._below(map_, up)),
            "changing": self._changing.locked(),
            "drift": {**self._drift, "refreshes": self._n_refreshes},
            "problem": self._problem or problem_of(nodes) or self._newer.problem,
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
        for looking in self._looking:
            looking.close()
        for node in self._nodes.values():
            node.stop(wait=False)
        for node in self._nodes.values():
            node.stop(wait=True)
        self._held.close()
