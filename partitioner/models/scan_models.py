"""Host scan time of the missed probes: one model per way of using the threads, fitted to samples.

``paper``: Eq. 1 of VectorLiteRAG, right when every query has a core of its own. ``query_parallel``: fewer threads than
queries (faiss). ``list_major``: each missed list is read once per batch. The last two also come with a factor per batch
size (``+batch``), for the effect of batching on caches. Cross-validation on the samples chooses one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import scipy

from hybridindex.errors import ProfileError
from hybridindex.partitioner.models.fits import PiecewiseLinear, fit_piecewise_linear, ratio_levels
from hybridindex.types import F64, I64, StageSample

__all__ = [
    "CalibratedScanModel",
    "HostScanModel",
    "HostScanModelChoice",
    "ListMajorScanModel",
    "PaperScanModel",
    "QueryParallelScanModel",
    "ScanWork",
    "choose_host_scan_model",
    "host_scan_work",
    "relative_nnls",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScanWork:
    """Missed probes of batches: (m,) float64 each, one row per batch."""

    batch: F64
    probes: F64
    max_probes: F64
    work_bytes: F64
    max_work_bytes: F64
    unique_bytes: F64
    #: Smallest hit rate by bytes among the batch's queries.
    min_hit_rate: F64
    #: 1 where resident lists were masked, 0 where the batch was scanned in full.
    masked: F64

    def take(self, rows: I64) -> ScanWork:
        """The given rows."""
        return ScanWork(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})


class HostScanModel(Protocol):
    """Seconds of host scan as a function of the missed work; never falls when more is missed."""

    @property
    def name(self) -> str: ...

    def predict(self, work: ScanWork) -> F64:
        """(m,) seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperScanModel:
    """Eq. 1: (1 - eta_min) T_scan(b)."""

    full: PiecewiseLinear
    name: str = "paper"

    def predict(self, work: ScanWork) -> F64:
        return np.asarray((1.0 - work.min_hit_rate) * self.full.predict(work.batch), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryParallelScanModel:
    """overhead + max(slowest query, all queries / threads). A batch of one takes one thread's time."""

    overhead_s: float
    per_probe_s: float
    per_byte_s: float
    #: Threads that explain the samples: at most those configured, fewer when they share caches or cores.
    effective_threads: float
    name: str = "query_parallel"

    def predict(self, work: ScanWork) -> F64:
        slowest = self.per_probe_s * work.max_probes + self.per_byte_s * work.max_work_bytes
        shared = (self.per_probe_s * work.probes + self.per_byte_s * work.work_bytes) / self.effective_threads
        return self.overhead_s + np.maximum(slowest, shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListMajorScanModel:
    """overhead + per-probe cost + max(bytes of the union / bandwidth, all work / rate)."""

    overhead_s: float
    per_probe_s: float
    per_unique_byte_s: float
    per_work_byte_s: float
    name: str = "list_major"

    def predict(self, work: ScanWork) -> F64:
        scan = np.maximum(self.per_unique_byte_s * work.unique_bytes, self.per_work_byte_s * work.work_bytes)
        return self.overhead_s + self.per_probe_s * work.probes + scan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CalibratedScanModel:
    """Another model times a factor per batch size: interpolated over log2(batch), constant outside."""

    base: HostScanModel
    log2_batches: F64
    factors: F64

    @property
    def name(self) -> str:
        return f"{self.base.name}+batch"

    def predict(self, work: ScanWork) -> F64:
        return self.base.predict(work) * np.interp(np.log2(work.batch), self.log2_batches, self.factors)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostScanModelChoice:
    """The model with the smallest cross-validated error, and the errors of all models."""

    model: HostScanModel
    #: Name -> median relative error on samples that the model was not fitted on; ``inf`` where it cannot be fitted.
    errors: Mapping[str, float]
    #: Ascending, equally likely ratios measured/predicted on unseen samples.
    ratios: F64
    min_batch: int
    max_batch: int
    #: Distinct batch sizes of the samples, ascending.
    batches: tuple[int, ...]
    n_samples: int

    @property
    def family(self) -> str:
        """``paper``, ``query_parallel`` or ``list_major``: which columns of :class:`ScanWork` it reads."""
        return self.model.name.split("+")[0]


def host_scan_work(samples: Sequence[StageSample], nprobe: int) -> tuple[ScanWork, F64]:
    """Samples as columns, and their seconds (m,). ``max_probes`` is inferred: samples do not contain it."""
    rows = np.array(
        [
            (s.batch, s.probes, s.work_bytes, s.max_work_bytes, s.unique_bytes, s.min_hit_rate, s.seconds, s.coverage)
            for s in samples
        ],
        dtype=np.float64,
    ).reshape(-1, 8)
    batch, probes, work, slowest, unique, hit = rows[:, :6].T
    # Without a mask all queries probe equally many lists. With one, the query with the most bytes has about the same
    # share of the probes as of the bytes.
    even = probes / np.maximum(batch, 1.0)
    skewed = np.minimum(probes * slowest / np.maximum(work, 1.0), nprobe)
    max_probes = np.where(rows[:, 7] > 0, np.maximum(even, skewed), even)
    return (
        ScanWork(
            batch=batch,
            probes=probes,
            max_probes=max_probes,
            work_bytes=work,
            max_work_bytes=slowest,
            unique_bytes=unique,
            min_hit_rate=hit,
            masked=(rows[:, 7] > 0).astype(np.float64),
        ),
        rows[:, 6],
    )


def relative_nnls(columns: F64, seconds: F64, rounds: int = 3) -> tuple[F64, float]:
    """Non-negative coefficients (c,) of ``columns`` (m, c) that fit ``seconds`` (m,) with small *relative* errors, and
    the median relative error.

    Reweights towards absolute instead of squared errors, so that one interrupted run does not distort the fit.
    """
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    weights = 1.0 / np.maximum(seconds, 1e-12)
    relative = np.ones_like(seconds)
    solution = np.zeros(columns.shape[1])
    for _ in range(rounds):
        w = weights / np.sqrt(relative)
        solution, _ = scipy.optimize.nnls(columns / scale * w[:, None], seconds * w)
        relative = np.maximum(np.abs(columns / scale @ solution * weights - 1.0), 0.02)
    error = float(np.median(np.abs(columns / scale @ solution * weights - 1.0)))
    return np.asarray(solution / scale, dtype=np.float64), error


def fit_paper(work: ScanWork, seconds: F64, threads: int) -> PaperScanModel | None:
    """Fit the samples without mask; ``None`` when there are none."""
    rows = work.masked == 0
    if not rows.any():
        return None
    return PaperScanModel(full=fit_piecewise_linear(work.batch[rows], seconds[rows]))


def fit_query_parallel(work: ScanWork, seconds: F64, threads: int) -> QueryParallelScanModel:
    """Fit costs by non-negative least squares for each candidate of the effective thread count; keep the best."""
    best: tuple[float, QueryParallelScanModel] | None = None
    ones = np.ones_like(seconds)
    for effective in np.unique(np.linspace(1.0, max(threads, 1), 9)):
        slow = work.max_work_bytes >= work.work_bytes / effective
        for _ in range(2):
            probes = np.where(slow, work.max_probes, work.probes / effective)
            nbytes = np.where(slow, work.max_work_bytes, work.work_bytes / effective)
            (overhead, per_probe, per_byte), error = relative_nnls(np.stack([ones, probes, nbytes], axis=1), seconds)
            again = per_probe * work.max_probes + per_byte * work.max_work_bytes >= (
                (per_probe * work.probes + per_byte * work.work_bytes) / effective
            )
            if (again == slow).all():
                break
            slow = again
        model = QueryParallelScanModel(
            overhead_s=float(overhead),
            per_probe_s=float(per_probe),
            per_byte_s=float(per_byte),
            effective_threads=float(effective),
        )
        error = _median_error(model, work, seconds)
        if best is None or error < best[0] - 1e-12:
            best = (error, model)
    assert best is not None
    return best[1]


def fit_list_major(work: ScanWork, seconds: F64, threads: int) -> ListMajorScanModel:
    """Fit costs by non-negative least squares for each candidate ratio of the two byte costs; keep the best."""
    best: tuple[float, ListMajorScanModel] | None = None
    ones = np.ones_like(seconds)
    for ratio in (0.0, *np.geomspace(1.0, 64.0, 13)):
        mixed = np.maximum(ratio * work.unique_bytes, work.work_bytes)
        (overhead, per_probe, per_byte), error = relative_nnls(np.stack([ones, work.probes, mixed], axis=1), seconds)
        if best is None or error < best[0] - 1e-12:
            model = ListMajorScanModel(
                overhead_s=float(overhead),
                per_probe_s=float(per_probe),
                per_unique_byte_s=float(ratio * per_byte),
                per_work_byte_s=float(per_byte),
            )
            best = (error, model)
    assert best is not None
    return best[1]


def calibrate(model: HostScanModel, work: ScanWork, seconds: F64) -> CalibratedScanModel:
    """Median measured/predicted ratio per batch size."""
    predicted = np.maximum(model.predict(work), 1e-12)
    batches = np.unique(work.batch)
    factors = np.array([np.median(seconds[work.batch == b] / predicted[work.batch == b]) for b in batches])
    return CalibratedScanModel(base=model, log2_batches=np.log2(batches), factors=factors)


_Fit = Callable[[ScanWork, F64, int], "HostScanModel | None"]
_FITS: Mapping[str, _Fit] = {
    "paper": fit_paper,
    "query_parallel": fit_query_parallel,
    "list_major": fit_list_major,
    "query_parallel+batch": lambda w, s, t: calibrate(fit_query_parallel(w, s, t), w, s),
    "list_major+batch": lambda w, s, t: calibrate(fit_list_major(w, s, t), w, s),
}


def choose_host_scan_model(
    samples: Sequence[StageSample], *, threads: int, nprobe: int, seed: int = 0, folds: int = 4
) -> HostScanModelChoice:
    """Fit every model, keep the one that predicts unseen samples best.

    Raises:
        ProfileError: no usable ``host_scan`` samples.
    """
    usable = [s for s in samples if s.stage == "host_scan" and s.seconds > 0 and s.batch > 0]
    if not usable:
        raise ProfileError("the profile has no host_scan samples; profile the index on this machine")
    work, seconds = host_scan_work(usable, nprobe)
    n = seconds.size
    fold = np.random.default_rng(seed).permutation(n) % max(min(folds, n), 1)
    errors: dict[str, float] = {}
    predictions: dict[str, F64] = {}
    for name, fit in _FITS.items():
        held = np.full(n, np.nan)
        for f in range(int(fold.max()) + 1):
            test = np.flatnonzero(fold == f)
            train = np.flatnonzero(fold != f) if n > 1 else test
            model = fit(work.take(train), seconds[train], threads)
            if model is not None:
                held[test] = model.predict(work.take(test))
        known = np.isfinite(held)
        errors[name] = (
            float(np.median(np.abs(held[known] - seconds[known]) / seconds[known])) if known.all() else float("inf")
        )
        predictions[name] = held
    # A calibrated model has a parameter per batch size: it must be clearly better to be chosen.
    best = min(_FITS, key=lambda name: errors[name] + (0.005 if name.endswith("+batch") else 0.0))
    chosen = _FITS[best](work, seconds, threads)
    assert chosen is not None
    batches = [s.batch for s in usable]
    return HostScanModelChoice(
        model=chosen,
        errors=errors,
        ratios=ratio_levels(seconds, predictions[best]),
        min_batch=min(batches),
        max_batch=max(batches),
        batches=tuple(sorted(set(batches))),
        n_samples=n,
    )


def _median_error(model: HostScanModel, work: ScanWork, seconds: F64) -> float:
    return float(np.median(np.abs(model.predict(work) - seconds) / np.maximum(seconds, 1e-12)))
