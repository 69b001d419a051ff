"""Residency: the versioned map list -> device and pages. Searches read it through leases; writers replace it.

A query batch leases one snapshot and reads nothing newer. Pages that a newer snapshot no longer names are given back
when the last lease on any older snapshot ends, and not before.

**Leases do not wait for publishing.** Writers build the next snapshot under a lock of their own. The lock that leases
take is held only while the reference changes and readers are counted. A snapshot is a few arrays of numbers: numpy
releases the GIL while it copies them, which it does not for arrays of objects.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hybridindex.types import I32, I64

__all__ = ["Lease", "ListPages", "Residency", "ResidencyStore"]

_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """One immutable snapshot."""

    version: int
    #: (nlist,) int16: device ordinal, -1 = host.
    list_device: npt.NDArray[np.int16]
    n_resident: int
    #: A list's page numbers are ``page_log[list_log[l] :]``, ``page_counts[l]`` of them. (nlist,) int64; of a list that
    #: is not resident it says nothing.
    list_log: I64
    #: (nlist,) int32; 0 where a list is not resident.
    page_counts: I32
    #: (n,) int32, shared by snapshots: what lies there never changes, newer entries follow behind.
    page_log: I32

    @property
    def list_pages(self) -> ListPages:
        """By list: (n_pages,) int32 page numbers on its device, or None."""
        return ListPages(self)

    def pages_of(self, lists: I64) -> I32:
        """The page numbers of many lists, one list after the other."""
        return _gather(self.page_log, self.list_log[lists], self.page_counts[lists])

    def holds(self, list_id: int, device: int, pages: I32) -> bool:
        """Whether the list is resident in exactly these pages."""
        at, count = int(self.list_log[list_id]), int(self.page_counts[list_id])
        # Once per list that moves: np.array_equal takes longer than all of this.
        same = count == len(pages) and int(self.list_device[list_id]) == device
        return same and count > 0 and bool((self.page_log[at : at + count] == pages).all())

    def begin_at(self, lists: I64, device: int, pages: I32) -> npt.NDArray[np.bool_]:
        """Which of ``lists`` are resident on ``device`` from these first pages on, one each: (n,) bool."""
        here: npt.NDArray[np.bool_] = self.list_device[lists] == device
        here[here] = self.page_log[self.list_log[lists[here]]] == pages[here]
        return here

    def part(self, first: int, n: int) -> Residency:
        """Of ``n`` lists from ``first`` on, as lists 0 .. n - 1."""
        own, list_device = slice(first, first + n), self.list_device[first : first + n]
        return Residency(
            version=self.version,
            list_device=list_device,
            n_resident=int(np.count_nonzero(list_device >= 0)),
            list_log=self.list_log[own],
            page_counts=self.page_counts[own],
            page_log=self.page_log,
        )

    def resident_lists(self, device: int | None = None) -> I64:
        """Ids of resident lists, ascending; of one device when given."""
        return np.flatnonzero(self.list_device >= 0 if device is None else self.list_device == device)


class ListPages:
    """The pages of a snapshot's lists, one list at a time."""

    __slots__ = ("_residency",)

    def __init__(self, residency: Residency) -> None:
        self._residency = residency

    def __getitem__(self, list_id: int) -> I32 | None:
        at, count = int(self._residency.list_log[list_id]), int(self._residency.page_counts[list_id])
        return self._residency.page_log[at : at + count] if count else None

    def __len__(self) -> int:
        return len(self._residency.list_device)

    def __iter__(self) -> Iterator[I32 | None]:
        return (self[list_id] for list_id in range(len(self)))


