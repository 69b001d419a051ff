"""A part of a batch that other nodes scan, until it is answered or nobody is left who could.

A *piece* is asked of one node. Where that takes longer than nearly all scans do there, or fails, its lists are asked of
their other holders, as pieces of their own. Whoever answers all of its lists first counts: the node, or the others
together. So no list is merged twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.router.batch.merge import empty_topk, merge_topk
from hybridindex.router.batch.split import compact
from hybridindex.router.remote.connection import Exchange
from hybridindex.router.remote.filter_codec import SentFilters
from hybridindex.router.remote.peer import Peer
from hybridindex.router.remote.scan_codec import decode_found, encode_comparison, encode_scan, found_bytes
from hybridindex.types import F32, I32, I64

__all__ = ["NOBODY", "Asked", "ComparedPart", "Nodes", "Part", "Piece", "ScannedPart"]

_log = logging.getLogger(__name__)

#: How long a node that says nothing is waited for, where no other one has its lists.
SILENT_WAIT_S = 2.0
#: In the place of a node: none that could be asked has the list.
NOBODY = -2


class Nodes(Protocol):
    """Who can be asked."""

    loop: asyncio.AbstractEventLoop

    def peer(self, node: int) -> Peer | None:
        """None where it has left."""

    def choose_again(self, probes: I64, excluded: int) -> npt.NDArray[np.int16]:
        """(n, p) nodes for probes (n, p), without those of a mask; NOBODY where there is none."""

    def may_hedge(self, n_late: int, n_other: int) -> bool:
        """:meth:`hybridindex.router.remote.loop_thread.HedgeBudget.spend`."""


class Asked(Protocol):
    """Who asked."""

    def done(self, piece: Piece) -> None: ...


class Part(ABC):
    """What the pieces of one part have in common."""

    __slots__ = ("k", "keep_max", "nodes", "options", "queries")

    def __init__(self, nodes: Nodes, queries: F32, k: int, *, keep_max: bool, options: str) -> None:
        """
        Args:
            queries: (m, d) of the part.
            keep_max: whether larger distances are nearer.
            options: of the question, as far as they are the same for all of its pieces.
        """
        self.nodes, self.queries, self.k, self.keep_max, self.options = nodes, queries, k, keep_max, options

    @abstractmethod
    def question(self, rows: I32, probes: I64, beside: npt.NDArray[Any]) -> tuple[str, bytes]:
        """Further options, and the arrays, of some of its queries."""

    @abstractmethod
    def work(self, probes: I64) -> I64:
        """(r,) int64 bytes that are read for each of (r, w) probes, -1 = none."""


class ScannedPart(Part):
    """Lists are scanned; beside each lies its coarse distance."""

    __slots__ = ("filters", "list_bytes")

    def __init__(
        self,
        nodes: Nodes,
        queries: F32,
        k: int,
        *,
        keep_max: bool,
        options: str,
        list_bytes: I64,
        filters: SentFilters | None,
    ) -> None:
        """
        Args:
            list_bytes: (nlist,) int64.
            filters: of the part; None: all rows may be answered.
        """
        super().__init__(nodes, queries, k, keep_max=keep_max, options=options)
        self.list_bytes, self.filters = list_bytes, filters

    def question(self, rows: I32, probes: I64, beside: npt.NDArray[Any]) -> tuple[str, bytes]:
        options, body = f"n={len(rows)}&w={probes.shape[1]}", encode_scan(self.queries[rows], probes, beside)
        if self.filters is not None:
            n_filters, filters = self.filters.of(rows)
            options, body = f"{options}&f={n_filters}", body + filters
        return options, body

    def work(self, probes: I64) -> I64:
        bytes_of: I64 = np.where(probes >= 0, self.list_bytes[probes], 0).sum(axis=1)
        return bytes_of


class ComparedPart(Part):
    """Candidates are compared; beside the list of each lies its number in it."""

    __slots__ = ("row_bytes",)

    def __init__(self, nodes: Nodes, queries: F32, k: int, *, keep_max: bool, options: str, row_bytes: int) -> None:
        super().__init__(nodes, queries, k, keep_max=keep_max, options=options)
        self.row_bytes = row_bytes

    def question(self, rows: I32, probes: I64, beside: npt.NDArray[Any]) -> tuple[str, bytes]:
        options = f"n={len(rows)}&r={probes.shape[1]}"
        return options, encode_comparison(self.queries[rows], probes, beside)

    def work(self, probes: I64) -> I64:
        bytes_of: I64 = self.row_bytes * (probes >= 0).sum(axis=1)
        return bytes_of


class Piece:
    """Everything on the loop's thread."""

    def __init__(
        self, part: Part, asked: Asked, rows: I32, probes: I64, beside: npt.NDArray[Any], excluded: int
    ) -> None:
        """
        Args:
            rows: (r,) of the part's queries.
            probes: (r, w) lists, -1 = skip.
            beside: (r, w), what the part asks with them.
            excluded: mask of nodes that were asked already.
        """
        self.rows = rows
        #: (r, k) each, once it is done.
        self.found: tuple[F32, I64] | None = None
        #: (r,) int64 bytes that nobody read; None: everything was.
        self.lost: I64 | None = None
        self._part, self._asked = part, asked
        self._probes, self._beside, self._excluded = probes, beside, excluded
        self._nbytes = int(part.work(probes).sum())
        self._peer: Peer | None = None
        self._exchange: Exchange | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began_s = 0.0
        #: Of its lists, asked of others; None: nobody else was asked.
        self._others: list[Piece] | None = None
        self._n_open = 0
        self._done = False

    def start(self, node: int) -> None:
        """Asks ``node``."""
        self._excluded |= 1 << node
        peer = self._part.nodes.peer(node)
        if peer is None or not (peer.up or peer.silent):
            self._fail()
            return
        part = self._part
        self._peer, self._began_s = peer, time.monotonic()
        options, body = part.question(self.rows, self._probes, self._beside)
        self._exchange = Exchange(self._told, found_bytes(len(self.rows), part.k) + (1 << 16))
        peer.n_asked += 1
        peer.bytes_asked += self._nbytes
        peer.n_open += 1
        # Before it is asked: that may fail at once.
        self._timer = part.nodes.loop.call_later(peer.tail.limit_s(self._nbytes), self._is_late)
        peer.scan(f"{part.options}&{options}", body, self._exchange, self._went_down)
        if not peer.up:
            self._wait_a_little()

    def cancel(self) -> None:
        """Its answer is of no use any more."""
        self._done = True
        self._end_exchange(cancel=True)
        for piece in self._others or ():
            piece.cancel()

    def _told(self, status: int, body: bytes, error: Exception | None) -> None:
        peer, part = self._peer, self._part
        assert peer is not None
        if status:
            peer.heard()
        found = None
        if status == 200:
            try:
                found = decode_found(body, n=len(self.rows), k=part.k)
            except InvalidInputError as wrong:
                error = wrong
        self._end_exchange(cancel=False)
        if found is not None:
            peer.tail.observe(self._nbytes, time.monotonic() - self._began_s)
            self._finish(found, None)
            return
        peer.n_failed += 1
        _log.info("node %s did not scan: %s", peer.node.name, error or f"status {status}: {body[:200]!r}")
        self._fail()

    def _went_down(self, error: Exception) -> None:
        assert self._peer is not None
        if isinstance(error, TimeoutError) and self._others is None:
            where = self._part.nodes.choose_again(self._probes, self._excluded)
            if (where == NOBODY).any():
                self._wait_a_little()  # nobody else could
                return
        self._peer.n_failed += 1
        self._end_exchange(cancel=True)
        self._fail()

    def _wait_a_little(self) -> None:
        """Its node says nothing now, and may be busy."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._part.nodes.loop.call_later(SILENT_WAIT_S, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        if self._peer is not None:
            self._peer.n_failed += 1
        self._end_exchange(cancel=True)
        self._fail()

    def _end_exchange(self, *, cancel: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        peer = self._peer
        assert peer is not None
        if cancel:
            exchange.cancel()
        peer.forget(self._went_down)
        peer.n_open -= 1

    def _is_late(self) -> None:
        self._timer = None
        assert self._peer is not None
        self._peer.mark_late()
        self._ask_others(instead=False)

    def _fail(self) -> None:
        """Its node does not answer."""
        if self._done:
            return
        if self._others is None:
            self._ask_others(instead=True)
        elif not self._n_open:
            self._finish_from_others()

    def _ask_others(self, *, instead: bool) -> None:
        """``instead``: its own node does not answer; else the others must have all of its lists."""
        where = self._part.nodes.choose_again(self._probes, self._excluded)
        nobody = where == NOBODY
        nodes = np.unique(where[where >= 0]).tolist()
        if not instead:
            assert self._peer is not None
            peer, busiest = self._peer, max((self._n_open_at(node) for node in nodes), default=0)
            if nobody.any() or not self._part.nodes.may_hedge(peer.n_open, busiest):
                # Looks again after as long: others may have less to do by then.
                again_s = time.monotonic() - self._began_s
                self._timer = self._part.nodes.loop.call_later(again_s, self._is_late)
                return
            peer.n_hedged += 1
        elif nobody.any():
            self.lost = self._part.work(np.where(nobody, self._probes, -1))
        self._others = pieces = []
        for node in nodes:
            rows, probes, beside = compact(where == node, self._probes, self._beside)
            pieces.append(Piece(self._part, self, self.rows[rows], probes, beside, self._excluded))
        self._n_open = len(pieces)
        if not pieces:
            self._finish_from_others()
        for piece, node in zip(list(pieces), nodes, strict=True):
            if not self._done:
                piece.start(node)

    def _n_open_at(self, node: int) -> int:
        peer = self._part.nodes.peer(node)
        return 0 if peer is None else peer.n_open

    def done(self, piece: Piece) -> None:
        """One of the others has ended."""
        self._n_open -= 1
        if self._done or self._n_open:
            return
        lost = any(each.lost is not None for each in self._others or ())
        if lost and self._exchange is not None:
            return  # its own node may still answer
        self._finish_from_others()

    def _finish_from_others(self) -> None:
        part, n = self._part, len(self.rows)
        found = empty_topk(n, part.k, keep_max=part.keep_max)
        lost = np.zeros(n, dtype=np.int64) if self.lost is None else self.lost
        for piece in self._others or ():
            assert piece.found is not None
            rows = np.searchsorted(self.rows, piece.rows).astype(np.int32)
            merge_topk(*found, rows, *piece.found, keep_max=part.keep_max)
            if piece.lost is not None:
                lost[rows] += piece.lost
        self._finish(found, lost if lost.any() else None)

    def _finish(self, found: tuple[F32, I64], lost: I64 | None) -> None:
        if self._done:
            return
        self._end_exchange(cancel=True)
        for piece in self._others or ():
            piece.cancel()
        self._done, self.found, self.lost = True, found, lost
        self._asked.done(self)
