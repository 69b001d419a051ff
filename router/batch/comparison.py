"""Exact distances of candidates of a batch, part by part: on the host from its rows, on devices whose pages hold some,
and on other nodes of a cluster. Parts end on different threads; what a device does not compare, the host does. A row
has the same distance wherever it is computed, so an answer does not depend on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hybridindex.router.batch.merge import empty_topk, merge_topk
from hybridindex.router.batch.stages import BatchClock
from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.tiers.host.reranker import Reranker
from hybridindex.types import F32, I32, I64

__all__ = ["Comparison", "split_positions"]


def split_positions(positions: I64, row_device: npt.NDArray[np.int16], put: Callable[[int, I64], bool]) -> I64:
    """Gives each device the candidates that it can compare.

    Args:
        positions: (n, r) int64, -1: none.
        row_device: (nlist,) int16 device that holds the rows of each list, -1: none does.
        put: takes a device and (n, w) int64 of its candidates: of each query its own, then -1. False: it takes none.

    Returns:
        (n, r) int64: what nobody took.
    """
    device = np.where(positions >= 0, row_device[positions >> POSITION_BITS], np.int16(-1))
    for ordinal in np.unique(row_device[row_device >= 0]).tolist():
        here = device == ordinal
        counts = np.count_nonzero(here, axis=1)
        own = np.full((len(positions), counts.max(initial=0)), -1, dtype=np.int64)
        own[np.arange(own.shape[1]) < counts[:, None]] = positions[here]
        if own.size and not put(ordinal, own):
            device[here] = -1
    return np.where(device < 0, positions, -1)


class Comparison:
    """Queries and the exact distances of their candidates. :meth:`add` for each part of a device before the part
    begins, :meth:`compare_here` once, :meth:`complete` or :meth:`compare_instead` for each part that was added; any
    thread."""

    def __init__(
        self,
        reranker: Reranker,
        queries: F32,
        k: int,
        clock: BatchClock,
        done: Callable[[Comparison], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            queries: (n, scan_dim) float32.
            clock: told what the host compares.
            done: told when all parts have ended; once.
            fail: told the error in its place.
        """
        self.queries = queries
        self._reranker = reranker
        self._clock = clock
        self._done, self._fail = done, fail
        self._lock = threading.Lock()
        #: Parts that have not ended; the host's among them.
        self._open = 1
        self._failed = False
        #: Places of each answer, and whether larger distances are nearer.
        self.k, self.keep_max = k, reranker.keep_max
        self._rows = np.arange(len(queries), dtype=np.int32)
        #: (n, k) distances and ids of those that were compared.
        self.found = empty_topk(len(queries), k, keep_max=reranker.keep_max)
        #: Candidates that devices compared, and parts that the host compared in a device's stead.
        self.n_on_devices = 0
        self.n_fallbacks = 0

    def add(self) -> None:
        """One more part."""
        with self._lock:
            self._open += 1

    def drop(self) -> None:
        """A part that was added does not begin; the host's has not ended."""
        with self._lock:
            self._open -= 1

    def compare_here(self, positions: I64) -> None:
        """The host's part; the last that is begun. Never raises."""
        try:
            started = time.perf_counter()
            part = self._reranker.rerank(self.queries, positions, min(self.k, positions.shape[1]))
            self._clock.note_host_rerank(int(np.count_nonzero(positions >= 0)), started)
            self._end(part)
        except BaseException as error:  # noqa: BLE001 - handed to those who wait
            self.fail(error)

    def compare_instead(self, positions: I64) -> None:
        """A device's part, on the host. Never raises."""
        with self._lock:
            self.n_fallbacks += 1
        self.compare_here(positions)

    def complete(self, positions: I64, distances: F32) -> None:
        """A device's part: (n, r) distances, NaN where there is no candidate."""
        with self._lock:
            self.n_on_devices += int(np.count_nonzero(positions >= 0))
        if self.k < positions.shape[1]:
            # Ids and order of all others would cost more than their distances.
            order = -distances if self.keep_max else distances
            positions = np.where(order > np.partition(order, self.k - 1)[:, self.k - 1, None], -1, positions)
        self._end((distances, self._reranker.ids_of(positions)))

    def complete_rows(self, rows: I32, distances: F32, ids: I64) -> None:
        """The part of another node, of some of the queries: ``rows`` (m,), distances and ids (m, k)."""
        self._end((distances, ids), rows)

    def fail(self, error: BaseException) -> None:
        """A part cannot be compared."""
        with self._lock:
            first, self._failed = not self._failed, True
        if first:
            self._fail(error)

    def _end(self, part: tuple[F32, I64], rows: I32 | None = None) -> None:
        """``rows``: of which queries; None: of all."""
        with self._lock:
            merge_topk(*self.found, self._rows if rows is None else rows, *part, keep_max=self.keep_max)
            self._open -= 1
            ended = not self._open and not self._failed
        if ended:
            self._done(self)
