"""What the folder of a cluster tells its clients: where nodes are, and what they let in."""

from __future__ import annotations

import os
import ssl
from contextlib import suppress
from pathlib import Path

from hybridindex import filesystem
from hybridindex.client.client import Client
from hybridindex.cluster.keys import key_for_upkeep, key_for_writes
from hybridindex.cluster.nodes.calls import NodeCalls
from hybridindex.cluster.nodes.options import read_options
from hybridindex.cluster.state import STATE_FILE, ClusterState, read_state
from hybridindex.errors import (
    AccessDeniedError,
    CorruptIndexError,
    DeadlineExceededError,
    FileError,
    InvalidInputError,
    OverloadedError,
    ServiceError,
    UnreachableError,
)
from hybridindex.index.storage.generation import as_path

__all__ = [
    "FOLDER",
    "client_of",
    "folder_of",
    "kept_ca",
    "nodes_of",
    "refuse_copy",
]

#: In the index directory, unless another one is named.
FOLDER = "cluster"
#: For a node to answer a client that begins.
_ANSWERS_S = 5.0


def folder_of(path: Path, folder: str | Path | None) -> Path:
    """Where the state of the cluster of an index is."""
    return path / FOLDER if folder is None else Path(folder)


def refuse_copy(folder: Path, index: str | Path) -> None:
    """Raises InvalidInputError: a cluster's folder is of another index that is there, as in a copy of its directory."""
    with suppress(CorruptIndexError):
        state = read_state(folder)
        if state is not None and filesystem.exists(state.index):
            _refuse_other(state, folder, index)


def _refuse_other(state: ClusterState, folder: Path, index: str | Path) -> None:
    if os.path.realpath(state.index) != os.path.realpath(index):
        raise InvalidInputError(
            f"{folder} belongs to the cluster of {state.index}; name that index, or remove the folder if this index is "
            "a copy"
        )


def nodes_of(url: str, key: str | None, tls: ssl.SSLContext | None) -> tuple[dict[str, str], int]:
    """Names and URLs of the nodes that one of them names, and the dimensions of queries.

    Raises:
        UnreachableError, ServiceError: it does not say.
    """
    said = NodeCalls(url, key, tls).nodes()
    try:
        return {node["name"]: node["url"] for node in said["nodes"]}, int(said["dim"])
    except (KeyError, TypeError, ValueError) as error:
        raise ServiceError(f"{url} names no nodes; is there a node of a cluster at that address?") from error


def client_of(
    index: str | Path, *, key: str | None = None, upkeep: bool = False, timeout_s: float = 30.0
) -> Client | None:
    """A client of a node that answers, for changes of rows; None: no cluster of the index was started, or its state is
    not within the index directory.

    Args:
        key: default the cluster's key for changes, where its folder can be read.
        upkeep: or for what needs the role admin.

    Raises:
        UnreachableError: no node answers. InvalidInputError: what says where nodes are came from another index, or
        another user: a key must not go to whoever wrote it.
    """
    folder = folder_of(as_path(index), None)
    state = read_state(folder)
    if state is None:
        return None
    file = folder / STATE_FILE
    if filesystem.stat(file).st_uid not in (0, os.getuid()) or filesystem.others_may_write(file):
        raise InvalidInputError(
            f"{file} belongs to another user, or others may write it; expected a file that only this user "
            "writes, because it names the nodes that receive keys"
        )
    _refuse_other(state, folder, index)
    ca = kept_ca(folder)
    verify = True if ca is None else ssl.create_default_context(cafile=ca)
    shown = key or (key_for_upkeep if upkeep else key_for_writes)(folder)
    for node in state.nodes:
        with Client(node.url, key=shown, timeout_s=_ANSWERS_S, verify=verify) as asked:
            try:
                asked.status()
            except (UnreachableError, OverloadedError, DeadlineExceededError):
                continue
            except AccessDeniedError:
                pass
        return Client(node.url, key=shown, timeout_s=timeout_s, verify=verify)
    raise UnreachableError(
        f"a cluster of {index} was started, but none of its nodes answers; stop it first (hybridindex cluster stop "
        f"{index})"
    )


def kept_ca(folder: Path) -> str | None:
    """What nodes were started with, where the cluster's folder can be read. Raises CorruptIndexError."""
    try:
        ca: str | None = read_options(folder)["tls_ca"]
    except FileError:
        return None
    return ca
