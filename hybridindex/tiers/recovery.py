"""Whether a device works, when a failed or slow one may be tried again, and the trial itself.

Pure but for the probe: times are arguments. Who asks, how often, and what slow is, is decided above.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from hybridindex.errors import DeviceSlowError
from hybridindex.tiers.outcome import settle

__all__ = ["DeviceHealth", "Probe"]

_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 60.0


class DeviceHealth:
    """Failed or not, and the back-off: 1, 2, 4 ... 60 s after the failure and after each trial that failed.

    A device that fails again within the longest delay of its recovery goes on with the next delay: one that fails at
    every use is not tried every second. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._probing = False
        self._retry_at_s = 0.0
        self._delay_s = _FIRST_DELAY_S
        self._recovered_at_s = float("-inf")
        #: Failures of a working or slow device, becoming slow among them, and trials of a failed one.
        self.n_failures = 0
        self.n_probes = 0

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def slow(self) -> bool:
        """Whether it failed by being slow, and in no worse way since."""
        return isinstance(self._failure, DeviceSlowError)

    def fail(self, error: BaseException, now_s: float) -> bool:
        """Marks as failed, or as slow by a :class:`DeviceSlowError`; False when it was no better already."""
        with self._lock:
            if self._failure is not None and (not self.slow or isinstance(error, DeviceSlowError)):
                return False
            if self._failure is None and now_s - self._recovered_at_s > _LONGEST_DELAY_S:
                self._delay_s = _FIRST_DELAY_S
            self._failure = error
            self.n_failures += 1
            self._put_off(now_s)
            return True

    def _put_off(self, now_s: float) -> None:
        self._retry_at_s = now_s + self._delay_s
        self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)

    def retry_due(self, now_s: float) -> bool:
        """Whether a trial is due: failed, its delay over, and no trial going on."""
        with self._lock:
            return self._failure is not None and not self._probing and now_s >= self._retry_at_s

    def begin_probe(self) -> bool:
        """Takes the right to try; False when there is nothing to try, or somebody does."""
        with self._lock:
            if self._failure is None or self._probing:
                return False
            self._probing = True
            self.n_probes += 1
            return True

    def end_probe(self, *, works: bool, now_s: float) -> None:
        with self._lock:
            self._probing = False
            if works:
                self._failure = None
                self._recovered_at_s = now_s
            else:
                self._put_off(now_s)

    def retire(self) -> None:
        """Ends the trials of a device that can never work: that is no failure, which may pass."""
        with self._lock:
            self._failure, self._probing = None, False


class Probe:
    """A move that tries a failed device. One step."""

    def __init__(self, attempt: Callable[[], None], ended: Callable[[BaseException | None], None]) -> None:
        """
        Args:
            attempt: uses the device, and raises what is wrong with it.
            ended: is told what was wrong, or None, before the future is done.
        """
        self._attempt = attempt
        self._ended = ended
        self.future: Future[bool] = Future()
        self.future.set_running_or_notify_cancel()

    def step(self) -> bool:
        self._attempt()
        self._ended(None)
        settle(self.future, True)
        return False

    def abort(self, error: BaseException) -> None:
        self._ended(error)
        settle(self.future, False)
