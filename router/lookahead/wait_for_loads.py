"""A session's search waits for lists on their way to a device where that is faster (TeleRAG, Appendix B).

The paper's second case moves more bytes than fit behind generation, if the search saves more than it waits. The budget
(:mod:`hybridindex.partitioner.lookahead_budget`) decides which lists are sent. This module decides, when the search
comes, for how many of them it waits: its probes are known then, and which of them have not landed. A search that waits
is in no batch and holds neither slot nor lease. Answers do not depend on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hybridindex.processes import weakly
from hybridindex.router.batch.deadline import Line, PaceEstimator
from hybridindex.router.batch.parts import RouterParts
from hybridindex.router.batch.request import Request
from hybridindex.router.batch.stages import LOOKAHEAD_WAIT
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.types import F64, I32, I64

__all__ = ["Flight", "Wait", "WaitForLoads", "choose_wait"]

_log = logging.getLogger(__name__)

#: What waiting must save at least, in seconds and as a part of the whole: a search that waits is quantized twice and
#: woken by two threads, and predictions are not that good.
_LEAST_GAIN_S = 1e-3
_LEAST_GAIN = 0.1
#: Longest wait, whatever is predicted.
_LONGEST_S = 1.0
#: One search in so many that would wait begins at once. Otherwise the host would scan nothing, and a wrong estimate of
#: its pace would never be corrected.
_BEGIN_ANYWAY = 16


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
        host, device: seconds of a scan, by bytes. What the host takes for nothing is not saved: it is known too badly.
    """
    there = np.concatenate(([0], np.cumsum(work)))
    waits = np.concatenate(([0.0], landing_s))
    total = waits + np.maximum(host[0] + host[1] * (host_bytes - there), _seconds(device, device_bytes + there))
    best = int(np.argmin(total))
    gain = total[0] - total[best]
    if best == 0 or gain < max(_LEAST_GAIN_S, _LEAST_GAIN * total[0]):
        return None
    return Wait(n_lists=best, seconds=float(waits[best]), limit_s=float(waits[best] + gain))


def _seconds(line: Line, nbytes: I64 | np.int64) -> F64:
    """Of a scan or copy; nothing takes none."""
    start, slope = line
    seconds: F64 = np.where(nbytes > 0, np.maximum(0.0, start + slope * nbytes), 0.0)
    return seconds


@dataclass(slots=True, eq=False)
class Flight:
    """Lists of one lookahead on their way to one device, from :meth:`WaitForLoads.begin` to its ``end``."""

    ordinal: int
    #: (m,) int64 in the order in which they are sent.
    lists: I64
    started_s: float


@dataclass(slots=True, eq=False)
class _Route:
    """Lists on their way to one device."""

    tier: DeviceTier
    #: First come, first sent.
    flights: list[Flight] = field(default_factory=list)
    #: Seconds of a flight, by bytes of pages.
    pace: PaceEstimator = field(default_factory=PaceEstimator)
    #: When a flight ended last, and when something landed last.
    free_since_s: float = 0.0
    landed_s: float = 0.0

    def is_faster_than(self, seconds_per_byte: float) -> bool:
        """Whether something is on its way to a device that works, and comes faster than that."""
        if not self.flights or not self.tier.usable:
            return False
        line = self.pace.line()
        return line is not None and line[1] < seconds_per_byte


@dataclass(slots=True, eq=False)
class _Waiting:
    request: Request
    resubmit: Callable[[Request], None]
    #: (m,) int64 that it waits for.
    lists: I64
    since_s: float
    until_s: float


