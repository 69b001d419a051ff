"""How many lists a query may still probe before its deadline (PipeRAG's performance-model-driven retrieval, §3.2).

Load and residency are known exactly at this point: the lists are quantized and the batch is formed. What is estimated
is the time from here to the answer, nearly all of it the host's scan: a line in the scan's bytes, as PipeRAG's model is
one in nprobe, times what the slowest of the scans before took beyond theirs. The line alone would be late half of the
time. Small scans vary more, and no line fits all sizes: each octave of bytes has its own slowest, once it has seen
enough.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from copy import copy

import numpy as np

from hybridindex.partitioner.lookahead import deadline_nprobe
from hybridindex.running import FadingLine, RecentValues
from hybridindex.types import I64

__all__ = ["PaceEstimator", "nprobe_for_deadline"]

#: Of scans, should end within what is predicted: a little more than is aimed at, as the largest of few values is less
#: than that of many.
_IN_TIME = 0.97
#: Scans of an octave that say enough of it.
_ENOUGH = 20
#: In the place of an octave: all of them.
_ALL = -1
#: Worth of a scan beside the one after it.
_KEEP = 0.9
#: A scan counts as this many times its prediction at most: one that was interrupted says little about the next.
_MOST = 4.0


class PaceEstimator:
    """Running estimate of the time from the choice of nprobe to the host's answer, from its bytes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Time is nearly proportional to bytes. A free line through a few scans of about one size, one of them slow, can
        # be flat: then not even the floor would seem to fit.
        self._line = FadingLine(_KEEP, through_origin=1.0)
        #: Seconds over the line's, of scans that it had not seen; of each octave of bytes, and of all.
        self._ratios: defaultdict[int, RecentValues] = defaultdict(RecentValues)
        #: By octave, what to foretell beyond the line.
        self._beyond: dict[int, float] = {_ALL: 1.0}

    def observe(self, nbytes: int, seconds: float) -> None:
        """Takes one host scan, and what was done before and after it, into account."""
        if nbytes <= 0:
            return
        with self._lock:
            predicted = self._line.predict(nbytes)
            if predicted is None or predicted <= 0:
                self._line.observe(nbytes, seconds)
                return
            for octave in (_ALL, nbytes.bit_length()):
                ratios = self._ratios[octave]
                ratios.add(seconds / predicted)
                if octave == _ALL or len(ratios) >= _ENOUGH:
                    self._beyond[octave] = ratios.upper(_IN_TIME) or 1.0
            self._line.observe(nbytes, min(seconds, _MOST * predicted))

    def predictor(self) -> Callable[[float], float] | None:
        """From bytes to the seconds within which nearly all such scans end; None before the first was observed."""
        with self._lock:
            if self._line.predict(0.0) is None:
                return None
            line, beyond = copy(self._line), self._beyond.copy()

        def predict_s(nbytes: float) -> float:
            seconds = line.predict(nbytes)
            assert seconds is not None
            return beyond.get(int(nbytes).bit_length(), beyond[_ALL]) * seconds

        return predict_s


def nprobe_for_deadline(
    miss_bytes: I64, other_bytes: int, window_s: float, pace: PaceEstimator, min_nprobe: int, max_nprobe: int
) -> int:
    """The largest nprobe whose predicted host scan fits the window, never below ``min_nprobe``.

    Args:
        miss_bytes: (n, p) int64 bytes that the host must scan for each probe, nearest list first; 0 where resident.
        other_bytes: bytes the host scans for other requests of the batch.
        window_s: seconds left.
        pace: what host scans take; while it knows nothing, nothing is lowered.
        min_nprobe: floor.
        max_nprobe: what was asked for.
    """
    predict_s = pace.predictor()
    if predict_s is None:
        return max_nprobe
    nbytes = other_bytes + np.cumsum(miss_bytes[:, :max_nprobe].sum(axis=0))
    return deadline_nprobe(
        lambda nprobe: predict_s(float(nbytes[nprobe - 1])),
        window_s,
        min_nprobe=min(min_nprobe, max_nprobe),
        max_nprobe=max_nprobe,
    )
