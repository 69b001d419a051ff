"""From a call to the engine: checks queries, makes the request and hands it over, for a router and its sessions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hybridindex.config import MAX_BATCH_QUERIES, SearchParams, check_count
from hybridindex.errors import InvalidInputError, RouterClosedError, RouterError
from hybridindex.index.ivf import IVFIndex
from hybridindex.router.batch.batch import BlockingReply, Reply, Request
from hybridindex.router.batch.divided import DividedReply
from hybridindex.router.batch.loop_reply import Mailboxes
from hybridindex.router.batch.stages import BatchReport
from hybridindex.router.devices.placement import Placement
from hybridindex.router.engine import Engine
from hybridindex.router.lookahead.wait_for_loads import WaitForLoads
from hybridindex.router.precision import CandidateCount
from hybridindex.types import F32, I64, SearchResult

__all__ = ["Searcher"]


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
    ) -> None:
        """
        Args:
            wait_for_lists: as :class:`hybridindex.config.RouterConfig` says.
            candidates: of searches by codes; None: rows are scanned.
        """
        self._index = index
        self._engine = engine
        self._placement = placement
        self._wait_for_loads = wait_for_loads
        self._wait_for_lists = wait_for_lists
        self._candidates = candidates
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
        self.refuse_own_threads("search")
        reply = BlockingReply()
        # No copy of the queries: the caller waits, and its buffer with it.
        requests = self._requests(reply, queries, params, on_probes, own=False, may_wait=may_wait)
        if len(requests) == 1:
            return self._engine.run(requests[0], reply)
        for request in requests:
            self._engine.submit(request)
        return reply.wait()

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
        for request in self._requests(reply, queries, params, on_probes, own=True, may_wait=may_wait):
            request.on_batch = on_batch
            self._engine.submit(request)

    def _requests(
        self,
        reply: Reply,
        queries: Any,
        params: SearchParams,
        on_probes: Callable[[I64], None] | None,
        *,
        own: bool,
        may_wait: bool,
    ) -> list[Request]:
        """One, or several where a single one would have too many candidates.

        ``own``: of a copy, where the queries' memory is the caller's.
        """
        called_s = time.monotonic()
        params.check_index(self._index.nlist)
        prepared = self.prepare(queries, own=own)
        nprobe, kept = self.nprobe if params.nprobe is None else params.nprobe, params.k
        n = step = len(prepared)
        limit_s = 0.0 if params.deadline_ms is None else params.deadline_ms / 1e3
        if self._candidates is not None:
            kept = self._candidates.of(params.k, nprobe, params.candidates)
            step = min(n, self._candidates.queries_at_once(kept))
        starts = range(0, n, step)
        divided = DividedReply(reply, n, params.k, len(starts)) if len(starts) > 1 else None
        requests = []
        for start in starts:
            rows = slice(start, min(n, start + step))
            requests.append(
                Request(
                    queries=prepared if divided is None else prepared[rows],
                    params=params,
                    nprobe=nprobe,
                    kept=kept,
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
        """1..nlist.

        Raises:
            InvalidInputError: it is not.
        """
        return check_count("nprobe", nprobe, self._index.nlist)

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
