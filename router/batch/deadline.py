"""How many lists a query may still probe before its deadline (PipeRAG's performance-model-driven retrieval, §3.2).

Load and residency are known exactly at this point: the lists are quantized and the batch is formed. What is estimated
is the time from here to the batch's report: a line in the bytes that the host scans, as PipeRAG's model is one in
nprobe, times what the slowest of the scans before took beyond theirs. The line alone would be late half of the time.
Small scans vary more, and no line fits all sizes, so that each octave of bytes has its own slowest while enough of it
was seen.
"""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

from hybridindex.online_fit import FadingLine
from hybridindex.partitioner.lookahead_budget import deadline_nprobe
from hybridindex.types import F64, I64

__all__ = ["Line", "PaceEstimator", "nprobe_for_deadline"]

#: (a, b) of a + b·bytes seconds.
Line = tuple[float, float]

#: Of scans, should end within what is predicted: a little more than is aimed at, as the largest of few values is less
#: than that of many.
_IN_TIME = 0.97
#: Scans that are remembered, whatever their size. An octave that was slow once is avoided from then on, and must be
#: forgotten all the same.
_REMEMBERED = 256
#: Scans of an octave that say enough of it; the slowest of them is not one.
_ENOUGH = 40
#: Worth of a scan beside the one after it.
_KEEP = 0.9
#: A scan counts as this many times its prediction at most: one that was interrupted says little about the next.
_MOST = 4.0
#: How far the line's slope is drawn to the origin. A free line through a few scans of about one size, one of them slow,
#: can be flat: then not even the floor would seem to fit. Where sizes differ by a third of their mean or more, they say
#: themselves what the slope is, and what every scan takes before its first byte.
_THROUGH_ORIGIN = 0.1
#: Of int64.
_OCTAVES = 64


class PaceEstimator:
    """Running estimate of the time that so many bytes take: of the host, from the choice of nprobe to the report. For
    device scans and copies :mod:`hybridindex.router.lookahead.wait_for_loads` has some of its own. Thread-safe."""

    def __init__(self, through_origin: float = _THROUGH_ORIGIN) -> None:
        """``through_origin``: see :class:`hybridindex.online_fit.FadingLine`."""
        self._lock = threading.Lock()
        self._line = FadingLine(_KEEP, through_origin=through_origin)
        #: Octave of bytes, and seconds over the line's, of scans that it had not seen.
        self._recent: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def observe(self, nbytes: int, seconds: float) -> None:
        """Takes one scan, and what was done before and after it, into account."""
        if nbytes <= 0:
            return
        with self._lock:
            predicted = self._line.predict(nbytes)
            if predicted is None or predicted <= 0:
                self._line.observe(nbytes, seconds)
                return
            self._recent.append((nbytes.bit_length(), seconds / predicted))
            self._line.observe(nbytes, min(seconds, _MOST * predicted))

    def line(self) -> Line | None:
        """Seconds that scans take in the middle; None before the first was observed."""
        with self._lock:
            return self._line.coefficients()

    def predict(self, nbytes: I64) -> F64 | None:
        """Seconds within which nearly all scans of so many bytes end; None before the first was observed.

        Args:
            nbytes: (m,) int64, ascending.

        Returns:
            (m,) float64 that do not decrease: a scan does not take longer than a larger one.
        """
        with self._lock:
            line = self._line.coefficients()
            recent = list(self._recent)
        if line is None:
            return None
        start, slope = line
        seconds: F64 = np.maximum(0.0, start + slope * nbytes) * _beyond(recent)[np.frexp(nbytes)[1]]
        return np.minimum.accumulate(seconds[::-1])[::-1]


def _beyond(recent: list[tuple[int, float]]) -> F64:
    """(_OCTAVES,) what to foretell beyond the line: of each octave that was seen enough; of the others, of all."""
    octaves = np.array([octave for octave, _ in recent], dtype=np.int64)
    ratios = np.array([ratio for _, ratio in recent])
    beyond = np.full(_OCTAVES, _slowest(ratios))
    for octave in np.flatnonzero(np.bincount(octaves, minlength=_OCTAVES) >= _ENOUGH):
        beyond[octave] = _slowest(ratios[octaves == octave])
    return beyond


def _slowest(ratios: F64) -> float:
    return float(np.sort(ratios)[min(ratios.size - 1, int(_IN_TIME * ratios.size))]) if ratios.size else 1.0


def nprobe_for_deadline(
    miss_bytes: I64, other_bytes: int, window_s: float, pace: PaceEstimator, min_nprobe: int, max_nprobe: int
) -> int:
    """The largest nprobe whose predicted time fits the window, never below ``min_nprobe``.

    Args:
        miss_bytes: (n, p) int64 bytes that the host must scan for each probe, nearest list first; 0 where resident.
        other_bytes: bytes the host scans for other requests of the batch.
        window_s: seconds left.
        pace: what host scans take; while it knows nothing, nothing is lowered.
        min_nprobe: floor.
        max_nprobe: what was asked for.
    """
    seconds = pace.predict(other_bytes + np.cumsum(miss_bytes[:, :max_nprobe].sum(axis=0)))
    if seconds is None:
        return max_nprobe
    foretold = seconds.tolist()
    return deadline_nprobe(
        lambda nprobe: foretold[nprobe - 1], window_s, min_nprobe=min(min_nprobe, max_nprobe), max_nprobe=max_nprobe
    )
