"""Whether a device works, when a failed or slow one may be tried again, and the trial itself.

:class:`DeviceHealth` is pure: times are arguments. :class:`TierHealth` adds a tier's clock and log. Callers decide how
often to ask and what counts as slow.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from hybridindex.errors import DeviceSlowError
from hybridindex.tiers.contract.futures import settle

__all__ = ["DeviceHealth", "Probe", "TierHealth"]

_log = logging.getLogger(__name__)

_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 60.0


class DeviceHealth:
    """Failed or not, and the back-off: 1, 2, 4 ... 60 s after the failure and after each trial that failed.

    A device that fails again within 60 s of its recovery continues with the next delay, so that one that fails at every
    use is not tried every second. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._probing = False
        self._retry_at_s = 0.0
        self._delay_s = _FIRST_DELAY_S
        self._recovered_at_s = float("-inf")
        #: Failures (becoming slow included), and trials of a failed device.
        self.n_failures = 0
        self.n_probes = 0

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def slow(self) -> bool:
        """Whether it is only slow: it failed in no other way since."""
        return isinstance(self._failure, DeviceSlowError)

    def fail(self, error: BaseException, now_s: float) -> bool:
        """Marks as failed, or as slow by a :class:`DeviceSlowError`; False when it was already so or worse."""
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
        """Starts a trial; False when the device has not failed or another trial is running."""
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
        """Ends the trials of a device that can never work."""
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


def _forget_frames(error: BaseException | None) -> None:
    """Of an error that is kept: its frames would keep a batch, the sessions of its requests, and device memory."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class TierHealth(DeviceHealth):
    """The health of one tier's device, with its clock and log messages. Thread-safe."""

    def __init__(self, label: Callable[[], str], clock: Callable[[], float]) -> None:
        """
        Args:
            label: the device's name in the log; it may change when a busy device becomes free.
            clock: seconds, monotonic.
        """
        super().__init__()
        self._label = label
        self._clock = clock

    def note(self, error: BaseException) -> None:
        """Marks the device as failed, or slow. Logged once a failure."""
        if self.fail(error, self._clock()):
            _log.error("device %s failed, its lists are served by the host: %r", self._label(), error)
            _log.debug("where it failed", exc_info=error)
            _forget_frames(error)

    def probe(
        self,
        attempt: Callable[[], None],
        trial: Callable[[], None] | None,
        never: Callable[[BaseException], bool] = lambda _: False,
    ) -> Probe | None:
        """The move that tries the device; None when it has not failed or another trial is running.

        Args:
            attempt: tries a failed device; raises what is wrong.
            trial: tries a slow one instead; None: it counts as recovered.
            never: whether an error is permanent. Then no trial is due any more.
        """

        def ended(error: BaseException | None) -> None:
            if error is not None and never(error):
                self.retire()
                return
            self.end_probe(works=error is None, now_s=self._clock())
            if error is None:
                _log.warning("device %s works again after %d trial(s)", self._label(), self.n_probes)
            else:
                # Debug only: the failure itself was logged as an error.
                _log.debug("device %s does not work yet: %r", self._label(), error)

        if not self.begin_probe():
            return None
        return Probe((trial or _nothing) if self.slow else attempt, ended)


def _nothing() -> None:
    """The trial of a slow device whose owner has none."""
