"""A call answered on its own thread, without request, batch or lease: of a router without devices whose engine is idle.
What it finds, counts and times is what a batch of that one call would. For one query, making the batch takes a third of
the time that the scan does.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from hybridindex.index.live.state import LiveRows
from hybridindex.router.batch.merge import finish_topk, merge_added
from hybridindex.router.batch.parts import RouterParts
from hybridindex.router.batch.request import GivenProbes
from hybridindex.router.batch.split import split_probes
from hybridindex.router.batch.stages import ADDED_SCAN, COARSE, HOST_SCAN, MERGE, RERANK, SPLIT
from hybridindex.tiers.host.added_scanner import AddedScanner
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.types import F32, I64, SearchResult

__all__ = ["DirectSearch", "Stages"]

#: While more of the latest calls than this probed lists that are not here, few calls are quantized to see it.
_MOST_IN_VAIN = 0.75
#: What one call that was quantized counts in that part; what is left of the part after one that was not.
_WEIGHT, _KEPT = 0.1, 0.998

#: Of a call: name, start and end of each, as of :func:`time.perf_counter`.
Stages = tuple[tuple[str, float, float], ...]


class DirectSearch:
    """Quantizes, scans and compares. One call at a time."""

    def __init__(self, parts: RouterParts, added: AddedScanner) -> None:
        """``parts``: of a router without devices, whose host scans with the extension."""
        self._added = added
        self._index = index = parts.index
        self._integrity = index.integrity
        self._host = host = parts.host
        self._codes = host if isinstance(host, HostRabitqScanner) else None
        self._list_bytes = index.list_bytes
        #: (nlist,) int16: all lists are on the host.
        self._list_device = np.full(index.nlist, -1, dtype=np.int16)
        self._keep_max = index.metric == "ip"
        self._stats, self._pace = parts.stats, parts.host_pace
        #: Of the latest calls, about: the part that was quantized and not scanned, for lists that are not here.
        self._in_vain = 0.0

    def search(
        self, queries: F32, k: int, nprobe: int, kept: int, live: LiveRows | None, spare: int
    ) -> tuple[SearchResult, Stages, int] | None:
        """As :meth:`hybridindex.router.engine.Engine.search_directly`, its stages, and how many rows codes were
        followed to. None: a list is damaged or not here, a query probes none, or too many of its rows were deleted;
        nothing was counted."""
        integrity, codes, now = self._integrity, self._codes, time.perf_counter
        seen, absent = integrity.seen, integrity.quarantined
        if absent is not None and codes is not None:
            return None  # which rows are needed is known after the scan
        if absent is not None and self._in_vain > _MOST_IN_VAIN:
            self._in_vain *= _KEPT
            return None
        started_s = now()
        probes, coarse = self._host.quantize(self._index, queries, nprobe)
        quantized_s = now()
        if absent is not None:
            elsewhere = _probes_any(absent, probes)
            self._in_vain += _WEIGHT * (elsewhere - self._in_vain)
            if elsewhere:
                return None
        if codes is not None:
            coarse = codes.centre_products(queries, probes, coarse)
        split = split_probes(probes, coarse, self._list_device, self._list_bytes, 0)
        split_s = now()
        if len(split.parts) != 1 or len(split.parts[0].rows) < len(queries):
            return None
        part = split.parts[0]
        distances, ids = self._host.scan_checked(queries, part.probes, part.coarse_distances, kept)
        scanned_s = now()
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
