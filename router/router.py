"""The router: the public face of the serving side. Checks input, owns tiers, engine, residency and lookahead.

Longer than other files: most of it is the public methods with what they promise; the work is in the rooms beside it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hybridindex.errors import (
    InvalidInputError,
    ProfileMismatchError,
    RouterClosedError,
    RouterError,
)
from hybridindex.index.ivf import IVFIndex
from hybridindex.router.arguments import check_budgets, check_bytes, check_count, check_milliseconds, own_memory
from hybridindex.router.batch.batch import BlockingReply, FutureReply, Reply, Request
from hybridindex.router.batch.deadline import PaceEstimator
from hybridindex.router.batch.loop_reply import LoopReply, Mailboxes
from hybridindex.router.batch.stages import BatchReport
from hybridindex.router.batch.stats import RouterStats, StatsCounter
from hybridindex.router.devices.health import HealthPolicy
from hybridindex.router.devices.opening import TierOpening
from hybridindex.router.devices.placement import Placement
from hybridindex.router.devices.recovery import Recovery
from hybridindex.router.devices.usage import ArenaUse, arena_use
from hybridindex.router.engine import Engine
from hybridindex.router.lookahead.hotness import HotnessPolicy
from hybridindex.router.lookahead.list_refs import Holder
from hybridindex.router.lookahead.prefetch import Lookahead
from hybridindex.router.lookahead.wait_for_loads import Patience
from hybridindex.router.session import Session
from hybridindex.tiers.contract.copy_queue import check_share
from hybridindex.tiers.contract.residency import Residency, ResidencyStore
from hybridindex.tiers.contract.tier import PageOwner, Tier
from hybridindex.tiers.contract.validate import MAX_K
from hybridindex.tiers.host.host_scanner import HostScannerName, open_host_scanner
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.types import F32, I64, SearchResult

if TYPE_CHECKING:
    from hybridindex.partitioner.plan import Plan

__all__ = ["MAX_BATCH_QUERIES", "Router"]

#: Most queries of one search call; larger inputs are for the caller to cut.
MAX_BATCH_QUERIES = 65_536
#: Lookahead budgets that are remembered, by window.
_MAX_WINDOWS = 256


class Router:
    """Serves one index by one plan. All public methods may be called from any thread; ``close`` joins what it started.

    Answers never depend on the plan, on what lookahead moved, or on devices failing: those change only the time taken.
    """

    def __init__(
        self,
        index: IVFIndex,
        *,
        plan: Plan | None = None,
        devices: Sequence[str] = (),
        device_budget_bytes: int | Sequence[int] | None = None,
        lookahead_bytes: int | None = None,
        max_batch: int | None = None,
        threads: int | None = None,
        early_dispatch: bool = True,
        host_scanner: HostScannerName = "auto",
        cache_fraction: float = 0.5,
        health: HealthPolicy | None = None,
        pin_host_lists: int = 0,
        wait_for_lists: bool = True,
    ) -> None:
        """Allocates the arenas, copies the plan's lists, and is ready when it returns.

        Args:
            index: an open index; stays the caller's to close, after the router.
            plan: what to keep on the devices; None: nothing.
            devices: "cuda:N", or "cpu" for the stand-in device in RAM; none: the host scans everything. A name may come
                again: another arena there, with a budget of its own.
            device_budget_bytes: hard limit per entry, temporary buffers included; default the plan's.
            lookahead_bytes: pages per device kept free for sessions, inside the budget; with the plan's lists no more
                than the index takes. Default: what the budget leaves beside the plan's lists, at most 256 MiB. Of no
                use where lists come in shards, for codecs that only faiss scans: sessions and the cache move nothing
                there.
            max_batch: most queries taken together; None: everything that waits.
            threads: host threads per scan; None: faiss's own setting.
            early_dispatch: answer a request as soon as its own queries are done, not with its batch.
            host_scanner: "native", "faiss", or "auto": native where it supports the codec.
            cache_fraction: part of each arena that lists may fill which no session holds any more but some used. They
                make way for whatever a plan or a session wants. 0: none stay.
            health: when a device is too slow to be used, and whether one that has no room now is tried again; None:
                :class:`HealthPolicy`'s defaults.
            pin_host_lists: most bytes of page-locked host memory, for the hottest lists that the plan leaves on the
                host: sessions then fetch them at the bus's full speed. Chosen anew with each plan, without one in the
                order of ids. The host scans the mapped file as ever.
            wait_for_lists: whether a session's search waits for lists on their way where that is faster, by what scans
                and copies took so far (TeleRAG, Appendix B, case 2). False: it begins at once.

        Raises:
            InvalidInputError: arguments contradict each other or the plan.
            ProfileMismatchError: the plan is of another index.
            DeviceNotFoundError: a device does not exist.
            UnsupportedIndexError: the host scanner that was asked for cannot scan this index.
        """
        self._index = index
        if plan is not None and not hasattr(plan, "index_fingerprint"):
            raise InvalidInputError(f"plan is a {type(plan).__name__}; expected what Index.plan returned, or None")
        if plan is not None and plan.index_fingerprint != index.fingerprint:
            raise ProfileMismatchError(
                f"the plan was made for index {plan.index_fingerprint}, this is index {index.fingerprint}; "
                "profile and plan this index again"
            )
        if max_batch is not None:
            max_batch = check_count("max_batch", max_batch, MAX_BATCH_QUERIES)
        if lookahead_bytes is not None:
            lookahead_bytes = check_bytes("lookahead_bytes", lookahead_bytes)
        budgets = check_budgets(plan, devices, device_budget_bytes)
        # The constants that serve several users best: docs/lookahead.md.
        cache = HotnessPolicy(decay_factor=1.1, cache_fraction=cache_fraction) if cache_fraction else None
        self._stats = StatsCounter()
        self._mailboxes = Mailboxes()
        #: Called after each batch, on the thread that ended it: an engine's or device's, or a caller's. Must not block.
        self.on_batch: list[Callable[[BatchReport], None]] = []
        health = health or HealthPolicy()
        self._stuck_s = health.stuck_s
        pin_host_lists = check_bytes("pin_host_lists", pin_host_lists)
        self._opening = opening = TierOpening(index, plan, pin_host_lists=pin_host_lists)
        self._tiers: list[Tier] = []
        owners: list[PageOwner] = []
        # Not a method: the store must not keep a closed router, and its arenas, alive.
        self._residency = ResidencyStore(index.nlist, lambda device, pages: owners[device].free(pages))
        self._host = open_host_scanner(index, threads=threads, name=host_scanner)
        self._close_lock = threading.Lock()
        self._window_budgets: dict[tuple[int, float, int], tuple[Plan, int]] = {}
        self._closed = False
        self._wait_for_lists = wait_for_lists
        host_pace, device_pace = PaceEstimator(), PaceEstimator()
        with ExitStack() as undo:
            undo.callback(self._host.close)
            for ordinal, (name, budget) in enumerate(zip(devices, budgets, strict=True)):
                self._tiers.append(opening.open(name, ordinal, budget, lookahead_bytes, retry=health.retry_open))
                undo.callback(self._tiers[-1].close)
                owners.append(self._tiers[-1].pages)
            self._patience = Patience(
                self._paged_tiers(),
                self._residency,
                index.list_bytes,
                opening.list_bytes,
                host_pace,
                device_pace,
                self._stats,
            )
            undo.callback(self._patience.close)
            self._lookahead = Lookahead(
                index,
                self._paged_tiers(),
                self._residency,
                self._stats,
                self._host.adopt_thread,
                opening.list_bytes,
                cache,
                self._patience,
                has_devices=bool(self._tiers),
            )
            undo.callback(self._lookahead.close)
            promised = [
                max(0, tier.capacity_bytes - opening.pinned_bytes(plan, i)) for i, tier in enumerate(self._tiers)
            ]
            self._placement = Placement(
                plan,
                self._tiers,
                self._paged_tiers(),
                self._residency,
                self._lookahead,
                opening.list_bytes,
                promised,
                opening.host_lists,
                stuck_s=health.stuck_s,
            )
            self._engine = Engine(
                index,
                self._host,
                self._tiers,
                self._residency,
                self._stats,
                host_pace,
                device_pace,
                self._patience,
                max_batch=max_batch,
                early_dispatch=early_dispatch,
                listeners=self.on_batch,
                health=health,
            )
            undo.pop_all()
        self._recovery = Recovery(self._tiers, self._restore, self._placement.complete, self._engine.health.trial)
        try:
            if plan is not None and self._tiers:
                self._placement.apply(plan)
            else:
                self._placement.pin_host_lists()
        except BaseException:
            self.close()
            raise

    # Devices and placement

    def _paged_tiers(self) -> list[DeviceTier]:
        """The tiers that single lists come to and leave: all of them, or none where lists come in shards."""
        return (
            [tier for tier in self._tiers if isinstance(tier, DeviceTier)] if self._opening.moves_single_lists else []
        )

    def _restore(self, tier: Tier) -> None:
        self._stats.add(device_recoveries=1)
        self._placement.restore(tier)

    def apply_plan(self, plan: Plan, *, bandwidth_share: float = 1.0) -> None:
        """Changes to another plan of the same index while serving; moves only the difference. Lists on their way are
        served by the host. The arenas keep their size: lists that do not fit stay on the host, counted as unplaced;
        those that found no room because sessions had it come when it is given back. Returns when all this is done, the
        copies to page-locked host memory included.

        Args:
            bandwidth_share: 0 < share <= 1, the part of the time in which a device may copy for this; lookahead goes
                first.

        Raises:
            ProfileMismatchError: the plan is of another index.
            InvalidInputError: the plan is for another number of devices, or the share is out of range.
        """
        self._refuse_own_threads("apply_plan", moves=True)
        check_share(bandwidth_share)
        if plan.index_fingerprint != self._index.fingerprint:
            raise ProfileMismatchError(
                f"the plan was made for index {plan.index_fingerprint}, this is index {self._index.fingerprint}"
            )
        if plan.n_devices != len(self._tiers):
            raise InvalidInputError(f"the plan is for {plan.n_devices} device(s); this router has {len(self._tiers)}")
        self._placement.apply(plan, bandwidth_share)
        self._window_budgets.clear()

    def settle(self) -> None:
        """Ends a change of plan that goes on, after what is being copied, and refuses further ones; searches go on.

        Returns at once, from any thread: for an owner who is about to close, and does not want to wait for hours where
        the change was given a small share of the time.
        """
        self._placement.settle()

    # Search

    def search(
        self,
        queries: Any,
        k: int = 10,
        nprobe: int | None = None,
        *,
        deadline_ms: float | None = None,
        min_nprobe: int = 1,
    ) -> SearchResult:
        """The k nearest vectors of each query among its ``nprobe`` nearest lists.

        Args:
            queries: (d,) or (n, d) float32; (d,) answers (1, k).
            k: 1..2048.
            nprobe: 1..nlist; default the plan's, without a plan the index's.
            deadline_ms: time from now in which the answer should be there: the router lowers nprobe to fit, never below
                ``min_nprobe``; without a deadline nprobe is never lowered.

        Raises:
            InvalidInputError: names the argument.
            RouterClosedError: after :meth:`close`.
        """
        return self._search(queries, k, nprobe, deadline_ms=deadline_ms, min_nprobe=min_nprobe)

    def _search(
        self,
        queries: Any,
        k: int,
        nprobe: int | None,
        *,
        deadline_ms: float | None,
        min_nprobe: int,
        on_probes: Callable[[I64], None] | None = None,
        may_wait: bool = False,
    ) -> SearchResult:
        self._refuse_own_threads("search")
        reply = BlockingReply()
        # No copy of the queries: the caller waits, and its buffer with it.
        request = self._request(reply, queries, k, nprobe, deadline_ms, min_nprobe, on_probes, own=False)
        request.may_wait = may_wait and self._wait_for_lists
        return self._engine.run(request, reply)

    async def asearch(
        self,
        queries: Any,
        k: int = 10,
        nprobe: int | None = None,
        *,
        deadline_ms: float | None = None,
        min_nprobe: int = 1,
        on_batch: Callable[[BatchReport], None] | None = None,
    ) -> SearchResult:
        """:meth:`search` for asyncio; concurrent calls share batches. ``on_batch``: as :meth:`submit`."""
        reply = LoopReply(self._mailboxes.of_running_loop())
        self._submit(
            reply,
            queries,
            k,
            nprobe,
            deadline_ms=deadline_ms,
            min_nprobe=min_nprobe,
            on_probes=None,
            on_batch=on_batch,
        )
        return await reply.future

    def submit(
        self,
        queries: Any,
        k: int = 10,
        nprobe: int | None = None,
        *,
        deadline_ms: float | None = None,
        min_nprobe: int = 1,
        on_probes: Callable[[I64], None] | None = None,
        on_batch: Callable[[BatchReport], None] | None = None,
    ) -> Future[SearchResult]:
        """:meth:`search` without waiting: input is checked here, the answer or error comes through the future.

        ``on_probes`` is given the (n, nprobe) lists that were probed, on the engine's thread, before the answer;
        ``on_batch`` the times of the batch that the request was in, when that has ended, maybe after the answer.
        """
        reply = FutureReply()
        self._submit(
            reply,
            queries,
            k,
            nprobe,
            deadline_ms=deadline_ms,
            min_nprobe=min_nprobe,
            on_probes=on_probes,
            on_batch=on_batch,
        )
        return reply.future

    def _submit(
        self,
        reply: Reply,
        queries: Any,
        k: int,
        nprobe: int | None,
        *,
        deadline_ms: float | None,
        min_nprobe: int,
        on_probes: Callable[[I64], None] | None,
        on_batch: Callable[[BatchReport], None] | None,
        may_wait: bool = False,
    ) -> None:
        request = self._request(reply, queries, k, nprobe, deadline_ms, min_nprobe, on_probes, own=True)
        request.on_batch, request.may_wait = on_batch, may_wait and self._wait_for_lists
        self._engine.submit(request)

    def _request(
        self,
        reply: Reply,
        queries: Any,
        k: int,
        nprobe: int | None,
        deadline_ms: float | None,
        min_nprobe: int,
        on_probes: Callable[[I64], None] | None,
        *,
        own: bool,
    ) -> Request:
        """``own``: of a copy, where the queries' memory is the caller's."""
        called_s = time.monotonic()
        prepared = self._prepare(queries)
        if own:
            prepared = own_memory(queries, prepared)
        k = check_count("k", k, MAX_K)
        nprobe = self._check_nprobe(nprobe)
        min_nprobe = check_count("min_nprobe", min_nprobe, self._index.nlist)
        deadline_s = None
        if deadline_ms is not None:
            deadline_s = called_s + check_milliseconds("deadline_ms", deadline_ms) / 1e3
        return Request(
            queries=prepared,
            k=k,
            nprobe=nprobe,
            reply=reply,
            deadline_s=deadline_s,
            min_nprobe=min_nprobe,
            on_probes=on_probes,
        )

    def _prepare(self, queries: Any) -> F32:
        """Queries checked and transformed: (n, scan_dim) float32, maybe in the caller's own memory."""
        checked = self._index.check_queries(queries)
        if not 1 <= len(checked) <= MAX_BATCH_QUERIES:
            raise InvalidInputError(f"queries hold {len(checked)} rows; expected 1..{MAX_BATCH_QUERIES}")
        return self._index.transform(checked)

    def _check_nprobe(self, nprobe: int | None) -> int:
        if nprobe is None:
            return self.nprobe
        return check_count("nprobe", nprobe, self._index.nlist)

    @property
    def dim(self) -> int:
        """Dimensions of queries."""
        return self._index.dim

    @property
    def nprobe(self) -> int:
        """Lists probed when a call does not say."""
        plan = self.plan
        return self._index.nprobe if plan is None else plan.nprobe

    def _refuse_own_threads(self, what: str, *, moves: bool = False) -> None:
        """``moves``: what it waits for are the threads that move lists, too."""
        own = self._engine.owns_current_thread() or self._patience.owns_current_thread()
        if moves and not own:
            own = self._lookahead.owns_current_thread() or self._recovery.owns_current_thread()
            own = own or any(tier.owns_current_thread() for tier in self._tiers)
        if own:
            raise RouterError(f"{what} was called from a callback on the router's own thread and would wait for itself")

    # Sessions

    def session(self, *, lookahead_bytes: int | None = None, window_ms: float | None = None) -> Session:
        """A retrieval session with lookahead.

        Args:
            lookahead_bytes: most bytes that lookahead of this session moves, over all its rounds.
            window_ms: generation time that its copies can hide behind: the budget then is what the plan's profile
                predicts to be best (:meth:`hybridindex.partitioner.plan.Plan.lookahead_budget`). Without either, what
                the roomiest arena has beside the plan's lists.

        Raises:
            InvalidInputError: both are given, a bad number, or a window without a plan.
            ProfileError: a window, and the plan's profile timed no copies.
            RouterClosedError: after :meth:`close`.
        """
        if self._closed:
            raise RouterClosedError("the router is closed")
        plan = self.plan
        spare = max(
            (t.arena.nbytes - self._opening.pinned_bytes(plan, t.ordinal) for t in self._paged_tiers()), default=0
        )
        if lookahead_bytes is not None and window_ms is not None:
            raise InvalidInputError("lookahead_bytes and window_ms are both given; the window decides the bytes")
        if window_ms is not None:
            if plan is None:
                raise InvalidInputError("window_ms needs a router with a plan; give lookahead_bytes")
            lookahead_bytes = self._window_bytes(plan, check_milliseconds("window_ms", window_ms), max(0, spare))
        if lookahead_bytes is None:
            lookahead_bytes = max(0, spare)
        return Session(self, check_bytes("lookahead_bytes", lookahead_bytes))

    def _window_bytes(self, plan: Plan, window_ms: float, share_bytes: int) -> int:
        """The plan's answer, remembered: pipelines have few steps, and asking takes longer than a small search."""
        key = (id(plan), window_ms, share_bytes)
        known = self._window_budgets.get(key)
        if known is None:
            if len(self._window_budgets) >= _MAX_WINDOWS:
                self._window_budgets.clear()
            # The plan is kept beside its answer: no other gets its id meanwhile.
            known = plan, plan.lookahead_budget(window_ms, share_bytes=share_bytes).nbytes
            self._window_budgets[key] = known
        return known[1]

    def _start_lookahead(self, holder: Holder, drafts: Any, nprobe: int | None, budget_bytes: int) -> Future[None]:
        if self._closed:
            raise RouterClosedError("the router is closed")
        budget_bytes = check_bytes("budget_bytes", budget_bytes)
        prepared = own_memory(drafts, self._prepare(drafts))
        return self._lookahead.prefetch(holder, prepared, self._check_nprobe(nprobe), budget_bytes)

    def _end_lookahead(self, holder: Holder) -> None:
        self._lookahead.release(holder)

    def _abandon_lookahead(self, holder: Holder) -> None:
        self._lookahead.abandon(holder)

    def _note_use(self, probed: I64) -> None:
        self._lookahead.note_use(probed)

    def _device_bytes_of(self, lists: Collection[int]) -> int:
        """Bytes that these lists take on a device."""
        return int(self._opening.list_bytes[list(lists)].sum())

    # State

    @property
    def residency(self) -> Residency:
        """The current snapshot."""
        return self._residency.current

    @property
    def devices(self) -> tuple[Tier, ...]:
        return tuple(self._tiers)

    @property
    def host_scanner(self) -> str:
        """What scans on the host: "native" or "faiss"."""
        return self._host.name

    @property
    def plan(self) -> Plan | None:
        return self._placement.plan

    def stats(self) -> RouterStats:
        read = replace(
            self._stats.read(),
            cached_lists=self._lookahead.n_cached,
            device_failures=sum(tier.n_failures for tier in self._tiers),
            pinned_host_bytes=self._opening.host_lists.nbytes,
        )
        plan = self.plan
        if plan is None or not self._tiers:
            return read
        wanted = (plan.list_device >= 0) & (self._index.list_sizes > 0)
        return replace(read, unplaced_lists=int((wanted & (self._residency.current.list_device < 0)).sum()))

    def arena_use(self) -> tuple[ArenaUse, ...]:
        """What each device's bytes are in use for, now."""
        held, cached = self._lookahead.marks()
        return arena_use(self._tiers, self._residency.current, self._opening.list_bytes, held=held, cached=cached)

    def check_invariants(self) -> None:
        """Asserts what must hold at any time; for tests and debugging."""
        self._residency.check_invariants()
        self._lookahead.check_invariants()
        self._opening.host_lists.check_invariants()
        for tier in self._tiers:
            tier.check_invariants()

    def close(self) -> None:
        """Answers what is queued, joins all threads, lets the arenas go. Closing twice is harmless.

        What a device does not end is waited for so long as ``HealthPolicy.stuck_s`` says, in a scan and again in a move
        of lists. Then the host has answered; the device's thread is left behind, with its memory, and named in the log.
        """
        self._refuse_own_threads("close", moves=True)
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self.settle()
        self._placement.join()
        self._recovery.close()
        self._patience.close()
        scanned = self._engine.close()
        self._lookahead.close()
        left = [t for t in self._tiers if not t.close(self._stuck_s, scanned=t.ordinal in scanned)]
        if not left:  # lists in page-locked memory may be what a move is reading
            self._opening.host_lists.close()
        self._host.close()

    def __enter__(self) -> Router:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
