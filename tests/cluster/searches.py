"""Searches of a cluster from several threads, each compared with one machine's answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

import numpy as np

from hybridindex.cluster.router import ClusterRouter
from hybridindex.errors import IncompleteAnswerError, UnreachableError
from hybridindex.types import SearchResult
from tests.clustered import clustered

__all__ = ["Load", "same", "wait_until"]

K, NPROBE = 10, 16
#: For what takes seconds on an idle machine.
SOON_S = 60.0


def wait_until(condition: Callable[[], bool], limit_s: float = SOON_S) -> None:
    """Fails where it never comes so far."""
    ends = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends, "it never came so far"
        time.sleep(0.02)


def same(found: SearchResult, wanted: SearchResult) -> bool:
    """Whether an answer is whole and right."""
    close = np.allclose(found.distances, wanted.distances, rtol=1e-5, atol=1e-5)
    return found.coverage is None and np.array_equal(found.ids, wanted.ids) and close


class Load:
    """Searches until it is left. A context manager."""

    def __init__(
        self, router: ClusterRouter, one_machine: Callable[[np.ndarray], SearchResult], threads: int = 2
    ) -> None:
        self.n_right = 0
        self.wrong: list[int] = []
        self.errors: list[Exception] = []
        self._router, self._one_machine = router, one_machine
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._search, args=(number,)) for number in range(threads)]

    def _search(self, number: int) -> None:
        seed = number
        while not self._stop.is_set():
            seed += len(self._threads)
            queries = clustered(1 + seed % 4, seed=seed)
            wanted = self._one_machine(queries)
            try:
                found = self._router.search(queries, K, NPROBE)
            except Exception as error:  # noqa: BLE001 - told at the end
                self.errors.append(error)
                continue
            with self._lock:
                if same(found, wanted):
                    self.n_right += 1
                else:
                    self.wrong.append(seed)

    def more(self, n: int = 20) -> None:
        """Until so many more answers came."""
        aim = self.n_right + n
        wait_until(lambda: self.n_right >= aim)

    def check(self) -> None:
        """No answer was wrong, or silently a part of one; and what failed says that nodes did not answer. Where others
        take the cores, a node may be silent for longer than it is waited for: ``benchmarks.service.cluster`` counts
        these failures."""
        assert not self.wrong
        others = [error for error in self.errors if not isinstance(error, IncompleteAnswerError | UnreachableError)]
        assert not others

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
