"""Patience: a session's search waits for lists on their way to a device where that is faster (TeleRAG, Appendix B).

The paper's second case moves more than fits behind generation, where what this saves the search is worth waiting for.
Its budget decides which lists set out (:mod:`hybridindex.partitioner.lookahead`); here it is decided, when the search
comes, for how many of them it waits: by then it is known which lists it probes and which of them are still to land.
A search that waits is in no batch and holds nothing. Answers do not depend on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.router.batch import Request
from hybridindex.router.deadline import Line, PaceEstimator
from hybridindex.router.stages import LOOKAHEAD_WAIT
from hybridindex.router.stats import StatsCounter
from hybridindex.tiers.device import DeviceTier
from hybridindex.tiers.residency import ResidencyStore
from hybridindex.types import F64, I64

__all__ = ["Flight", "Patience", "Wait", "choose_wait"]

_log = logging.getLogger(__name__)

#: What waiting must save at least, in seconds and as a part of the whole: a search that waits is quantized twice, and
#: predictions are not that good.
_LEAST_GAIN_S = 5e-4
_LEAST_GAIN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """For how many lists a search waits, and how long."""

    #: The first to land.
    n_lists: int
    #: Until they have landed, as predicted.
    seconds: float
    #: From when on searching at once would have been faster, even if they landed then.
    limit_s: float


def choose_wait(landing_s: F64, work: I64, host_bytes: int, device_bytes: int, host: Line, device: Line) -> Wait | None:
    """The wait that minimises t + max(t_host, t_device); None where searching at once is best, or as good as best.

    Args:
        landing_s: (m,) float64 ascending, seconds from now at which each coming list lands.
        work: (m,) int64 bytes that the search would scan of each; 0 where it does not probe it.
        host_bytes: bytes that the host would scan now, the coming lists among them.
        device_bytes: bytes that devices would scan now.
        host, device: seconds of a scan, by bytes; nothing to scan takes none.
    """
    there = np.concatenate(([0], np.cumsum(work)))
    waits = np.concatenate(([0.0], landing_s))
    total = waits + np.maximum(_seconds(host, host_bytes - there), _seconds(device, device_bytes + there))
    best = int(np.argmin(total))
    gain = total[0] - total[best]
    if best == 0 or gain < max(_LEAST_GAIN_S, _LEAST_GAIN * total[0]):
        return None
    return Wait(n_lists=best, seconds=float(waits[best]), limit_s=float(waits[best] + gain))


def _seconds(line: Line, nbytes: I64) -> F64:
    start, slope = line
    seconds: F64 = np.where(nbytes > 0, np.maximum(0.0, start + slope * nbytes), 0.0)
    return seconds


@dataclass(slots=True, eq=False)
class Flight:
    """Lists of one lookahead on their way to one device, from :meth:`Patience.begin` to :meth:`Patience.end`."""

    ordinal: int
    #: (m,) int64 in the order in which they are sent.
    lists: I64
    started_s: float


@dataclass(slots=True, eq=False)
class _Waiting:
    request: Request
    resubmit: Callable[[Request], None]
    #: (m,) int64 that it waits for.
    lists: I64
    since_s: float
    until_s: float


class Patience:
    """Owner of what is known of lists on their way, of the searches that wait for some, and of a thread. Thread-safe;
    :meth:`close` lets all searches go and joins the thread."""

    def __init__(
        self,
        tiers: Sequence[DeviceTier],
        residency: ResidencyStore,
        list_bytes: I64,
        page_bytes: I64,
        host_pace: PaceEstimator,
        device_pace: PaceEstimator,
        stats: StatsCounter,
    ) -> None:
        """
        Args:
            tiers: where lists come one by one.
            list_bytes: (nlist,) int64 code bytes.
            page_bytes: (nlist,) int64 device bytes of each list, page rounding included.
            host_pace: what host scans take.
            device_pace: what device scans take, whichever device's.
        """
        self._tiers = {tier.ordinal: tier for tier in tiers}
        self._residency = residency
        self._list_bytes = np.append(list_bytes, 0)
        self._page_bytes = page_bytes
        self._host_pace, self._device_pace = host_pace, device_pace
        self._stats = stats
        #: Held for moments; notified when lists landed or a flight ended while a search waits.
        self._changed = threading.Condition()
        #: By device, first come, first served as they are sent.
        self._flights: dict[int, list[Flight]] = {ordinal: [] for ordinal in self._tiers}
        #: By device: seconds of a flight, by bytes; and when the last one ended.
        self._copy_pace = {ordinal: PaceEstimator() for ordinal in self._tiers}
        self._free_since_s = dict.fromkeys(self._tiers, 0.0)
        self._waiting: list[_Waiting] = []
        self._closed = False
        residency.listeners.append(self._landed)
        self._thread = threading.Thread(target=self._run, name="hybridindex-patience", daemon=True)
        if self._tiers:
            self._thread.start()

    # For lookahead

    def begin(self, ordinal: int, lists: Sequence[int]) -> Flight:
        """``lists`` are about to be sent to a device, in this order, after all flights that began before."""
        flight = Flight(ordinal, np.array(lists, dtype=np.int64), time.monotonic())
        with self._changed:
            self._flights[ordinal].append(flight)
        return flight

    def end(self, flight: Flight, nbytes: int) -> None:
        """Nothing of ``flight`` is on its way any more; ``nbytes`` of pages have landed."""
        now = time.monotonic()
        with self._changed:
            self._flights[flight.ordinal].remove(flight)
            # It began to move when the one before it had ended.
            began_s = max(flight.started_s, self._free_since_s[flight.ordinal])
            self._free_since_s[flight.ordinal] = now
            self._copy_pace[flight.ordinal].observe(nbytes, now - began_s)
            self._changed.notify()

    def _landed(self) -> None:
        """Some list was published. Called by whoever did that, so mostly for nobody."""
        if self._waiting:
            with self._changed:
                self._changed.notify()

    # For searches

    def takes(
        self,
        request: Request,
        probes: I64,
        list_device: npt.NDArray[np.int16],
        resubmit: Callable[[Request], None],
    ) -> bool:
        """Whether ``request`` waits; it is then given to ``resubmit`` when that is over, on another thread.

        Args:
            probes: (n, p) int64 lists that it probes; -1 = none.
            list_device: (nlist,) int16 who would scan each now; -1 = the host.
        """
        host, device = self._host_pace.line(), self._device_pace.line()
        if host is None or device is None:
            return False
        with self._changed:
            # Where the host scans faster than lists come, as on the stand-in, nothing more is looked at.
            coming, landing_s = self._coming(list_device, len(probes) * host[1])
        if not len(coming):
            return False
        probes = np.where(probes < 0, len(self._page_bytes), probes)
        work = self._list_bytes * np.bincount(probes.reshape(-1), minlength=len(self._list_bytes))
        on_device = np.append(list_device >= 0, False)
        host_bytes, device_bytes = int(work[~on_device].sum()), int(work[on_device].sum())
        wait = choose_wait(landing_s, work[coming], host_bytes, device_bytes, host, device)
        if wait is None:
            return False
        now, limit_s = time.monotonic(), wait.limit_s
        if request.deadline_s is not None:
            left = host_bytes - int(work[coming[: wait.n_lists]].sum())
            limit_s = min(limit_s, request.deadline_s - now - self._within_s(left))
            if limit_s < wait.seconds:
                return False
        lists = coming[: wait.n_lists]
        waiting = _Waiting(request, resubmit, lists[work[lists] > 0], now, now + limit_s)
        with self._changed:
            if self._closed:
                return False
            self._waiting.append(waiting)
            # Its last list may have landed meanwhile, and the thread knows nothing of its limit.
            self._changed.notify()
        return True

    def _coming(self, list_device: npt.NDArray[np.int16], host_slope: float) -> tuple[I64, F64]:
        """Lists on their way to devices that work, and in how many seconds each lands; in that order. Lock held.

        Not those of a device to which a byte takes longer than ``host_slope``, the most that its scan takes the host.
        """
        lists, landing = [], []
        for ordinal, flights in self._flights.items():
            line = self._copy_pace[ordinal].line()
            if not flights or line is None or line[1] >= host_slope or not self._tiers[ordinal].usable:
                continue
            ahead = np.concatenate([flight.lists for flight in flights])
            ahead = ahead[list_device[ahead] < 0]
            # What two flights bring lands with the first.
            ahead = ahead[np.sort(np.unique(ahead, return_index=True)[1])]
            lists.append(ahead)
            landing.append(_seconds(line, np.cumsum(self._page_bytes[ahead])))
        if not lists:
            return np.empty(0, np.int64), np.empty(0)
        landing_s = np.concatenate(landing)
        order = np.argsort(landing_s, kind="stable")
        return np.concatenate(lists)[order], landing_s[order]

    def _within_s(self, host_bytes: int) -> float:
        seconds = self._host_pace.predict(np.array([host_bytes], dtype=np.int64)) if host_bytes else None
        return 0.0 if seconds is None else float(seconds[0])

    # The own thread

    def _run(self) -> None:
        while True:
            with self._changed:
                going = self._take_going()
                if not going:
                    if self._closed:
                        return
                    due_s = min((waiting.until_s for waiting in self._waiting), default=None)
                    self._changed.wait(None if due_s is None else max(0.0, due_s - time.monotonic()))
                    continue
            for waiting in going:
                self._let_go(waiting)
            del going, waiting  # an idle thread must not keep the last search alive

    def _take_going(self) -> list[_Waiting]:
        """Those whose wait is over. Lock held."""
        if not self._waiting:
            return []
        list_device, now = self._residency.current.list_device, time.monotonic()
        coming = np.zeros(len(list_device), dtype=np.bool_)
        for flights in self._flights.values():
            for flight in flights:
                coming[flight.lists] = True
        coming &= list_device < 0
        going = [w for w in self._waiting if self._closed or now >= w.until_s or not coming[w.lists].any()]
        self._waiting = [waiting for waiting in self._waiting if waiting not in going]
        return going

    def _let_go(self, waiting: _Waiting) -> None:
        now, request = time.monotonic(), waiting.request
        self._stats.add_stages((), [(LOOKAHEAD_WAIT, waiting.since_s, now, now - waiting.since_s)])
        # The wait is a stage of its own, and no part of the queue's.
        request.submitted_s = time.perf_counter()
        try:
            waiting.resubmit(request)
        except BaseException as error:  # noqa: BLE001 - handed to who waits
            request.reply.fail(error)

    def owns_current_thread(self) -> bool:
        """Whether the own thread asks, in a callback of a search that failed."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Lets all searches go; from now on none waits. Joins the thread. Closing twice is harmless."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._tiers:
            self._thread.join()
        self._residency.listeners.clear()
