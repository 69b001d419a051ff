"""The router: the public face of the serving side. Checks input, owns tiers, engine, residency and lookahead.

Longer than other files: most of it is the public methods with what they promise; the work is in the rooms beside it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import numpy.typing as npt

from hybridindex.config import RouterConfig, RouterSettings, SearchParams, check_bytes, check_milliseconds
from hybridindex.errors import InvalidInputError, RouterClosedError, RouterError
from hybridindex.index.filters.row_filter import RowFilter
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.warm import Warmed
from hybridindex.partitioner.decision import refuse_infeasible
from hybridindex.processes import OfOneProcess
from hybridindex.router.batch.loop_reply import LoopReply
from hybridindex.router.batch.replies import FutureReply
from hybridindex.router.batch.request import GivenProbes
from hybridindex.router.batch.stages import BatchReport
from hybridindex.router.batch.stats import RouterStats, StatsCounter
from hybridindex.router.devices.opening import wanted_devices
from hybridindex.router.devices.scrub import ScrubReport
from hybridindex.router.devices.usage import ArenaUse, arena_use
from hybridindex.router.lookahead.windows import Windows
from hybridindex.router.precision import without_devices
from hybridindex.router.served import Served, on_served
from hybridindex.router.session import Session, SessionBudgets
from hybridindex.tiers.contract.copy_queue import check_share
from hybridindex.tiers.contract.residency import Residency
from hybridindex.tiers.contract.tier import Tier
from hybridindex.types import F32, I64, LLMProfile, SearchResult

if TYPE_CHECKING:
    from hybridindex.partitioner.plan import Plan
    from hybridindex.router.remote.remote_lists import RemoteLists

__all__ = ["Router"]

_log = logging.getLogger(__name__)


class Router(OfOneProcess):
    """Serves one index by one plan. All public methods may be called from any thread; ``close`` joins what it started.

    Answers never depend on the plan, on what lookahead moved, or on devices failing: those change only the time taken.
    """

    def __init__(
        self,
        index: IVFIndex,
        *,
        plan: Plan | None = None,
        config: RouterConfig | None = None,
        llm: LLMProfile | None = None,
        remote: RemoteLists | None = None,
        **settings: Unpack[RouterSettings],
    ) -> None:
        """Reads lists into memory, allocates the arenas, copies the plan's lists, and is ready when it returns.

        Args:
            index: an open index; stays the caller's to close, after the router.
            plan: what to keep on the devices; None: nothing.
            config: default :class:`hybridindex.config.RouterConfig`'s own.
            llm: whose measured step times are the windows of lookahead; None: the plan's.
            remote: of a node of a cluster, asks others for lists that are not here; stays the caller's to close, after
                the router.
            settings: fields of ``config``, which they override.

        Raises:
            InvalidInputError: a setting is wrong, or contradicts the plan.
            ProfileMismatchError: the plan is of another index, or of its rows where codes are scanned, or the reverse.
            DeviceNotFoundError: a device does not exist.
            UnsupportedIndexError: the host scanner that was asked for cannot scan this index; codes were asked for
                and it has none; or rows are to stay on disk, and would be scanned.
        """
        self.config = config = (config or RouterConfig()).updated(settings)
        if plan is not None and not hasattr(plan, "index_fingerprint"):
            raise InvalidInputError(f"plan is a {type(plan).__name__}; expected what Index.plan returned, or None")
        self._remote = remote
        self._windows = Windows(config.window_ms, llm, pinned=config.pins_lists)
        self._stats = StatsCounter()
        #: Called after each batch, on the thread that ended it: an engine's or device's, or a caller's. Must not block.
        self.on_batch: list[Callable[[BatchReport], None]] = []
        #: Of generations that were served.
        self._earlier: set[str] = set()
        #: Lists of the one that had most.
        self._most_nprobe = 0
        self._following = threading.Lock()
        self._follower: threading.Thread | None = None
        #: No other generation or plan begins.
        self._ending = False
        self._served = self._open(index, plan, config)
        #: Beside it, while another one takes its place.
        self._others: tuple[Served, ...] = ()
        if self._served.index.rabitq is not None:
            _log.info("%s is searched by %s", index.path, self.precision)
        self._served.start()

    def _open(self, index: IVFIndex, plan: Plan | None, config: RouterConfig) -> Served:
        self._most_nprobe = max(self._most_nprobe, index.nlist)
        return Served(
            index,
            plan,
            config,
            self._windows,
            self._stats,
            self.on_batch,
            self._earlier,
            self._most_nprobe,
            self._remote,
        )

    # Devices and placement

    def apply_plan(self, plan: Plan, *, bandwidth_share: float = 1.0, force: bool = False) -> None:
        """Changes to another plan of the same index while serving; moves only the difference. Lists on their way are
        served by the host. The arenas of single lists grow and shrink to what the plan and lookahead want, within
        ``device_budget_bytes``, or within the plan's budget where none is configured; pages keep their size. Lists that
        do not fit stay on the host, counted as unplaced; those that found no room because sessions had it come when it
        is given back. Returns when all this is done, the copies to page-locked host memory included.

        Args:
            bandwidth_share: 0 < share <= 1, the part of the time in which a device may copy for this; lookahead goes
                first.
            force: apply a plan that is infeasible, too.

        Raises:
            InfeasiblePlanError: the plan is infeasible, and ``force`` is false.
            ProfileMismatchError: the plan is of another index, or of its rows where codes are scanned, or the reverse.
            InvalidInputError: the plan is for another number of devices, or the share is out of range.
        """
        self._refuse_own_threads("apply_plan")
        check_share(bandwidth_share)
        # Not in the middle of another generation's opening.
        with self._following:
            served = self._served
            served.precision.check_plan(plan.index_fingerprint)
            if plan.n_devices != (n := len(served.tiers)):
                raise InvalidInputError(f"the plan is for {plan.n_devices} device(s); this router has {n}")
            refuse_infeasible(plan, force=force)
            served.opening.say_other_pages(plan)
            served.placement.apply(plan, bandwidth_share)

    def set_device_budget(self, budgets: Sequence[int]) -> None:
        """Other ``device_budget_bytes`` than were configured: bytes of each device, which arenas keep to from the next
        change of plan on. For an owner who divides devices between several routers.

        Raises:
            InvalidInputError: no budget was configured, so each plan's own counts; or not one for each device.
        """
        if self.config.device_budget_bytes is None:
            raise InvalidInputError("device_budget_bytes is None: each plan's own budget counts")
        self.config = self.config.updated({"device_budget_bytes": tuple(budgets)})
        for served in (*self._others, self._served):
            served.opening.set_budgets(tuple(budgets))

    def settle(self) -> None:
        """Ends a change of plan that goes on, after what is being copied, and refuses further ones; searches go on.

        Returns at once, from any thread: for an owner who is about to close, and does not want to wait for hours where
        the change was given a small share of the time.
        """
        self._ending = True
        for served in (*self._others, self._served):
            served.placement.settle()

    # Generations

    @property
    def index(self) -> IVFIndex:
        """What searches scan: a generation of the index, its rows or its codes."""
        return self._served.index

    def follow(
        self,
        index: IVFIndex,
        plan: Plan | None = None,
        *,
        heir_of: Callable[[Plan], Plan] | None = None,
    ) -> None:
        """Serves another generation of the index from now on. Searches that are under way are answered by the one in
        which they began. Sessions go on, without the lists that lookahead brought; filters stay valid; a search that
        asks for more lists than there are now probes all. Devices have memory for one generation: the host serves while
        they change. Returns when their lists are there.

        Args:
            index: open; its owner closes it after the router.
            plan: what to keep on the devices.
            heir_of: or the plan to put in the place of the one in force, where there is one.

        Raises:
            InvalidInputError: queries of one generation are none of the other.
            RouterClosedError: after :meth:`settle` or :meth:`close`.
            HybridIndexError: as :class:`Router`. Then the generation before serves on; or the host serves the new one,
                where devices were given back already. The call may be repeated.
        """
        self._refuse_own_threads("follow")
        if self._remote is not None:
            raise RouterError("a node of a cluster serves one generation; start the cluster anew for another")
        for name in ("dim", "metric"):
            if (was := getattr(self.index, name)) != (now := getattr(index, name)):
                raise InvalidInputError(f"{name} of the other generation is {now}; this router answers {was}")
        with self._following, self._on_this_thread():
            if heir_of is not None and self.plan is not None:
                plan = heir_of(self.plan)
            if self._served.tiers:
                planned = None if plan is None else plan.index_fingerprint
                self._replace(index, plan, without_devices(self.config, index, planned))
            self._replace(index, plan, self.config)
            _log.info("generation %d of %s serves", index.generation, index.path)

    def _replace(self, index: IVFIndex, plan: Plan | None, config: RouterConfig) -> None:
        before = self._served
        self._earlier.add(before.index.rows.fingerprint)
        served = self._open(index, plan, config)
        try:
            self._others = (before, served)
            if self._ending:
                served.close()
                raise RouterClosedError("the router is closed, or about to be")
            served.start()
            self._served = served
            # What it began may have to begin again in it.
            before.engine.wait_idle(config.health.stuck_s)
            before.close()
        finally:
            self._others = ()

    @contextmanager
    def _on_this_thread(self) -> Iterator[None]:
        self._follower = threading.current_thread()
        try:
            yield
        finally:
            self._follower = None

    def owns_current_thread(self) -> bool:
        """Whether a callback asks, on a thread that would wait for itself."""
        try:
            self._refuse_own_threads("")
        except RouterError:
            return True
        return False

    def _refuse_own_threads(self, what: str) -> None:
        if self._follower is threading.current_thread():
            raise RouterError(f"{what} was called from a callback while the router changes to another generation")
        for served in (*self._others, self._served):
            served.refuse_own_threads(what)

    # Search

    def search(
        self,
        queries: Any,
        k: int = 10,
        nprobe: int | None = None,
        *,
        deadline_ms: float | None = None,
        min_nprobe: int = 1,
        candidates: int | None = None,
        allow_ids: Any = None,
        deny_ids: Any = None,
        where: str | None = None,
        row_filter: RowFilter | None = None,
        allow_partial: float | None = None,
    ) -> SearchResult:
        """The k nearest vectors of each query among its ``nprobe`` nearest lists.

        Args:
            queries: (d,) or (n, d) float32; (d,) answers (1, k).
            k: 1..2048.
            nprobe: 1..nlist; default the plan's, without a plan the index's.
            deadline_ms: time from now in which the answer should be there: the router lowers nprobe to fit, never below
                ``min_nprobe``; without a deadline nprobe is never lowered.
            candidates: of a search by codes, rows that are compared exactly, k at least; default the configuration's.
                Of no effect where rows are scanned.
            allow_ids: (m,) integers, the ids that may be answered; default all. Ids that are not there change nothing.
            deny_ids: (m,) integers, ids that may not be answered.
            where: a condition on attributes, as ``lang = 'en' AND year >= 2020``. With any of the three, rows are
                compared exactly, on the host, of as many lists as hold as many of the rows that are left as ``nprobe``
                lists have rows; see :mod:`hybridindex.tiers.host.filtered_scanner`.
            row_filter: instead of them, what :meth:`filter` made of them, for many searches with the same ids.
            allow_partial: in a cluster, the least fraction of each query's work (0 < x <= 1) that an answer may rest on
                where nodes are away, or late for ``deadline_ms``; ``coverage`` of the answer says how much was done.
                Without it such a search is an error.

        Raises:
            InvalidInputError: names the argument.
            RouterClosedError: after :meth:`close`.
            IncompleteAnswerError: less was scanned than ``allow_partial`` asks for.
        """
        params = SearchParams(
            k=k,
            nprobe=nprobe,
            deadline_ms=deadline_ms,
            min_nprobe=min_nprobe,
            candidates=candidates,
            allow_ids=allow_ids,
            deny_ids=deny_ids,
            where=where,
            row_filter=row_filter,
            allow_partial=allow_partial,
        )
        return on_served(self._current, lambda served: served.searcher.search(queries, params))

    async def asearch(
        self,
        queries: Any,
        k: int = 10,
        nprobe: int | None = None,
        *,
        deadline_ms: float | None = None,
        min_nprobe: int = 1,
        candidates: int | None = None,
        allow_ids: Any = None,
        deny_ids: Any = None,
        where: str | None = None,
        row_filter: RowFilter | None = None,
        allow_partial: float | None = None,
        on_batch: Callable[[BatchReport], None] | None = None,
    ) -> SearchResult:
        """:meth:`search` for asyncio; concurrent calls share batches. ``on_batch``: as :meth:`submit`."""
        params = SearchParams(
            k=k,
            nprobe=nprobe,
            deadline_ms=deadline_ms,
            min_nprobe=min_nprobe,
            candidates=candidates,
            allow_ids=allow_ids,
            deny_ids=deny_ids,
            where=where,
            row_filter=row_filter,
            allow_partial=allow_partial,
        )

        def submitted(served: Served) -> LoopReply:
            reply = LoopReply(served.searcher.mailboxes.of_running_loop())
            served.searcher.submit(reply, queries, params, on_batch=on_batch)
            return reply

        return await on_served(self._current, submitted).future

    def search_directly(
        self,
        queries: Any,
        k: int = 10,
        nprobe: int | None = None,
        *,
        candidates: int | None = None,
        most_bytes: int = 2 << 20,
    ) -> SearchResult | None:
        """As :meth:`search`, on the calling thread without any wait, such as an event loop that has the time: where
        there is no device, what is here is in memory, the engine is idle, and nothing calls for a batch. None: it was
        not searched; whether the router is closed, say the other calls.

        Args:
            most_bytes: of centroids, lists and rows, about, that are read at most: a gigabyte takes about 0.1 s.

        Raises:
            InvalidInputError: names the argument.
        """
        params = SearchParams(k=k, nprobe=nprobe, candidates=candidates)
        return self._current().searcher.search_directly(queries, params, most_bytes)

    def scan_directly(self, queries: F32, k: int, given: GivenProbes) -> SearchResult | None:
        """As :meth:`ascan`, on the calling thread, where this concerns nobody else: there is no device, nobody listens,
        and the engine is idle. None: it was not scanned.

        Raises:
            RouterClosedError: after :meth:`close`.
        """
        return on_served(self._current, lambda served: served.searcher.scan_directly(queries, k, given))

    async def ascan(self, queries: F32, k: int, given: GivenProbes) -> SearchResult:
        """The k nearest rows of given lists, all of which have to be here, for another node of the cluster.

        Args:
            queries: (n, scan_dim) float32, after the index's transforms.
            given: the lists of each query, and which of their rows may be answered.

        Raises:
            NotHeldError: lists are not here. RouterClosedError: after :meth:`close`.
        """

        def submitted(served: Served) -> LoopReply:
            reply = LoopReply(served.searcher.mailboxes.of_running_loop())
            served.searcher.submit_given(reply, queries, k, given)
            return reply

        return await on_served(self._current, submitted).future

    def compare(self, queries: F32, positions: I64, k: int, most_bytes: int | None = None) -> tuple[F32, I64] | None:
        """The k nearest of given candidates, all of which have to be here, for another node of the cluster; arguments,
        answer and errors are those of :meth:`hybridindex.router.comparisons.Comparisons.compare`.
        """
        return on_served(self._current, lambda served: served.comparisons.compare(queries, positions, k, most_bytes))

    def submit(
        self,
        queries: Any,
        k: int = 10,
        nprobe: int | None = None,
        *,
        deadline_ms: float | None = None,
        min_nprobe: int = 1,
        candidates: int | None = None,
        allow_ids: Any = None,
        deny_ids: Any = None,
        where: str | None = None,
        row_filter: RowFilter | None = None,
        allow_partial: float | None = None,
        on_probes: Callable[[I64], None] | None = None,
        on_batch: Callable[[BatchReport], None] | None = None,
    ) -> Future[SearchResult]:
        """:meth:`search` without waiting: input is checked here, the answer or error comes through the future.

        ``on_probes`` is given the (n, nprobe) lists that were probed, on the engine's thread, before the answer;
        ``on_batch`` the times of the batch that the request was in, when that has ended, maybe after the answer. A call
        with very many candidates is divided, and both are told of each part, in the order of the queries.

        A search whose future is cancelled while it waits for the engine is left out.
        """
        params = SearchParams(
            k=k,
            nprobe=nprobe,
            deadline_ms=deadline_ms,
            min_nprobe=min_nprobe,
            candidates=candidates,
            allow_ids=allow_ids,
            deny_ids=deny_ids,
            where=where,
            row_filter=row_filter,
            allow_partial=allow_partial,
        )

        def submitted(served: Served) -> FutureReply:
            reply = FutureReply()
            served.searcher.submit(reply, queries, params, on_probes=on_probes, on_batch=on_batch)
            return reply

        return on_served(self._current, submitted).future

    def _current(self) -> Served:
        return self._served

    def filter(self, *, allow_ids: Any = None, deny_ids: Any = None, where: str | None = None) -> RowFilter:
        """A filter for many searches, which then pay for no look-up of its ids.

        Args:
            allow_ids: (m,) integers, the ids that may be answered; default all.
            deny_ids: (m,) integers, ids that may not be answered.
            where: a condition on attributes, as ``lang = 'en' AND year >= 2020``; default none.

        Raises:
            InvalidInputError: they are no integers, or the condition is none.
            MissingDependencyError: what reads attributes is not installed.
        """
        return self._served.searcher.filter(SearchParams(allow_ids=allow_ids, deny_ids=deny_ids, where=where))

    def width(self, k: int, nprobe: int | None, candidates: int | None = None) -> int:
        """Entries of the largest array that each query of such a search takes; callers with many queries divide them by
        it.

        Raises:
            InvalidInputError: there are fewer candidates than ``k``.
        """
        return self._served.searcher.width(k, nprobe, candidates)

    @property
    def dim(self) -> int:
        """Dimensions of queries."""
        return self._served.index.dim

    @property
    def nprobe(self) -> int:
        """Lists probed when a call does not say."""
        return self._served.searcher.nprobe

    # Damage

    def scrub(self) -> ScrubReport:
        """Compares every list with its digests now, as fast as it goes; with ``scrub_bytes_per_s`` a thread does it.

        Raises:
            RouterClosedError: after :meth:`close`.
        """
        self._refuse_own_threads("scrub")
        served = self._served
        served.searcher.refuse_closed()
        return served.scrub.check()

    @property
    def damage(self) -> ScrubReport:
        """Which lists are damaged, as far as it was seen."""
        return self._served.scrub.report

    # Sessions

    def session(
        self,
        *,
        lookahead_bytes: int | None = None,
        window_ms: float | None = None,
        step: str | None = None,
        owner: str = "",
    ) -> Session:
        """A retrieval session with lookahead.

        Args:
            lookahead_bytes: most bytes that lookahead of this session moves, over all its rounds.
            window_ms: generation time that its copies can hide behind: the budget then is what the plan's profile
                predicts to be best (:meth:`hybridindex.partitioner.plan.Plan.lookahead_budget`).
            step: the pipeline step that it hides behind, as ``profile llm`` named and measured it. Without any of the
                three, each lookahead has the window of the configuration, or else of the longest measured step, and all
                together what the roomiest arena keeps for sessions.
            owner: whose session it is. Lookaheads that wait are worked off, and dropped, fairly between owners.

        Raises:
            InvalidInputError: more than one is given, a bad number, a step that was not measured, a window without a
                plan, or an owner that is no text.
            ProfileError: a window, and the plan's profile timed no copies.
            RouterClosedError: after :meth:`close`.
        """
        on_served(self._current, lambda served: served.searcher.refuse_closed())
        if not isinstance(owner, str):
            raise InvalidInputError(f"owner is {owner!r}; expected a text")
        plan, share = self.plan, self._share_bytes()
        given = {"lookahead_bytes": lookahead_bytes, "window_ms": window_ms, "step": step}
        if len(said := [name for name, value in given.items() if value is not None]) > 1:
            raise InvalidInputError(f"{' and '.join(said)} are both given; the window decides the bytes")
        each: int | None = None
        if window_ms is not None or step is not None:
            if plan is None:
                raise InvalidInputError("window_ms needs a router with a plan; give lookahead_bytes")
            lookahead_bytes = self._window_bytes(window_ms, step)
        elif lookahead_bytes is None:
            lookahead_bytes, default_ms = share, self._windows.default_ms(plan)
            if default_ms is not None and self._windows.share_bytes(plan) is not None:
                each = self._windows.nbytes(plan, default_ms, share)
        budget = check_bytes("lookahead_bytes", lookahead_bytes)
        budgets = SessionBudgets(in_all=budget, each=budget if each is None else each, in_window=self._window_bytes)
        return Session(self._current, budgets, owner)

    def drop_lookaheads(self) -> None:
        """Gives up the lookaheads that wait: their futures are done, and they count as dropped."""
        self._served.lookahead.drop_waiting()

    @property
    def window_ms(self) -> float | None:
        """The window of lookaheads that do not say: the configuration's, or that of the longest measured step."""
        return self._windows.default_ms(self.plan)

    def _share_bytes(self) -> int:
        """What the roomiest arena has for sessions."""
        plan = self.plan
        served = self._served
        return max((served.opening.lookahead_bytes(plan, tier.ordinal) for tier in served.parts.paged), default=0)

    def _window_bytes(self, window_ms: float | None, step: str | None) -> int:
        """What to move in a window, or during a step."""
        plan = self.plan
        if step is not None:
            window_ms = self._windows.of_step(plan, step)
        return self._windows.nbytes(plan, check_milliseconds("window_ms", window_ms), self._share_bytes())

    # State

    @property
    def residency(self) -> Residency:
        """The current snapshot: where what is scanned of each list lies, rows or codes."""
        served = self._served
        current, nlist = served.residency.current, served.index.nlist
        return current if served.index.n_pieces == nlist else current.part(0, nlist)

    @property
    def row_residency(self) -> Residency | None:
        """Where devices hold the rows of lists beside codes, now; None where rows are scanned."""
        served = self._served
        nlist = served.index.nlist
        return None if served.index.n_pieces == nlist else served.residency.current.part(nlist, nlist)

    @property
    def piece_device(self) -> npt.NDArray[np.int16]:
        """(nlist,) int16 device of each list now, -1 = host; where codes are scanned (2 nlist,): their rows follow."""
        return self._served.residency.current.list_device

    @property
    def devices(self) -> tuple[Tier, ...]:
        return tuple(self._served.tiers)

    @property
    def page_bytes(self) -> int:
        """Most bytes of a page of the devices: as the plan says that they were opened with, or as it fits the lists.
        Plans that are made for open devices are made for these."""
        return self._served.opening.page_bytes

    @property
    def warmed(self) -> Warmed:
        """What of the lists was read into memory."""
        return self._served.warmed

    @property
    def index_fingerprint(self) -> str:
        """Of what searches scan, the index's rows or its codes: plans must be of this."""
        return self._served.index.fingerprint

    @property
    def host_scanner(self) -> str:
        """What scans on the host: "native" or "faiss" rows, "rabitq" codes."""
        return self._served.host.name

    @property
    def precision(self) -> str:
        """What searches scan: "codes: …" with the candidates of a search of 10, or "rows", and why where the index has
        codes."""
        served = self._served
        if served.candidates is not None:
            return served.candidates.describe(10, served.searcher.nprobe)
        return served.precision.describe_rows()

    @property
    def bits(self) -> int | None:
        """Of a dimension, of the codes that searches scan; None: they scan rows."""
        codes = self._served.precision.codes
        return None if codes is None else codes.spec.bits

    @property
    def candidates(self) -> int | None:
        """Rows that a search of 10 by codes compares exactly; None: searches scan rows."""
        served = self._served
        return None if served.candidates is None else served.candidates.usual(10, served.searcher.nprobe)

    @property
    def plan(self) -> Plan | None:
        return self._served.placement.plan

    @property
    def page_locked_lists(self) -> I64:
        """(m,) int64 lists that page-locked host memory holds now: copies of them to a device are faster."""
        return self._served.opening.host_lists.list_ids()

    def stats(self) -> RouterStats:
        served = self._served
        read = replace(
            self._stats.read(),
            cached_lists=served.lookahead.n_cached,
            lookahead_waiting_bytes=served.lookahead.waiting_bytes,
            device_failures=sum(tier.n_failures for tier in served.tiers),
            pinned_host_bytes=served.opening.host_lists.nbytes,
            precision=self.precision,
        )
        plan, index = served.placement.plan, served.index
        if plan is None or not served.tiers:
            return read
        wanted = (wanted_devices(plan, index) >= 0) & (index.piece_bytes > 0)
        missing = wanted & (served.residency.current.list_device < 0)
        return replace(read, unplaced_lists=len(np.unique(np.flatnonzero(missing) % index.nlist)))

    def forget_load(self) -> None:
        """Counts searches from now on alone: those of a warm-up are no load."""
        self._stats.forget_load()

    def arena_use(self) -> tuple[ArenaUse, ...]:
        """What each device's bytes are in use for, now."""
        served = self._served
        held, cached = served.lookahead.marks()
        return arena_use(served.tiers, served.residency.current, served.opening.list_bytes, held=held, cached=cached)

    @property
    def added_on_devices(self) -> int:
        """Rows that were added since the lists were written, and lie in the memory of devices beside their lists."""
        return self._served.engine.added_on_devices.count

    def check_invariants(self) -> None:
        """Asserts what must hold at any time; for tests and debugging."""
        self._served.check_invariants()

    def close(self) -> None:
        """Answers what is queued, drops lookaheads that wait, joins all threads, lets the arenas go. Closing twice is
        harmless.

        What a device does not end is waited for so long as ``HealthPolicy.stuck_s`` says, in a scan and again in a move
        of lists. Then the host has answered; the device's thread is left behind, with its memory, and named in the log.
        """
        self._refuse_own_threads("close")
        self.settle()
        with self._following:
            self._served.close()

    def __enter__(self) -> Router:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
