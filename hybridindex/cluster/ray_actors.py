"""Ray's part: it places, supervises and names the nodes and the manager. No search and no list passes through it."""

from __future__ import annotations

import importlib.util
import logging
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridindex.cluster.keys import ClusterKeys
from hybridindex.cluster.manager import Manager
from hybridindex.cluster.node_process import NodeProcess, NodeSpec
from hybridindex.cluster.returning import Returning
from hybridindex.cluster.state import ClusterRequest, NodeEntry
from hybridindex.errors import (
    HybridIndexError,
    InvalidInputError,
    MissingDependencyError,
    ServiceError,
    UnreachableError,
    how_to_install,
)

__all__ = [
    "NAMESPACE",
    "ManagerActor",
    "NodeActor",
    "attach",
    "load_ray",
    "manager_of",
    "no_cluster",
    "node_places",
    "require_ray",
    "start_actor",
]

_log = logging.getLogger(__name__)

#: Ray's, of all our actors.
NAMESPACE = "hybridindex"
#: For a Ray cluster to answer, and for a node to start again.
_CONNECT_S, _START_S = 5.0, 180.0
#: Of actors' environments. Daemons open the machine's GPUs themselves; older Ray (2.52) hides all of them from an actor
#: that asks for none.
_SEES_GPUS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
#: Before a manager that could not go on from its state tries again.
_AGAIN_S = 2.0


def require_ray() -> None:
    """Without importing it: what lets a process in is read then.

    Raises:
        MissingDependencyError: it is not installed; names the extra.
    """
    if importlib.util.find_spec("ray") is None:
        raise MissingDependencyError(f"a cluster needs ray: {how_to_install('cluster')}")


def load_ray() -> Any:
    """Raises MissingDependencyError."""
    require_ray()
    import ray

    return ray


def attach(address: str) -> Any:
    """Connects this process to a Ray cluster that runs: ``host:port``, or "auto" for the one of this machine.

    Raises:
        MissingDependencyError: Ray is not installed. UnreachableError: nothing answers. ServiceError: Ray does not let
        us in, or has another version; or this process is connected to another one.
    """
    ray = load_ray()
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise InvalidInputError(f"address is {address!r}; expected 'auto', or host:port of a Ray cluster")
    if ray.is_initialized():
        own = ray.get_runtime_context().gcs_address
        # Hosts have several names.
        if address != "auto" and port != own.rpartition(":")[2]:
            raise ServiceError(
                f"this process is connected to the Ray at {own}, and the cluster is at {address}; close the handle of "
                "the other cluster first, or use another process"
            )
        return ray
    if address != "auto":
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        except OSError as error:
            raise UnreachableError(f"no Ray cluster answers at {address}: {error}") from error
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error", configure_logging=False
        )
    except ConnectionError as error:
        if "AuthToken" in f"{error} {error.__cause__}":
            raise ServiceError(
                f"Ray at {address} requires a token, which this process lacks, or its token differs; expected "
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH with the values of Ray's nodes"
            ) from error
        raise UnreachableError(
            f"no Ray cluster answers at {address}: start one with ray start --head, or "
            "nodes on this machine alone with hybridindex cluster start INDEX --local N"
        ) from error
    except Exception as error:
        # Ray has no class of its own for another version or a wrong token.
        raise ServiceError(f"Ray at {address} refuses the connection: {str(error).strip().splitlines()[0]}") from error
    return ray


class NodeActor:
    """One node, on one machine. Made anew by Ray where its process dies; the daemon ends with it."""

    def __init__(self, spec: NodeSpec) -> None:
        self._node = NodeProcess(spec)

    def describe(self) -> dict[str, Any]:
        """Its address, the daemon's process, and Ray's machine."""
        place = load_ray().get_runtime_context().get_node_id()
        return {"url": self._node.url, "pid": self._node.pid, "starts": self._node.n_starts, "place": place}

    def restart(self) -> None:
        """Ends the daemon, and starts it again."""
        self._node.restart()

    def apply_plan(self, choice: str, *, force: bool, bandwidth_share: float | None) -> dict[str, Any]:
        """Has the daemon serve another plan."""
        return self._node.apply_plan(choice, force=force, bandwidth_share=bandwidth_share)

    def close(self) -> None:
        """Ends the daemon."""
        self._node.close()


