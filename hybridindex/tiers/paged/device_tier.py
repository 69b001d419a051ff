"""The paged tier of one device: its arena, its budget and its page scanner.

Lists are brought by :meth:`DeviceTier.load` (asynchronous, on the mover thread) and leave by dropping them from the
residency. Callers decide what should be resident; answers never depend on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex.errors import DeviceBusyError, DeviceError, InvalidInputError, OutOfBudgetError
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.live.added import AddedLists
from hybridindex.paging import DEFAULT_PAGE_BYTES, PageGeometry, scratch_for_budget
from hybridindex.processes import weakly
from hybridindex.tiers.contract.copy_queue import check_share
from hybridindex.tiers.contract.devices import available_bytes, busy_device, give_back_cached, resolve_device
from hybridindex.tiers.contract.residency import Residency, ResidencyStore
from hybridindex.tiers.contract.tier import LoadReport, Tier, WithoutRoom
from hybridindex.tiers.paged.added.added_load import ADDED_PAGES, AddedLoad
from hybridindex.tiers.paged.added.added_pages import AddedLease, AddedPages
from hybridindex.tiers.paged.added.added_view import AddedView
from hybridindex.tiers.paged.arena import DEFAULT_BLOCK_BYTES, PageAllocator, PageArena
from hybridindex.tiers.paged.coarse.device_centroids import DeviceCentroids
from hybridindex.tiers.paged.codes.row_pages import RowPages
from hybridindex.tiers.paged.copier import DEFAULT_STAGING_BYTES, CopyStats, open_copier
from hybridindex.tiers.paged.kernel_choice import choose_row_pages, choose_scanner
from hybridindex.tiers.paged.loading import ListLoad, LoadPath, ReadBack
from hybridindex.tiers.paged.page_scanner import PageScanner
from hybridindex.tiers.paged.pinned import PinnedMemory
from hybridindex.types import I32, I64, U8

__all__ = ["DeviceTier", "PagedMemory"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedMemory:
    """How a paged tier divides the memory that it may take."""

    #: Part of the budget for a scan's temporary buffers; None: a share of the budget.
    scratch_bytes: int | None = None
    #: Most bytes of a page.
    page_bytes: int = DEFAULT_PAGE_BYTES
    #: By which the arena grows and shrinks.
    block_bytes: int = DEFAULT_BLOCK_BYTES
    #: Host memory for copies in progress; taken with the first copy, none on the stand-in.
    staging_bytes: int = DEFAULT_STAGING_BYTES
    #: Lists in page-locked memory that tiers share; it stays the caller's.
    pinned: PinnedMemory | None = None
    #: What of the scratch is for the centroids, 0 on the stand-in, whose memory is the host's; None: it has none.
    centroid_bytes: int | None = None


_DEFAULT_MEMORY = PagedMemory()
_TOO_SMALL = "budget of"


class DeviceTier(Tier):
    """Owner of one device's arena; the mover thread alone writes its pages."""

    def __init__(
        self,
        index: IVFIndex,
        device_name: str,
        ordinal: int,
        *,
        budget_bytes: int,
        wanted_bytes: int,
        memory: PagedMemory = _DEFAULT_MEMORY,
        without_room: WithoutRoom = "raise",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocates min(``wanted_bytes``, budget - scratch) bytes of pages on ``device_name``, and tries its scanner.

        Args:
            index: whose lists are moved here.
            device_name: "cuda:N", or "cpu" for the stand-in.
            ordinal: the device's number in its router.
            budget_bytes: hard limit on the device: pages and scratch together. The runtime's own memory is not in it,
                see :attr:`context_bytes`.
            wanted_bytes: pages that would be of use.
            without_room: where the device is full or busy now. A budget above its memory is refused in any case.
            clock: seconds, monotonic; for back-off and pace.

        Raises:
            OutOfBudgetError: more is needed than the device has free.
            DeviceBusyError: no context can be opened on the device.
            DeviceNotFoundError, DeviceError, MissingDependencyError.
        """
        super().__init__(ordinal, budget_bytes, without_room, clock)
        try:
            self.device, self.info = resolve_device(device_name)
        except DeviceBusyError:
            if without_room == "raise":
                raise
            self.device, self.info = busy_device(device_name)
        self._index = index
        self._codec = index.device_codec()
        self.geometry = PageGeometry.for_code_size(index.page_row_bytes, memory.page_bytes, group_rows=index.group_rows)
        assert memory.pinned is None or memory.pinned.geometry == self.geometry, "pages are copied as they are"
        scratch = memory.scratch_bytes
        self.scratch_bytes = scratch_for_budget(budget_bytes) if scratch is None else scratch
        #: Finds lists that may be near to queries; None: the host alone does.
        self.centroids: DeviceCentroids | None = None
        self._centroid_bytes = memory.centroid_bytes
        #: Of scans, beside the centroids.
        self._least_scratch = self._scan_scratch // 2
        n_pages = self._pages_for(wanted_bytes)
        index_pages = int(self.geometry.pages_of_bytes(index.piece_bytes).sum()) if self._codec is not None else 0
        self.arena = PageArena(
            self.device,
            self.geometry,
            n_pages,
            # Added rows come beside the lists.
            limit_pages=index_pages + index_pages // 2 + ADDED_PAGES,
            block_bytes=memory.block_bytes,
            taken=False,
        )
        #: Held while the arena changes its size.
        self._sizing = threading.Lock()
        self._copier = open_copier(self.arena, staging_bytes=memory.staging_bytes)
        self._path = LoadPath(
            index=index,
            arena=self.arena,
            copier=self._copier,
            pinned=memory.pinned,
            ordinal=ordinal,
            usable=weakly(self, lambda tier: tier.usable),
        )
        try:
            self._take_memory()
        except (OutOfBudgetError, DeviceBusyError) as error:
            if without_room == "raise" or not self._would_fit():
                raise
            self.fail(error)
        self._start_mover()

    def _pages_for(self, wanted_bytes: int) -> int:
        """Pages for what would be of use, within the budget. Says where that has no room for one."""
        if self._codec is None:
            self.disabled_reason = f"codec {self._index.codec!r} is scanned on the host only"
            return 0
        room = self._room
        if room < 1 or self.disabled_reason:
            self.disabled_reason = (
                "" if room else f"{_TOO_SMALL} {self.budget_bytes:,} bytes is below one page plus scratch"
            )
        return int(min(room, -(-wanted_bytes // self.geometry.page_bytes)))

    @property
    def _room(self) -> int:
        """Pages that the budget has room for."""
        return max(0, self.budget_bytes - self.scratch_bytes) // self.geometry.page_bytes

    def _take_memory(self) -> None:
        """Arena and scratch, and a scanner that was seen to work with them; all or nothing."""
        if self.info.free_bytes is None and not self.info.stand_in:
            self.device, self.info = resolve_device(self.info.name)
        if self.arena.pages.n_pages:
            self._check_room()
        try:
            self.arena.take()
            self._scanner_kind, self._passed_over = choose_scanner(
                self._index, self._codec, self.arena, self.ordinal, self._scan_scratch, self.label
            )
            if self._centroid_bytes is not None and self.arena.pages.n_pages:
                self._take_centroids()
        except BaseException:
            self.centroids = None
            self.arena.release()
            # Who the device has no room for now may be waiting for it, too.
            give_back_cached(self.device)
            raise
        self._opened = True

    def _take_centroids(self) -> None:
        """Where that fails the host finds lists, as it would without a device."""
        coarse = self._index.coarse
        self.centroids = None
        try:
            self.centroids = DeviceCentroids(self._index.centroids, self.device, by_products=coarse.gives_products)
        except (RuntimeError, ValueError) as error:
            self._leave_centroids(f"they cannot be put there: {error}")

    def _leave_centroids(self, why: str) -> None:
        _log.warning(
            "device %s has no centroids any more, the host finds the lists of all queries: %s", self.label, why
        )
        self.centroids = self._centroid_bytes = None
        give_back_cached(self.device)

    @property
    def _scan_scratch(self) -> int:
        """What of the scratch is for scans."""
        return self.scratch_bytes - (self._centroid_bytes or 0)

    def _would_fit(self) -> bool:
        """Whether the device, were it empty, has room for this tier."""
        total = self.info.total_bytes
        return total is None or self.arena.nbytes + self.scratch_bytes <= total

    def _check_room(self) -> None:
        parts = f"pages {self.arena.nbytes:,}, scratch {self.scratch_bytes:,}"
        self._refuse_no_room(self.arena.nbytes + self.scratch_bytes, available_bytes(self.device), parts)

    # State

    @property
    def pages(self) -> PageAllocator:
        return self.arena.pages

    @property
    def usable(self) -> bool:
        return self.failure is None and not self.disabled_reason and self.arena.pages.n_pages > 0

    @property
    def used_bytes(self) -> int:
        return (self.arena.pages.n_pages - self.arena.pages.n_free) * self.geometry.page_bytes

    @property
    def unclaimed_bytes(self) -> int:
        """Bytes of the pages that queued loads are still going to take."""
        with self._work:
            pages = sum(move.unclaimed_pages for move in self._moves if isinstance(move, ListLoad))
        return pages * self.geometry.page_bytes

    @property
    def moved_bytes(self) -> int:
        return self._copier.stats.nbytes

    @property
    def capacity_bytes(self) -> int:
        return self.arena.nbytes

    @property
    def reserved_bytes(self) -> int:
        return self.scratch_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of pages that a failed copy may still write; free after a recovery."""
        return self._copier.kept_pages * self.geometry.page_bytes

    @property
    def host_bytes(self) -> int:
        """Of staging buffers; pinned lists are not the tier's."""
        return self._copier.staging_bytes

    @property
    def copy_stats(self) -> CopyStats:
        """What moved to this device so far."""
        return self._copier.stats

    def _try_device(self) -> None:
        """Writes a page, reads it back and compares."""
        with self._sizing:
            if not self._opened or (self.arena.pages.n_pages and not self.arena.taken):
                self._take_memory()
        self._copier.probe()

    def _never_fits(self, error: BaseException) -> bool:
        """A GPU that was busy tells its size only now: what the opening would have refused is not tried again."""
        if not isinstance(error, OutOfBudgetError) or self._opened or self._would_fit():
            return False
        self.disabled_reason = str(error)
        _log.error("%s; the host serves its lists", error)
        return True

    # Size

    def resize(self, wanted_bytes: int, budget_bytes: int, scratch_bytes: int) -> None:
        """See :meth:`hybridindex.tiers.contract.tier.Tier.resize`. Pages that stay do so where they are. A block of
        which a page is in use stays, unless the budget is lowered: then free pages go one by one."""
        if self.disabled_reason and not self.disabled_reason.startswith(_TOO_SMALL):
            return
        with self._sizing:
            within = self.budget_bytes
            # Scans of a kernel that has taken its scratch take turns at it; a larger one is taken by the next.
            self.budget_bytes, self.scratch_bytes = budget_bytes, scratch_bytes
            if self._centroid_bytes and self._scan_scratch < self._least_scratch:
                self._leave_centroids("a plan that was made without them leaves scans too little memory beside them")
            n_pages, pages = self._pages_for(wanted_bytes), self.arena.pages
            try:
                if n_pages > pages.n_pages:
                    self._grow(n_pages)
                elif n_pages < pages.n_pages:
                    self.arena.shrink(n_pages)
                    self.arena.shrink(max(n_pages, self._room), whole_blocks=False)
            except DeviceError as error:
                _log.warning("device %s: its arena keeps %d bytes: %s", self.label, self.arena.nbytes, error)
            # Not below what is taken: the rest of that leaves with its last reader.
            needed = self.arena.nbytes + self.scratch_bytes if self.arena.nbytes else 0
            self.budget_bytes = max(budget_bytes, min(within, needed))

    def _grow(self, n_pages: int) -> None:
        """As far as the device has room. One that failed grows when it works again."""
        if self._opened and self.failure is not None:
            return
        free = available_bytes(self.device) if self._opened else None
        if free is not None:
            scratch = 0 if self.arena.taken else self.scratch_bytes
            n_pages = min(n_pages, self.arena.pages.n_pages + max(0, free - scratch) // self.geometry.page_bytes)
        before = self.arena.pages.n_pages
        self.arena.grow(n_pages)
        if self._opened and not self.arena.taken and n_pages:
            try:
                self._take_memory()
            except DeviceError as error:
                self.fail(error)
        if (grown := self.arena.pages.n_pages - before) > 0:
            _log.info("device %s: its arena grew by %d pages to %d bytes", self.label, grown, self.arena.nbytes)

    def lists_beyond(self, residency: Residency, budget_bytes: int) -> I64:
        """See :meth:`hybridindex.tiers.contract.tier.Tier.lists_beyond`: those in pages that have to go."""
        if self.arena.nbytes + self.scratch_bytes <= budget_bytes:
            return super().lists_beyond(residency, budget_bytes)
        room = max(0, budget_bytes - self.scratch_bytes) // self.geometry.page_bytes
        here = residency.resident_lists(self.ordinal)
        going = np.isin(residency.pages_of(here), self.arena.used_beyond(room))
        return np.unique(np.repeat(here, residency.page_counts[here])[going])

    def lists_alone_beyond(self, residency: Residency, nbytes: int) -> I64:
        """Resident lists in the last pages, which alone keep the arena from having ``nbytes``, in whole pages. None
        where others are in these pages, too. (m,) int64."""
        used = self.arena.used_beyond(-(-nbytes // self.geometry.page_bytes))
        here = residency.resident_lists(self.ordinal)
        going = np.isin(residency.pages_of(here), used)
        if int(going.sum()) < len(used):
            return np.empty(0, dtype=np.int64)
        return np.unique(np.repeat(here, residency.page_counts[here])[going])

    # Scan

    def scanner(self, residency: Residency) -> PageScanner:
        self._refuse_unusable()
        assert self._codec is not None
        kind = self._scanner_kind
        scanner = kind(self._index, self._codec, self.arena, residency, self.ordinal, self._scan_scratch)
        scanner.passed_over = self._passed_over
        return scanner

    @property
    def takes_added(self) -> bool:
        """Whether added rows can lie in its pages as they came: not where pages hold codes, or rows in another form."""
        index, geometry = self._index, self.geometry
        if self._codec is None or index.rows is not index:
            return False
        return geometry.group_rows == 1 and geometry.code_size == index.code_size

    def load_added(self, added: AddedLists, residency: Residency, pages: AddedPages) -> Future[int]:
        """Queues the copying of rows that were added to lists which are resident here, behind those of these rows that
        are here: how many were copied. What finds no room is the host's.

        Args:
            residency: of the lists.
            pages: where it is published.

        Raises:
            RouterClosedError: the tier is closed.
        """
        load = AddedLoad(
            added,
            residency,
            pages,
            self.arena,
            self._copier,
            self.ordinal,
            usable=lambda: self.usable and not self._closed,
            make_room=self._make_room,
        )
        self._put(load)
        return load.future

    def _make_room(self, n_pages: int) -> None:
        """Has so many pages more, or as many as the budget and the device have room for."""
        with self._sizing:
            before = self.arena.pages.n_pages
            try:
                self._grow(min(self._room, before + max(n_pages, self.arena.block_pages)))
            except DeviceError as error:
                _log.warning("device %s: its arena keeps %d bytes: %s", self.label, self.arena.nbytes, error)

    def added_scanner(self, lease: AddedLease, added: AddedLists, lists: npt.NDArray[np.bool_]) -> PageScanner:
        """A scanner over added rows. ``lists``: (nlist,) those of which all rows are here."""
        self._refuse_unusable()
        assert self._codec is not None
        view: Any = AddedView(self._index, added, lists)
        return self._scanner_kind(view, self._codec, self.arena, lease.residency, self.ordinal, self._scan_scratch)

    @property
    def compares_rows(self) -> bool:
        """Whether rows that lie here beside codes are compared as the host compares them."""
        return self._index.n_pieces > self._index.nlist and choose_row_pages(self.arena) is not None

    def row_pages(self, residency: Residency) -> RowPages:
        """The rows that lie here beside codes, of one leased snapshot.

        Raises:
            DeviceError: the device failed.
            InvalidInputError: nothing compares rows here as the host does.
        """
        self._refuse_unusable()
        kind = choose_row_pages(self.arena)
        if kind is None:
            raise InvalidInputError(f"rows on device {self.label} cannot be compared as the host compares them")
        return kind(self._index, self.arena, residency, self.ordinal, self._scan_scratch)

    # Movement

    def load(
        self,
        lists: Sequence[int],
        store: ResidencyStore,
        cancelled: Callable[[], bool] | None = None,
        *,
        bandwidth_share: float | None = None,
    ) -> Future[LoadReport]:
        """See :meth:`hybridindex.tiers.contract.tier.Tier.load`. Lists that do not fit are skipped, never split.

        Lists become visible to new leases a buffer at a time. A background move gives way to foreground moves between
        buffers. When a load is cancelled, what has landed stays and the rest is skipped.
        """
        check_share(bandwidth_share)
        load = ListLoad(
            lists,
            store,
            self._path,
            cancelled=lambda: self._closed or (cancelled is not None and cancelled()),
            # A paced move waits for each buffer: its time is what the rest is reckoned from.
            depth=0 if bandwidth_share is not None and bandwidth_share < 1 else self._copier.depth,
        )
        self._put(load, bandwidth_share)
        return load.future

    def read_back(self, pages: I32) -> Future[U8]:
        """Queues the reading of pages, which the caller has leased: their bytes, one after the other.

        Raises:
            RouterClosedError: the tier is closed.
        """
        reading = ReadBack(pages, self._copier)
        self._put(reading)
        return reading.future

    def check_invariants(self) -> None:
        """Asserts that the budget holds, and that every page is free or has an owner."""
        self.arena.pages.check_invariants()
        assert self.arena.nbytes + (self.scratch_bytes if self.arena.nbytes else 0) <= self.budget_bytes
        self._copier.check_invariants()

    def _mover_ends(self) -> None:
        self._copier.close()

    def _release(self) -> None:
        self.centroids = None
        self.arena.release()
        # To whom the device is shared with.
        give_back_cached(self.device)

    def _left_bytes(self) -> int:
        return self.budget_bytes
