"""A cluster that serves one index: started, asked, changed and stopped through Ray; searched over HTTP."""

from __future__ import annotations

import contextlib
import hashlib
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridindex import filesystem
from hybridindex.client.messages import Address
from hybridindex.cluster.access import read_access
from hybridindex.cluster.keys import KEY_FILES, ClusterKeys, key_for_searches, key_for_writes, make_keys, read_keys
from hybridindex.cluster.local_ray import LOCAL_FILE, read_local, start_local, stop_local
from hybridindex.cluster.node_process import NodeSpec
from hybridindex.cluster.nodes.options import NodeOptions
from hybridindex.cluster.ray_actors import (
    NAMESPACE,
    ManagerActor,
    NodeActor,
    attach,
    load_ray,
    manager_of,
    no_cluster,
    node_places,
    require_ray,
    start_actor,
)
from hybridindex.cluster.reach import folder_of, kept_ca, nodes_of, refuse_copy
from hybridindex.cluster.returning import MACHINES_FILE, keep_machines
from hybridindex.cluster.router import ClusterRouter
from hybridindex.cluster.state import STATE_FILE, ClusterRequest, NodeEntry, hold_state
from hybridindex.errors import (
    HybridIndexError,
    InfeasiblePlanError,
    InvalidInputError,
    ServiceError,
    UnreachableError,
)
from hybridindex.index import read_manifest
from hybridindex.index.storage.generation import as_path
from hybridindex.partitioner.nodes.node_plan import NodePlan, NodeRequest
from hybridindex.partitioner.nodes.placement import place_lists
from hybridindex.router.remote.cluster_map import MAX_NODES
from hybridindex.service.cluster.handed_plan import PLANS_FILE, apply_stored, hand_out, try_to_hand_out

__all__ = ["Cluster", "connect", "plan_nodes", "start", "stop"]

#: Calls that the manager answers at once.
_THREADS = 8
#: For an actor to come, and for a node to end.
_START_S, _END_S = 180.0, 60.0
#: For a manager that was ended to let go of its state.
_GONE_S = 5.0
#: For all nodes to be up, and each list to have its replicas, before and after one starts again.
_WHOLE_S = 180.0
_POLL_S = 0.2
#: In the cluster's folder from its start to its end.
_WHILE_STARTED = (STATE_FILE, MACHINES_FILE)

#: Told what goes on: words, bytes that were copied, and of how many; None where nothing is copied.
OnProgress = Callable[[str, int | None, int | None], None]


def plan_nodes(index: Path, n_nodes: int, memory_bytes: int, request: ClusterRequest) -> NodePlan:
    """Where lists would be placed on so many equal nodes; nothing is started.

    Raises:
        InvalidInputError: more replicas than nodes, or too little memory; says how much is missing.
    """
    access = read_access(index)
    asked = NodeRequest(
        node_bytes=(memory_bytes,) * n_nodes,
        replicas=request.replicas,
        replicate=request.replicate,
        code_bytes=access.code_bytes,
    )
    return place_lists(access.list_bytes, access.work, asked, probes=access.probes)


