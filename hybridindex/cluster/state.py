"""What a manager keeps on disk, so that it goes on where it was: the request, the nodes and the map in force."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from filelock import Timeout

from hybridindex import filesystem
from hybridindex.config import check_one_of, check_whole
from hybridindex.errors import (
    CorruptIndexError,
    FileError,
    InvalidInputError,
    MissingFileError,
    ServiceError,
    cannot_read,
)
from hybridindex.processes import KeptLock
from hybridindex.router.remote.cluster_map import MAX_NODES, ClusterMap

__all__ = ["STATE_FILE", "ClusterRequest", "ClusterState", "NodeEntry", "hold_state", "read_state", "write_state"]

STATE_FILE = "cluster.json"
_LOCK_FILE = "manager.lock"
_FORMAT = 1
#: Between two tries to take the lock.
_TRY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """What a cluster is asked to be.

    Raises:
        InvalidInputError: names the field.
    """

    replicas: int = 2
    #: "hot": memory beyond the replicas has the hottest lists on every node. "none": it stays free.
    replicate: Literal["hot", "none"] = "hot"
    #: Seconds that a node may be away before its lists are copied anew.
    repair_after_s: float = 10.0
    #: Of such copies, and of a repartition, on each node; None: as fast as it goes.
    copy_bytes_per_s: int | None = 200 << 20
    #: Seconds between two looks whether queries ask for other lists than before, and lists should move; None: never.
    refresh_s: float | None = None

    def __post_init__(self) -> None:
        check_whole("replicas", self.replicas, 1, MAX_NODES)
        check_one_of("replicate", self.replicate, ("hot", "none"))
        if not 0 <= self.repair_after_s <= 86_400:
            raise InvalidInputError(f"repair_after_s is {self.repair_after_s!r}; expected seconds, a day at most")
        if self.refresh_s is not None and not 1 <= self.refresh_s <= 86_400:
            raise InvalidInputError(f"refresh_s is {self.refresh_s!r}; expected seconds, 1 to a day, or None")
        if self.copy_bytes_per_s is not None:
            check_whole("copy_bytes_per_s", self.copy_bytes_per_s, 1, 1 << 50)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEntry:
    """A node as the manager knows it."""

    name: str
    url: str
    #: That lists may take.
    memory_bytes: int
    #: It gives its lists up, and then leaves.
    drains: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """All of it."""

    cluster: str
    #: The whole index.
    index: str
    request: ClusterRequest
    #: In the order of the map.
    nodes: tuple[NodeEntry, ...] = ()
    #: None: nothing was placed yet.
    map: ClusterMap | None = field(default=None, compare=False)


def hold_state(folder: Path, *, timeout_s: float) -> ExitStack:
    """Makes the caller the one manager of a state, until what is returned is closed, or its process ends.

    Raises:
        ServiceError: another one has been it for ``timeout_s``.
    """
    filesystem.make_folder(folder, parents=True, exist_ok=True)
    held, ends_s = ExitStack(), time.monotonic() + timeout_s
    while True:
        try:
            held.enter_context(KeptLock(folder / _LOCK_FILE, timeout_s=0))
        except Timeout:
            if time.monotonic() >= ends_s:
                words = "a manager of this cluster runs, maybe on another Ray: stop it there, or name another folder"
                raise ServiceError(f"{folder / _LOCK_FILE} is held: {words} for the state (--state DIR)") from None
            time.sleep(_TRY_S)
        else:
            return held


def write_state(folder: Path, state: ClusterState) -> None:
    """Replaces the file as a whole. Raises FileError."""
    data = {
        "format": _FORMAT,
        "cluster": state.cluster,
        "index": state.index,
        "request": asdict(state.request),
        "nodes": [asdict(node) for node in state.nodes],
        "map": None if state.map is None else json.loads(state.map.to_json()),
    }
    filesystem.replace_file(folder / STATE_FILE, json.dumps(data, indent=1), permissions=0o600)


def read_state(folder: Path) -> ClusterState | None:
    """None where there is none.

    Raises:
        CorruptIndexError: the file is damaged, or of a newer version.
    """
    file = folder / STATE_FILE
    try:
        data: Any = json.loads(filesystem.read_bytes(file))
    except MissingFileError:
        return None
    except FileError as error:
        raise cannot_read(error, "the cluster's state", file) from error
    except ValueError as error:
        raise CorruptIndexError(f"{file} is not the state of a cluster: {error}") from error
    try:
        if data["format"] != _FORMAT:
            raise CorruptIndexError(f"{file} has format {data['format']!r}; expected {_FORMAT}")
        return ClusterState(
            cluster=data["cluster"],
            index=data["index"],
            request=ClusterRequest(**data["request"]),
            nodes=tuple(NodeEntry(**node) for node in data["nodes"]),
            map=None if data["map"] is None else ClusterMap.from_json(json.dumps(data["map"])),
        )
    except (KeyError, TypeError, InvalidInputError) as error:
        raise CorruptIndexError(f"{file} is not the state of a cluster: {error!r}") from error
