"""What a router opens on its devices: a tier for each, with an arena for the plan's lists and for sessions.

The health policy says whether a device without room is tried again; the tier does it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hybridindex.config import RouterConfig
from hybridindex.errors import DeviceError, DeviceNotFoundError, InvalidInputError
from hybridindex.index.ivf import IVFIndex
from hybridindex.paging import PageGeometry, centroid_share, format_bytes, scratch_for_budget
from hybridindex.router.devices.host_lists import HostLists
from hybridindex.router.lookahead.windows import Windows
from hybridindex.tiers.contract.tier import Tier
from hybridindex.tiers.paged.device_tier import DeviceTier, PagedMemory
from hybridindex.tiers.serving import open_device_tier, page_bytes_of, tier_of
from hybridindex.types import I64

if TYPE_CHECKING:
    from hybridindex.partitioner.plan import Plan

__all__ = ["TierOpening", "device_budgets", "wanted_devices"]

_log = logging.getLogger(__name__)

#: Device bytes kept for lookahead, over all sessions, where the budget has them and nothing is said or measured.
_DEFAULT_LOOKAHEAD_BYTES = 256 << 20


def device_budgets(plan: Plan | None, config: RouterConfig) -> tuple[int, ...]:
    """The budget of each device: what was given, or the plan's.

    Raises:
        InvalidInputError: the plan is for another number of devices, or no budget is given.
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


def wanted_devices(plan: Plan, index: IVFIndex) -> npt.NDArray[np.int16]:
    """(n_pieces,) int16: where ``plan`` wants each piece that is here; -1 = on no device."""
    absent, wanted = index.integrity.absent, plan.list_device
    if index.rows is index:
        return wanted if absent is None else np.where(absent, np.int16(-1), wanted)
    if index.n_pieces == index.nlist:
        return wanted
    # A share has all codes.
    rows = plan.row_device if absent is None else np.where(absent, np.int16(-1), plan.row_device)
    return np.concatenate([wanted, rows])


