"""Where a residency store gives the pages of a benchmark's tier back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hybridindex.types import I32

if TYPE_CHECKING:
    from hybridindex.tiers.paged.device_tier import DeviceTier

__all__ = ["reclaim_into"]


def reclaim_into(tier: DeviceTier) -> Callable[[int, I32], None]:
    """The ``reclaim`` of a :class:`ResidencyStore` over this tier's arena."""
    return lambda _device, pages: tier.arena.pages.free(pages)
