"""Blocks of host memory for pinned lists, cut into pages that are handed out in runs.

Page-locking takes long, so a block is kept until the end and its pages are used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridindex.tiers.paged.arena import PageAllocator, page_runs

if TYPE_CHECKING:
    import torch

__all__ = ["Blocks", "Run"]


class _Block:
    __slots__ = ("_page_bytes", "address", "data", "pages")

    def __init__(self, data: torch.Tensor) -> None:
        #: (n_pages, page_bytes) uint8.
        self.data = data
        self.pages = PageAllocator(len(data))
        self.address, self._page_bytes = data.data_ptr(), data.shape[1]

    def address_of(self, page: int) -> int:
        return self.address + page * self._page_bytes


@dataclass(frozen=True, slots=True)
class Run:
    """Pages of one block that follow each other."""

    block: _Block
    first: int
    n_pages: int


class Blocks:
    """Owner of the blocks. Not thread-safe: its owner locks."""

    def __init__(self, page_bytes: int, block_bytes: int, *, page_locked: bool, limit_bytes: int | None) -> None:
        """
        Args:
            block_bytes: of a block, unless the limit leaves less; a power of two, as torch rounds pinned memory up to.
            limit_bytes: most bytes of all blocks; None: what the host gives.
        """
        self._page_bytes = page_bytes
        self._block_pages = max(1, block_bytes // page_bytes)
        self._page_locked = page_locked
        self._limit_bytes = limit_bytes
        self._blocks: list[_Block] = []
        #: Bytes of all blocks, what torch rounds them up to included.
        self.nbytes = 0

    @property
    def n_pages(self) -> int:
        """Pages of all blocks."""
        return sum(block.pages.n_pages for block in self._blocks)

    @property
    def n_free(self) -> int:
        return sum(block.pages.n_free for block in self._blocks)

    def grow_to(self, n_pages: int, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Takes blocks until they have ``n_pages`` together, or the limit has no room for a page.

        Args:
            cancelled: asked before each block.

        Raises:
            RuntimeError, MemoryError: the host has no such memory left.
        """
        import torch

        missing = n_pages - self.n_pages
        while missing > 0 and not cancelled():
            n = self._block_pages
            if self._limit_bytes is not None:
                n = min(n, _floor_power(self._limit_bytes - self.nbytes) // self._page_bytes)
            if n < 1:
                return
            data = torch.empty((n, self._page_bytes), dtype=torch.uint8, device="cpu", pin_memory=self._page_locked)
            nbytes = data.numel()
            self.nbytes += 1 << (nbytes - 1).bit_length() if self._page_locked else nbytes
            self._blocks.append(_Block(data))
            missing -= n

    def allocate(self, n: int) -> tuple[Run, ...] | None:
        """``n`` free pages, in one run where there is one; None where fewer are free."""
        for block in self._blocks:
            if (pages := block.pages.allocate(n, whole=True)) is not None:
                return (Run(block, int(pages[0]), n),)
        if self.n_free < n:
            return None
        runs: list[Run] = []
        for block in self._blocks:
            taken = min(n, block.pages.n_free)
            if taken and (pages := block.pages.allocate(taken)) is not None:
                runs += [Run(block, first, count) for first, count in page_runs(pages)]
                n -= taken
        return tuple(runs)

    def free(self, runs: Iterable[Run]) -> None:
        """Gives pages back, each once."""
        for run in runs:
            run.block.pages.free(np.arange(run.first, run.first + run.n_pages, dtype=np.int32))

    def clear(self) -> None:
        """Lets the memory go."""
        self._blocks.clear()
        self.nbytes = 0

    def check_invariants(self, owned: Iterable[Run]) -> None:
        """Asserts that every page is free or in one of ``owned``, and that the limit holds."""
        of_block: dict[int, list[Run]] = {}
        for run in owned:
            of_block.setdefault(id(run.block), []).append(run)
        for block in self._blocks:
            block.pages.check_invariants()
            taken = [np.arange(run.first, run.first + run.n_pages) for run in of_block.get(id(block), [])]
            every = np.sort(np.concatenate([block.pages.free_pages(), *taken]))
            assert np.array_equal(every, np.arange(block.pages.n_pages)), "a page is lost, or has two owners"
        assert self._limit_bytes is None or self.nbytes <= self._limit_bytes


def _floor_power(nbytes: int) -> int:
    """The largest power of two that is at most ``nbytes``; 0 below 1."""
    return 1 << (nbytes.bit_length() - 1) if nbytes > 0 else 0
