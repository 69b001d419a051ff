"""The ring of staging buffers, and how pages that lie somewhere on the host become as few copies as possible.

Buffers are page-locked host memory, outside the device budget. Streams, tickets and failures are
:mod:`hybridindex.tiers.copier`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridindex.errors import DeviceError
from hybridindex.tiers.pinned import HostPages
from hybridindex.tiers.streams import CopyMark
from hybridindex.types import I32, U8

if TYPE_CHECKING:
    import torch

__all__ = ["StagingBuffer", "StagingRing", "merge_runs"]


@dataclass(slots=True)
class StagingBuffer:
    """``n_slots`` pages of host memory, filled from the front: data is (n_slots, page_bytes) uint8."""

    data: torch.Tensor
    #: Behind the last copies out of it; None when nothing reads it.
    mark: CopyMark | None = None
    n_filled: int = 0

    def fill(self, n_pages: int, codes: U8) -> HostPages:
        """Puts ``codes`` (rows, code_size), which take ``n_pages`` pages, behind what is there."""
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
        """The buffer whose turn it is; its last copies may still be on their way.

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
        """Lets the memory go. No copy may be on its way."""
        self._buffers = []


def merge_runs(arena: torch.Tensor, placed: Sequence[tuple[I32, HostPages]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The fewest copies (rows of ``arena``, rows of a host block) that bring every list to its pages.

    Args:
        arena: (n_pages, page_bytes) uint8.
        placed: pages (n,) int32 of each part of a list, and where on the host they lie.
    """
    counts = [len(pages) for pages, _ in placed]
    pages = np.concatenate([pages for pages, _ in placed])
    first_of = np.cumsum([0, *counts[:-1]])
    slots = np.arange(len(pages)) + np.repeat([source.slot for _, source in placed] - first_of, counts)
    blocks = np.repeat([id(source.block) for _, source in placed], counts)
    goes_on = (pages[1:] - pages[:-1] == 1) & (slots[1:] - slots[:-1] == 1) & (blocks[1:] == blocks[:-1])
    starts = np.append(0, np.flatnonzero(~goes_on) + 1)
    lengths = np.append(starts[1:], len(pages)) - starts
    part_of = np.searchsorted(first_of, starts, side="right") - 1
    return [
        (arena[page : page + length], placed[part][1].block[slot : slot + length])
        for page, slot, length, part in zip(
            pages[starts].tolist(), slots[starts].tolist(), lengths.tolist(), part_of.tolist(), strict=True
        )
    ]
