"""The arena: one device allocation cut into fixed-size pages, and the allocator of those pages.

It knows bytes and pages, not lists; :mod:`hybridindex.tiers.contract.residency` decides when a page is given back. The
arena never grows or shrinks, so a co-tenant never sees device memory freed.
"""

from __future__ import annotations

import bisect
import threading
from typing import TYPE_CHECKING

import numpy as np

from hybridindex.errors import DeviceError, OutOfBudgetError
from hybridindex.paging import PageGeometry
from hybridindex.types import I32, U8

if TYPE_CHECKING:
    import torch

__all__ = ["PageAllocator", "PageArena"]


class PageAllocator:
    """Hands out page numbers 0..n_pages-1, contiguous where a run is free. Thread-safe."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self._lock = threading.Lock()
        #: Free runs as parallel lists, sorted by start, never touching each other.
        self._starts: list[int] = [0] if n_pages else []
        self._lengths: list[int] = [n_pages] if n_pages else []
        self._n_free = n_pages

    @property
    def n_free(self) -> int:
        return self._n_free

    def allocate(self, n: int, *, whole: bool = False) -> I32 | None:
        """``n`` page numbers, ascending, or None when fewer are free. First fit; scattered only without a long run, and
        None then where they have to be ``whole``."""
        if n < 1:
            raise ValueError(f"asked for {n} pages")
        with self._lock:
            if n > self._n_free:
                return None
            for i, length in enumerate(self._lengths):
                if length >= n:
                    return self._take(i, n)
            if whole:
                return None
            taken: list[I32] = []
            while n:
                part = self._take(0, min(n, self._lengths[0]))
                taken.append(part)
                n -= len(part)
            return np.concatenate(taken)

    def _take(self, run: int, n: int) -> I32:
        start = self._starts[run]
        if n == self._lengths[run]:
            del self._starts[run], self._lengths[run]
        else:
            self._starts[run] += n
            self._lengths[run] -= n
        self._n_free -= n
        return np.arange(start, start + n, dtype=np.int32)

    def free(self, pages: I32) -> None:
        """Gives pages back. Freeing a free page is our own bug and asserts."""
        with self._lock:
            for start, length in page_runs(pages):
                self._free_run(start, length)

    def _free_run(self, start: int, length: int) -> None:
        at = bisect.bisect_left(self._starts, start)
        end = start + length
        assert start >= 0, "page outside the arena"
        assert end <= self.n_pages, "page outside the arena"
        assert at == len(self._starts) or end <= self._starts[at], "page freed twice"
        assert at == 0 or self._starts[at - 1] + self._lengths[at - 1] <= start, "page freed twice"
        self._n_free += length
        joins_next = at < len(self._starts) and self._starts[at] == end
        joins_previous = at > 0 and self._starts[at - 1] + self._lengths[at - 1] == start
        if joins_previous:
            self._lengths[at - 1] += length
            if joins_next:
                self._lengths[at - 1] += self._lengths[at]
                del self._starts[at], self._lengths[at]
        elif joins_next:
            self._starts[at] = start
            self._lengths[at] += length
        else:
            self._starts.insert(at, start)
            self._lengths.insert(at, length)

    def free_pages(self) -> I32:
        """Numbers of the free pages, ascending: (n_free,) int32."""
        with self._lock:
            runs = [np.arange(s, s + n, dtype=np.int32) for s, n in zip(self._starts, self._lengths, strict=True)]
        return np.concatenate(runs) if runs else np.empty(0, dtype=np.int32)

    def check_invariants(self) -> None:
        """Asserts that free runs are sorted, disjoint, not adjacent, and add up."""
        with self._lock:
            previous_end = -1
            for start, length in zip(self._starts, self._lengths, strict=True):
                assert length > 0
                assert start > previous_end, "free runs overlap or touch"
                previous_end = start + length
            assert previous_end <= self.n_pages
            assert sum(self._lengths) == self._n_free


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
    """``n_pages`` pages of ``geometry.page_bytes`` in one tensor on one device.

    Writers own the pages they allocated until they publish them; readers hold a residency lease. The tensor itself is
    never resized.
    """

    def __init__(self, device: torch.device, geometry: PageGeometry, n_pages: int, *, taken: bool = True) -> None:
        """Takes the memory, or leaves that to :meth:`take`: until then no page may be read or written.

        Raises:
            OutOfBudgetError, DeviceError: as :meth:`take`.
        """
        import torch

        self.device = device
        self.geometry = geometry
        self.pages = PageAllocator(n_pages)
        self.data: torch.Tensor = torch.zeros((0, geometry.page_bytes), dtype=torch.uint8)
        if taken:
            self.take()

    def take(self) -> None:
        """Allocates the arena, once; again after :meth:`release`.

        Raises:
            OutOfBudgetError: the device has no room for it.
            DeviceError: the device refused for another reason.
        """
        import torch

        device, nbytes, n_pages = self.device, self.nbytes, self.pages.n_pages
        try:
            # Zeroed, so that every page is really there (and counted by the system) from the start.
            self.data = torch.zeros((n_pages, self.geometry.page_bytes), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise OutOfBudgetError(f"device {device} has no room for an arena of {nbytes:,} bytes: {error}") from error
        except RuntimeError as error:
            raise DeviceError(f"device {device} refused an arena of {nbytes:,} bytes: {error}") from error
        if device.type == "cuda":
            # The zeroing must be over before another stream writes.
            torch.cuda.current_stream(device).synchronize()

    @property
    def nbytes(self) -> int:
        return self.pages.n_pages * self.geometry.page_bytes

    def release(self) -> None:
        """Lets the memory go. Page numbers stay accounted for; nothing may be read or written afterwards."""
        self.data = self.data[:0].clone()

    def write(self, pages: I32, codes: U8) -> None:
        """Copies ``codes`` (size, code_size) uint8 into ``pages`` of an arena in main memory, on the calling thread.

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
