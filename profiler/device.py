"""Times one device: scans of resident lists, and host-to-device copies. Opens a small arena of its own and closes it.
Where searches scan codes, also exact distances of candidates whose rows lie there.

On a GPU copies are timed from pinned and from ordinary memory. The stand-in device is main memory, so its copies are
plain memory copies; its label says what it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.index.ivf import IVFIndex
from hybridindex.paging import PageGeometry, scratch_for_budget
from hybridindex.profiler.request import ProfileRequest
from hybridindex.profiler.searching import Searching
from hybridindex.profiler.work import keep_probes
from hybridindex.router.batch.comparison import Comparison, split_positions
from hybridindex.router.batch.stages import BatchClock
from hybridindex.tiers.contract.devices import available_bytes, kind_here, resolve_device
from hybridindex.tiers.contract.residency import Residency, ResidencyStore
from hybridindex.tiers.contract.tier import Tier
from hybridindex.tiers.host.host_scanner import differs_from_devices
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.tiers.serving import open_device_tier, tier_of
from hybridindex.types import F32, I64, StageSample, TransferSample

if TYPE_CHECKING:
    import torch

__all__ = ["TRANSFER_BYTES", "DeviceTiming", "devices_to_time", "room_to_measure", "time_device", "time_transfers"]

Clock = Callable[[], float]

#: Sizes of timed copies; those above the budget are left out.
TRANSFER_BYTES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
#: Shares of the loaded lists that scans use, for different work at the same batch size.
_LOADED_SHARES = (1.0, 0.5, 0.2)
#: A batch size whose first runs took more than this share of the time is the largest.
_WARM_UP_SHARE = 0.25


#: Of which an eighth is scratch.
_LEAST_OF_CODES = 8 << 20
#: Rows beside codes that are loaded to be compared: enough that no cache holds them all.
_MOST_OF_ROWS = 64 << 20
#: Part of what a device has free, or main memory has for the stand-in, that measuring takes without a budget at most:
#: others may be there.
_GPU_SHARE, _HOST_SHARE = 0.8, 0.25


def devices_to_time(index: IVFIndex, asked: Sequence[str] | None, host_scanner: str = "auto") -> Sequence[str]:
    """Those that were ``asked`` for; None: those that would serve ``index`` on this machine beside ``host_scanner``.

    Raises:
        InvalidInputError: some were asked for, and the scanner finds other distances than they do.
    """
    differs = differs_from_devices(index, host_scanner)
    if asked and differs:
        raise InvalidInputError(differs)
    if asked is None:
        return () if differs else _devices_here(index)
    return asked


def _devices_here(index: IVFIndex) -> tuple[str, ...]:
    """Its GPUs, else the stand-in; none where torch is missing or no tier holds the codec."""
    try:
        import torch
    except ImportError:
        return ()
    name = kind_here()
    if tier_of(index, name).tier == "host":
        return ()
    return (name,) if name == "cpu" else tuple(f"cuda:{n}" for n in range(torch.cuda.device_count()))


def room_to_measure(index: IVFIndex, names: Sequence[str], copies: int = 1, *, beside_bytes: int = 0) -> int:
    """A budget per device that has room for every list so many times, and once for ``beside_bytes``, scratch included;
    less where a device has not."""
    choice = tier_of(index, names[0])
    geometry = _geometry(index, choice.page_bytes)
    whole = int(geometry.pages_for(index.list_sizes).sum()) * geometry.page_bytes + choice.fixed_bytes
    # Scratch is an eighth of a small budget.
    wanted = copies * (whole + max(scratch_for_budget(whole), whole // 7) + geometry.page_bytes)
    if index.rows is not index:
        # Codes of a small index are few bytes; the candidates of a query are not fewer for that.
        wanted = max(wanted, copies * _LEAST_OF_CODES)
    return min(wanted + beside_bytes, *(_room_on(name) for name in names))


def _rows_to_measure(index: IVFIndex, geometry: PageGeometry) -> int:
    """Page bytes of rows beside codes that are compared; none where rows are scanned."""
    return min(_MOST_OF_ROWS, int(_row_bytes(index, geometry).sum()))


def _row_bytes(index: IVFIndex, geometry: PageGeometry) -> I64:
    """Page bytes of the rows of each list beside its code."""
    return geometry.pages_of_bytes(index.piece_bytes[index.nlist :]) * geometry.page_bytes


def _geometry(index: IVFIndex, page_bytes: int) -> PageGeometry:
    return PageGeometry.for_code_size(index.page_row_bytes, page_bytes, group_rows=index.group_rows)


def _room_on(name: str) -> int:
    device, info = resolve_device(name)
    free = available_bytes(device)
    if free is None or info.stand_in:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(_HOST_SHARE * free)
    return int(_GPU_SHARE * free)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTiming:
    """Samples of one device."""

    label: str
    samples: tuple[StageSample, ...]
    transfers: tuple[TransferSample, ...]
    notes: dict[str, Any]


def time_device(
    searching: Searching,
    name: str,
    queries: F32,
    order: I64,
    request: ProfileRequest,
    *,
    max_seconds: float,
    tick: Callable[[int, int], None] | None = None,
    clock: Clock = time.perf_counter,
) -> DeviceTiming:
    """Loads the hottest lists that fit the budget and times scans of held-out queries' hits, then copies.

    Batch sizes beyond one that is slow to warm up are left out and noted.

    Args:
        searching: an index that a device tier serves there, or its view by codes. Its scanner is not timed.
        name: "cuda:N", or "cpu" for the stand-in.
        queries: (n, scan_dim) float32, transformed.
        order: (nlist,) int64, hottest first.
        request: nprobe before the mask, k, batch sizes of at most n, rounds over batch sizes and shares of the loaded
            lists, seed, and the hard limit of bytes on the device.
        max_seconds: about how long; one round is always finished.
        tick: progress in rounds.
        clock: seconds, monotonic.

    Raises:
        DeviceNotFoundError, DeviceError, MissingDependencyError.
    """
    index, started = searching.index, clock()
    batches, repeats, budget_bytes = request.batches, request.repeats, request.device_budget_bytes
    geometry = _geometry(index, tier_of(index, name).page_bytes)
    beside_bytes = _rows_to_measure(index, geometry)
    if budget_bytes is None:
        budget_bytes = room_to_measure(index, [name], beside_bytes=beside_bytes)
    device, info = resolve_device(name)
    index_bytes = int(geometry.pages_for(index.list_sizes).sum()) * geometry.page_bytes + beside_bytes
    wanted = min(index_bytes, budget_bytes - scratch_for_budget(budget_bytes))
    store = ResidencyStore(index.n_pieces, lambda device, pages: None)
    tier = open_device_tier(index, name, 0, budget_bytes=budget_bytes, wanted_bytes=wanted)
    with closing(tier):
        before_load = clock()
        report = tier.load(order.tolist(), store).result()
        load_seconds = clock() - before_load
        samples: list[StageSample] = []
        n_loaded = store.current.n_resident
        compares = _load_rows(index, tier, store, order, beside_bytes)
        rounds = 0
        warm: list[int] = []
        if n_loaded:
            rng = np.random.default_rng(request.seed)
            bench = _DeviceBench(searching, tier, store, queries, order, request, rng, clock)
            bench.compares = compares
            for batch in sorted(batches):  # warm-up: first launches compile and allocate
                bench.run(batch, 1.0)
                warm.append(batch)
                if clock() - started > _WARM_UP_SHARE * max_seconds:
                    break
            tasks = [(batch, share) for batch in warm for share in _LOADED_SHARES]
            while rounds < repeats and (rounds == 0 or clock() - started < max_seconds):
                for number in rng.permutation(len(tasks)):
                    samples += bench.run(*tasks[number])
                rounds += 1
                if tick is not None:
                    tick(rounds, repeats)
        sizes = [n for n in TRANSFER_BYTES if n <= wanted] or [max(1, wanted)]
        transfers = time_transfers(device, info.label, sizes, repeats=max(2, repeats), clock=clock)
        notes: dict[str, Any] = {
            "label": info.label,
            "stand_in": info.stand_in,
            "budget_bytes": budget_bytes,
            "lists_loaded": n_loaded,
            "coverage_loaded": n_loaded / index.nlist,
            **({"rows_loaded": store.current.n_resident - n_loaded} if compares else {}),
            # Of loading lists as the product does: allocation, staging, publication.
            "load_bytes": report.nbytes,
            "load_seconds": load_seconds,
            "batches": warm,
            "batches_left_out": [b for b in batches if b not in warm],
            "rounds": rounds,
            "seconds": clock() - started,
        }
        return DeviceTiming(label=tier.label, samples=tuple(samples), transfers=transfers, notes=notes)


def _load_rows(index: IVFIndex, tier: Tier, store: ResidencyStore, order: I64, nbytes: int) -> bool:
    """Loads ``nbytes`` of rows beside codes, in ``order``; whether the device compares candidates with them as the host
    does."""
    if not isinstance(tier, DeviceTier) or index.rows is index or not tier.compares_rows:
        return False
    held = np.cumsum(_row_bytes(index, tier.geometry)[order]) <= nbytes
    tier.load((index.nlist + order[held]).tolist(), store).result()
    return True


class _DeviceBench:
    """Runs timed scans, and comparisons of the candidates that they find. Not thread-safe."""

    #: Whether rows lie beside the codes.
    compares = False

    def __init__(
        self,
        searching: Searching,
        tier: Tier,
        store: ResidencyStore,
        queries: F32,
        order: I64,
        request: ProfileRequest,
        rng: np.random.Generator,
        clock: Clock,
    ) -> None:
        assert request.nprobe is not None, "recall chooses it before devices are timed"
        self._searching, self._index = searching, searching.index
        self._tier, self._store, self._queries = tier, store, queries
        self._nprobe, self._rng, self._clock = request.nprobe, rng, clock
        self._k, self._kept = request.k, searching.kept(request.k, request.nprobe)
        self._loaded = order[store.current.list_device[order] >= 0]

    def run(self, batch: int, share: float) -> list[StageSample]:
        """One scan of a random batch's hits on the hottest ``share`` of the loaded lists; nothing when none hit."""
        x = self._queries[self._rng.choice(len(self._queries), batch, replace=False)]
        probes, coarse = self._searching.quantize(x, self._nprobe)
        keep = np.zeros(self._index.nlist, dtype=bool)
        keep[self._loaded[: max(1, round(share * len(self._loaded)))]] = True
        hits = keep_probes(probes, coarse, keep, self._index.list_bytes)
        if hits.work.probes == 0:
            return []
        x = x[hits.rows]
        with self._store.lease() as residency:
            scanner = self._tier.scanner(residency)
            started = self._clock()
            # Answers come back as host arrays: the device has finished when it returns.
            _, found = scanner.scan(x, hits.probes, hits.coarse_distances, self._kept)
            seconds = self._clock() - started
            compared = self._compared(x, found, residency) if self.compares else []
        coverage = float(keep.sum()) / self._index.nlist
        sample = StageSample(
            stage="device_scan",
            batch=batch,
            seconds=seconds,
            coverage=coverage,
            device=self._tier.label,
            **asdict(hits.work),
        )
        return [sample, *compared]

    def _compared(self, x: F32, found: I64, residency: Residency) -> list[StageSample]:
        """One comparison of the candidates ``found`` whose rows are here, as a router does it; nothing where none
        are."""
        tier, scanner = self._tier, self._searching.scanner
        assert isinstance(tier, DeviceTier)
        assert isinstance(scanner, HostRabitqScanner)
        rows = tier.row_pages(residency)
        started = self._clock()
        comparison = Comparison(scanner.reranker, x, self._k, BatchClock(), lambda _: None, lambda _: None)

        def compare(_ordinal: int, own: I64) -> bool:
            comparison.complete(own, rows.distances(x, own))
            return True

        split_positions(found, residency.list_device[self._index.nlist :], compare)
        seconds, n = self._clock() - started, comparison.n_on_devices
        if not n:
            return []
        nbytes = n * self._index.rows.code_size
        return [
            StageSample(stage="rerank", batch=len(x), seconds=seconds, probes=n, work_bytes=nbytes, device=tier.label)
        ]


def time_transfers(
    device: torch.device,
    label: str,
    sizes: Sequence[int],
    *,
    repeats: int,
    clock: Clock = time.perf_counter,
) -> tuple[TransferSample, ...]:
    """Times host-to-device copies of ``sizes`` bytes, pinned and not on CUDA; each until the bytes are there."""
    import torch

    on_gpu = device.type == "cuda"
    largest = max(sizes)
    target = torch.zeros(largest, dtype=torch.uint8, device=device)
    sources = {False: torch.ones(largest, dtype=torch.uint8)}
    if on_gpu:
        sources[True] = torch.ones(largest, dtype=torch.uint8, pin_memory=True)
    samples = []
    for repeat in range(repeats + 1):
        for pinned, source in sources.items():
            for size in sizes:
                if on_gpu:
                    torch.cuda.synchronize(device)
                started = clock()
                target[:size].copy_(source[:size], non_blocking=pinned)
                if on_gpu:
                    torch.cuda.synchronize(device)
                seconds = clock() - started
                if repeat:  # the first warms up
                    samples.append(TransferSample(device=label, pinned=pinned, nbytes=size, seconds=seconds))
    return tuple(samples)
