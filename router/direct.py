"""A call answered on its own thread, without request, batch or lease: of a router without devices whose engine is idle.
What it finds, counts and times is what a batch of that one call would. For one query, making the batch takes a third of
the time that the scan does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hybridindex.index.live.state import LiveRows
from hybridindex.router.batch.merge import finish_topk, merge_added
from hybridindex.router.batch.parts import RouterParts
from hybridindex.router.batch.request import GivenProbes
from hybridindex.router.batch.split import split_probes
from hybridindex.router.batch.stages import ADDED_SCAN, COARSE, HOST_SCAN, MERGE, RERANK, SPLIT
from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.tiers.host.added_scanner import AddedScanner
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.types import F32, I64, SearchResult

if TYPE_CHECKING:
    from hybridindex.router.remote.remote_lists import RemoteLists

__all__ = ["DirectSearch", "Stages"]

#: What a batch takes beyond a call on its own thread, about. Which lists a call needs is known when it is quantized, by
#: codes when it is scanned: with lists elsewhere, calls are tried while those in vain take less than the others save.
_SAVED_S = 0.2e-3
#: What one call that was tried counts in the means of these; what is left of the part in vain after one that was not.
_WEIGHT, _KEPT = 0.1, 0.998

#: Of a call: name, start and end of each, as of :func:`time.perf_counter`.
Stages = tuple[tuple[str, float, float], ...]


class DirectSearch:
    """Quantizes, scans and compares. One call at a time."""

    def __init__(self, parts: RouterParts, added: AddedScanner, remote: RemoteLists | None = None) -> None:
        """
        Args:
            parts: of a router without devices, whose host scans with the extension.
            remote: of a node of a cluster, whose codes are those of all lists.
        """
        self._added, self._remote = added, remote
        self._index = index = parts.index
        self._integrity = index.integrity
        self._host = host = parts.host
        self._codes = host if isinstance(host, HostRabitqScanner) else None
        self._list_bytes = index.list_bytes
        #: (nlist,) int16: all lists are on the host.
        self._list_device = np.full(index.nlist, -1, dtype=np.int16)
        self._keep_max = index.metric == "ip"
        self._stats, self._pace = parts.stats, parts.host_pace
        #: Of the latest calls, about: the part in vain, for lists that are not here, and seconds until that was known.
        self._in_vain = self._tried_s = 0.0

    def search(
        self, queries: F32, k: int, nprobe: int, kept: int, live: LiveRows | None, spare: int
    ) -> tuple[SearchResult, Stages, int] | None:
        """As :meth:`hybridindex.router.engine.Engine.search_directly`, its stages, and how many rows codes were
        followed to. None: a list is damaged or not here, a query probes none, or too many of its rows were deleted;
        nothing was counted."""
        integrity, codes, now = self._integrity, self._codes, time.perf_counter
        seen, absent = integrity.seen, integrity.quarantined
        if absent is not None and not self._may_try():
            self._in_vain *= _KEPT
            return None
        started_s = now()
        probes, coarse = self._host.quantize(self._index, queries, nprobe)
        quantized_s = now()
        if absent is not None and codes is None and self._is_in_vain(absent, probes, quantized_s - started_s):
            return None
        if codes is not None:
            if self._remote is not None and self._remote.choose(probes, absent, by_codes=True) is not None:
                return None  # nobody has the rows of a list
            coarse = codes.centre_products(queries, probes, coarse)
        split = split_probes(probes, coarse, self._list_device, self._list_bytes, 0)
        split_s = now()
        if len(split.parts) != 1 or len(split.parts[0].rows) < len(queries):
            return None
        part = split.parts[0]
        distances, ids = self._host.scan_checked(queries, part.probes, part.coarse_distances, kept)
        scanned_s = now()
        if absent is not None and codes is not None:
            lists = ids >> POSITION_BITS  # of positions; -1 stays -1
            if self._is_in_vain(absent, lists, scanned_s - started_s):
                return None
        candidates = 0
        if codes is None:
            finish_topk(distances, ids, keep_max=self._keep_max)
        else:
            candidates = int(np.count_nonzero(ids >= 0))
            distances, ids = codes.reranker.rerank(queries, ids, k + spare)
        if live is not None and live.deleted is not None:
            left = live.deleted.leave_out(distances, ids, k)
            if left is None:
                return None
            distances, ids = left
        merged_s = now()
        added: Stages = ()
        if live is not None and live.added is not None:
            found = self._added.scan(live.added, queries, probes, k)
            if found is not None:
                merge_added(distances, ids, found, keep_max=self._keep_max)
            added = ((ADDED_SCAN, merged_s, now()),)
        if integrity.marks[0] != seen:
            return None
        self._pace.observe(part.total_bytes, now() - quantized_s)
        stages = (
            (COARSE, started_s, quantized_s),
            (SPLIT, quantized_s, split_s),
            (HOST_SCAN, split_s, scanned_s),
            (MERGE if codes is None else RERANK, scanned_s, merged_s),
            *added,
        )
        self._stats.add_batch(
            {name: end - start for name, start, end in stages},
            n_queries=len(queries),
            host_bytes=part.total_bytes,
            candidates=candidates,
            row_pages=0 if codes is None or codes.on_disk is None else codes.on_disk.take_pages(),
        )
        result = SearchResult(ids=ids, distances=distances, nprobe_used=split.n_probes, hit_rate=split.hit_rate)
        return result, stages, candidates

    def _may_try(self) -> bool:
        """Whether a call may be tried that might need lists that are not here."""
        if self._codes is not None and self._remote is None:
            return False  # lists are damaged: a batch says which
        return self._in_vain * self._tried_s <= (1 - self._in_vain) * _SAVED_S

    def _is_in_vain(self, absent: npt.NDArray[np.bool_], lists: I64, seconds: float) -> bool:
        """Whether a call needs lists that are ``absent``, (nlist,); takes it into account.

        Args:
            lists: (n, p) those that it needs, which were known after ``seconds``; -1: none.
        """
        elsewhere = _probes_any(absent, lists)
        self._in_vain += _WEIGHT * (elsewhere - self._in_vain)
        self._tried_s += _WEIGHT * (seconds - self._tried_s)
        return elsewhere

    def scan(self, queries: F32, k: int, given: GivenProbes) -> tuple[SearchResult, Stages] | None:
        """As :meth:`hybridindex.router.engine.Engine.scan_directly`, and the stages with their start and end. None:
        codes are compared, there are filters, a list is not here, or a query names none; nothing was counted."""
        integrity, (probes, coarse, masks) = self._integrity, given
        seen, absent = integrity.seen, integrity.quarantined
        if self._codes is not None or masks is not None:
            return None
        if absent is not None and _probes_any(absent, probes):
            return None
        started_s = time.perf_counter()
        split = split_probes(probes, coarse, self._list_device, self._list_bytes, 0)
        split_s = time.perf_counter()
        if len(split.parts) != 1 or len(split.parts[0].rows) < len(queries):
            return None
        part = split.parts[0]
        distances, ids = self._host.scan_checked(queries, part.probes, part.coarse_distances, k)
        scanned_s = time.perf_counter()
        finish_topk(distances, ids, keep_max=self._keep_max)
        if integrity.marks[0] != seen:
            return None
        ended_s = time.perf_counter()
        self._pace.observe(part.total_bytes, ended_s - split_s)
        stages = (SPLIT, started_s, split_s), (HOST_SCAN, split_s, scanned_s), (MERGE, scanned_s, ended_s)
        seconds = {name: end - start for name, start, end in stages}
        self._stats.add_batch(seconds, n_queries=len(queries), host_bytes=part.total_bytes, for_node=True)
        result = SearchResult(ids=ids, distances=distances, nprobe_used=split.n_probes, hit_rate=split.hit_rate)
        return result, stages


def _probes_any(absent: npt.NDArray[np.bool_], probes: I64) -> bool:
    """``absent``: (nlist,); ``probes``: -1 is none."""
    return bool((absent[probes] & (probes >= 0)).any())
