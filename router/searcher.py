"""From a call to the engine: checks queries, makes the request and hands it over, for a router and its sessions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from hybridindex.config import MAX_BATCH_QUERIES, MAX_CANDIDATES, MAX_K, SearchParams, check_count
from hybridindex.errors import InvalidInputError, RouterClosedError, RouterError
from hybridindex.index.filters.row_filter import RowFilter, RowFilters
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.live.state import LiveRows
from hybridindex.router.batch.loop_reply import Mailboxes
from hybridindex.router.batch.replies import BlockingReply, DividedReply, Reply
from hybridindex.router.batch.request import GivenProbes, Request
from hybridindex.router.batch.stages import BatchReport
from hybridindex.router.devices.placement import Placement
from hybridindex.router.engine import Engine
from hybridindex.router.lookahead.wait_for_loads import WaitForLoads
from hybridindex.router.precision import CandidateCount
from hybridindex.types import F32, I64, SearchResult

__all__ = ["Searcher"]


#: Share of the rows; where more were deleted, the others are compared one by one.
_MOST_DELETED = 0.9


class _Call(NamedTuple):
    """A call's arguments, checked."""

    #: (n, scan_dim) float32.
    queries: F32
    nprobe: int
    #: Rows that the scan keeps of each query.
    kept: int
    #: Most queries of one request.
    at_once: int
    #: Which rows may be answered; None: all.
    filter: RowFilter | None = None
    #: As of a :class:`hybridindex.router.batch.request.Request`.
    live: LiveRows | None = None
    spare: int = 0
    short: bool = False