def start(
    index: str | Path,
    *,
    address: str = "auto",
    local: int | None = None,
    request: ClusterRequest | None = None,
    nodes: NodeOptions,
    folder: str | Path | None = None,
    progress: OnProgress | None = None,
) -> Cluster:
    """Starts a cluster and places the lists; returns when all nodes serve.

    Args:
        index: the whole index, at a path that every machine has.
        address: of a Ray cluster that runs; "auto": this machine's.
        local: start so many nodes here, with a Ray of their own.
        folder: for the state; default within the index directory.

    Raises:
        InvalidInputError, UnsupportedIndexError: the plan cannot be made, or the index is no index. ServiceError: a
        cluster of it runs, on this Ray or another one.
        MissingDependencyError, UnreachableError, ServiceError: Ray or a node does not start; what was started is ended.
    """
    tell = progress or (lambda _words, _done, _total: None)
    path, request = as_path(index), request or ClusterRequest()
    name, state = _name_of(path), folder_of(path, folder)
    require_ray()
    if local is not None:
        if local < 1:
            raise InvalidInputError(f"local is {local}; expected a number of nodes, 1 at least")
        # Whatever is wrong with it is said before anything starts.
        plan_nodes(path, local, nodes.memory_bytes, request)
        nodes = nodes.with_store_of(path)
        filesystem.make_folder(state, parents=True, exist_ok=True)
        before = read_local(state)
        if before is not None and before.runs():
            refuse_copy(state, path)
            raise ServiceError(f"a cluster of {path} runs here; stop it first: hybridindex cluster stop {path}")
        stop_local(state)  # what one that was not stopped left here
        tell("starting Ray", None, None)
        start_local(state)
    try:
        ray = _attach(state, address)
        places = node_places(ray)
        places = places[:1] * local if local is not None else places
        plan_nodes(path, len(places), nodes.memory_bytes, request)
        cluster = Cluster(path, name, state, ray)
        if cluster.runs():
            raise ServiceError(f"a cluster of {path} runs already; stop it first: hybridindex cluster stop {path}")
        hold_state(state, timeout_s=_GONE_S).close()  # whether another Ray has a manager of it
        # A request that was changed, and nodes that are gone, begin anew; shares on disk are used again.
        _forget(state)
        try:
            cluster._begin(places, request, nodes, tell)
        except BaseException:
            cluster.stop()
            raise
        return cluster
    except BaseException:
        if local is not None:
            _detach()
            stop_local(state)
        raise


def connect(
    index: str | Path,
    *,
    address: str = "auto",
    key: str | None = None,
    ca: str | Path | None = None,
    folder: str | Path | None = None,
) -> Cluster:
    """A cluster that runs.

    Args:
        address: of Ray; or ``http(s)://host:port`` of a node, which is enough to search, and needs no Ray.
        key: API key for searches, with the role search at least; default the cluster's search key, where its folder
            can be read.
        ca: certificates that those of nodes are checked with.

    Raises:
        ServiceError: no such cluster was started, or none runs on the Ray that answers. UnreachableError,
        MissingDependencyError: Ray does not answer, or is not installed.
    """
    path = as_path(index)
    state = folder_of(path, folder)
    if address.startswith(("http://", "https://")):
        return Cluster(path, "", state, None, seed=Address.parse(address).url, key=key, ca=ca)
    name = _name_of(path)
    _check_started(path, state, address)
    cluster = Cluster(path, name, state, _attach(state, address), key=key, ca=ca)
    cluster.status()  # whether there is one
    return cluster


def stop(index: str | Path, *, address: str = "auto", folder: str | Path | None = None) -> None:
    """:meth:`Cluster.stop`, also of a cluster whose manager or Ray does not answer any more.

    Raises:
        ServiceError: nothing runs. UnreachableError, MissingDependencyError: as :func:`connect`.
    """
    path = as_path(index)
    state, name = folder_of(path, folder), _name_of(path)
    own = read_local(state) if address == "auto" else None
    _check_started(path, state, address)
    if own is not None:
        refuse_copy(state, path)
    try:
        cluster = Cluster(path, name, state, _attach(state, address))
    except (UnreachableError, ServiceError):
        if own is None:
            raise
        stop_local(state)
        _forget(state)
        return
    with cluster:
        if own is None and not cluster.runs():
            raise no_cluster(cluster._ray, name)
        cluster.stop()


def _name_of(path: Path) -> str:
    """The same on every machine that sees the index at this path, and for all generations of it.

    Raises:
        InvalidInputError: there is no folder.
    """
    if not filesystem.is_dir(path):
        raise InvalidInputError(f"path {str(path)!r} does not exist; expected an index directory")
    return f"{path.name}-{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]}"


def _check_started(path: Path, state: Path, address: str) -> None:
    """Whatever Ray is found on this machine may be somebody else's: it is not asked for a cluster that was not started.

    Raises:
        ServiceError: the folder says that no cluster was started.
    """
    if address == "auto" and not any(filesystem.exists(state / name) for name in (*_WHILE_STARTED, LOCAL_FILE)):
        raise ServiceError(
            f"no cluster of {path} was started, as {state} says; start it (hybridindex cluster start INDEX), or name "
            "the folder of its state (--state DIR) or its Ray (--address HOST:PORT)"
        )


