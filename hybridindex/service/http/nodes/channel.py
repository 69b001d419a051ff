"""The answering end of a channel between two nodes: frames come, scans are made, frames go.

What the HTTP protocol limits is limited here as well: sizes, memory, the time of what comes in parts, the time that an
answer waits to be read, and the time in which nothing is asked. The key was looked at when the channel began, and is
again while it is used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from hybridindex.router.remote.frames import ANSWER, ASK, CANCEL, REFUSAL, FrameReader, frame
from hybridindex.service.config import Limits
from hybridindex.service.http.problems import problem_of
from hybridindex.service.http.wire import BodyError
from hybridindex.service.intake.request_memory import Charge

__all__ = ["Answer", "ScanChannel"]

_log = logging.getLogger(__name__)

#: Of a scan's options, its arrays, and what they are charged to: the arrays found, at once or later.
Answer = Callable[[str, bytes | memoryview, Charge], bytes | Coroutine[Any, Any, bytes]]

#: Between two looks at whether the key is still one.
_LOOK_S = 1.0


class ScanChannel(asyncio.Protocol):
    """One connection, of one other node. On the event loop."""

    def __init__(
        self,
        answer: Answer,
        open_charge: Callable[[], Charge],
        limits: Limits,
        *,
        is_allowed: Callable[[], bool],
        on_answer: Callable[[int, float], None],
    ) -> None:
        """
        Args:
            open_charge: raises OverloadedError.
            is_allowed: whether the other node's key still is one.
            on_answer: told the status of each answer, as of HTTP, and the seconds that it took.
        """
        self._answer, self._open_charge, self._limits = answer, open_charge, limits
        self._is_allowed, self._on_answer = is_allowed, on_answer
        #: Called with this when the connection has ended.
        self.on_end: Callable[[ScanChannel], None] = lambda _channel: None
        self._reader = FrameReader(self._on_head, self._on_frame)
        self._transport: Any = None
        self._loop = asyncio.get_running_loop()
        #: Of the scan that comes.
        self._charge: Charge | None = None
        #: By number: scans that are answered later.
        self._tasks: dict[int, asyncio.Task[bytes]] = {}
        self._n_frames = 0
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        #: When something came or was answered last; the timer looks whether that is too long ago.
        self._used_s = self._loop.time()
        self._idle: asyncio.TimerHandle | None = None
        self._looked_s = self._loop.time()
        self._stopping = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._end_if_idle()

    def data_received(self, data: bytes) -> None:
        if self._stopping:
            return
        self._used_s = now_s = self._loop.time()
        if now_s > self._looked_s + _LOOK_S:
            self._looked_s = now_s
            if not self._is_allowed():
                self._transport.abort()
                return
        try:
            self._reader.feed(data)
        except ConnectionError as error:
            _log.warning("a channel of another node ends: %s", error)
            self._transport.abort()
            return
        if self._reader.within and self._late is None:
            self._wait_for_rest()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late, self._unread, self._idle):
            if timer is not None:
                timer.cancel()
        self._stopping = True
        self._close_charge()
        for task in self._tasks.values():
            task.cancel()
        self.on_end(self)

    def pause_writing(self) -> None:
        self._transport.pause_reading()
        if self._unread is None:
            self._unread = self._loop.call_later(self._limits.client_timeout_s, self._transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if not self._stopping:
            self._transport.resume_reading()

    # For the server

    def shutdown(self) -> None:
        """Answers what has come, reads nothing more, and ends."""
        self._stopping = True
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._stopping and not self._tasks:
            self._transport.close()

    def _end_if_idle(self) -> None:
        """A node that is gone may end nothing, and one that is there makes another connection when it asks again."""
        if self._tasks:
            self._used_s = self._loop.time()
        left_s = self._used_s + self._limits.client_timeout_s - self._loop.time()
        if left_s > 0:
            self._idle = self._loop.call_later(left_s, self._end_if_idle)
        else:
            self._transport.abort()

    # Frames

    def _wait_for_rest(self) -> None:
        n = self._n_frames

        def look() -> None:
            self._late = None
            if not self._reader.within:
                return
            if self._n_frames == n:
                self._transport.abort()
            else:
                self._wait_for_rest()

        self._late = self._loop.call_later(self._limits.client_timeout_s, look)

    def _on_head(self, kind: int, number: int, length: int) -> bool:
        if kind == CANCEL and not length:
            return True
        if kind != ASK:
            raise ConnectionError(f"it sent a frame of kind {kind} and {length} bytes")
        try:
            if length > self._limits.max_body_bytes:
                raise BodyError("body", f"is too large; expected at most {self._limits.max_body_bytes} bytes", 413)
            self._charge = charge = self._open_charge()
            charge.hold(2 * length)
        except Exception as error:  # noqa: BLE001 - the other node gets an answer
            self._close_charge()
            self._refuse(number, error, 0.0)
            return False
        return True

    def _on_frame(self, kind: int, number: int, extra: int, payload: bytes) -> None:
        self._n_frames += 1
        if kind == CANCEL:
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
            return
        if number in self._tasks:
            raise ConnectionError(f"it asked scan {number} twice")
        charge, self._charge = self._charge, None
        assert charge is not None
        began_s = time.perf_counter()
        try:
            options = payload[:extra].decode("latin-1")
            found = self._answer(options, memoryview(payload)[extra:], charge)
        except Exception as error:  # noqa: BLE001 - the other node gets an answer
            self._refuse(number, error, began_s)
        else:
            if not isinstance(found, bytes):
                task = self._tasks[number] = self._loop.create_task(found)
                task.add_done_callback(partial(self._on_done, number, charge, began_s))
                return
            self._send(number, found, began_s)
        charge.close()

    def _on_done(self, number: int, charge: Charge, began_s: float, task: asyncio.Task[bytes]) -> None:
        del self._tasks[number]
        self._used_s = self._loop.time()
        charge.close()
        if not task.cancelled():
            if (error := task.exception()) is not None:
                self._refuse(number, error, began_s)
            else:
                self._send(number, task.result(), began_s)
        self._end_if_done()

    def _send(self, number: int, found: bytes, began_s: float) -> None:
        self._write(frame(ANSWER, number, found))
        self._on_answer(200, time.perf_counter() - began_s)

    def _refuse(self, number: int, error: BaseException, began_s: float) -> None:
        problem = problem_of(error)
        if problem.status == 500:
            _log.error("a scan for another node failed", exc_info=error)
        self._write(frame(REFUSAL, number, problem.body(""), extra=problem.status))
        self._on_answer(problem.status, time.perf_counter() - began_s if began_s else 0.0)

    def _write(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)

    def _close_charge(self) -> None:
        charge, self._charge = self._charge, None
        if charge is not None:
            charge.close()
