"""Scans the rows that came since the generation was written: in memory, on the host, by the scanners of its lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hybridindex.extension import native
from hybridindex.tiers.host.decoded_scanner import HostDecodedScanner
from hybridindex.tiers.host.native_scanner import HostNativeScanner
from hybridindex.types import F32, I64

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex
    from hybridindex.index.live.added import AddedLists
    from hybridindex.tiers.host.host_scanner import HostScanner

__all__ = ["AddedScanner"]


class AddedScanner:
    """Of one router. Thread-safe."""

    def __init__(self, index: IVFIndex, host: HostScanner) -> None:
        """``host``: lends its threads."""
        self._index, self._host = index.rows, host
        #: The extension's threads; None: the host scans with faiss.
        self._pool: Any = host.pool
        #: What was scanned last, and with what; read and replaced as one value.
        self._last: tuple[AddedLists, HostNativeScanner | HostDecodedScanner] | None = None

    def scan(
        self, added: AddedLists, queries: F32, probes: I64, k: int, *, filter_ids: I64 | None = None
    ) -> tuple[F32, I64] | None:
        """The ``k`` nearest of the rows in the probed lists, as a scan answers them: (n, k) distances and ids; None:
        there are none.

        Args:
            filter_ids: (m,) int64, ascending, the ids that may be answered; None: all.
        """
        sizes = added.sizes
        # Where lists are probed that hold none, nothing is scanned; -1 is the last list, which may.
        if not sizes[probes].any() or (filter_ids is not None and not len(filter_ids)):
            return None
        coarse = np.zeros(probes.shape, dtype=np.float32)
        probes = np.ascontiguousarray(probes)
        return self._of(added).scan_checked(queries, probes, coarse, k, filter_ids=filter_ids)

    def _of(self, added: AddedLists) -> HostNativeScanner | HostDecodedScanner:
        last = self._last
        if last is None or last[0] is not added:
            scanner: HostNativeScanner | HostDecodedScanner
            if native is None:
                scanner = HostDecodedScanner(self._index, threads=self._host.threads, added=added)
            else:
                if self._pool is None:
                    self._pool = native.ThreadPool(self._host.threads - 1)
                scanner = HostNativeScanner(self._index, threads=self._host.threads, pool=self._pool, added=added)
            last = self._last = added, scanner
        return last[1]