class TierOpening:
    """Opens the tiers of one router."""

    def __init__(self, index: IVFIndex, plan: Plan | None, config: RouterConfig, windows: Windows) -> None:
        """
        Args:
            plan: what the arenas are opened for.
            windows: what can be copied behind generation.

        Raises:
            InvalidInputError: the configuration contradicts the plan.
        """
        self._windows = windows
        self._index = index
        self._plan = plan
        self._config = config
        self._budgets = device_budgets(plan, config)
        #: Whether single lists come and leave: not where a codec has them come in shards.
        self.moves_single_lists = index.device_codec() is not None
        #: Most bytes of a page: as the plan says that the arenas are opened for, without one as it fits the lists. It
        #: stays, whatever plans are applied later.
        self.page_bytes = plan.request.page_bytes if plan and self.moves_single_lists else page_bytes_of(index)
        geometry = PageGeometry.for_code_size(index.page_row_bytes, self.page_bytes, group_rows=index.group_rows)
        self._whole_page_bytes = geometry.page_bytes
        self._code_bytes = 0 if index.rows is index else int(index.list_bytes.sum())
        #: (n_pieces,) int64 device bytes of each piece, page rounding included.
        self.list_bytes: I64 = geometry.pages_of_bytes(index.piece_bytes) * geometry.page_bytes
        #: Of all that lookahead may bring.
        self._index_bytes = int(self.list_bytes.sum())
        #: The host memory that the tiers share.
        self.host_lists = HostLists(index, geometry, config.pin_host_lists if self.moves_single_lists else 0)

    def set_budgets(self, budgets: tuple[int, ...]) -> None:
        """Other budgets than were configured, from the next change of plan on."""
        self._budgets = budgets

    def pinned_bytes(self, plan: Plan | None, ordinal: int) -> int:
        """Device bytes of the lists that ``plan`` wants on one device."""
        return 0 if plan is None else int(self.list_bytes[wanted_devices(plan, self._index) == ordinal].sum())

    def _bytes_elsewhere(self, plan: Plan | None, ordinal: int) -> int:
        """Device bytes of what is scanned of the lists, but for those that ``plan`` wants on one device."""
        scanned = self.list_bytes[: self._index.nlist]
        return int((scanned if plan is None else scanned[plan.list_device != ordinal]).sum())

    def budget_of(self, plan: Plan | None, ordinal: int) -> int:
        """What one device's arena may take at most, scratch included: what was configured, else the plan's."""
        given = self._config.device_budget_bytes
        return self._budgets[ordinal] if given is not None or plan is None else plan.request.budgets[ordinal]

    def wanted_bytes(self, plan: Plan | None, ordinal: int) -> int:
        """Bytes of pages that are of use on one device under ``plan``: its lists, and lookahead's share."""
        return self.pinned_bytes(plan, ordinal) + self.lookahead_bytes(plan, ordinal)

    def lookahead_bytes(self, plan: Plan | None, ordinal: int) -> int:
        """Bytes of pages that are kept for sessions on one device under ``plan``, whose lists come first."""
        if not self.moves_single_lists:
            return 0
        room = max(0, self.budget_of(plan, ordinal) - self.scratch_of(plan, ordinal))
        asked = self._config.lookahead_bytes
        if asked is None:
            asked = self._windows.share_bytes(plan)
        # Whole pages, and no more than the whole index: that would never be used. Rows beside codes only where room was
        # asked for.
        pinned, most = self.pinned_bytes(plan, ordinal), self._index_bytes
        if asked is None:
            asked, most = _DEFAULT_LOOKAHEAD_BYTES, pinned + self._bytes_elsewhere(plan, ordinal)
        return max(0, min(asked, min(room - room % self._whole_page_bytes, most) - pinned))

    def say_other_pages(self, plan: Plan) -> None:
        """Says in the log that ``plan`` was made for pages of another size, where that is so."""
        if self.moves_single_lists and self._config.devices and plan.request.page_bytes != self.page_bytes:
            _log.info(
                "the plan was made for pages of %s, and devices are open with pages of %s: what does not fit stays on "
                "the host until they are opened with this plan",
                format_bytes(plan.request.page_bytes),
                format_bytes(self.page_bytes),
            )

    def _say_lookahead(self, plan: Plan | None, tier: Tier) -> None:
        asked, measured = self._config.lookahead_bytes, self._windows.describe(plan)
        default = f"{format_bytes(_DEFAULT_LOOKAHEAD_BYTES)}: no window or no bandwidth was measured"
        why = "as configured" if asked is not None else measured or default
        nbytes = format_bytes(self.lookahead_bytes(plan, tier.ordinal))
        budget = format_bytes(self.budget_of(plan, tier.ordinal))
        _log.info("device %s: %s for lookahead (%s), within a budget of %s", tier.label, nbytes, why, budget)

    def scratch_of(self, plan: Plan | None, ordinal: int) -> int:
        """What of one device's budget is for scans: as ``plan`` has it, where that has this budget."""
        budget = self.budget_of(plan, ordinal)
        if plan is not None and budget == plan.request.budgets[ordinal]:
            return plan.request.scratch[ordinal]
        return scratch_for_budget(budget, self._code_bytes) + self._centroid_share(budget, ordinal)

    def _centroid_share(self, budget: int, ordinal: int) -> int:
        """What of it the centroids take, which the first device has."""
        config = self._config
        if ordinal or config.coarse_quantization == "host" or not self.moves_single_lists:
            return 0
        return centroid_share(budget, tier_of(self._index, config.devices[ordinal]).centroid_bytes)

    def _centroid_bytes(self, ordinal: int) -> int | None:
        """What of one device's scratch is for the centroids; None: it does not have them."""
        plan, config = self._plan, self._config
        name, asked = config.devices[ordinal], config.coarse_quantization
        if ordinal or asked == "host" or not (self.moves_single_lists and self._index.coarse.is_ours):
            return None
        if name == "cpu":
            return 0 if asked == "device" else None
        budget = self.budget_of(plan, ordinal)
        nbytes = self._centroid_share(budget, ordinal)
        if 0 < nbytes <= self.scratch_of(plan, ordinal) - scratch_for_budget(budget, self._code_bytes):
            return nbytes
        if not nbytes:
            _log.info(
                "device %s: the host finds the lists of all queries, as its budget is too small for centroids", name
            )
            return None
        _log.warning(
            "device %s: the host finds the lists of all queries, as the plan leaves no memory for the centroids (%s): "
            "make the plan anew, and open the router with it",
            name,
            format_bytes(nbytes),
        )
        return None

    def open(self, ordinal: int) -> Tier:
        """The tier of one device. One that cannot be used holds nothing, and says why.

        Raises:
            DeviceNotFoundError: there is no such device.
        """
        plan, config = self._plan, self._config
        name, budget = config.devices[ordinal], self._budgets[ordinal]
        try:
            tier = open_device_tier(
                self._index,
                name,
                ordinal,
                budget_bytes=budget,
                wanted_bytes=self.wanted_bytes(plan, ordinal),
                memory=PagedMemory(
                    scratch_bytes=self.scratch_of(plan, ordinal),
                    page_bytes=self.page_bytes,
                    pinned=self.host_lists.memory_for(name),
                    centroid_bytes=self._centroid_bytes(ordinal),
                ),
                without_room="retry" if config.health.retry_open else "fail",
            )
        except DeviceNotFoundError:
            raise
        except DeviceError as error:
            _log.error("%s; the host serves its lists", error)
            nothing = PagedMemory(page_bytes=self.page_bytes)
            tier = DeviceTier(
                self._index, name, ordinal, budget_bytes=0, wanted_bytes=0, memory=nothing, without_room="fail"
            )
            tier.disabled_reason = str(error)
        if tier.disabled_reason and self.pinned_bytes(plan, ordinal):
            _log.warning("device %s holds nothing: %s", tier.label, tier.disabled_reason)
        elif self.moves_single_lists:
            self._say_lookahead(plan, tier)
        return tier
