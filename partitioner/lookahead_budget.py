"""How many bytes to move ahead of a search, and how many lists a search may probe before its deadline.

TeleRAG's prefetch budget (Appendix B) on a *measured* miss curve, and PipeRAG's nprobe under a deadline. The router
chooses which lists move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.models.coverage import CoverageCurve
from hybridindex.types import F64

__all__ = ["LookaheadBudget", "MissCurve", "deadline_nprobe", "lookahead_budget", "miss_curve_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MissCurve:
    """Miss rate against bytes moved, piecewise linear, constant beyond both ends."""

    #: (m,) float64 strictly increasing, first 0.
    nbytes: F64
    #: (m,) float64 non-increasing, in [0, 1].
    miss_rate: F64

    def __post_init__(self) -> None:
        if self.nbytes.size != self.miss_rate.size or self.nbytes.size == 0:
            raise InvalidInputError(
                f"miss curve has {self.nbytes.size} byte and {self.miss_rate.size} rate points; give equally many, >= 1"
            )
        if self.nbytes[0] != 0 or (np.diff(self.nbytes) <= 0).any():
            raise InvalidInputError("miss curve nbytes must start at 0 and increase")
        if (np.diff(self.miss_rate) > 1e-12).any() or self.miss_rate.max() > 1 or self.miss_rate.min() < 0:
            raise InvalidInputError("miss curve rates must lie in [0, 1] and never increase")

    def at(self, nbytes: float) -> float:
        """Miss rate once ``nbytes`` have moved."""
        return float(np.interp(nbytes, self.nbytes, self.miss_rate))


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadBudget:
    """Bytes to move for one lookahead, and why."""

    nbytes: int
    #: What limits it. ``overlap``: what fits behind generation. ``beyond``: more than that, because it pays.
    #: ``share``: the arena's share. ``all``: nothing is left to move.
    case: Literal["overlap", "beyond", "share", "all"]
    #: Predicted seconds of generation (or transfer, if longer) plus retrieval, with this budget and with none.
    total_s: float
    total_without_s: float
    #: Bytes that fit behind generation: bandwidth * t_LLM.
    overlap_bytes: int
    #: TeleRAG's Eq. 7, for comparison: it replaces the derivative of the miss rate by its decrement.
    eq7_bytes: int


def miss_curve_of(curve: CoverageCurve, resident_bytes: int = 0) -> MissCurve:
    """Miss rate by bytes against page bytes moved in hot order, after the first ``resident_bytes``.

    A draft query names the next lists better than the hot order does, so real misses fall at least as fast.
    """
    nbytes = curve.prefix_pages[curve.grid].astype(np.float64) * curve.geometry.page_bytes
    nbytes, first = np.unique(nbytes[::-1], return_index=True)
    rate = np.clip(np.minimum.accumulate(1.0 - curve.mean[::-1][first]), 0.0, 1.0)
    start = min(float(resident_bytes), float(nbytes[-1]))
    beyond = nbytes > start
    return MissCurve(
        nbytes=np.concatenate(([0.0], nbytes[beyond] - start)),
        miss_rate=np.concatenate(([float(np.interp(start, nbytes, rate))], rate[beyond])),
    )


def lookahead_budget(
    *,
    bandwidth_bytes_per_s: float,
    t_llm_s: float,
    miss_curve: MissCurve,
    host_scan_s: float,
    device_scan_s: float = 0.0,
    share_bytes: int,
) -> LookaheadBudget:
    """Bytes that minimise max(t_LLM, b / bandwidth) + max(t_host(b), t_device(b)), never above the arena's share.

    Up to b0 = bandwidth * t_LLM copies hide behind generation, so b0 is the minimum (case 1 of TeleRAG's Appendix B)
    unless the device is slower than the host. Beyond b0 the objective is piecewise linear on the measured curve: its
    minimum lies at a knot, or where host and device take equally long. All of these are tried.

    Args:
        host_scan_s: seconds to scan everything on the host; scaled by the miss rate.
        device_scan_s: seconds to scan everything on the device; scaled by the hit rate.
        share_bytes: bytes of the arena that lookahead may use.

    Raises:
        InvalidInputError: a negative or non-finite time or bandwidth, or a negative share.
    """
    for name, value in (
        ("bandwidth_bytes_per_s", bandwidth_bytes_per_s),
        ("t_llm_s", t_llm_s),
        ("host_scan_s", host_scan_s),
        ("device_scan_s", device_scan_s),
        ("share_bytes", share_bytes),
    ):
        if not np.isfinite(value) or value < 0:
            raise InvalidInputError(f"{name} is {value}; give a finite number >= 0")

    def total(nbytes: float) -> float:
        if nbytes > 0 and bandwidth_bytes_per_s == 0:
            return float("inf")
        moving = nbytes / bandwidth_bytes_per_s if nbytes > 0 else 0.0
        miss = miss_curve.at(nbytes)
        return max(t_llm_s, moving) + max(miss * host_scan_s, (1.0 - miss) * device_scan_s)

    end = float(miss_curve.nbytes[-1])
    ceiling = min(float(share_bytes), end)
    overlap = bandwidth_bytes_per_s * t_llm_s
    start = min(overlap, ceiling)
    candidates = [0.0, start]
    inside = (miss_curve.nbytes > start) & (miss_curve.nbytes <= ceiling)
    candidates.extend(miss_curve.nbytes[inside].tolist())
    candidates.append(ceiling)
    crossing = _bytes_at_miss(miss_curve, host_scan_s, device_scan_s)
    if crossing is not None and crossing <= ceiling:
        candidates.append(crossing)
    best = min(candidates, key=lambda b: (total(b), b))
    case: Literal["overlap", "beyond", "share", "all"]
    if best >= end:
        case = "all"
    elif best >= float(share_bytes):
        case = "share"
    else:
        case = "beyond" if best > overlap else "overlap"
    decrement = miss_curve.at(0.0) - miss_curve.at(max(best, start))
    return LookaheadBudget(
        nbytes=int(best),
        case=case,
        total_s=total(best),
        total_without_s=total(0.0),
        overlap_bytes=int(overlap),
        eq7_bytes=int(bandwidth_bytes_per_s * host_scan_s * decrement),
    )


def _bytes_at_miss(curve: MissCurve, host_s: float, device_s: float) -> float | None:
    """Bytes at which host and device take equally long; ``None`` when they never do."""
    if host_s <= 0 or device_s <= 0:
        return None
    miss = device_s / (host_s + device_s)
    if not curve.miss_rate[-1] <= miss <= curve.miss_rate[0]:
        return None
    return float(np.interp(-miss, -curve.miss_rate, curve.nbytes))


def deadline_nprobe(predict_s: Callable[[int], float], window_s: float, *, min_nprobe: int, max_nprobe: int) -> int:
    """Largest nprobe whose predicted latency fits the window; never below ``min_nprobe`` (PipeRAG).

    Args:
        predict_s: seconds at an nprobe under the present load and residency; must not fall as nprobe grows.
        window_s: seconds left; may be negative.

    Raises:
        InvalidInputError: ``min_nprobe`` below 1 or above ``max_nprobe``, or a window that is NaN.
    """
    if not 1 <= min_nprobe <= max_nprobe:
        raise InvalidInputError(f"min_nprobe is {min_nprobe}, max_nprobe {max_nprobe}; give 1 <= min <= max")
    if np.isnan(window_s):
        raise InvalidInputError("window_s is NaN; give seconds")
    if predict_s(max_nprobe) <= window_s:
        return max_nprobe
    low, high = min_nprobe, max_nprobe  # high does not fit; low fits or is the floor
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if predict_s(middle) <= window_s else (low, middle)
    return low
