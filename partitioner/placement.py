"""Which device holds which resident list. One copy of each list; every device keeps to its own number of pages.

Covers the choice under a page limit, and two ways of spreading: round robin by size (VectorLiteRAG IV-A4) and longest
processing time first on access work. Does not move bytes and does not decide how many lists are wanted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.types import F64, I64

I16 = npt.NDArray[np.int16]

__all__ = ["PlacementResult", "choose_hottest", "place_lpt", "place_round_robin"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementResult:
    """Devices of the lists asked for, in the order in which they were given."""

    #: (m,) int16 device of each list, -1 where none had room.
    device: I16
    #: (n_devices,) int64 pages in use.
    pages_used: I64
    #: (n_devices,) float64 access work.
    work: F64

    @property
    def n_unplaced(self) -> int:
        return int((self.device < 0).sum())

    @property
    def imbalance(self) -> float:
        """Largest share of work over the even share; 1 is perfect."""
        total = float(self.work.sum())
        return float(self.work.max()) * self.work.size / total if total > 0 else 1.0


def choose_hottest(pages: I64, limit_pages: int, largest_list_pages: int) -> I64:
    """Places (m,) int64, ascending, of the lists that fit: hottest first, skipping those that do not, and going on.

    Args:
        pages: (n,) int64 pages of each candidate in hot order.
        limit_pages: pages of all devices together.
        largest_list_pages: pages of the roomiest device; a larger list fits nowhere.
    """
    chosen: list[I64] = []
    candidates = np.flatnonzero(pages <= min(limit_pages, largest_list_pages))
    left = limit_pages
    while candidates.size:
        fits = int(np.searchsorted(np.cumsum(pages[candidates]), left, side="right"))
        chosen.append(candidates[:fits])
        left -= int(pages[candidates[:fits]].sum())
        rest = candidates[fits:]
        candidates = rest[pages[rest] <= left]
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, dtype=np.int64)


def place_lpt(work: F64, pages: I64, capacity_pages: Sequence[int]) -> PlacementResult:
    """Heaviest work first, each to the least loaded device that has room; a list that fits nowhere stays unplaced.

    Args:
        work: (m,) float64 access work of each list.
        pages: (m,) int64.
        capacity_pages: one per device.
    """
    room = _capacities(capacity_pages)
    heap = [(0.0, d) for d in range(len(room))]
    order = np.argsort(-work, kind="stable")
    placed = np.full(order.size, -1, dtype=np.int16)
    if len(room) == 1:
        fits = np.cumsum(pages) <= room[0]
        if fits.all():
            placed[:] = 0
            return _result(placed, work, pages, 1)
    devices: list[int] = []
    for w, p in zip(work[order].tolist(), pages[order].tolist(), strict=True):
        load, d = heap[0]
        if room[d] >= p:
            heapq.heapreplace(heap, (load + w, d))
        else:
            candidates = [(load, d) for load, d in heap if room[d] >= p]
            if not candidates:
                devices.append(-1)
                continue
            load, d = min(candidates)
            heap.remove((load, d))
            heapq.heapify(heap)
            heapq.heappush(heap, (load + w, d))
        room[d] -= p
        devices.append(d)
    placed[order] = devices
    return _result(placed, work, pages, len(room))


def place_round_robin(work: F64, pages: I64, capacity_pages: Sequence[int]) -> PlacementResult:
    """The paper's splitter: largest list first, devices in turn; a full device is passed over."""
    room = _capacities(capacity_pages)
    n = len(room)
    order = np.argsort(-pages, kind="stable")
    placed = np.full(order.size, -1, dtype=np.int16)
    turn = 0
    devices: list[int] = []
    for p in pages[order].tolist():
        for step in range(n):
            d = (turn + step) % n
            if room[d] >= p:
                room[d] -= p
                devices.append(d)
                turn = (d + 1) % n
                break
        else:
            devices.append(-1)
    placed[order] = devices
    return _result(placed, work, pages, n)


def _capacities(capacity_pages: Sequence[int]) -> list[int]:
    if len(capacity_pages) < 1 or any(c < 0 for c in capacity_pages):
        raise InvalidInputError(f"capacity_pages is {list(capacity_pages)}; give at least one number >= 0")
    return [int(c) for c in capacity_pages]


def _result(placed: I16, work: F64, pages: I64, n_devices: int) -> PlacementResult:
    on = placed >= 0
    return PlacementResult(
        device=placed,
        pages_used=np.bincount(placed[on], weights=pages[on], minlength=n_devices).astype(np.int64),
        work=np.bincount(placed[on], weights=work[on], minlength=n_devices).astype(np.float64),
    )
