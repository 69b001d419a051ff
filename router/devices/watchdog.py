"""The watchdog: the host answers what a stuck device does not.

A scan on a device cannot be cancelled. It keeps its lease until it ends, and its answer is dropped: the host scans its
part. :mod:`hybridindex.router.devices.health` says what slow means and how a device comes back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from hybridindex.processes import weakly
from hybridindex.router.batch.batch import Batch
from hybridindex.router.batch.split import ProbePart
from hybridindex.router.devices.device_queue import DeviceQueue, DeviceTask, RowTask, ScanTask
from hybridindex.router.devices.health import HealthWatch

__all__ = ["Watchdog"]

_log = logging.getLogger(__name__)

#: Longest time between two looks.
_INTERVAL_S = 0.25


class Watchdog:
    """Owner of a thread that looks at scans under way, where any device is judged; at the end, of every device.
    :meth:`close` joins it."""

    def __init__(
        self,
        device_queues: Sequence[DeviceQueue],
        health: HealthWatch,
        scan_on_host: Callable[[Batch, ProbePart], None],
    ) -> None:
        """``scan_on_host``: scans and completes a part there, or fails its batch. Never raises."""
        self._all_queues = device_queues
        self._device_queues = [device_queue for device_queue in device_queues if health.judges(device_queue.tier)]
        self._health = health
        self._scan_on_host = scan_on_host
        self._interval_s = min(_INTERVAL_S, health.policy.stuck_s / 4)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=weakly(self, Watchdog._run), name="hybridindex-watchdog", daemon=True)
        if self._device_queues:
            self._thread.start()

    def watch_all(self) -> None:
        """The router closes and answers what is queued: no device may keep that for ever, whether it is judged or not.
        Once."""
        watched, self._device_queues = self._device_queues, list(self._all_queues)
        if self._device_queues and not watched:
            self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            for device_queue in self._device_queues:
                try:
                    self._look(device_queue)
                except Exception:  # noqa: BLE001 - other devices, and later scans, still need this thread
                    _log.exception("device %s could not be watched", device_queue.tier.label)

    def _look(self, device_queue: DeviceQueue) -> None:
        waiting = device_queue.waiting()
        for task in waiting:
            # Looks and not the clock: a process that was stopped for a while finds nothing stuck.
            task.looks += 1
        # What comes behind a scan that was taken over would wait as long.
        if device_queue.taken_over or any(self._is_stuck(task) for task in waiting):
            for task in waiting:
                if device_queue.take(task, apart=True):
                    try:
                        self._answer_instead(device_queue, task)
                    finally:
                        task.batch.end_scan()

    def _is_stuck(self, task: DeviceTask) -> bool:
        waited_s, stuck_s = task.looks * self._interval_s, self._health.policy.stuck_s
        if waited_s <= stuck_s:
            return False
        if isinstance(task, RowTask):
            expected_s = self._health.expected_rerank_s(task.n_candidates)
        else:
            assert isinstance(task, ScanTask)
            expected_s = self._health.expected_s(task.part.total_bytes)
        return waited_s > stuck_s + self._health.policy.slow_factor * expected_s

    def _answer_instead(self, device_queue: DeviceQueue, task: DeviceTask) -> None:
        part = task.part if isinstance(task, ScanTask) else None
        if device_queue.tier.failure is None:
            why = f"a scan has not ended after {task.looks * self._interval_s:.3g} s"
            if part is None:
                self._health.leave_out(device_queue.tier, why)
            else:
                self._health.exclude(task.batch, part, self._health.expected_s(part.total_bytes), why)
        started = time.perf_counter()
        task.run_on_host(self._scan_on_host)
        if part is not None:
            self._health.note_host(part, time.perf_counter() - started)
        task.give_back_slot()

    def owns_current_thread(self) -> bool:
        """Whether the own thread asks, in a callback of an answer."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Joins the thread; what it takes over is answered first."""
        self._stop.set()
        if self._device_queues:
            self._thread.join()
