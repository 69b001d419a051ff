"""The native host scanner: list-major. The bytes of a list are read once per batch and compared with all queries that
probe it; a query is complete when its last list is scanned. ``native/scan/list_scan.cpp`` does the work.

sq8 codes are compared as integers first; pairs that a proven bound cannot rule out are decoded and compared exactly. So
are the numbers of product quantizers, in tables of bytes (``native/pq``).
"""

from __future__ import annotations

import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridindex.errors import InvalidInputError, UnsupportedIndexError
from hybridindex.extension import native
from hybridindex.index.pq.distances import native_form
from hybridindex.index.source import find_unusable
from hybridindex.tiers.contract.protocol import IdFilter, OnDone
from hybridindex.tiers.contract.validate import check_filter, check_scan, check_threads
from hybridindex.tiers.host.openmp import OpenMpThreads, openmp_threads
from hybridindex.types import F32, I32, I64, U8

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex
    from hybridindex.index.live.added import AddedLists

__all__ = ["HostNativeScanner"]

#: A filter becomes a bitmap up to this many bits per id that it names, and is searched as a sorted array beyond.
_MAX_BITS_PER_ID = 512
#: Prepared at a time: an interrupt comes between.
_PREPARED_BYTES = 256 << 20
#: Of the tables of product quantizers.
_TABLE_BYTES = 64 << 20


