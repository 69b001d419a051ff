"""A shard: a faiss IVF index on one device that holds only the lists resident there, and the scan of it.

For codecs that the paged tier does not decode. A shard never changes: other lists mean another shard
(:mod:`hybridindex.tiers.shard.builder`). Codes move, ids do not: faiss answers with (list, row) positions, which the
host turns into ids. :mod:`hybridindex.tiers.shard.gpu` holds shards on a GPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hybridindex.index.faiss_model import empty_shard, map_lists, require_faiss
from hybridindex.paging import PageGeometry
from hybridindex.tiers.contract.positions import ids_of_positions
from hybridindex.tiers.contract.protocol import IdFilter, OnDone
from hybridindex.tiers.contract.residency import Residency
from hybridindex.tiers.contract.validate import check_filter, check_resident, check_scan
from hybridindex.tiers.host.faiss_scanner import HostFaissScanner
from hybridindex.tiers.host.openmp import adopt_openmp_threads
from hybridindex.types import F32, I64

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex

__all__ = ["FaissShard", "ShardScanner", "ShardSource", "StandInShard", "model_bytes", "warm_up"]

#: Of a list in a device's tables: two pointers and a length, and the norm of its centroid.
_TABLE_BYTES = 32


class FaissShard(Protocol):
    """A shard where it is scanned. One scan at a time; calls from several threads wait for each other or need not."""

    #: "faiss" or "faiss-gpu".
    name: str

    def search(self, queries: F32, probes: I64, coarse_distances: F32, distances: F32, positions: I64) -> None:
        """Top-k of (n, d) queries over (n, p) probes, -1 = skip, into (n, k) arrays; all are contiguous.

        Positions are list << 32 | row, -1 where there are fewer than k.

        Raises:
            OutOfBudgetError: one query needs more temporary memory than there is.
        """
        ...

    def close(self) -> None:
        """Frees the memory. No search may follow."""
        ...


class StandInShard:
    """A shard in the stand-in's memory, scanned by faiss on the calling thread alone. Thread-safe."""

    name = "faiss"

    def __init__(self, ivf: Any) -> None:
        self._ivf = ivf
        self._faiss: Any = require_faiss()

    def search(self, queries: F32, probes: I64, coarse_distances: F32, distances: F32, positions: I64) -> None:
        """See :meth:`FaissShard.search`."""
        ptr, parameters = self._faiss.swig_ptr, self._faiss.SearchParametersIVF(nprobe=probes.shape[1])
        found = (ptr(distances), ptr(positions))
        before = adopt_openmp_threads(1)
        try:
            # As pairs of list and row: a shard holds no ids.
            self._ivf.search_preassigned_c(
                len(queries),
                ptr(queries),
                distances.shape[1],
                ptr(probes),
                ptr(coarse_distances),
                *found,
                True,
                parameters,
            )
        finally:
            adopt_openmp_threads(before)

    def close(self) -> None:
        """See :meth:`FaissShard.close`."""
        self._ivf = None


