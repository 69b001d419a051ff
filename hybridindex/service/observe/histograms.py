"""Histograms for the search path: an observation takes well under a microsecond.

Those of ``prometheus_client`` have a label, a value object and a lock per bucket; with eight observations per search
that is a tenth of a request's cost. ``metrics.py`` exposes the same families in the same format.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybridindex.errors import MissingDependencyError, how_to_install

try:
    from prometheus_client.core import HistogramMetricFamily
    from prometheus_client.registry import Collector
    from prometheus_client.utils import floatToGoString
except ImportError as error:
    raise MissingDependencyError(f"metrics need prometheus-client: {how_to_install('service')}") from error

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["Buckets", "Histogram"]


class Buckets:
    """Counts of one label value. Any thread."""

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """``bounds``: inclusive upper ends, ascending; one more bucket holds larger values."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Counts one value."""
        at = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[at] += 1
            self._sum += value

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """[(upper end, number of values up to it)], the last end "+Inf"; and the sum of all values."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        found, below = [], 0
        for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
            below += count
            found.append((str(floatToGoString(bound)), float(below)))  # type: ignore[no-untyped-call]
        return found, total


class Histogram(Collector):
    """One family: buckets by the value of one label, or without one."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], label: str | None = None) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(float(b) for b in bounds)
        self._label = label
        self._lock = threading.Lock()
        self._of: dict[str, Buckets] = {}

    def of(self, value: str = "") -> Buckets:
        """The buckets of a label's value; ``""`` without a label. Keep them: a look-up is slow."""
        with self._lock:
            found = self._of.get(value)
            if found is None:
                found = self._of[value] = Buckets(self._bounds)
        return found

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels())]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels())
        with self._lock:
            of = list(self._of.items())
        for value, buckets in of:
            counts, total = buckets.read()
            family.add_metric([value] if self._label is not None else [], counts, total)
        yield family

    def _labels(self) -> list[str]:
        return [] if self._label is None else [self._label]