def _forget(state: Path) -> None:
    for name in _WHILE_STARTED:
        filesystem.unlink(state / name, missing_ok=True)


def _attach(state: Path, address: str) -> Any:
    found = read_local(state) if address == "auto" else None
    if found is not None:
        if not found.runs():
            raise ServiceError("the cluster that was started here has ended; start it again, or stop what is left")
        found.admit()
    return attach(address if found is None else found.address)


def _detach() -> None:
    ray = load_ray()
    if ray.is_initialized():
        ray.shutdown()


class Cluster:
    """A handle; the cluster runs on without it."""

    def __init__(
        self,
        path: Path,
        name: str,
        folder: Path,
        ray: Any,
        *,
        seed: str | None = None,
        key: str | None = None,
        ca: str | Path | None = None,
    ) -> None:
        """Made by :func:`start` and :func:`connect`."""
        self.path, self.name, self._folder, self._ray, self._seed = path, name, folder, ray, seed
        self._key, self._ca = key, None if ca is None else str(ca)

    # Starting and ending

    def runs(self) -> bool:
        """Whether its manager or a node is there."""
        return bool(self._actors())

    def _actors(self) -> list[str]:
        """Names of the manager and the nodes, the manager first."""
        names = [entry["name"] for entry in self._ray.util.list_named_actors(all_namespaces=True)
                 if entry["namespace"] == NAMESPACE and entry["name"].startswith(f"{self.name}:")]  # fmt: skip
        return sorted(names, key=lambda name: ":node" in name)

    def _begin(self, places: Sequence[Any], request: ClusterRequest, nodes: NodeOptions, tell: OnProgress) -> None:
        keys = make_keys(self._folder)
        if not nodes.chooses_store:
            try_to_hand_out(self.path, self._folder)
        generation = read_manifest(self.path).generation
        specs = [self._spec(f"node-{i}", keys, nodes, place, generation) for i, place in enumerate(places)]
        tell(f"starting {len(specs)} nodes", None, None)
        keep_machines(self._folder, specs, places)
        entries = self._start_nodes(specs, places)
        ca = None if nodes.tls_ca is None else str(nodes.tls_ca.absolute())
        manager = start_actor(
            self._ray, ManagerActor, f"{self.name}:manager",
            str(self._folder.absolute()), self.name, str(self.path.absolute()), request, keys, ca,
            threads=_THREADS,
        )  # fmt: skip
        self._call(manager.set_nodes.remote(entries), _START_S)
        self._ca = self._ca or ca
        nodes.keep(self._folder)
        self._change(manager, manager.repartition.remote(), tell)

    def _spec(self, name: str, keys: ClusterKeys, nodes: NodeOptions, place: Any, generation: int) -> NodeSpec:
        def text(path: Path | None) -> str | None:
            return None if path is None else str(path.absolute())

        return NodeSpec(
            name=name,
            index=str(self.path.absolute()),
            generation=generation,
            data=str(nodes.data.absolute() / self.name / name),
            memory_bytes=nodes.memory_bytes,
            key=keys.admin,
            write_key=keys.write,
            search_key=keys.search,
            host=place["NodeManagerAddress"] if nodes.host == "auto" else nodes.host,
            tls_cert=text(nodes.tls_cert),
            tls_key=text(nodes.tls_key),
            tls_ca=text(nodes.tls_ca),
            plans=None if nodes.chooses_store else str(self._folder.absolute() / PLANS_FILE),
            options=nodes.serve,
        )

    def _start_nodes(self, specs: Sequence[NodeSpec], places: Sequence[Any]) -> list[NodeEntry]:
        actors = [
            start_actor(self._ray, NodeActor, f"{self.name}:{spec.name}", spec, node_id=place["NodeID"], threads=2)
            for spec, place in zip(specs, places, strict=True)
        ]
        entries = []
        for spec, actor in zip(specs, actors, strict=True):
            said = self._call(actor.describe.remote(), _START_S)
            entries.append(NodeEntry(name=spec.name, url=said["url"], memory_bytes=spec.memory_bytes))
        return entries

    def stop(self) -> None:
        """Ends the nodes and the manager, and the Ray that was started for them. Shares stay on disk."""
        ray = self._ray
        # The manager first: it would miss the nodes.
        actors = [ray.get_actor(name, namespace=NAMESPACE) for name in self._actors()]
        ending = [(actor, actor.close.remote()) for actor in actors]
        for actor, closed in ending:
            # Whatever keeps it from ending by itself, it ends.
            with contextlib.suppress(Exception):
                ray.get(closed, timeout=_END_S)
            ray.kill(actor)
        if read_local(self._folder) is not None:
            _detach()
            stop_local(self._folder)
        _forget(self._folder)

    # Asking and changing

    def status(self) -> dict[str, Any]:
        """Nodes, lists, what is missing; docs/cluster.md describes it."""
        status: dict[str, Any] = self._call(self._manager().status.remote(), 30.0)
        return status

    def plan(self) -> dict[str, Any]:
        """Where lists would be placed now, why, and how much would move."""
        plan: dict[str, Any] = self._call(self._manager().plan.remote(), _START_S)
        return plan

    def repartition(self, progress: OnProgress | None = None) -> dict[str, Any]:
        """Places lists anew by the newest profile of the index, and moves the difference, while nodes serve.

        Raises:
            BuildError: another change goes on.
            InvalidInputError: no plan can be made.
            ServiceError, UnreachableError: a node could not take its lists; the placement before is in force.
        """
        manager = self._manager()
        return self._change(manager, manager.repartition.remote(), progress)

    def drain(self, node: str, progress: OnProgress | None = None) -> dict[str, Any]:
        """Moves a node's lists to the others, and ends it. Raises as :meth:`repartition`."""
        manager = self._manager()
        done = self._change(manager, manager.drain.remote(node), progress)
        # A machine that is lost ends nothing, and Ray has forgotten its node after a while.
        with contextlib.suppress(ValueError):
            actor = self._ray.get_actor(f"{self.name}:{node}", namespace=NAMESPACE)
            with contextlib.suppress(HybridIndexError):
                self._call(actor.close.remote(), _END_S)
            self._ray.kill(actor)
        self._call(manager.forget.remote(node), _START_S)
        return done

    def restart(
        self, node: str | None = None, progress: OnProgress | None = None, *, force: bool = False
    ) -> dict[str, Any]:
        """Starts the daemons of all nodes again, one after the other, or that of one: for attributes and codes that the
        index was given since; where all are, also for the plan that was applied last. Others answer meanwhile. Returns
        the names of those that were, ``nodes``.

        Args:
            force: also where lists are on one node alone, which searches then miss for some seconds.

        Raises:
            InvalidInputError: there is no such node, or lists are on one node alone.
            UnreachableError: a node is not up, or does not come back; those after it are as they were.
        """
        status = self.status()
        names = [each["name"] for each in status["nodes"] if not each["drains"]]
        chosen = names if node is None else [name for name in names if name == node]
        if not chosen:
            raise InvalidInputError(f"node is {node!r}; expected one of {', '.join(names)}")
        if not force and (status["replicas"] < 2 or len(names) < 2):
            raise InvalidInputError(
                "each list is on one node only, and searches fail while that node restarts; expected two replicas, or "
                "force=True (--force) to accept that"
            )
        if node is None and not NodeOptions.read(self._folder).chooses_store:  # all nodes take the same plan
            try_to_hand_out(self.path, self._folder)
        for number, name in enumerate(chosen, 1):
            self._wait_until_whole(f"before {name} is started again")
            if progress is not None:
                progress(f"{name} starts again, {number} of {len(chosen)}", None, None)
            actor = self._ray.get_actor(f"{self.name}:{name}", namespace=NAMESPACE)
            self._call(actor.restart.remote(), _START_S)
            self._wait_until_whole(f"after {name} was started again")
        return {"nodes": chosen}

    def apply_plan(
        self,
        plan: int | str = "latest",
        progress: OnProgress | None = None,
        *,
        force: bool = False,
        bandwidth_share: float | None = None,
    ) -> dict[str, Any]:
        """Makes a stored plan the current one of the index, and has one node after the other move the lists of its
        devices to it, while it serves. A node that cannot goes on with the plan that it has.

        Args:
            plan: an id, or "latest".
            force: also where it cannot meet its SLO.
            bandwidth_share: of the link to the devices that the moves may take, above 0 and at most 1; None: all.

        Returns:
            ``nodes``: for each its ``name``; the ``plan_id`` in its control store; ``moved_lists``, ``moved_bytes`` and
            ``unplaced_lists``, for which its devices have no room; or its ``problem``, and all of these are None.

        Raises:
            InfeasiblePlanError: it cannot meet its SLO, and ``force`` was not given.
            ProfileError, ProfileMismatchError: there is no such plan, or it is of another index.
            HybridIndexError: no node could take it; what kept the first.
        """
        if bandwidth_share is not None and not 0 < bandwidth_share <= 1:
            raise InvalidInputError(f"bandwidth_share is {bandwidth_share}; expected 0 < share <= 1, or None")
        choice, names = str(plan), [each["name"] for each in self.status()["nodes"] if not each["drains"]]
        options = NodeOptions.read(self._folder)
        if not options.chooses_store or options.has_store_of(self.path):
            choice = str(apply_stored(self.path, choice, force=force))
        if not options.chooses_store:
            hand_out(self.path, self._folder)
        found: list[dict[str, Any]] = []
        failures: list[HybridIndexError] = []
        for number, name in enumerate(names, 1):
            if progress is not None:
                progress(f"{name} moves lists of its devices, {number} of {len(names)}", None, None)
            told: dict[str, Any] = {}
            try:
                told = self._apply_on(name, choice, force=force, bandwidth_share=bandwidth_share)
            except InfeasiblePlanError:
                raise
            except HybridIndexError as error:
                failures.append(error)
            else:
                if choice == "latest":
                    choice = str(told["plan_id"])  # another one may be by now
            found.append({
                "name": name, "plan_id": told.get("plan_id"), "moved_lists": told.get("lists_to_move"),
                "moved_bytes": told.get("bytes_to_move"), "unplaced_lists": told.get("unplaced_lists"),
                "problem": None if told else str(failures[-1]),
            })  # fmt: skip
        if failures and len(failures) == len(found):
            raise failures[0]
        return {"nodes": found}

    def _apply_on(self, name: str, choice: str, **options: Any) -> dict[str, Any]:
        try:
            actor = self._ray.get_actor(f"{self.name}:{name}", namespace=NAMESPACE)
        except ValueError:
            raise UnreachableError(f"{name} is not there: its machine is lost, or starts") from None
        told: dict[str, Any] = self._call(actor.apply_plan.remote(choice, **options), None)
        return told

    def _wait_until_whole(self, when: str) -> None:
        """Until all nodes are up with the newest map, and each list is on as many as it should be."""
        ends = time.monotonic() + _WHOLE_S
        while True:
            status = self.status()
            nodes = [each for each in status["nodes"] if not each["drains"]]
            away = [each["name"] for each in nodes
                    if each["state"] != "up" or each["map_version"] != status["map_version"]]  # fmt: skip
            if not away and not status["lists_below_replicas"]:
                return
            if time.monotonic() > ends:
                lacking = f"{', '.join(away)} did not come" if away else "lists are on fewer nodes than they should be"
                raise UnreachableError(f"{lacking} for {_WHOLE_S:g} s {when}; hybridindex cluster status says more")
            time.sleep(_POLL_S)

    def add_node(self, progress: OnProgress | None = None) -> dict[str, Any]:
        """Starts one more node, on the machine of Ray with the fewest, and moves lists to it. Raises as
        :meth:`repartition`."""
        manager, ray, options = self._manager(), self._ray, NodeOptions.read(self._folder)
        status = self._call(manager.status.remote(), 30.0)
        known = status["nodes"]
        if len(known) >= MAX_NODES:
            raise InvalidInputError(f"the cluster has {len(known)} nodes, the maximum; drain one first")
        number = 1 + max(int(node["name"].rpartition("-")[2]) for node in known)
        keys = read_keys(self._folder)
        if keys is None:
            raise ServiceError(
                f"{self._folder} lacks one of {', '.join(KEY_FILES)}, which a node needs; expected the folder of the "
                "cluster's state (--state)"
            )
        taken = self._places_of(known)
        place = min(node_places(ray), key=lambda place: taken.count(place["NodeID"]))
        spec = self._spec(f"node-{number}", keys, options, place, status["generation"])
        (entry,) = self._start_nodes([spec], [place])
        keep_machines(self._folder, [spec], [place])
        entries = [NodeEntry(name=n["name"], url=n["url"], memory_bytes=n["memory_bytes"]) for n in known]
        self._call(manager.set_nodes.remote([*entries, entry]), 30.0)
        try:
            return self._change(manager, manager.repartition.remote(anew=False), progress)
        except HybridIndexError as error:
            # The node has its place: another add-node would start a second one.
            cure = f"{spec.name} was started, and takes lists with: hybridindex cluster repartition {self.path}"
            error.args = (f"{error}; {cure}",)
            raise

    def _places_of(self, nodes: Sequence[dict[str, Any]]) -> list[str]:
        """Ray's machines of nodes, as far as they answer."""
        places = []
        for node in nodes:
            if not node["drains"]:
                with contextlib.suppress(HybridIndexError, ValueError):
                    actor = self._ray.get_actor(f"{self.name}:{node['name']}", namespace=NAMESPACE)
                    places.append(self._call(actor.describe.remote(), 5.0)["place"])
        return places

    def router(self, *, timeout_s: float = 30.0, writes: bool = False, by_locality: bool = True) -> ClusterRouter:
        """What searches it, and changes rows where it ``writes``; the caller's to close. ``by_locality``: as of
        :class:`ClusterRouter`."""
        key = self._key or (key_for_writes if writes else key_for_searches)(self._folder)
        ca = self._ca or kept_ca(self._folder)
        tls = None if ca is None else ssl.create_default_context(cafile=ca)
        if self._seed is not None:
            nodes, dim = nodes_of(self._seed, key, tls)
        else:
            nodes = {node["name"]: node["url"] for node in self.status()["nodes"] if not node["drains"]}
            dim = read_manifest(self.path).dim
        return ClusterRouter(nodes, dim=dim, key=key, tls=tls, timeout_s=timeout_s, by_locality=by_locality)

    def _manager(self) -> Any:
        if self._ray is None:
            raise ServiceError("this handle has a node's address; to change the cluster, connect to that of its Ray")
        return manager_of(self._ray, self.name)

    def _change(self, manager: Any, under_way: Any, progress: OnProgress | None) -> dict[str, Any]:
        ray = self._ray
        while True:
            ready, _ = ray.wait([under_way], timeout=_POLL_S)
            if ready:
                done: dict[str, Any] = self._call(under_way, None)
                return done
            if progress is not None:
                copied, total = self._call(manager.progress.remote(), 30.0)
                progress("nodes take their lists", copied, total)

    def _call(self, reference: Any, timeout_s: float | None) -> Any:
        """What an actor answers; its own errors as they were raised there."""
        ray = self._ray
        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, HybridIndexError):
                raise error.cause from None
            raise ServiceError(f"an actor of the cluster failed: {error.cause!r}") from error
        except ray.exceptions.GetTimeoutError:
            raise UnreachableError(f"an actor of the cluster did not answer for {timeout_s:g} s") from None
        except ray.exceptions.ActorUnavailableError:
            raise UnreachableError("Ray is restarting an actor of the cluster; try again in a few seconds") from None
        except ray.exceptions.RayActorError as error:
            words = str(error).strip().splitlines()
            found = next((line for line in reversed(words) if "Error: " in line), words[0])
            # Its class comes first.
            raise ServiceError(f"an actor of the cluster ended: {found.partition('Error: ')[2] or found}") from None

    def close(self) -> None:
        """Lets go of Ray."""
        if self._ray is not None:
            _detach()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
