"""What waits for the engine, and what of it forms a batch."""

from __future__ import annotations

import queue

from hybridindex.router.batch.batching import fits
from hybridindex.router.batch.request import Request

__all__ = ["RequestQueue"]


class RequestQueue:
    """Put from any thread; one thread at a time takes."""

    def __init__(self, max_batch: int | None) -> None:
        """``max_batch``: most queries in one batch; None: everything that waits and fits (a small cap causes
        backlogs)."""
        self._max_batch = max_batch
        self._waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        #: Taken from the queue but left for the next batch by the cap.
        self._held_back: Request | None = None

    def put(self, request: Request) -> None:
        self._waiting.put(request)

    def end(self) -> None:
        """Nothing comes after this."""
        self._waiting.put(None)

    def __len__(self) -> int:
        """What was not taken; what a batch left over counts."""
        return self._waiting.qsize() + (self._held_back is not None)

    def empty(self) -> bool:
        return self._held_back is None and self._waiting.empty()

    def get(self) -> Request | None:
        """Waits for the next one; None: the end."""
        first, self._held_back = self._held_back, None
        return first or self._waiting.get()

    def take(self, requests: list[Request]) -> bool:
        """Adds everything that waits to the first one, up to the cap; True where the end was reached."""
        n, width = len(requests[0].queries), requests[0].width
        while True:
            try:
                request = self._waiting.get_nowait()
            except queue.Empty:
                return False
            if request is None:
                return True
            width = max(width, request.width)
            if not fits(n, len(request.queries), self._max_batch, width):
                self._held_back = request
                return False
            requests.append(request)
            n += len(request.queries)

    def fail(self, error: BaseException) -> None:
        """Gives ``error`` to all that wait."""
        waiting = [self._held_back] if self._held_back is not None else []
        while True:
            try:
                request = self._waiting.get_nowait()
            except queue.Empty:
                break
            if request is not None:
                waiting.append(request)
        for request in waiting:
            request.reply.fail(error)
