"""A part of a batch that other nodes scan, until it is answered or nobody is left who could.

A *piece* is asked of one node. Where that takes longer than nearly all scans do there, or fails, its lists are asked of
their other holders, as pieces of their own. Whoever answers all of its lists first counts: the node, or the others
together. So no list is merged twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError
from hybridindex.router.batch.merge import empty_topk, merge_topk
from hybridindex.router.batch.split import compact
from hybridindex.router.remote.connection import Exchange
from hybridindex.router.remote.filter_codec import SentFilters
from hybridindex.router.remote.peer import Peer
from hybridindex.router.remote.scan_codec import decode_found, encode_scan, found_bytes
from hybridindex.types import F32, I32, I64

__all__ = ["NOBODY", "Asked", "Nodes", "Part", "Piece"]

_log = logging.getLogger(__name__)

#: How long a node that says nothing is waited for, where no other one has its lists.
SILENT_WAIT_S = 2.0
#: In the place of a node: none that could be asked has the list.
NOBODY = -2


class Nodes(Protocol):
    """Who can be asked."""

    loop: asyncio.AbstractEventLoop
    #: (nlist,) int64.
    list_bytes: I64

    def peer(self, node: int) -> Peer | None:
        """None where it has left."""

    def choose_again(self, probes: I64, excluded: int) -> npt.NDArray[np.int16]:
        """(n, p) nodes for probes (n, p), without those of a mask; NOBODY where there is none."""

    def may_hedge(self, n_late: int, n_other: int) -> bool:
        """:meth:`hybridindex.router.remote.loop_thread.HedgeBudget.spend`."""


class Asked(Protocol):
    """Who asked."""

    def done(self, piece: Piece) -> None: ...


class Part:
    """What the pieces of one part have in common."""

    __slots__ = ("filters", "k", "keep_max", "nodes", "options", "queries")

    def __init__(
        self, nodes: Nodes, queries: F32, k: int, *, keep_max: bool, options: str, filters: SentFilters | None
    ) -> None:
        """
        Args:
            queries: (m, d) of the part.
            options: of the scan, as far as they are the same for all of its pieces.
            filters: of the part; None: all rows may be answered.
        """
        self.nodes, self.queries, self.k, self.keep_max, self.options = nodes, queries, k, keep_max, options
        self.filters = filters


class Piece:
    """Everything on the loop's thread."""

    def __init__(self, part: Part, asked: Asked, rows: I32, probes: I64, coarse: F32, excluded: int) -> None:
        """
        Args:
            rows: (r,) of the part's queries.
            probes: (r, w), -1 = skip.
            coarse: (r, w).
            excluded: mask of nodes that were asked already.
        """
        self.rows = rows
        #: (r, k) each, once it is done.
        self.found: tuple[F32, I64] | None = None
        #: (r,) int64 bytes that nobody scanned; None: everything was.
        self.lost: I64 | None = None
        self._part, self._asked = part, asked
        self._probes, self._coarse, self._excluded = probes, coarse, excluded
        self._nbytes = int(part.nodes.list_bytes[probes[probes >= 0]].sum())
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
        part, (r, w) = self._part, self._probes.shape
        self._peer, self._began_s = peer, time.monotonic()
        options, body = f"{part.options}&n={r}&w={w}", encode_scan(part.queries[self.rows], self._probes, self._coarse)
        if part.filters is not None:
            n_filters, filters = part.filters.of(self.rows)
            options, body = f"{options}&f={n_filters}", body + filters
        self._exchange = Exchange(self._told, found_bytes(r, part.k) + (1 << 16))
        peer.n_asked += 1
        peer.bytes_asked += self._nbytes
        peer.n_open += 1
        # Before it is asked: that may fail at once.
        self._timer = part.nodes.loop.call_later(peer.tail.limit_s(self._nbytes), self._is_late)
        peer.scan(options, body, self._exchange, self._went_down)
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
        self._peer.late = True
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
            self.lost = np.where(nobody, self._part.nodes.list_bytes[self._probes], 0).sum(axis=1)
        self._others = pieces = []
        for node in nodes:
            rows, probes, coarse = compact(where == node, self._probes, self._coarse)
            pieces.append(Piece(self._part, self, self.rows[rows], probes, coarse, self._excluded))
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
