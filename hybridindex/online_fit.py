"""Running estimates of times that are seen one by one: a line that fades, and how far from it the slowest lie.

Pure but for their own state, and cheap enough for every search: no arrays, no fits over a history. What is done with
them is in ``router.deadline`` (host scans) and ``rag.chunk_time`` (generation).
"""

from __future__ import annotations

from collections import deque

from hybridindex.errors import InvalidInputError

__all__ = ["FadingLine", "RecentValues"]


class FadingLine:
    """y = a + b·x by least squares, b never below 0; an observation is worth ``keep`` of the next. One thread."""

    def __init__(self, keep: float = 0.8, *, through_origin: float = 0.0) -> None:
        """
        Args:
            through_origin: how far the slope is drawn to that of the line from the origin to the mean of the points:
                steady where these are few or of one size, when a free slope may be anything. 0: not at all, 1: it is
                the slope of the best line through the origin, and only the height is free.

        Raises:
            InvalidInputError: ``keep`` not in (0, 1], ``through_origin`` not in [0, 1].
        """
        if not 0 < keep <= 1:
            raise InvalidInputError(f"keep is {keep!r}; expected a number above 0, 1 at most")
        if not 0 <= through_origin <= 1:
            raise InvalidInputError(f"through_origin is {through_origin!r}; expected a number from 0 to 1")
        self._keep = keep
        self._through_origin = through_origin
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, x: float, y: float) -> None:
        """Takes one point into account."""
        # Means and central sums, updated in place: plain sums of squares would cancel.
        self._weight = self._keep * self._weight + 1.0
        share = 1.0 / self._weight
        dx, dy = x - self._x, y - self._y
        self._x += share * dx
        self._y += share * dy
        self._xx = self._keep * self._xx + (1 - share) * dx * dx
        self._xy = self._keep * self._xy + (1 - share) * dx * dy

    def coefficients(self) -> tuple[float, float] | None:
        """(a, b); None before the first observation."""
        if self._weight == 0:
            return None
        drawn = self._through_origin * self._weight * self._x
        xx, xy = self._xx + drawn * self._x, self._xy + drawn * self._y
        slope = max(0.0, xy / xx) if xx > 1e-9 else 0.0
        return self._y - slope * self._x, slope

    def predict(self, x: float) -> float | None:
        """y at ``x``, never below 0; None before the first observation."""
        line = self.coefficients()
        return None if line is None else max(0.0, line[0] + line[1] * x)


class RecentValues:
    """The last ``size`` values, and their order. One thread."""

    def __init__(self, size: int = 64) -> None:
        self._values: deque[float] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Takes one value in; the oldest leaves."""
        self._values.append(value)

    def upper(self, share: float) -> float | None:
        """The least of the values that at most ``1 - share`` of them exceed; None while there are none.

        The largest of 20 counts in full at a share of 0.95; of 21, it is left out.
        """
        if not self._values:
            return None
        ordered = sorted(self._values)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def lower(self, share: float) -> float | None:
        """The greatest of the values that at most ``1 - share`` of them fall below; None while there are none."""
        if not self._values:
            return None
        ordered = sorted(self._values, reverse=True)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
