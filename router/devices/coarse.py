"""Who finds the lists of a batch's queries: the host, or a device that has the centroids.

The host proves what a device finds, so lists and distances do not depend on who it was
(:mod:`hybridindex.tiers.paged.coarse.device_centroids`). It never waits for a device longer than it would take itself,
about: a device may be busy with an LLM, or hang.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from hybridindex.config import CoarseQuantizationName
from hybridindex.online_fit import FadingLine
from hybridindex.router.batch.parts import RouterParts
from hybridindex.tiers.paged.coarse.device_centroids import (
    MOST_QUERIES,
    CentroidSearch,
    DeviceCentroids,
    n_candidates,
)
from hybridindex.types import F32, I64

__all__ = ["CoarseQuantization"]

_log = logging.getLogger(__name__)

#: Batches that each side is asked for before one is chosen; then one of so many is the other's, to see whether it has
#: become faster. Few: the slower one makes that batch late.
_FIRST, _OTHER_SIDE = 4, 256
#: A device is waited for as long as the host would take, and so long at least.
_LEAST_WAIT_S = 1e-3
#: Looks at a device: at first one after the other, then so far apart.
_LOOKS, _LOOK_S = 100, 20e-6
#: A device is not asked for so long after an error, which is told once.
_LEFT_ALONE_S = 60.0
#: How far lines are drawn to the origin: batches may be of one size.
_THROUGH_ORIGIN = 0.1


class CoarseQuantization:
    """Finds the nearest lists of batches. One thread at a time."""

    def __init__(self, parts: RouterParts, choice: CoarseQuantizationName) -> None:
        """``choice``: "host", "devices", or "auto": whoever was faster for so many queries."""
        self._index, self._host, self._stats = parts.index, parts.host, parts.stats
        self._tiers = () if choice == "host" else parts.paged
        self._asks_always = choice == "devices"
        self._host_line = FadingLine(through_origin=_THROUGH_ORIGIN)
        self._device_line = FadingLine(through_origin=_THROUGH_ORIGIN)
        self._n_batches = 0
        #: A search that was given up, and goes on.
        self._left: CentroidSearch | None = None
        self._again_s = 0.0

    def quantize(self, queries: F32, nprobe: int) -> tuple[I64, F32]:
        """:meth:`hybridindex.index.ivf.IVFIndex.quantize`, with the host scanner's threads, on an adopted thread."""
        n, m = len(queries), n_candidates(nprobe, self._index.nlist)
        centroids = None
        if self._tiers and m is not None and n <= MOST_QUERIES:
            centroids = self._centroids()
        if centroids is None or m is None:
            return self._host.quantize(self._index, queries, nprobe)
        started_s = time.perf_counter()
        if not self._asks_device(n):
            found = self._host.quantize(self._index, queries, nprobe)
            self._host_line.observe(n, time.perf_counter() - started_s)
            return found
        found = self._ask(centroids, queries, nprobe, m)
        # With what the host had to do again.
        self._device_line.observe(n, time.perf_counter() - started_s)
        return found

    def _centroids(self) -> DeviceCentroids | None:
        """Of the first device that works, and is idle."""
        if self._again_s and time.monotonic() < self._again_s:
            return None
        try:
            if self._left is not None and not self._left.done():
                return None
        except Exception as error:  # noqa: BLE001 - whatever a device raises
            self._note(error)
            return None
        self._left = None
        working = (tier.centroids for tier in self._tiers if tier.failure is None)
        return next((centroids for centroids in working if centroids is not None), None)

    def _asks_device(self, n: int) -> bool:
        self._n_batches += 1
        if self._asks_always:
            return True
        if self._n_batches <= 2 * _FIRST:
            return self._n_batches % 2 == 0
        host_s, device_s = self._host_line.predict(n), self._device_line.predict(n)
        device_is_faster = device_s is not None and (host_s is None or device_s < host_s)
        return device_is_faster != (self._n_batches % _OTHER_SIDE == 0)

    def _ask(self, centroids: DeviceCentroids, queries: F32, nprobe: int, m: int) -> tuple[I64, F32]:
        n = len(queries)
        try:
            search = centroids.start(np.ascontiguousarray(queries), m)
            if not self._wait(search, self._host_line.predict(n) or 0.0):
                self._left = search
                self._stats.add(device_quantized_again=n)
                return self._host.quantize(self._index, queries, nprobe)
            candidates, farthest = search.take()
        except Exception as error:  # noqa: BLE001 - whatever a device raises
            self._note(error)
            self._stats.add(device_quantized_again=n)
            return self._host.quantize(self._index, queries, nprobe)
        probes, distances, settled = self._index.coarse.nearest_of(queries, candidates, farthest, nprobe)
        n_open = n - int(np.count_nonzero(settled))
        if n_open:
            rest = ~settled
            probes[rest], distances[rest] = self._host.quantize(self._index, queries[rest], nprobe)
        self._stats.add(device_quantized=n - n_open, device_quantized_again=n_open)
        return probes, distances

    @staticmethod
    def _wait(search: CentroidSearch, host_s: float) -> bool:
        """False: it takes too long."""
        ends = time.perf_counter() + max(_LEAST_WAIT_S, host_s)
        looks = 0
        while not search.done():
            if time.perf_counter() >= ends:
                return False
            looks += 1
            if looks > _LOOKS:
                time.sleep(_LOOK_S)
        return True

    def _note(self, error: Exception) -> None:
        self._left, self._again_s = None, time.monotonic() + _LEFT_ALONE_S
        _log.warning("a device found no lists, the host does for %.0f s: %r", _LEFT_ALONE_S, error)
