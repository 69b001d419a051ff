"""Building a device's next shard and replacing the current one.

The new shard is built beside the old one where the budget has room for both; else the old one goes first and the host
serves meanwhile. The residency publishes the new lists and drops the old ones in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hybridindex.errors import OutOfBudgetError
from hybridindex.index.ivf import IVFIndex
from hybridindex.paging import PageGeometry, scratch_for_budget, shard_page_bytes
from hybridindex.tiers.contract.devices import DeviceInfo
from hybridindex.tiers.contract.futures import fail, settle
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.contract.tier import LoadReport
from hybridindex.tiers.shard.gpu import GpuShard
from hybridindex.tiers.shard.ledger import ShardLedger
from hybridindex.tiers.shard.scanner import FaissShard, ShardSource, StandInShard, model_bytes, warm_up
from hybridindex.types import I32, I64

if TYPE_CHECKING:
    import torch

__all__ = ["ShardBuilder", "ShardLoad"]

#: Between two looks at whether a load that waits for older leases is still wanted.
_WAIT_S = 1.0
_NO_LISTS = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class ShardLoad:
    """A move of one step: the lists to add, and the future of the report."""

    lists: Sequence[int]
    store: ResidencyStore
    #: Asked before each list and before anything is published.
    unwanted: Callable[[], bool]
    #: Part of the time in which lists are copied.
    share: float
    #: :meth:`ShardBuilder.load`, as the tier calls it.
    build: Callable[[ShardLoad], LoadReport]
    future: Future[LoadReport] = field(default_factory=Future)

    def step(self) -> bool:
        settle(self.future, self.build(self))
        return False

    def abort(self, error: BaseException) -> None:
        fail(self.future, error)


class ShardBuilder:
    """Builds within one device's budget. One thread (the mover)."""

    def __init__(
        self,
        index: IVFIndex,
        device: torch.device,
        info: DeviceInfo,
        ordinal: int,
        *,
        ledger: ShardLedger,
        budget_bytes: int,
        clock: Callable[[], float],
        rest: Callable[[float], object],
    ) -> None:
        """
        Args:
            ledger: whose shards these are.
            clock: seconds, monotonic.
            rest: waits so many seconds, or less once the tier hurries.
        """
        self._index = index
        self._device = device
        self._info = info
        self._ordinal = ordinal
        self._ledger = ledger
        self._clock = clock
        self._rest = rest
        self.geometry = PageGeometry.for_code_size(index.code_size, shard_page_bytes(index.code_size))
        #: (nlist,) int64 device bytes of each list, page rounding included.
        self.list_bytes: I64 = self.geometry.pages_for(index.list_sizes) * self.geometry.page_bytes
        self.keep_to(budget_bytes)

    def keep_to(self, budget_bytes: int) -> None:
        """Builds within that budget from now on."""
        self._budget_bytes = budget_bytes
        #: Temporary memory of a shard's scans.
        self.scratch_bytes = scratch_for_budget(budget_bytes)
        #: Of every shard, besides its lists.
        self.fixed_bytes = self.scratch_bytes + model_bytes(self._index)
        #: What the budget has for lists.
        self.capacity_bytes = max(0, budget_bytes - self.fixed_bytes)

    def try_empty(self) -> None:
        """Builds and searches a shard of no list.

        Raises:
            OutOfBudgetError: the budget has no room for it now.
            whatever the device or faiss raise.
        """
        if self._ledger.used_bytes + self.fixed_bytes > self._budget_bytes:
            raise OutOfBudgetError("the budget has no room for a trial while an older shard is read")
        slot = self._ledger.reserve(self.fixed_bytes)
        try:
            with ShardSource(self._index, _NO_LISTS, self.geometry) as source:
                self._move(source).close()
        finally:
            self._ledger.cancel(slot)

    def load(self, load: ShardLoad) -> LoadReport:
        """Builds and publishes what ``load`` asks for, as far as it fits.

        Raises:
            whatever the device, the file or faiss raise; nothing is published or kept then.
        """
        integrity = self._index.integrity
        # Before it is asked which lists are in quarantine: what turns out to be damaged later is seen at the end.
        seen = integrity.seen
        damaged = set(integrity.lists_in_quarantine())
        store, list_device = load.store, load.store.current.list_device
        asked = [list_id for list_id in dict.fromkeys(load.lists) if self._index.list_sizes[list_id] > 0]
        present = [list_id for list_id in asked if list_device[list_id] >= 0]
        missing = [list_id for list_id in asked if list_device[list_id] < 0]
        held = store.current.resident_lists(self._ordinal)
        # A shard is copied anew from the host.
        held = held[[list_id not in damaged for list_id in held.tolist()]]
        chosen, too_large = self._choose([list_id for list_id in missing if list_id not in damaged], held)
        loaded: list[int] = []
        if chosen and not load.unwanted():
            loaded = self._replace(load, held, chosen, seen)
        current = store.current.list_device
        here = set(loaded)
        brought = [list_id for list_id in chosen if list_id not in here and current[list_id] >= 0]
        away = here.union(too_large, brought)
        return LoadReport(
            loaded=tuple(loaded),
            skipped=tuple(list_id for list_id in missing if list_id not in away),
            present=tuple(present + brought),
            nbytes=int(self.list_bytes[loaded].sum()),
            too_large=tuple(too_large),
        )

    def _choose(self, missing: Sequence[int], held: I64) -> tuple[list[int], list[int]]:
        """Those that fit beside the resident ones, in order, and those that never would."""
        capacity = self.capacity_bytes
        room = capacity - int(self.list_bytes[held].sum())
        chosen, too_large = [], []
        for list_id in missing:
            nbytes = int(self.list_bytes[list_id])
            if nbytes > capacity:
                too_large.append(list_id)
            elif nbytes <= room:
                room -= nbytes
                chosen.append(list_id)
        return chosen, too_large

    def _replace(self, load: ShardLoad, held: I64, chosen: list[int], seen: int) -> list[int]:
        """Publishes a shard of ``held`` and ``chosen`` in the place of the one that is there; what came of it.

        ``seen``: damage that was known when they were chosen. Where there is more, what was copied says nothing.
        """
        lists = np.union1d(held, np.array(chosen, dtype=np.int64))
        nbytes = self.fixed_bytes + int(self.list_bytes[lists].sum())
        if not self._make_room(load, nbytes):
            return []
        slot = self._ledger.reserve(nbytes)
        try:
            with ShardSource(self._index, lists, self.geometry) as source:
                shard = self._move(source) if self._copy(load, source) else None
        except BaseException:
            self._ledger.cancel(slot)
            raise
        if shard is None or load.unwanted() or self._index.integrity.marks[0] != seen:
            if shard is not None:
                shard.close()
            self._ledger.cancel(slot)
            return []
        pages = self._ledger.fill(slot, shard, lists)
        loads: dict[int, tuple[int, I32]] = {list_id: (self._ordinal, page) for list_id, page in pages.items()}
        before = load.store.current.resident_lists(self._ordinal)
        snapshot = load.store.publish(loads, drops=before.tolist())
        # Another device may have brought a list first; the store has given its page back then.
        return [list_id for list_id in chosen if snapshot.holds(list_id, *loads[list_id])]

    def _make_room(self, load: ShardLoad, nbytes: int) -> bool:
        """Whether the budget has room for ``nbytes`` now; the shard that is there goes where it has not for both."""
        if self._ledger.used_bytes + nbytes <= self._budget_bytes:
            return True
        dropped = load.store.publish({}, drops=load.store.current.resident_lists(self._ordinal).tolist())
        while not load.store.wait_reclaimed(dropped.version, _WAIT_S):
            if load.unwanted():
                return False
        return self._ledger.used_bytes + nbytes <= self._budget_bytes

    def _copy(self, load: ShardLoad, source: ShardSource) -> bool:
        """Brings all lists; False when they are not wanted any more."""
        for number in range(len(source.lists)):
            if load.unwanted():
                return False
            started = self._clock()
            source.copy(number)
            if load.share < 1:
                self._rest((self._clock() - started) * (1 / load.share - 1))
        return True

    def _move(self, source: ShardSource) -> FaissShard:
        """The shard of ``source`` on the device, searched once."""
        shard: FaissShard
        if self._info.stand_in:
            shard = StandInShard(source.cut())
        else:
            longest = int(self._index.list_sizes[source.lists].max(initial=0))
            shard = GpuShard(source.cut(), self._device.index, self.scratch_bytes, longest)
        warm_up(shard, self._index.scan_dim, int(source.lists[0]) if len(source.lists) else -1)
        return shard
