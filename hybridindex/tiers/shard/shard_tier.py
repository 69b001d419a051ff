"""The tier of a device that holds lists as a faiss shard: for codecs that the paged tier does not decode.

A shard cannot change list by list: other lists mean a new shard, which the mover thread builds
(:mod:`hybridindex.tiers.shard.builder`), and an old one lives until its last lease ends
(:mod:`hybridindex.tiers.shard.ledger`). Lookahead and the cache move single lists, so they leave such a device alone.
Here are the device's budget, its mover thread and its state.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from hybridindex.errors import DeviceError, OutOfBudgetError, RouterClosedError
from hybridindex.index.faiss_model import faiss_message
from hybridindex.index.ivf import IVFIndex
from hybridindex.paging import PageGeometry, scratch_for_budget, shard_page_bytes
from hybridindex.tiers.contract.bounded_join import thread_ends
from hybridindex.tiers.contract.copy_queue import check_share
from hybridindex.tiers.contract.device_health import Probe, TierHealth
from hybridindex.tiers.contract.devices import available_bytes, resolve_device
from hybridindex.tiers.contract.futures import done, fail, settle
from hybridindex.tiers.contract.residency import Residency, ResidencyStore
from hybridindex.tiers.contract.tier import LoadReport, WithoutRoom
from hybridindex.tiers.shard.builder import ShardBuilder, ShardLoad
from hybridindex.tiers.shard.gpu import GpuShard
from hybridindex.tiers.shard.ledger import ShardLedger
from hybridindex.tiers.shard.scanner import ShardScanner, StandInShard

__all__ = ["ShardTier"]

_log = logging.getLogger(__name__)


class ShardTier:
    """Owner of one device's shards.

    Threads: every method may be called from any thread; the mover thread alone builds. ``close`` joins it.
    """

    def __init__(
        self,
        index: IVFIndex,
        device_name: str,
        ordinal: int,
        *,
        budget_bytes: int,
        wanted_bytes: int,
        without_room: WithoutRoom = "raise",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Builds an empty shard as a trial; takes no memory that lasts.

        Args:
            index: whose lists are moved here; a codec that :func:`hybridindex.tiers.serving.tier_of` calls "shard".
            device_name: "cuda:N", or "cpu" for the stand-in.
            ordinal: the device's number in its router.
            budget_bytes: hard limit on the device: lists, centroids and codec tables, temporary memory, of all shards
                together. What the runtime and its libraries take for themselves is not in it.
            wanted_bytes: of lists, with what comes with them: more than the device has free is refused.
            without_room: where it is not free now. More than the device has in all is refused in any case.
            clock: seconds, monotonic; for back-off and pace.

        Raises:
            OutOfBudgetError: more is needed than the device has free.
            DeviceNotFoundError, MissingDependencyError.
        """
        self.device, self.info = resolve_device(device_name)
        self.ordinal = ordinal
        self.budget_bytes = budget_bytes
        #: Temporary memory of a shard's scans.
        self.scratch_bytes = scratch_for_budget(budget_bytes)
        self.geometry = PageGeometry.for_code_size(index.code_size, shard_page_bytes(index.code_size))
        self._index = index
        self._pages = ShardLedger(index.nlist)
        self._health = TierHealth(lambda: self.label, clock)
        self._clock = clock
        self._jobs: queue.SimpleQueue[ShardLoad | Probe | None] = queue.SimpleQueue()
        #: Jobs that have not ended.
        self._unfinished: set[ShardLoad | Probe] = set()
        self._lock = threading.Lock()
        self._closed, self._hurried = threading.Event(), threading.Event()
        self._builder = ShardBuilder(
            index,
            self.device,
            self.info,
            ordinal,
            ledger=self._pages,
            geometry=self.geometry,
            budget_bytes=budget_bytes,
            scratch_bytes=self.scratch_bytes,
            clock=clock,
            rest=self._hurried.wait,
        )
        #: Of every shard, besides its lists.
        self.fixed_bytes = self._builder.fixed_bytes
        self.disabled_reason = ""
        self._opened, self._without_room = False, without_room
        room = budget_bytes - self.fixed_bytes
        self._wanted_bytes = min(room, wanted_bytes)
        if room < self.geometry.page_bytes:
            self.disabled_reason = (
                f"budget of {budget_bytes:,} bytes is below a page, {self.geometry.page_bytes:,}, plus centroids, "
                f"codec tables and scratch, {self.fixed_bytes:,}"
            )
        else:
            self._open()
        self._moved_bytes = 0
        self._mover = threading.Thread(target=self._run, name=f"hybridindex-mover-{ordinal}", daemon=True)
        self._mover.start()

    def _open(self) -> None:
        try:
            self._check_room()
        except OutOfBudgetError as error:
            total = self.info.total_bytes
            if self._without_room == "raise" or (total is not None and self._wanted_bytes + self.fixed_bytes > total):
                raise
            self.fail(error)
            return
        self._opened = True
        try:
            self._try_device()
        except Exception as error:  # noqa: BLE001 - whatever a device does, the host serves
            self.disabled_reason = f"faiss keeps no shard of codec {self._index.codec!r} there: {faiss_message(error)}"

    def _check_room(self) -> None:
        lists_bytes, free = self._wanted_bytes, available_bytes(self.device)
        needed = lists_bytes + self.fixed_bytes
        if free is not None and needed > free:
            raise OutOfBudgetError(
                f"device {self.label}: {needed:,} bytes are needed (lists {lists_bytes:,}, centroids, codec tables and "
                f"scratch {self.fixed_bytes:,}; budget {self.budget_bytes:,}) and {free:,} are free; expected a budget "
                "within what other owners of the device leave"
            )

    # State

    @property
    def label(self) -> str:
        return self.info.label

    @property
    def pages(self) -> ShardLedger:
        """To whom retired pages go back: the account of shards."""
        return self._pages

    @property
    def failure(self) -> BaseException | None:
        """What made this device fail, or None while it works."""
        return self._health.failure

    @property
    def usable(self) -> bool:
        return self.failure is None and not self.disabled_reason

    @property
    def used_bytes(self) -> int:
        """Bytes of all shards: the one being built and those that only older leases read included."""
        return self._pages.used_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that loads brought since it was opened; those that a new shard takes along are not counted again."""
        return self._moved_bytes

    @property
    def capacity_bytes(self) -> int:
        """What the budget has besides the codec tables and scratch."""
        return self._builder.capacity_bytes

    @property
    def reserved_bytes(self) -> int:
        """Codec tables and scratch."""
        return self.fixed_bytes

    @property
    def kept_bytes(self) -> int:
        """None: a shard that fails goes at once."""
        return 0

    @property
    def context_bytes(self) -> int | None:
        """See :attr:`hybridindex.tiers.contract.tier.Tier.context_bytes`."""
        return self.info.context_bytes

    @property
    def host_bytes(self) -> int:
        """None that lasts: what a new shard is made of goes when it is built."""
        return 0

    @property
    def n_failures(self) -> int:
        """How often this device went from working to failed."""
        return self._health.n_failures

    def fail(self, error: BaseException) -> None:
        """Marks the device as failed: nothing is loaded or scanned here until :meth:`recover`. Logged once a failure.

        Its shard stays until who serves the lists drops them from the residency.
        """
        self._health.note(error)

    def retry_due(self, now: float) -> bool:
        """Whether :meth:`recover` should be called: 1, 2, 4 ... 60 s after the failure and each trial that failed."""
        return (self._opened or self._without_room == "retry") and self._health.retry_due(now)

    def recover(self, trial: Callable[[], None] | None = None) -> Future[bool]:
        """Tries a failed device after the loads that wait, and returns at once: an empty shard is built and searched.

        The future says whether the device takes lists again; while another trial goes on it is False.

        Args:
            trial: see :meth:`hybridindex.tiers.contract.tier.Tier.recover`. Beside a slow device's shard the budget
            may have no
                room for an empty one.

        Raises:
            RouterClosedError: the tier is closed.
        """
        with self._lock:
            self._refuse_closed()
            probe = self._health.probe(self._try_device, trial)
            if probe is not None:
                self._put(probe)
        return done(self.failure is None) if probe is None else probe.future

    # Scan

    def scanner(self, residency: Residency) -> ShardScanner:
        """A scanner over this device's lists of one leased snapshot.

        Raises:
            DeviceError: the device failed, or cannot scan this index.
        """
        if self.failure is not None and not self._health.slow:
            raise DeviceError(f"device {self.label} has failed: {self.failure!r}")
        if self.disabled_reason:
            raise DeviceError(self.disabled_reason)
        lists = residency.resident_lists(self.ordinal)
        # All that one snapshot names here is of one shard: they are published together.
        shard = self._pages.find(residency.pages_of(lists[:1])) if len(lists) else None
        name = StandInShard.name if self.info.stand_in else GpuShard.name
        return ShardScanner(self._index, shard, residency, self.ordinal, name)

    # Movement

    def load(
        self,
        lists: Sequence[int],
        store: ResidencyStore,
        cancelled: Callable[[], bool] | None = None,
        *,
        bandwidth_share: float | None = None,
    ) -> Future[LoadReport]:
        """Queues a shard of what is here and of ``lists``, in order, as far as they fit; returns at once.

        All its lists become visible to new leases at once.

        Args:
            lists: list ids.
            store: where they are published.
            cancelled: asked before each list; a cancelled shard is not published.
            bandwidth_share: None, or the part of the time in which lists are copied, 0 < share <= 1. The last step,
                from the host to a GPU, is one.

        Raises:
            InvalidInputError: ``bandwidth_share`` is out of range.
            RouterClosedError: the tier is closed.
        """
        check_share(bandwidth_share)
        load = ShardLoad(
            [int(list_id) for list_id in lists],
            store,
            lambda: self._closed.is_set() or not self.usable or (cancelled is not None and cancelled()),
            1.0 if bandwidth_share is None else bandwidth_share,
        )
        load.future.set_running_or_notify_cancel()
        with self._lock:
            self._refuse_closed()
            self._put(load)
        return load.future

    def _put(self, job: ShardLoad | Probe) -> None:
        self._unfinished.add(job)
        self._jobs.put(job)

    def _refuse_closed(self) -> None:
        if self._closed.is_set():
            raise RouterClosedError("the device tier is closed")

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if isinstance(job, Probe):
                    job.step()
                else:
                    report = self._builder.load(job)
                    self._moved_bytes += report.nbytes
                    settle(job.future, report)
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits; the device is marked
                self.fail(error)
                job.abort(error)
            self._unfinished.discard(job)
            del job  # an idle thread must not keep the last store alive

    def _try_device(self) -> None:
        if not self._opened:
            self._check_room()
            self._opened = True
        self._builder.try_empty()

    def hurry(self) -> None:
        """See :meth:`hybridindex.tiers.contract.tier.Tier.hurry`."""
        self._hurried.set()

    def owns_current_thread(self) -> bool:
        """See :meth:`hybridindex.tiers.contract.tier.Tier.owns_current_thread`."""
        return threading.current_thread() is self._mover

    def check_invariants(self) -> None:
        """Asserts what must hold at any time: the budget, and shards that somebody can reach."""
        assert self.used_bytes <= self.budget_bytes
        self._pages.check_invariants()

    def close(self, limit_s: float | None = None, *, scanned: bool = False) -> bool:
        """See :meth:`hybridindex.tiers.contract.tier.Tier.close`. Lists that are not here yet are skipped, and the
        futures are done."""
        with self._lock:
            self._closed.set()
            self._hurried.set()
            self._jobs.put(None)
        if scanned or not thread_ends(self._mover, limit_s):
            self._leave("a scan" if scanned else "a move")
            return False
        self._pages.clear()
        return True

    def _leave(self, what: str) -> None:
        words = f"device {self.label}: {what} does not end; its thread and {self.used_bytes:,} bytes are left behind"
        _log.error("%s until it does, or the process ends", words)
        for job in list(self._unfinished):
            fail(job.future, DeviceError(words))
