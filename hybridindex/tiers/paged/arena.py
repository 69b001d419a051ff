"""The arena: one address range of a device cut into fixed-size pages, and the allocator of those pages.

It knows bytes and pages, not lists; :mod:`hybridindex.tiers.contract.residency` decides when a page is given back. It
grows and shrinks by blocks of pages; a page that stays keeps its number and its place, so nothing is copied and no scan
notices. Only :meth:`PageArena.shrink` frees device memory, which a co-tenant may see.
"""

from __future__ import annotations

import bisect
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hybridindex.extension import native
from hybridindex.paging import PageGeometry
from hybridindex.tiers.contract.address_range import AddressRange, reserve
from hybridindex.types import I32, I64, U8

if TYPE_CHECKING:
    import torch

__all__ = ["DEFAULT_BLOCK_BYTES", "FreeRuns", "PageAllocator", "PageArena", "page_runs"]

#: Pages come and go by blocks of so many bytes: large enough that few are partly in use, small beside a plan's lists.
DEFAULT_BLOCK_BYTES = 8 << 20


class FreeRuns:
    """Free pages as runs, where the extension is missing, whose class of this name finds the same pages."""

    def __init__(self) -> None:
        #: Sorted by start; no run touches another.
        self._runs: list[tuple[int, int]] = []
        self.n_free = 0

    @property
    def end(self) -> int:
        """The end of the last run; 0 without one."""
        return sum(self._runs[-1]) if self._runs else 0

    def allocate(self, n: int, whole: bool) -> I32 | None:
        """See :meth:`PageAllocator.allocate`."""
        if n < 1:
            raise ValueError("at least one page must be asked for")
        if n > self.n_free:
            return None
        fitting = [(length, start) for start, length in self._runs if length >= n]
        if fitting:
            start = min(fitting)[1]
            self.withdraw(start, n)
            return np.arange(start, start + n, dtype=np.int32)
        if whole:
            return None
        taken: list[I32] = []
        for start, length in sorted(self._runs, key=lambda run: (-run[1], run[0])):
            count = min(n, length)
            self.withdraw(start, count)
            taken.append(np.arange(start, start + count, dtype=np.int32))
            n -= count
            if not n:
                break
        return np.sort(np.concatenate(taken))

    def allocate_each(self, counts: I64) -> tuple[I32, list[bool]]:
        """See :meth:`PageAllocator.allocate_each`."""
        found = [self.allocate(n, whole=False) for n in counts.tolist()]
        pages = [part for part in found if part is not None]
        return np.concatenate([np.empty(0, dtype=np.int32), *pages]), [part is not None for part in found]

    def add(self, start: int, n: int) -> None:
        """Makes ``n`` pages free. Raises ValueError: one is."""
        if n < 1:
            return
        if start < 0:
            raise ValueError("page outside the arena")
        at = bisect.bisect_left(self._runs, (start, 0))
        end = start + n
        if (at < len(self._runs) and end > self._runs[at][0]) or (at and sum(self._runs[at - 1]) > start):
            raise ValueError("page freed twice")
        self.n_free += n
        first, last = at, at
        if at < len(self._runs) and self._runs[at][0] == end:
            end, last = sum(self._runs[at]), at + 1
        if at and sum(self._runs[at - 1]) == start:
            start, first = self._runs[at - 1][0], at - 1
        self._runs[first:last] = [(start, end - start)]

    def free(self, pages: I32) -> None:
        """Makes these pages free. Raises ValueError: one is."""
        for start, n in page_runs(pages):
            self.add(start, n)

    def withdraw(self, start: int, n: int) -> bool:
        """Takes these pages away if all of them are free."""
        at = bisect.bisect_right(self._runs, (start, self.n_free)) - 1
        if at < 0 or sum(self._runs[at]) < start + n:
            return False
        first, end = self._runs[at][0], sum(self._runs[at])
        self._runs[at : at + 1] = [(a, b - a) for a, b in ((first, start), (start + n, end)) if a < b]
        self.n_free -= n
        return True

    def pages(self) -> I32:
        """Numbers of the free pages, ascending."""
        runs = [np.arange(start, start + n, dtype=np.int32) for start, n in self._runs]
        return np.concatenate([np.empty(0, dtype=np.int32), *runs])


