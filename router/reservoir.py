"""A bounded, uniform sample of recent queries: what a refresh learns the load from.

Each query gets a random mark in [0, 1) and is kept if the mark is below the rate p. When the reservoir is full, p is
halved and what lies above it goes; so all kept queries are equally likely to be here, whenever they came (the rule of
distinct and concise sampling: Gibbons and Matias, SIGMOD 1998). A query that is not kept costs one random number.
"""

from __future__ import annotations

import math
import threading
from collections import deque

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.types import F32

__all__ = ["QueryReservoir"]


class QueryReservoir:
    """Owner of the kept queries. Any thread; the lock is held for a few list operations, never while rows are stacked.

    Memory: at most ``capacity`` queries. Older ones than ``retention_s`` are not answered and leave with the next
    arrival.
    """

    def __init__(self, capacity: int, *, retention_s: float, seed: int = 0) -> None:
        """``capacity`` 0 keeps nothing, for those who may not.

        Raises:
            InvalidInputError: a negative capacity, or a retention that is not positive.
        """
        if capacity < 0:
            raise InvalidInputError(f"capacity is {capacity}; expected a number of queries, 0 to keep none")
        if not retention_s > 0:
            raise InvalidInputError(f"retention_s is {retention_s}; expected a positive number of seconds")
        self.capacity = capacity
        self.retention_s = retention_s
        self._random = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._rate = 1.0
        #: (time, mark, query (d,) float32 of our own), oldest first.
        self._kept: deque[tuple[float, float, F32]] = deque()
        #: (time, rate before) of every rise that a kept query may be older than.
        self._rises: deque[tuple[float, float]] = deque()
        self._offered = 0

    @property
    def offered(self) -> int:
        """Queries seen since the start."""
        return self._offered

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of the kept vectors."""
        with self._lock:
            return sum(row.nbytes for _, _, row in self._kept)

    def offer(self, queries: F32, now_s: float) -> None:
        """Maybe keeps some of ``queries`` (n, d) or (d,) float32, as a copy. ``now_s`` is monotonic seconds."""
        rows = queries[None] if queries.ndim == 1 else queries
        if not self.capacity:
            return
        with self._lock:
            self._offered += len(rows)
            if len(rows) == 1:
                mark = self._random.random()
                if mark < self._rate:
                    self._keep(now_s, mark, rows[0])
                return
            marks = self._random.random(len(rows))
            for number in np.flatnonzero(marks < self._rate):
                self._keep(now_s, float(marks[number]), rows[number])

    def _keep(self, now_s: float, mark: float, row: F32) -> None:
        self._expire(now_s)
        while len(self._kept) >= self.capacity:
            self._rate /= 2
            self._kept = deque(entry for entry in self._kept if entry[1] < self._rate)
            # All that is left would have been kept at this rate.
            self._rises = deque(rise for rise in self._rises if rise[1] < self._rate)
        if mark < self._rate:
            if self._kept:
                # Threads come here in another order than they read the clock.
                now_s = max(now_s, self._kept[-1][0])
            self._kept.append((now_s, mark, np.array(row, dtype=np.float32)))

    def _expire(self, now_s: float) -> None:
        oldest_s = now_s - self.retention_s
        while self._kept and self._kept[0][0] < oldest_s:
            self._kept.popleft()
        while self._rises and self._rises[0][0] < oldest_s:
            self._rises.popleft()
        # The load fell: later queries are kept more often. Until the older ones are gone, they set the sample's rate.
        if self._rate < 1 and not self._rises and len(self._kept) < self.capacity // 4:
            self._rises.append((now_s, self._rate))
            self._rate *= 2

    def sample(self, now_s: float, *, since_s: float = -math.inf) -> F32:
        """(m, d) float32, oldest first: every query of the last ``retention_s`` seconds is in it equally likely.

        ``since_s``: only those that came then or later. (0, 0) where nothing is kept.
        """
        with self._lock:
            self._expire(now_s)
            rate = min([self._rate, *(before for _, before in self._rises)])
            rows = [row for at, mark, row in self._kept if mark < rate and at >= since_s]
        return np.stack(rows) if rows else np.empty((0, 0), dtype=np.float32)

    def clear(self) -> None:
        """Forgets all queries."""
        with self._lock:
            self._kept.clear()
            self._rises.clear()
            self._rate = 1.0

    def check_invariants(self) -> None:
        """Asserts what must hold at any time."""
        with self._lock:
            times = [at for at, _, _ in self._kept]
            assert len(self._kept) <= self.capacity
            assert times == sorted(times)
            assert all(mark < self._rate for _, mark, _ in self._kept)
            assert len(self._rises) <= 1
