"""What a daemon does as a node of a cluster: it keeps the map, takes lists from others and gives them up.

The manager says what to hold and which map is in force; searches between nodes are the router's. Methods may be called
from any thread.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex import __version__, filesystem
from hybridindex.errors import (
    BuildError,
    FileError,
    HybridIndexError,
    InvalidInputError,
    MissingFileError,
    NotHeldError,
)
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.share.ranges import ranges_of
from hybridindex.index.share.share import HoldProgress, Share
from hybridindex.index.share.source import FolderSource, ListSource
from hybridindex.router.remote.changes import KNOWN_WITHIN_S, PeerChanges
from hybridindex.router.remote.cluster_map import ClusterMap
from hybridindex.router.remote.list_source import PeerSource
from hybridindex.router.remote.locality import Landmarks, landmarks_of, locality_of
from hybridindex.router.remote.remote_lists import RemoteLists
from hybridindex.service.cluster.following import Following
from hybridindex.service.cluster.recent_probes import RecentProbes
from hybridindex.service.cluster.same_lists import SameLists
from hybridindex.types import F32

__all__ = ["KEY_VARIABLE", "MAP_FILE", "Member"]

_log = logging.getLogger(__name__)

#: Of the environment: the key that nodes show each other.
KEY_VARIABLE = "HYBRIDINDEX_CLUSTER_KEY"
#: In the share's directory: the map that was in force last.
MAP_FILE = "cluster_map.json"
#: For a node that lists are taken from to answer, or to send more.
_PEER_S = 5.0
#: Lists of one read; between two of them a job may be ended.
_AT_ONCE = 256


class _Holding:
    """Lists on their way to this node."""

    def __init__(self, lists: Sequence[int], nbytes: int) -> None:
        self.stop = threading.Event()
        #: It has no lists: it waits for the end of the one before.
        self.only_ends = not lists
        self.lists_left, self.bytes_left = len(lists), nbytes
        self.error = ""
        self.running = True

    def status(self) -> dict[str, Any]:
        return {
            "running": self.running,
            "lists_left": self.lists_left,
            "bytes_left": self.bytes_left,
            "error": self.error,
        }


class Member:
    """Owner of what connects a share to its cluster."""

    def __init__(
        self,
        index: IVFIndex,
        name: str,
        *,
        source: Path | None = None,
        memory_bytes: int | None = None,
        ca: Path | None = None,
        before: Member | None = None,
    ) -> None:
        """
        Args:
            index: opened from a share.
            name: this node's, in maps.
            source: the whole index, for lists that no other node has; ``index`` was opened with its changes.
            memory_bytes: that lists may take here; told to the manager.
            ca: certificates that those of other nodes are checked with.
            before: of another generation, which serves meanwhile: lists that have not changed come from there.

        Raises:
            InvalidInputError: it is no share, or a setting is wrong.
        """
        if index.share is None:
            raise InvalidInputError(
                f"{index.path} is a whole index; expected a share of one, which hybridindex cluster start makes"
            )
        self._index, self._share = index, index.share
        #: The whole index, of which it has a share.
        self.source = source
        self.memory_bytes, self.ca = memory_bytes, ca
        self._before = before
        self._key = os.environ.get(KEY_VARIABLE) or None
        self._tls = _tls(ca)
        self.remote = RemoteLists(index, name, key=self._key, tls=self._tls)
        #: Who writes, and who is told of it.
        self.changes = PeerChanges(self.remote)
        #: None: nothing is followed.
        self.following = None if source is None else Following(index.live)
        self._lock = threading.Lock()
        #: Maps are kept in the order in which they are applied.
        self._applying = threading.Lock()
        self._holding: _Holding | None = None
        self._thread: threading.Thread | None = None
        spans = index.integrity.spans
        #: (nlist,) int64 bytes of the codes and ids of each.
        self._list_bytes: npt.NDArray[np.int64] = (spans[:, :, 1] - spans[:, :, 0]).sum(axis=1)
        self._counted: tuple[ClusterMap | None, dict[str, tuple[int, int]]] = (None, {})
        #: Of the index, once a client has asked; and what clients are told, of the newest map.
        self._landmarks: Landmarks | None = None
        self._locality: tuple[ClusterMap | None, bytes] = (None, b"")
        self._locating = threading.Lock()
        self._n_searches = 0
        #: What clients asked lately.
        self.recent = RecentProbes(index)
        self._file = index.path / MAP_FILE
        if before is None:
            self._resume()

    @property
    def number(self) -> int:
        """Of the last change of rows that searches of this node see."""
        return self._index.live.number

    def know(self, number: int) -> int:
        """Looks for change ``number``, a moment long; the last one that searches see then."""
        return self.number if self.following is None else self.following.until(number, KNOWN_WITHIN_S)

    def serve(self) -> None:
        """This generation serves from now on: lists come from others alone, and what served before can go."""
        self._before = None

    def is_of(self, map_: ClusterMap) -> bool:
        """Whether a map is of the same generation of the index."""
        return (map_.fingerprint, map_.generation) == (self._index.fingerprint, self._index.generation)

    @property
    def index(self) -> IVFIndex:
        """The share."""
        return self._index

    @property
    def share(self) -> Share:
        """What this node holds."""
        return self._share

    def _resume(self) -> None:
        """Applies the map that was in force last; the manager sends a newer one, if there is one."""
        try:
            text = filesystem.read_bytes(self._file)
        except MissingFileError:
            return
        except FileError as error:
            _log.warning("the last map of the cluster cannot be read: %s", error)
            return
        try:
            self.remote.apply(ClusterMap.from_json(text))
        except InvalidInputError as error:
            _log.warning("the last map of the cluster is not used: %s", error)

    def apply(self, map_: ClusterMap) -> bool:
        """Puts a map in force and keeps it; False: it is older than the one that is.

        Raises:
            InvalidInputError: it is of another cluster, index or generation, or says that this node holds what it
                does not.
            FileError: it cannot be kept; it is in force.
        """
        own = map_.index_of(self.remote.name)
        if own is not None and (lacking := np.flatnonzero(map_.held_by(own) & ~self._share.held)).size:
            raise InvalidInputError(
                f"the map says that {self.remote.name} holds {lacking.size} lists that it does not hold, "
                f"list {lacking[0]} first"
            )
        with self._applying:
            before = self.remote.map
            if not self.remote.apply(map_):
                return False
            if before is None or before.version < map_.version:
                filesystem.replace_file(self._file, map_.to_json())
        return True

    def hold(self, wanted: npt.NDArray[np.bool_], bytes_per_s: int | None, *, replace: bool = False) -> int:
        """Begins to take lists (nlist,) bool from nodes that hold them, or from the whole index; how many.

        Args:
            replace: a job that goes on ends first, between two lists, and what it took is held. Without lists that is
                all that is done.

        Raises:
            BuildError: another such job goes on.
        """
        lists = np.flatnonzero(wanted & ~self._share.held)
        with self._lock:
            before = self._thread
            if self._holding is not None and self._holding.running:
                if not replace:
                    raise BuildError(
                        "the node is already taking lists; try again when it has them, or replace the request"
                    )
                self._holding.stop.set()
            self._holding = job = _Holding(lists.tolist(), int(self._nbytes(lists)))
            self._thread = threading.Thread(
                target=self._take, args=(job, lists, bytes_per_s, before), name="hybridindex-hold", daemon=True
            )
            self._thread.start()
        return len(lists)

    def _nbytes(self, lists: npt.NDArray[np.int64]) -> int:
        return int(self._list_bytes[lists].sum())

    def _take(
        self, job: _Holding, lists: npt.NDArray[np.int64], bytes_per_s: int | None, before: threading.Thread | None
    ) -> None:
        if before is not None:
            before.join()
        try:
            for start in range(0, len(lists), _AT_ONCE):
                some = lists[start : start + _AT_ONCE]
                lists_after, bytes_after = job.lists_left - len(some), job.bytes_left - self._nbytes(some)

                def told(lists_left: int, bytes_left: int, after: tuple[int, int] = (lists_after, bytes_after)) -> None:
                    job.lists_left, job.bytes_left = after[0] + lists_left, after[1] + bytes_left

                self._take_some(job, some, bytes_per_s, told)
                if job.stop.is_set():
                    job.error = "it was ended"
                    return
                told(0, 0)
        except Exception as error:  # noqa: BLE001 - the manager is told
            _log.exception("lists could not be taken")
            job.error = str(error)
        finally:
            job.running = False

    def _take_some(
        self, job: _Holding, lists: npt.NDArray[np.int64], bytes_per_s: int | None, told: HoldProgress
    ) -> None:
        """From one source after the other, until all are there."""
        problem: HybridIndexError | None = None
        for source, has in self._sources():
            left = lists[~self._share.held[lists] & has[lists]].tolist()
            if not left or job.stop.is_set():
                continue
            try:
                self._share.hold(left, source, bytes_per_s=bytes_per_s, progress=told, stop=job.stop)
            except HybridIndexError as error:
                _log.warning("lists could not be taken from %s: %s", getattr(source, "url", "a share or index"), error)
                problem = error
        left = lists[~self._share.held[lists]].tolist()
        if left and not job.stop.is_set():
            raise problem or NotHeldError(f"no node that answers has list {left[0]} and {len(left) - 1} others")

    def _sources(self) -> Iterator[tuple[ListSource, npt.NDArray[np.bool_]]]:
        """Who may have lists, and which: what served before, nodes that answer, in turn, then the whole index."""
        map_, nlist = self.remote.map, self._index.nlist
        before = self._before
        if before is not None:
            same = SameLists(self._index, before.index)
            yield same, same.has
        if map_ is not None:
            up = {peer["name"] for peer in self.remote.status() if peer["state"] in ("up", "late")}
            nodes = [(i, node) for i, node in enumerate(map_.nodes) if node.name in up]
            own, spans = map_.index_of(self.remote.name) or 0, self._index.integrity.spans
            for i, node in sorted(nodes, key=lambda each: (each[0] - own) % len(map_.nodes)):
                of = self._index.generation
                source = PeerSource(node.url, self._key, self._tls, spans=spans, generation=of, timeout_s=_PEER_S)
                yield source, map_.held_by(i)
        if self.source is not None:
            yield FolderSource(self.source, generation=self._index.generation), np.ones(nlist, dtype=np.bool_)

    def drop(self, lists: npt.NDArray[np.bool_]) -> int:
        """Gives up lists (nlist,) bool; the bytes that were given back.

        Raises:
            InvalidInputError: the map in force says that this node holds some.
        """
        with self._lock:
            job, thread = self._holding, self._thread
        if job is not None and thread is not None and job.only_ends:
            thread.join()  # it only ends another one, whose last lists come until then
        map_ = self.remote.map
        own = None if map_ is None else map_.index_of(self.remote.name)
        if map_ is not None and own is not None and (kept := np.flatnonzero(lists & map_.held_by(own))).size:
            raise InvalidInputError(f"lists: the map in force says that {self.remote.name} holds list {kept[0]}")
        return self._share.drop(np.flatnonzero(lists & self._share.held).tolist())

    def status(self) -> dict[str, Any]:
        """For the manager and people."""
        index, map_, job = self._index, self.remote.map, self._holding
        return {
            "name": self.remote.name,
            "cluster": None if map_ is None else map_.cluster,
            "version": __version__,
            "fingerprint": index.fingerprint,
            "generation": index.generation,
            "nlist": index.nlist,
            "map_version": 0 if map_ is None else map_.version,
            "held": ranges_of(self._share.held),
            "held_bytes": self._share.held_bytes,
            "memory_bytes": self.memory_bytes,
            "nobody_has": len(self.remote.nobody_has()),
            "changes": self._changes(),
            "holding": None if job is None else job.status(),
            "peers": self.remote.status(),
        }

    def _changes(self) -> dict[str, Any] | None:
        """None: nothing is followed."""
        if (following := self.following) is None:
            return None
        writer = self.changes.writer()
        return {"number": following.number, "age_s": following.age_s, "problem": following.problem, "writer": writer}

    def unreachable(self) -> tuple[int, float]:
        """Lists that no node which answers has, this one included: how many, and their part of the bytes of all."""
        lists = self.remote.nobody_has()
        return len(lists), int(self._list_bytes[lists].sum()) / max(1, int(self._list_bytes.sum()))

    def below_replicas(self) -> int:
        """Lists of the map with fewer holders that answer than there should be."""
        map_ = self.remote.map
        if map_ is None:
            return 0
        up = {peer["name"] for peer in self.remote.status() if peer["state"] in ("up", "late")} | {self.remote.name}
        mask = np.uint64(sum(1 << i for i, node in enumerate(map_.nodes) if node.name in up))
        return int(np.count_nonzero(np.bitwise_count(map_.holders & mask) < map_.replicas))

    def locality(self) -> bytes:
        """The table of localities that clients choose nodes by, encoded; empty: there is no map, or no table of such an
        index. Takes a second of a large index the first time."""
        with self._locating:
            map_, (of, encoded) = self.remote.map, self._locality
            if map_ is None or map_ is of:
                return encoded
            landmarks = self._landmarks if of is not None else landmarks_of(self._index)
            encoded = b"" if landmarks is None else locality_of(landmarks, self._index.list_bytes, map_).encode()
            self._landmarks, self._locality = landmarks, (map_, encoded)
            return encoded

    def count_search(self, queries: F32) -> None:
        """This node has answered one, of a client: (n, dim) queries."""
        self._n_searches += 1
        self.recent.add(queries)

    def summary(self) -> dict[str, Any]:
        """What is shown of the cluster: without addresses."""
        map_, peers = self.remote.map, self.remote.status()
        lists, part = self.unreachable()
        own = {"name": self.remote.name, "state": "this node", "asked": 0, "hedged": 0, "failed": 0}
        held = self._held_by_map(map_)
        nodes = []
        for node in (own, *peers):
            n, nbytes = held.get(node["name"], (0, 0))
            nodes.append({**{name: node[name] for name in own}, "lists": n, "bytes": nbytes})
        return {
            "map_version": 0 if map_ is None else map_.version,
            "replicas": 0 if map_ is None else map_.replicas,
            "held_lists": int(self._share.held.sum()),
            "held_bytes": self._share.held_bytes,
            "lists_below_replicas": self.below_replicas(),
            "unreachable_lists": lists,
            "unreachable_share": part,
            "fan_out": sum(peer["asked"] for peer in peers) / self._n_searches if self._n_searches else None,
            "changes": self._changes(),
            "nodes": nodes,
        }

    def _held_by_map(self, map_: ClusterMap | None) -> dict[str, tuple[int, int]]:
        """Lists of each node, and their bytes. Counted once for each map: the page asks every second."""
        counted, held = self._counted
        if map_ is not None and counted is not map_:
            masks = {node.name: map_.held_by(i) for i, node in enumerate(map_.nodes)}
            held = {name: (int(mask.sum()), int(self._list_bytes[mask].sum())) for name, mask in masks.items()}
            self._counted = map_, held
        return held

    def close(self) -> None:
        """After the router."""
        with self._lock:
            job, thread = self._holding, self._thread
        if job is not None and thread is not None:
            job.stop.set()
            thread.join()
        if self.following is not None:
            self.following.close()
        self.remote.close()


def _tls(ca: Path | None) -> ssl.SSLContext | None:
    if ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise InvalidInputError(f"ca is {ca}, which holds no certificates: {error}") from error
