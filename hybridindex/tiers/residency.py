"""Residency: the versioned map list -> device and pages, read through leases and replaced by one reference.

A query batch leases one snapshot and reads nothing newer. Pages that a newer snapshot no longer names are given back
when the last lease on any older snapshot ends, and not before. Who decides what becomes resident: plans and lookahead,
above.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex.types import I32, I64

__all__ = ["Lease", "Residency", "ResidencyStore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """One immutable snapshot."""

    version: int
    #: (nlist,) int16: device ordinal, -1 = host.
    list_device: npt.NDArray[np.int16]
    #: (nlist,) object: (n_pages,) int32 page numbers on that device, or None.
    list_pages: npt.NDArray[Any]
    n_resident: int
    #: The same page numbers for whoever wants those of many lists at once: list l's are ``page_log[list_log[l]:]``, as
    #: many as its rows take. (nlist,) int64; of a list that is not resident it says nothing.
    list_log: I64
    #: (n,) int32, shared by snapshots: what lies there never changes, newer entries follow behind.
    page_log: I32

    def resident_lists(self, device: int | None = None) -> I64:
        """Ids of resident lists, ascending; of one device when given."""
        return np.flatnonzero(self.list_device >= 0 if device is None else self.list_device == device)


class Lease:
    """The right to read one snapshot's pages. A context manager; releasing twice is harmless."""

    __slots__ = ("_store", "residency")

    def __init__(self, store: ResidencyStore, residency: Residency) -> None:
        self._store: ResidencyStore | None = store
        self.residency = residency

    def release(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store._release(self.residency.version)

    def __enter__(self) -> Residency:
        return self.residency

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class ResidencyStore:
    """Owner of the current snapshot and of pages waiting for their last reader. Thread-safe.

    ``reclaim(device, pages)`` is called, outside the lock, when pages are free to be reused; from whichever thread
    ended the last lease or published.
    """

    def __init__(self, nlist: int, reclaim: Callable[[int, I32], None]) -> None:
        self._lock = threading.Lock()
        self._reclaimed = threading.Condition(self._lock)
        #: Threads that are giving pages back right now.
        self._giving_back = 0
        self._reclaim = reclaim
        self._readers: dict[int, int] = {}
        #: (first version that no longer names the pages, device, pages), ascending versions.
        self._retired: list[tuple[int, int, I32]] = []
        self._log = np.empty(16, dtype=np.int32)
        self._logged = 0
        self._current = Residency(
            version=0,
            list_device=np.full(nlist, -1, dtype=np.int16),
            list_pages=np.full(nlist, None, dtype=object),
            n_resident=0,
            list_log=np.zeros(nlist, dtype=np.int64),
            page_log=self._log,
        )

    @property
    def current(self) -> Residency:
        return self._current

    def lease(self) -> Lease:
        """A lease on the current snapshot."""
        with self._lock:
            snapshot = self._current
            self._readers[snapshot.version] = self._readers.get(snapshot.version, 0) + 1
        return Lease(self, snapshot)

    def publish(self, loads: Mapping[int, tuple[int, I32]], drops: Iterable[int] = ()) -> Residency:
        """Replaces the snapshot: ``loads`` maps list -> (device, pages written), ``drops`` are lists to forget.

        A list in ``drops`` that is not resident is ignored. Where two devices loaded the same list at once, the first
        published copy stays and the pages of the second are given back.
        """
        with self._lock:
            old = self._current
            list_device, list_pages, list_log = old.list_device.copy(), old.list_pages.copy(), old.list_log.copy()
            version, n_resident = old.version + 1, old.n_resident
            for list_id in drops:
                if list_device[list_id] < 0:
                    continue
                self._retired.append((version, int(list_device[list_id]), list_pages[list_id]))
                list_device[list_id], list_pages[list_id] = -1, None
                n_resident -= 1
            surplus: list[tuple[int, int, I32]] = []
            for list_id, (device, pages) in loads.items():
                if list_device[list_id] >= 0:
                    surplus.append((version, device, pages))
                    continue
                list_device[list_id], list_pages[list_id] = device, pages
                list_log[list_id] = self._append(list_pages, list_log, pages)
                n_resident += 1
            for array in (list_device, list_pages, list_log):
                array.flags.writeable = False
            self._current = Residency(
                version=version,
                list_device=list_device,
                list_pages=list_pages,
                n_resident=n_resident,
                list_log=list_log,
                page_log=self._log,
            )
            freed = self._take_unread() + surplus
            snapshot = self._current
        self._give_back(freed)
        return snapshot

    def _append(self, list_pages: npt.NDArray[Any], list_log: I64, pages: I32) -> int:
        """Writes ``pages`` behind the log and returns where.

        A full log is copied without what nobody needs any more, into one of twice the size that is left: each entry is
        copied once or twice in its life, on average. Older snapshots keep the log that they know.
        """
        if self._logged + len(pages) > len(self._log):
            resident = [i for i, held in enumerate(list_pages) if held is not None and held is not pages]
            kept = np.concatenate([np.empty(0, np.int32), *(list_pages[i] for i in resident)])
            ends = np.cumsum([len(list_pages[i]) for i in resident], dtype=np.int64)
            list_log[resident] = np.append(0, ends[:-1]) if resident else []
            self._log = np.empty(2 * (len(kept) + len(pages)) + 16, dtype=np.int32)
            self._log[: len(kept)], self._logged = kept, len(kept)
        at = self._logged
        self._log[at : at + len(pages)] = pages
        self._logged = at + len(pages)
        return at

    def wait_reclaimed(self, version: int, timeout_s: float) -> bool:
        """Waits until all pages that ``version`` and older snapshots gave up are free; False after ``timeout_s``.

        New leases take newer snapshots, so this waits for batches in flight, not for traffic to stop.
        """
        with self._lock:
            return self._reclaimed.wait_for(
                lambda: not self._giving_back and all(entry[0] > version for entry in self._retired), timeout_s
            )

    def _release(self, version: int) -> None:
        with self._lock:
            left = self._readers[version] - 1
            if left:
                self._readers[version] = left
                return
            del self._readers[version]
            if not self._retired:
                return
            freed = self._take_unread()
        self._give_back(freed)

    def _take_unread(self) -> list[tuple[int, int, I32]]:
        self._giving_back += 1
        if not self._retired:
            return []
        oldest_read = min(self._readers, default=self._current.version)
        freed = [entry for entry in self._retired if entry[0] <= oldest_read]
        self._retired = [entry for entry in self._retired if entry[0] > oldest_read]
        return freed

    def _give_back(self, freed: list[tuple[int, int, I32]]) -> None:
        """Outside the lock, with ``_giving_back`` counted up by :meth:`_take_unread`."""
        try:
            for _, device, pages in freed:
                self._reclaim(device, pages)
        finally:
            with self._lock:
                self._giving_back -= 1
                self._reclaimed.notify_all()

    @property
    def n_leases(self) -> int:
        with self._lock:
            return sum(self._readers.values())

    def check_invariants(self) -> None:
        """Asserts: no page is named twice on a device, neither by the snapshot nor by retired entries."""
        with self._lock:
            current, retired = self._current, list(self._retired)
        owners: dict[int, list[I32]] = {}
        for list_id in current.resident_lists():
            owners.setdefault(int(current.list_device[list_id]), []).append(current.list_pages[list_id])
        for _, device, pages in retired:
            owners.setdefault(device, []).append(pages)
        for device, held in owners.items():
            pages = np.concatenate(held)
            assert len(np.unique(pages)) == len(pages), f"a page of device {device} has two owners"
        assert current.n_resident == int((current.list_device >= 0).sum())
        for list_id in current.resident_lists():
            at, pages = int(current.list_log[list_id]), current.list_pages[list_id]
            assert (current.page_log[at : at + len(pages)] == pages).all(), f"the log misplaces list {list_id}"
        assert all((p is not None) == (d >= 0) for p, d in zip(current.list_pages, current.list_device, strict=True))
