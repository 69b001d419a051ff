"""The tier of a device that holds lists as a faiss shard: for codecs that the paged tier does not decode.

A shard cannot change list by list: other lists mean a new shard, which the mover thread builds
(:mod:`hybridindex.tiers.shard.builder`), and an old one lives until its last lease ends
(:mod:`hybridindex.tiers.shard.ledger`). Lookahead and the cache move single lists, so they do not use such a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from hybridindex.errors import OutOfBudgetError
from hybridindex.index.faiss_model import faiss_message
from hybridindex.index.ivf import IVFIndex
from hybridindex.tiers.contract.copy_queue import check_share
from hybridindex.tiers.contract.devices import available_bytes, resolve_device
from hybridindex.tiers.contract.residency import Residency, ResidencyStore
from hybridindex.tiers.contract.tier import LoadReport, Tier, WithoutRoom
from hybridindex.tiers.shard.builder import ShardBuilder, ShardLoad
from hybridindex.tiers.shard.gpu import GpuShard
from hybridindex.tiers.shard.ledger import ShardLedger
from hybridindex.tiers.shard.scanner import ShardScanner, StandInShard
from hybridindex.types import I64

__all__ = ["ShardTier"]


class ShardTier(Tier):
    """Owner of one device's shards; the mover thread alone builds them."""

    def __init__(
        self,
        index: IVFIndex,
        device_name: str,
        ordinal: int,
        *,
        budget_bytes: int,
        wanted_bytes: int,
        without_room: WithoutRoom = "raise",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Builds an empty shard as a trial; takes no memory that lasts.

        Args:
            index: whose lists are moved here; a codec that :func:`hybridindex.tiers.serving.tier_of` calls "shard".
            device_name: "cuda:N", or "cpu" for the stand-in.
            ordinal: the device's number in its router.
            budget_bytes: hard limit on the device: lists, centroids and codec tables, temporary memory, of all shards
                together. What the runtime and its libraries take for themselves is not in it.
            wanted_bytes: of lists, with what comes with them: more than the device has free is refused.
            without_room: where it is not free now. More than the device has in all is refused in any case.
            clock: seconds, monotonic; for back-off and pace.

        Raises:
            OutOfBudgetError: more is needed than the device has free.
            DeviceNotFoundError, MissingDependencyError.
        """
        super().__init__(ordinal, budget_bytes, without_room, clock)
        self.device, self.info = resolve_device(device_name)
        self._index = index
        self._pages = ShardLedger(index.nlist)
        self._builder = ShardBuilder(
            index,
            self.device,
            self.info,
            ordinal,
            ledger=self._pages,
            budget_bytes=budget_bytes,
            clock=clock,
            rest=self._rest,
        )
        self.geometry = self._builder.geometry
        room = budget_bytes - self.fixed_bytes
        self._wanted_bytes = min(room, wanted_bytes)
        if room < self.geometry.page_bytes:
            self.disabled_reason = (
                f"budget of {budget_bytes:,} bytes is below a page, {self.geometry.page_bytes:,}, plus centroids, "
                f"codec tables and scratch, {self.fixed_bytes:,}"
            )
        else:
            self._open()
        self._moved_bytes = 0
        self._start_mover()

    def _open(self) -> None:
        try:
            self._check_room()
        except OutOfBudgetError as error:
            total = self.info.total_bytes
            if self._without_room == "raise" or (total is not None and self._wanted_bytes + self.fixed_bytes > total):
                raise
            self.fail(error)
            return
        self._opened = True
        try:
            self._try_device()
        except Exception as error:  # noqa: BLE001 - whatever a device does, the host serves
            self.disabled_reason = f"faiss keeps no shard of codec {self._index.codec!r} there: {faiss_message(error)}"

    def _check_room(self) -> None:
        lists_bytes = self._wanted_bytes
        parts = f"lists {lists_bytes:,}, centroids, codec tables and scratch {self.fixed_bytes:,}"
        self._refuse_no_room(lists_bytes + self.fixed_bytes, available_bytes(self.device), parts)

    # State

    @property
    def pages(self) -> ShardLedger:
        return self._pages

    @property
    def usable(self) -> bool:
        return self.failure is None and not self.disabled_reason

    @property
    def used_bytes(self) -> int:
        """Bytes of all shards: the one being built and those that only older leases read included."""
        return self._pages.used_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that loads brought since it was opened; those that a new shard takes along are not counted again."""
        return self._moved_bytes

    @property
    def scratch_bytes(self) -> int:
        """Temporary memory of a scan."""
        return self._builder.scratch_bytes

    @property
    def fixed_bytes(self) -> int:
        """Of every shard, besides its lists."""
        return self._builder.fixed_bytes

    @property
    def capacity_bytes(self) -> int:
        return self._builder.capacity_bytes

    @property
    def reserved_bytes(self) -> int:
        """Codec tables and scratch."""
        return self.fixed_bytes

    # Size

    def resize(self, wanted_bytes: int, budget_bytes: int, scratch_bytes: int) -> None:
        """See :meth:`hybridindex.tiers.contract.tier.Tier.resize`: the next shard is built within ``budget_bytes``."""
        self._builder.keep_to(budget_bytes)
        self.budget_bytes = max(budget_bytes, self.used_bytes)

    def lists_beyond(self, residency: Residency, budget_bytes: int) -> I64:
        """See :meth:`hybridindex.tiers.contract.tier.Tier.lists_beyond`: a shard goes as a whole."""
        if self.used_bytes <= budget_bytes:
            return super().lists_beyond(residency, budget_bytes)
        return residency.resident_lists(self.ordinal)

    # Scan

    def scanner(self, residency: Residency) -> ShardScanner:
        self._refuse_unusable()
        lists = residency.resident_lists(self.ordinal)
        # All that one snapshot names here is of one shard: they are published together.
        shard = self._pages.find(residency.pages_of(lists[:1])) if len(lists) else None
        name = StandInShard.name if self.info.stand_in else GpuShard.name
        return ShardScanner(self._index, shard, residency, self.ordinal, name)

    # Movement

    def load(
        self,
        lists: Sequence[int],
        store: ResidencyStore,
        cancelled: Callable[[], bool] | None = None,
        *,
        bandwidth_share: float | None = None,
    ) -> Future[LoadReport]:
        """See :meth:`hybridindex.tiers.contract.tier.Tier.load`. A new shard holds these lists and the resident ones.

        All become visible to new leases at once. A cancelled shard is not published. The last step, from the host to a
        GPU, is one, whatever the share.
        """
        check_share(bandwidth_share)
        load = ShardLoad(
            [int(list_id) for list_id in lists],
            store,
            lambda: self._closed or not self.usable or (cancelled is not None and cancelled()),
            1.0 if bandwidth_share is None else bandwidth_share,
            self._build,
        )
        load.future.set_running_or_notify_cancel()
        self._put(load)
        return load.future

    def _build(self, load: ShardLoad) -> LoadReport:
        report = self._builder.load(load)
        self._moved_bytes += report.nbytes
        return report

    def _rest(self, seconds: float) -> None:
        with self._work:
            self._work.wait_for(lambda: self._hurried, seconds)

    def _try_device(self) -> None:
        """Builds and searches an empty shard. Beside a slow device's shard the budget may have no room for one."""
        if not self._opened:
            self._check_room()
            self._opened = True
        self._builder.try_empty()

    def check_invariants(self) -> None:
        """Asserts that the budget holds, and that every shard can be reached."""
        assert self.used_bytes <= self.budget_bytes
        self._pages.check_invariants()

    def _release(self) -> None:
        self._pages.clear()

    def _left_bytes(self) -> int:
        return self.used_bytes
