"""The load of the LLM engines of the same process, and the lookahead window that follows from it.

A process has one router, so there is one :data:`ENGINE_LOAD`. It records nothing until a router is attached.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

__all__ = ["ENGINE_LOAD", "EngineLoad", "LoadReading"]

#: Weight of a newly finished request: the mean covers about the last twenty.
_SHARE = 0.1
#: Windows are rounded down to powers of this: budgets are cached by window.
_STEP = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReading:
    """One reading of all engines. Seconds are means over recently finished requests."""

    #: Requests that finished since a router was attached.
    n_finished: int = 0
    running: int = 0
    waiting: int = 0
    #: Used part of the fullest engine's KV cache, 0..1.
    kv_usage: float = 0.0
    ttft_s: float = 0.0
    #: From arrival to the last token.
    generation_s: float = 0.0
    #: For sessions that name no window and no bytes; None before the first request finished.
    window_ms: float | None = None


class EngineLoad:
    """Running means. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = False
        self._n_finished = 0
        self._ttft_s = self._generation_s = math.nan
        #: Engine -> running, waiting, used part of its KV cache.
        self._queues: dict[int, tuple[int, int, float]] = {}

    @property
    def wanted(self) -> bool:
        """Whether a router reads this; without one, nothing is recorded."""
        return self._wanted

    def attach(self) -> None:
        self._wanted = True

    def detach(self) -> None:
        self._wanted = False

    def note_queue(self, *, running: int, waiting: int, kv_usage: float, engine: int = 0) -> None:
        """``engine``: which one of vLLM's, where it has several (data parallel)."""
        with self._lock:
            self._queues[engine] = running, waiting, kv_usage

    def note_first_tokens(self, seconds: list[float]) -> None:
        with self._lock:
            for value in seconds:
                self._ttft_s = _mean(self._ttft_s, value)

    def note_finished(self, seconds: list[float]) -> None:
        with self._lock:
            for value in seconds:
                self._generation_s = _mean(self._generation_s, value)
                self._n_finished += 1

    def window_ms(self) -> float | None:
        """Generation time that can hide a session's copies; None before the first request finished."""
        with self._lock:
            seconds = self._generation_s
        if not seconds > 0:
            return None
        return float(_STEP ** math.floor(math.log(seconds * 1e3, _STEP)))

    def read(self) -> LoadReading:
        window_ms = self.window_ms()
        with self._lock:
            queues = self._queues.values()
            return LoadReading(
                n_finished=self._n_finished,
                running=sum(running for running, _, _ in queues),
                waiting=sum(waiting for _, waiting, _ in queues),
                kv_usage=max((usage for _, _, usage in queues), default=0.0),
                ttft_s=0.0 if math.isnan(self._ttft_s) else self._ttft_s,
                generation_s=0.0 if math.isnan(self._generation_s) else self._generation_s,
                window_ms=window_ms,
            )


def _mean(before: float, value: float) -> float:
    if not math.isfinite(value) or value < 0:
        return before
    return value if math.isnan(before) else before + _SHARE * (value - before)


#: The engines of this process.
ENGINE_LOAD = EngineLoad()
