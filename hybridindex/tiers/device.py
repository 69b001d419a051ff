"""One device's tier: its arena, its budget, its mover thread and its state.

Lists get here by :meth:`DeviceTier.load` (asynchronous, on the mover thread) and leave by dropping them from the
residency. What should be resident is decided above; answers never depend on it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from hybridindex.errors import DeviceError, RouterClosedError
from hybridindex.index.ivf import IVFIndex
from hybridindex.paging import DEFAULT_PAGE_BYTES, PageGeometry, scratch_for_budget
from hybridindex.tiers.arena import PageArena
from hybridindex.tiers.device_native import NativePageScanner
from hybridindex.tiers.device_torch import TorchScanner
from hybridindex.tiers.device_triton import TritonScanner
from hybridindex.tiers.devices import resolve_device
from hybridindex.tiers.residency import Residency, ResidencyStore
from hybridindex.types import I32

__all__ = ["DeviceTier", "LoadReport"]

_log = logging.getLogger(__name__)

#: Lists written before a new snapshot is published: few enough that early searches find them, many enough that the
#: snapshot copy (one array entry per list) stays a small part of the work.
_PUBLISH_EVERY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What became of one load request."""

    loaded: tuple[int, ...]
    #: Lists that did not fit the free pages.
    skipped: tuple[int, ...]
    #: Lists that were resident already, here or on another device.
    present: tuple[int, ...]
    nbytes: int


class DeviceTier:
    """Owner of one device's arena.

    Threads: ``load`` and ``scanner`` may be called from any thread; the mover thread alone writes pages. ``close``
    joins it.
    """

    def __init__(
        self,
        index: IVFIndex,
        device_name: str,
        ordinal: int,
        *,
        budget_bytes: int,
        wanted_bytes: int,
        scratch_bytes: int | None = None,
        page_bytes: int = DEFAULT_PAGE_BYTES,
    ) -> None:
        """Allocates min(``wanted_bytes``, budget - scratch) bytes of pages on ``device_name``.

        Raises:
            DeviceNotFoundError, OutOfBudgetError, DeviceError, MissingDependencyError.
        """
        self.device, self.info = resolve_device(device_name)
        self.ordinal = ordinal
        self.budget_bytes = budget_bytes
        self._index = index
        self._codec = index.device_codec()
        self.geometry = PageGeometry.for_code_size(index.code_size, page_bytes)
        self.scratch_bytes = scratch_for_budget(budget_bytes) if scratch_bytes is None else scratch_bytes
        room = max(0, budget_bytes - self.scratch_bytes) // self.geometry.page_bytes
        wanted = -(-wanted_bytes // self.geometry.page_bytes)
        n_pages = int(min(room, wanted)) if self._codec is not None else 0
        #: Why this device holds nothing, when it cannot; shown by statistics and explain.
        self.disabled_reason = ""
        if self._codec is None:
            self.disabled_reason = f"codec {index.codec!r} is scanned on the host only"
        elif room < 1:
            self.disabled_reason = f"budget of {budget_bytes:,} bytes is below one page plus scratch"
        self.arena = PageArena(self.device, self.geometry, n_pages)
        self._failure: BaseException | None = None
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._mover = threading.Thread(target=self._run_mover, name=f"hybridindex-mover-{ordinal}", daemon=True)
        self._close_lock = threading.Lock()
        self._closed = False
        self._mover.start()

    # State

    @property
    def label(self) -> str:
        return self.info.label

    @property
    def failure(self) -> BaseException | None:
        """What made this device fail, or None while it works."""
        return self._failure

    @property
    def usable(self) -> bool:
        return self._failure is None and not self.disabled_reason and self.arena.pages.n_pages > 0

    @property
    def used_bytes(self) -> int:
        """Bytes of pages in use, readers of older snapshots included."""
        return (self.arena.pages.n_pages - self.arena.pages.n_free) * self.geometry.page_bytes

    def fail(self, error: BaseException) -> None:
        """Marks the device as failed: nothing is loaded or scanned here until :meth:`recover`. Logged once."""
        if self._failure is None:
            self._failure = error
            _log.error("device %s failed, its lists are served by the host: %r", self.label, error)

    def recover(self) -> None:
        """Lets the device take lists again."""
        self._failure = None

    # Scan

    def scanner(self, residency: Residency) -> TorchScanner:
        """A scanner over this device's lists of one leased snapshot.

        Raises:
            DeviceError: the device failed, or cannot scan this index.
        """
        if self._failure is not None:
            raise DeviceError(f"device {self.label} has failed: {self._failure!r}")
        if self._codec is None:
            raise DeviceError(self.disabled_reason)
        reason = TritonScanner.unsupported(self.arena)
        kind: type[TorchScanner] = TorchScanner if reason else TritonScanner
        if NativePageScanner.supports(self._codec, self.arena):
            kind = NativePageScanner
        scanner = kind(self._index, self._codec, self.arena, residency, self.ordinal, self.scratch_bytes)
        scanner.passed_over = reason
        return scanner

    # Movement

    def load(
        self, lists: Sequence[int], store: ResidencyStore, cancelled: Callable[[], bool] | None = None
    ) -> Future[LoadReport]:
        """Queues the copy of ``lists``, in order, and returns at once. What does not fit is skipped, never split.

        Lists become visible to new leases a few at a time. ``cancelled`` is asked before each list.
        """
        future: Future[LoadReport] = Future()
        future.set_running_or_notify_cancel()

        def job() -> None:
            try:
                future.set_result(self._load(lists, store, cancelled))
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits; the device is marked
                self.fail(error)
                future.set_exception(error)

        with self._close_lock:
            if self._closed:
                raise RouterClosedError("the device tier is closed")
            self._queue.put(job)
        return future

    def _load(self, lists: Sequence[int], store: ResidencyStore, cancelled: Callable[[], bool] | None) -> LoadReport:
        loaded: list[int] = []
        skipped: list[int] = []
        present: list[int] = []
        written: dict[int, tuple[int, I32]] = {}
        nbytes = 0
        try:
            for list_id in lists:
                size = int(self._index.list_sizes[list_id])
                if size == 0:  # nothing to move, nothing to scan
                    continue
                if store.current.list_device[list_id] >= 0 or list_id in written:
                    present.append(list_id)
                    continue
                stop = not self.usable or (cancelled is not None and cancelled())
                n_pages = int(self.geometry.pages_for(np.int64(size)))  # type: ignore[arg-type]
                pages = None if stop else self.arena.pages.allocate(n_pages)
                if pages is None:
                    skipped.append(list_id)
                    continue
                try:
                    self.arena.write(pages, self._index.list_codes(list_id))
                except BaseException:
                    self.arena.pages.free(pages)
                    raise
                written[list_id] = (self.ordinal, pages)
                nbytes += n_pages * self.geometry.page_bytes
                loaded.append(list_id)
                if len(written) >= _PUBLISH_EVERY:
                    store.publish(written)
                    written = {}
        finally:
            if written and self.usable:
                store.publish(written)
            else:
                for _, pages in written.values():
                    self.arena.pages.free(pages)
        return LoadReport(loaded=tuple(loaded), skipped=tuple(skipped), present=tuple(present), nbytes=nbytes)

    def _run_mover(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            del job  # an idle thread must not keep the last one's lists alive

    def close(self) -> None:
        """Finishes queued copies, joins the mover, lets the arena's memory go. Nobody may scan any more."""
        with self._close_lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._mover.join()
        self.arena.release()
