"""When to try again: exponential back-off with full jitter, the server's Retry-After, never past a deadline.

Pure, apart from its clock and random numbers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from hybridindex.errors import (
    BusyWritingError,
    HybridIndexError,
    InvalidInputError,
    OverloadedError,
    UnreachableError,
)

__all__ = ["Attempts", "RetryPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How many attempts, and the pauses between them. ``attempts=1`` never tries again; otherwise a daemon that says
    when to come back is asked again until the call's time is over."""

    attempts: int = 4
    first_pause_s: float = 0.05
    longest_pause_s: float = 5.0

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1:
            raise InvalidInputError(f"attempts is {self.attempts!r}; expected an integer of at least 1")
        for name in ("first_pause_s", "longest_pause_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < 3600:
                raise InvalidInputError(f"{name} is {value!r}; expected seconds, 0 or more")


class Attempts:
    """The attempts of one call. One thread."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``timeout_s``: for all attempts and pauses together. ``draw``: uniform in [0, 1)."""
        self._policy = policy
        self._clock = clock
        self._draw = draw
        self._deadline_s = clock() + timeout_s
        self._failed = 0

    def remaining_s(self) -> float:
        """Seconds left, at least 0.001: some transports take zero for no limit."""
        return max(self._deadline_s - self._clock(), 1e-3)

    def pause_after(self, error: HybridIndexError, *, repeatable: bool) -> float:
        """Seconds to wait before the next attempt.

        Args:
            repeatable: the request may be sent twice, or was never sent.

        Raises:
            HybridIndexError: ``error``, when there is no next attempt.
        """
        self._failed += 1
        told = isinstance(error, OverloadedError | BusyWritingError) and self._policy.attempts > 1
        again = isinstance(error, UnreachableError) and repeatable and self._failed < self._policy.attempts
        if not told and not again:
            raise error
        # A daemon that says when may be asked so often that the power would be no float.
        doubled = self._policy.first_pause_s * 2 ** min(self._failed - 1, 1000)
        ceiling: float = min(self._policy.longest_pause_s, doubled)
        pause = ceiling * self._draw()
        if isinstance(error, OverloadedError | BusyWritingError):
            # Up to a tenth more: clients refused together must not come back together.
            pause = max(pause, error.retry_after_s * (1 + 0.1 * self._draw()))
        if self._clock() + pause >= self._deadline_s:
            raise error
        return pause
