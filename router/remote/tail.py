"""What nearly all scans of one node end within: a line in the bytes, times what the slowest of the recent ones took
beyond it. A scan that takes longer is asked of another node, too.
"""

from __future__ import annotations

from collections import deque

from hybridindex.online_fit import FadingLine

__all__ = ["Tail"]

#: Of scans, end within what is predicted.
_IN_TIME = 0.97
_REMEMBERED = 256
#: The slowest are looked up again after so many scans.
_EVERY = 16
#: A scan counts as this many times its prediction at most.
_MOST = 4.0
#: While nothing is known, and at least: the clocks and threads of a busy machine are no finer.
_UNKNOWN_S, _LEAST_S, _LONGEST_S = 0.05, 0.002, 1.0


class Tail:
    """On one thread."""

    def __init__(self) -> None:
        self._line = FadingLine(0.9)
        self._ratios: deque[float] = deque(maxlen=_REMEMBERED)
        self._beyond = 2.0
        self._n_seen = 0

    def observe(self, nbytes: int, seconds: float) -> None:
        """Takes a scan of so many bytes into account, which ended after so long."""
        predicted = self._line.predict(nbytes)
        if predicted is not None and predicted > 0:
            self._ratios.append(seconds / predicted)
            seconds = min(seconds, _MOST * predicted)
            self._n_seen += 1
            if self._n_seen % _EVERY == 0:
                ordered = sorted(self._ratios)
                self._beyond = ordered[min(len(ordered) - 1, int(_IN_TIME * len(ordered)))]
        self._line.observe(nbytes, seconds)

    def limit_s(self, nbytes: int) -> float:
        """Seconds within which nearly all scans of so many bytes end."""
        predicted = self._line.predict(nbytes)
        if predicted is None or self._n_seen < _EVERY:
            return _UNKNOWN_S
        return min(_LONGEST_S, max(_LEAST_S, predicted * self._beyond))
