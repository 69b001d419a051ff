"""What all nodes of a cluster are started with; kept in its folder, for nodes that are added."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hybridindex import filesystem
from hybridindex.api import STORE_FILE
from hybridindex.errors import CorruptIndexError, InvalidInputError
from hybridindex.service.config import is_loopback

__all__ = ["OPTIONS_FILE", "NodeOptions", "read_options"]

#: In the cluster's folder.
OPTIONS_FILE = "nodes.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What all nodes of a cluster are started with.

    Raises:
        InvalidInputError: names the field.
    """

    #: Memory that lists may take on each.
    memory_bytes: int
    #: Folder on each machine for the shares.
    data: Path
    #: Address that nodes listen on; "auto": each machine's own, as Ray knows it.
    host: str = "127.0.0.1"
    #: Certificate, its key, and the authority that other nodes' certificates are checked with; paths on every machine.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    #: Nodes may be reached from other machines without TLS.
    insecure_network: bool = False
    #: Further options of ``hybridindex serve``.
    serve: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.memory_bytes < 1:
            raise InvalidInputError(f"memory_bytes is {self.memory_bytes}; expected bytes above 0")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidInputError("tls_cert and tls_key belong together; expected both, or neither")
        beyond = self.host == "auto" or not is_loopback(self.host)
        if beyond and self.tls_cert is None and not self.insecure_network:
            raise InvalidInputError(
                f"host is {self.host!r}, which other machines can reach, and tls_cert is missing; expected a "
                "certificate, or insecure_network=True (--insecure-network) in a network where nobody listens"
            )

    @property
    def chooses_store(self) -> bool:
        """Whether nodes were given a control store: plans are in that."""
        return any(word.partition("=")[0] in ("--store", "--config") for word in self.serve)

    def with_store_of(self, index: Path) -> NodeOptions:
        """The same for nodes on one machine, which use the control store of the index where no other one is chosen:
        plans and profiles are in it. SQLite is not for several machines."""
        return self if self.chooses_store else replace(self, serve=(*self.serve, "--store", _store_of(index)))

    def has_store_of(self, index: Path) -> bool:
        """Whether nodes use the control store of the index."""
        return _store_of(index) in self.serve

    def keep(self, folder: Path) -> None:
        """Writes them to the cluster's folder; only this user may read it."""
        data = {name: str(each.absolute()) if isinstance(each, Path) else each for name, each in asdict(self).items()}
        # The address of a store may hold a password.
        filesystem.replace_file(folder / OPTIONS_FILE, json.dumps(data), permissions=0o600)

    @classmethod
    def read(cls, folder: Path) -> NodeOptions:
        """Those that were kept. Raises as :func:`read_options`."""
        data = read_options(folder)
        paths = {name: None if data[name] is None else Path(data[name]) for name in _PATHS}
        return cls(**{**data, **paths, "serve": tuple(data["serve"])})


def _store_of(index: Path) -> str:
    return str(index.absolute() / STORE_FILE)


_FIELDS = {field.name for field in fields(NodeOptions)}
_PATHS = ("data", "tls_cert", "tls_key", "tls_ca")


def read_options(folder: Path) -> dict[str, Any]:
    """The fields of :class:`NodeOptions` as they were kept.

    Raises:
        FileError: there is no such file. CorruptIndexError: it is damaged.
    """
    file = folder / OPTIONS_FILE
    try:
        found = json.loads(filesystem.read_bytes(file))
    except ValueError as error:
        raise CorruptIndexError(f"{file} cannot be used: {error}") from error
    if not isinstance(found, dict) or not found.keys() >= _FIELDS:
        raise CorruptIndexError(f"{file} cannot be used: it lacks some of {', '.join(sorted(_FIELDS))}")
    return {name: found[name] for name in _FIELDS}
