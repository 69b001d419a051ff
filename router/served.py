"""One generation of an index while a router serves it: its scanner, devices, engine, placement and lookahead, and in
which order they begin and end. The router shows them to users; another generation takes the place of a whole one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hybridindex.config import RouterConfig
from hybridindex.errors import RouterClosedError, RouterError
from hybridindex.index.filters.row_filter import RowFilters
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.warm import available_bytes, warm_lists
from hybridindex.processes import weakly
from hybridindex.router.batch.parts import RouterParts
from hybridindex.router.batch.stages import BatchReport
from hybridindex.router.batch.stats import StatsCounter
from hybridindex.router.comparisons import Comparisons
from hybridindex.router.devices.good_copies import GoodCopies
from hybridindex.router.devices.opening import TierOpening
from hybridindex.router.devices.placement import Placement
from hybridindex.router.devices.recovery import Recovery
from hybridindex.router.devices.scrub import Scrub
from hybridindex.router.engine import Engine
from hybridindex.router.lookahead.hotness import HotnessPolicy
from hybridindex.router.lookahead.prefetch import Lookahead
from hybridindex.router.lookahead.wait_for_loads import WaitForLoads
from hybridindex.router.lookahead.windows import Windows
from hybridindex.router.precision import CandidateCount, choose_precision
from hybridindex.router.searcher import Searcher
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.contract.tier import PageOwner, Tier
from hybridindex.tiers.host.rehearsal import rehearse
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.types import I64

if TYPE_CHECKING:
    from hybridindex.partitioner.plan import Plan
    from hybridindex.router.remote.remote_lists import RemoteLists

__all__ = ["Served", "on_served"]

_T = TypeVar("_T")


class Served:
    """Opens all of it. :meth:`start` brings the plan's lists; :meth:`close` ends what began."""

    def __init__(
        self,
        index: IVFIndex,
        plan: Plan | None,
        config: RouterConfig,
        windows: Windows,
        stats: StatsCounter,
        on_batch: list[Callable[[BatchReport], None]],
        earlier: Collection[str] = (),
        most_nprobe: int = 0,
        remote: RemoteLists | None = None,
    ) -> None:
        """
        Args:
            earlier: fingerprints of generations whose filters searches may name.
            most_nprobe: lists that searches may ask for, although there are fewer: an earlier generation had them.
            remote: as of the router.

        Raises:
            As :class:`hybridindex.router.router.Router`.
        """
        self.config = config
        self.precision = precision = choose_precision(index, config, None if plan is None else plan.index_fingerprint)
        if plan is not None:
            precision.check_plan(plan.index_fingerprint)
        #: As searches see it.
        self.index = index = precision.index
        self.candidates = None
        if precision.codes is not None:
            self.candidates = CandidateCount(precision.codes.spec, config.candidates)
        self._plan = plan
        self._stats = stats
        self.opening = opening = TierOpening(index, plan, config, windows)
        #: What of the lists was read into memory.
        self.warmed = warm_lists(
            index.rows,
            _most_warm_bytes(config),
            None if plan is None else _hottest_first(plan),
        )
        # The constants that serve several users best: docs/lookahead.md.
        cache = HotnessPolicy(decay_factor=1.1, cache_fraction=config.cache_fraction) if config.cache_fraction else None
        self.tiers: list[Tier] = []
        owners: list[PageOwner] = []
        # A method would let the store keep a closed router, and its arenas, alive.
        self.residency = ResidencyStore(index.n_pieces, lambda device, pages: owners[device].free(pages))
        self.host = precision.open_scanner(config)
        self._close_lock = threading.Lock()
        with ExitStack() as undo:
            undo.callback(self.host.close)
            rehearse(index, self.host, self.warmed.lists)
            for ordinal in range(len(config.devices)):
                self.tiers.append(opening.open(ordinal))
                undo.callback(self.tiers[-1].close)
                owners.append(self.tiers[-1].pages)
            paged = [tier for tier in self.tiers if isinstance(tier, DeviceTier)] if opening.moves_single_lists else []
            self.parts = parts = RouterParts(
                index=index,
                host=self.host,
                tiers=self.tiers,
                paged=paged,
                residency=self.residency,
                stats=stats,
                device_list_bytes=opening.list_bytes,
            )
            self.wait_for_loads = WaitForLoads(parts)
            undo.callback(self.wait_for_loads.close)
            self.lookahead = Lookahead(parts, cache, self.wait_for_loads, config.lookahead_queue_bytes)
            undo.callback(self.lookahead.close)
            filters = RowFilters(index, earlier)
            self.engine = Engine(parts, self.wait_for_loads, config, filters, on_batch, remote)
            undo.callback(self.engine.close)
            self.placement = Placement(plan, parts, self.lookahead, opening, config, self.engine.added_on_devices)
            reads_disk = self.warmed.nbytes < self.warmed.total_bytes
            self.searcher = Searcher(
                index,
                self.engine,
                self.placement,
                self.wait_for_loads,
                wait_for_lists=config.wait_for_lists,
                candidates=self.candidates,
                filters=filters,
                most_nprobe=max(index.nlist, most_nprobe),
                reads_disk=reads_disk,
            )
            #: For other nodes of a cluster.
            self.comparisons = Comparisons(index, self.host, reads_disk=reads_disk)
            copies = GoodCopies(parts, opening.host_lists.memory, config.health.stuck_s)
            self.scrub = Scrub(index, copies, config.scrub_bytes_per_s)
            undo.callback(self.scrub.close)
            self.recovery = Recovery(
                self.tiers, weakly(self, Served._restore), weakly(self, Served._complete), self.engine.health.trial
            )
            undo.pop_all()

    def start(self) -> None:
        """Brings what the plan wants. Where it fails, all is closed."""
        try:
            if self._plan is not None and self.tiers:
                self.placement.apply(self._plan)
            else:
                self.placement.pin_host_lists()
        except BaseException:
            self.close()
            raise

    def _restore(self, tier: Tier) -> None:
        self._stats.add(device_recoveries=1)
        self.engine.added_on_devices.forget(tier.ordinal)
        self.placement.restore(tier)

    def _complete(self) -> None:
        self.lookahead.look_again()
        self.placement.complete()

    def refuse_own_threads(self, what: str) -> None:
        """Raises RouterError: on its threads, also those that move lists, ``what`` would wait for itself."""
        self.searcher.refuse_own_threads(what)
        own = self.lookahead.owns_current_thread() or self.recovery.owns_current_thread()
        own = own or self.scrub.owns_current_thread()
        if own or any(tier.owns_current_thread() for tier in self.tiers):
            raise RouterError(f"{what} was called from a callback on the router's own thread and would wait for itself")

    def check_invariants(self) -> None:
        """Asserts what must hold at any time."""
        self.residency.check_invariants()
        self.lookahead.check_invariants()
        self.opening.host_lists.check_invariants()
        self.engine.added_on_devices.check_invariants()
        for tier in self.tiers:
            tier.check_invariants()

    def close(self) -> None:
        """As :meth:`hybridindex.router.router.Router.close`. Every part is closed, whatever another raises."""
        with self._close_lock:
            if self.searcher.closed:
                return
            self.searcher.closed = True
        # Those with a scan that goes on: any, until the engine says which; and those that are left behind.
        scanned, left = {tier.ordinal for tier in self.tiers}, set[int]()

        def close_engine() -> None:
            scanned.intersection_update(self.engine.close())

        def close_tier(tier: Tier) -> None:
            left.add(tier.ordinal)
            if tier.close(self.config.health.stuck_s, scanned=tier.ordinal in scanned):
                left.discard(tier.ordinal)

        def close_host_lists() -> None:
            if not left:  # lists in page-locked memory may be what a move is reading
                self.opening.host_lists.close()

        in_order: list[Callable[[], object]] = [
            self.placement.settle,
            self.scrub.close,
            self.placement.join,
            self.recovery.close,
            self.wait_for_loads.close,
            close_engine,
            self.lookahead.close,
            *(partial(close_tier, tier) for tier in self.tiers),
            close_host_lists,
            self.comparisons.close,
            self.host.close,
        ]
        with ExitStack() as ends:
            for close in reversed(in_order):
                ends.callback(close)


def on_served(current: Callable[[], Served], call: Callable[[Served], _T]) -> _T:
    """What ``call`` does with what serves; again where another generation took its place meanwhile."""
    while True:
        served = current()
        try:
            return call(served)
        except RouterClosedError:
            if current() is served:
                raise


def _most_warm_bytes(config: RouterConfig) -> int:
    if config.rows == "mapped":
        return 0
    return available_bytes() // 2 if config.warm_bytes is None else config.warm_bytes


def _hottest_first(plan: Plan) -> I64:
    """List ids by the accesses that the plan's profile counted; those that devices hold come last."""
    order: I64 = np.lexsort((-plan.analysis.profile.access.list_accesses, plan.list_device >= 0))
    return order
