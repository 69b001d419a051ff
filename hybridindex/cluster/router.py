"""Searches and changes of a cluster from outside: any node answers, and another one where that takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

import numpy as np

from hybridindex.answer_codec import decode_answer
from hybridindex.client.messages import Call, count_of, delete_call, error_of, ids_of, rows_call, search_call
from hybridindex.cluster.batches import divide, put_together
from hybridindex.config import MAX_BATCH_QUERIES, SearchParams, check_number
from hybridindex.errors import (
    BuildError,
    BusyWritingError,
    DeadlineExceededError,
    HybridIndexError,
    InvalidInputError,
    OverloadedError,
    RouterClosedError,
    RouterError,
    ServiceError,
    UnreachableError,
)
from hybridindex.partitioner.nodes.nearest import LOCAL_WORTH
from hybridindex.processes import OfOneProcess
from hybridindex.router.remote.cluster_map import MapNode
from hybridindex.router.remote.connection import Exchange
from hybridindex.router.remote.locality import LOCALITY_PATH, MOST_BYTES, Locality
from hybridindex.router.remote.loop_thread import HedgeBudget, LoopThread
from hybridindex.router.remote.peer import Peer
from hybridindex.types import F32, I64, SearchResult

__all__ = ["ClusterRouter"]

#: Of an answer beside its arrays.
_MARGIN_BYTES = 1 << 16
#: Between two questions who the nodes are.
_REFRESH_S = 2.0
#: Between two attempts of a change; and the status of one whose outcome no node knows.
_AGAIN_S, _UNKNOWN = 0.1, 502
#: A deadline that a node takes.
_LEAST_MS = 0.001
#: An attempt that has less left may end before a node says that nothing has changed: nodes take up to 5 s to agree on
#: who writes.
_ATTEMPT_S = 6.0
#: By node, what asking it costs beyond the searches that it has under way: nothing is known.
_EQUAL: Mapping[str, int] = {}


class _Search:
    """One call, until a node has answered it. Everything on the loop's thread."""

    def __init__(
        self,
        router: ClusterRouter,
        call_of: Callable[[float | None], Call[SearchResult]],
        deadline_ms: float | None,
        shape: tuple[int, int],
        limit_s: float,
        remote: Mapping[str, int],
    ) -> None:
        """
        Args:
            call_of: what a node is asked that has so many milliseconds left; None: there is no deadline.
            deadline_ms: from now; None: there is none.
            shape: (n, k) of the answer.
            remote: as of :class:`hybridindex.cluster.batches.BatchPart`.
        """
        self.future: Future[SearchResult] = Future()
        self._router, self._call_of, self._shape = router, call_of, shape
        self._most = _MARGIN_BYTES + shape[0] * (12 * shape[1] + 12)
        self._call = call_of(deadline_ms)
        self._ends_s = None if deadline_ms is None else time.monotonic() + deadline_ms / 1e3
        self._asked: dict[str, tuple[Peer, Exchange, float, Callable[[Exception], None]]] = {}
        self._tried: set[str] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._error: Exception | None = None
        self._limit_s, self._remote = limit_s, remote

    def start(self) -> None:
        loop = self._router.loop
        self._timers.append(loop.call_later(self._limit_s, self._give_up))
        self._ask_another()

    def _ask_another(self) -> None:
        if self._tried and not self._has_time():
            self._settle(self._error or DeadlineExceededError("no node answered before the deadline"))
            return
        peer = self._router.choose(self._tried, self._remote)
        if peer is None:
            if not self._asked:
                self._settle(self._error or UnreachableError("no node of the cluster answers"))
            return
        self._ask(peer)

    def _has_time(self) -> bool:
        """Until the deadline; whoever is asked next gets what is left of it."""
        if self._ends_s is None:
            return True
        left_ms = 1e3 * (self._ends_s - time.monotonic())
        if left_ms > 0:
            self._call = self._call_of(max(round(left_ms, 3), _LEAST_MS))
        return left_ms > 0

    def _ask(self, peer: Peer) -> None:
        name, loop = peer.node.name, self._router.loop
        self._tried.add(name)
        exchange = Exchange(lambda status, body, error: self._told(name, status, body, error), self._most)

        def on_down(error: Exception) -> None:
            if isinstance(error, TimeoutError):
                self._ask_another()  # too, as it may only be busy
            else:
                self._told(name, 0, b"", error)

        self._asked[name] = (peer, exchange, loop.time(), on_down)
        peer.n_asked += 1
        peer.n_open += 1
        self._timers.append(loop.call_later(peer.tail.limit_s(len(self._call.content)), self._is_late, name))
        call = self._call
        target = f"{call.path}?{urlencode(call.params)}" if call.params else call.path
        kind, accept = call.headers["content-type"], call.headers["accept"]
        peer.ask(target, call.content, exchange, on_down, kind=kind, accept=accept)

    def _is_late(self, name: str) -> None:
        if name not in self._asked:
            return
        peer, _, began_s, _ = self._asked[name]
        peer.mark_late()
        other = self._router.choose(self._tried, self._remote) if self._has_time() else None
        if other is not None and self._router.hedges.spend(peer.n_open, other.n_open):
            peer.n_hedged += 1
            self._ask(other)
        elif other is not None:
            # Looks again after as long: the other one may have less to do by then.
            loop = self._router.loop
            self._timers.append(loop.call_later(loop.time() - began_s, self._is_late, name))

    def _told(self, name: str, status: int, body: bytes, error: Exception | None) -> None:
        if name not in self._asked:
            return
        peer, exchange, began_s, on_down = self._asked.pop(name)
        exchange.cancel()
        peer.forget(on_down)
        peer.n_open -= 1
        if status:
            peer.heard()
        problem: Exception | None = error
        if problem is None:
            problem = error_of(status, {}, body)
        if problem is None:
            try:
                result = decode_answer(body)
                if result.ids.shape != self._shape:
                    raise InvalidInputError(f"it has shape {result.ids.shape}; expected {self._shape}")
            except InvalidInputError as wrong:
                problem = ServiceError(f"the answer of {name} cannot be read: {wrong}")
            else:
                peer.tail.observe(len(self._call.content), self._router.loop.time() - began_s)
                self._settle(result)
                return
        peer.n_failed += 1
        self._error = problem
        if (400 <= status < 500 and status != 429) or isinstance(problem, DeadlineExceededError):
            self._settle(problem)  # another node would say the same
        elif not self._asked:
            self._ask_another()

    def leave(self) -> None:
        """Nobody waits for it any more."""
        if self.future.cancel():
            self._settle(UnreachableError("the search was cancelled"))

    def _give_up(self) -> None:
        self._settle(self._error or UnreachableError(f"no node of the cluster answered within {self._limit_s:g} s"))

    def _settle(self, outcome: SearchResult | Exception) -> None:
        for timer in self._timers:
            timer.cancel()
        for peer, exchange, _, on_down in self._asked.values():
            exchange.cancel()
            peer.forget(on_down)
            peer.n_open -= 1
        self._asked.clear()
        self._router.ended(self)
        if not self.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, SearchResult):
            self.future.set_result(outcome)
        elif isinstance(outcome, HybridIndexError):
            self.future.set_exception(outcome)
        else:
            error = UnreachableError(f"no node of the cluster answers: {outcome}")
            error.__cause__ = outcome
            self.future.set_exception(error)


