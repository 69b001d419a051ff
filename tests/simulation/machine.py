"""How long scans and copies take in a simulation, and what goes wrong with them.

The product's own scanners and arenas do the work; before it, virtual time passes, or a fault comes.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from hybridindex.tiers.contract.protocol import OnDone
from hybridindex.tiers.host.faiss_scanner import HostFaissScanner
from hybridindex.tiers.host.native_scanner import HostNativeScanner
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.tiers.host.reranker import Reranker
from hybridindex.tiers.paged.added.added_view import AddedView
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.tiers.paged.page_scanner import PageScanner
from tests.simulation.virtual.scheduler import Scheduler, current

__all__ = ["BrokenError", "Machine"]

#: What a scan or copy takes beside its bytes.
_FIXED_S = 2e-4


class BrokenError(RuntimeError):
    """What a device raises that is out of order."""


class Machine:
    """A host and its devices. Drawn from a seed."""

    def __init__(self, sim: Scheduler, draw: random.Random) -> None:
        self._sim = sim
        #: Bytes a second.
        self.host_pace = 10 ** draw.uniform(7, 8.5)
        self.device_pace = self.host_pace * 10 ** draw.uniform(0, 1.5)
        self.copy_pace = 10 ** draw.uniform(5.5, 8)
        #: Until when scans of a device, and copies to it, do not end; and fail. By the device's number.
        self.scans_stall: dict[int, float] = {}
        self.copies_stall: dict[int, float] = {}
        self.scans_fail: dict[int, float] = {}
        self.copies_fail: dict[int, float] = {}
        self._ordinal_of: dict[int, int] = {}

    def heal(self) -> None:
        """Nothing is wrong any more; what stalls already goes on stalling."""
        for faults in (self.scans_stall, self.copies_stall, self.scans_fail, self.copies_fail):
            faults.clear()

    def _pass(self, nbytes: float, pace: float) -> None:
        if current() is not None:
            self._sim.sleep(_FIXED_S + nbytes / pace)

    def _device_pass(
        self, ordinal: int, nbytes: float, pace: float, stall: dict[int, float], failing: dict[int, float]
    ) -> None:
        now = self._sim.now
        if stall.get(ordinal, 0.0) > now:
            self._sim.sleep(stall[ordinal] - now)
        if failing.get(ordinal, 0.0) > now:
            raise BrokenError(f"device {ordinal} is out of order")
        self._pass(nbytes, pace)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block all scanners and arenas take their time."""
        with contextlib.ExitStack() as patches:
            for kind in (HostNativeScanner, HostFaissScanner, HostRabitqScanner):
                patches.enter_context(mock.patch.object(kind, "scan_checked", self._host_scan(kind.scan_checked)))
            patches.enter_context(mock.patch.object(Reranker, "rerank", self._rerank(Reranker.rerank)))
            patches.enter_context(mock.patch.object(PageScanner, "scan", self._device_scan(PageScanner.scan)))
            patches.enter_context(mock.patch.object(DeviceTier, "load", self._load(DeviceTier.load)))
            patches.enter_context(mock.patch.object(PageArena, "write", self._copy(PageArena.write)))
            yield

    def _host_scan(self, scan: Callable[..., Any]) -> Callable[..., Any]:
        """Which rows a scan reports together depends on the time that it took: here it is drawn."""

        def scan_later(
            scanner: Any,
            queries: Any,
            probes: Any,
            coarse: Any,
            k: int,
            *,
            on_done: OnDone | None = None,
            **options: Any,
        ) -> Any:
            nbytes = float(scanner._index.list_bytes[probes[probes >= 0]].sum())
            if on_done is None or current() is None:
                self._pass(nbytes, self.host_pace)
                return scan(scanner, queries, probes, coarse, k, on_done=on_done, **options)
            distances, ids = scan(scanner, queries, probes, coarse, k, **options)
            at, n = 0, len(queries)
            while at < n:
                rows = np.arange(at, min(n, at + self._sim.random.randrange(1, 8)), dtype=np.int32)
                self._pass(nbytes * len(rows) / n, self.host_pace)
                on_done(rows, distances[rows], ids[rows])
                at += len(rows)
            return distances, ids

        return scan_later

    def _rerank(self, rerank: Callable[..., Any]) -> Callable[..., Any]:
        def rerank_later(reranker: Any, queries: Any, positions: Any, k: int) -> Any:
            self._pass(float((positions >= 0).sum()) * reranker._index.code_size, self.host_pace)
            return rerank(reranker, queries, positions, k)

        return rerank_later

    def _device_scan(self, scan: Callable[..., Any]) -> Callable[..., Any]:
        def scan_later(scanner: Any, queries: Any, probes: Any, *args: Any, **options: Any) -> Any:
            index, lists = scanner._index, probes[probes >= 0]
            # Of added rows only the sizes are known.
            of_each = index.list_sizes * index.code_size if isinstance(index, AddedView) else index.list_bytes
            nbytes = float(of_each[lists].sum())
            self._device_pass(scanner._ordinal, nbytes, self.device_pace, self.scans_stall, self.scans_fail)
            return scan(scanner, queries, probes, *args, **options)

        return scan_later

    def _load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def load_here(tier: DeviceTier, *args: Any, **options: Any) -> Any:
            self._ordinal_of[id(tier.arena)] = tier.ordinal
            return load(tier, *args, **options)

        return load_here

    def _copy(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def write_later(arena: PageArena, pages: Any, codes: Any) -> None:
            ordinal = self._ordinal_of.get(id(arena), 0)
            self._device_pass(ordinal, codes.nbytes, self.copy_pace, self.copies_stall, self.copies_fail)
            write(arena, pages, codes)

        return write_later
