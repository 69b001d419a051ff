"""Added rows in the memory of devices: which of them a batch has scanned there, and when more are brought."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import numpy as np
import numpy.typing as npt

from hybridindex.errors import RouterClosedError
from hybridindex.index.live.added import AddedLists
from hybridindex.router.batch.added_there import AddedThere
from hybridindex.router.batch.parts import RouterParts
from hybridindex.tiers.contract.residency import Residency
from hybridindex.tiers.contract.tier import PageOwner
from hybridindex.tiers.paged.added.added_pages import AddedLease, AddedPages

__all__ = ["AddedOnDevices"]

#: Between two looks at what a device lacks: rows that come one by one are copied together.
_REST_S = 0.02


class AddedOnDevices:
    """Of one router. :meth:`look` and :meth:`lease` by whoever has the engine's turn."""

    def __init__(self, parts: RouterParts) -> None:
        self._tiers = [tier for tier in parts.paged if tier.takes_added]
        owners = [tier.pages for tier in parts.tiers]
        self._nlist = parts.index.nlist
        self._pages = AddedPages(self._nlist, _giving_back(owners))
        #: Copying now, by device.
        self._copying: dict[int, Future[int]] = {}
        self._look_again_s = 0.0
        #: What was looked at last: rows, and version of the residency.
        self._seen: tuple[AddedLists | None, int] = (None, -1)
        #: The last answer of :meth:`_lists`, and what it was for.
        self._known: tuple[tuple[object, ...], npt.NDArray[np.bool_]] | None = None
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Added rows that devices hold."""
        return self._pages.count

    def look(self, added: AddedLists | None, residency: Residency) -> None:
        """Has devices bring the added rows of lists that they hold, as far as these are not there. Returns at once."""
        if not self._tiers or (self._seen[0] is added and self._seen[1] == residency.version):
            return
        now = time.monotonic()
        if now < self._look_again_s or not all(each.done() for each in self._copying.values()):
            return
        with self._lock:
            if self._pages.away:
                return
            self._seen, self._look_again_s = (added, residency.version), now + _REST_S
            if added is None:
                self._pages.drop(np.flatnonzero(self._pages.held.rows))
                return
            for tier in self._tiers:
                # Or it is closed in this moment.
                with suppress(RouterClosedError):
                    if tier.usable:
                        self._copying[tier.ordinal] = tier.load_added(added, residency, self._pages)

    def lease(self, added: AddedLists | None, list_device: npt.NDArray[np.int16]) -> AddedThere | None:
        """What devices scan for a batch; None: nothing.

        ``list_device``: (n_pieces,) who scans each list.
        """
        if added is None or not self._tiers:
            return None
        lease = self._pages.lease()
        lists = self._lists(lease, added, list_device)
        if not lists.any():
            lease.release()
            return None
        return AddedThere(added=added, lists=lists, lease=lease)

    def _lists(self, lease: AddedLease, added: AddedLists, list_device: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
        held, where = lease.held, lease.residency.list_device
        key = (held, where, added, list_device)
        known = self._known
        if known is None or any(one is not other for one, other in zip(known[0], key, strict=True)):
            lists = held.current(added) & (held.rows >= added.sizes) & (added.sizes > 0)
            known = self._known = key, lists & (where == list_device[: self._nlist]) & (where >= 0)
        return known[1]

    def forget(self, ordinal: int) -> None:
        """What one device holds may not be what was copied there."""
        with self._lock:
            self._seen = (None, -1)
            self._pages.drop_device(ordinal)

    def clear(self) -> None:
        """Gives all pages back, after their last reader; what is still of use comes again."""
        with self._lock:
            self._seen = (None, -1)
            self._pages.drop(np.flatnonzero(self._pages.held.rows))

    @contextmanager
    def away(self) -> Iterator[Callable[[float], bool]]:
        """Gives all pages back and brings no rows meanwhile: the host scans them. They come again afterwards.

        Yields:
            What waits until the pages are free, so many seconds at most, and says whether they are.
        """
        with self._lock:
            self._pages.away = True
        self.clear()
        try:
            yield self._given_back
        finally:
            with self._lock:
                self._pages.away, self._seen = False, (None, -1)

    def _given_back(self, limit_s: float) -> bool:
        try:
            for copying in self._copying.values():
                copying.exception(limit_s)
        except TimeoutError:
            return False
        # What these brought, too.
        self.clear()
        return self._pages.wait_reclaimed(limit_s)

    def check_invariants(self) -> None:
        self._pages.check_invariants()


def _giving_back(owners: list[PageOwner]) -> Callable[[int, npt.NDArray[np.int32]], None]:
    """Holds on to allocators, not to a closed router."""
    return lambda device, pages: owners[device].free(pages)
