"""Which node of a cluster holds which lists. Data only.

The manager makes maps, and every node applies the newest that it was given. As JSON::

    {"format": 1, "cluster": "…", "version": 3, "fingerprint": "…", "generation": 1, "replicas": 2, "nlist": 4096,
     "nodes": [{"name": "node-0", "url": "http://127.0.0.1:9001", "serving": true, "lists": [[0, 10], [12, 13]]}]}

``lists`` are ranges [start, stop). A node that is not ``serving`` keeps its lists and is not asked.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.index.share.ranges import mask_of, ranges_of

__all__ = ["MAX_NODES", "U64", "ClusterMap", "IndexGeneration", "MapNode"]

U64 = npt.NDArray[np.uint64]

#: A list's holders are the bits of one number.
MAX_NODES = 64
#: Nobody needs more, and a map is read into memory.
_MAX_NLIST = 1 << 26
_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_URL = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


class IndexGeneration(NamedTuple):
    """Names one."""

    fingerprint: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MapNode:
    """A node of a map."""

    name: str
    #: ``http://host:port`` or ``https://host:port``.
    url: str
    #: Whether it is asked.
    serving: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InvalidInputError(f"a node's name is {self.name!r}; expected 1..64 letters, digits, '.', '_' or '-'")
        found = _URL.fullmatch(self.url) if isinstance(self.url, str) else None
        if found is None or int(found["port"]) > 65_535:
            raise InvalidInputError(f"the url of node {self.name} is {self.url!r}; expected http(s)://host:port")
        if not isinstance(self.serving, bool):
            raise InvalidInputError(f"serving of node {self.name} is {self.serving!r}; expected true or false")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterMap:
    """One version of who holds what.

    Raises:
        InvalidInputError: names what is wrong.
    """

    #: Which cluster; maps of another one are refused.
    cluster: str
    #: A later map has a larger one.
    version: int
    #: Of the index, and its generation.
    fingerprint: str
    generation: int
    nodes: tuple[MapNode, ...]
    #: (nlist,) uint64: bit i is set where node i holds the list.
    holders: U64
    #: Holders that every list should have.
    replicas: int

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if not 1 <= len(names) <= MAX_NODES or len(set(names)) < len(names):
            raise InvalidInputError(f"a map has nodes {names}; expected 1..{MAX_NODES} different names")
        if self.holders.dtype != np.uint64 or self.holders.ndim != 1:
            raise InvalidInputError(f"holders are {self.holders.dtype} {self.holders.shape}; expected uint64 (nlist,)")
        if len(names) < MAX_NODES and (self.holders >> np.uint64(len(names))).any():
            raise InvalidInputError(f"a list has a holder beyond the {len(names)} nodes of the map")
        self.holders.setflags(write=False)

    @property
    def of(self) -> IndexGeneration:
        """Of the index."""
        return IndexGeneration(self.fingerprint, self.generation)

    def index_of(self, name: str) -> int | None:
        """Position of a node; None where it is not of this map."""
        return next((i for i, node in enumerate(self.nodes) if node.name == name), None)

    def held_by(self, node: int) -> npt.NDArray[np.bool_]:
        """(nlist,) lists of a node."""
        return (self.holders >> np.uint64(node) & np.uint64(1)).astype(np.bool_)

    def without(self, name: str) -> tuple[tuple[MapNode, ...], U64]:
        """The nodes but for one that holds nothing, and the (nlist,) holders among these."""
        at = self.index_of(name)
        assert at is not None
        assert not self.held_by(at).any()
        before = np.uint64((1 << at) - 1)
        nodes = tuple(node for node in self.nodes if node.name != name)
        return nodes, (self.holders & before) | (self.holders >> np.uint64(1) & ~before)

    def to_json(self) -> str:
        nodes = [
            {"name": node.name, "url": node.url, "serving": node.serving, "lists": ranges_of(self.held_by(i))}
            for i, node in enumerate(self.nodes)
        ]
        return json.dumps(
            {
                "format": _FORMAT,
                "cluster": self.cluster,
                "version": self.version,
                "fingerprint": self.fingerprint,
                "generation": self.generation,
                "replicas": self.replicas,
                "nlist": len(self.holders),
                "nodes": nodes,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> ClusterMap:
        """
        Raises:
            InvalidInputError: it is no map, or of a newer format.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"a map of the cluster is no JSON: {error}") from None
        if not isinstance(raw, dict) or raw.get("format") != _FORMAT:
            found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
            raise InvalidInputError(f"a map of the cluster has format {found!r}; expected {_FORMAT}")
        nlist, nodes = _whole(raw, "nlist", 1, _MAX_NLIST), raw.get("nodes")
        if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes) or len(nodes) > MAX_NODES:
            raise InvalidInputError(f"nodes of a map are no list of 1..{MAX_NODES} objects")
        holders = np.zeros(nlist, dtype=np.uint64)
        for i, node in enumerate(nodes):
            holders[mask_of(node.get("lists"), nlist)] |= np.uint64(1 << i)
        return cls(
            cluster=_text(raw, "cluster"),
            version=_whole(raw, "version", 1, 1 << 53),
            fingerprint=_text(raw, "fingerprint"),
            generation=_whole(raw, "generation", 0, 1 << 53),
            nodes=tuple(
                MapNode(name=node.get("name", ""), url=node.get("url", ""), serving=node.get("serving", True))
                for node in nodes
            ),
            holders=holders,
            replicas=_whole(raw, "replicas", 1, MAX_NODES),
        )


def _whole(raw: dict[str, Any], name: str, low: int, high: int) -> int:
    value = raw.get(name)
    if type(value) is not int or not low <= value <= high:
        raise InvalidInputError(f"{name} of a map is {value!r}; expected an integer {low}..{high}")
    return value


def _text(raw: dict[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= 200:
        raise InvalidInputError(f"{name} of a map is {value!r}; expected a text of 1..200 characters")
    return value
