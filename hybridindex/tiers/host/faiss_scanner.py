"""The generic host tier: faiss scans mapped lists with ``search_preassigned``, for every codec that faiss knows.

faiss works query by query, so "a query is done" is known only when a call returns. With a completion callback the
batch is therefore cut into slices, least work first: queries with few misses are answered while others still scan.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridindex.index.faiss_model import require_faiss
from hybridindex.tiers.contract.protocol import IdFilter, OnDone
from hybridindex.tiers.contract.validate import allowed_ids, check_filter, check_scan, check_threads
from hybridindex.tiers.host.openmp import OpenMpThreads, openmp_threads
from hybridindex.types import F32, I32, I64

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex

__all__ = ["HostFaissScanner"]

#: Queries per thread in one early-completion slice. Smaller slices answer sooner but leave threads idle at their end.
_SLICE_QUERIES_PER_THREAD = 4


class HostFaissScanner(OpenMpThreads):
    """Scans probed lists on the CPU through faiss.

    Thread-safe: faiss CPU indexes may be read from several threads, and every call passes its own parameters.
    ``threads`` is the number of OpenMP threads of a call; ``None`` keeps faiss's own setting. ``rounded=False``, of
    RaBitQ codes alone: with queries that faiss does not round, which is slower.
    """

    name = "faiss"

    def __init__(self, index: IVFIndex, *, threads: int | None = None, rounded: bool = True) -> None:
        requested = check_threads(threads)
        self._faiss: Any = require_faiss()
        self._index = index
        self._ivf: Any = index.open_faiss()
        # Over queries and probes: with faiss's default, 0, search_preassigned runs on one thread.
        self._ivf.parallel_mode = 2
        self._list_bytes = index.list_bytes
        self.threads = requested or openmp_threads()
        self._make_parameters: Any = (
            self._faiss.SearchParametersIVF if rounded else partial(self._faiss.IVFRaBitQSearchParameters, qb=0)
        )
        #: Unfiltered search parameters by number of probes, at most nlist of them.
        self._params: dict[int, Any] = {}

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
        """See :meth:`hybridindex.tiers.contract.protocol.Scanner.scan`."""
        check_scan(queries, probes, coarse_distances, k, dim=self._index.scan_dim, nlist=self._index.nlist)
        check_filter(filter_ids)
        before = self.adopt_thread()
        try:
            distances, ids = self.scan_checked(
                np.ascontiguousarray(queries),
                np.ascontiguousarray(probes),
                np.ascontiguousarray(coarse_distances),
                k,
                filter_ids=filter_ids,
                on_done=on_done,
            )
        finally:
            self.give_back_thread(before)
        return self._normalise(distances, ids)

    def scan_checked(
        self,
        queries: F32,
        probes: I64,
        coarse_distances: F32,
        k: int,
        *,
        filter_ids: IdFilter | None = None,
        on_done: OnDone | None = None,
    ) -> tuple[F32, I64]:
        """:meth:`scan` of contiguous arrays without its checks, on a thread that was adopted before. Distances in
        empty places are what faiss puts there. A list id out of range crashes the process.
        """
        n, p = probes.shape
        distances = np.empty((n, k), dtype=np.float32)
        ids = np.empty((n, k), dtype=np.int64)
        if n == 0 or p == 0:
            distances.fill(-np.inf if self._index.metric == "ip" else np.inf)
            ids.fill(-1)
            if on_done is not None and n:
                on_done(np.arange(n, dtype=np.int32), distances, ids)
            return distances, ids
        params = self._parameters(p, filter_ids)
        slice_rows = _SLICE_QUERIES_PER_THREAD * self.threads
        if on_done is None or n <= slice_rows:
            self._search(queries, probes, coarse_distances, k, distances, ids, params)
            if on_done is not None:
                on_done(np.arange(n, dtype=np.int32), *self._normalise(distances, ids))
            return distances, ids
        for rows in self._slices(probes, slice_rows):
            part_distances = np.empty((len(rows), k), dtype=np.float32)
            part_ids = np.empty((len(rows), k), dtype=np.int64)
            self._search(queries[rows], probes[rows], coarse_distances[rows], k, part_distances, part_ids, params)
            distances[rows], ids[rows] = self._normalise(part_distances, part_ids)
            on_done(rows, part_distances, part_ids)
        return distances, ids

    def _search(self, x: F32, probes: I64, coarse: F32, k: int, distances: F32, ids: I64, params: Any) -> None:
        # The C call, not faiss's Python wrapper: that one takes nprobe from the shared index, which is not thread-safe.
        ptr = self._faiss.swig_ptr
        self.call_faiss(
            self._ivf.search_preassigned_c,
            len(x),
            ptr(x),
            k,
            ptr(probes),
            ptr(coarse),
            ptr(distances),
            ptr(ids),
            False,
            params,
        )

    def _normalise(self, distances: F32, ids: I64) -> tuple[F32, I64]:
        """faiss marks empty places with the largest float; the public contract says infinity. In place."""
        distances[ids < 0] = -np.inf if self._index.metric == "ip" else np.inf
        return distances, ids

    def _parameters(self, width: int, filter_ids: IdFilter | None) -> Any:
        if filter_ids is None:
            # Read-only once made, so calls may share it; making one costs as much as a small merge.
            if width not in self._params:
                self._params[width] = self._make_parameters(nprobe=width)
            return self._params[width]
        params = self._make_parameters(nprobe=width)
        params.sel = self._faiss.IDSelectorBatch(allowed_ids(filter_ids))
        params.referenced_objects = [params.sel]
        return params

    def _slices(self, probes: I64, slice_rows: int) -> list[I32]:
        work = np.where(probes >= 0, self._list_bytes[probes], 0).sum(axis=1)
        order = np.argsort(work, kind="stable").astype(np.int32)
        return [order[start : start + slice_rows] for start in range(0, len(order), slice_rows)]

    def prepare(self, lists: I64) -> None:
        """Nothing: faiss keeps nothing of what it scanned."""

    def close(self) -> None:
        """Nothing to end: the threads are OpenMP's."""
