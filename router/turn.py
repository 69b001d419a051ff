"""Whose turn it is to run batches: the engine's thread, or the one caller's that takes its place.

A caller's thread may be the main one, in which an interrupt (Ctrl-C, or whatever a signal handler raises) can come
after any call of a function. None may leave the turn taken: nothing would be answered any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

__all__ = ["Turn"]

_T = TypeVar("_T")


class Turn:
    """A lock for which the engine's thread goes first."""

    def __init__(self) -> None:
        #: Reentrant only because such a lock refuses to be released by a thread that does not hold it.
        self._lock = threading.RLock()
        #: The thread that holds it.
        self._owner: threading.Thread | None = None
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
            self._wanted, self._owner = False, threading.current_thread()
            try:
                yield
            finally:
                self._owner = None

    def run(self, is_idle: Callable[[], bool], do: Callable[[], _T]) -> _T | None:
        """What ``do`` returns, called on the calling thread in its turn where the engine is idle; None where it is not.

        Never waits for the turn.
        """
        current, lock = threading.current_thread(), self._lock
        if self._wanted or self._owner is current or not is_idle():
            return None
        try:
            if not lock.acquire(blocking=False):
                return None
            # No interrupt comes between taking a lock and the block of its with statement, nor while that gives it
            # back. So this holds it a second time, and the first time ends here.
            with lock:
                lock.release()
                if not (is_idle() and self._may_stand_in(current)):
                    return None
                self._owner = self._holder = current
                try:
                    return do()
                finally:
                    self._owner = self._holder = None
        except BaseException:
            with suppress(RuntimeError):  # mostly it was given back already
                lock.release()
            raise

    def held_here(self) -> bool:
        """Whether it is the turn of a caller, and that one asks: from a callback, which would wait for itself."""
        return self._holder is threading.current_thread()

    def acquire(self) -> None:
        """For good, or until :meth:`release`."""
        self._lock.acquire()
        self._owner = threading.current_thread()

    def release(self) -> None:
        """After :meth:`acquire`."""
        self._owner = None
        self._lock.release()

    def _may_stand_in(self, current: threading.Thread) -> bool:
        if self._stand_in is not current:
            if self._stand_in is not None and self._stand_in.is_alive():
                return False
            self._stand_in = current
        return True
