"""The engine: takes everything that waits, quantizes, splits, scans on all tiers at once, answers as queries complete.

Threads: one engine thread for batching, coarse quantization and the host scan; one thread per device. The batches of
at most two turns are in flight, so that the host starts on the next one while a device finishes the last. A caller who
waits for the answer does the engine thread's work itself where nothing else is there to be done: waking two threads can
take longer than a small search. The main thread makes no batch: there, an interrupt (Ctrl-C) can come after any call,
and would leave a slot, a lease or an answer behind.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hybridindex.config import RouterConfig
from hybridindex.errors import RouterClosedError
from hybridindex.index.filters.row_filter import RowFilters
from hybridindex.index.live.state import LiveRows
from hybridindex.processes import weakly
from hybridindex.router.batch.added import find_added, scan_added
from hybridindex.router.batch.batch import Batch, RowsAt, given_probes
from hybridindex.router.batch.batching import MAX_BATCHES_IN_FLIGHT
from hybridindex.router.batch.comparison import Comparison
from hybridindex.router.batch.parts import RouterParts
from hybridindex.router.batch.replies import BlockingReply
from hybridindex.router.batch.reports import BatchReports
from hybridindex.router.batch.request import GivenProbes, Request, by_kind
from hybridindex.router.batch.split import HOST, ProbePart, split_among_nodes, split_probes
from hybridindex.router.batch.stages import COARSE, SPLIT, BatchClock, BatchReport
from hybridindex.router.devices.added_on_devices import AddedOnDevices
from hybridindex.router.devices.coarse import CoarseQuantization
from hybridindex.router.devices.device_queue import DeviceQueue, RowTask, ScanTask
from hybridindex.router.devices.health import HealthWatch
from hybridindex.router.devices.watchdog import Watchdog
from hybridindex.router.direct import DirectSearch
from hybridindex.router.filtered import FilteredSearches, Group
from hybridindex.router.host_parts import Begun, HostParts
from hybridindex.router.lookahead.wait_for_loads import WaitForLoads
from hybridindex.router.request_queue import RequestQueue
from hybridindex.router.slots import Slot, share_slot
from hybridindex.router.staying import StayingRequests
from hybridindex.router.turn import Turn
from hybridindex.tiers.contract.residency import Lease, Residency
from hybridindex.tiers.host.added_scanner import AddedScanner
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.types import F32, I64, SearchResult

if TYPE_CHECKING:
    from hybridindex.router.remote.remote_lists import RemoteChoice, RemoteLists

__all__ = ["Engine"]

_log = logging.getLogger(__name__)

#: Between looks whether it is idle.
_LOOK_S = 0.002
#: Begins a batch: see :meth:`Engine._start`.
_Start = Callable[[list[Request], Residency, Slot, Callable[[Batch], None]], "tuple[Batch, ProbePart | None, float]"]


class Engine:
    """Owner of the request queue, of its thread and of the device queues. ``submit`` from any thread."""

    def __init__(
        self,
        parts: RouterParts,
        wait_for_loads: WaitForLoads,
        config: RouterConfig,
        filters: RowFilters,
        listeners: Sequence[Callable[[BatchReport], None]],
        remote: RemoteLists | None = None,
    ) -> None:
        """
        Args:
            filters: what requests' filters were made by.
            wait_for_loads: asked which searches wait for lists on their way.
            listeners: told about every batch after it has ended; the owner may change what it holds.
            remote: asks other nodes of a cluster for lists and candidates that are not here; None: all are here.
        """
        self._index = index = parts.index
        self._integrity = index.integrity
        self._host = host = parts.host
        #: Whether faiss quantizes or scans, with threads that depend on the calling one.
        self._uses_faiss = host.pool is None or not index.quantizes_itself
        #: The last answer of :meth:`_any_rows`, and what it was for.
        self._rows_of: tuple[npt.NDArray[np.int16], bool] | None = None
        #: Where it scans codes: answers are estimates and positions, of which the exact distances follow.
        self._codes = codes = host if isinstance(host, HostRabitqScanner) else None
        self._reranker = None if codes is None else codes.reranker
        self._tiers, self._remote = parts.tiers, remote
        self._residency = parts.residency
        self._coarse = CoarseQuantization(parts, config.coarse_quantization)
        self._stats = parts.stats
        self._rerank_pace = parts.rerank_pace
        self._reports = BatchReports(parts.stats, listeners)
        self._added = AddedScanner(index, host)
        self._filtered = FilteredSearches(parts, filters, self._added, one_of_several=remote is not None)
        early = config.early_dispatch
        self._host_parts = HostParts(parts, self._added, self._filtered, wait_for_loads, early_dispatch=early)
        self.added_on_devices = AddedOnDevices(parts)
        #: For calls that concern nobody else; None: every one may.
        self._direct = None if parts.tiers or self._uses_faiss else DirectSearch(parts, self._added, remote)
        self._staying = StayingRequests(parts, wait_for_loads, weakly(self, Engine.submit))
        self._waiting = RequestQueue(config.max_batch)
        #: One token for each batch that may still start.
        self._slots: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(MAX_BATCHES_IN_FLIGHT):
            self._slots.put(None)
        #: Held while a batch is taken and its host part scanned.
        self._turn = Turn()
        self._close_lock = threading.Lock()
        self._closed = False
        fall_back = weakly(self, Engine._fall_back)
        self._device_queues: list[DeviceQueue] = []
        with ExitStack() as undo:
            for tier in parts.tiers:
                self._device_queues.append(DeviceQueue(tier, parts.residency, fall_back, parts.device_pace))
                undo.callback(self._device_queues[-1].close, 0.0)
            self.health = HealthWatch(config.health, self._device_queues, parts)
            self._watchdog = Watchdog(self._device_queues, self.health, fall_back)
            undo.callback(self._watchdog.close)
            self._thread = threading.Thread(target=self._run, name="hybridindex-engine", daemon=True)
            self._thread.start()
            undo.pop_all()

    def submit(self, request: Request) -> None:
        """Queues a request; its future gets the answer.

        Raises:
            RouterClosedError: the engine was closed.
        """
        with self._close_lock:
            if self._closed:
                raise RouterClosedError("the router is closed")
            self._waiting.put(request)

    def run(self, request: Request, reply: BlockingReply) -> SearchResult:
        """:meth:`submit`, and waits for ``reply``, the request's own.

        Raises:
            RouterClosedError: the engine was closed.
            Exception: whatever the search failed with.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if is_main or not self._turn.run(self._is_idle, lambda: self._run_here(request)):
            self.submit(request)
        return reply.wait()

    def search_directly(
        self,
        queries: F32,
        k: int,
        nprobe: int,
        kept: int,
        live: LiveRows | None = None,
        spare: int = 0,
        *,
        tell: bool = False,
    ) -> SearchResult | None:
        """Answers a call without a request, on the calling thread, where this concerns nobody else: there is no device
        and the engine is idle. None: it was not searched; :meth:`run` it.

        Args:
            queries: (n, scan_dim) float32, checked and transformed.
            kept, live, spare: as of a :class:`hybridindex.router.batch.request.Request`.
            tell: tells who listens on the calling thread; else nothing is searched where anybody does.

        Raises:
            Exception: whatever the search failed with.
        """
        direct = self._direct
        if direct is None or (self._reports.listeners and not tell):
            return None
        found = self._turn.run(self._is_idle, lambda: direct.search(queries, k, nprobe, kept, live, spare))
        if found is None:
            return None
        result, stages, candidates = found
        self._reports.tell_of_one(k, nprobe, len(queries), stages, candidates)
        return result

    def scan_directly(self, queries: F32, k: int, given: GivenProbes) -> SearchResult | None:
        """As :meth:`search_directly`, of lists that another node chose, whoever listens; None, too: one is not here."""
        direct = self._direct
        if direct is None:
            return None
        found = self._turn.run(self._is_idle, lambda: direct.scan(queries, k, given))
        if found is None:
            return None
        self._reports.tell_of_one(k, given.probes.shape[1], len(queries), found[1])
        return found[0]

    def _run_here(self, request: Request) -> bool:
        """Executes ``request`` on the calling thread, whose turn it is; False: too many batches are under way."""
        before = self._host.adopt_thread() if self._uses_faiss else 0
        try:
            self._slots.get_nowait()
            self._execute([request])
            return True
        except queue.Empty:
            return False
        finally:
            if self._uses_faiss:
                self._host.give_back_thread(before)

    def _is_idle(self) -> bool:
        return self._waiting.empty() and not self._closed

    def wait_idle(self, limit_s: float) -> None:
        """Until nothing waits and no batch is under way, for so long at most."""
        ends = time.monotonic() + limit_s
        while time.monotonic() < ends:
            if self._waiting.empty() and self._slots.qsize() == MAX_BATCHES_IN_FLIGHT:
                return
            time.sleep(_LOOK_S)

    def close(self) -> set[int]:
        """Answers what is queued, then joins all threads. Once.

        Returns:
            Ordinals of devices whose scan does not end: their threads are left behind.
        """
        with self._close_lock:
            self._closed = True
            self._waiting.end()
        self._watchdog.watch_all()
        self._thread.join()
        if self._remote is not None:
            self._remote.settle(self.health.policy.stuck_s)
        # For good: after this no caller runs a batch.
        self._turn.acquire()
        left: set[int] = set()
        for device_queue in self._device_queues:
            # All had the time that the first one took.
            if not device_queue.close(0 if left else self.health.policy.stuck_s):
                left.add(device_queue.tier.ordinal)
        self._watchdog.close()
        if self._remote is not None:  # what the last device scans had others compare
            self._remote.settle(self.health.policy.stuck_s)
        return left | self._coarse.close(self.health.policy.stuck_s)

    def owns_current_thread(self) -> bool:
        """Whether a callback or one of our own threads asks: waiting for an answer there would wait forever."""
        own = threading.current_thread() is self._thread or self._watchdog.owns_current_thread()
        own = own or self._turn.held_here()
        own = own or (self._remote is not None and self._remote.owns_current_thread())
        return own or any(device_queue.owns_current_thread() for device_queue in self._device_queues)

    # Engine thread

    def _run(self) -> None:
        try:
            self._host.adopt_thread()
            while self._run_once():
                pass
        except BaseException as error:  # noqa: BLE001 - the last resort: nobody may wait for a dead thread
            _log.exception("the engine stopped")
            with self._close_lock:
                self._closed = True
            self._waiting.fail(error)

    def _run_once(self) -> bool:
        """One batch; False when it was the last."""
        first = self._waiting.get()
        if first is None:
            return False
        requests = [first]
        with self._turn.of_engine():
            try:
                # Only now the rest: while a turn or a slot is waited for, requests gather and form one larger batch.
                self._slots.get()
                last = self._waiting.take(requests)
            except BaseException as error:
                for request in requests:
                    request.reply.fail(error)
                raise
            self._execute(requests)
        return not last

    def _execute(self, requests: list[Request]) -> None:
        """Never raises; takes the token of one batch."""
        *chosen, filtered = by_kind(self._wanted(requests))
        starts = (self._start, self._start_given, self._start_given)
        begins = [(batch, start) for batch, start in zip(chosen, starts, strict=True) if batch]
        slots = share_slot(self._slots, len(begins) or 1)
        # Devices and other nodes scan meanwhile.
        begun = [self._begin(batch, slot, start) for (batch, start), slot in zip(begins, slots, strict=False)]
        self._scan_here([each for each in begun if each is not None])
        if filtered:
            self._execute_filtered(filtered, None if begins else slots[0])
        elif not begins:
            slots[0].give_back()

    @staticmethod
    def _wanted(requests: Sequence[Request]) -> Sequence[Request]:
        """Without those that were cancelled while they waited: of hedges that lost, for example."""
        wanted = [request.reply.wanted for request in requests]
        if all(wanted):
            return requests
        for request, is_wanted in zip(requests, wanted, strict=True):
            if not is_wanted:
                request.reply.fail(CancelledError())
        return [request for request, is_wanted in zip(requests, wanted, strict=True) if is_wanted]

    def _next_slot(self) -> Slot:
        self._slots.get()
        return share_slot(self._slots)[0]

    def _execute_filtered(self, requests: Sequence[Request], slot: Slot | None) -> None:
        """What devices or other nodes have a part of goes first. ``slot``: of a batch; None: one is waited for."""
        clock = BatchClock()
        list_device = self.health.list_device(self._residency.current)
        batches, rest = self._filtered.batches(self._filtered.choose(requests, clock, list_device), list_device)
        for groups, on_devices in batches:
            own, start = [r for group in groups for r in group.requests], partial(self._start_masked, groups, clock)
            begun = self._begin(own, slot or self._next_slot(), partial(start, on_devices))
            self._scan_here([begun] if begun is not None else [])
            slot, clock = None, BatchClock()
        if slot is not None:
            slot.give_back()
        for group in rest:
            self._answer_filtered(group, clock)
            clock = BatchClock()

    def _answer_filtered(self, group: Group, clock: BatchClock) -> None:
        n_rows = self._filtered.answer(group, clock)
        requests, n = group.requests, len(group.queries)
        nprobe = requests[0].nprobe
        self._reports.tell(requests, clock, clock.times(), n_queries=n, nprobe=nprobe, candidates=n_rows)

    def _begin(self, requests: list[Request], slot: Slot, start: _Start) -> Begun | None:
        """None: it failed. ``start``: begins it, or raises and leaves that to nobody."""
        lease: Lease | None = None

        def finished(batch: Batch | None = None) -> None:
            try:
                if lease is not None:
                    lease.release()
                if batch is not None and batch.added_there is not None:
                    batch.added_there.release()
            finally:
                slot.give_back()
            if batch is not None:
                self._report(batch, self._search_again(batch) if batch.stale else ())

        try:
            lease = self._residency.lease()
            batch, host_part, chosen_s = start(requests, lease.residency, slot, finished)
        except BaseException as error:  # noqa: BLE001 - handed to those who wait
            _log.exception("a batch of %d requests failed before its scan", len(requests))
            for request in requests:
                request.reply.fail(error)
            finished()
            return None
        if not requests:  # all of them wait
            finished()
        return Begun(batch, host_part, chosen_s, slot)

    def _scan_here(self, begun: Sequence[Begun]) -> None:
        if self._remote is not None and any(each.batch.asks_others and each.batch.by_rows for each in begun):
            self._remote.wait_until_asked(sum(each.part.total_bytes for each in begun if each.part is not None))
        self._host_parts.scan(begun)
        for each in begun:
            if each.batch.asks_others:
                # They may wait for a batch of theirs that we scan a part of.
                each.slot.give_back()

    def _start(
        self, requests: list[Request], residency: Residency, slot: Slot, finished: Callable[[Batch], None]
    ) -> tuple[Batch, ProbePart | None, float]:
        """Quantizes, splits, and hands parts to the devices. Raises only before anything was handed over.

        Those of ``requests`` that wait for lists on their way leave it.

        Returns:
            The batch, the host's part, and when its lists were known.
        """
        batch = self._batch_of(requests)
        probes, coarse = self._coarse.quantize(batch.queries, batch.nprobe)
        quantized_s = batch.clock.note(COARSE, batch.clock.started_s)
        list_device = self.health.list_device(residency)
        not_here = damaged = self._integrity.quarantined
        if self._remote is not None:
            # Other nodes may have them; and the codes of all lists are here.
            not_here, damaged = not_here if self._codes is None else None, None
            list_device = self._remote.devices_here(list_device, not_here)
        if damaged is not None or any(request.may_wait for request in requests):
            left = np.ones(len(batch), dtype=np.bool_)
            if damaged is not None:
                self._staying.refuse_damaged(batch, requests, probes, damaged, left)
            self._staying.leave_out_waiting(batch, requests, probes, list_device, left)
            if not requests:
                return batch, None, quantized_s
            if not left.all():
                whole, batch = batch, self._batch_of(requests)
                batch.begin_as(whole)
                probes, coarse = probes[left, : batch.nprobe], coarse[left, : batch.nprobe]
        if len(requests) > 1 or requests[0].deadline_s is not None:
            self._staying.limit_probes(batch, probes, list_device, not_here)
        if self._codes is not None:
            coarse = self._codes.centre_products(batch.queries, probes, coarse)
        choice = None if self._remote is None else self._remote.choose(probes, not_here, by_codes=not batch.by_rows)
        host_part = self._hand_over(batch, probes, coarse, list_device, residency, slot, finished, quantized_s, choice)
        scan_added(batch, lambda: find_added(self._added, batch, probes))
        return batch, host_part, quantized_s

    def _start_given(
        self, requests: list[Request], residency: Residency, slot: Slot, finished: Callable[[Batch], None]
    ) -> tuple[Batch, ProbePart | None, float]:
        """:meth:`_start` of requests that say their lists, all of them here. With filters, or where other searches scan
        codes, the host compares their rows."""
        batch, chosen_s = self._batch_of(requests, by_rows=True), time.perf_counter()
        probes, coarse = given_probes(batch)
        damaged = self._integrity.quarantined
        if damaged is not None:
            left = np.ones(len(batch), dtype=np.bool_)
            self._staying.refuse_damaged(batch, requests, probes, damaged, left)
            if not requests:
                return batch, None, chosen_s
            if not left.all():
                whole, batch = batch, self._batch_of(requests, by_rows=True)
                batch.begin_as(whole)
                probes, coarse = given_probes(batch)
        list_device = self.health.list_device(residency)
        if self._filtered.mask_given(batch, probes) or self._codes is not None:
            list_device = np.full_like(list_device, HOST)
        host_part = self._hand_over(batch, probes, coarse, list_device, residency, slot, finished, chosen_s)
        return batch, host_part, chosen_s

    def _start_masked(
        self,
        groups: Sequence[Group],
        clock: BatchClock,
        on_devices: bool,
        requests: list[Request],
        residency: Residency,
        slot: Slot,
        finished: Callable[[Batch], None],
    ) -> tuple[Batch, ProbePart | None, float]:
        """:meth:`_start` of groups whose lists were chosen; ``clock``: meanwhile; ``on_devices``: devices scan, too."""
        batch, chosen_s = self._batch_of(requests, by_rows=True), time.perf_counter()
        probes, coarse = self._filtered.fill(batch, groups, clock)
        list_device = self.health.list_device(residency)
        if not on_devices:
            list_device = np.full_like(list_device, HOST)
        choice = None if self._remote is None else self._remote.choose(probes, self._integrity.quarantined)
        host_part = self._hand_over(batch, probes, coarse, list_device, residency, slot, finished, chosen_s, choice)
        scan_added(batch, lambda: self._filtered.find_added(groups, batch, probes))
        return batch, host_part, chosen_s

    def _hand_over(
        self,
        batch: Batch,
        probes: I64,
        coarse: F32,
        list_device: npt.NDArray[np.int16],
        residency: Residency,
        slot: Slot,
        finished: Callable[[Batch], None],
        chosen_s: float,
        choice: RemoteChoice | None = None,
    ) -> ProbePart | None:
        """Splits, and hands parts to the devices and to other nodes; the host's part. Raises only before anything was
        handed over. ``choice``: who scans what is not here."""
        requests, nlist, n_devices = batch.requests, self._index.nlist, len(self._tiers)
        list_bytes = (self._index.rows if batch.by_rows else self._index).list_bytes
        if choice is None:
            split = split_probes(probes, coarse, list_device[:nlist], list_bytes, n_devices)
        else:
            split, work, lost = split_among_nodes(
                probes, coarse, choice.where, list_device[:nlist], list_bytes, n_devices
            )
            batch.expect(work)
            batch.lose(np.arange(len(batch), dtype=np.int32), lost)
        batch.clock.note(SPLIT, chosen_s)
        for number, request in enumerate(requests):
            request.tell_probes(probes[batch.rows_of(number)])
        # Where damage was found, some may be searched again, and were counted; what other nodes ask, they count.
        again = bool(self._integrity.marks[0]) or batch.masks is not None or requests[0].given is not None
        self._reports.count(requests, split, n_devices, any_again=again)
        if len(list_device) > nlist and self._any_rows(list_device):
            # Takes the batch, which it would else keep alive in a circle.
            def put(device: int, batch: Batch, comparison: Comparison, positions: I64) -> bool:
                return self._device_queues[device].put(RowTask(batch, comparison, positions, residency, slot.give_back))

            batch.rows_at = RowsAt(list_device[nlist:], put)
        if self._remote is not None and not batch.by_rows and self._integrity.quarantined is not None:
            batch.compare_beside(self._remote.compare)
        if batch.masks is None:
            self.added_on_devices.look(batch.added_lists, residency)
            batch.added_there = self.added_on_devices.lease(batch.added_lists, list_device)
        batch.begin(split, finished)
        host_part = None
        for part in split.parts:
            if part.device == HOST:
                host_part = part
            elif part.device >= n_devices:
                assert self._remote is not None
                assert choice is not None
                self._remote.put(batch, part, part.device - n_devices, choice)
            else:
                self._device_queues[part.device].put(ScanTask(batch, part, residency, slot.give_back))
        return host_part

    def _any_rows(self, list_device: npt.NDArray[np.int16]) -> bool:
        """Whether a device holds rows beside codes; looked up once a snapshot."""
        known = self._rows_of
        if known is None or known[0] is not list_device:
            known = self._rows_of = list_device, bool((list_device[self._index.nlist :] >= 0).any())
        return known[1]

    def _batch_of(self, requests: list[Request], *, by_rows: bool = False) -> Batch:
        """``by_rows``: rows are scanned or compared, whatever other searches scan."""
        larger_is_nearer = self._index.metric == "ip"
        by_rows = by_rows or self._codes is None
        return Batch(
            tuple(requests),
            keep_max=larger_is_nearer and by_rows,
            larger_is_nearer=larger_is_nearer,
            integrity=self._integrity,
            on_short=self._search_what_is_left,
            reranker=None if by_rows else self._reranker,
        )

    def _search_what_is_left(self, request: Request) -> None:
        """Has a request searched again of whose nearest rows too many were deleted. Never raises."""
        request.short = request.again = True
        # Rows are left that were not deleted.
        request.kept, request.live, request.spare = request.params.k, None, 0
        try:
            self.submit(request)
        except RouterClosedError as error:
            if self._remote is not None or any(queue.owns_current_thread() for queue in self._device_queues):
                request.reply.fail(error)
            else:  # whoever scans on the host has the turn
                clock = BatchClock()
                for group in self._filtered.choose([request], clock):
                    self._answer_filtered(group, clock)

    def _search_again(self, batch: Batch) -> Sequence[Request]:
        """Queues what a batch did not answer as bytes turned out to be damaged meanwhile; returns it. Never raises."""
        requests = batch.take_open()
        queued: list[Request] = []
        try:
            self._integrity.catch_up()
            while requests:
                requests[-1].again = True
                self.submit(requests[-1])
                queued.append(requests.pop())
        except Exception as error:  # noqa: BLE001 - handed to those who wait
            for request in requests:
                request.reply.fail(error)
        return queued

    def _report(self, batch: Batch, again: Sequence[Request]) -> None:
        """Sums the batch's stages and tells who listens. Never raises: a listener must not stop the engine.

        ``again``: requests that the next batch answers, and tells.
        """
        clock, requests = batch.clock, batch.requests
        times = clock.times()
        self.health.note(batch, times)
        if self._tiers:  # else nobody asks
            for n_candidates, seconds in clock.host_reranks:
                self._rerank_pace.observe(n_candidates, seconds)
        if batch.candidates:
            self._stats.add(
                candidates=batch.candidates,
                device_candidates=batch.device_candidates,
                device_fallbacks=batch.rerank_fallbacks,
                row_pages=0 if self._codes is None or self._codes.on_disk is None else self._codes.on_disk.take_pages(),
            )
        self._reports.tell(
            requests,
            clock,
            times,
            n_queries=len(batch),
            nprobe=batch.nprobe,
            candidates=batch.candidates or batch.filtered_rows,
            again=[*again, *(r for r in requests if r.short and batch.masks is None)],
        )

    # Other threads

    def _fall_back(self, batch: Batch, part: ProbePart) -> None:
        """Scans a device's part on the host. Never raises."""
        moved = part.total_bytes
        self._stats.add(device_fallbacks=1, host_work_bytes=moved, device_work_bytes=-moved)
        self._host.adopt_thread()
        self._host_parts.scan_one(batch, part, early=False)
