"""The answer of a search call that is too large for one batch: its parts, put together where they belong."""

from __future__ import annotations

import threading

import numpy as np

from hybridindex.router.batch.replies import Reply
from hybridindex.types import SearchResult

__all__ = ["DividedReply"]


class DividedReply:
    """Settles ``whole`` when all parts have ended: with their answers, or with the first error. Thread-safe."""

    def __init__(self, whole: Reply, n: int, k: int, n_parts: int) -> None:
        """Of ``n`` queries. Makes room for all answers at once: parts are copied there and let go."""
        self._whole = whole
        self._result = SearchResult(
            ids=np.empty((n, k), np.int64),
            distances=np.empty((n, k), np.float32),
            nprobe_used=np.empty(n, np.int32),
            hit_rate=np.empty(n, np.float32),
        )
        self._lock = threading.Lock()
        self._n_open = n_parts
        self._error: BaseException | None = None

    @property
    def wanted(self) -> bool:
        return self._whole.wanted

    def part(self, rows: slice) -> Reply:
        """The reply of the queries ``rows``."""
        return _Part(self, rows)

    def take(self, rows: slice, answer: SearchResult | BaseException) -> None:
        """Each part once."""
        if not isinstance(answer, BaseException):
            assert answer.coverage is None, "only searches by codes are divided, and no cluster has codes"
            for name in ("ids", "distances", "nprobe_used", "hit_rate"):
                getattr(self._result, name)[rows] = getattr(answer, name)
        with self._lock:
            self._n_open -= 1
            if isinstance(answer, BaseException) and self._error is None:
                self._error = answer
            if self._n_open:
                return
        if self._error is not None:
            self._whole.fail(self._error)
            return
        self._whole.settle(self._result)
        self._whole.announce()


class _Part:
    __slots__ = ("_divided", "_rows")

    def __init__(self, divided: DividedReply, rows: slice) -> None:
        self._divided, self._rows = divided, rows

    @property
    def wanted(self) -> bool:
        return self._divided.wanted

    def settle(self, result: SearchResult) -> None:
        self._divided.take(self._rows, result)

    def announce(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        self._divided.take(self._rows, error)