def _gather(page_log: I32, at: I64, counts: I32) -> I32:
    """``counts[i]`` entries from ``at[i]`` on, for each i, one after the other."""
    ends = np.cumsum(counts, dtype=np.int64)
    if not len(ends):
        return np.empty(0, dtype=np.int32)
    return page_log.take(np.arange(ends[-1]) + np.repeat(at - ends + counts, counts))


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

    ``reclaim(device, pages)`` is called, outside the locks, when pages are free to be reused, those of many lists at
    once; from whichever thread ended the last lease or published.
    """

    def __init__(self, nlist: int, reclaim: Callable[[int, I32], None]) -> None:
        #: Held while the next snapshot is built; the log is the writers'.
        self._writing = threading.Lock()
        #: Held for moments, and within the other: the reference, the readers and what waits for them.
        self._lock = threading.Lock()
        self._reclaimed = threading.Condition(self._lock)
        #: Threads that are giving pages back right now.
        self._giving_back = 0
        self._reclaim = reclaim
        #: Called with the loads of each publication, after it, by the publishing thread; must neither block nor raise.
        self.listeners: list[Callable[[Mapping[int, tuple[int, I32]]], None]] = []
        self._readers: dict[int, int] = {}
        #: (first version that no longer names them, pages by device), ascending versions.
        self._retired: deque[tuple[int, list[tuple[int, I32]]]] = deque()
        self._log = np.empty(16, dtype=np.int32)
        self._logged = 0
        self._current = Residency(
            version=0,
            list_device=np.full(nlist, -1, dtype=np.int16),
            n_resident=0,
            list_log=np.zeros(nlist, dtype=np.int64),
            page_counts=np.zeros(nlist, dtype=np.int32),
            page_log=_frozen(self._log),
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

    def publish(
        self,
        loads: Mapping[int, tuple[int, I32]],
        drops: Iterable[int] = (),
        *,
        grown: Mapping[int, I32] | None = None,
    ) -> Residency:
        """Replaces the snapshot: ``loads`` maps list -> (device, pages written), ``drops`` are lists to forget, and
        ``grown`` resident lists that have these pages behind those that they had.

        A list in ``drops`` that is not resident is ignored. Where two devices loaded the same list at once, the first
        published copy stays and the pages of the second are given back. Publishers wait for each other.
        """
        with self._writing:
            snapshot, retired, surplus = self._next(loads, np.fromiter(drops, dtype=np.int64), grown or {})
            with self._lock:
                self._current = snapshot
                if retired:
                    self._retired.append((snapshot.version, retired))
                freed = self._take_unread()
        self._give_back(freed + surplus)
        for listen in self.listeners:
            listen(loads)
        return snapshot

    def _next(
        self, loads: Mapping[int, tuple[int, I32]], drops: I64, grown: Mapping[int, I32]
    ) -> tuple[Residency, list[tuple[int, I32]], list[tuple[int, I32]]]:
        """The snapshot after this one, the (device, pages) that it gives up, and those of ``loads`` that came late."""
        old = self._current
        list_device, list_log, page_counts = old.list_device.copy(), old.list_log.copy(), old.page_counts.copy()
        dropped, retired = drops, []
        if len(drops):  # not so where lists land, which is once a buffer
            dropped = np.unique(drops)
            dropped = dropped[list_device[dropped] >= 0]
            devices = list_device[dropped]
            retired = [(device, old.pages_of(dropped[devices == device])) for device in np.unique(devices).tolist()]
            list_device[dropped], page_counts[dropped] = -1, 0
        lists, fresh, surplus = np.fromiter(loads, dtype=np.int64), list(loads.values()), []
        late = list_device[lists] >= 0
        if late.any():
            surplus = [fresh[at] for at in np.flatnonzero(late).tolist()]
            lists, fresh = lists[~late], [fresh[at] for at in np.flatnonzero(~late).tolist()]
        if fresh:
            brought = [pages for _, pages in fresh]
            counts = np.fromiter(map(len, brought), dtype=np.int32)
            at = self._append(np.concatenate(brought), list_log, page_counts)
            list_log[lists] = at + np.cumsum(counts) - counts
            list_device[lists], page_counts[lists] = [device for device, _ in fresh], counts
        if grown := {list_id: pages for list_id, pages in grown.items() if len(pages)}:
            lists = np.fromiter(grown, dtype=np.int64)
            assert (list_device[lists] >= 0).all(), "a list that is not resident cannot grow"
            longer = [np.concatenate((old.pages_of(lists[i : i + 1]), pages)) for i, pages in enumerate(grown.values())]
            counts = np.array([len(pages) for pages in longer], dtype=np.int32)
            at = self._append(np.concatenate(longer), list_log, page_counts)
            list_log[lists], page_counts[lists] = at + np.cumsum(counts) - counts, counts
        snapshot = Residency(
            version=old.version + 1,
            list_device=_frozen(list_device),
            n_resident=old.n_resident - len(dropped) + len(fresh),
            list_log=_frozen(list_log),
            page_counts=_frozen(page_counts),
            page_log=_frozen(self._log),
        )
        return snapshot, retired, surplus

    def _append(self, pages: I32, list_log: I64, page_counts: I32) -> int:
        """Writes ``pages`` behind the log and returns where.

        A full log is copied without the entries that are not needed any more, into one of twice that size: each entry
        is copied once or twice on average. Older snapshots keep the log that they know.
        """
        if self._logged + len(pages) > len(self._log):
            resident = np.flatnonzero(page_counts)
            counts = page_counts[resident]
            kept = _gather(self._log, list_log[resident], counts)
            list_log[resident] = np.cumsum(counts, dtype=np.int64) - counts
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
                lambda: not self._giving_back and (not self._retired or self._retired[0][0] > version), timeout_s
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

    def _take_unread(self) -> list[tuple[int, I32]]:
        self._giving_back += 1
        freed: list[tuple[int, I32]] = []
        oldest_read = min(self._readers, default=self._current.version)
        while self._retired and self._retired[0][0] <= oldest_read:
            freed += self._retired.popleft()[1]
        return freed

    def _give_back(self, freed: list[tuple[int, I32]]) -> None:
        """Outside the locks, with ``_giving_back`` counted up by :meth:`_take_unread`."""
        try:
            for device, pages in freed:
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
        lists = current.resident_lists()
        owners: dict[int, list[I32]] = {}
        for device in np.unique(current.list_device[lists]).tolist():
            owners[device] = [current.pages_of(current.resident_lists(device))]
        for device, pages in (entry for _, gone in retired for entry in gone):
            owners.setdefault(device, []).append(pages)
        for device, held in owners.items():
            every = np.concatenate(held)
            assert len(np.unique(every)) == len(every), f"a page of device {device} has two owners"
        assert current.n_resident == len(lists)
        assert np.array_equal(np.flatnonzero(current.page_counts), lists), "a list has pages and no device, or no pages"


def _frozen(array: npt.NDArray[_T]) -> npt.NDArray[_T]:
    """A read-only view."""
    view = array.view()
    view.flags.writeable = False
    return view
