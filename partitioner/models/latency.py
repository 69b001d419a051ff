"""Latency of a hybrid batch: tau(b) = T_CQ(b) + max(T_host(b, misses), T_device(b, hits)) + T_merge(b), in seconds.
Of a search by codes, T_rerank is added: exact distances of the candidates, max over host and device again. The host's
includes the pages of rows that it reads from disk.

Fits every term to a profile's stage samples, and predicts quantiles from what batches of held-back queries miss.
:mod:`hybridindex.partitioner.solver` decides coverage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.models.coverage import CoverageCurve, QueryWork
from hybridindex.partitioner.models.fits import PiecewiseLinear, fit_piecewise_linear, ratio_levels
from hybridindex.partitioner.models.order_stats import window_max, window_starts, window_sum
from hybridindex.partitioner.models.scan_models import (
    HostScanModelChoice,
    ScanWork,
    choose_host_scan_model,
    relative_nnls,
)
from hybridindex.types import F64, I64, Profile, StageSample

__all__ = [
    "DeviceScanModel",
    "LatencyModel",
    "LatencyParts",
    "LatencyPrediction",
    "RerankModel",
    "RoutingModel",
    "RowFaultModel",
    "fit_device_scan",
    "fit_latency_model",
    "fit_rerank",
    "fit_routing",
    "fit_row_faults",
]

#: Weight of the prior against one sample's relative error.
_PRIOR_WEIGHT = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceScanModel:
    """Seconds of one device's scan: overhead + cost of scanned bytes + cost of distinct bytes."""

    overhead_s: float
    per_work_byte_s: float
    per_unique_byte_s: float
    devices: tuple[str, ...]
    max_batch: int
    #: Median relative error on its own samples.
    error: float

    def predict(self, work_bytes: F64, unique_bytes: F64 | float) -> F64:
        """(m,) seconds; 0 where nothing is scanned."""
        seconds = self.overhead_s + self.per_work_byte_s * work_bytes + self.per_unique_byte_s * unique_bytes
        return np.where(work_bytes > 0, seconds, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RerankModel:
    """Seconds of the exact distances of candidates on one tier: overhead + cost per query + cost per candidate."""

    overhead_s: float
    per_query_s: float
    per_candidate_s: float
    #: Of a query in the samples, where none finds its row elsewhere.
    candidates: float
    #: Ascending, equally likely measured/predicted ratios.
    ratios: F64
    #: Median relative error on its own samples.
    error: float

    def predict(self, batch: int, candidates: F64) -> F64:
        """(m,) seconds; 0 where nothing is compared."""
        seconds = self.overhead_s + self.per_query_s * batch + self.per_candidate_s * candidates
        return np.where(candidates > 0, seconds, 0.0)

    def scaled(self, factor: float) -> RerankModel:
        """All times times ``factor``."""
        return replace(
            self,
            overhead_s=self.overhead_s * factor,
            per_query_s=self.per_query_s * factor,
            per_candidate_s=self.per_candidate_s * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFaultModel:
    """Seconds of reading pages from disk that are asked for at once: overhead + cost per page."""

    overhead_s: float
    per_page_s: float
    #: Pages of the largest sample.
    max_pages: int
    #: Median relative error on its own samples.
    error: float

    def predict(self, pages: F64) -> F64:
        """(m,) seconds; less than one expected page takes its part of the overhead."""
        return self.overhead_s * np.minimum(pages, 1.0) + self.per_page_s * pages


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingModel:
    """Time of a routed batch beyond its stages: slower stages, scans that do not overlap, and the router's own cost."""

    #: Seconds of a stage inside the router over its seconds alone.
    scale: float = 1.0
    #: Part of the shorter of host and device scan that does not overlap the longer; 0 where they share no resource.
    serial: float = 0.0
    fixed_s: float = 0.0
    per_query_s: float = 0.0

    def seconds(self, before: F64 | float, host: F64, device: F64, batch: int) -> F64:
        """Seconds, elementwise over broadcast terms."""
        stages = before + np.maximum(host, device)
        waiting = self.serial * np.minimum(host, device)
        return self.scale * stages + waiting + (self.fixed_s + self.per_query_s * batch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatencyParts:
    """Terms of tau for w random batches of one size, in seconds: (w,) float64 where they differ between batches."""

    coarse_s: float
    host_s: F64
    device_s: F64
    merge_s: float
    #: Of the slower tier.
    rerank_s: F64
    routing: RoutingModel
    batch: int

    def total(self) -> F64:
        """(w,) seconds."""
        alone = self.coarse_s + self.merge_s + self.rerank_s
        return self.routing.seconds(alone, self.host_s, self.device_s, self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPrediction:
    """One predicted latency."""

    seconds: float
    #: True when the batch size lies outside the measured range: the last slope was extended.
    extrapolated: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatencyModel:
    """Every fitted term of tau(b). Immutable, pure."""

    coarse: PiecewiseLinear | None
    host: HostScanModelChoice
    device: DeviceScanModel | None
    merge: PiecewiseLinear | None
    #: For batches that the host scans alone, and for batches that devices take part in.
    host_routing: RoutingModel
    hybrid_routing: RoutingModel
    #: Ascending, equally likely measured/predicted ratios of the coarse stage; same length as ``host.ratios``.
    coarse_ratios: F64
    #: Devices that share the hits.
    n_devices: int
    #: What could not be fitted, in words.
    notes: tuple[str, ...]
    #: Exact distances on the host and on a device; ``None``: they were not timed apart.
    rerank: RerankModel | None = None
    device_rerank: RerankModel | None = None
    #: Pages of rows that are read from disk; ``None``: not measured.
    row_faults: RowFaultModel | None = None
    #: Pages that each device has room for; none given: for all lists.
    room: tuple[int, ...] = ()

    @property
    def max_batch(self) -> int:
        """Largest batch that every host stage was measured at."""
        coarse = int(self.coarse.knots[-1]) if self.coarse is not None else self.host.max_batch
        return min(coarse, self.host.max_batch)

    def parts(self, curve: CoverageCurve, work: QueryWork, batch: int) -> LatencyParts:
        """Terms for random batches of ``batch`` held-back queries when ``work``'s lists are resident.

        Raises:
            InvalidInputError: ``batch`` is below 1.
        """
        if batch < 1:
            raise InvalidInputError(f"batch is {batch}; a batch has at least 1 query")
        starts = window_starts(curve.n_held)
        missed = _missed_work(curve, work, batch, starts, family=self.host.family)
        host = np.where(missed.probes > 0, self.host.model.predict(missed), 0.0)
        hits = bool((work.hit_probes > 0).any())
        device = np.zeros_like(host)
        if hits and self.device is not None:
            part = self.largest_part(curve, work)
            hit_bytes = window_sum(work.hit_work, batch, starts) * part
            union, _ = curve.union_bytes(work, batch)
            device = self.device.predict(hit_bytes, union * part)
        return LatencyParts(
            coarse_s=float(self.coarse.predict(batch)) if self.coarse is not None else 0.0,
            host_s=host,
            device_s=device,
            merge_s=float(self.merge.predict(batch)) if self.merge is not None and hits else 0.0,
            rerank_s=self._rerank_s(curve, work, batch, starts),
            routing=self.hybrid_routing if hits else self.host_routing,
            batch=batch,
        )

    def largest_part(self, curve: CoverageCurve, work: QueryWork) -> float:
        """Part of the hits that the most loaded device serves. Lists are never split, and where small devices are full
        the others hold the rest; otherwise devices share evenly."""
        if self.n_devices == 1:
            return 1.0
        loads, pages = curve.loads(work)
        total, even = float(loads.sum()), 1.0 / self.n_devices
        if total <= 0:
            return even
        largest = float(loads.max())
        if self.room and min(self.room) < min(max(self.room), work.pages * even):
            # Rows beside codes take their room as the codes do.
            largest = max(largest, _largest_load(self.room, loads, pages * (work.pages / max(int(pages.sum()), 1))))
        return max(even, largest / total)

    def _rerank_s(self, curve: CoverageCurve, work: QueryWork, batch: int, starts: I64) -> F64:
        """(w,) seconds until all candidates are compared."""
        none = np.zeros(starts.size)
        if self.rerank is None:
            return none
        if curve.rows is None:
            return self.rerank.predict(batch, none + batch * self.rerank.candidates)
        every = window_sum(curve.rows.every, batch, starts)
        hits = none if work.row_hits is None else window_sum(work.row_hits, batch, starts)
        on_host = self.rerank.predict(batch, np.maximum(every - hits, 0.0)) + self.fault_s(work, batch, starts)
        if work.row_hits is None or self.device_rerank is None:
            return on_host
        return np.maximum(on_host, self.device_rerank.predict(batch, hits * self.largest_part(curve, work)))

    def fault_s(self, work: QueryWork, batch: int, starts: I64) -> F64:
        """(w,) seconds of it that the batches from ``starts`` on wait for pages of rows on disk."""
        if work.row_faults is None or self.row_faults is None:
            return np.zeros(starts.size)
        return self.row_faults.predict(window_sum(work.row_faults, batch, starts))

    def fixed_s(self, batch: int) -> float:
        """Seconds of a batch before and after its scans where no row is on a device, without merging."""
        coarse = float(self.coarse.predict(batch)) if self.coarse is not None else 0.0
        if self.rerank is None:
            return coarse
        return coarse + float(self.rerank.predict(batch, np.array([batch * self.rerank.candidates]))[0])

    def quantile(self, curve: CoverageCurve, work: QueryWork, batch: int, percentile: float) -> float:
        """Seconds that ``percentile`` percent of batches stay below. Batches differ by their queries and by the
        scatter of timings."""
        return self.both(curve, work, batch, percentile)[0]

    def both(self, curve: CoverageCurve, work: QueryWork, batch: int, percentile: float) -> tuple[float, float]:
        """(:meth:`quantile`, mean seconds over batches) at once. The mean decides which rate is sustained."""
        seconds = self._spread(self.parts(curve, work, batch)).ravel()
        place = min(max(int(np.ceil(percentile / 100.0 * seconds.size)) - 1, 0), seconds.size - 1)
        return float(np.partition(seconds, place)[place]), float(seconds.mean())

    def predict(
        self, curve: CoverageCurve, work: QueryWork, batch: int, percentile: float | None = None
    ) -> LatencyPrediction:
        """The median, or another percentile, and whether ``batch`` lies outside the measured range."""
        level = 50.0 if percentile is None else percentile
        if not 0.0 < level < 100.0:
            raise InvalidInputError(f"percentile is {level}; give a value between 0 and 100")
        return LatencyPrediction(
            seconds=self.quantile(curve, work, batch, level), extrapolated=self.extrapolated(batch)
        )

    def extrapolated(self, batch: int) -> bool:
        """True when ``batch`` lies outside the batch sizes that every host stage was measured at."""
        return batch > self.max_batch or batch < self.host.min_batch

    def _spread(self, parts: LatencyParts) -> F64:
        """(w, levels) seconds: every batch at every level of the timing scatter. All stages are at the same level."""
        host = np.multiply.outer(parts.host_s, self.host.ratios)
        before = parts.coarse_s * self.coarse_ratios + parts.merge_s
        if self.rerank is not None:
            before = before + np.multiply.outer(parts.rerank_s, self.rerank.ratios)
        return parts.routing.seconds(before, host, parts.device_s[:, None], parts.batch)


def _largest_load(room: Sequence[int], loads: F64, pages: npt.NDArray[np.floating[Any]]) -> float:
    """Load of the device that has most, where lists of ``loads`` (m,) and ``pages`` (m,) are spread evenly, in their
    order, over the devices that are not full. Where they do not fit, as if the devices were larger in proportion."""
    ends = np.concatenate(([0.0], np.cumsum(pages)))
    rooms = np.sort(np.array(room, dtype=np.float64)) * max(1.0, ends[-1] / sum(room))
    sharing = np.arange(rooms.size, 0, -1)
    # Pages in use when each device is full, the smallest first.
    full = np.concatenate(([0.0], np.cumsum(rooms) - rooms + sharing * rooms))
    at = np.interp(full, ends, np.concatenate(([0.0], np.cumsum(loads))))
    return float((np.diff(at) / sharing).sum())


def _missed_work(curve: CoverageCurve, work: QueryWork, batch: int, starts: I64, *, family: str) -> ScanWork:
    """Missed work of the batches from ``starts`` on. Columns that the ``family`` of host models does not read stay 0,
    because they are the expensive ones."""
    miss_work, miss_probes = work.miss_work, work.miss_probes
    unused = np.zeros(starts.size)
    slowest = family == "query_parallel"
    return ScanWork(
        batch=unused + batch,
        probes=window_sum(miss_probes, batch, starts),
        max_probes=window_max(miss_probes, batch, starts) if slowest else unused,
        work_bytes=window_sum(miss_work, batch, starts),
        max_work_bytes=window_max(miss_work, batch, starts) if slowest else unused,
        unique_bytes=unused + curve.union_bytes(work, batch)[1] if family == "list_major" else unused,
        min_hit_rate=-window_max(-work.hit_rate, batch, starts) if family == "paper" else unused,
        masked=unused,
    )


def _stage(samples: Sequence[StageSample], stage: str) -> list[StageSample]:
    return [s for s in samples if s.stage == stage and s.batch > 0 and s.seconds > 0]


def _device_columns(samples: list[StageSample]) -> F64:
    return np.array([(1.0, s.work_bytes, s.unique_bytes) for s in samples], dtype=np.float64)


def fit_device_scan(samples: Sequence[StageSample]) -> DeviceScanModel | None:
    """Fit the ``device_scan`` samples of the slowest device: which device will hold a list is not known yet. ``None``
    where there are none."""
    samples = _stage(samples, "device_scan")
    if not samples:
        return None
    every = _device_columns(samples)
    fits = []
    for name in sorted({s.device for s in samples}):
        own = [s for s in samples if s.device == name]
        fits.append(relative_nnls(_device_columns(own), np.array([s.seconds for s in own])))
    (overhead, per_work, per_unique), error = max(fits, key=lambda fit: float((every @ fit[0]).sum()))
    return DeviceScanModel(
        overhead_s=float(overhead),
        per_work_byte_s=float(per_work),
        per_unique_byte_s=float(per_unique),
        devices=tuple(sorted({s.device for s in samples})),
        max_batch=max(s.batch for s in samples),
        error=error,
    )


def fit_rerank(samples: Sequence[StageSample], *, on_device: bool, levels: int) -> RerankModel | None:
    """Fit the ``rerank`` samples of the host, or of the slowest device; ``None`` where there are none."""
    samples = [s for s in _stage(samples, "rerank") if bool(s.device) == on_device and s.probes > 0]
    names = sorted({s.device for s in samples})
    fits = [_fit_rerank([s for s in samples if s.device == name], levels) for name in names]
    n_batches, queries, candidates = len(samples), sum(s.batch for s in samples), sum(s.probes for s in samples)

    def seconds(fit: RerankModel) -> float:
        return fit.overhead_s * n_batches + fit.per_query_s * queries + fit.per_candidate_s * candidates

    return max(fits, key=seconds, default=None)


def _fit_rerank(samples: list[StageSample], levels: int) -> RerankModel:
    columns = np.array([(1.0, s.batch, s.probes) for s in samples], dtype=np.float64)
    seconds = np.array([s.seconds for s in samples])
    (overhead, per_query, per_candidate), error = relative_nnls(columns, seconds)
    whole = [s.probes / s.batch for s in samples if s.coverage == 0] or [0.0]
    return RerankModel(
        overhead_s=float(overhead),
        per_query_s=float(per_query),
        per_candidate_s=float(per_candidate),
        candidates=float(np.median(whole)),
        ratios=ratio_levels(seconds, columns @ np.array([overhead, per_query, per_candidate]), levels),
        error=error,
    )


def fit_row_faults(samples: Sequence[StageSample]) -> RowFaultModel | None:
    """Fit the ``row_faults`` samples; ``None`` where there are none."""
    samples = [s for s in _stage(samples, "row_faults") if s.probes > 0]
    if not samples:
        return None
    columns = np.array([(1.0, s.probes) for s in samples], dtype=np.float64)
    (overhead, per_page), error = relative_nnls(columns, np.array([s.seconds for s in samples]))
    return RowFaultModel(
        overhead_s=float(overhead), per_page_s=float(per_page), max_pages=max(s.probes for s in samples), error=error
    )


def fit_latency_model(profile: Profile, curve: CoverageCurve, *, n_devices: int = 1, seed: int = 0) -> LatencyModel:
    """Fit every term from ``profile.stages``.

    Raises:
        ProfileError: there are no ``host_scan`` samples.
    """
    host = choose_host_scan_model(profile.stages, threads=profile.threads, nprobe=profile.nprobe, seed=seed)
    notes: list[str] = []
    coarse_samples = _stage(profile.stages, "coarse")
    coarse: PiecewiseLinear | None = None
    coarse_ratios = np.ones_like(host.ratios)
    if coarse_samples:
        batches = np.array([s.batch for s in coarse_samples], dtype=np.float64)
        seconds = np.array([s.seconds for s in coarse_samples])
        coarse = fit_piecewise_linear(batches, seconds)
        coarse_ratios = ratio_levels(seconds, coarse.predict(batches), host.ratios.size)
    else:
        notes.append("coarse quantization was not measured: counted as 0")
    device = fit_device_scan(profile.stages)
    if device is None:
        notes.append("no device scan was measured: counted as hidden behind the host's")
    merge_samples = _stage(profile.stages, "merge")
    merge = (
        fit_piecewise_linear([float(s.batch) for s in merge_samples], [s.seconds for s in merge_samples])
        if merge_samples
        else None
    )
    if merge is None and not _stage(profile.stages, "batch"):
        notes.append("neither merging nor routed batches were measured: counted as 0")
    rerank = fit_rerank(profile.stages, on_device=False, levels=host.ratios.size)
    device_rerank = fit_rerank(profile.stages, on_device=True, levels=host.ratios.size)
    if rerank is not None and device_rerank is None and device is not None:
        notes.append("no device computed exact distances: rows stay on the host")
    model = LatencyModel(
        coarse=coarse,
        host=host,
        device=device,
        merge=merge,
        host_routing=RoutingModel(),
        hybrid_routing=RoutingModel(),
        coarse_ratios=coarse_ratios,
        n_devices=n_devices,
        notes=tuple(notes),
        rerank=rerank,
        device_rerank=device_rerank,
        row_faults=fit_row_faults(profile.stages),
    )
    routed = _stage(profile.stages, "batch")
    alone = _fit_routing(model, curve, [s for s in routed if s.coverage == 0])
    hybrid = _fit_routing(model, curve, [s for s in routed if s.coverage > 0])
    return replace(
        model,
        host_routing=alone or hybrid or RoutingModel(),
        hybrid_routing=hybrid or alone or RoutingModel(),
    )


def _fit_routing(model: LatencyModel, curve: CoverageCurve, routed: list[StageSample]) -> RoutingModel | None:
    """Fit the medians of the stages' terms to the times of routed batches."""
    if not routed:
        return None
    terms: dict[tuple[float, int, str], tuple[float, float, float, float]] = {}
    for coverage, batch, device in sorted({(s.coverage, s.batch, s.device) for s in routed}):
        # The devices that were timed together share the hits, whatever number a plan is for.
        timed = replace(model, n_devices=device.count("+") + 1)
        parts = timed.parts(curve, curve.at(min(round(coverage * curve.nlist), curve.nlist)), batch)
        stages = parts.coarse_s + parts.merge_s + parts.rerank_s + np.maximum(parts.host_s, parts.device_s)
        shorter = np.minimum(parts.host_s, parts.device_s)
        terms[coverage, batch, device] = (float(np.median(stages)), float(np.median(shorter)), 1.0, float(batch))
    columns = np.array([terms[s.coverage, s.batch, s.device] for s in routed])
    return fit_routing(columns, np.array([s.seconds for s in routed]))


def fit_routing(columns: F64, seconds: F64, rounds: int = 4, *, prior_weight: float = _PRIOR_WEIGHT) -> RoutingModel:
    """Fit ``columns`` (m, 4): seconds of the stages, of the shorter scan, 1, and batch size, to (m,) ``seconds`` with
    small relative errors.

    A stage that grows evenly with the batch looks like a cost per query. A prior therefore holds scale near 1 and
    serial near 0, and both are bounded.
    """
    lower, upper = np.array([0.5, 0.0, 0.0, 0.0]), np.array([2.0, 1.0, np.inf, np.inf])
    unit = np.maximum(columns.max(axis=0), 1e-300)
    pull = np.sqrt(prior_weight * len(seconds))
    prior = np.array([[pull, 0.0, 0.0, 0.0], [0.0, pull, 0.0, 0.0]])
    weights = 1.0 / np.maximum(seconds, 1e-12)
    relative = np.ones_like(seconds)
    found = np.array([1.0, 0.0, 0.0, 0.0])
    for _ in range(rounds):
        w = weights / np.sqrt(relative)
        # The last two columns in units of their largest value; the prior applies to the first two as they are.
        scaled = columns / np.concatenate((np.ones(2), unit[2:]))
        rows = np.vstack((scaled * w[:, None], prior))
        found = scipy.optimize.lsq_linear(rows, np.concatenate((seconds * w, [pull, 0.0])), bounds=(lower, upper)).x
        relative = np.maximum(np.abs(scaled @ found - seconds) * weights, 1e-3)
    return RoutingModel(
        scale=float(found[0]),
        serial=float(found[1]),
        fixed_s=float(found[2] / unit[2]),
        per_query_s=float(found[3] / unit[3]),
    )
