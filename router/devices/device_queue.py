"""A device's queue of batch parts, and the thread that scans them one after the other.

Each part is answered once, by the device or by the host. It goes to the host when the scan fails, when the device is
slow (:mod:`hybridindex.router.devices.health`), or when the scan does not end
(:mod:`hybridindex.router.devices.watchdog`).
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from hybridindex.errors import DeviceSlowError, InvalidInputError, OutOfBudgetError
from hybridindex.router.batch.batch import Batch
from hybridindex.router.batch.comparison import Comparison
from hybridindex.router.batch.deadline import PaceEstimator
from hybridindex.router.batch.split import ProbePart
from hybridindex.router.batch.stages import device_scan
from hybridindex.tiers.contract.bounded_join import join_within
from hybridindex.tiers.contract.devices import is_out_of_memory
from hybridindex.tiers.contract.residency import Residency, ResidencyStore
from hybridindex.tiers.contract.tier import Tier
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.tiers.paged.page_scanner import PageScanner
from hybridindex.types import I64

__all__ = ["DeviceQueue", "DeviceTask", "RowTask", "ScanTask", "is_slow"]

_log = logging.getLogger(__name__)

#: Of scans that a device had no memory for.
_TOLD_EVERY_S = 60.0


def is_slow(tier: Tier) -> bool:
    """Whether a device is left out only because it is slow: its lists are intact."""
    return isinstance(tier.failure, DeviceSlowError)


class DeviceTask(ABC):
    """One part of one batch on its way to a device."""

    __slots__ = ("batch", "give_back_slot", "looks", "residency")

    def __init__(self, batch: Batch, residency: Residency, give_back_slot: Callable[[], None]) -> None:
        """``give_back_slot``: lets another batch start; does nothing the second time."""
        self.batch = batch
        self.residency = residency
        self.give_back_slot = give_back_slot
        #: How often it was seen under way; the watchdog's.
        self.looks = 0

    @abstractmethod
    def run_on(self, tier: Tier) -> Callable[[], None]:
        """Does it on the device, and returns what then answers. Raises whatever the device does."""

    @abstractmethod
    def run_on_host(self, scan_on_host: Callable[[Batch, ProbePart], None]) -> None:
        """Does it there, and answers. Never raises."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Gives ``error`` to who waits for it."""


class ScanTask(DeviceTask):
    """Probes to scan."""

    __slots__ = ("part",)

    def __init__(self, batch: Batch, part: ProbePart, residency: Residency, give_back_slot: Callable[[], None]) -> None:
        super().__init__(batch, residency, give_back_slot)
        self.part = part

    def run_on(self, tier: Tier) -> Callable[[], None]:
        batch, part = self.batch, self.part
        scanner, queries = tier.scanner(self.residency), batch.queries[part.rows]
        if batch.masks is None:
            found = scanner.scan(queries, part.probes, part.coarse_distances, batch.k)
        else:
            assert isinstance(scanner, PageScanner), "shards know no masks"
            masks = batch.masks.take(part.rows)
            found = scanner.scan(queries, part.probes, part.coarse_distances, batch.k, masks=masks)
        added = None
        if batch.added_there is not None:
            added = batch.added_there.scan(tier, queries, part.probes, batch.k_of_added)
        return lambda: batch.complete_part(part, *found, added)

    def run_on_host(self, scan_on_host: Callable[[Batch, ProbePart], None]) -> None:
        scan_on_host(self.batch, self.part)

    def fail(self, error: BaseException) -> None:
        self.batch.fail(error)


class RowTask(DeviceTask):
    """Candidates to compare, of a batch that searches codes: positions (n, r) int64 of rows that the device holds."""

    __slots__ = ("comparison", "positions")

    def __init__(
        self,
        batch: Batch,
        comparison: Comparison,
        positions: I64,
        residency: Residency,
        give_back_slot: Callable[[], None],
    ) -> None:
        super().__init__(batch, residency, give_back_slot)
        self.comparison = comparison
        self.positions = positions

    @property
    def n_candidates(self) -> int:
        return int(np.count_nonzero(self.positions >= 0))

    def run_on(self, tier: Tier) -> Callable[[], None]:
        assert isinstance(tier, DeviceTier), "shards hold no rows beside codes"
        distances = tier.row_pages(self.residency).distances(self.comparison.queries, self.positions)
        return lambda: self.comparison.complete(self.positions, distances)

    def run_on_host(self, scan_on_host: Callable[[Batch, ProbePart], None]) -> None:
        self.comparison.compare_instead(self.positions)

    def fail(self, error: BaseException) -> None:
        self.comparison.fail(error)