class ManagerActor:
    """The manager. Made anew by Ray where its process dies; goes on from its state."""

    def __init__(
        self, folder: str, cluster: str, index: str, request: ClusterRequest, keys: ClusterKeys, ca: str | None
    ) -> None:
        def manager() -> Manager:
            tls = None if ca is None else ssl.create_default_context(cafile=ca)
            return Manager(Path(folder), cluster=cluster, index=Path(index), request=request, key=keys.admin, tls=tls)

        self._cluster, self._ray = cluster, load_ray()
        self._manager = until_made(manager) if was_restarted(self._ray) else manager()
        self._progress = (0, 0)
        self._returning = Returning(
            Path(folder), keys, self._manager.silent_nodes,
            lambda: node_places(self._ray), self._look_at_actor, self._start_again, self._has_returned,
        )  # fmt: skip

    def set_nodes(self, entries: Sequence[NodeEntry]) -> None:
        self._manager.set_nodes(entries)

    def _look_at_actor(self, name: str) -> bool:
        """Whether there is one. Ray may have made it anew, and the port that it had may be taken: then it says where it
        listens now."""
        try:
            actor = self._ray.get_actor(f"{self._cluster}:{name}", namespace=NAMESPACE)
        except ValueError:
            return False
        try:
            url = self._ray.get(actor.describe.remote(), timeout=_CONNECT_S)["url"]
        except Exception:  # noqa: BLE001 - it starts, or hangs: it is asked again
            return True
        self._manager.has_moved(name, url)
        return True

    def _start_again(self, spec: NodeSpec, place: dict[str, Any]) -> str:
        actor = start_actor(
            self._ray, NodeActor, f"{self._cluster}:{spec.name}", spec, node_id=place["NodeID"], threads=2
        )
        url: str = self._ray.get(actor.describe.remote(), timeout=_START_S)["url"]
        return url

    def _has_returned(self, spec: NodeSpec, url: str) -> None:
        self._manager.set_nodes([NodeEntry(name=spec.name, url=url, memory_bytes=spec.memory_bytes)])

    def plan(self) -> dict[str, Any]:
        return self._manager.describe_plan()

    def repartition(self, *, anew: bool = True) -> dict[str, Any]:
        return self._manager.repartition(self._note, anew=anew)

    def drain(self, name: str) -> dict[str, Any]:
        return self._manager.drain(name, self._note)

    def forget(self, name: str) -> None:
        self._manager.forget(name)

    def _note(self, done: int, total: int) -> None:
        self._progress = (done, total)

    def progress(self) -> tuple[int, int]:
        """Bytes that the change under way has copied, and of how many."""
        return self._progress

    def status(self) -> dict[str, Any]:
        said, problems = self._manager.status(), self._returning.problems
        for node in said["nodes"]:
            node["problem"] = problems.get(node["name"], node["problem"])
        return said

    def close(self) -> None:
        self._returning.close()
        self._manager.close()


def was_restarted(ray: Any) -> bool:
    """Of the actor that asks: whether its process ended before."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def until_made(make: Callable[[], Manager]) -> Manager:
    """A manager that goes on from its state, as soon as that and the index can be read: an actor whose constructor
    raises is not made again by Ray, and the file system may be away for a while."""
    while True:
        try:
            return make()
        except (HybridIndexError, OSError) as error:
            _log.warning("the manager cannot continue yet: %s", error)
        time.sleep(_AGAIN_S)


def start_actor(ray: Any, kind: type, name: str, *arguments: Any, node_id: str | None = None, threads: int = 1) -> Any:
    """A detached actor that Ray starts again wherever its process dies; on one machine where ``node_id`` is given."""
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
        "max_concurrency": threads,
        "runtime_env": {"env_vars": _SEES_GPUS},
    }
    if node_id is not None:
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        options["scheduling_strategy"] = strategy
    return ray.remote(kind).options(**options).remote(*arguments)


def node_places(ray: Any) -> list[dict[str, Any]]:
    """Ray's machines that are alive: ``NodeID`` and ``NodeManagerAddress``, in a stable order."""
    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeID"]))


def manager_of(ray: Any, cluster: str) -> Any:
    """The manager of a cluster that runs.

    Raises:
        ServiceError: there is none.
    """
    try:
        return ray.get_actor(f"{cluster}:manager", namespace=NAMESPACE)
    except ValueError:
        raise no_cluster(ray, cluster) from None


def no_cluster(ray: Any, cluster: str) -> ServiceError:
    """That no such one runs on the Ray that was found, which may be somebody else's."""
    found = ray.get_runtime_context().gcs_address
    return ServiceError(
        f"no cluster {cluster} runs on the Ray at {found}; start it (hybridindex cluster start INDEX), or name the Ray "
        "that it runs on (--address HOST:PORT)"
    )
