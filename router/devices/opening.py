"""What a router opens on its devices: a tier for each, with an arena for the plan's lists and for sessions.

What happens to a device that has no room then is the tier's business; whether it is tried again, the health policy's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hybridindex.errors import DeviceError, DeviceNotFoundError
from hybridindex.index.ivf import IVFIndex
from hybridindex.paging import DEFAULT_PAGE_BYTES, PageGeometry, scratch_for_budget
from hybridindex.router.devices.host_lists import HostLists
from hybridindex.tiers.contract.tier import Tier
from hybridindex.tiers.paged.device_tier import DeviceTier, PagedMemory
from hybridindex.tiers.serving import open_device_tier
from hybridindex.types import I64

if TYPE_CHECKING:
    from hybridindex.partitioner.plan import Plan

__all__ = ["TierOpening"]

_log = logging.getLogger(__name__)

#: Device bytes kept for lookahead, over all sessions, where the budget has them and nothing else is said.
_DEFAULT_LOOKAHEAD_BYTES = 256 << 20


class TierOpening:
    """Opens the tiers of one router."""

    def __init__(self, index: IVFIndex, plan: Plan | None, *, pin_host_lists: int) -> None:
        """
        Args:
            plan: what the arenas are opened for.
            pin_host_lists: most bytes of page-locked host memory for lists.
        """
        self._index = index
        self._plan = plan
        self._page_bytes = DEFAULT_PAGE_BYTES if plan is None else plan.request.page_bytes
        geometry = PageGeometry.for_code_size(index.code_size, self._page_bytes)
        #: (nlist,) int64 device bytes of each list, page rounding included.
        self.list_bytes: I64 = geometry.pages_for(index.list_sizes) * geometry.page_bytes
        #: Whether single lists come and leave: not where a codec has them come in shards.
        self.moves_single_lists = index.device_codec() is not None
        #: The host memory that the tiers share.
        self.host_lists = HostLists(index, geometry, pin_host_lists if self.moves_single_lists else 0)

    def pinned_bytes(self, plan: Plan | None, ordinal: int) -> int:
        """Device bytes of the lists that ``plan`` wants on one device."""
        return 0 if plan is None else int(self.list_bytes[plan.list_device == ordinal].sum())

    def open(self, name: str, ordinal: int, budget: int, lookahead_bytes: int | None, *, retry: bool) -> Tier:
        """The tier of one device. One that cannot be used holds nothing, and says why.

        Args:
            retry: whether one that has no room now is tried again.

        Raises:
            DeviceNotFoundError: there is no such device.
        """
        plan = self._plan
        pinned = self.pinned_bytes(plan, ordinal)
        scratch = scratch_for_budget(budget)
        if plan is not None and budget == plan.request.budgets[ordinal]:
            scratch = plan.request.scratch[ordinal]
        if not self.moves_single_lists:
            lookahead_bytes = 0
        if lookahead_bytes is None:
            lookahead_bytes = max(0, min(_DEFAULT_LOOKAHEAD_BYTES, budget - scratch - pinned))
        # More than the whole index would never be used.
        wanted = min(pinned + lookahead_bytes, int(self.list_bytes.sum()))
        try:
            tier = open_device_tier(
                self._index,
                name,
                ordinal,
                budget_bytes=budget,
                wanted_bytes=wanted,
                memory=PagedMemory(
                    scratch_bytes=scratch, page_bytes=self._page_bytes, pinned=self.host_lists.memory_for(name)
                ),
                without_room="retry" if retry else "fail",
            )
        except DeviceNotFoundError:
            raise
        except DeviceError as error:
            _log.error("%s; the host serves its lists", error)
            tier = DeviceTier(self._index, name, ordinal, budget_bytes=0, wanted_bytes=0, without_room="fail")
            tier.disabled_reason = str(error)
        if tier.disabled_reason and pinned:
            _log.warning("device %s holds nothing: %s", tier.label, tier.disabled_reason)
        return tier
