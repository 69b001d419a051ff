"""The host's parts of the batches of one turn. Where there are several, one scan answers them all: each list is read
once for a node's own searches and for what other nodes ask of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridindex.router.batch.added import find_instead
from hybridindex.router.batch.batch import Batch
from hybridindex.router.batch.parts import RouterParts
from hybridindex.router.batch.split import ProbePart
from hybridindex.router.batch.stages import HOST_SCAN
from hybridindex.router.filtered import FilteredSearches
from hybridindex.router.lookahead.wait_for_loads import WaitForLoads
from hybridindex.router.slots import Slot
from hybridindex.tiers.host.added_scanner import AddedScanner
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.types import F32, I32, I64

__all__ = ["Begun", "HostParts"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """A batch whose other parts were handed over."""

    batch: Batch
    #: The host's; None: it has none.
    part: ProbePart | None
    #: When its lists were known.
    chosen_s: float
    slot: Slot


class HostParts:
    """Scans, completes, and ends the scan. Never raises: what fails, fails its batch."""

    def __init__(
        self,
        parts: RouterParts,
        added: AddedScanner,
        filtered: FilteredSearches,
        wait_for_loads: WaitForLoads,
        *,
        early_dispatch: bool,
    ) -> None:
        self._host, self._pace = parts.host, parts.host_pace
        self._scans_codes = isinstance(parts.host, HostRabitqScanner)
        self._added, self._filtered, self._wait_for_loads = added, filtered, wait_for_loads
        self._early_dispatch = early_dispatch

    def scan(self, begun: Sequence[Begun]) -> None:
        """Of batches of what the host scans together; then of those whose rows are compared, one by one."""
        plain: list[tuple[Batch, ProbePart]] = []
        compared: list[tuple[Batch, ProbePart]] = []
        for each in begun:
            if each.part is not None:
                (compared if self._compares(each.batch) else plain).append((each.batch, each.part))
        if plain:
            self._scan_plain(plain, min(each.chosen_s for each in begun if not self._compares(each.batch)))
        for batch, part in compared:
            self.scan_one(batch, part, early=False)
            batch.end_scan()

    def _compares(self, batch: Batch) -> bool:
        """With filters; or of rows, where the host scans codes."""
        return batch.masks is not None or (self._scans_codes and batch.by_rows)

    def _scan_plain(self, parts: Sequence[tuple[Batch, ProbePart]], chosen_s: float) -> None:
        """``chosen_s``: when the first lists were known."""
        try:
            if len(parts) > 1:
                scanned = self._scan_together(parts)
            else:
                # Slices pay only where some queries can leave early: where another request shares the batch.
                batch, part = parts[0]
                scanned = self.scan_one(batch, part, early=self._early_dispatch and len(batch.requests) > 1)
        finally:
            for batch, _ in parts:
                batch.end_scan()
        if scanned:
            # A deadline waits for all that follows the choice of nprobe, the report too where the caller does the work.
            took_s = time.perf_counter() - chosen_s
            nbytes = sum(part.total_bytes for _, part in parts)
            self._pace.observe(nbytes, took_s)
            self._wait_for_loads.note_host(nbytes, took_s)

    def scan_one(self, batch: Batch, part: ProbePart, *, early: bool) -> bool:
        """False: it failed. The caller ends the scan. Any thread that was adopted may call it, for a device's part."""

        def done(rows: I32, distances: F32, ids: I64) -> None:
            batch.complete(part.rows[rows], distances, ids)

        started = time.perf_counter()
        try:
            # The split has checked the probes, the quantizer made the rest.
            if self._compares(batch):
                result, early = self._filtered.scan_part(batch, part), False
            else:
                result = self._host.scan_checked(
                    _queries_of(batch, part),
                    part.probes,
                    part.coarse_distances,
                    batch.k,
                    on_done=done if early else None,
                )
            batch.clock.note(HOST_SCAN, started)
            if not early:
                batch.complete_part(part, *result, find_instead(self._added, batch, part))
        except BaseException as error:  # noqa: BLE001 - handed to those who wait
            _log.exception("the host scan of %d queries failed", len(part.rows))
            batch.fail(error)
            return False
        return True

    def _scan_together(self, parts: Sequence[tuple[Batch, ProbePart]]) -> bool:
        """:meth:`scan_one` of several batches at once."""
        ends = np.cumsum([len(part.rows) for _, part in parts])

        def done(rows: I32, distances: F32, ids: I64) -> None:
            of = np.searchsorted(ends, rows, side="right")
            for number in np.unique(of).tolist():
                (batch, part), mine = parts[number], of == number
                own = part.rows[rows[mine] - (ends[number] - len(part.rows))]
                batch.complete(own, *_nearest(distances[mine], ids[mine], batch.k))

        started = time.perf_counter()
        try:
            queries = np.concatenate([_queries_of(batch, part) for batch, part in parts])
            probes, coarse = _beside([part for _, part in parts])
            k = max(batch.k for batch, _ in parts)
            on_done = done if self._early_dispatch else None
            distances, ids = self._host.scan_checked(queries, probes, coarse, k, on_done=on_done)
            for (batch, part), end in zip(parts, ends.tolist(), strict=True):
                batch.clock.note(HOST_SCAN, started)
                if on_done is None:
                    mine = slice(end - len(part.rows), end)
                    batch.complete_part(part, *_nearest(distances[mine], ids[mine], batch.k))
        except BaseException as error:  # noqa: BLE001 - handed to those who wait
            _log.exception("a host scan of %d queries failed", int(ends[-1]))
            for batch, _ in parts:
                batch.fail(error)
            return False
        return True


def _queries_of(batch: Batch, part: ProbePart) -> F32:
    return batch.queries if len(part.rows) == len(batch) else batch.queries[part.rows]


def _beside(parts: Sequence[ProbePart]) -> tuple[I64, F32]:
    """(n, w) lists and coarse distances of all parts; narrower ones end in -1."""
    n, width = sum(len(part.rows) for part in parts), max(part.probes.shape[1] for part in parts)
    probes, coarse = np.full((n, width), -1, dtype=np.int64), np.zeros((n, width), dtype=np.float32)
    end = 0
    for part in parts:
        begin, end = end, end + len(part.rows)
        probes[begin:end, : part.probes.shape[1]] = part.probes
        coarse[begin:end, : part.probes.shape[1]] = part.coarse_distances
    return probes, coarse


def _nearest(distances: F32, ids: I64, k: int) -> tuple[F32, I64]:
    """The first ``k`` of each row, in arrays of their own."""
    return np.ascontiguousarray(distances[:, :k]), np.ascontiguousarray(ids[:, :k])