class ShardSource:
    """The lists of a shard to come, in anonymous memory that faiss maps: copied one by one, then :meth:`cut`.

    A context manager: what was cut keeps the memory. One thread.
    """

    def __init__(self, index: IVFIndex, lists: I64, geometry: PageGeometry) -> None:
        self._index = index
        self.lists = lists
        pages = geometry.pages_for(index.list_sizes[lists])
        ends = np.cumsum(pages) * geometry.page_bytes
        self._offsets = ends - pages * geometry.page_bytes
        #: Bytes of all lists, page rounding included.
        self.nbytes = int(ends[-1]) if len(ends) else 0
        self._file = os.memfd_create("hybridindex-shard", os.MFD_CLOEXEC)
        os.ftruncate(self._file, self.nbytes)

    def copy(self, number: int) -> int:
        """Copies the codes of ``lists[number]`` from the mapped file; their bytes.

        Raises:
            OSError: there is no memory.
        """
        codes = self._index.list_codes(int(self.lists[number]))
        left, at = np.ascontiguousarray(codes).reshape(-1).data, int(self._offsets[number])
        while left:
            written = os.pwrite(self._file, left, at)
            left, at = left[written:], at + written
        return codes.nbytes

    def cut(self) -> Any:
        """The faiss IVF index of these lists; it shares the index's coarse quantizer."""
        index = self._index
        shard = empty_shard(index.mapped_model(), index.open_faiss())
        if self.nbytes:
            table = np.zeros((index.nlist, 3), dtype=np.int64)
            table[self.lists, 0] = table[self.lists, 1] = index.list_sizes[self.lists]
            table[self.lists, 2] = self._offsets
            file = Path(f"/proc/self/fd/{self._file}")
            map_lists(shard, file, table, code_size=index.code_size, nbytes=self.nbytes)
        return shard

    def __enter__(self) -> ShardSource:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def model_bytes(index: IVFIndex) -> int:
    """Bytes that a shard takes on a device besides its lists: centroids, the tables of lists, and codec tables (twice:
    faiss-gpu keeps those of pq in two orders). An upper bound."""
    centroids = 4 * index.nlist * index.scan_dim
    return centroids + _TABLE_BYTES * index.nlist + 2 * max(0, index.mapped_model().nbytes - centroids)


def warm_up(shard: FaissShard, dim: int, list_id: int) -> None:
    """One search: kernels are loaded and temporary memory is taken before anyone waits. ``list_id`` -1: of no list."""
    search = shard.search
    distances, positions = np.empty((1, 1), np.float32), np.empty((1, 1), np.int64)
    search(np.zeros((1, dim), np.float32), np.array([[list_id]]), np.zeros((1, 1), np.float32), distances, positions)
    if (positions[0, 0] >= 0) != (list_id >= 0):
        raise RuntimeError(f"a trial search of list {list_id} found position {int(positions[0, 0])}")


class ShardScanner:
    """Scans the lists of one device that one snapshot holds. Made per batch; thread-safe as long as the lease lives.

    faiss-gpu ignores filters: filtered scans read the same lists on the host.
    """

    def __init__(
        self, index: IVFIndex, shard: FaissShard | None, residency: Residency, ordinal: int, name: str
    ) -> None:
        """``shard`` holds at least the lists that ``residency`` names on the device; None where it names none."""
        self._index = index
        self._shard = shard
        self._residency = residency
        self._ordinal = ordinal
        self.name = name

    def scan(
        self,
        queries: F32,
        probes: I64,
        coarse_distances: F32,
        k: int,
        *,
        filter_ids: IdFilter | None = None,
        on_done: OnDone | None = None,
    ) -> tuple[F32, I64]:
        """See :meth:`hybridindex.tiers.contract.protocol.Scanner.scan`.

        Raises:
            InvalidInputError: also when a probed list is not resident on this device in this snapshot.
            OutOfBudgetError: the temporary memory is too small for one query of this many probes at this k.
        """
        check_scan(queries, probes, coarse_distances, k, dim=self._index.scan_dim, nlist=self._index.nlist)
        check_resident(probes, self._residency, self._ordinal, self._index.list_sizes)
        check_filter(filter_ids)
        if filter_ids is not None:
            host = HostFaissScanner(self._index, threads=1)
            return host.scan(queries, probes, coarse_distances, k, filter_ids=filter_ids, on_done=on_done)
        distances = np.empty((len(queries), k), dtype=np.float32)
        positions = np.full((len(queries), k), -1, dtype=np.int64)
        if self._shard is not None and probes.size:
            contiguous = np.ascontiguousarray
            arrays = contiguous(queries), contiguous(probes), contiguous(coarse_distances)
            self._shard.search(*arrays, distances, positions)
        distances[positions < 0] = -np.inf if self._index.metric == "ip" else np.inf
        ids = ids_of_positions(self._index, positions)
        if on_done is not None and len(queries):
            on_done(np.arange(len(queries), dtype=np.int32), distances, ids)
        return distances, ids