class HostNativeScanner(OpenMpThreads):
    """Scans probed lists on the CPU, on its own threads and the caller's.

    Thread-safe; concurrent scans share the threads. Reads the mapped lists where they lie: no second copy.
    ``threads`` counts the calling thread; ``None``: as many as faiss uses.
    """

    name = "native"

    @staticmethod
    def unsupported(index: IVFIndex) -> str | None:
        """Why this scanner cannot serve ``index`` here; None where it can."""
        if native is None:
            return "the native extension is not installed"
        if index.device_codec() is None:
            return f"codec {index.codec} is scanned by faiss"
        if index.manifest.layout != "rows" and index.pq_form is None:
            return f"lists in layout {index.manifest.layout} are scanned by faiss"
        return None

    def __init__(
        self,
        index: IVFIndex,
        *,
        threads: int | None = None,
        kernels: str = "",
        pool: Any = None,
        added: AddedLists | None = None,
    ) -> None:
        """
        Args:
            pool: another scanner's threads; None: its own.
            added: scanned instead of the index's own lists.
            kernels: "amx", "avx512", "avx2", "neon" or "portable"; empty: the best that this CPU runs.

        Raises:
            UnsupportedIndexError: see :meth:`unsupported`.
            InvalidInputError: bad ``threads``, or kernels that do not run here.
        """
        if (reason := self.unsupported(index)) is not None:
            raise UnsupportedIndexError(f"{index.path}: {reason}")
        assert native is not None
        codec = index.device_codec()
        assert codec is not None
        self.threads = check_threads(threads) or openmp_threads()
        self._index = index
        data, extents = (index.mapped_lists(), index.extents()) if added is None else (added.data, added.table)
        centroids = index.centroids if codec.by_residual else np.empty((0, codec.dim), np.float32)
        #: Queries of one call: tables of product quantizers take memory.
        self._at_once = sys.maxsize
        #: Says where rows lie that are whole vectors; None: they are none.
        self._whole_rows: tuple[Any, ...] | None = None
        try:
            self._scanner: Any
            if codec.pq is not None:
                form = native_form(codec.pq, kernels)
                self._scanner = native.PqScanner(data, extents, form, centroids)
                self._at_once = max(1, _TABLE_BYTES // form.scratch_need(1)[1])
            else:
                lists = (
                    data,
                    extents,
                    codec.kind,
                    codec.dim,
                    codec.scale,
                    codec.offset,
                    centroids,
                    index.metric == "ip",
                    kernels,
                )
                self._scanner = native.ListScanner(*lists, added is not None)
                if not codec.by_residual:
                    self._whole_rows = lists
        except ValueError as error:
            raise InvalidInputError(str(error)) from error
        self.pool: Any = native.ThreadPool(self.threads - 1) if pool is None else pool
        if added is None:
            index.integrity.remembering.add(self)

    @property
    def kernels(self) -> str:
        """The instruction set that runs: "amx", "avx512", "avx2", "neon" or "portable"."""
        return str(self._scanner.kernels)

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
        queries = np.ascontiguousarray(queries)
        if (found := find_unusable(queries)) is not None:
            raise InvalidInputError(f"queries[{found[0]}] {found[1]}")
        return self.scan_checked(
            queries, np.ascontiguousarray(probes), coarse_distances, k, filter_ids=filter_ids, on_done=on_done
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
        rows: tuple[U8, I64] | None = None,
    ) -> tuple[F32, I64]:
        """:meth:`scan` of contiguous arrays that were checked before.

        ``rows``: instead of ``filter_ids``, the mask of the candidates and the first row of each list, as of a
        :class:`hybridindex.index.filters.row_filter.RowFilter`.
        """
        if len(queries) > self._at_once:
            return self._scan_in_turn(queries, probes, coarse_distances, k, filter_ids, on_done, rows)
        distances = np.empty((len(queries), k), dtype=np.float32)
        ids = np.empty((len(queries), k), dtype=np.int64)
        bitmap, in_order = _prepared(filter_ids)
        mask, first_rows = rows or (None, None)

        def report(complete: list[int]) -> None:
            assert on_done is not None
            done = np.array(complete, dtype=np.int32)
            on_done(done, distances[done], ids[done])

        told = None if on_done is None else report
        self._scanner.scan(queries, probes, distances, ids, self.pool, bitmap, in_order, told, mask, first_rows)
        return distances, ids

    @property
    def scans_scattered_rows(self) -> bool:
        """Whether there is :meth:`scan_scattered`: where rows are whole vectors."""
        return self._whole_rows is not None

    @cached_property
    def _scattered(self) -> Any:
        # Made when it is needed: there is a scanner for each change of added rows.
        assert native is not None
        assert self._whole_rows is not None
        return native.ScatteredScanner(*self._whole_rows)

    def scan_scattered(self, queries: F32, positions: I64, k: int) -> tuple[F32, I64]:
        """The ``k`` nearest of rows anywhere in the lists, as a scan of these finds them.

        Args:
            queries: (n, scan_dim) float32, contiguous.
            positions: (1, w) int64, contiguous, the rows that all queries are compared with; or (n, w), each with its
                own, then -1; see :mod:`hybridindex.tiers.contract.positions`.
            k: may be more than w.
        """
        distances = np.empty((len(queries), k), dtype=np.float32)
        ids = np.empty((len(queries), k), dtype=np.int64)
        self._scattered.scan(queries, positions, distances, ids, self.pool)
        return distances, ids

    def _scan_in_turn(
        self,
        queries: F32,
        probes: I64,
        coarse_distances: F32,
        k: int,
        filter_ids: IdFilter | None,
        on_done: OnDone | None,
        rows: tuple[U8, I64] | None,
    ) -> tuple[F32, I64]:
        """:meth:`scan_checked` of as many queries at a time as their tables have memory for."""
        found = []
        for first in range(0, len(queries), self._at_once):
            at = slice(first, first + self._at_once)

            def report(done: I32, distances: F32, ids: I64, before: int = first) -> None:
                assert on_done is not None
                on_done(done + np.int32(before), distances, ids)

            found.append(
                self.scan_checked(
                    queries[at],
                    probes[at],
                    coarse_distances[at],
                    k,
                    filter_ids=filter_ids,
                    on_done=None if on_done is None else report,
                    rows=rows,
                )
            )
        distances, ids = zip(*found, strict=True)
        return np.concatenate(distances), np.concatenate(ids)

    def prepare(self, lists: I64) -> None:
        """Computes what first scans of these lists would compute beside their distances: lengths of rows of bytes."""
        nbytes = int(self._index.list_bytes[lists].sum())
        for part in np.array_split(lists, nbytes // _PREPARED_BYTES + 1):
            self._scanner.prepare(np.ascontiguousarray(part))

    def forget(self, lists: I64) -> None:
        """See :class:`hybridindex.index.integrity.Remembers`: scans compute these lengths anew."""
        self._scanner.forget(np.ascontiguousarray(lists))

    def close(self) -> None:
        """Ends the threads. Closing twice is harmless; scanning afterwards is not possible."""
        self.pool = None


def _prepared(filter_ids: IdFilter | None) -> tuple[Any, Any]:
    """A filter as (bitmap, None) or (None, sorted ids)."""
    if filter_ids is None:
        return None, None
    if filter_ids.dtype == np.bool_:
        return np.packbits(filter_ids, bitorder="little"), None
    in_order = np.ascontiguousarray(filter_ids, dtype=np.int64)
    in_order = in_order[in_order >= 0]
    if len(in_order) and int(in_order[-1]) < _MAX_BITS_PER_ID * len(in_order):
        allowed = np.zeros(int(in_order[-1]) + 1, dtype=np.bool_)
        allowed[in_order] = True
        return np.packbits(allowed, bitorder="little"), None
    return None, in_order
