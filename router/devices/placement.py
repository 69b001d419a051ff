"""Placement: brings a plan's lists to the devices, again after a device lost them or had no room.

Owns the lock under which lists move for a plan. :mod:`hybridindex.router.lookahead` keeps what sessions and the cache
hold; the tiers move bytes. Answers depend on neither.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from hybridindex.config import RouterConfig
from hybridindex.errors import RouterClosedError
from hybridindex.partitioner.plan import Plan
from hybridindex.router.batch.parts import RouterParts
from hybridindex.router.devices.added_on_devices import AddedOnDevices
from hybridindex.router.devices.opening import TierOpening, wanted_devices
from hybridindex.router.lookahead.prefetch import Lookahead
from hybridindex.tiers.contract.bounded_join import LOOK_S
from hybridindex.tiers.contract.tier import LoadReport, Tier
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.types import I64

__all__ = ["Placement"]

_log = logging.getLogger(__name__)

#: Longest wait of a plan change for batches in flight.
_RECLAIM_TIMEOUT_S = 30.0
#: Lists that sessions bring to other devices while a plan is placed are moved again so often.
_TRIES = 3
#: Part of a device's copying time that lists take which come back to it, or come late.
_LATE_SHARE = 0.5
#: How long lists are copied to page-locked memory at one look.
_LATE_S = 1.0


class Placement:
    """Owner of the current plan. Thread-safe."""

    def __init__(
        self,
        plan: Plan | None,
        parts: RouterParts,
        lookahead: Lookahead,
        opening: TierOpening,
        config: RouterConfig,
        added: AddedOnDevices,
    ) -> None:
        """
        Args:
            plan: whose lists :meth:`apply` is going to bring first.
            opening: says what each arena is for under a plan, and owns the host memory, which is chosen anew with it.
            config: says how long a move is waited for after :meth:`settle`, which may never end.
            added: gives pages back while arenas change their size.
        """
        self._index = parts.index
        self._tiers = parts.tiers
        self._paged = parts.paged
        self._residency = parts.residency
        self._list_bytes = parts.device_list_bytes
        self._lookahead = lookahead
        self._opening = opening
        self._host_lists = opening.host_lists
        self._added = added
        self._stuck_s = config.health.stuck_s
        self._gives_memory_back = config.shrink_arenas
        self._lock = threading.Lock()
        #: One for each change of plan that waits for the lock. Restoring lists stops for it.
        self._waiting: set[object] = set()
        #: Whose lists are moving; the loads that bring them; and whether it was given up, so that they have to leave.
        self._moving: Plan | None = None
        self._loads: list[Future[LoadReport]] = []
        self._given_up = False
        #: No list moves for a plan any more.
        self._settled = False
        #: Set under the lock, read by anybody.
        self.plan = plan

    def apply(self, plan: Plan, bandwidth_share: float | None = None) -> None:
        """Makes the residency what ``plan`` says, moving only the difference, hottest lists first; then chooses what
        lies in page-locked host memory.

        Raises:
            RouterClosedError: after :meth:`settle`, or lists were still moving then.
        """
        with self._going_first():
            if self._settled:
                raise RouterClosedError("the router is closed, or about to be")
            try:
                self._place(plan, bandwidth_share)
                if self._was_cut_off(plan):
                    raise RouterClosedError("the router closed while lists of the plan were moving")
            except BaseException:
                # The old plan's lists are those that stay, and come back.
                self._moving, self._given_up = None, True
                self._adopt(self.plan)
                raise
            self.plan, self._given_up = plan, False
            self._choose_host_lists(bandwidth_share)

    @contextmanager
    def _going_first(self) -> Iterator[None]:
        """The lock; whoever restores lists gives it up meanwhile. The wait for it may be interrupted."""
        waiting = object()
        try:
            self._waiting.add(waiting)
            with self._lock:
                self._waiting.discard(waiting)
                yield
        finally:
            self._waiting.discard(waiting)

    def _was_cut_off(self, plan: Plan) -> bool:
        """Whether the end came while lists were on their way."""
        return self._settled and bool(((self._wanted(plan) >= 0) & (self._residency.current.list_device < 0)).any())

    def pin_host_lists(self) -> None:
        """Chooses what lies in page-locked host memory where no plan does so."""
        with self._lock:
            self._choose_host_lists(None)

    def restore(self, tier: Tier) -> None:
        """A device works again: its lists of the plan come back."""
        with self._lock:
            if self.plan is not None and not self._gives_way():
                self._resize(self.plan, tier)
                self._wait_for(self._load_planned(self.plan, tier, _LATE_SHARE, self._gives_way))
            self._bring_host_lists()

    def complete(self) -> None:
        """Lists of the plan that found no page, because sessions had them, come once one is free; so do those for
        page-locked memory. Memory that an arena could not give back or take before goes or comes now. Lists leave that
        an interrupted change brought."""
        if not self._lock.acquire(blocking=False):
            return  # a change of plan brings them, if it wants them
        try:
            if self._given_up and self._paged and all(load.done() for load in self._loads):
                self._given_up = not self._lookahead.drop_unwanted()
            for tier in self._paged:
                if self.plan is None:
                    break
                if self._gives_way():
                    return
                if tier.arena.nbytes != self._opening.wanted_bytes(self.plan, tier.ordinal):
                    self._resize(self.plan, tier)
                lists = self._missing_that_fit(self.plan, tier)
                if lists and tier.usable:
                    with self._lookahead.room_for(tier, np.array(lists)):
                        loading = tier.load(
                            lists, self._residency, cancelled=self._gives_way, bandwidth_share=_LATE_SHARE
                        )
                    self._wait_for(loading)
            self._bring_host_lists()
        finally:
            self._lock.release()

    def settle(self) -> None:
        """Ends a change that goes on, after what is being copied or some seconds, and refuses further ones. Returns at
        once."""
        self._settled = True
        self._host_lists.stop()
        for tier in self._tiers:
            tier.hurry()

    def join(self) -> None:
        """Waits for a change that goes on."""
        with self._lock:
            pass

    def _gives_way(self) -> bool:
        """Whether restoring stops: a change of plan waits, or no list moves any more."""
        return self._settled or bool(self._waiting)

    # With the lock held

    def _choose_host_lists(self, share: float | None, limit_s: float | None = None) -> None:
        self._host_lists.choose(self.plan, self._paged, self._gives_way, share, limit_s)

    def _bring_host_lists(self) -> None:
        """Brings lists for page-locked memory that are missing, for a moment: who calls has devices to look after."""
        if self._host_lists.due:
            self._choose_host_lists(_LATE_SHARE, _LATE_S)

    def _place(self, plan: Plan, bandwidth_share: float | None) -> None:
        target = self._wanted(plan)
        self._adopt(plan)
        self._moving, self._loads = plan, []
        for _ in range(_TRIES):
            current = self._residency.current.list_device
            # What sessions brought and the plan does not want stays theirs, or in the cache.
            stale = (current >= 0) & (current != target) & ~(self._lookahead.wanted() & (target < 0))
            # The pages of added rows would keep an arena from shrinking.
            with self._added.away() as given_back:
                if stale.any():
                    # The new lists may need the old ones' pages, and batches in flight still read those.
                    self._drop(np.flatnonzero(stale))
                self._wait_reclaimed(given_back)
                # Arenas may share a device: what one gives back, another may take.
                growth = [self._opening.wanted_bytes(plan, tier.ordinal) - tier.capacity_bytes for tier in self._tiers]
                for ordinal in np.argsort(growth, kind="stable").tolist():
                    self._resize(plan, self._tiers[ordinal])
            for tier in self._tiers:
                self._loads.append(self._load_planned(plan, tier, bandwidth_share, lambda: self._is_over(plan)))
            for load in self._loads:
                self._wait_for(load)  # a failed device is marked and logged by its tier
            current = self._residency.current.list_device
            # A session's copy may have brought one to another device meanwhile.
            if self._settled or not ((target >= 0) & (current >= 0) & (current != target)).any():
                return

    def _is_over(self, plan: Plan) -> bool:
        """Whether no more of its lists are to come."""
        return self._settled or self._moving is not plan

    def _adopt(self, plan: Plan | None) -> None:
        self._lookahead.adopt([] if plan is None else np.flatnonzero(self._wanted(plan) >= 0).tolist())

    def _resize(self, plan: Plan, tier: Tier) -> None:
        """Gives a device's memory the size that ``plan`` asks for. For a lower budget to hold, lists may have to leave
        pages that go; those of the plan come back into others."""
        wanted = self._opening.wanted_bytes(plan, tier.ordinal)
        if not self._gives_memory_back:
            wanted = max(wanted, tier.capacity_bytes)
        budget, scratch = self._opening.budget_of(plan, tier.ordinal), self._opening.scratch_of(plan, tier.ordinal)
        tier.resize(wanted, budget, scratch)
        if isinstance(tier, DeviceTier) and tier in self._paged:
            cached = tier.lists_alone_beyond(self._residency.current, wanted)
            if len(cached) and self._lookahead.evict(cached):
                tier.resize(wanted, budget, scratch)
        lists = tier.lists_beyond(self._residency.current, budget)
        if len(lists):
            self._drop(lists)
            tier.resize(wanted, budget, scratch)

    def _drop(self, lists: I64) -> None:
        """Takes lists from the residency, and waits until nothing reads their pages."""
        dropped = self._residency.publish({}, drops=lists.tolist())
        self._wait_reclaimed(partial(self._residency.wait_reclaimed, dropped.version))

    def _wait_reclaimed(self, reclaimed: Callable[[float], bool]) -> None:
        """``reclaimed``: waits so many seconds at most, and says whether the pages are free."""
        for _ in range(round(_RECLAIM_TIMEOUT_S / LOOK_S)):
            if reclaimed(LOOK_S) or self._settled:
                return
        _log.warning("pages of dropped lists are still read after %g s", _RECLAIM_TIMEOUT_S)

    def _wait_for(self, load: Future[LoadReport]) -> None:
        """Waits until a load has ended; after :meth:`settle` at most ``stuck_s``."""
        waited_s, look_s = 0.0, min(LOOK_S, self._stuck_s / 4)
        while waited_s < self._stuck_s:
            try:
                load.exception(look_s)
                return
            except TimeoutError:
                # Looks and not the clock, as in tiers.leaving.
                waited_s += look_s if self._settled else 0.0

    def _load_planned(
        self, plan: Plan, tier: Tier, bandwidth_share: float | None, cancelled: Callable[[], bool]
    ) -> Future[LoadReport]:
        """Starts to bring what ``plan`` wants on one device and what is not there, hottest first."""
        hottest_first = self._hottest_first(plan)
        wanted = hottest_first[self._wanted(plan)[hottest_first] == tier.ordinal]

        def load() -> Future[LoadReport]:
            return tier.load(wanted.tolist(), self._residency, cancelled=cancelled, bandwidth_share=bandwidth_share)

        if not isinstance(tier, DeviceTier) or tier not in self._paged:
            return load()
        with self._lookahead.room_for(tier, wanted[self._residency.current.list_device[wanted] < 0]):
            return load()

    def _wanted(self, plan: Plan) -> npt.NDArray[np.int16]:
        return wanted_devices(plan, self._index)

    def _hottest_first(self, plan: Plan) -> I64:
        """The pieces of lists that ``plan`` wants on devices: rows after all codes."""
        if self._index.n_pieces == self._index.nlist:
            return plan.resident_lists
        return np.concatenate([plan.resident_lists, self._index.nlist + plan.resident_rows])

    def _missing_that_fit(self, plan: Plan, tier: DeviceTier) -> list[int]:
        """Lists of ``plan`` that no device has and ``tier`` has room for, beside what is promised to sessions; hottest
        first."""
        there, list_bytes, target = self._residency.current.list_device, self._list_bytes, self._wanted(plan)
        placed = int(list_bytes[(target == tier.ordinal) & (there == tier.ordinal)].sum())
        beside = tier.arena.nbytes - self._opening.lookahead_bytes(plan, tier.ordinal) - placed
        room = min(beside, self._lookahead.room_for_plan(tier))
        fitting = []
        for list_id in self._hottest_first(plan).tolist():
            nbytes = int(list_bytes[list_id])
            if target[list_id] == tier.ordinal and there[list_id] < 0 and 0 < nbytes <= room:
                room -= nbytes
                fitting.append(list_id)
        return fitting