class ClusterRouter(OfOneProcess):
    """Searches a cluster, and changes its rows. A context manager; thread-safe.

    It asks a node that holds what the queries are near to, of several the one with the least to do, over connections
    that stay open; a batch whose queries are near to different nodes is divided between these. A node that is down is
    not asked; where one takes longer than it nearly always does, another one is asked, too: the first answer counts.
    """

    def __init__(
        self,
        nodes: Mapping[str, str],
        *,
        dim: int,
        key: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 30.0,
        by_locality: bool = True,
    ) -> None:
        """
        Args:
            nodes: name and URL of each.
            dim: of queries.
            key: API key with the role search, at least.
            timeout_s: longest wait for an answer without a deadline.
            by_locality: False: nodes are chosen by what they have to do alone.

        Raises:
            InvalidInputError: there is no node.
        """
        if not nodes:
            raise InvalidInputError("nodes is empty; expected the URL of a node at least")
        self.dim, self._timeout_s = dim, check_number("timeout_s", timeout_s, 3600.0)
        self._key, self._tls = key, tls
        self._by_locality = by_locality
        #: Where lists are, as the nodes said last; None: they did not, or all have the same, and all nodes are equal.
        self.locality: Locality | None = None
        self._known = threading.Event()
        self.hedges = HedgeBudget()
        self._searches: set[_Search] = set()
        self._peers: list[Peer] = []
        self._turn = 0
        self._closed = False
        self._lock = threading.Lock()
        self._thread = LoopThread(name="hybridindex-cluster")
        self.loop = self._thread.loop
        try:
            self._thread.run(self._begin(dict(nodes)))
        except BaseException:
            self._thread.close()
            raise

    # On the loop's thread

    async def _begin(self, nodes: dict[str, str]) -> None:
        self._set_nodes(nodes)
        self._follower = self.loop.create_task(self._follow())

    def _set_nodes(self, nodes: Mapping[str, str]) -> None:
        # Where something is wrong with one of them, those before stay.
        told = [MapNode(name=name, url=url) for name, url in nodes.items()]
        known = {(peer.node.name, peer.node.url): peer for peer in self._peers}
        self._peers = [
            known.pop((node.name, node.url))
            if (node.name, node.url) in known
            else Peer(self.loop, node, self._key, self._tls, up=True)
            for node in told
        ]
        for peer in known.values():
            peer.close()

    async def _follow(self) -> None:
        """Nodes come and leave, and lists move; the nodes know."""
        version = -1
        while not self._closed:
            with contextlib.suppress(TimeoutError, ValueError, KeyError, TypeError, RecursionError, HybridIndexError):
                said = json.loads(await self._get("/v1/cluster/nodes", 1 << 20))
                if said["nodes"]:  # a node that has just begun knows of none
                    self._set_nodes({node["name"]: node["url"] for node in said["nodes"]})
                if self._by_locality and said["version"] != version:
                    encoded = await self._get(LOCALITY_PATH, MOST_BYTES)
                    self.locality = self._fitting(Locality.decode(encoded)) if encoded else None
                    version = said["version"]
                self._known.set()
            await asyncio.sleep(_REFRESH_S)

    async def _get(self, path: str, most_bytes: int) -> bytes:
        """What some node answers. Raises TimeoutError, UnreachableError: none did; HybridIndexError: it refuses."""
        peer = self.choose(set())
        if peer is None:
            raise UnreachableError("no node of the cluster answers")
        told: asyncio.Future[bytes] = self.loop.create_future()

        def answered(status: int, body: bytes, error: Exception | None) -> None:
            if told.done():
                return
            if error is not None:
                told.set_exception(UnreachableError(f"no answer to {path}: {error}"))
            elif (refusal := error_of(status, {}, body)) is not None:
                told.set_exception(refusal)
            else:
                told.set_result(body)

        exchange = Exchange(answered, most_bytes)
        peer.get(path, exchange)
        try:
            return await asyncio.wait_for(told, _REFRESH_S)
        finally:
            exchange.cancel()

    def _fitting(self, locality: Locality) -> Locality | None:
        return locality if locality.vectors.shape[1] == self.dim and locality.tells_nodes_apart else None

    def choose(self, tried: set[str], remote: Mapping[str, int] = _EQUAL) -> Peer | None:
        """The node to ask next; None: there is none left. Late and down ones only where no other is.

        Args:
            remote: as of :class:`_Search`; a node that it does not name costs as much as one that holds nothing.
        """
        left = [peer for peer in self._peers if peer.node.name not in tried]
        if not left:
            return None
        self._turn += 1
        ordered = [left[(self._turn + i) % len(left)] for i in range(len(left))]
        dear = LOCAL_WORTH if remote else 0

        def cost(peer: Peer) -> tuple[bool, bool, int]:
            return not peer.up, peer.late, peer.n_open + remote.get(peer.node.name, dear)

        best = min(ordered, key=cost)
        return best if best.up or len(tried) < len(self._peers) else None

    def _start(self, search: _Search) -> None:
        self.hedges.earn()
        self._searches.add(search)
        search.start()

    def ended(self, search: _Search) -> None:
        """It has its outcome."""
        self._searches.discard(search)

    # For callers

    def search(
        self,
        queries: Any,
        k: int = 10,
        nprobe: int | None = None,
        *,
        deadline_ms: float | None = None,
        min_nprobe: int = 1,
        candidates: int | None = None,
        allow_partial: float | None = None,
        allow_ids: Any = None,
        deny_ids: Any = None,
        where: str | None = None,
    ) -> SearchResult:
        """The k nearest vectors of each query among its ``nprobe`` nearest lists, wherever these are.

        Args:
            queries: (d,) or (n, d) float32; (d,) answers (1, k).
            k: 1..2048.
            nprobe: default the nodes'.
            deadline_ms: time from now in which the answer should be there; nprobe may be lowered for it, down to
                ``min_nprobe``.
            candidates: of a search by codes, rows that are compared exactly, k at least; default the nodes'. Of no
                effect where rows are scanned.
            allow_partial: the least fraction of each query's work (0 < x <= 1) that an answer may rest on where nodes
                are away or late; ``coverage`` of the answer says how much was done. None: all of it, or an error.
            allow_ids: (m,) integers, the ids that may be answered; default all.
            deny_ids: (m,) integers, those that may not; default none.
            where: a condition on attributes, as ``lang = 'en' AND year >= 2020``. With any of the three, as many lists
                are probed as hold as many of the rows that are left as ``nprobe`` lists have rows.

        Raises:
            InvalidInputError: names the argument. UnreachableError: no node answers. IncompleteAnswerError: less was
            scanned than is allowed. DeadlineExceededError: the deadline passed before a node began, or without an
            answer of one that says nothing any more. RouterClosedError: after :meth:`close`. RouterError: called from a
            callback of an answer.
        """
        self._refuse_own_thread("search")
        return self.submit(
            queries,
            k,
            nprobe,
            deadline_ms=deadline_ms,
            min_nprobe=min_nprobe,
            candidates=candidates,
            allow_partial=allow_partial,
            allow_ids=allow_ids,
            deny_ids=deny_ids,
            where=where,
        ).result()

    def submit(
        self,
        queries: Any,
        k: int = 10,
        nprobe: int | None = None,
        *,
        deadline_ms: float | None = None,
        min_nprobe: int = 1,
        candidates: int | None = None,
        allow_partial: float | None = None,
        allow_ids: Any = None,
        deny_ids: Any = None,
        where: str | None = None,
    ) -> Future[SearchResult]:
        """:meth:`search` without waiting."""
        params = SearchParams(
            k=k,
            nprobe=nprobe,
            deadline_ms=deadline_ms,
            min_nprobe=min_nprobe,
            candidates=candidates,
            allow_partial=allow_partial,
            allow_ids=allow_ids,
            deny_ids=deny_ids,
            where=where,
        )
        asked = self._checked(queries)
        parts = divide(asked, params.nprobe, self.locality)
        searches = [self._search(asked if len(parts) == 1 else asked[part.rows], params, part.remote) for part in parts]
        with self._lock:
            if self._closed:
                raise RouterClosedError("the router of the cluster is closed")
            for search in searches:
                self._thread.call(self._start, search)
        whole = put_together(parts, [search.future for search in searches])
        whole.add_done_callback(lambda whole: self._leave(searches) if whole.cancelled() else None)
        return whole

    def _leave(self, searches: Sequence[_Search]) -> None:
        with self._lock:
            for search in () if self._closed else searches:
                self._thread.call(search.leave)

    def _search(self, queries: F32, params: SearchParams, remote: Mapping[str, int]) -> _Search:
        def call_of(deadline_ms: float | None) -> Call[SearchResult]:
            return search_call(
                queries,
                None,
                k=params.k,
                nprobe=params.nprobe,
                deadline_ms=deadline_ms,
                min_nprobe=None if deadline_ms is None else params.min_nprobe,
                candidates=params.candidates,
                allow_partial=params.allow_partial,
                allow_ids=params.allow_ids,
                deny_ids=params.deny_ids,
                where=params.where,
            )

        return _Search(self, call_of, params.deadline_ms, (len(queries), params.k), self._timeout_s, remote)

    def _checked(self, queries: Any) -> F32:
        try:
            asked = np.atleast_2d(np.ascontiguousarray(queries, dtype=np.float32))
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"queries are not an array of numbers: {error}") from None
        if asked.ndim != 2 or asked.shape[1] != self.dim or not 1 <= len(asked) <= MAX_BATCH_QUERIES:
            raise InvalidInputError(f"queries have shape {asked.shape}; expected ({self.dim},) or (n, {self.dim})")
        return asked

    def add(self, vectors: Any, ids: Any = None, attributes: Any = None) -> I64:
        """Adds rows; the ids. They are on the disk of the index when it returns, and searches of all nodes that answer
        find them. Needs a key with the role write.

        Args:
            vectors: (d,) or (n, d) float32.
            ids: (n,) integers of 0 or more; None: numbers above all that are there.
            attributes: a mapping of names to columns, a pyarrow Table or RecordBatch, or a DataFrame.

        Raises:
            DuplicateIdError: an id is there. InvalidInputError: names the argument.
            UnreachableError, OverloadedError: nothing has changed; no node answers, or none writes now.
            ServiceError: the node that writes was lost meanwhile, and may have added them or not.
        """
        return ids_of(self._change(rows_call(vectors, ids, attributes, replaces=False), again=False), ids)

    def upsert(self, vectors: Any, ids: Any, attributes: Any = None) -> int:
        """As :meth:`add`, in the place of all rows that have these ids; how many ids were there, at the attempt that
        counted: where the node that writes is lost, another one is asked."""
        if ids is None:
            raise InvalidInputError("ids is None; expected the id of each row")
        return count_of(self._change(rows_call(vectors, ids, attributes, replaces=True), again=True), "replaced")

    def delete(self, ids: Any = None, *, where: str | None = None) -> int:
        """Deletes rows by id, or those of which a condition is true; how many ids were there. As :meth:`upsert`."""
        return count_of(self._change(delete_call(ids, where), again=True), "deleted")

    def _change(self, call: Call[dict[str, Any]], *, again: bool) -> dict[str, Any]:
        """``again``: made twice, it has the effect of one."""
        self._refuse_own_thread("a change")
        ends_s = time.monotonic() + self._timeout_s
        last_s = ends_s - min(_ATTEMPT_S, self._timeout_s / 4)
        tried: set[str] = set()
        while True:
            asked: Future[tuple[int, bytes]] = Future()
            with self._lock:
                if self._closed:
                    raise RouterClosedError("the router of the cluster is closed")
                self._thread.call(self._ask_for_change, call, tried, ends_s, asked)
            problem: HybridIndexError
            try:
                status, body = asked.result()
            except UnreachableError as error:
                may_repeat, problem = True, error
            except Exception as error:  # noqa: BLE001 - of the connection
                words = f"a node was lost while the change was made ({error}), which may be made or not"
                may_repeat, problem = again, ServiceError(words)
            else:
                found = error_of(status, {}, body)
                if found is None:
                    return call.read(body)
                problem = found
                # Another process writes: a node that was lost, and may end soon.
                busy = isinstance(found, OverloadedError | BusyWritingError) or type(found) is BuildError
                may_repeat = again if status == _UNKNOWN else busy
            if not may_repeat or time.monotonic() > last_s:
                raise problem
            time.sleep(_AGAIN_S)
            if len(tried) >= len(self._peers):
                tried.clear()

    def _ask_for_change(
        self, call: Call[dict[str, Any]], tried: set[str], ends_s: float, asked: Future[tuple[int, bytes]]
    ) -> None:
        """On the loop's thread."""
        peer = self.choose(tried)
        if peer is None:
            asked.set_exception(UnreachableError("no node of the cluster answers"))
            return
        tried.add(peer.node.name)

        def told(status: int, body: bytes, error: Exception | None) -> None:
            if error is None:
                asked.set_result((status, body))
            else:
                asked.set_exception(error)

        more = {name: value for name, value in call.headers.items() if name != "content-type"}
        peer.request(
            call.path,
            call.content,
            told,
            kind=call.headers["content-type"],
            lines="".join(f"{name}: {value}\r\n" for name, value in more.items()),
            limit_s=max(_AGAIN_S, ends_s - time.monotonic()),
        )

    def wait_until_known(self, timeout_s: float = 5.0) -> bool:
        """Waits until nodes have said who they are and where lists are; whether they did in time. Searches before that
        go to any node."""
        return self._known.wait(timeout_s)

    def _refuse_own_thread(self, what: str) -> None:
        """Raises RouterError: callbacks of answers run on the thread that makes them, and would wait for themselves."""
        if self._thread.is_current():
            raise RouterError(f"{what} was called from a callback on the router's own thread and would wait for itself")

    def status(self) -> list[dict[str, Any]]:
        """Of each node: its state, and what it was asked."""
        return [peer.status() for peer in self._peers]

    def close(self) -> None:
        """What is under way fails. Closing twice is harmless.

        Raises:
            RouterError: called from a callback of an answer.
        """
        self._refuse_own_thread("close")
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._thread.run(self._end())
        self._thread.close()

    async def _end(self) -> None:
        for search in list(self._searches):
            search._settle(RouterClosedError("the router of the cluster was closed"))
        self._follower.cancel()
        await asyncio.gather(self._follower, *(peer.close() for peer in self._peers), return_exceptions=True)
        await asyncio.sleep(0)

    def __enter__(self) -> ClusterRouter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