class WaitForLoads:
    """Owner of what is known of lists on their way, of the searches that wait for some, and of a thread. Thread-safe;
    :meth:`close` lets all searches go and joins the thread."""

    def __init__(self, parts: RouterParts) -> None:
        self._residency = residency = parts.residency
        #: (nlist,) int64 code bytes.
        self._list_bytes = parts.index.list_bytes
        self._page_bytes = parts.device_list_bytes
        #: For deadlines; and what device scans take.
        self._host_pace, self._device_pace = parts.host_pace, parts.device_pace
        #: Seconds of the host, by bytes. A free line: where sizes say nothing of the slope it is flat, and nobody
        #: waits. One from the origin would make a small scan's fixed costs those of every byte.
        self._host_line = PaceEstimator(through_origin=0.0)
        self._stats = parts.stats
        #: Held for moments; notified when lists landed or a flight ended while a search waits.
        self._changed = threading.Condition()
        self._routes = {tier.ordinal: _Route(tier) for tier in parts.paged}
        self._waiting: list[_Waiting] = []
        self._n_worth_it = 0
        self._closed = False
        residency.listeners.append(self._published)
        self._thread = threading.Thread(
            target=weakly(self, WaitForLoads._run), name="hybridindex-wait-for-loads", daemon=True
        )
        if parts.paged:
            self._thread.start()

    # For lookahead

    def begin(self, ordinal: int, lists: Sequence[int]) -> Flight:
        """``lists`` are about to be sent to a device, in this order, after all flights that began before."""
        flight = Flight(ordinal, np.array(lists, dtype=np.int64), time.monotonic())
        with self._changed:
            self._routes[ordinal].flights.append(flight)
        return flight

    def end(self, flight: Flight, nbytes: int) -> None:
        """Nothing of ``flight`` is on its way any more; ``nbytes`` of pages have landed."""
        now, route = time.monotonic(), self._routes[flight.ordinal]
        with self._changed:
            if route.flights[0] is flight:  # else it never set out
                # It began to move when the one before it had ended.
                route.pace.observe(nbytes, now - max(flight.started_s, route.free_since_s))
                route.free_since_s = now
            route.flights.remove(flight)
            self._changed.notify()

    def _published(self, loads: Mapping[int, tuple[int, I32]]) -> None:
        """Lists landed. Called on the thread that published them; mostly no search waits."""
        for ordinal, _ in loads.values():
            if ordinal in self._routes:
                self._routes[ordinal].landed_s = time.monotonic()
            break  # all of one load are of one device
        if self._waiting:
            with self._changed:
                self._changed.notify()

    # For searches

    def note_host(self, nbytes: int, seconds: float) -> None:
        """The host took so long for so many bytes of a batch."""
        if self._routes:
            self._host_line.observe(nbytes, seconds)

    def takes(
        self,
        request: Request,
        probes: I64,
        list_device: npt.NDArray[np.int16],
        beside_bytes: int,
        resubmit: Callable[[Request], None],
    ) -> bool:
        """Whether ``request`` waits; it is then given to ``resubmit`` when that is over, on another thread.

        Args:
            probes: (n, p) int64 lists that it probes; -1 = none.
            list_device: (nlist,) int16 who would scan each now; -1 = the host.
            beside_bytes: bytes that the host scans meanwhile for the others of its batch.
        """
        try:
            waiting = self._decide(request, probes, list_device, beside_bytes, resubmit)
        except Exception:  # noqa: BLE001 - a search that does not wait is right, too
            _log.exception("whether a search waits for lists could not be told")
            return False
        if waiting is None:
            return False
        with self._changed:
            if self._closed:
                return False
            self._n_worth_it += 1
            if self._n_worth_it % _BEGIN_ANYWAY == 0:
                return False
            self._waiting.append(waiting)
            # Its last list may have landed meanwhile, and the thread knows nothing of its limit.
            self._changed.notify()
        return True

    def _decide(
        self,
        request: Request,
        probes: I64,
        list_device: npt.NDArray[np.int16],
        beside_bytes: int,
        resubmit: Callable[[Request], None],
    ) -> _Waiting | None:
        host, device = self._host_line.line(), self._device_pace.line()
        if host is None or device is None:
            return None
        # Where the host scans a list for all queries faster than it comes, nothing more is looked at.
        routes = [route for route in self._routes.values() if route.is_faster_than(len(probes) * host[1])]
        if not routes:
            return None
        # By the lists that it probes: an array over all lists may be large.
        probed, times = np.unique(probes[probes >= 0], return_counts=True)
        work = self._list_bytes[probed] * times
        on_device = list_device[probed] >= 0
        host_bytes, device_bytes = int(work[~on_device].sum()), int(work[on_device].sum())
        if host[1] * host_bytes < _LEAST_GAIN_S:
            return None
        coming, landing_s = self._coming(list_device, routes)
        if not len(coming):
            return None
        at = np.minimum(np.searchsorted(probed, coming), len(probed) - 1)
        saved = np.where(probed[at] == coming, work[at], 0)
        # Others of the batch that it leaves are scanned before it.
        landing_s = np.maximum(landing_s, _seconds(host, np.int64(beside_bytes)))
        wait = choose_wait(landing_s, saved, host_bytes, device_bytes, host, device)
        if wait is None:
            return None
        now, limit_s = time.monotonic(), min(wait.limit_s, _LONGEST_S)
        if request.deadline_s is not None:
            moved = int(saved[: wait.n_lists].sum())
            there_s = float(_seconds(device, np.int64(device_bytes + moved)))
            limit_s = min(limit_s, self._spare_s(request.deadline_s - now, host_bytes, host_bytes - moved, there_s))
        if limit_s < wait.seconds:
            return None
        lists = coming[: wait.n_lists][saved[: wait.n_lists] > 0]
        return _Waiting(request, resubmit, lists, now, now + limit_s)

    def _spare_s(self, left_s: float, host_bytes: int, rest_bytes: int, device_s: float) -> float:
        """How much of ``left_s`` a search may wait before its deadline.

        Where the host alone keeps it, copies that stall must not cost lists; else what is left after the wait must fit.
        """
        alone_s = self._within_s(host_bytes)
        return left_s - (alone_s if alone_s <= left_s else max(self._within_s(rest_bytes), device_s))

    def _within_s(self, host_bytes: int) -> float:
        seconds = self._host_pace.predict(np.array([host_bytes], dtype=np.int64)) if host_bytes else None
        return 0.0 if seconds is None else float(seconds[0])

    def _coming(self, list_device: npt.NDArray[np.int16], routes: Sequence[_Route]) -> tuple[I64, F64]:
        """Lists on their way, and in how many seconds each lands; in that order."""
        lists, landing, now = [], [], time.monotonic()
        for route in routes:
            line = route.pace.line()
            with self._changed:
                flights = list(route.flights)
            if not flights or line is None:
                continue
            ahead = np.concatenate([flight.lists for flight in flights])
            ahead = _once(ahead[list_device[ahead] < 0])
            # Of what is under way now, some time has passed already.
            passed_s = now - max(flights[0].started_s, route.free_since_s, route.landed_s)
            lists.append(ahead)
            landing.append(np.maximum(0.0, _seconds(line, np.cumsum(self._page_bytes[ahead])) - passed_s))
        if not lists:
            return np.empty(0, np.int64), np.empty(0)
        coming, landing_s = np.concatenate(lists), np.concatenate(landing)
        order = np.argsort(landing_s, kind="stable")
        # Of a list on its way to two devices, the one that lands first counts.
        order = order[np.sort(np.unique(coming[order], return_index=True)[1])]
        return coming[order], landing_s[order]

    # The own thread

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
        except BaseException:  # noqa: BLE001 - nobody may wait for a dead thread
            _log.exception("searches wait for no lists any more")
            with self._changed:
                self._closed, left, self._waiting = True, self._waiting, []
            for waiting in left:
                self._let_go(waiting)

    def _run_once(self) -> bool:
        """Lets go whose wait is over, or waits until something happens; False after the last, once closed."""
        with self._changed:
            going = self._take_going()
            if not going:
                if self._closed:
                    return False
                due_s = min((waiting.until_s for waiting in self._waiting), default=None)
                self._changed.wait(None if due_s is None else max(0.0, due_s - time.monotonic()))
        for waiting in going:
            self._let_go(waiting)
        return True

    def _take_going(self) -> list[_Waiting]:
        """Those whose wait is over. Lock held."""
        if not self._waiting:
            return []
        list_device, now = self._residency.current.list_device, time.monotonic()
        coming = np.zeros(len(list_device), dtype=np.bool_)
        for route in self._routes.values():
            for flight in route.flights:
                coming[flight.lists] = True
        coming &= list_device < 0
        going = [w for w in self._waiting if self._closed or now >= w.until_s or not coming[w.lists].any()]
        self._waiting = [waiting for waiting in self._waiting if waiting not in going]
        return going

    def _let_go(self, waiting: _Waiting) -> None:
        """Never raises."""
        now, request = time.monotonic(), waiting.request
        waited_s = now - waiting.since_s
        # A stage of its own, and no part of the queue's time.
        request.submitted_s += waited_s
        try:
            waiting.resubmit(request)
            self._stats.add_stages((), [(LOOKAHEAD_WAIT, waiting.since_s, now, waited_s)])
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
        if self._routes:
            self._thread.join()
        with suppress(ValueError):
            self._residency.listeners.remove(self._published)


def _once(lists: I64) -> I64:
    """Each list once, where it comes first."""
    return lists[np.sort(np.unique(lists, return_index=True)[1])]
