"""Lists in page-locked host memory, cut into the arena's pages: a device can fetch them at the bus's full speed.

They are copies of the mapped file: registering a read-only file mapping with CUDA depends on the kernel, the driver and
the file system, and packed pages merge into longer copies. The memory is the host's and no part of a device budget.

Lists come and go while devices fetch them. A list's pages are reused when nothing refers to its :class:`PinnedList` any
more: whoever looked it up does, and every copy in progress.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hybridindex.paging import PageGeometry
from hybridindex.tiers.paged.blocks import Blocks, Run
from hybridindex.types import U8

if TYPE_CHECKING:
    import torch

__all__ = ["HostPages", "PinReport", "PinnedList", "PinnedMemory"]

#: A power of two: torch rounds pinned memory up to one.
_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PinReport:
    """What became of one request to pin lists in host memory."""

    #: Lists that were asked for and are there now.
    pinned: tuple[int, ...]
    #: Bytes of host memory that this request took.
    nbytes: int
    #: Why the rest is not pinned and goes through the staging buffers; "" when all are, or the limit has no room.
    reason: str = ""
    #: Lists that the limit had no room for.
    left_out: tuple[int, ...] = ()
    #: Lists that will have room once copies in progress have read what lies there.
    late: tuple[int, ...] = ()


class HostPages(NamedTuple):
    """Consecutive pages in one block: ``block`` is (n_slots, page_bytes) uint8 on the host."""

    block: torch.Tensor
    slot: int
    #: Where they begin, and where the block does.
    address: int
    region: int
    #: Whose pages these are: they stay as they are while anybody has this.
    owner: PinnedList | None = None


class PinnedList:
    """Where one list lies. It stays there as long as anybody refers to this."""

    __slots__ = ("__weakref__", "runs")

    def __init__(self, runs: tuple[Run, ...]) -> None:
        #: In the order of the list's pages.
        self.runs = runs

    def cut(self, first: int, n_pages: int) -> list[tuple[int, HostPages]]:
        """Pages ``first`` .. ``first + n_pages - 1``: how many follow each other, and where they lie."""
        if len(self.runs) == 1:
            (run,) = self.runs
            slot = run.first + first
            taken = min(run.n_pages - first, n_pages)
            block = run.block
            return [(taken, HostPages(block.data, slot, block.address_of(slot), block.address, self))]
        parts = []
        for run in self.runs:
            taken = min(run.n_pages - first, n_pages)
            if taken > 0:
                slot = run.first + first
                address = run.block.address_of(slot)
                parts.append((taken, HostPages(run.block.data, slot, address, run.block.address, self)))
                n_pages -= taken
            first = max(0, first - run.n_pages)
        return parts


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
        #: Of its pages; those of an arena that copies from here are the same.
        self.geometry = geometry
        self.page_locked = page_locked
        self._lock = threading.Lock()
        self._blocks = Blocks(geometry.page_bytes, block_bytes, page_locked=page_locked, limit_bytes=limit_bytes)
        self._lists: dict[int, PinnedList] = {}
        #: Pages of dropped lists that are still referred to.
        self._leaving: list[tuple[weakref.ref[PinnedList], tuple[Run, ...]]] = []

    def find(self, list_id: int) -> PinnedList | None:
        """Where a list lies. Takes no lock: writers hold it for long."""
        return self._lists.get(list_id)

    def list_ids(self) -> list[int]:
        """Lists that lie here now. Takes no lock."""
        return list(self._lists)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, what torch rounds them up to included."""
        return self._blocks.nbytes

    def hold(
        self,
        lists: Sequence[int],
        n_pages: Sequence[int],
        codes_of: Callable[[int], U8],
        cancelled: Callable[[], bool],
    ) -> PinReport:
        """Has the first of ``lists`` that fit there, and no others: those go, and what is missing is copied.

        Args:
            lists: ids in the order in which they are wanted; one that does not fit is left out, and later ones may fit.
            n_pages: of each.
            cancelled: asked before each block and each copy; nothing goes before all blocks are there.
        """
        with self._lock:
            before, reason = self.nbytes, self._grow_to(sum(n_pages), cancelled)
            if cancelled():
                return PinReport(pinned=(), nbytes=self.nbytes - before, reason="it was cancelled")
            chosen, left_out = self._choose(lists, n_pages)
            for list_id in self._lists.keys() - chosen.keys():
                self._drop(list_id)
            self._take_back()
            late: list[int] = []
            for list_id in chosen:
                if list_id in self._lists:
                    continue
                if cancelled():
                    reason = "it was cancelled"
                    break
                self._take_back()
                if not self._add(list_id, codes_of(list_id)):
                    late.append(list_id)
            return PinReport(
                pinned=tuple(list_id for list_id in chosen if list_id in self._lists),
                nbytes=self.nbytes - before,
                reason=reason,
                left_out=tuple(left_out),
                late=tuple(late),
            )

    def read(self, list_id: int) -> U8 | None:
        """The bytes of a list's pages, one after the other; None where it does not lie here."""
        held = self.find(list_id)
        if held is None:
            return None
        parts = [run.block.data[run.first : run.first + run.n_pages].view(-1).numpy() for run in held.runs]
        return np.concatenate(parts)

    def discard(self, list_id: int) -> None:
        """Lets one list go, if it lies here."""
        with self._lock:
            if list_id in self._lists:
                self._drop(list_id)

    def clear(self) -> None:
        """Frees the memory. No copy may be in progress."""
        with self._lock:
            self._lists.clear()
            self._leaving.clear()
            self._blocks.clear()

    def check_invariants(self) -> None:
        """Asserts that every page is free, or of one list, which is there or leaving, and that the limit holds."""
        with self._lock:
            runs = [run for pinned in self._lists.values() for run in pinned.runs]
            self._blocks.check_invariants(runs + [run for _, left in self._leaving for run in left])

    # With the lock held

    def _pages_of(self, codes: U8) -> int:
        return -(-len(codes) // self.geometry.rows_per_page)

    def _grow_to(self, n_pages: int, cancelled: Callable[[], bool]) -> str:
        """Why the host refused; "" where it did not."""
        try:
            self._blocks.grow_to(n_pages, cancelled)
        except (RuntimeError, MemoryError) as error:
            return f"the host refused page-locked memory after {self.nbytes:,} bytes: {error}"
        return ""

    def _choose(self, lists: Sequence[int], n_pages: Sequence[int]) -> tuple[dict[int, None], list[int]]:
        """Those that all blocks together have room for, in order, and the others."""
        room = self._blocks.n_pages
        chosen: dict[int, None] = {}
        left_out: list[int] = []
        for list_id, count in zip(lists, n_pages, strict=True):
            if count <= room:
                chosen[list_id] = None
                room -= count
            else:
                left_out.append(list_id)
        return chosen, left_out

    def _add(self, list_id: int, codes: U8) -> bool:
        """Copies ``codes`` (size, code_size) of one list, once; False where there is no room now."""
        if list_id in self._lists:
            return True
        runs = self._blocks.allocate(self._pages_of(codes))
        if runs is None:
            return False
        flat, done = codes.reshape(-1), 0
        for run in runs:
            there = run.block.data[run.first : run.first + run.n_pages].view(-1).numpy()
            part = flat[done : done + len(there)]
            np.copyto(there[: len(part)], part)
            done += len(part)
        # Last: a mover may look it up at any time.
        self._lists[list_id] = PinnedList(runs)
        return True

    def _drop(self, list_id: int) -> None:
        dropped = self._lists.pop(list_id)
        self._leaving.append((weakref.ref(dropped), dropped.runs))

    def _take_back(self) -> None:
        """Frees the pages of dropped lists that are not referred to any more."""
        leaving, self._leaving = self._leaving, []
        for reference, runs in leaving:
            if reference() is None:
                self._blocks.free(runs)
            else:
                self._leaving.append((reference, runs))
