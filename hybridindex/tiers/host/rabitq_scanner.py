"""The host scan of codes: what a few bits a dimension say of the rows of the probed lists. Its answers are candidates,
whose exact distances :mod:`hybridindex.tiers.host.reranker` computes. ``native/scan`` does the work; the reference in
numpy, equal to the bit and slow, stands in where the extension is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hybridindex.config import MAX_CANDIDATES, RowsName
from hybridindex.errors import InvalidInputError
from hybridindex.extension import native
from hybridindex.index.rabitq.estimate import LARGEST_ESTIMATE, CodedQueries, estimates, prepare_queries
from hybridindex.index.rabitq.rotation import dot, pad
from hybridindex.index.source import find_unusable
from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.tiers.contract.protocol import IdFilter, OnDone
from hybridindex.tiers.contract.validate import check_scan, check_threads
from hybridindex.tiers.host.openmp import OpenMpThreads, openmp_threads
from hybridindex.tiers.host.reranker import FaissCodeReranker, Reranker
from hybridindex.tiers.host.rows_on_disk import RowsOnDisk
from hybridindex.types import F32, I64

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex
    from hybridindex.index.rabitq.codes import RabitqCodes

__all__ = ["HostRabitqScanner"]


class HostRabitqScanner(OpenMpThreads):
    """Scans the codes of probed lists on the CPU.

    A :class:`hybridindex.tiers.host.host_scanner.HostScanner` whose scan answers (estimates, positions) instead of
    (distances, ids), smaller is better for both metrics, and takes the products of queries and centroids, as
    :meth:`centre_products` computes them, for coarse distances. Thread-safe; concurrent scans share the threads.
    ``threads`` counts the calling thread; ``None``: as many as faiss uses.
    """

    name = "rabitq"

    @staticmethod
    def is_fast() -> bool:
        """Whether the extension scans codes; the reference is slower than a scan of rows."""
        return native is not None

    def __init__(
        self,
        index: IVFIndex,
        codes: RabitqCodes,
        *,
        threads: int | None = None,
        kernels: str = "",
        rows: RowsName = "resident",
    ) -> None:
        """
        Args:
            kernels: as :class:`hybridindex.tiers.host.native_scanner.HostNativeScanner` takes them.
            rows: "mapped": they are on disk, and the codes are locked in memory.

        Raises:
            InvalidInputError: bad ``threads``, or kernels that do not run here.
        """
        self.threads = check_threads(threads) or openmp_threads()
        self.codes = codes
        #: (nlist,) int64: bytes that a scan of each list reads.
        self.list_bytes = codes.list_bytes
        self._index = index
        self._centroids = np.ascontiguousarray(index.centroids)
        self._native: Any = None
        self.pool: Any = None
        if self.is_fast():
            assert native is not None
            self.pool = native.ThreadPool(self.threads - 1)
            spec = codes.spec
            try:
                self._native = native.RabitqScanner(
                    codes.data,
                    index.list_sizes,
                    spec.bits,
                    spec.dim,
                    codes.signs,
                    codes.centroid_sq,
                    spec.f_scale,
                    spec.g_scale,
                    spec.metric == "l2",
                    kernels,
                )
            except ValueError as error:
                raise InvalidInputError(str(error)) from error
        #: Where rows are read from; None: from memory.
        self.on_disk = None
        if rows == "mapped":
            codes.lock()
            self.on_disk = RowsOnDisk(index.rows)
        self.reranker = (
            Reranker(index, self.pool, kernels=kernels, on_disk=self.on_disk)
            if codes.spec.source == "rows"
            else FaissCodeReranker(index, self.on_disk)
        )

    def centre_products(self, queries: F32, probes: I64, coarse: F32 | None = None) -> F32:
        """Scalar product of each query with the centroid of each of its probes: (n, p) float32, 0 where that is -1.

        Each is added up in an order of its own, which neither other queries nor other probes change: what faiss says of
        a centroid differs in its last bits between numbers of queries, and estimates with it.

        Args:
            coarse: the distances that the index's quantizer gave: (n, p) float32; taken where they are these products.
        """
        if coarse is not None and self._index.coarse.gives_products:
            return coarse
        products = np.empty(probes.shape, dtype=np.float32)
        if self._native is not None:
            assert native is not None
            native.pair_products(queries, self._centroids, np.ascontiguousarray(probes), products)
            return products
        dims = self.codes.spec.padded_dim
        for row, query in enumerate(pad(queries, dims)):
            products[row] = dot(pad(self._centroids[probes[row]], dims), query)
        products[probes < 0] = 0
        return products

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
        """The ``k`` rows of each query with the smallest (estimate, position) over its probed lists.

        Returns:
            estimates (n, k) float32, best first, and positions (n, k) int64; see
            :mod:`hybridindex.tiers.contract.positions`. Empty places hold position -1.

        Raises:
            InvalidInputError: as :meth:`hybridindex.tiers.contract.protocol.Scanner.scan`; or there is a filter.
        """
        dim, nlist = self._index.scan_dim, self._index.nlist
        check_scan(queries, probes, coarse_distances, k, dim=dim, nlist=nlist, most=MAX_CANDIDATES)
        queries = np.ascontiguousarray(queries)
        if (found := find_unusable(queries)) is not None:
            raise InvalidInputError(f"queries[{found[0]}] {found[1]}")
        return self.scan_checked(
            queries,
            np.ascontiguousarray(probes),
            np.ascontiguousarray(coarse_distances),
            k,
            filter_ids=filter_ids,
            on_done=on_done,
        )

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
        """:meth:`scan` of contiguous arrays that were checked before; ``k`` may be larger."""
        if filter_ids is not None:
            raise InvalidInputError("filter_ids are given for a scan of codes; filters need a scan of rows")
        found = np.empty((len(queries), k), dtype=np.float32)
        positions = np.empty((len(queries), k), dtype=np.int64)

        def report(rows: list[int]) -> None:
            assert on_done is not None
            done = np.array(rows, dtype=np.int32)
            on_done(done, found[done], positions[done])

        if self._native is not None:
            self._native.scan(
                queries, probes, coarse_distances, found, positions, self.pool, None if on_done is None else report
            )
            return found, positions
        self._scan_reference(queries, probes, coarse_distances, found, positions)
        if on_done is not None:
            for row in range(len(queries)):
                report([row])
        return found, positions

    def _scan_reference(self, queries: F32, probes: I64, products: F32, found: F32, positions: I64) -> None:
        codes, k = self.codes, found.shape[1]
        spec, coded = codes.spec, prepare_queries(queries, codes.signs, codes.spec)
        said: list[list[F32]] = [[] for _ in queries]
        places: list[list[I64]] = [[] for _ in queries]
        for list_id in np.unique(probes[probes >= 0]).tolist():
            members, columns = np.nonzero(probes == list_id)
            estimated = estimates(
                CodedQueries(whole=coded.whole[members], u=coded.u[members]),
                codes.decode_list(list_id),
                products[members, columns],
                float(codes.centroid_sq[list_id]),
                spec,
            )
            place = np.arange(estimated.shape[1]) + (list_id << POSITION_BITS)
            for row, own in zip(members.tolist(), estimated, strict=True):
                said[row].append(own)
                places[row].append(place)
        found.fill(np.inf)
        positions.fill(-1)
        for row, own_places in enumerate(places):
            if own_places:
                every, place = np.concatenate(said[row]), np.concatenate(own_places)
                best = np.lexsort((place, every))[: min(k, np.count_nonzero(every <= LARGEST_ESTIMATE))]
                found[row, : len(best)], positions[row, : len(best)] = every[best], place[best]

    def prepare(self, lists: I64) -> None:
        """Nothing: codes are in memory, and a scan keeps nothing of what it read."""

    def close(self) -> None:
        """Ends the threads. Closing twice is harmless; scanning afterwards is not possible."""
        self.pool = None
        self.reranker.close()
        if self.on_disk is not None:
            self.on_disk.close()
