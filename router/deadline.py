"""How many lists a query may still probe before its deadline (PipeRAG's performance-model-driven retrieval, §3.2).

Load and residency are known exactly at this point: the lists are quantized and the batch is formed. What is estimated
is the host's pace, in seconds per scanned byte.
"""

from __future__ import annotations

import threading

import numpy as np

from hybridindex.partitioner.lookahead import deadline_nprobe
from hybridindex.types import I64

__all__ = ["PaceEstimator", "nprobe_for_deadline"]


class PaceEstimator:
    """Running estimate of the host scan's seconds per byte, with a fixed cost per batch. Thread-safe."""

    def __init__(self, seconds_per_byte: float | None = None, *, weight: float = 0.2) -> None:
        self._lock = threading.Lock()
        self._seconds_per_byte = seconds_per_byte
        self._weight = weight

    @property
    def seconds_per_byte(self) -> float | None:
        """None before anything was observed."""
        return self._seconds_per_byte

    def observe(self, nbytes: int, seconds: float) -> None:
        """Takes one host scan into account."""
        if nbytes <= 0:
            return
        pace = seconds / nbytes
        with self._lock:
            old = self._seconds_per_byte
            self._seconds_per_byte = pace if old is None else old + self._weight * (pace - old)


def nprobe_for_deadline(
    miss_bytes: I64, other_bytes: int, window_s: float, pace: float | None, min_nprobe: int, max_nprobe: int
) -> int:
    """The largest nprobe whose predicted host scan fits the window, never below ``min_nprobe``.

    Args:
        miss_bytes: (n, p) int64 bytes that the host must scan for each probe, nearest list first; 0 where resident.
        other_bytes: bytes the host scans for other requests of the batch.
        window_s: seconds left.
        pace: seconds per byte, or None when nothing is known: then nothing is lowered.
        min_nprobe: floor.
        max_nprobe: what was asked for.
    """
    if pace is None:
        return max_nprobe
    predicted = (other_bytes + np.cumsum(miss_bytes[:, :max_nprobe].sum(axis=0))) * pace
    return deadline_nprobe(
        lambda nprobe: float(predicted[nprobe - 1]),
        window_s,
        min_nprobe=min(min_nprobe, max_nprobe),
        max_nprobe=max_nprobe,
    )