class PageAllocator:
    """Hands out page numbers, contiguous where a run is free: 0..n_pages-1, until pages come or go. Thread-safe."""

    def __init__(self, n_pages: int) -> None:
        #: Pages that there are, free or not.
        self.n_pages = n_pages
        #: No page has a number from here on.
        self._end = n_pages
        self._lock = threading.Lock()
        self._runs: Any = FreeRuns() if native is None else native.FreeRuns()
        self._runs.add(0, n_pages)

    @property
    def n_free(self) -> int:
        free: int = self._runs.n_free
        return free

    def allocate(self, n: int, *, whole: bool = False) -> I32 | None:
        """``n`` page numbers, ascending, or None when fewer are free: the start of the shortest run that has them, the
        lowest of those; scattered only without one, from the longest runs, and None then where they have to be
        ``whole``."""
        with self._lock:
            pages: I32 | None = self._runs.allocate(n, whole)
        return pages

    def allocate_each(self, counts: I64) -> tuple[I32, list[bool]]:
        """As :meth:`allocate` for each of ``counts`` in turn: the pages one after the other, and who got them."""
        with self._lock:
            pages, found = self._runs.allocate_each(counts)
        return pages, found

    def free(self, pages: I32) -> None:
        """Gives pages back.

        Raises:
            ValueError: one of them is free, or none of the arena's. Our own bug.
        """
        with self._lock:
            self._runs.free(pages)
            self._check_end()

    def add(self, start: int, n: int) -> None:
        """``n`` more pages, which were not there: free."""
        with self._lock:
            self._end = max(self._end, start + n)
            self.n_pages += n
            self._runs.add(start, n)

    def withdraw(self, start: int, n: int) -> bool:
        """Takes ``n`` pages away for good if all of them are free."""
        with self._lock:
            if not self._runs.withdraw(start, n):
                return False
            self.n_pages -= n
            return True

    def free_pages(self) -> I32:
        """Numbers of the free pages, ascending: (n_free,) int32."""
        with self._lock:
            pages: I32 = self._runs.pages()
        return pages

    def _check_end(self) -> None:
        if self._runs.end > self._end:
            raise ValueError("page outside the arena")

    def check_invariants(self) -> None:
        """Asserts that free pages are ascending, among those that there are, and as many as are said to be."""
        with self._lock:
            pages = self._runs.pages()
            assert self._runs.n_free == len(pages) <= self.n_pages <= self._end
            assert self._runs.end <= self._end
        assert (np.diff(pages) > 0).all(), "free runs overlap"


def page_runs(pages: I32) -> list[tuple[int, int]]:
    """Runs (start, length) of consecutive numbers, in the order given."""
    if len(pages) == 0:
        return []
    # Once per list that moves: np.diff takes longer than all of this.
    breaks = (pages[1:] - pages[:-1] != 1).nonzero()[0] + 1
    if len(breaks) == 0:
        return [(int(pages[0]), len(pages))]
    return [(int(run[0]), len(run)) for run in np.split(pages, breaks)]


