"""Where a residency store gives the pages of a benchmark's tier back, and pinned lists for it to fetch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hybridindex.types import I32

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex
    from hybridindex.tiers.paged.device_tier import DeviceTier
    from hybridindex.tiers.paged.pinned import PinnedMemory, PinReport

__all__ = ["pin_all", "reclaim_into"]


def reclaim_into(tier: DeviceTier) -> Callable[[int, I32], None]:
    """The ``reclaim`` of a :class:`ResidencyStore` over this tier's arena."""
    return lambda _device, pages: tier.arena.pages.free(pages)


def pin_all(index: IVFIndex, *, page_locked: bool) -> tuple[PinnedMemory, PinReport]:
    """Copies of all lists of ``index`` in memory for tiers to fetch from."""
    from hybridindex.paging import PageGeometry
    from hybridindex.tiers.paged.pinned import PinnedMemory
    from hybridindex.tiers.serving import page_bytes_of

    geometry = PageGeometry.for_code_size(index.code_size, page_bytes_of(index))
    lists = np.flatnonzero(index.list_sizes)
    memory = PinnedMemory(geometry, page_locked=page_locked)
    n_pages = geometry.pages_for(index.list_sizes[lists]).tolist()
    return memory, memory.hold(lists.tolist(), n_pages, index.list_codes, lambda: False)