class DeviceQueue:
    """Owner of one device's queue and thread. Thread-safe."""

    def __init__(
        self,
        tier: Tier,
        residency: ResidencyStore,
        scan_on_host: Callable[[Batch, ProbePart], None],
        pace: PaceEstimator,
    ) -> None:
        """
        Args:
            scan_on_host: scans and completes a part there, or fails its batch. Never raises.
            pace: told what the device's scans take.
        """
        self.tier = tier
        self._residency = residency
        self._scan_on_host = scan_on_host
        self._pace = pace
        self._stage = device_scan(tier.ordinal)
        self._lock = threading.Lock()
        #: Not ended yet, oldest first. True: the part has somebody who answers it.
        self._open: dict[DeviceTask, bool] = {}
        self._queue: queue.SimpleQueue[DeviceTask | None] = queue.SimpleQueue()
        self._closed = False
        #: Whether the own thread waits for the device.
        self._scanning = False
        #: When a log line last said that memory was short; of the own thread.
        self._told_at = -math.inf
        self._thread = threading.Thread(target=self._run, name=f"hybridindex-device-{tier.ordinal}", daemon=True)
        self._thread.start()

    def put(self, task: DeviceTask) -> bool:
        """Queues a part. Its scan ends, for :meth:`Batch.end_scan`, when the device reads no page for it any more.
        False after :meth:`close`: nothing was queued."""
        with self._lock:
            if self._closed:
                return False
            self._open[task] = False
            self._queue.put(task)
        return True

    def waiting(self) -> list[DeviceTask]:
        """Parts that were not answered or taken over, oldest first. The device may be scanning the first."""
        with self._lock:
            return [task for task, taken in self._open.items() if not taken]

    @property
    def taken_over(self) -> bool:
        """Whether the device is still busy with a part that was answered without it."""
        with self._lock:
            return any(self._open.values())

    def take(self, task: DeviceTask, *, apart: bool = False) -> bool:
        """Takes the right to answer a part, for the first who asks while its scan goes on.

        ``apart``: on another thread than the own, so that the scan may end before the answer is there. The batch does
        not, until it is told with :meth:`Batch.end_scan` once more.
        """
        with self._lock:
            if self._open.get(task, True):
                return False
            self._open[task] = True
            if apart:
                task.batch.add_scan()
            return True

    def owns_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self, limit_s: float) -> bool:
        """Ends the thread after what is queued, and joins it.

        False: it is left behind, ``limit_s`` later, in a scan that does not end and whose part was answered without
        it.
        """
        with self._lock:
            self._closed = True
            self._queue.put(None)
        return join_within(self._thread, limit_s, lambda: self._scanning and not self.waiting())

    # The own thread

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                self._scan(task)
            except BaseException as error:  # noqa: BLE001 - nobody may wait for a dead thread
                _log.exception("a device part of a batch of %d queries failed", len(task.batch))
                task.fail(error)
            finally:
                with self._lock:
                    del self._open[task]
                task.batch.end_scan()
            # An idle thread must not keep the last batch alive.
            del task

    def _scan(self, task: DeviceTask) -> None:
        tier = self.tier
        if is_slow(tier):
            self._fall_back(task)
            return
        started = time.perf_counter()
        try:
            answer = self._scan_on_device(task)
            scan = task if isinstance(task, ScanTask) else None
            took_s = 0.0 if scan is None else scan.batch.clock.note(self._stage, started) - started
        except (OutOfBudgetError, InvalidInputError) as error:
            # Not the device's fault: this k does not fit its scratch, or the index was closed.
            if error.__cause__ is not None and is_out_of_memory(error.__cause__):
                self._tell_of_memory(error)
            self._fall_back(task)
        except Exception as error:  # noqa: BLE001 - whatever a device does, the host answers
            if is_out_of_memory(error):
                # Of this scan: others ask for less, or later. What the device holds stays.
                self._tell_of_memory(error)
                self._fall_back(task)
                return
            tier.fail(error)
            lost = self._residency.current.resident_lists(tier.ordinal)
            self._residency.publish({}, drops=lost.tolist())
            self._fall_back(task)
        else:
            if self.take(task):
                if scan is not None:
                    # Not what was given up: it says nothing of the next.
                    self._pace.observe(scan.part.total_bytes, took_s)
                answer()

    def _tell_of_memory(self, error: BaseException) -> None:
        now = time.monotonic()
        if now - self._told_at > _TOLD_EVERY_S:
            self._told_at = now
            _log.warning("device %s had no memory for a scan; the host made it: %s", self.tier.label, error)

    def _scan_on_device(self, task: DeviceTask) -> Callable[[], None]:
        self._scanning = True
        try:
            return task.run_on(self.tier)
        finally:
            self._scanning = False

    def _fall_back(self, task: DeviceTask) -> None:
        if self.take(task):
            task.run_on_host(self._scan_on_host)
