"""Idempotency keys: what a change was answered, so that a client may send it again. In memory alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from hybridindex.service.http.problems import Problem, ProblemError

__all__ = ["AnsweredKeys"]

#: How long a key is known, how many are, and bytes of their answers.
_KNOWN_S, _MOST, _MOST_BYTES = 86_400.0, 10_000, 64 << 20


@dataclass(slots=True, eq=False)
class _Entry:
    digest: str
    #: Done: with an answer.
    task: asyncio.Task[bytes]
    since_s: float
    nbytes: int = 0


class AnsweredKeys:
    """Of one index. On the event loop."""

    def __init__(self, clock: Callable[[], float], *, most: int = _MOST, most_bytes: int = _MOST_BYTES) -> None:
        """``clock``: monotonic seconds."""
        self._clock = clock
        self._most, self._most_bytes = most, most_bytes
        #: By client and key, the oldest first.
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    async def once(
        self, client: str, key: str, digest: str, change: Callable[[], Awaitable[bytes]]
    ) -> tuple[bytes, bool]:
        """The answer of ``change``, and whether an earlier request got it first. A change that failed changed nothing,
        and is made again.

        Args:
            digest: of the whole request.

        Raises:
            ProblemError: the key came with another request before. Whatever ``change`` raises.
        """
        self._forget_old()
        name = client, key
        entry = self._entries.get(name)
        again = entry is not None
        if entry is None:
            # It goes on where its client is gone: the answer waits for the next attempt.
            entry = _Entry(digest, asyncio.ensure_future(_run(change)), self._clock())
            self._entries[name] = entry
            entry.task.add_done_callback(partial(self._ended, name, entry))
        elif entry.digest != digest:
            detail = "Idempotency-Key came with another request before; expected a new one for each change"
            raise ProblemError(Problem(422, "idempotency-key", "Another request", detail, "Idempotency-Key"))
        return await asyncio.shield(entry.task), again

    def _ended(self, name: tuple[str, str], entry: _Entry, task: asyncio.Task[bytes]) -> None:
        if task.cancelled() or task.exception() is not None:
            if self._entries.get(name) is entry:
                del self._entries[name]
            return
        entry.nbytes = len(task.result())
        self._nbytes += entry.nbytes

    def _forget_old(self) -> None:
        now = self._clock()
        for name, entry in list(self._entries.items()):
            full = len(self._entries) >= self._most or self._nbytes > self._most_bytes
            if not full and now - entry.since_s < _KNOWN_S:
                return
            if entry.task.done():
                del self._entries[name]
                self._nbytes -= entry.nbytes


async def _run(change: Callable[[], Awaitable[bytes]]) -> bytes:
    return await change()