class Searcher:
    """Thread-safe. Owns nothing that has to be closed."""

    def __init__(
        self,
        index: IVFIndex,
        engine: Engine,
        placement: Placement,
        wait_for_loads: WaitForLoads,
        *,
        wait_for_lists: bool,
        candidates: CandidateCount | None,
        filters: RowFilters,
        most_nprobe: int,
        reads_disk: bool,
    ) -> None:
        """
        Args:
            wait_for_lists: as :class:`hybridindex.config.RouterConfig` says.
            candidates: of searches by codes; None: rows are scanned.
            filters: makes those of the index.
            most_nprobe: calls may ask for so many lists; where there are fewer, all are probed.
            reads_disk: a search may have to: not all lists are in memory.
        """
        self._most_nprobe = most_nprobe
        self._reads_disk = reads_disk
        self._index = index
        self._engine = engine
        self._placement = placement
        self._wait_for_loads = wait_for_loads
        self._wait_for_lists = wait_for_lists
        self._candidates = candidates
        self._filters = filters
        self._centroid_bytes = 4 * index.nlist * index.scan_dim
        self._mean_list_bytes = float(index.list_bytes.mean())
        self.mailboxes = Mailboxes()
        #: The router is closed, or about to be.
        self.closed = False

    def search(
        self,
        queries: Any,
        params: SearchParams,
        on_probes: Callable[[I64], None] | None = None,
        *,
        may_wait: bool = False,
    ) -> SearchResult:
        """Searches and waits; ``may_wait``: for lists on their way, too."""
        called_s = time.monotonic()
        # No copy of the queries: the caller waits, and its buffer with it.
        call = self._check(queries, params, own=False)
        plain = on_probes is None and params.deadline_ms is None and call.filter is None and not call.short
        if plain and len(call.queries) <= call.at_once:
            found = self._engine.search_directly(call.queries, params.k, call.nprobe, call.kept, call.live, call.spare)
            if found is not None:
                return found
        self.refuse_own_threads("search")
        reply = BlockingReply()
        requests = self._requests(reply, call, params, on_probes, called_s, may_wait=may_wait)
        if len(requests) == 1:
            return self._engine.run(requests[0], reply)
        for request in requests:
            self._engine.submit(request)
        return reply.wait()

    def search_directly(self, queries: Any, params: SearchParams, most_bytes: int) -> SearchResult | None:
        """:meth:`search` on the calling thread without a wait; whoever listens is told there. None: it needs a batch,
        or reads from disk, or more than ``most_bytes``."""
        if self._reads_disk:
            return None
        call = self._check(queries, params, own=False)
        if call.filter is not None or call.short or len(call.queries) > call.at_once:
            return None
        read = self._centroid_bytes + call.nprobe * self._mean_list_bytes
        if self._candidates is not None:
            read += call.kept * self._index.rows.page_row_bytes
        if len(call.queries) * read > most_bytes:
            return None
        return self._engine.search_directly(
            call.queries, params.k, call.nprobe, call.kept, call.live, call.spare, tell=True
        )

    def submit(
        self,
        reply: Reply,
        queries: Any,
        params: SearchParams,
        *,
        on_probes: Callable[[I64], None] | None = None,
        on_batch: Callable[[BatchReport], None] | None = None,
        may_wait: bool = False,
    ) -> None:
        """:meth:`search` without waiting; the answer goes to ``reply``."""
        called_s = time.monotonic()
        call = self._check(queries, params, own=True)
        for request in self._requests(reply, call, params, on_probes, called_s, may_wait=may_wait):
            request.on_batch = on_batch
            self._engine.submit(request)

    def scan_directly(self, queries: F32, k: int, given: GivenProbes) -> SearchResult | None:
        """As of :class:`hybridindex.router.engine.Engine`."""
        return self._engine.scan_directly(queries, k, given)

    def submit_given(self, reply: Reply, queries: F32, k: int, given: GivenProbes) -> None:
        """Has given lists scanned, maybe some rows of them alone, for another node.

        Args:
            queries: (n, scan_dim) float32, transformed.
            k: 1..2048.

        Raises:
            RouterClosedError: the router is closed.
        """
        nprobe = given.probes.shape[1]
        params = SearchParams(k=k, nprobe=nprobe)
        self._engine.submit(
            Request(queries=queries, params=params, nprobe=nprobe, kept=k, reply=reply, given=given, again=True)
        )

    def _check(self, queries: Any, params: SearchParams, *, own: bool) -> _Call:
        """``own``: of a copy, where the queries' memory is the caller's."""
        params.check_index(self._most_nprobe)
        prepared = self.prepare(queries, own=own)
        nprobe = self.nprobe if params.nprobe is None else min(params.nprobe, self._index.nlist)
        wanted = None if params.row_filter is None else self._filters.check(params.row_filter)
        if params.names_rows:
            wanted = self.filter(params)
        changes = self._index.rows.live
        live, spare, share = changes.seen(), 0, 0.0
        if (lost := changes.lost) is not None:
            raise lost
        deleted = None if live is None else live.deleted
        if wanted is None and deleted is not None:
            spare, share = deleted.spare(params.k, self._index.count), deleted.share(self._index.count)
        # More than scans answer, or hardly a row is left.
        short = params.k + spare > MAX_K or share > _MOST_DELETED
        if short or wanted is not None:  # rows are compared exactly, in any case
            return _Call(prepared, nprobe, params.k, len(prepared), wanted, short=short)
        if self._candidates is None:
            return _Call(prepared, nprobe, params.k + spare, len(prepared), None, live, spare)
        kept = self._candidates.of(params.k, nprobe, params.candidates)
        if deleted is not None:  # as many that were not deleted
            kept = min(math.ceil(kept / (1 - share)) + spare, MAX_CANDIDATES)
        return _Call(prepared, nprobe, kept, self._candidates.queries_at_once(kept), None, live, spare)

    def filter(self, params: SearchParams) -> RowFilter:
        """Of what ``params`` allow and deny."""
        return self._filters.make(params.allow_ids, params.deny_ids, params.where)

    def _requests(
        self,
        reply: Reply,
        call: _Call,
        params: SearchParams,
        on_probes: Callable[[I64], None] | None,
        called_s: float,
        *,
        may_wait: bool,
    ) -> list[Request]:
        """One, or several where a single one would have too many candidates."""
        n = len(call.queries)
        limit_s = 0.0 if params.deadline_ms is None else params.deadline_ms / 1e3
        starts = range(0, n, call.at_once)
        divided = DividedReply(reply, n, params.k, len(starts)) if len(starts) > 1 else None
        requests = []
        for start in starts:
            rows = slice(start, min(n, start + call.at_once))
            requests.append(
                Request(
                    queries=call.queries if divided is None else call.queries[rows],
                    params=params,
                    nprobe=call.nprobe,
                    kept=call.kept,
                    filter=call.filter,
                    live=call.live,
                    spare=call.spare,
                    short=call.short,
                    reply=reply if divided is None else divided.part(rows),
                    # Parts are searched one after the other: each has its share of the time.
                    deadline_s=None if params.deadline_ms is None else called_s + limit_s * rows.stop / n,
                    on_probes=on_probes,
                    may_wait=may_wait and self._wait_for_lists,
                )
            )
        return requests

    def prepare(self, queries: Any, *, own: bool) -> F32:
        """Queries checked and transformed, (n, scan_dim) float32; ``own``: never in the caller's own memory.

        Raises:
            InvalidInputError: what is wrong with them.
        """
        checked = self._index.check_queries(queries)
        if not 1 <= len(checked) <= MAX_BATCH_QUERIES:
            raise InvalidInputError(f"queries hold {len(checked)} rows; expected 1..{MAX_BATCH_QUERIES}")
        prepared = self._index.transform(checked)
        # np.shares_memory would release the interpreter, and the engine would take it.
        return prepared.copy() if own and (prepared is queries or not prepared.flags.owndata) else prepared

    @property
    def nprobe(self) -> int:
        """Lists probed when a call does not say."""
        plan = self._placement.plan
        return self._index.nprobe if plan is None else plan.nprobe

    def width(self, k: int, nprobe: int | None, candidates: int | None) -> int:
        """Entries of the largest array that each query of such a search takes in a batch.

        Raises:
            InvalidInputError: there are fewer candidates than ``k``.
        """
        nprobe = self.nprobe if nprobe is None else nprobe
        return max(nprobe, k if self._candidates is None else self._candidates.of(k, nprobe, candidates))

    def check_nprobe(self, nprobe: Any) -> int:
        """1..nlist; of a call that may have begun when there were more lists.

        Raises:
            InvalidInputError: it is not.
        """
        return min(check_count("nprobe", nprobe, self._most_nprobe), self._index.nlist)

    def refuse_closed(self) -> None:
        """Raises RouterClosedError."""
        if self.closed:
            raise RouterClosedError("the router is closed")

    def owns_current_thread(self) -> bool:
        """Whether a callback asks on a thread that answers searches."""
        return self._engine.owns_current_thread() or self._wait_for_loads.owns_current_thread()

    def refuse_own_threads(self, what: str) -> None:
        """Raises RouterError: there, waiting for an answer would never end."""
        if self.owns_current_thread():
            raise RouterError(f"{what} was called from a callback on the router's own thread and would wait for itself")
