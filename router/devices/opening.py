"""What a router opens on its devices: a tier for each, with an arena for the plan's lists and for sessions.

What happens to a device that has no room then is the tier's business; whether it is tried again, the health policy's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hybridindex.config import RouterConfig
from hybridindex.errors import DeviceError, DeviceNotFoundError, InvalidInputError
from hybridindex.index.ivf import IVFIndex
from hybridindex.paging import DEFAULT_PAGE_BYTES, PageGeometry, scratch_for_budget
from hybridindex.router.devices.host_lists import HostLists
from hybridindex.tiers.contract.tier import Tier
from hybridindex.tiers.paged.device_tier import DeviceTier, PagedMemory
from hybridindex.tiers.serving import open_device_tier
from hybridindex.types import I64

if TYPE_CHECKING:
    from hybridindex.partitioner.plan import Plan

__all__ = ["TierOpening", "device_budgets"]

_log = logging.getLogger(__name__)

#: Device bytes kept for lookahead, over all sessions, where the budget has them and nothing else is said.
_DEFAULT_LOOKAHEAD_BYTES = 256 << 20


def device_budgets(plan: Plan | None, config: RouterConfig) -> tuple[int, ...]:
    """The budget of each device: what was given, or the plan's.

    Raises:
        InvalidInputError: the plan is for another number of devices, or nobody says a budget.
    """
    devices, given = config.devices, config.device_budget_bytes
    if not devices:
        return ()
    if plan is not None and plan.n_devices != len(devices):
        raise InvalidInputError(f"the plan is for {plan.n_devices} device(s); {len(devices)} were given: {devices}")
    if given is not None:
        return given if isinstance(given, tuple) else (given,) * len(devices)
    if plan is None:
        raise InvalidInputError("device_budget_bytes is missing: devices without a plan need an explicit budget")
    return plan.request.budgets


class TierOpening:
    """Opens the tiers of one router."""

    def __init__(self, index: IVFIndex, plan: Plan | None, config: RouterConfig) -> None:
        """``plan``: what the arenas are opened for.

        Raises:
            InvalidInputError: the configuration contradicts the plan.
        """
        self._index = index
        self._plan = plan
        self._config = config
        self._budgets = device_budgets(plan, config)
        self._page_bytes = DEFAULT_PAGE_BYTES if plan is None else plan.request.page_bytes
        geometry = PageGeometry.for_code_size(index.code_size, self._page_bytes)
        #: (nlist,) int64 device bytes of each list, page rounding included.
        self.list_bytes: I64 = geometry.pages_for(index.list_sizes) * geometry.page_bytes
        #: Whether single lists come and leave: not where a codec has them come in shards.
        self.moves_single_lists = index.device_codec() is not None
        #: The host memory that the tiers share.
        self.host_lists = HostLists(index, geometry, config.pin_host_lists if self.moves_single_lists else 0)

    def pinned_bytes(self, plan: Plan | None, ordinal: int) -> int:
        """Device bytes of the lists that ``plan`` wants on one device."""
        return 0 if plan is None else int(self.list_bytes[plan.list_device == ordinal].sum())

    def open(self, ordinal: int) -> Tier:
        """The tier of one device. One that cannot be used holds nothing, and says why.

        Raises:
            DeviceNotFoundError: there is no such device.
        """
        plan, config = self._plan, self._config
        name, budget = config.devices[ordinal], self._budgets[ordinal]
        pinned = self.pinned_bytes(plan, ordinal)
        scratch = scratch_for_budget(budget)
        if plan is not None and budget == plan.request.budgets[ordinal]:
            scratch = plan.request.scratch[ordinal]
        lookahead_bytes = config.lookahead_bytes if self.moves_single_lists else 0
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
                without_room="retry" if config.health.retry_open else "fail",
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
