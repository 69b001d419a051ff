"""Lists in page-locked host memory, cut into the arena's pages: what a device can fetch at the bus's full speed.

A copy beside the mapped file and not the mapping itself: registering a read-only file mapping with CUDA depends on the
kernel, the driver and the file system, and packed pages merge into longer copies. Which lists are worth the memory is
decided above. The memory is the host's and no part of a device budget.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
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
    #: Why the rest is not pinned and goes through the staging buffers; "" when all are, or the limit has no room.
    reason: str = ""
    #: Lists that the limit had no room for.
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostPages:
    """Consecutive pages of one list in one block: ``block`` is (n_slots, page_bytes) uint8 on the host."""

    block: torch.Tensor
    slot: int


class PinnedMemory:
    """Owner of pinned copies of lists, for one device or for several whose pages are alike. Thread-safe."""

    def __init__(
        self,
        geometry: PageGeometry,
        *,
        page_locked: bool,
        block_bytes: int = _BLOCK_BYTES,
        limit_bytes: int | None = None,
    ) -> None:
        """
        Args:
            page_locked: False, for the stand-in: the same packing in plain memory.
            limit_bytes: most bytes of all blocks; None: what the host gives.
        """
        self._geometry = geometry
        self._page_locked = page_locked
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._block_slots = max(1, block_bytes // geometry.page_bytes)
        self._lists: dict[int, HostPages] = {}
        self._block: torch.Tensor | None = None
        self._next_slot = 0
        #: Bytes of all blocks, what torch rounds them up to included.
        self.nbytes = 0

    def find(self, list_id: int) -> HostPages | None:
        return self._lists.get(list_id)

    def add_all(self, lists: Iterable[int], codes_of: Callable[[int], U8], cancelled: Callable[[], bool]) -> PinReport:
        """:meth:`add` one after the other; ends where the host refuses."""
        pinned: list[int] = []
        left_out: list[int] = []
        reason = ""
        with self._lock:
            before = self.nbytes
            for list_id in lists:
                if cancelled():
                    reason = "it was cancelled"
                    break
                try:
                    (pinned if self.add(list_id, codes_of(list_id)) else left_out).append(list_id)
                except (RuntimeError, MemoryError) as error:
                    reason = f"the host refused page-locked memory after {self.nbytes:,} bytes: {error}"
                    break
            return PinReport(pinned=tuple(pinned), nbytes=self.nbytes - before, reason=reason, left_out=tuple(left_out))

    def add(self, list_id: int, codes: U8) -> bool:
        """Copies ``codes`` (size, code_size) of one list, once. A list lies in one block. One thread at a time.

        Returns:
            Whether it is there now; False: the limit has no room for it.

        Raises:
            RuntimeError, MemoryError: the host has no such memory left.
        """
        if list_id in self._lists:
            return True
        n_pages = int(self._geometry.pages_for(np.int64(len(codes))))  # type: ignore[arg-type]
        room = self._room_for(n_pages)
        if room is None:
            return False
        block, slot = room
        flat = codes.reshape(-1)
        np.copyto(block[slot : slot + n_pages].view(-1)[: len(flat)].numpy(), flat)
        self._next_slot = slot + n_pages
        # Last: the mover may look it up at any time.
        self._lists[list_id] = HostPages(block, slot)
        return True

    def _room_for(self, n_pages: int) -> tuple[torch.Tensor, int] | None:
        import torch

        if self._block is None or self._next_slot + n_pages > len(self._block):
            page_bytes = self._geometry.page_bytes
            n_slots = max(self._block_slots, n_pages)
            if self._limit_bytes is not None:
                n_slots = min(n_slots, _floor_power(self._limit_bytes - self.nbytes) // page_bytes)
            if n_slots < n_pages:
                return None
            shape = (n_slots, page_bytes)
            self._block = torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=self._page_locked)
            self._next_slot = 0
            taken = self._block.numel()
            self.nbytes += 1 << (taken - 1).bit_length() if self._page_locked else taken
        return self._block, self._next_slot

    def clear(self) -> None:
        """Lets the memory go. No copy may be on its way."""
        with self._lock:
            self._lists.clear()
            self._block = None
            self.nbytes = 0


def _floor_power(nbytes: int) -> int:
    """The largest power of two that is at most ``nbytes``; 0 below 1."""
    return 1 << (nbytes.bit_length() - 1) if nbytes > 0 else 0
