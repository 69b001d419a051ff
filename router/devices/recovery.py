"""A thread that tries failed and slow devices again, with back-off, and brings lists of the plan that are missing.

:class:`hybridindex.tiers.contract.tier.Tier` says how a device is tried and when; for slow ones
:mod:`hybridindex.router.devices.health` scans.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from hybridindex.errors import RouterClosedError
from hybridindex.processes import weakly
from hybridindex.tiers.contract.bounded_join import LOOK_S
from hybridindex.tiers.contract.tier import Tier

__all__ = ["Recovery"]

_log = logging.getLogger(__name__)

#: Longest wait for one trial while other devices may need theirs; its end is then found at a later look.
_TRIAL_WAIT_S = 10.0
#: Between two looks at the devices; the shortest back-off is as long.
_INTERVAL_S = 1.0


class Recovery:
    """Owner of the thread. :meth:`close` joins it. Without devices there is none."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        restore: Callable[[Tier], None],
        complete: Callable[[], None],
        trial_of: Callable[[Tier], Callable[[], None] | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = _INTERVAL_S,
        trial_wait_s: float = _TRIAL_WAIT_S,
    ) -> None:
        """
        Args:
            restore: called on the thread with a device that works again.
            complete: called on the thread at each look: lists that found no room may find it now.
            trial_of: how a slow device is tried; None for one that is not.
            clock: of the tiers, seconds.
        """
        self._tiers = tiers
        self._restore = restore
        self._complete = complete
        self._trial_of = trial_of
        self._clock = clock
        self._interval_s = interval_s
        self._trial_wait_s = trial_wait_s
        #: Trials that go on.
        self._trials: dict[int, Future[bool]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=weakly(self, Recovery._run), name="hybridindex-recovery", daemon=True)
        if tiers:
            self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.try_failed()
            try:
                self._complete()
            except Exception:  # noqa: BLE001 - devices that fail later still need this thread
                _log.exception("missing lists could not be brought")

    def try_failed(self) -> None:
        """Tries each failed device whose next trial is due, and waits for the outcome, for a bounded time."""
        for tier in self._tiers:
            going_on = self._trials.pop(tier.ordinal, None)
            if going_on is None and not tier.retry_due(self._clock()):
                continue
            try:
                trial = going_on or tier.recover(self._trial_of(tier))
                if self._outcome(trial, self._trial_wait_s if going_on is None else 0):
                    self._restore(tier)
            except TimeoutError:
                self._trials[tier.ordinal] = trial
            except RouterClosedError:
                return
            except Exception:  # noqa: BLE001 - other devices, and later trials, still need this thread
                _log.exception("device %s could not be tried", tier.label)

    def _outcome(self, trial: Future[bool], trial_wait_s: float) -> bool:
        """What came of a trial.

        Raises:
            TimeoutError: it goes on, ``trial_wait_s`` later or when this thread shall end.
        """
        waited_s = 0.0
        while True:
            try:
                return trial.result(min(LOOK_S, trial_wait_s))
            except TimeoutError:
                waited_s += LOOK_S
                if waited_s >= trial_wait_s or self._stop.is_set():
                    raise

    def owns_current_thread(self) -> bool:
        """Whether the own thread asks."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Joins the thread; what it does is finished first, but for a trial that goes on."""
        self._stop.set()
        if self._tiers:
            self._thread.join()