class PageArena:
    """Pages of ``geometry.page_bytes`` in one address range of one device.

    Writers own the pages they allocated until they publish them; readers hold a residency lease. One thread at a time
    grows and shrinks.
    """

    def __init__(
        self,
        device: torch.device,
        geometry: PageGeometry,
        n_pages: int,
        *,
        limit_pages: int = 0,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        taken: bool = True,
    ) -> None:
        """Takes the memory, or leaves that to :meth:`take`: until then no page may be read or written.

        Args:
            limit_pages: most pages that it may ever have; ``n_pages`` if that is more.

        Raises:
            OutOfBudgetError, DeviceError: as :meth:`take`.
        """
        import torch

        self.device = device
        self.geometry = geometry
        self.pages = PageAllocator(n_pages)
        self.limit_pages = max(n_pages, limit_pages)
        #: By which it grows and shrinks.
        self.block_pages = max(1, block_bytes // geometry.page_bytes)
        starts = np.arange(0, self.limit_pages, self.block_pages)
        #: Pages of each block that are there, its first ones.
        self._there = np.clip(n_pages - starts, 0, self.block_pages)
        self._range: AddressRange | None = None
        #: Parts of the range that have memory.
        self._filled = np.zeros(0, dtype=np.bool_)
        self.data: torch.Tensor = torch.zeros((0, geometry.page_bytes), dtype=torch.uint8)
        if taken:
            self.take()

    @property
    def nbytes(self) -> int:
        return self.pages.n_pages * self.geometry.page_bytes

    @property
    def taken(self) -> bool:
        """Whether its pages have memory."""
        return self._range is not None

    def take(self) -> None:
        """Takes the memory of the pages, once; again after :meth:`release`. Nothing where there is no page.

        Raises:
            OutOfBudgetError: the device has no room for it.
            DeviceError: the device refused for another reason.
        """
        n_pages, page_bytes = self.pages.n_pages, self.geometry.page_bytes
        if not n_pages:
            return
        reserved = reserve(self.device, self.limit_pages * page_bytes, n_pages * page_bytes)
        self._filled = np.zeros(-(-reserved.data.numel() // reserved.part_bytes), dtype=np.bool_)
        self._fill(reserved)
        self.limit_pages = min(self.limit_pages, reserved.data.numel() // page_bytes)
        self.data = reserved.data[: self.limit_pages * page_bytes].view(self.limit_pages, page_bytes)
        self._range = reserved

    def release(self) -> None:
        """Lets the memory go. Page numbers stay accounted for; nothing may be read or written afterwards."""
        self._range = None
        self.data = self.data[:0].clone()

    def grow(self, n_pages: int) -> None:
        """Has ``n_pages`` pages, or as many as it may ever have: those that are there, and the lowest that are not.

        Raises:
            OutOfBudgetError, DeviceError: as :meth:`take`; then it has as many as before.
        """
        missing = np.clip(self._block_limits() - self._there, 0, None)
        # The lowest first, as many as are wanted.
        added = np.clip(n_pages - self.pages.n_pages - (np.cumsum(missing) - missing), 0, missing)
        before, self._there = self._there, self._there + added
        try:
            if self._range is not None:
                self._fill(self._range)
        except BaseException:
            self._there = before
            raise
        for block in np.flatnonzero(added).tolist():
            self.pages.add(block * self.block_pages + int(before[block]), int(added[block]))

    def shrink(self, n_pages: int, *, whole_blocks: bool = True) -> None:
        """Gives back free pages, the last ones first, down to ``n_pages`` pages: blocks of which every page is free, or
        the free end of a block, too. Nothing where the range has one part."""
        if len(self._filled) == 1:
            return
        for block in np.flatnonzero(self._there)[::-1].tolist():
            count = int(self._there[block])
            cut = min(count, self.pages.n_pages - n_pages)
            if cut < count and whole_blocks:
                cut = 0
            if cut > 0 and self.pages.withdraw(block * self.block_pages + count - cut, cut):
                self._there[block] -= cut
        if self._range is not None:
            for first, n in _runs(self._filled & ~self._needed(self._range.part_bytes)):
                self._range.release(first, n)
                self._filled[first : first + n] = False

    def used_beyond(self, n_pages: int) -> I32:
        """Pages in use that have to go for ``n_pages`` to be left: of the last ones, ascending."""
        starts = np.arange(len(self._there)) * self.block_pages
        blocks = [np.arange(a, b, dtype=np.int32) for a, b in zip(starts, starts + self._there, strict=True)]
        there = np.concatenate([np.empty(0, dtype=np.int32), *blocks])
        return np.setdiff1d(there[max(0, n_pages) :], self.pages.free_pages())

    def _block_limits(self) -> I64:
        starts = np.arange(len(self._there)) * self.block_pages
        return np.clip(self.limit_pages - starts, 0, self.block_pages)

    def _needed(self, part_bytes: int) -> npt.NDArray[np.bool_]:
        """Which parts of the range hold a page that is there. Two blocks may share a part."""
        needed = np.zeros(len(self._filled), dtype=np.bool_)
        block_bytes = self.block_pages * self.geometry.page_bytes
        for block in np.flatnonzero(self._there).tolist():
            end = block * block_bytes + int(self._there[block]) * self.geometry.page_bytes
            needed[block * block_bytes // part_bytes : -(-end // part_bytes)] = True
        return needed

    def _fill(self, reserved: AddressRange) -> None:
        """Memory for every page that is there; all or nothing."""
        done: list[tuple[int, int]] = []
        try:
            for first, n in _runs(self._needed(reserved.part_bytes) & ~self._filled):
                reserved.commit(first, n)
                done.append((first, n))
        except BaseException:
            for first, n in done:
                reserved.release(first, n)
            raise
        for first, n in done:
            self._filled[first : first + n] = True

    def write(self, pages: I32, codes: U8) -> None:
        """Copies ``codes``, uint8, into ``pages`` of an arena in main memory, on the calling thread.

        Arenas on a GPU are written through a copy stream, by :class:`hybridindex.tiers.paged.copier.Copier`.
        """
        flat, target = codes.reshape(-1), self.data.numpy().reshape(-1)
        page_bytes = self.geometry.page_bytes
        done = 0
        for start, length in page_runs(pages):
            nbytes = min(length * page_bytes, len(flat) - done)
            at = start * page_bytes
            np.copyto(target[at : at + nbytes], flat[done : done + nbytes])
            done += nbytes
        assert done == len(flat), "codes do not fit the pages"

    def rows(self, pages: I32, first: int, count: int) -> torch.Tensor:
        """Rows first .. first + count - 1 of the list stored in ``pages``: (count, code_size) uint8 on the device.

        A view where their pages are consecutive, else a copy of just these rows.
        """
        import torch

        geometry = self.geometry
        by_row = self.data.view(-1, geometry.code_size)
        head, last = first // geometry.rows_per_page, (first + count - 1) // geometry.rows_per_page
        touched = pages[head : last + 1]
        if int(touched[-1]) - int(touched[0]) == len(touched) - 1 and bool((np.diff(touched) == 1).all()):
            start = int(touched[0]) * geometry.rows_per_page + first % geometry.rows_per_page
            return by_row[start : start + count]
        wanted = np.arange(first, first + count)
        at = pages[wanted // geometry.rows_per_page].astype(np.int64) * geometry.rows_per_page
        at += wanted % geometry.rows_per_page
        return by_row.index_select(0, torch.from_numpy(at).to(self.device))


def _runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Runs (first, length) of what is set."""
    return page_runs(np.flatnonzero(mask).astype(np.int32))
