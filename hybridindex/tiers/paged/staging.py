"""The ring of staging buffers, and merging pages on the host into as few copies as possible.

Buffers are page-locked host memory, outside the device budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hybridindex.errors import DeviceError
from hybridindex.extension import native
from hybridindex.tiers.paged.streams import Copies, CopyMark
from hybridindex.types import I32, I64, U8

if TYPE_CHECKING:
    import torch

__all__ = ["Placed", "StagingBuffer", "StagingRing", "merge_pages", "merge_runs"]

#: Bytes of one copy at most: a query's tables, which go to the same device meanwhile, wait for no longer one.
_MOST_COPIED = 4 << 20


class Placed(NamedTuple):
    """Pages of one list, and where on the host their bytes lie, one page after the other: an address."""

    pages: I32
    source: int
    #: Where the allocation begins that they lie in.
    region: int


@dataclass(slots=True)
class StagingBuffer:
    """``n_slots`` pages of host memory, filled from the front: data is (n_slots, page_bytes) uint8."""

    data: torch.Tensor
    #: ``data``, flat, and where it begins.
    flat: U8
    address: int
    #: Behind the last copies out of it; None when nothing reads it.
    mark: CopyMark | None = None
    n_filled: int = 0

    def fill(self, n_pages: int, codes: U8) -> int:
        """Puts ``codes`` (rows, code_size), which take ``n_pages`` pages, behind what is filled; where that is."""
        source, at = codes.reshape(-1), self.n_filled * self.data.shape[1]
        np.copyto(self.flat[at : at + len(source)], source)
        self.n_filled += n_pages
        return self.address + at


class StagingRing:
    """``n_buffers`` buffers, used in turns by one thread. Allocated when first asked for one."""

    def __init__(self, *, n_buffers: int, n_slots: int, page_bytes: int, page_locked: bool) -> None:
        self._n_buffers = n_buffers
        self._shape = (n_slots, page_bytes)
        self._page_locked = page_locked
        self._buffers: list[StagingBuffer] = []
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Host memory taken so far."""
        return sum(buffer.data.numel() for buffer in self._buffers)

    def next(self) -> StagingBuffer:
        """The buffer whose turn it is; its last copies may still be in progress.

        Raises:
            DeviceError: the host has no such memory left.
        """
        if not self._buffers:
            self._buffers = [StagingBuffer(data, data.view(-1).numpy(), data.data_ptr()) for data in self._allocate()]
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % self._n_buffers
        return buffer

    def _allocate(self) -> list[torch.Tensor]:
        import torch

        try:
            return [
                torch.empty(self._shape, dtype=torch.uint8, device="cpu", pin_memory=self._page_locked)
                for _ in range(self._n_buffers)
            ]
        except (RuntimeError, MemoryError) as error:
            needed = self._n_buffers * self._shape[0] * self._shape[1]
            raise DeviceError(f"the host has no {needed:,} bytes of page-locked memory for staging: {error}") from error

    def clear(self) -> None:
        """Frees the memory. No copy may be in progress."""
        self._buffers = []


def merge_runs(placed: Sequence[Placed], base: int, page_bytes: int) -> Copies:
    """The fewest copies that bring every part of a list to its pages, none of more than 4 MiB or a page, and none from
    two allocations, of which CUDA promises nothing.

    Args:
        placed: parts of lists.
        base: where the arena begins, as an address; pages lie there by number.
    """
    pages = np.concatenate([part.pages for part in placed])
    counts = np.array([len(part.pages) for part in placed], dtype=np.int64)
    sources = np.array([part.source for part in placed], dtype=np.int64)
    regions = np.array([part.region for part in placed], dtype=np.int64)
    most = max(page_bytes, _MOST_COPIED)
    if native is None:
        return merge_pages(pages, counts, sources, regions, base, page_bytes, most)
    return Copies(*native.merge_runs(pages, counts, sources, regions, base, page_bytes, most))


def merge_pages(pages: I32, counts: I64, sources: I64, regions: I64, base: int, page_bytes: int, most: int) -> Copies:
    """As the extension does it, where that is missing: pages (n,), and of each part how many of them and where on the
    host they and their allocation begin."""
    ends = np.cumsum(counts)
    region = np.repeat(regions, counts)
    target = base + pages.astype(np.int64) * page_bytes
    source = np.repeat(sources - (ends - counts) * page_bytes, counts) + np.arange(len(pages)) * page_bytes
    joined = (np.diff(target) == page_bytes) & (np.diff(source) == page_bytes) & (np.diff(region) == 0)
    # Runs are cut from their beginning on.
    place = np.arange(len(pages))
    first = np.concatenate(([True], ~joined))
    within = place - np.maximum.accumulate(np.where(first, place, 0))
    starts = np.flatnonzero(within % (most // page_bytes) == 0)
    return Copies(target[starts], source[starts], np.diff(starts, append=len(pages)) * page_bytes)
