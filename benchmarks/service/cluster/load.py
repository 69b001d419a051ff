"""An open-loop load on a cluster: searches that are due at a fixed rate, whatever becomes of those before."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridindex.cluster.router import ClusterRouter
from hybridindex.types import F32, F64

__all__ = ["Load", "Taken"]

#: For the last answers to come.
_END_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What became of the searches, in the order in which they were due."""

    #: (n,) seconds of the monotonic clock.
    due_s: F64
    #: (n,) seconds from when it was due until its answer; inf: it failed.
    seconds: F64
    #: Of those that failed.
    errors: Counter[str]

    def between(self, start_s: float, stop_s: float) -> F64:
        """(m,) seconds of those that were due then."""
        return self.seconds[(self.due_s >= start_s) & (self.due_s < stop_s)]


class Load:
    """Runs on its own thread from its making until :meth:`end`."""

    def __init__(self, router: ClusterRouter, queries: F32, rate: float, nprobe: int, k: int = 10) -> None:
        self._router, self._queries, self._rate, self._nprobe, self._k = router, queries, rate, nprobe, k
        self._due: list[float] = []
        self._ended: dict[int, float] = {}
        self._errors: Counter[str] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began, number = time.monotonic(), 0
        while True:
            due = began + number / self._rate
            if self._stop.wait(max(0.0, due - time.monotonic())):
                return
            self._due.append(due)
            query = self._queries[number % len(self._queries)]
            future = self._router.submit(query, self._k, self._nprobe)
            future.add_done_callback(lambda done, number=number: self._done(number, done))  # type: ignore[misc]
            number += 1

    def _done(self, number: int, done: Future[Any]) -> None:
        error = done.exception()
        if error is None and done.result().coverage is not None:
            error = AssertionError("a part of an answer, which nobody allowed")
        if error is not None:
            self._errors[f"{type(error).__name__}: {str(error)[:160]}"] += 1
        self._ended[number] = np.inf if error is not None else time.monotonic()

    def end(self) -> Taken:
        """Starts no more searches, and waits for those under way."""
        self._stop.set()
        self._thread.join()
        limit = time.monotonic() + _END_S
        while len(self._ended) < len(self._due) and time.monotonic() < limit:
            time.sleep(0.01)
        due = np.array(self._due)
        ended = np.array([self._ended.get(number, np.inf) for number in range(len(due))])
        if lost := len(due) - len(self._ended):
            self._errors["no answer"] += lost
        return Taken(due_s=due, seconds=ended - due, errors=self._errors)
