"""A session: one RAG request's retrieval life. Lookahead on a draft, search, lookahead again, search, close."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from hybridindex.config import SearchParams, check_bytes
from hybridindex.errors import InvalidInputError, RouterClosedError
from hybridindex.index.filters.row_filter import RowFilter
from hybridindex.processes import OfOneProcess
from hybridindex.router.batch.loop_reply import LoopReply
from hybridindex.router.batch.replies import FutureReply, Reply
from hybridindex.router.batch.stages import BatchReport
from hybridindex.router.lookahead.list_refs import SessionLists
from hybridindex.router.served import Served, on_served
from hybridindex.types import I64, SearchResult

__all__ = ["Session", "SessionBudgets", "SessionStats", "StartedLookahead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """What lookahead did for one session."""

    lookaheads: int
    lists_moved: int
    bytes_moved: int
    #: Lists that did not fit the budget or the free pages, or that no device took.
    lists_skipped: int
    #: Moved or shared lists that a search of this session then probed, and their bytes.
    lists_used: int
    bytes_used: int
    #: Bytes that its own lookaheads moved and none of its searches probed, so far.
    bytes_wasted: int
    searches: int
    #: Mean over searched queries of the part of their bytes that devices scanned; 0 before the first.
    hit_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionBudgets:
    """Most bytes that lookahead of one session moves."""

    #: Over all its rounds; and in one that says nothing.
    in_all: int
    each: int
    #: What to move in a window of so many milliseconds, or during a named step.
    in_window: Callable[[float | None, str | None], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedLookahead:
    """A lookahead that was queued."""

    #: Done when its bytes have landed, or when it was given up.
    moving: Future[None]
    #: Older lookaheads of the same owner that made way for it.
    n_dropped: int


class _Moved(NamedTuple):
    """As of :class:`SessionStats`."""

    lists_moved: int = 0
    bytes_moved: int = 0
    lists_skipped: int = 0
    lists_used: int = 0
    bytes_used: int = 0
    bytes_wasted: int = 0


class Session(OfOneProcess):
    """Made by :meth:`hybridindex.router.Router.session`. Methods may be called from several threads; close once."""

    def __init__(self, current: Callable[[], Served], budgets: SessionBudgets, owner: str = "") -> None:
        """
        Args:
            current: what the router serves; lists of a generation before are of no use to the next one.
            owner: lookaheads that wait are dropped, and worked off, fairly between owners.
        """
        self._current = current
        self._budgets = budgets
        self._served = served = current()
        self._lists = SessionLists(owner=owner)
        self._lock = threading.Lock()
        #: Of lists in generations before.
        self._before = _Moved()
        self._n_lookaheads = 0
        self._used: set[int] = set()
        self._probed: set[int] = set()
        self._n_searches = 0
        self._n_queries = 0
        self._hit_rates = 0.0
        self._closed = False
        #: Lookaheads that have not landed.
        self._moving: list[Future[None]] = []
        # A session that is dropped without close() must not hold its pages for ever.
        self._dropped = weakref.finalize(self, served.lookahead.abandon, self._lists)

    def _now(self) -> Served:
        """What serves now."""
        with self._lock:
            served = self._current()
            if served is not self._served:
                self._take_up(served)
            return served

    def _lists_in(self, served: Served) -> SessionLists:
        """Those of this session there.

        Raises:
            RouterClosedError: another generation serves.
        """
        with self._lock:
            if served is not self._served:
                raise RouterClosedError("another generation of the index serves")
            return self._lists

    def _take_up(self, served: Served) -> None:
        """With the lock held: another generation serves, in which this session has no lists."""
        self._dropped.detach()
        self._before = self._moved()
        self._served, self._lists = served, SessionLists(owner=self._lists.owner)
        self._used, self._probed, self._moving = set(), set(), []
        self._dropped = weakref.finalize(self, served.lookahead.abandon, self._lists)

    def lookahead(
        self,
        draft_queries: Any,
        *,
        nprobe: int | None = None,
        budget_bytes: int | None = None,
        window_ms: float | None = None,
        step: str | None = None,
    ) -> Future[None]:
        """Starts moving the lists that ``draft_queries`` would probe, and returns at once.

        Args:
            draft_queries: (d,) or (n, d) float32; several share the budget rank by rank.
            nprobe: lists wanted per draft; default the router's.
            budget_bytes: most bytes to move; default the router's share for one session.
            window_ms: generation time that this lookahead alone can hide behind: moves no more than that hides, either.
            step: or the measured step whose time that is; see :meth:`hybridindex.router.Router.session`.

        Returns:
            A future that is done when the bytes have landed, or when the lookahead was given up: its session was
            closed, or newer ones filled the queue (``RouterConfig.lookahead_queue_bytes``). Waiting for it is optional:
            a search uses what is there, waits for more where that is faster, and scans the rest on the host.

        Raises:
            InvalidInputError: bad queries, nprobe or budget, more queries than the queue holds, or both a window and a
                step.
            ProfileError: a window or step, and the plan's profile timed no copies.
            RouterClosedError: the session or its router is closed.
        """
        return self.start_lookahead(
            draft_queries, nprobe=nprobe, budget_bytes=budget_bytes, window_ms=window_ms, step=step
        ).moving

    def start_lookahead(
        self,
        draft_queries: Any,
        *,
        nprobe: int | None = None,
        budget_bytes: int | None = None,
        window_ms: float | None = None,
        step: str | None = None,
    ) -> StartedLookahead:
        """:meth:`lookahead`, which also says what made way for it."""
        self._check_open()
        if window_ms is not None and step is not None:
            raise InvalidInputError("window_ms and step are both given; the step has its own window")
        budget = alone = check_bytes("budget_bytes", self._budgets.in_all if budget_bytes is None else budget_bytes)
        if window_ms is not None or step is not None:
            alone = min(budget, self._budgets.in_window(window_ms, step))
        elif budget_bytes is None:
            alone = self._budgets.each

        def started(served: Served) -> StartedLookahead:
            searcher = served.searcher
            searcher.refuse_closed()
            probed = searcher.nprobe if nprobe is None else searcher.check_nprobe(nprobe)
            queries = searcher.prepare(draft_queries, own=True)
            lists = self._lists_in(served)
            moving, n_dropped = served.lookahead.prefetch(lists, queries, probed, budget, alone)
            with self._lock:
                self._n_lookaheads += 1
                self._moving = [*(before for before in self._moving if not before.done()), moving]
            return StartedLookahead(moving=moving, n_dropped=n_dropped)

        return on_served(self._now, started)

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
        """As :meth:`hybridindex.router.Router.search`; also counts which moved lists were of use.

        While lists of a lookahead are on their way it may wait for some of them, no longer than searching at once was
        predicted to take in all; a deadline is heeded.
        """
        self._check_open()
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
        result = on_served(
            self._now,
            lambda served: served.searcher.search(
                queries, params, partial(self._note_probes, served), may_wait=self._may_wait()
            ),
        )
        self._note_result(result)
        return result

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
        on_batch: Callable[[BatchReport], None] | None = None,
    ) -> Future[SearchResult]:
        """:meth:`search` without waiting, as :meth:`hybridindex.router.Router.submit`.

        A search that was submitted before :meth:`close` is answered after it. One whose future is cancelled in time is
        not counted as a search; which lists it probed may be.

        Raises:
            InvalidInputError: names the argument.
            RouterClosedError: the session or its router is closed.
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
            reply = FutureReply(self._note_result)
            self._submit(served, reply, queries, params, on_batch)
            return reply

        self._check_open()
        return on_served(self._now, submitted).future

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
        """:meth:`submit` for asyncio; raises what it raises."""
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
            reply = LoopReply(served.searcher.mailboxes.of_running_loop(), self._note_result)
            self._submit(served, reply, queries, params, on_batch)
            return reply

        self._check_open()
        return await on_served(self._now, submitted).future

    def _submit(
        self,
        served: Served,
        reply: Reply,
        queries: Any,
        params: SearchParams,
        on_batch: Callable[[BatchReport], None] | None,
    ) -> None:
        on_probes = partial(self._note_probes, served)
        served.searcher.submit(
            reply, queries, params, on_probes=on_probes, on_batch=on_batch, may_wait=self._may_wait()
        )

    def _may_wait(self) -> bool:
        """Whether lists are on their way for this session."""
        with self._lock:
            self._moving = [moving for moving in self._moving if not moving.done()]
            return bool(self._moving)

    def _note_result(self, result: SearchResult) -> None:
        with self._lock:
            self._n_searches += 1
            self._n_queries += len(result.hit_rate)
            self._hit_rates += float(result.hit_rate.sum())

    def _note_probes(self, served: Served, probes: I64) -> None:
        lists = np.unique(probes[probes >= 0])
        probed = set(served.index.pieces_of(lists).tolist())
        fresh = set[int]()
        with self._lock:
            if served is self._served:  # else the numbers are those of other lists
                self._probed |= probed
                fresh = (probed & self._lists.lists) - self._used
                self._used |= fresh
        if fresh:
            served.parts.stats.add(lookahead_used_lists=len(fresh))
        served.lookahead.note_use(lists)

    @property
    def stats(self) -> SessionStats:
        with self._lock:
            return SessionStats(
                lookaheads=self._n_lookaheads,
                searches=self._n_searches,
                hit_rate=self._hit_rates / self._n_queries if self._n_queries else 0.0,
                **self._moved()._asdict(),
            )

    def _moved(self) -> _Moved:
        """With the lock held: in all generations so far."""
        lists = self._lists
        here = _Moved(
            lists_moved=lists.lists_moved,
            bytes_moved=lists.bytes_moved,
            lists_skipped=lists.lists_skipped,
            lists_used=len(self._used),
            bytes_used=self._bytes_of(self._used),
            bytes_wasted=self._bytes_of(lists.brought - self._probed),
        )
        return _Moved(*(before + now for before, now in zip(self._before, here, strict=True)))

    def _bytes_of(self, lists: set[int]) -> int:
        """On a device."""
        return int(self._served.parts.device_list_bytes[list(lists)].sum())

    def _check_open(self) -> None:
        if self._closed:
            raise RouterClosedError("the session is closed")

    def close(self) -> None:
        """Cancels what still moves; its lists may stay cached, or leave. Closing twice is harmless."""
        self._closed = True
        with self._lock:
            served, lists, is_open = self._served, self._lists, self._dropped.detach() is not None
        if is_open:
            served.lookahead.release(lists)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
