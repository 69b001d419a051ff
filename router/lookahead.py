"""Lookahead: which lists to move for a draft query, and who holds them (TeleRAG, §4.1 and §4.2).

:func:`choose_lists` is pure. :class:`Lookahead` owns the thread that quantizes drafts and the count of sessions per
list. Moving bytes is :mod:`hybridindex.tiers.device`'s business; answers never depend on what has landed.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hybridindex.errors import RouterClosedError
from hybridindex.index.ivf import IVFIndex
from hybridindex.router.stats import StatsCounter
from hybridindex.tiers.device import DeviceTier, LoadReport
from hybridindex.tiers.residency import ResidencyStore
from hybridindex.types import F32, I64

__all__ = ["Holder", "Lookahead", "choose_lists"]

_log = logging.getLogger(__name__)


def choose_lists(
    probes: I64, list_bytes: I64, present: npt.NDArray[np.bool_], budget_bytes: int
) -> tuple[list[int], list[int]]:
    """Lists to move for a batch of draft queries, nearest first, rank by rank across the queries.

    Args:
        probes: (n, p) int64 probed lists, nearest first; -1 = none.
        list_bytes: (nlist,) int64 device bytes of each list, page rounding included.
        present: (nlist,) bool: resident already, costs nothing.
        budget_bytes: bytes that may move.

    Returns:
        The lists to move, and those that the budget left out. A list that does not fit is skipped and the next one
        tried; a list is never split.
    """
    chosen: list[int] = []
    left_out: list[int] = []
    seen: set[int] = set()
    for list_id in probes.T.reshape(-1).tolist():
        if list_id < 0 or list_id in seen or present[list_id]:
            continue
        seen.add(list_id)
        nbytes = int(list_bytes[list_id])
        if nbytes == 0:
            continue
        if nbytes <= budget_bytes:
            budget_bytes -= nbytes
            chosen.append(list_id)
        else:
            left_out.append(list_id)
    return chosen, left_out


@dataclass(eq=False, slots=True)
class Holder:
    """What one session holds. Owned by :class:`Lookahead`; sessions only keep the handle."""

    lists: set[int] = field(default_factory=set)
    closed: bool = False
    bytes_moved: int = 0
    lists_moved: int = 0
    lists_skipped: int = 0


class Lookahead:
    """Owner of lists that sessions hold on devices. Thread-safe; :meth:`close` joins its thread."""

    def __init__(
        self,
        index: IVFIndex,
        tiers: Sequence[DeviceTier],
        residency: ResidencyStore,
        stats: StatsCounter,
        prepare_thread: Callable[[], object],
    ) -> None:
        self._index = index
        self._tiers = tiers
        self._residency = residency
        self._stats = stats
        self._prepare_thread = prepare_thread
        self._lock = threading.Lock()
        #: list -> sessions that hold it. Lists of the plan are never in here.
        self._holders: dict[int, set[Holder]] = {}
        #: Lists that the plan owns, resident or on their way: no session holds or drops them.
        self._pinned: frozenset[int] = frozenset()
        self._closed = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hybridindex-lookahead", daemon=True)
        self._thread.start()

    def prefetch(self, holder: Holder, queries: F32, nprobe: int, budget_bytes: int) -> Future[None]:
        """Queues the move of what ``queries`` (n, scan_dim) will probe; returns at once.

        The future is done when the bytes have landed or the session was closed.
        """
        future: Future[None] = Future()
        # Bytes on their way cannot be called back: a caller who cancels only stops waiting.
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._closed:
                raise RouterClosedError("the router is closed")
            self._jobs.put(lambda: self._prefetch(holder, queries, nprobe, budget_bytes, future))
        return future

    def _prefetch(self, holder: Holder, queries: F32, nprobe: int, budget_bytes: int, future: Future[None]) -> None:
        try:
            tier = self._roomiest()
            if tier is None or holder.closed:
                future.set_result(None)
                return
            probes, _ = self._index.quantize(queries, nprobe)
            geometry = tier.geometry
            list_bytes = geometry.pages_for(self._index.list_sizes) * geometry.page_bytes
            present = self._residency.current.list_device >= 0
            self._share(holder, probes, present)
            with self._lock:  # rounds of one session share its budget
                held = int(list_bytes[list(holder.lists)].sum()) if holder.lists else 0
            chosen, left_out = choose_lists(probes, list_bytes, present, budget_bytes - held)
            report = tier.load(chosen, self._residency, cancelled=lambda: holder.closed)
            report.add_done_callback(lambda done: self._landed(holder, len(left_out), done, future))
        except Exception as error:  # noqa: BLE001 - handed to the caller
            _log.exception("a lookahead of %d queries failed", len(queries))
            future.set_exception(error)

    def _share(self, holder: Holder, probes: I64, present: npt.NDArray[np.bool_]) -> None:
        """Joins lists that other sessions brought, so that they stay while this session lives."""
        wanted = np.unique(probes[probes >= 0])
        with self._lock:
            if holder.closed:
                return
            for list_id in wanted[present[wanted]].tolist():
                if list_id in self._holders:
                    self._holders[list_id].add(holder)
                    holder.lists.add(list_id)

    def _landed(self, holder: Holder, n_left_out: int, done: Future[LoadReport], future: Future[None]) -> None:
        try:
            # A failed device is marked and logged by its tier; searches go to the host.
            if done.exception() is None:
                self._settle(holder, n_left_out, done.result())
        finally:
            future.set_result(None)

    def _settle(self, holder: Holder, n_left_out: int, report: LoadReport) -> None:
        drops: list[int] = []
        with self._lock:
            holder.bytes_moved += report.nbytes
            holder.lists_moved += len(report.loaded)
            holder.lists_skipped += len(report.skipped) + n_left_out
            for list_id in report.loaded:
                if list_id in self._pinned:
                    continue
                if not holder.closed:
                    self._holders.setdefault(list_id, set()).add(holder)
                    holder.lists.add(list_id)
                elif not self._holders.get(list_id):
                    drops.append(list_id)
            if not holder.closed:
                # Another session's lookahead brought these first.
                for list_id in report.present:
                    if list_id in self._holders:
                        self._holders[list_id].add(holder)
                        holder.lists.add(list_id)
            if drops:
                # Under the lock: nobody may adopt or share a list between the decision and the drop.
                self._residency.publish({}, drops=drops)
        self._stats.add(
            lookahead_lists=len(report.loaded),
            lookahead_bytes=report.nbytes,
            lookahead_skipped_lists=len(report.skipped) + n_left_out,
        )

    def release(self, holder: Holder) -> None:
        """Ends a session: lists that nobody else holds leave the device once their last reader is done."""
        drops: list[int] = []
        with self._lock:
            holder.closed = True
            for list_id in holder.lists:
                holders = self._holders.get(list_id)
                if holders is None:  # adopted by a plan meanwhile
                    continue
                holders.discard(holder)
                if not holders:
                    del self._holders[list_id]
                    drops.append(list_id)
            holder.lists = set()
            if drops:
                self._residency.publish({}, drops=drops)

    def adopt(self, lists: Sequence[int]) -> None:
        """A plan owns exactly these lists from now on, also those that a session's copy is still bringing."""
        with self._lock:
            self._pinned = frozenset(lists)
            for list_id in lists:
                self._holders.pop(list_id, None)

    def held(self) -> list[int]:
        """Lists that sessions hold, in no order."""
        with self._lock:
            return list(self._holders)

    def _roomiest(self) -> DeviceTier | None:
        usable = [tier for tier in self._tiers if tier.usable]
        return max(usable, key=lambda tier: tier.arena.pages.n_free, default=None)

    @property
    def n_held(self) -> int:
        """Lists that sessions hold."""
        with self._lock:
            return len(self._holders)

    def _run(self) -> None:
        self._prepare_thread()
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:  # noqa: BLE001 - later lookaheads still need this thread
                _log.exception("a lookahead failed")
            del job

    def close(self) -> None:
        """Finishes queued drafts and joins the thread. The device tiers are closed by their owner."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()
