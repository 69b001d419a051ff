"""Which added rows lie in the pages of devices, beside the lists that they came to.

A list that grows gets more rows behind those that are there, in the page that has room and in new ones: no row moves,
and scans that go on read what they knew. A list that lost a row starts anew in other pages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hybridindex.index.live.added import AddedLists
from hybridindex.tiers.contract.residency import Lease, Residency, ResidencyStore
from hybridindex.types import I32, I64

__all__ = ["AddedLease", "AddedPages", "HeldRows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldRows:
    """How many rows of each list devices hold. Immutable."""

    #: Whose rows: :attr:`AddedLists.origin`.
    origin: object
    #: (nlist,) int64: the first ones of each list; 0: none.
    rows: I64
    #: (nlist,) int64: how often the list had lost rows when these were copied.
    losses: I64

    def current(self, added: AddedLists) -> npt.NDArray[np.bool_]:
        """(nlist,) of which lists these are the first rows, as ``added`` has them, too."""
        if self.origin is not added.origin:
            return np.zeros(len(self.rows), dtype=np.bool_)
        same: npt.NDArray[np.bool_] = (self.rows > 0) & (self.losses == added.losses)
        return same


class AddedLease:
    """The right to read pages of added rows, as of one moment. Release it once."""

    __slots__ = ("_lease", "held")

    def __init__(self, lease: Lease, held: HeldRows) -> None:
        self._lease, self.held = lease, held

    @property
    def residency(self) -> Residency:
        return self._lease.residency

    def release(self) -> None:
        self._lease.release()


class AddedPages:
    """Of one router's devices. Thread-safe; a device's rows are published by its mover."""

    def __init__(self, nlist: int, reclaim: Callable[[int, I32], None]) -> None:
        """``reclaim``: as of a :class:`ResidencyStore`."""
        self._store = ResidencyStore(nlist, reclaim)
        #: Held while pages and rows change together.
        self._lock = threading.Lock()
        self._held = HeldRows(origin=None, rows=np.zeros(nlist, np.int64), losses=np.zeros(nlist, np.int64))
        #: Whether movers end what they copy, after the rows that are on their way.
        self.away = False

    @property
    def held(self) -> HeldRows:
        return self._held

    @property
    def now(self) -> tuple[Residency, HeldRows]:
        """Pages, and the rows in them."""
        with self._lock:
            return self._store.current, self._held

    @property
    def count(self) -> int:
        """Rows that devices hold."""
        return int(self._held.rows.sum())

    def lease(self) -> AddedLease:
        """What devices hold now, to be read."""
        with self._lock:
            return AddedLease(self._store.lease(), self._held)

    def publish(self, added: AddedLists, ordinal: int, fresh: Mapping[int, I32], grown: Mapping[int, I32]) -> list[I32]:
        """All rows of some lists are there, as ``added`` has them: in ``fresh`` pages, or behind those that were there,
        with some more pages.

        Returns:
            Pages that are the caller's again: of lists that were dropped while they grew, or that another device has.
        """
        with self._lock:
            where = self._store.current.list_device
            dropped = [pages for each, pages in grown.items() if where[each] != ordinal]
            grown = {each: pages for each, pages in grown.items() if where[each] == ordinal}
            # Another device was first.
            dropped += [pages for each, pages in fresh.items() if where[each] >= 0]
            fresh = {each: pages for each, pages in fresh.items() if where[each] < 0}
            lists = np.array([*fresh, *grown], dtype=np.int64)
            rows, losses = self._held.rows.copy(), self._held.losses.copy()
            others = np.empty(0, dtype=np.int64)
            if self._held.origin is not added.origin:
                others = np.setdiff1d(np.flatnonzero(rows), lists)
                rows[others] = 0
            loads = {each: (ordinal, pages) for each, pages in fresh.items()}
            self._store.publish(loads, others.tolist(), grown=grown)
            rows[lists], losses[lists] = added.sizes[lists], added.losses[lists]
            self._held = HeldRows(origin=added.origin, rows=rows, losses=losses)
        return dropped

    def drop(self, lists: I64) -> None:
        """Forgets lists; their pages are given back after the last reader."""
        if not len(lists):
            return
        with self._lock:
            self._store.publish({}, drops=lists.tolist())
            rows = self._held.rows.copy()
            rows[lists] = 0
            self._held = replace(self._held, rows=rows)

    def drop_device(self, ordinal: int) -> None:
        """Forgets what one device holds."""
        self.drop(np.flatnonzero(self._store.current.list_device == ordinal))

    def wait_reclaimed(self, timeout_s: float) -> bool:
        """Waits until all pages that were given up are free; False after ``timeout_s``."""
        return self._store.wait_reclaimed(self._store.current.version, timeout_s)

    def check_invariants(self) -> None:
        """Asserts that rows are known where there are pages, and nowhere else."""
        self._store.check_invariants()
        with self._lock:
            assert np.array_equal(self._held.rows > 0, self._store.current.page_counts > 0)
