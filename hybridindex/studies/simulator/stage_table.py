"""Seconds of each stage of any batch, from a profile's fitted models, as a table.

A batch is a window of the pool's queries. When a batch size first occurs, all batches of that size are computed
together with the partitioner's models.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hybridindex.partitioner.models.latency import LatencyModel, RoutingModel
from hybridindex.partitioner.models.order_stats import window_max, window_sum
from hybridindex.partitioner.models.scan_models import ScanWork
from hybridindex.router.batch.split import HOST
from hybridindex.studies.simulator.query_pool import QueryPool, TierWork
from hybridindex.types import F64, I64

__all__ = ["BatchScatter", "BatchTimes", "StageTable", "stage_table"]

#: Larger batches are looked up at a size that differs by less than 1/64, and scaled.
_EXACT_BATCH = 128
#: Larger batches use the expected number of distinct bytes: it varies little among them.
_EXACT_UNION = 32
#: Served batches of similar length among which a scatter is drawn.
_ALIKE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimes:
    """Seconds of batches of one size by first query, before scatter. Lists, because Python reads them fast."""

    coarse_s: float
    #: The engine's own time beyond the stages.
    own_s: float
    host_s: list[float]
    #: One list per device.
    device_s: tuple[list[float], ...]
    merge_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScatter:
    """Deviation of the engine's or a device's parts of served batches from their fit. An interruption counts more in a
    short batch than in a long one, so a batch draws from served batches of about its predicted length."""

    #: Predicted seconds, ascending, and measured over predicted seconds of each.
    told_s: list[float]
    ratios: list[float]

    def ratio(self, told_s: float, draw: float) -> float:
        """``draw``: uniform in [0, 1)."""
        first = bisect_left(self.told_s, told_s) - _ALIKE // 2
        first = max(0, min(first, len(self.ratios) - _ALIKE))
        return self.ratios[first + int(draw * min(_ALIKE, len(self.ratios)))]


@dataclass(slots=True, kw_only=True, eq=False)
class StageTable:
    """Stage times of one resident set. Cached, so not thread-safe."""

    pool: QueryPool
    model: LatencyModel
    routing: RoutingModel
    host: TierWork
    devices: list[TierWork]
    #: (n,) hit rate by bytes of each query.
    hit_rate: list[float]
    #: (n, width) host lists of each query; nlist = none.
    host_lists: I64
    #: (nlist + 1,) float64 code bytes of each list; 0 for none.
    host_bytes: F64
    #: Page bytes of the resident lists on all devices.
    resident_bytes: int
    #: Ascending, equally likely: measured over fitted seconds of host scan and coarse stage, drawn at the same level.
    host_ratios: list[float]
    coarse_ratios: list[float]
    #: Factors on stages: contention with decoding, or the speed of the machine that served.
    device_factor: float
    coarse_factor: float = 1.0
    host_factor: float = 1.0
    #: Replaces both ratios where served batches were fitted.
    scatter: BatchScatter | None = None
    device_scatter: BatchScatter | None = None
    _known: dict[int, BatchTimes] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return len(self.hit_rate)

    @property
    def serial(self) -> float:
        """Part of the shorter scan in :class:`BatchTimes` that does not overlap the longer one."""
        return self.routing.serial / self.routing.scale

    def of_batch(self, batch: int) -> BatchTimes:
        """The stages of all batches of ``batch`` queries."""
        found = self._known.get(batch)
        if found is None:
            found = self._known[batch] = self._computed(batch)
        return found

    def _computed(self, batch: int) -> BatchTimes:
        size = batch
        if batch > _EXACT_BATCH:
            step = 1 << (int(math.log2(batch)) - 6)
            size = batch // step * step
            if size != batch:
                known, grow = self.of_batch(size), batch / size
                return BatchTimes(
                    coarse_s=known.coarse_s * grow,
                    own_s=known.own_s * grow,
                    host_s=[s * grow for s in known.host_s],
                    device_s=tuple([s * grow for s in one] for one in known.device_s),
                    merge_s=known.merge_s * grow,
                )
        model, starts = self.model, np.arange(self.n, dtype=np.int64)
        scale = self.routing.scale
        missed = ScanWork(
            batch=np.full(self.n, float(size)),
            probes=window_sum(self.host.probes, size, starts),
            max_probes=window_max(self.host.probes, size, starts),
            work_bytes=window_sum(self.host.work, size, starts),
            max_work_bytes=window_max(self.host.work, size, starts),
            unique_bytes=self._union(self.host, size),
            min_hit_rate=-window_max(-np.array(self.hit_rate), size, starts),
            masked=np.zeros(self.n),
        )
        coarse = model.fixed_s(size)
        host = np.where(missed.probes > 0, model.host.model.predict(missed), 0.0) * scale * self.host_factor
        devices = []
        if model.device is not None:
            for tier in self.devices:
                work = window_sum(tier.work, size, starts)
                seconds = model.device.predict(work, self._union(tier, size))
                devices.append((seconds * scale * self.device_factor).tolist())
        return BatchTimes(
            coarse_s=coarse * scale * self.coarse_factor,
            own_s=self.routing.fixed_s + self.routing.per_query_s * size,
            host_s=host.tolist(),
            device_s=tuple(devices),
            merge_s=float(model.merge.predict(size)) * scale if model.merge is not None and devices else 0.0,
        )

    def _union(self, tier: TierWork, size: int) -> F64:
        if size > _EXACT_UNION:
            return np.full(self.n, self.pool.union_bytes(tier.lists, size))
        return self.pool.window_union(tier.lists, size)

    def ratios(self, stages: BatchTimes, first: int, draw: float) -> tuple[float, float]:
        """(host scan, coarse stage): drawn over fitted seconds of a batch; ``draw`` is uniform in [0, 1)."""
        if self.scatter is None:
            level = int(draw * len(self.host_ratios))
            return self.host_ratios[level], self.coarse_ratios[level]
        ratio = self.scatter.ratio(stages.coarse_s + stages.own_s + stages.host_s[first], draw)
        return ratio, ratio

    def device_ratio(self, seconds: float, draw: float) -> float:
        """Drawn over fitted seconds of a device scan."""
        return 1.0 if self.device_scatter is None else self.device_scatter.ratio(seconds, draw)

    def early_ends(self, first: int, size: int) -> list[float]:
        """For each request of the batch of ``size`` queries from ``first`` on: the part of the host scan after which
        all its lists have been scanned, 0 without any. As in the native host scan, lists of the request with the least
        work come first, and each list is scanned once for all requests."""
        n, nlist = self.n, len(self.pool.list_bytes)
        rows = np.arange(first, first + size)
        if first + size > n:
            rows %= n
        lists = self.host_lists[rows]
        wanted = np.bincount(lists.ravel(), minlength=nlist + 1)[lists]
        work = self.host_bytes[lists] * (1.0 + self.pool.request_cost * wanted)
        order = np.argsort(work.sum(axis=1), kind="stable")
        flat = lists[order].ravel()
        # Numpy keeps the last of equal indices, so assign from the heaviest to the lightest request.
        place = np.empty(nlist + 1, dtype=np.int64)
        place[flat[::-1]] = np.repeat(np.arange(size)[::-1], lists.shape[1])
        scanned = np.cumsum(np.bincount(place[flat], weights=(work / wanted)[order].ravel(), minlength=size))
        ends = np.empty(size)
        ends[order] = scanned / max(scanned[-1], 1e-300)
        return list(ends.tolist())

    def capacity(self, batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)) -> float:
        """Highest rate, queries per second, of any batch size in ``batches``; host and devices work in parallel."""
        best = 0.0
        for batch in batches:
            times = self.of_batch(batch)
            engine = times.coarse_s + times.own_s + float(np.mean(times.host_s))
            slowest = max([engine, *(float(np.mean(one)) for one in times.device_s)])
            best = max(best, batch / slowest) if slowest > 0 else math.inf
        return best


def stage_table(
    pool: QueryPool,
    model: LatencyModel,
    list_device: npt.NDArray[np.int16],
    n_devices: int,
    *,
    resident_bytes: int,
    device_factor: float = 1.0,
    extra_hits: F64 | None = None,
) -> StageTable:
    """The table for lists on the devices ``list_device`` (nlist,) int16, -1 = host.

    ``extra_hits``: (n,) part of each query's host bytes that lookahead and cache serve, spread evenly over the devices.
    """
    tiers, hit_rate = pool.tiers(list_device, n_devices)
    host, devices = tiers[0], tiers[1:]
    if extra_hits is not None and n_devices:
        moved = host.work * extra_hits
        hit_rate = hit_rate + (1.0 - hit_rate) * extra_hits
        devices = [replace(tier, work=tier.work + moved / n_devices) for tier in devices]
        host = replace(host, work=host.work - moved, probes=np.round(host.probes * (1.0 - extra_hits)))
    used = any(tier.work.any() for tier in devices)
    return StageTable(
        pool=pool,
        model=model,
        routing=model.hybrid_routing if used else model.host_routing,
        host=host,
        devices=devices if used else [],
        hit_rate=hit_rate.tolist(),
        host_lists=np.where((pool.probes >= 0) & (list_device[pool.probes] == HOST), pool.probes, len(pool.list_bytes)),
        host_bytes=np.append(pool.list_bytes, 0).astype(np.float64),
        device_factor=device_factor,
        resident_bytes=resident_bytes,
        host_ratios=model.host.ratios.tolist(),
        coarse_ratios=model.coarse_ratios.tolist(),
    )
