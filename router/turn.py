"""Whose turn it is to run batches: the engine's thread, or the one caller's that takes its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Turn"]


class Turn:
    """A lock for which the engine's thread goes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The thread of a caller whose turn it is.
        self._holder: threading.Thread | None = None
        #: The engine thread has requests and waits for its turn: no caller goes before it.
        self._wanted = False
        #: The one caller's thread that may take the engine thread's place: OpenMP keeps a pool of threads for every
        #: thread that ever searched.
        self._stand_in: threading.Thread | None = None

    @contextmanager
    def of_engine(self) -> Iterator[None]:
        """The engine thread's turn, as soon as it can be had."""
        self._wanted = True
        with self._lock:
            self._wanted = False
            yield

    def take(self, is_idle: Callable[[], bool]) -> bool:
        """Takes the turn for the calling thread where the engine is idle; False where it is not."""
        if self._wanted or not is_idle() or not self._lock.acquire(blocking=False):
            return False
        try:
            taken = is_idle() and self._may_stand_in()
        except BaseException:
            self._lock.release()
            raise
        if taken:
            self._holder = threading.current_thread()
        else:
            self._lock.release()
        return taken

    def held_here(self) -> bool:
        """Whether it is the turn of a caller, and that one asks: from a callback, which would wait for itself."""
        return self._holder is threading.current_thread()

    def acquire(self) -> None:
        """For good."""
        self._lock.acquire()

    def release(self) -> None:
        """After :meth:`take`."""
        self._holder = None
        self._lock.release()

    def _may_stand_in(self) -> bool:
        current = threading.current_thread()
        if self._stand_in is not current:
            if self._stand_in is not None and self._stand_in.is_alive():
                return False
            self._stand_in = current
        return True
