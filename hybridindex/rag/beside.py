"""One background thread for the searches of an answer that is being generated.

Unlike an executor's thread, nobody waits for it, so an answer that fails ends at once. All searches of an answer share
the thread, because OpenMP keeps a pool for every thread that ever searched.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Generic, TypeVar

__all__ = ["Beside"]

T = TypeVar("T")


class Beside(Generic[T]):
    """A context manager, entered once. Work runs in order; leaving the block does not wait for it."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Callable[[], T], Future[T]] | None] = queue.SimpleQueue()
        # A daemon thread: a running search must not delay the end of the process.
        self._thread = threading.Thread(target=self._run, name="hybridindex-piperag", daemon=True)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._asked.put((work, future))
        return future

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            work, future = asked
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised where the future is waited for
                future.set_exception(error)
            del work, future, asked

    def __enter__(self) -> Beside[T]:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._asked.put(None)
