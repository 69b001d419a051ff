"""The ring of staging buffers, and merging pages on the host into as few copies as possible.

Buffers are page-locked host memory, outside the device budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridindex.errors import DeviceError
from hybridindex.tiers.paged.pinned import HostPages
from hybridindex.tiers.paged.streams import CopyMark
from hybridindex.types import I32, U8

if TYPE_CHECKING:
    import torch

__all__ = ["StagingBuffer", "StagingRing", "merge_runs"]

#: Bytes of one copy at most: a query's tables, which go to the same device meanwhile, wait for no longer one.
_MOST_COPIED = 4 << 20


@dataclass(slots=True)
class StagingBuffer:
    """``n_slots`` pages of host memory, filled from the front: data is (n_slots, page_bytes) uint8."""

    data: torch.Tensor
    #: Behind the last copies out of it; None when nothing reads it.
    mark: CopyMark | None = None
    n_filled: int = 0

    def fill(self, n_pages: int, codes: U8) -> HostPages:
        """Puts ``codes`` (rows, code_size), which take ``n_pages`` pages, behind what is filled."""
        flat = codes.reshape(-1)
        rows = self.data[self.n_filled : self.n_filled + n_pages].view(-1)
        np.copyto(rows[: len(flat)].numpy(), flat)
        filled = HostPages(self.data, self.n_filled)
        self.n_filled += n_pages
        return filled


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
            self._buffers = [StagingBuffer(data) for data in self._allocate()]
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


def merge_runs(arena: torch.Tensor, placed: Sequence[tuple[I32, HostPages]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The fewest copies (rows of ``arena``, rows of a host block) that bring every list to its pages, none of more than
    4 MiB or a page.

    Args:
        arena: (n_pages, page_bytes) uint8.
        placed: pages (n,) int32 of each part of a list, and where on the host they lie.
    """
    # Once per buffer, and the bus waits for it. A send has some ten lists of some ten pages, and on so few numbers
    # Python's own are faster than numpy.
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    most = max(1, _MOST_COPIED // arena.shape[1])
    block, page, slot, length = placed[0][1].block, int(placed[0][0][0]), placed[0][1].slot, 0
    for pages, source in placed:
        numbers = pages.tolist()
        first, n = numbers[0], len(numbers)
        step = min(n, most) if numbers == list(range(first, first + n)) else 1
        runs = [(numbers[at], min(step, n - at)) for at in range(0, n, step)]
        at = source.slot
        for number, count in runs:
            if number != page + length or at != slot + length or source.block is not block or length + count > most:
                copies.append((arena[page : page + length], block[slot : slot + length]))
                block, page, slot, length = source.block, number, at, 0
            length += count
            at += count
    return [*copies, (arena[page : page + length], block[slot : slot + length])]
