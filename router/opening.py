"""What a router opens on its devices: a tier for each, with an arena for the plan's lists and for sessions.

What happens to a device that has no room then is the tier's business; whether it is tried again, the health policy's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hybridindex.errors import DeviceError, DeviceNotFoundError
from hybridindex.index.ivf import IVFIndex
from hybridindex.paging import DEFAULT_PAGE_BYTES, PageGeometry, scratch_for_budget
from hybridindex.tiers.device import DeviceTier
from hybridindex.tiers.pinned import PinnedMemory
from hybridindex.tiers.residency import Residency
from hybridindex.tiers.serving import open_device_tier
from hybridindex.tiers.tier import Tier
from hybridindex.types import I64

if TYPE_CHECKING:
    from hybridindex.partitioner.plan import Plan

__all__ = ["TierOpening"]

_log = logging.getLogger(__name__)

#: Device bytes kept for lookahead, over all sessions, where the budget has them and nothing else is said.
_DEFAULT_LOOKAHEAD_BYTES = 256 << 20


class TierOpening:
    """Opens the tiers of one router, and owns the host memory that they share."""

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
        self._pin_host_lists = pin_host_lists if self.moves_single_lists else 0
        self._geometry = geometry
        self._pinned: PinnedMemory | None = None

    def pinned_bytes(self, plan: Plan | None, ordinal: int) -> int:
        """Device bytes of the lists that ``plan`` wants on one device."""
        return 0 if plan is None else int(self.list_bytes[plan.list_device == ordinal].sum())

    @property
    def pinned_host_bytes(self) -> int:
        """Page-locked host memory that lists take."""
        return 0 if self._pinned is None else self._pinned.nbytes

    def pin_host_lists(self, tiers: Sequence[DeviceTier], residency: Residency) -> None:
        """Copies the hottest lists that no device holds into page-locked memory, as far as they fit, once."""
        tier = next((tier for tier in tiers if tier.usable), None)
        if tier is None or self._pinned is None or self._pinned.nbytes:
            return
        lists = self._hottest_first()
        outside = lists[(residency.list_device[lists] < 0) & (self._index.list_sizes[lists] > 0)]
        report = tier.pin_lists(outside.tolist())
        _log.info("%d lists take %d bytes of page-locked memory", len(report.pinned), report.nbytes)

    def close(self) -> None:
        """Lets shared memory go, after the tiers."""
        if self._pinned is not None:
            self._pinned.clear()

    def _shared(self, name: str) -> PinnedMemory | None:
        if self._pin_host_lists and self._pinned is None:
            self._pinned = PinnedMemory(self._geometry, page_locked=name != "cpu", limit_bytes=self._pin_host_lists)
        return self._pinned

    def _hottest_first(self) -> I64:
        """Every list: by the accesses that the plan's profile counted; without a plan by their ids."""
        if self._plan is None:
            return np.arange(self._index.nlist)
        return np.argsort(-self._plan.analysis.profile.access.list_accesses, kind="stable")

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
                scratch_bytes=scratch,
                page_bytes=self._page_bytes,
                without_room="retry" if retry else "fail",
                pinned=self._shared(name),
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
