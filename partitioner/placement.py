"""Which device holds which resident list: one copy of each list, within each device's own number of pages.

Covers the choice under a page limit and two ways of spreading: round robin by size (VectorLiteRAG IV-A4), and longest
processing time first (LPT) on access work. Moves no bytes; does not decide how many lists are wanted.
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

#: Lists that are placed one by one; the others are dealt out in rows.
_HEAD_LISTS = 4096
#: How often lists are placed where some found no room.
_TRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementResult:
    """Devices of the lists, in the order in which they were given."""

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
        """Work of the most loaded device over the even share; 1 is perfect."""
        total = float(self.work.sum())
        return float(self.work.max()) * self.work.size / total if total > 0 else 1.0


def choose_hottest(pages: I64, limit_pages: int, largest_list_pages: int) -> I64:
    """Ranks (m,) int64, ascending, of the lists that fit: hottest first, skipping those that do not fit.

    Args:
        pages: (n,) int64 pages of each candidate in hot order.
        limit_pages: pages of all devices together.
        largest_list_pages: pages of the largest device; a larger list fits nowhere.
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
    """LPT: heaviest work first, each to the least loaded device with room; a list that fits nowhere is not placed.

    Where the devices have as many pages as all lists take, and some list finds no room beside the others, it is placed
    again, with such lists first. Of several placements the one with the most work counts.

    Args:
        work: (m,) float64 access work of each list.
        pages: (m,) int64.
        capacity_pages: one per device.
    """
    room = _capacities(capacity_pages)
    order = np.argsort(-work, kind="stable")
    if order.size > _HEAD_LISTS:
        placed = _place_large(work, pages, room, order)
        if placed is not None:
            return _result(placed, work, pages, len(room))
    tries: list[PlacementResult] = []
    for _ in range(_TRIES if int(pages.sum()) <= sum(room) else 1):
        placed = np.full(order.size, -1, dtype=np.int16)
        placed[order] = _lpt_loop(work[order], pages[order], room)
        tries.append(_result(placed, work, pages, len(room)))
        if not tries[-1].n_unplaced:
            return tries[-1]
        unplaced = placed[order] < 0
        order = np.concatenate((order[unplaced], order[~unplaced]))
    return max(tries, key=lambda one: float(one.work.sum()))


def _lpt_loop(work: F64, pages: I64, capacity: list[int]) -> list[int]:
    """Devices of lists that are given heaviest first."""
    room = list(capacity)
    heap = [(0.0, d) for d in range(len(room))]
    devices: list[int] = []
    for w, p in zip(work.tolist(), pages.tolist(), strict=True):
        load, d = heap[0]
        if room[d] >= p:
            heapq.heapreplace(heap, (load + w, d))
        else:
            candidates = [entry for entry in heap if room[entry[1]] >= p]
            if not candidates:
                devices.append(-1)
                continue
            load, d = min(candidates)
            heap.remove((load, d))
            heap.append((load + w, d))
            heapq.heapify(heap)
        room[d] -= p
        devices.append(d)
    return devices


def _place_large(work: F64, pages: I64, room: list[int], order: I64) -> I16 | None:
    """LPT for the heaviest lists, serpentine rows (0..n-1, n-1..0) for the others; ``None`` if a device overflows.

    After the heaviest lists, loads differ by at most one list. Serpentine rows add at most the heaviest of the others.
    So the balance is that of LPT up to one light list, in a fraction of the time.
    """
    n = len(room)
    placed = np.empty(order.size, dtype=np.int16)
    head, tail = order[:_HEAD_LISTS], order[_HEAD_LISTS:]
    placed[head] = _lpt_loop(work[head], pages[head], room)
    if (placed[head] < 0).any():
        return None
    loads = np.bincount(placed[head], weights=work[head], minlength=n)
    lightest_first = np.argsort(loads, kind="stable")
    row = np.concatenate((lightest_first, lightest_first[::-1])).astype(np.int16)
    placed[tail] = np.resize(row, tail.size)
    used = np.bincount(placed, weights=pages, minlength=n)
    return placed if (used <= np.array(room)).all() else None


def place_round_robin(work: F64, pages: I64, capacity_pages: Sequence[int]) -> PlacementResult:
    """The splitter of VectorLiteRAG IV-A4: largest list first, devices in turn; a full device is skipped."""
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
