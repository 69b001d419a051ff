"""Running estimates of observed times: a line fitted with decay, and quantiles of recent values.

Cheap enough for every search: no arrays, no fit over a history. Used for host scans under a deadline and for the time
of generation steps.
"""

from __future__ import annotations

from collections import deque

from hybridindex.errors import InvalidInputError

__all__ = ["FadingLine", "RecentValues"]


class FadingLine:
    """y = a + b·x by least squares, b >= 0; each observation weighs ``keep`` times the next one. Not thread-safe."""

    def __init__(self, keep: float = 0.8, *, through_origin: float = 0.0) -> None:
        """
        Args:
            through_origin: weight that pulls the slope towards that of the line from the origin to the mean of the
                points. It steadies the slope where points are few or of one size. 0: no pull; 1: the slope of the best
                line through the origin, with a free height.

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
        """Adds one point."""
        # Means and central sums, updated in place: plain sums of squares would lose digits by cancellation.
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
    """Quantiles of the last ``size`` values. Not thread-safe."""

    def __init__(self, size: int = 64) -> None:
        self._values: deque[float] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Adds one value; drops the oldest of more than ``size``."""
        self._values.append(value)

    def upper(self, share: float) -> float | None:
        """The smallest value that at most ``1 - share`` of the values exceed; None while there are none.

        At a share of 0.95 that is the largest of 20 values, and the second largest of 21.
        """
        return self._at(share, sorted(self._values))

    def lower(self, share: float) -> float | None:
        """The largest value that at most ``1 - share`` of the values fall below; None while there are none."""
        return self._at(share, sorted(self._values, reverse=True))

    @staticmethod
    def _at(share: float, ordered: list[float]) -> float | None:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
