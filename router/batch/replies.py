"""Where answers go: to a future, to a caller that waits, or to where the parts of a large call are put together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

import numpy as np

from hybridindex.errors import HybridIndexError
from hybridindex.types import SearchResult

__all__ = ["BlockingReply", "DividedReply", "FutureReply", "Reply", "without_frames"]

_log = logging.getLogger(__name__)


class Reply(Protocol):
    """Where a request's answer goes. Settled once, from any thread; never raises."""

    @property
    def wanted(self) -> bool:
        """Whether anybody may still wait for it. Where nobody does, the search is left out, and its reply fails."""

    def settle(self, result: SearchResult) -> None: ...

    def announce(self) -> None:
        """Called after :meth:`settle`, when all requests that are answered together have been settled."""

    def fail(self, error: BaseException) -> None: ...


def without_frames(error: BaseException) -> BaseException:
    """``error`` for whoever waits: one of ours without the engine's frames. These name the request, and by it this
    reply: error, request and index would stay in memory, and files mapped, until the garbage collector comes."""
    return error.with_traceback(None) if isinstance(error, HybridIndexError) else error


class FutureReply:
    """For callers that do not wait."""

    __slots__ = ("_on_result", "future")

    def __init__(self, on_result: Callable[[SearchResult], None] | None = None) -> None:
        """``on_result``: told an answer before anybody who waits for it, unless the future was cancelled."""
        self.future: Future[SearchResult] = Future()
        self._on_result = on_result

    @property
    def wanted(self) -> bool:
        return not self.future.cancelled()

    def settle(self, result: SearchResult) -> None:
        self._complete(lambda: self._set(result))

    def announce(self) -> None:
        pass

    def _set(self, result: SearchResult) -> None:
        try:
            if self._on_result is not None:
                self._on_result(result)
        finally:
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        self._complete(lambda: self.future.set_exception(without_frames(error)))

    def _complete(self, complete: Callable[[], None]) -> None:
        """Unless it was cancelled. What its callbacks raise is theirs: it must not stop the engine."""
        try:
            if self.future.set_running_or_notify_cancel():
                complete()
        except BaseException:  # noqa: BLE001 - even SystemExit from a callback
            _log.exception("a callback of a search future raised")


class BlockingReply:
    """For one caller that waits: a lock instead of a future, which costs a small batch more than its merge."""

    __slots__ = ("_error", "_result", "_settled")

    wanted = True

    def __init__(self) -> None:
        self._settled = threading.Lock()
        self._settled.acquire()
        self._result: SearchResult | None = None
        self._error: BaseException | None = None

    def settle(self, result: SearchResult) -> None:
        self._result = result
        self._settled.release()

    def announce(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        self._error = without_frames(error)
        self._settled.release()

    def wait(self) -> SearchResult:
        """The answer, or raises the error; once."""
        self._settled.acquire()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None
        assert self._result is not None
        return self._result


class DividedReply:
    """Of a search call that is too large for one batch. Settles ``whole`` when all parts have ended: with their
    answers, or with the first error. Thread-safe."""

    def __init__(self, whole: Reply, n: int, k: int, n_parts: int) -> None:
        """Of ``n`` queries. Makes room for all answers at once: parts are copied there and let go."""
        self._whole = whole
        self._result = SearchResult(
            ids=np.empty((n, k), np.int64),
            distances=np.empty((n, k), np.float32),
            nprobe_used=np.empty(n, np.int32),
            hit_rate=np.empty(n, np.float32),
        )
        #: Of each query; 1 where a part says none.
        self._coverage = np.ones(n, np.float32)
        self._is_partial = False
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
            if answer.coverage is not None:
                self._coverage[rows], self._is_partial = answer.coverage, True
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
        self._whole.settle(replace(self._result, coverage=self._coverage) if self._is_partial else self._result)
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
