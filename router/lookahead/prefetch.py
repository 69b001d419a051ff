"""Lookahead: which lists to move for a draft query, to which device, and what to evict for them (TeleRAG, §4.1, §4.2).

:func:`choose_lists` is pure. :class:`Lookahead` owns the thread that quantizes drafts and queues loads.
:mod:`hybridindex.router.lookahead.list_refs` knows why a list is resident, :mod:`hybridindex.tiers.paged.device_tier`
moves bytes. Answers never depend on what has landed.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from hybridindex.errors import RouterClosedError
from hybridindex.router.batch.parts import RouterParts
from hybridindex.router.lookahead.grouping import assign_greedily, group_queries, overlap_bytes, resident_on
from hybridindex.router.lookahead.hotness import HotnessPolicy
from hybridindex.router.lookahead.list_refs import ListRefs, SessionLists
from hybridindex.router.lookahead.wait_for_loads import Flight, WaitForLoads
from hybridindex.router.lookahead.waiting_drafts import ROUND_PROBES, Draft, WaitingDrafts
from hybridindex.tiers.contract.futures import fail, settle
from hybridindex.tiers.contract.tier import LoadReport
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.types import F32, I64

__all__ = ["Lookahead", "choose_lists"]

_log = logging.getLogger(__name__)

#: Longest wait for scans in flight to leave the pages of evicted lists; what does not fit then is skipped.
_EVICTION_TIMEOUT_S = 1.0
#: Loads on their way to a device beyond which it takes no draft: those that wait are bounded in bytes, and can be
#: dropped.
_MOST_FLIGHTS = 64


def choose_lists(
    probes: I64, list_bytes: I64, present: npt.NDArray[np.bool_], budget_bytes: int
) -> tuple[list[int], list[int]]:
    """Lists to move for a batch of draft queries, nearest first, rank by rank across the queries.

    Args:
        probes: (n, p) int64 probed lists, nearest first; -1 = none.
        list_bytes: (nlist,) int64 device bytes of each list, page rounding included.
        present: (nlist,) bool: resident already, costs nothing.
        budget_bytes: bytes that may move.

    Returns:
        The lists to move, and those that the budget left out. A list that does not fit is skipped and the next one
        tried; a list is never split.
    """
    chosen: list[int] = []
    left_out: list[int] = []
    ranked = probes.T.reshape(-1)
    ranked = ranked[np.sort(np.unique(ranked, return_index=True)[1])]
    for list_id in ranked.tolist():
        if list_id < 0 or present[list_id]:
            continue
        nbytes = int(list_bytes[list_id])
        if nbytes == 0:
            continue
        if nbytes <= budget_bytes:
            budget_bytes -= nbytes
            chosen.append(list_id)
        else:
            left_out.append(list_id)
    return chosen, left_out


class Lookahead:
    """Owner of the lists that are on devices for sessions, or because these used them. Thread-safe; :meth:`close`
    joins its thread."""

    def __init__(
        self, parts: RouterParts, cache: HotnessPolicy | None, wait_for_loads: WaitForLoads, queue_bytes: int
    ) -> None:
        """
        Args:
            cache: None: lists leave with the last session that holds them.
            wait_for_loads: told what is on its way.
            queue_bytes: most bytes of drafts that wait.
        """
        self._index = parts.index
        self._tiers = parts.paged
        self._residency = parts.residency
        self._stats = parts.stats
        self._wait_for_loads = wait_for_loads
        #: Whether lists that move nowhere count as skipped.
        self._has_devices = bool(parts.tiers)
        self._prepare_thread = parts.host.adopt_thread
        self._lock = threading.Lock()
        self._refs = ListRefs(parts.device_list_bytes, cache)
        #: Per device: bytes that were made room for and whose load is not queued yet.
        self._reserved = [0] * len(self._tiers)
        self._closed = False
        self._drafts = WaitingDrafts(queue_bytes)
        #: Per device: loads on their way.
        self._n_flights = [0] * len(self._tiers)
        #: Lists that searches probed since the thread last looked; None: none did.
        self._used: npt.NDArray[np.bool_] | None = None
        self._use_lock = threading.Lock()
        #: Abandoned sessions; None: drafts or used lists wait, or it is closed.
        self._jobs: queue.SimpleQueue[SessionLists | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hybridindex-lookahead", daemon=True)
        self._thread.start()

    # For sessions

    def prefetch(
        self, session: SessionLists, queries: F32, nprobe: int, budget_bytes: int, round_bytes: int
    ) -> tuple[Future[None], int]:
        """Queues the move of what ``queries`` (n, scan_dim) will probe; returns at once.

        ``budget_bytes`` is over all rounds of the session, ``round_bytes`` for this one.

        Returns:
            A future that is done when the bytes have landed, the session was closed or the draft was dropped; and how
            many drafts of the same owner were dropped for this one.

        Raises:
            InvalidInputError: it is larger than the queue. RouterClosedError.
        """
        future: Future[None] = Future()
        # Bytes on their way cannot be called back: a caller who cancels only stops waiting.
        future.set_running_or_notify_cancel()
        draft = Draft(
            session=session,
            queries=queries,
            nprobe=nprobe,
            budget_bytes=budget_bytes,
            round_bytes=round_bytes,
            future=future,
        )
        with self._lock:
            if self._closed:
                raise RouterClosedError("the router is closed")
            dropped = self._drafts.put(draft)
        self._jobs.put(None)
        self._give_up(dropped)
        return future, sum(other.session.owner == session.owner for other in dropped)

    def _give_up(self, dropped: Sequence[Draft]) -> None:
        """Of drafts that nobody works on. Without the lock: their callers may be told."""
        if dropped:
            self._stats.add(lookahead_dropped=len(dropped))
        for draft in dropped:
            settle(draft.future, None)

    @property
    def waiting_bytes(self) -> int:
        """What drafts that wait take."""
        return self._drafts.nbytes

    def look_again(self) -> None:
        """Devices may have failed: drafts that waited for them wait no more. Returns at once."""
        if self._drafts:
            self._jobs.put(None)

    def note_use(self, probed: I64) -> None:
        """A session's search probed these lists (m,): the cache's next round. Returns at once; never waits for the
        thread that moves lists."""
        if not self._tiers:
            return
        with self._use_lock:
            first = self._used is None
            if self._used is None:
                self._used = np.zeros(len(self._refs.list_bytes), dtype=np.bool_)
            self._used[self._index.pieces_of(probed)] = True
        if first:
            self._jobs.put(None)

    def release(self, session: SessionLists) -> None:
        """Ends a session: lists that no other session holds are cached, or leave after their last reader. Its drafts
        wait no more."""
        with self._lock:
            ended = self._drafts.end(session)
            drops = self._refs.release(session) + self._beyond_share()
            self._drop(drops)
        for draft in ended:
            settle(draft.future, None)

    def abandon(self, session: SessionLists) -> None:
        """:meth:`release` before long, on the own thread. Takes no lock: a garbage collector may call it anywhere."""
        self._jobs.put(session)

    # For plans

    def adopt(self, lists: Sequence[int]) -> None:
        """A plan owns exactly these lists from now on, also those that a session's copy is still bringing."""
        with self._lock:
            self._refs.pin(lists)

    def wanted(self) -> npt.NDArray[np.bool_]:
        """(nlist,) bool: what sessions hold, and the cache."""
        with self._lock:
            return self._refs.wanted()

    def evict(self, lists: I64) -> bool:
        """Drops ``lists`` if all of them are but cached, and waits until their pages are free; whether they are."""
        with self._lock:
            if not self._refs.cached[lists].all():
                return False
            drops = self._drop_evicted(self._refs.evict(lists))
        self._wait_for_pages(drops)
        return True

    def drop_unwanted(self) -> bool:
        """Drops lists that neither a plan, nor a session, nor the cache wants. False: nothing was done, as lists are on
        their way for sessions."""
        with self._lock:
            if any(self._n_flights):
                return False
            there = self._residency.current.list_device >= 0
            self._drop(np.flatnonzero(there & ~self._refs.pinned & ~self._refs.wanted()).tolist())
        return True

    def room_for_plan(self, tier: DeviceTier) -> int:
        """Bytes of pages that :meth:`room_for` could have free on ``tier``, now."""
        with self._lock:
            cached = self._refs.cached & self._on(tier)
            return self._free(tier) + int(self._refs.list_bytes[cached].sum())

    @contextmanager
    def room_for(self, tier: DeviceTier, lists: I64, spared: I64 | None = None) -> Iterator[None]:
        """Drops as much of the cache as ``lists`` need to fit ``tier``, and waits until their pages are free.

        Until the block ends they count as taken: it queues the load that takes them.

        Args:
            spared: lists that stay, where not just ``lists`` do.
        """
        needed = int(self._refs.list_bytes[lists].sum())
        with self._lock:
            drops = self._evict(tier, needed, lists if spared is None else spared)
            self._reserved[tier.ordinal] += needed
        try:
            self._wait_for_pages(drops)
            yield
        finally:
            with self._lock:
                self._reserved[tier.ordinal] -= needed

    # Reading

    @property
    def n_held(self) -> int:
        """Lists that sessions hold."""
        with self._lock:
            return self._refs.n_held

    @property
    def n_cached(self) -> int:
        """Lists that stay because they were used."""
        with self._lock:
            return int((self._refs.cached & (self._residency.current.list_device >= 0)).sum())

    def marks(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """(nlist,) bool each: lists that sessions hold and no plan wants, and cached lists."""
        with self._lock:
            cached = self._refs.cached.copy()
            return self._refs.wanted() & ~cached & ~self._refs.pinned, cached

    def check_invariants(self) -> None:
        """Asserts that cached lists have no other reason to stay, and that the queue's account adds up."""
        with self._lock:
            self._drafts.check_invariants()
            self._refs.check_invariants()

    # The own thread

    def _run(self) -> None:
        self._prepare_thread()
        while True:
            jobs = [self._jobs.get()]
            while not self._jobs.empty():
                jobs.append(self._jobs.get())
            try:
                self._work([job for job in jobs if job is not None])
            except BaseException:  # noqa: BLE001 - later lookaheads still need this thread
                _log.exception("a lookahead failed")
            del jobs
            with self._lock:
                if self._closed:
                    return
                if self._drafts and self._takers() is not None:
                    self._jobs.put(None)

    def _work(self, abandoned: Sequence[SessionLists]) -> None:
        for session in abandoned:
            self.release(session)
        # All that waited is one round of the cache: a round costs the same for one search as for many.
        with self._use_lock:
            used, self._used = self._used, None
        with self._lock:
            if used is not None:
                self._refs.note_use(np.flatnonzero(used))
            tiers = self._takers()
            if tiers is None:
                return
            drafts = self._drafts.take()
        waiting = []
        for draft in drafts:
            if tiers and not draft.session.closed:
                waiting.append(draft)
            else:
                if self._has_devices and not draft.session.closed:
                    self._skip(draft)
                settle(draft.future, None)
        if not waiting:
            return
        try:
            # All that waited are quantized together; each keeps its own budget.
            probes = self._quantize(waiting)
            tier_of = self._choose_tiers(waiting, probes, tiers)
        except Exception as error:  # noqa: BLE001 - handed to the callers
            _log.exception("%d lookaheads failed", len(waiting))
            for draft in waiting:
                fail(draft.future, error)
            return
        for number, (draft, wanted, tier) in enumerate(zip(waiting, probes, tier_of.tolist(), strict=True)):
            if self._closed:
                self._give_up(waiting[number:])
                return
            try:
                self._start(draft, wanted, tiers[tier])
            except Exception as error:  # noqa: BLE001 - handed to the caller; the others go on
                _log.exception("a lookahead of %d queries failed", len(draft.queries))
                fail(draft.future, error)

    def _skip(self, draft: Draft) -> None:
        """Counts what ``draft`` wants and no device takes."""
        try:
            [probes] = self._quantize([draft])
        except Exception:  # noqa: BLE001 - a search says what is wrong with the index
            _log.exception("lists of a lookahead were not counted")
            return
        lists = np.unique(probes[probes >= 0])
        n_skipped = int((self._refs.list_bytes[lists] > 0).sum())
        with self._lock:
            draft.session.lists_skipped += n_skipped
        self._stats.add(lookahead_skipped_lists=n_skipped)

    def _quantize(self, drafts: Sequence[Draft]) -> list[I64]:
        """Each draft's probes, (n, nprobe) int64; of one that is a round alone, (1, m): each list once, by rank."""
        if len(drafts) == 1 and drafts[0].n_probes > ROUND_PROBES:
            return [self._quantize_large(drafts[0])]
        together = np.concatenate([draft.queries for draft in drafts])
        probes, _ = self._index.quantize(together, max(draft.nprobe for draft in drafts))
        ends = np.cumsum([len(draft.queries) for draft in drafts])
        return [part[:, : draft.nprobe] for part, draft in zip(np.split(probes, ends[:-1]), drafts, strict=True)]

    def _quantize_large(self, draft: Draft) -> I64:
        """In parts: the probes of all its queries at once could take gigabytes."""
        queries, n = draft.queries, len(draft.queries)
        # Of each list, where it comes first: rank by rank across the queries, as choose_lists takes them.
        first = np.full(len(self._refs.list_bytes), np.iinfo(np.int64).max)
        step = max(1, ROUND_PROBES // draft.nprobe)
        for at in range(0, n, step):
            if self._closed:
                break
            probes, _ = self._index.quantize(queries[at : at + step], draft.nprobe)
            places = np.arange(draft.nprobe)[None, :] * n + np.arange(at, at + len(probes))[:, None]
            np.minimum.at(first, probes[probes >= 0], places[probes >= 0])
        wanted = np.flatnonzero(first < np.iinfo(np.int64).max)
        return wanted[np.argsort(first[wanted])][None, :]

    def _choose_tiers(self, drafts: Sequence[Draft], probes: Sequence[I64], tiers: Sequence[DeviceTier]) -> I64:
        """Which device brings each draft's lists: alike drafts the same, the one that has most of them, in equal parts.

        A list counts wherever it is: the choice is about which device scans, not about what is found.
        """
        if len(tiers) == 1:
            return np.zeros(len(drafts), dtype=np.int64)
        middles = np.stack([draft.queries.mean(axis=0) for draft in drafts])
        group_of = group_queries(middles, -(-len(drafts) // len(tiers)))
        members = np.concatenate([np.full(p.size, g) for p, g in zip(probes, group_of, strict=True)])
        lists = np.concatenate([p.reshape(-1) for p in probes])
        resident = resident_on(self._residency.current.list_device, len(self._tiers))
        n_groups = int(group_of.max()) + 1
        overlap = overlap_bytes(lists[:, None], members, n_groups, resident, self._refs.list_bytes)
        # Where no device has more, the emptiest: less than a byte decides nothing else.
        free = np.array([tier.arena.pages.n_free / max(1, tier.arena.pages.n_pages) for tier in tiers])
        device_of = assign_greedily(overlap[:, [tier.ordinal for tier in tiers]] + free / 2)
        return device_of[group_of]

    def _start(self, draft: Draft, probes: I64, tier: DeviceTier) -> None:
        session, list_bytes = draft.session, self._refs.list_bytes
        wanted = self._index.pieces_of(np.unique(probes[probes >= 0]))
        with self._lock:
            present = self._residency.current.list_device >= 0
            self._refs.join(session, wanted[present[wanted]].tolist())
            # Rounds of one session share its budget. What is there already costs nothing.
            self._refs.note_lost(session, present)
            left = draft.budget_bytes - int(list_bytes[list(session.charged)].sum()) - session.bytes_coming
            chosen, left_out = choose_lists(probes, list_bytes, present, min(left, draft.round_bytes))
            chosen += self._choose_rows(probes, tier, present, min(left, draft.round_bytes))
            coming = int(list_bytes[chosen].sum())
            session.bytes_coming += coming
            self._n_flights[tier.ordinal] += 1

        def landed(flight: Flight, done: Future[LoadReport]) -> None:
            try:
                # A failed device is marked and logged by its tier; searches go to the host.
                report = done.result() if done.exception() is None else self._report_of(tier, chosen)
                self._wait_for_loads.end(flight, report.nbytes)
                self._settle(session, coming, len(left_out), report)
            finally:
                with self._lock:
                    self._n_flights[tier.ordinal] -= 1
                    if self._drafts:
                        self._jobs.put(None)
                settle(draft.future, None)

        try:
            with self.room_for(tier, np.array(chosen, dtype=np.int64), spared=wanted):
                flight = self._wait_for_loads.begin(tier.ordinal, chosen)
                try:
                    report = tier.load(chosen, self._residency, cancelled=lambda: session.closed)
                except BaseException:
                    self._wait_for_loads.end(flight, 0)
                    raise
        except BaseException:
            with self._lock:
                session.bytes_coming -= coming
                self._n_flights[tier.ordinal] -= 1
            raise
        report.add_done_callback(lambda done: landed(flight, done))

    def _choose_rows(
        self, probes: I64, tier: DeviceTier, present: npt.NDArray[np.bool_], budget_bytes: int
    ) -> list[int]:
        """Where codes are scanned: the rows of these lists that come behind the codes, nearest lists first. They take
        neither budget nor pages that the codes of any list could want, and nothing leaves for them."""
        nlist, list_bytes = self._index.nlist, self._refs.list_bytes
        if self._index.n_pieces == nlist:
            return []
        absent = int(list_bytes[:nlist][~present[:nlist]].sum())
        room = min(budget_bytes, self._free(tier)) - absent
        rows = np.where(probes >= 0, nlist + probes, -1)
        # A share has the codes of all lists, and the rows of its own.
        gone = self._index.integrity.pieces_in_quarantine(self._index.n_pieces, of_codes=True)
        if gone is not None:
            rows = np.where((rows >= 0) & gone[rows], -1, rows)
        return choose_lists(rows, list_bytes, present, max(0, room))[0]

    def _report_of(self, tier: DeviceTier, lists: Sequence[int]) -> LoadReport:
        """Of a load that failed: some of its lists may have been published before."""
        there = self._residency.current.list_device
        loaded = tuple(i for i in lists if there[i] == tier.ordinal)
        nbytes = int(self._refs.list_bytes[list(loaded)].sum())
        return LoadReport(loaded=loaded, skipped=(), present=(), nbytes=nbytes)

    def _settle(self, session: SessionLists, coming: int, n_left_out: int, report: LoadReport) -> None:
        n_skipped = len(report.skipped) + len(report.too_large) + n_left_out
        with self._lock:
            session.bytes_coming -= coming
            session.bytes_moved += report.nbytes
            session.lists_moved += len(report.loaded)
            session.lists_skipped += n_skipped
            drops = self._refs.landed(session, report.loaded)
            # Another session's lookahead brought these first.
            self._refs.join(session, report.present)
            # Under the lock: no plan or session may take a list between the decision and the drop.
            self._drop(drops + self._beyond_share())
        self._stats.add(
            lookahead_lists=len(report.loaded),
            lookahead_bytes=report.nbytes,
            lookahead_skipped_lists=n_skipped,
        )

    # With the lock held

    def _takers(self) -> list[DeviceTier] | None:
        """Devices that take drafts now; None: those that work have enough on their way, and drafts wait."""
        usable = [tier for tier in self._tiers if tier.usable]
        takers = [tier for tier in usable if self._n_flights[tier.ordinal] < _MOST_FLIGHTS]
        return takers if takers or not usable else None

    def _on(self, tier: DeviceTier) -> npt.NDArray[np.bool_]:
        on: npt.NDArray[np.bool_] = self._residency.current.list_device == tier.ordinal
        return on

    def _beyond_share(self) -> list[int]:
        beyond = []
        for tier in self._tiers:
            beyond += self._refs.evict_beyond_share(self._on(tier), tier.arena.nbytes)
        self._stats.add(cache_evicted_lists=len(beyond))
        return beyond

    def _free(self, tier: DeviceTier) -> int:
        """Bytes of free pages that no load is about to take."""
        # Claims first: a page that is taken between the two reads counts against us, not for us.
        claimed = tier.unclaimed_bytes + self._reserved[tier.ordinal]
        return max(0, tier.arena.pages.n_free * tier.geometry.page_bytes - claimed)

    def _evict(self, tier: DeviceTier, needed_bytes: int, wanted: I64) -> list[int]:
        drops = self._refs.evict_for(needed_bytes, self._free(tier), self._on(tier), wanted)
        return self._drop_evicted(drops)

    def _drop_evicted(self, drops: list[int]) -> list[int]:
        self._drop(drops)
        self._stats.add(cache_evicted_lists=len(drops))
        return drops

    def _drop(self, lists: Sequence[int]) -> None:
        if lists:
            self._residency.publish({}, drops=lists)

    def _wait_for_pages(self, dropped: Sequence[int]) -> None:
        if dropped and not self._residency.wait_reclaimed(self._residency.current.version, _EVICTION_TIMEOUT_S):
            _log.warning("pages of evicted lists are still read after %g s", _EVICTION_TIMEOUT_S)

    def owns_current_thread(self) -> bool:
        """Whether the own thread asks, in a callback."""
        return threading.current_thread() is self._thread

    def drop_waiting(self) -> None:
        """Gives up the drafts that wait."""
        with self._lock:
            dropped = self._drafts.clear()
        self._give_up(dropped)

    def close(self) -> None:
        """Drops what waits, joins the thread, and ends abandoned sessions. The device tiers are closed by their owner.
        Twice is harmless."""
        with self._lock:
            self._closed = True
        self.drop_waiting()
        self._jobs.put(None)
        self._thread.join()
        while not self._jobs.empty():
            session = self._jobs.get()
            if session is not None:
                self.release(session)
