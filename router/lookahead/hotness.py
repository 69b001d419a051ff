"""The cache: which used lists stay on a device. Decayed hotness and eviction (TeleRAG, Appendix C, Eq. 6). Pure.

The arithmetic of the cache alone: arrays in, arrays out. :mod:`hybridindex.router.lookahead.prefetch` moves lists. The
paper moves the survivors together after each batch; lists lie in pages here, so survivors stay where they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.types import F64, I64

__all__ = ["HotnessPolicy", "Room", "lists_to_evict", "make_room", "next_round", "start_hotness"]

Mask = npt.NDArray[np.bool_]

#: Far enough below the largest float64 that no rounding reaches infinity.
_LARGEST = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class HotnessPolicy:
    """The constants of Eq. 6: h ← h/δ + υ·[used in the round that ended], starting at h₀ when a list is fetched.

    With δ ≥ 2 and υ ≥ h₀ no list is colder than one whose last use or fetch is older: the order is that of last use,
    and the uses before decide among lists of one round. Below 2 many uses in the past outweigh one just now.
    """

    #: δ.
    decay_factor: float = 2.0
    #: υ.
    update_value: float = 1.0
    #: h₀.
    initial_value: float = 1.0
    #: Part of the arena that cached lists may fill; the paper's default is a half.
    cache_fraction: float = 0.5

    def __post_init__(self) -> None:
        if not (math.isfinite(self.decay_factor) and self.decay_factor > 1):
            raise InvalidInputError(f"decay_factor is {self.decay_factor}; give a finite number > 1")
        for name, value in (("update_value", self.update_value), ("initial_value", self.initial_value)):
            if not (math.isfinite(value) and value >= 0):
                raise InvalidInputError(f"{name} is {value}; give a finite number >= 0")
        if not 0 <= self.cache_fraction <= 1:
            raise InvalidInputError(f"cache_fraction is {self.cache_fraction}; give a number from 0 to 1")
        if self.ceiling > _LARGEST:
            raise InvalidInputError(
                f"update_value {self.update_value} with decay_factor {self.decay_factor} lets hotness grow to "
                f"{self.ceiling:.3g}; keep it below {_LARGEST:g}"
            )

    @property
    def ceiling(self) -> float:
        """What no hotness exceeds, but for rounding: h₀, or υ·δ/(δ−1), the limit of a list that every round uses."""
        return max(self.initial_value, self.update_value / (1.0 - 1.0 / self.decay_factor))

    def cache_share_bytes(self, arena_bytes: int) -> int:
        """Bytes of an arena of ``arena_bytes`` that cached lists may fill."""
        return int(self.cache_fraction * arena_bytes)


def start_hotness(hotness: F64, fetched: I64, policy: HotnessPolicy) -> F64:
    """A copy of ``hotness`` (nlist,) float64 where the lists ``fetched`` (m,) int64 have h₀, whatever they had."""
    started = hotness.copy()
    started[fetched] = policy.initial_value
    return started


def next_round(hotness: F64, used: Mask, policy: HotnessPolicy) -> F64:
    """Hotness after a round (Eq. 6), a new (nlist,) float64.

    Args:
        hotness: (nlist,) float64, all >= 0.
        used: (nlist,) bool, the lists that the round scanned on the device.
    """
    # Quotients below the normal range are zero to every decision, and arithmetic on them is slow.
    with np.errstate(under="ignore"):
        decayed = hotness / policy.decay_factor
    decayed[decayed < np.finfo(np.float64).tiny] = 0.0
    decayed[used] += policy.update_value
    return decayed


def lists_to_evict(hotness: F64, cached: Mask, protected: Mask, list_bytes: I64, share_bytes: int) -> I64:
    """The coldest cached lists that must go for the rest to fit the cache's share: (m,) int64, coldest first.

    No more go than need to, ties by list id, and no survivor that takes bytes is colder than one that goes.

    Args:
        hotness: (nlist,) float64.
        cached: (nlist,) bool: resident, and kept only because they were used.
        protected: (nlist,) bool: pinned by a plan or held by a session. They neither go nor count for the share.
        list_bytes: (nlist,) int64 device bytes of each list, page rounding included.
        share_bytes: bytes that cached lists may take; see :meth:`HotnessPolicy.cache_share_bytes`.

    Raises:
        InvalidInputError: ``share_bytes`` is negative.
    """
    if share_bytes < 0:
        raise InvalidInputError(f"share_bytes is {share_bytes}; give a number >= 0")
    order = _coldest_first(hotness, cached & ~protected, list_bytes)
    return _prefix_of(order, list_bytes, int(list_bytes[order].sum()) - share_bytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Room:
    """What must leave a device for something to come."""

    #: (m,) int64 lists to evict, coldest first.
    lists: I64
    #: Bytes still lacking when all of them are gone: what is to come has to be less by so much.
    short_bytes: int


def make_room(needed_bytes: int, free_bytes: int, hotness: F64, cached: Mask, protected: Mask, list_bytes: I64) -> Room:
    """Which cached lists go, coldest first, so that ``needed_bytes`` fit beside the ``free_bytes`` there are.

    No more go than need to; see :func:`lists_to_evict` for the order and the arrays. ``protected`` also names the
    lists that the prefetch itself counts on, so that it does not evict what it would fetch again.

    Raises:
        InvalidInputError: a byte count is negative.
    """
    for name, value in (("needed_bytes", needed_bytes), ("free_bytes", free_bytes)):
        if value < 0:
            raise InvalidInputError(f"{name} is {value}; give a number >= 0")
    order = _coldest_first(hotness, cached & ~protected, list_bytes)
    lists = _prefix_of(order, list_bytes, needed_bytes - free_bytes)
    left = needed_bytes - free_bytes - int(list_bytes[lists].sum())
    return Room(lists=lists, short_bytes=max(0, left))


def _coldest_first(hotness: F64, candidates: Mask, list_bytes: I64) -> I64:
    """The candidates that take bytes, by hotness and then by id."""
    lists = np.flatnonzero(candidates & (list_bytes > 0))
    # Ascending ids and a stable sort: ties by id.
    ordered: I64 = lists[np.argsort(hotness[lists], kind="stable")]
    return ordered


def _prefix_of(order: I64, list_bytes: I64, wanted_bytes: int) -> I64:
    """The shortest prefix of ``order`` with ``wanted_bytes``, or all of it."""
    if wanted_bytes <= 0:
        return order[:0]
    return order[: int(np.searchsorted(np.cumsum(list_bytes[order]), wanted_bytes)) + 1]
