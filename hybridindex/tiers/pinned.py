"""Lists in page-locked host memory, cut into the arena's pages: what a device can fetch at the bus's full speed.

A copy beside the mapped file and not the mapping itself: registering a read-only file mapping with CUDA depends on the
kernel, the driver and the file system, and packed pages merge into longer copies. Which lists are worth the memory is
decided above. The memory is the host's and no part of a device budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridindex.paging import PageGeometry
from hybridindex.types import U8

if TYPE_CHECKING:
    import torch

__all__ = ["HostPages", "PinReport", "PinnedMemory"]

#: A power of two: torch rounds pinned memory up to one.
_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PinReport:
    """What became of one request to pin lists in host memory."""

    pinned: tuple[int, ...]
    #: Bytes of host memory that this request took.
    nbytes: int
    #: Why the rest is not pinned and goes through the staging buffers; "" when all are.
    reason: str = ""


@dataclass(frozen=True, slots=True)
class HostPages:
    """Consecutive pages of one list in one block: ``block`` is (n_slots, page_bytes) uint8 on the host."""

    block: torch.Tensor
    slot: int


class PinnedMemory:
    """Owner of the pinned copies of one device's lists. One thread adds; any thread looks up."""

    def __init__(self, geometry: PageGeometry, *, page_locked: bool, block_bytes: int = _BLOCK_BYTES) -> None:
        """``page_locked`` False, for the stand-in: the same packing in plain memory."""
        self._geometry = geometry
        self._page_locked = page_locked
        self._block_slots = max(1, block_bytes // geometry.page_bytes)
        self._lists: dict[int, HostPages] = {}
        self._block: torch.Tensor | None = None
        self._next_slot = 0
        #: Bytes of all blocks.
        self.nbytes = 0

    def find(self, list_id: int) -> HostPages | None:
        return self._lists.get(list_id)

    def add(self, list_id: int, codes: U8) -> None:
        """Copies ``codes`` (size, code_size) of one list, once. A list lies in one block.

        Raises:
            RuntimeError, MemoryError: the host has no such memory left.
        """
        if list_id in self._lists:
            return
        n_pages = int(self._geometry.pages_for(np.int64(len(codes))))  # type: ignore[arg-type]
        block, slot = self._room_for(n_pages)
        flat = codes.reshape(-1)
        np.copyto(block[slot : slot + n_pages].view(-1)[: len(flat)].numpy(), flat)
        self._next_slot = slot + n_pages
        # Last: the mover may look it up at any time.
        self._lists[list_id] = HostPages(block, slot)

    def _room_for(self, n_pages: int) -> tuple[torch.Tensor, int]:
        import torch

        if self._block is None or self._next_slot + n_pages > len(self._block):
            shape = (max(self._block_slots, n_pages), self._geometry.page_bytes)
            self._block = torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=self._page_locked)
            self._next_slot = 0
            self.nbytes += self._block.numel()
        return self._block, self._next_slot

    def clear(self) -> None:
        """Lets the memory go. No copy may be on its way."""
        self._lists.clear()
        self._block = None
        self.nbytes = 0
