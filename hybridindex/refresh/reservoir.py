"""A bounded sample of recent queries, half of it uniform and half the newest. A refresh learns the load from it.

Half the places hold the newest queries, all of them: after a change of the load only these count, and a sample that is
uniform over an hour holds few of them. The other half is a uniform sample of older queries. Each query gets a random
mark in [0, 1) and is kept there while the mark is below the rate p. When that half is full, p is halved and queries
with larger marks go, so all are kept with equal probability whenever they came (concise sampling: Gibbons and Matias,
SIGMOD 1998). Their marks also thin the newest to the same rate.
"""

from __future__ import annotations

import math
import threading
from collections import deque

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.types import F32

__all__ = ["QueryReservoir"]


#: When it came, its mark, and the query (d,) float32, our own copy.
_Entry = tuple[float, float, F32]


class QueryReservoir:
    """Any thread; the lock is held for a few list operations, never while rows are stacked.

    Memory: at most ``capacity`` queries. Older ones than ``retention_s`` are not returned and go with the next arrival.
    """

    def __init__(self, capacity: int, *, retention_s: float, seed: int = 0) -> None:
        """``capacity`` 0 keeps nothing.

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
        #: Places of the newest, and of the uniform sample.
        self._n_newest = capacity // 2
        self._n_kept = capacity - self._n_newest
        #: Oldest first; every one of ``_kept`` came before those of ``_newest``.
        self._newest: deque[_Entry] = deque()
        self._kept: deque[_Entry] = deque()
        self._rate = 1.0
        #: (time, rate before) of every rise that a kept query may be older than.
        self._rises: deque[tuple[float, float]] = deque()
        self._offered = 0

    @property
    def offered(self) -> int:
        """Queries seen since the start."""
        return self._offered

    def __len__(self) -> int:
        return len(self._kept) + len(self._newest)

    @property
    def nbytes(self) -> int:
        """Bytes of the kept vectors."""
        with self._lock:
            return sum(row.nbytes for _, _, row in (*self._kept, *self._newest))

    def offer(self, queries: F32, now_s: float) -> None:
        """Keeps copies of ``queries`` (n, d) or (d,) float32, in place of older ones. ``now_s``: monotonic seconds."""
        rows = queries[None] if queries.ndim == 1 else queries
        if not self.capacity:
            return
        with self._lock:
            self._offered += len(rows)
            self._expire(now_s)
            if last := self._newest or self._kept:
                # Threads may arrive in another order than they read the clock.
                now_s = max(now_s, last[-1][0])
            if len(rows) == 1:
                self._newest.append((now_s, self._random.random(), _copied(rows[0])))
                self._thin(self._n_newest)
                return
            marks = self._random.random(len(rows))
            # Rows that are thinned at once are copied only if they are kept.
            first = max(0, len(rows) - self._n_newest)
            self._thin(self._n_newest - (len(rows) - first))
            for number in np.flatnonzero(marks[:first] < self._rate):
                self._keep((now_s, float(marks[number]), _copied(rows[number])))
            for mark, row in zip(marks[first:].tolist(), rows[first:], strict=True):
                self._newest.append((now_s, mark, _copied(row)))

    def _thin(self, left: int) -> None:
        """Moves the oldest of the newest to the uniform sample, or drops them, until ``left`` are left."""
        while len(self._newest) > left:
            self._keep(self._newest.popleft())

    def _keep(self, entry: _Entry) -> None:
        mark = entry[1]
        while mark < self._rate and len(self._kept) >= self._n_kept:
            self._rate /= 2
            self._kept = deque(kept for kept in self._kept if kept[1] < self._rate)
            # All that is left would have been kept at this rate.
            self._rises = deque(rise for rise in self._rises if rise[1] < self._rate)
        if mark < self._rate:
            self._kept.append(entry)

    def _expire(self, now_s: float) -> None:
        oldest_s = now_s - self.retention_s
        for entries in (self._kept, self._newest):
            while entries and entries[0][0] < oldest_s:
                entries.popleft()
        while self._rises and self._rises[0][0] < oldest_s:
            self._rises.popleft()
        # Fewer queries come: later ones are kept at twice the rate. Older ones set the rate of samples until they go.
        if self._rate < 1 and not self._rises and len(self._kept) < self._n_kept // 4:
            self._rises.append((now_s, self._rate))
            self._rate *= 2

    def sample(self, now_s: float) -> F32:
        """(m, d) float32, oldest first: every query of the last ``retention_s`` seconds is in it equally likely.

        (0, 0) where nothing is kept.
        """
        with self._lock:
            self._expire(now_s)
            rows = self._uniform(-math.inf)
        return _stack(rows)

    def sample_since(self, now_s: float, since_s: float) -> F32:
        """Queries that came at ``since_s`` or later, as many as there are: a uniform sample of them, or the newest.

        (m, d) float32, oldest first; (0, 0) where nothing is kept.
        """
        with self._lock:
            self._expire(now_s)
            rows = self._uniform(since_s)
            newest = [row for at, _, row in self._newest if at >= since_s]
        return _stack(max(rows, newest, key=len))

    def newest(self, now_s: float, n: int) -> tuple[F32, float]:
        """The last ``n`` queries (m <= n, d) float32, oldest first, and when the first of them came; fewer, and
        ``now_s`` of none, where not so many of the newest are kept."""
        with self._lock:
            self._expire(now_s)
            entries = list(self._newest)[-n:]
        return _stack([row for _, _, row in entries]), entries[0][0] if entries else now_s

    def _uniform(self, since_s: float) -> list[F32]:
        rate = min([self._rate, *(before for _, before in self._rises)])
        return [row for at, mark, row in (*self._kept, *self._newest) if mark < rate and at >= since_s]

    def clear(self) -> None:
        """Forgets all queries."""
        with self._lock:
            self._kept.clear()
            self._newest.clear()
            self._rises.clear()
            self._rate = 1.0

    def check_invariants(self) -> None:
        """Asserts what must hold at any time."""
        with self._lock:
            times = [at for at, _, _ in (*self._kept, *self._newest)]
            assert len(self._newest) <= self._n_newest
            assert len(self._kept) <= self._n_kept
            assert times == sorted(times)
            assert all(mark < self._rate for _, mark, _ in self._kept)
            assert len(self._rises) <= 1


def _copied(row: F32) -> F32:
    return np.array(row, dtype=np.float32)


def _stack(rows: list[F32]) -> F32:
    return np.stack(rows) if rows else np.empty((0, 0), dtype=np.float32)
