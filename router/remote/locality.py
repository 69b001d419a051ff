"""What each node of a cluster holds of the lists that a query is near to: a client asks the node that holds most.

Some centroids of the index are *landmarks*, and each list belongs to the landmark that is nearest to its centroid. For
each landmark a table says which part of the bytes of its lists each node holds. A query probes mostly lists of its
nearest landmarks, so that their rows of the table, weighted, say about what part of its work a node can do alone. Which
lists a query does probe is still found by the node that is asked: no answer depends on the table.

Encoded, little-endian, without padding: a header of 44 bytes (magic ``HIXL``, format as uint32, version of the map as
uint64, then landmarks m, dimensions d, nodes n, nlist and nprobe of the index, whether queries are brought to length 1
(0 or 1), and bytes of the names as uint32), landmarks (m, d) float32, offsets (m,) float32, shares (m, n) float32, and
the nodes' names in UTF-8, a line each.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.index.faiss_model import centroids_of, peel, undo_transforms
from hybridindex.index.ivf import IVFIndex
from hybridindex.router.remote.cluster_map import ClusterMap
from hybridindex.types import F32, I64

__all__ = ["LOCALITY_PATH", "MOST_BYTES", "Landmarks", "Locality", "landmarks_of", "locality_of"]

LOCALITY_PATH = "/v1/cluster/locality"
#: Of a table on its way to a client.
MOST_BYTES = 16 << 20
#: Landmarks, as many as their vectors stay within these bytes.
_MOST_LANDMARKS, _LANDMARK_BYTES = 256, 4 << 20
#: Lists that are looked at, of an index with more; and centroids that are read from it at once.
_MOST_LISTS, _AT_ONCE = 1 << 15, 4096
#: Of a query's nearest landmarks, over those that have as many lists as it probes: their weight falls by e for each of
#: these, and the rest matter little.
_NEAR, _MOST_NEAR = 4, 64
_QUERIES_AT_ONCE = 256
_MAGIC, _FORMAT = b"HIXL", 1
_HEADER = struct.Struct("<4sIQ7I")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Landmarks:
    """Of one generation of an index."""

    #: (m, d) float32, as queries are before the index's transforms.
    vectors: F32
    #: (m,) float32: the landmark is the nearest whose scalar product with a query, plus this, is the greatest.
    offsets: F32
    #: Queries are brought to length 1 first.
    unit: bool
    #: (s,) int64 lists that stand for all, and the landmark of each.
    lists: I64
    of_list: I64
    #: Of the index.
    nlist: int
    nprobe: int


def landmarks_of(index: IVFIndex) -> Landmarks | None:
    """None: the coarse quantizer does not give its centroids, or a transform of the index has no inverse.

    Takes about s x m x d multiplications, for s lists and m landmarks.
    """
    ivf, transforms = index.open_faiss(), peel(index.open_faiss_with_transforms())[0].transforms
    unit = bool(transforms) and type(transforms[0]).__name__ == "NormalizationTransform"
    m = max(1, min(index.nlist, _MOST_LANDMARKS, _LANDMARK_BYTES // (4 * max(index.dim, index.scan_dim))))
    # The same on every node.
    some = np.random.default_rng(0).permutation(index.nlist)
    chosen, lists = np.sort(some[:m]), np.sort(some[:_MOST_LISTS])
    try:
        centroids = np.concatenate([centroids_of(ivf, int(each), 1) for each in chosen])
        vectors = undo_transforms(transforms[1:] if unit else transforms, centroids)
        if vectors is None:
            return None
        by_product = index.metric == "ip"
        offsets = np.zeros(m, np.float32) if by_product else -(centroids**2).sum(axis=1, dtype=np.float32) / 2
        of_list = np.empty(len(lists), dtype=np.int64)
        for first in range(0, index.nlist, _AT_ONCE):
            start, stop = np.searchsorted(lists, (first, first + _AT_ONCE))
            near = centroids_of(ivf, first, min(_AT_ONCE, index.nlist - first))[lists[start:stop] - first]
            of_list[start:stop] = (near @ centroids.T + offsets).argmax(axis=1)
    except RuntimeError:  # faiss's
        return None
    if not by_product:
        offsets = -(vectors**2).sum(axis=1, dtype=np.float32) / 2
    return Landmarks(
        vectors=vectors,
        offsets=offsets,
        unit=unit,
        lists=lists,
        of_list=of_list,
        nlist=index.nlist,
        nprobe=index.nprobe,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Locality:
    """The table, of one map."""

    #: Of the map.
    version: int
    #: Of the nodes that are asked.
    names: tuple[str, ...]
    #: As of :class:`Landmarks`.
    vectors: F32
    offsets: F32
    unit: bool
    #: Of the index.
    nlist: int
    nprobe: int
    #: (m, n) float32 part of the bytes of each landmark's lists on each node.
    shares: F32

    @property
    def tells_nodes_apart(self) -> bool:
        """Whether any node has more of some lists than another one."""
        return bool((self.shares != self.shares[:, :1]).any())

    def of(self, queries: F32, nprobe: int | None = None) -> F32:
        """(n, n_nodes) float32: what part of the work of each of (n, d) ``queries`` each node can do alone, about.

        ``nprobe``: None: the index's.
        """
        m = len(self.vectors)
        probed = max(1.0, (nprobe or self.nprobe) * m / self.nlist)
        n_near = min(m, _MOST_NEAR, math.ceil(_NEAR * probed))
        weights = np.exp(np.arange(n_near, dtype=np.float32) / np.float32(-probed))
        weights /= weights.sum()
        found = np.empty((len(queries), len(self.names)), dtype=np.float32)
        for first in range(0, len(queries), _QUERIES_AT_ONCE):
            some = queries[first : first + _QUERIES_AT_ONCE]
            if self.unit:
                some = some / np.maximum(np.linalg.norm(some, axis=1, keepdims=True), 1e-30)
            near = np.argsort(-(some @ self.vectors.T + self.offsets), axis=1)[:, :n_near]
            found[first : first + len(some)] = weights @ self.shares[near]
        return found

    def encode(self) -> bytes:
        names = "\n".join(self.names).encode()
        (m, d), n = self.vectors.shape, len(self.names)
        head = _HEADER.pack(_MAGIC, _FORMAT, self.version, m, d, n, self.nlist, self.nprobe, self.unit, len(names))
        arrays = (np.ascontiguousarray(each, dtype="<f4") for each in (self.vectors, self.offsets, self.shares))
        return b"".join((head, *(each.tobytes() for each in arrays), names))

    @classmethod
    def decode(cls, body: bytes) -> Locality:
        """
        Raises:
            InvalidInputError: it is no table, or of another format.
        """
        if len(body) < _HEADER.size or body[:4] != _MAGIC:
            raise InvalidInputError("the body is no table of localities: it begins otherwise")
        _, form, version, m, d, n, nlist, nprobe, unit, n_bytes = _HEADER.unpack_from(body)
        expected = _HEADER.size + 4 * m * (d + 1 + n) + n_bytes
        if form != _FORMAT or not m or not n or not nlist or not nprobe or unit > 1 or len(body) != expected:
            raise InvalidInputError(
                f"a table of localities has format {form}, {m} landmarks, {n} nodes and {len(body)} bytes; expected "
                f"format {_FORMAT}, some landmarks and nodes, and {expected} bytes"
            )
        floats = np.frombuffer(body, dtype="<f4", count=m * (d + 1 + n), offset=_HEADER.size)
        names = tuple(body[expected - n_bytes :].decode("utf-8", "replace").split("\n"))
        if len(names) != n or not np.isfinite(floats).all():
            raise InvalidInputError(f"a table of localities names {len(names)} of {n} nodes, or holds no numbers")
        return cls(
            version=version,
            names=names,
            vectors=floats[: m * d].reshape(m, d),
            offsets=floats[m * d : m * (d + 1)],
            unit=bool(unit),
            nlist=nlist,
            nprobe=nprobe,
            shares=floats[m * (d + 1) :].reshape(m, n),
        )


def locality_of(landmarks: Landmarks, list_bytes: I64, map_: ClusterMap) -> Locality:
    """The table of a map; ``list_bytes``: (nlist,) int64 that a scan reads of each list."""
    asked = [i for i, node in enumerate(map_.nodes) if node.serving]
    held = np.zeros((len(landmarks.vectors), len(asked) + 1))
    nbytes, lists = list_bytes[landmarks.lists], landmarks.lists
    of_nodes = np.stack([nbytes] + [nbytes * map_.held_by(i)[lists] for i in asked], axis=1)
    np.add.at(held, landmarks.of_list, of_nodes)
    shares = held[:, 1:] / np.maximum(held[:, :1], 1)
    return Locality(
        version=map_.version,
        names=tuple(map_.nodes[i].name for i in asked),
        vectors=landmarks.vectors,
        offsets=landmarks.offsets,
        unit=landmarks.unit,
        nlist=landmarks.nlist,
        nprobe=landmarks.nprobe,
        shares=shares.astype(np.float32),
    )
