"""Who finds the lists of a batch's queries: the host, or a device that has the centroids.

The host proves what a device finds, so lists and distances do not depend on who it was
(:mod:`hybridindex.tiers.paged.coarse.device_centroids`). A thread of its own talks to the device, and the host never
waits for it longer than it would take itself, about: a device may be busy with an LLM, or hang.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait

import numpy as np

from hybridindex.config import CoarseQuantizationName
from hybridindex.router.batch.deadline import PaceEstimator
from hybridindex.router.batch.parts import RouterParts
from hybridindex.tiers.contract.bounded_join import join_within
from hybridindex.tiers.paged.coarse.device_centroids import MOST_QUERIES, DeviceCentroids, n_candidates
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.types import F32, I32, I64

__all__ = ["CoarseQuantization"]

_log = logging.getLogger(__name__)

#: Batches that each side is asked for before one is chosen; then one of so many is the other's, and at most one in so
#: many seconds, to see whether it has become faster: the slower one makes that batch late.
_FIRST, _OTHER_SIDE, _OTHER_SIDE_S = 4, 64, 1.0
#: A device is waited for as long as the host would take, and so long at least; and while that is not known.
_LEAST_WAIT_S, _UNKNOWN_WAIT_S = 1e-3, 20e-3
#: A device is not asked for so long after an error, which is told once.
_LEFT_ALONE_S = 60.0

#: Candidates of each query, and how far the farthest is.
_Found = Future[tuple[I32, F32]]


class _Asker:
    """A thread that talks to a device, one search after the other. A daemon: where a search does not end, it is left
    behind, and the process can end all the same."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[_Found, DeviceCentroids, F32, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hybridindex-coarse", daemon=True)
        self._thread.start()

    def ask(self, centroids: DeviceCentroids, queries: F32, m: int) -> _Found:
        """See :meth:`DeviceCentroids.search`."""
        found: _Found = Future()
        self._asked.put((found, centroids, queries, m))
        return found

    def _run(self) -> None:
        #: Those that were warmed up; of a device that is closed nothing is held.
        warm: weakref.ref[DeviceCentroids] | None = None
        while (asked := self._asked.get()) is not None:
            found, centroids, queries, m = asked
            try:
                if warm is None or warm() is not centroids:
                    centroids.warm_up()
                    warm = weakref.ref(centroids)
                found.set_result(centroids.search(queries, m))
            except BaseException as error:  # noqa: BLE001 - whatever a device raises
                found.set_exception(error)
            del asked, found, centroids

    def close(self, limit_s: float) -> bool:
        """False: a search does not end."""
        self._asked.put(None)
        return join_within(self._thread, limit_s)


def _seconds(pace: PaceEstimator, n: int) -> float | None:
    """That so many queries take in the middle; None: none were seen."""
    line = pace.line()
    return None if line is None else max(0.0, line[0] + line[1] * n)


class CoarseQuantization:
    """Finds the nearest lists of batches. One thread at a time."""

    def __init__(self, parts: RouterParts, choice: CoarseQuantizationName) -> None:
        """``choice``: "host", "device", or "auto": whoever was faster for so many queries."""
        self._index, self._host, self._stats = parts.index, parts.host, parts.stats
        #: The first device has the centroids.
        self._tiers: Sequence[DeviceTier] = () if choice == "host" else parts.paged[:1]
        self._asks_always = choice == "device"
        #: By queries in the place of bytes.
        self._host_pace, self._device_pace = PaceEstimator(), PaceEstimator()
        self._n_first = self._n_since = 0
        self._other_side_s = 0.0
        self._asker: _Asker | None = None
        #: The search that was given up last, and may go on.
        self._left: _Found | None = None
        self._again_s = 0.0

    def quantize(self, queries: F32, nprobe: int) -> tuple[I64, F32]:
        """:meth:`hybridindex.index.ivf.IVFIndex.quantize`, with the host scanner's threads, on an adopted thread."""
        n, m = len(queries), n_candidates(nprobe, self._index.nlist)
        centroids = None
        if self._tiers and m is not None and n <= MOST_QUERIES:
            centroids = self._idle_centroids()
        if centroids is None or m is None or not self._asks_device(n):
            return self._by_host(queries, nprobe)
        started_s = time.perf_counter()
        found = self._by_device(centroids, queries, nprobe, m)
        # With what the host had to do again.
        self._device_pace.observe(n, time.perf_counter() - started_s)
        return found

    def close(self, limit_s: float) -> set[int]:
        """Ends the thread; nobody quantizes any more. Ordinals of devices whose search does not end: the thread is left
        behind."""
        if self._asker is None or self._asker.close(limit_s):
            return set()
        return {tier.ordinal for tier in self._tiers}

    def _by_host(self, queries: F32, nprobe: int) -> tuple[I64, F32]:
        started_s = time.perf_counter()
        found = self._host.quantize(self._index, queries, nprobe)
        if self._tiers:
            self._host_pace.observe(len(queries), time.perf_counter() - started_s)
        return found

    def _idle_centroids(self) -> DeviceCentroids | None:
        """Of a device that works, and is not busy with a search that was given up."""
        if self._again_s and time.monotonic() < self._again_s:
            return None
        if self._left is not None:
            if not self._left.done():
                return None
            self._left = None
        [tier] = self._tiers
        return tier.centroids if tier.failure is None else None

    def _asks_device(self, n: int) -> bool:
        if self._asks_always:
            return True
        if self._n_first < 2 * _FIRST:
            self._n_first += 1
            return self._n_first % 2 == 0
        host_s, device_s = _seconds(self._host_pace, n), _seconds(self._device_pace, n)
        device_is_faster = device_s is not None and (host_s is None or device_s < host_s)
        self._n_since += 1
        if self._n_since >= _OTHER_SIDE and time.monotonic() >= self._other_side_s:
            self._n_since, self._other_side_s = 0, time.monotonic() + _OTHER_SIDE_S
            return not device_is_faster
        return device_is_faster

    def _by_device(self, centroids: DeviceCentroids, queries: F32, nprobe: int, m: int) -> tuple[I64, F32]:
        n = len(queries)
        if self._asker is None:
            self._asker = _Asker()
        asked = self._asker.ask(centroids, queries, m)
        known_s = _seconds(self._host_pace, n)
        ended, _ = wait([asked], _UNKNOWN_WAIT_S if known_s is None else max(_LEAST_WAIT_S, known_s))
        error = asked.exception() if ended else None
        if error is not None:
            self._again_s = time.monotonic() + _LEFT_ALONE_S
            _log.warning("a device found no lists, the host does for %.0f s: %r", _LEFT_ALONE_S, error)
        if not ended or error is not None:
            self._left = asked
            self._stats.add(device_quantized_again=n)
            return self._by_host(queries, nprobe)
        probes, distances, settled = self._index.coarse.nearest_of(queries, *asked.result(), nprobe)
        n_open = n - int(np.count_nonzero(settled))
        if n_open:
            rest = ~settled
            probes[rest], distances[rest] = self._host.quantize(self._index, queries[rest], nprobe)
        self._stats.add(device_quantized=n - n_open, device_quantized_again=n_open)
        return probes, distances
