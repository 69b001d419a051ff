"""One device under lookahead, as arithmetic: what a draft brings, what the final query hits, what stays afterwards.

Replays use the policies of the router (:func:`choose_lists`, :mod:`hybridindex.router.lookahead.hotness`) on byte
counts alone: nothing is copied or scanned, and every transfer lands in time. Not a measurement of speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.router.lookahead.hotness import HotnessPolicy, lists_to_evict, next_round, start_hotness
from hybridindex.router.lookahead.prefetch import choose_lists
from hybridindex.types import F64, I64

__all__ = ["Batch", "DeviceReplay", "choose_equally", "choose_until_full", "hit_rates"]

Mask = npt.NDArray[np.bool_]


def hit_rates(finals: I64, resident: Mask, work: I64) -> tuple[F64, F64]:
    """Hit rate of each query by bytes and by count: ``finals`` (n, nprobe), ``resident`` and ``work`` (nlist,)."""
    hit, bytes_probed = resident[finals], work[finals]
    by_bytes = np.where(hit, bytes_probed, 0).sum(axis=1) / np.maximum(bytes_probed.sum(axis=1), 1)
    return by_bytes, hit.mean(axis=1)


def choose_until_full(draft: I64, list_bytes: I64, budget_bytes: int) -> list[int]:
    """Lists of one draft (p,), nearest first, up to the first that does not fit: the older text of TeleRAG."""
    fits = np.cumsum(list_bytes[draft]) <= budget_bytes
    lists: list[int] = draft[: int(fits.argmin()) if not fits.all() else len(draft)].tolist()
    return lists


def choose_equally(drafts: I64, list_bytes: I64, present: Mask, budget_bytes: int) -> list[int]:
    """The paper's batch rule: each of the ``drafts`` (n, p) spends an equal part of the budget on its own lists.

    Lists that an earlier query of the batch brings cost the later ones nothing.
    """
    present = present.copy()
    chosen: list[int] = []
    for draft in drafts:
        lists, _ = choose_lists(draft[None], list_bytes, present, budget_bytes // len(drafts))
        present[lists] = True
        chosen += lists
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one batch got. Hit rates are (n,) by query."""

    by_bytes: F64
    by_count: F64
    #: The same with what the cache alone held when the batch came.
    cached_by_bytes: F64
    moved_bytes: int


class DeviceReplay:
    """The lists of one device from batch to batch: cache share and prefetch budget side by side, so both always fit.

    Not thread-safe.
    """

    def __init__(self, *, list_bytes: I64, work: I64, budget_bytes: int, share_bytes: int, policy: HotnessPolicy):
        """``list_bytes`` are page bytes and count for budgets, ``work`` code bytes and count for hit rates."""
        self.cached: Mask = np.zeros(len(list_bytes), dtype=np.bool_)
        self._hotness: F64 = np.zeros(len(list_bytes))
        self._list_bytes, self._work = list_bytes, work
        self._budget_bytes, self._share_bytes, self._policy = budget_bytes, share_bytes, policy
        self._nobody: Mask = np.zeros(len(list_bytes), dtype=np.bool_)

    def serve(self, drafts: I64, finals: I64) -> Batch:
        """Prefetches for ``drafts`` (n, p), searches ``finals`` (n, nprobe), then evicts down to the cache's share."""
        before = self.cached
        chosen, _ = choose_lists(drafts, self._list_bytes, before, self._budget_bytes)
        fetched = np.array(chosen, dtype=np.int64)
        resident = before.copy()
        resident[fetched] = True
        by_bytes, by_count = hit_rates(finals, resident, self._work)

        used = self._nobody.copy()
        used[finals] = True
        hotness = start_hotness(self._hotness, fetched, self._policy)
        self._hotness = next_round(hotness, used & resident, self._policy)
        evicted = lists_to_evict(self._hotness, resident, self._nobody, self._list_bytes, self._share_bytes)
        self.cached = resident.copy()
        self.cached[evicted] = False
        return Batch(
            by_bytes=by_bytes,
            by_count=by_count,
            cached_by_bytes=hit_rates(finals, before, self._work)[0],
            moved_bytes=int(self._list_bytes[fetched].sum()),
        )
