"""Which lists lie in page-locked host memory: the hottest that the plan in force leaves on the host.

Chosen anew after each plan was placed, off the query path: lists that are still right stay, the others are replaced.
The host scans the mapped file as ever; a load whose list is not there goes through the staging buffers.
:mod:`hybridindex.tiers.paged.pinned` keeps pages that copies under way still read.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hybridindex.errors import CorruptIndexError
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.warm import available_bytes
from hybridindex.paging import PageGeometry
from hybridindex.tiers.contract.devices import give_back_locked
from hybridindex.tiers.contract.tier import Tier
from hybridindex.tiers.paged.pinned import PinnedMemory
from hybridindex.types import I64, U8

if TYPE_CHECKING:
    from hybridindex.partitioner.plan import Plan

__all__ = ["HostLists"]

_log = logging.getLogger(__name__)

#: Of the memory that is available, what lists may take where nothing else is said: such memory cannot be swapped out.
_SHARE_OF_MEMORY = 8


class HostLists:
    """Owner of the memory, which the devices of a router share. ``choose`` under the lock of who places plans."""

    def __init__(self, index: IVFIndex, geometry: PageGeometry, limit_bytes: int | None) -> None:
        """``limit_bytes``: most bytes of host memory; 0: none is taken. None: a share of what there is, for GPUs."""
        self._index = index
        self._geometry = geometry
        self._limit_bytes = limit_bytes
        self._memory: PinnedMemory | None = None
        self._stop = threading.Event()
        #: Whether there is more to be had: no device was ready, or copies on their way still read what is to go.
        self.due = False
        #: Whether a choice is made when it is asked for. Nobody asked for a share of the memory: the opening does not
        #: wait for it, the recovery thread brings the lists.
        self._at_once = limit_bytes is not None

    @property
    def nbytes(self) -> int:
        """Host memory taken."""
        return 0 if self._memory is None else self._memory.nbytes

    def list_ids(self) -> I64:
        """(m,) int64 lists that lie there now."""
        return np.array([] if self._memory is None else self._memory.list_ids(), dtype=np.int64)

    @property
    def memory(self) -> PinnedMemory | None:
        """Where they lie; None where none is held."""
        return self._memory

    def memory_for(self, device_name: str) -> PinnedMemory | None:
        """What a tier on that device fetches from; the first one decides whether it is page-locked."""
        locked = device_name != "cpu"
        if self._limit_bytes is None and locked:
            self._limit_bytes = _shares.take(self)
        if self._limit_bytes and self._memory is None:
            self._memory = PinnedMemory(self._geometry, page_locked=locked, limit_bytes=self._limit_bytes)
            self.due = True
        return self._memory

    def choose(
        self,
        plan: Plan | None,
        tiers: Sequence[Tier],
        cancelled: Callable[[], bool],
        share: float | None = None,
        limit_s: float | None = None,
    ) -> None:
        """Holds what ``plan`` makes worth it, as far as the bytes go. Takes as long as the missing lists take to copy.

        Args:
            tiers: that fetch from here. Without a usable one nothing is done: page-locking needs a device's runtime.
            cancelled: asked before each list.
            share: part of the time that copying takes; None: all.
            limit_s: after which the rest waits until it is called again; None: none does.
        """
        memory = self._memory
        if memory is None or not any(tier.usable for tier in tiers):
            return
        if not self._at_once:
            self._at_once = True
            return
        lists = self._hottest_first(plan, tiers)
        index = self._index
        quarantined = index.integrity.pieces_in_quarantine(index.n_pieces, of_codes=index.rows is not index)
        if quarantined is not None:
            lists = lists[~quarantined[lists]]
        rests = _Rests(self._codes_of, 1.0 if share is None else share, self._stop)
        n_pages = self._geometry.pages_for(self._index.list_sizes[lists])
        gave_way, end_s = False, None if limit_s is None else time.monotonic() + limit_s

        def gives_way() -> bool:
            nonlocal gave_way
            late = end_s is not None and time.monotonic() > end_s
            gave_way = gave_way or late or self._stop.is_set() or cancelled()
            return gave_way

        try:
            report = memory.hold(lists.tolist(), n_pages.tolist(), rests.codes_of, gives_way)
        except Exception:  # noqa: BLE001 - a list that cannot be read is said by who searches it; the plan is in force
            _log.exception("lists could not be copied to page-locked memory")
            self.due = False
            return
        self.due = bool(report.late) or (gave_way and not self._stop.is_set())
        if gave_way:
            return
        if not self.due:
            _log.info("%d lists take %d bytes of page-locked memory", len(report.pinned), memory.nbytes)
        if report.reason:
            _log.warning("%s; other lists go through the staging buffers", report.reason)

    def _codes_of(self, list_id: int) -> U8:
        """Of a share, which may let go of the rows of the list meanwhile: a copy, proven. Raises CorruptIndexError: it
        did."""
        codes, integrity = self._index.piece_codes(list_id), self._index.integrity
        if integrity.absent is not None and self._index.rows is self._index:
            codes = codes.copy()
            if not integrity.is_good(list_id, 0, self._index.codes_of_pages(list_id, codes.reshape(-1))):
                raise CorruptIndexError(f"list {list_id} went, or was damaged, while it was copied")
        return codes

    def _hottest_first(self, plan: Plan | None, tiers: Sequence[Tier]) -> I64:
        """The lists that no device holds for the plan, by the accesses that its profile counted; without a plan all, by
        their ids."""
        sizes = self._index.list_sizes
        if plan is None:
            return np.flatnonzero(sizes)
        order: I64 = np.argsort(-plan.analysis.profile.access.list_accesses, kind="stable")
        held = np.isin(plan.list_device, [tier.ordinal for tier in tiers if not tier.disabled_reason])
        return order[(~held & (sizes > 0))[order]]

    def stop(self) -> None:
        """Ends what goes on after the list that is being copied. For good; any thread."""
        self._stop.set()

    def close(self) -> None:
        """Lets the memory go, after the tiers."""
        _shares.give_back(self)
        if self._memory is not None:
            self._memory.clear()
            if self._memory.page_locked:
                give_back_locked()

    def check_invariants(self) -> None:
        if self._memory is not None:
            self._memory.check_invariants()


class _Shares:
    """What the routers of this process take of the memory where nothing is said: each a share, all of them together not
    more than twice that. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: weakref.WeakKeyDictionary[HostLists, int] = weakref.WeakKeyDictionary()

    def take(self, owner: HostLists) -> int:
        """Most bytes of ``owner``, which has them until it goes or is closed."""
        with self._lock:
            promised = sum(self._owners.values())
            # What others hold already is not available any more.
            memory = available_bytes() + sum(other.nbytes for other in self._owners)
            share = max(0, min(memory // _SHARE_OF_MEMORY, 2 * memory // _SHARE_OF_MEMORY - promised))
            self._owners[owner] = share
            return share

    def give_back(self, owner: HostLists) -> None:
        with self._lock:
            self._owners.pop(owner, None)


_shares = _Shares()


class _Rests:
    """Codes of lists, and a rest before each one but the first, so that copying takes its share of the time."""

    def __init__(self, codes_of: Callable[[int], U8], share: float, stop: threading.Event) -> None:
        self._codes_of = codes_of
        self._rest = 1 / share - 1
        self._stop = stop
        self._given_s: float | None = None

    def codes_of(self, list_id: int) -> U8:
        if self._rest and self._given_s is not None:
            self._stop.wait((time.monotonic() - self._given_s) * self._rest)
        self._given_s = time.monotonic()
        return self._codes_of(list_id)
