"""The engine's own costs, fitted to batches that a router served.

A profile times stages and whole batches of one caller. A served batch also merges and answers each of its requests,
wakes its thread, and shares the machine with the senders. Covers batches of single queries. The caller chooses the load
to measure; it should not be the load to predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.models.latency import RoutingModel, fit_routing
from hybridindex.studies.simulator.stage_table import BatchScatter, StageTable
from hybridindex.studies.simulator.system import System
from hybridindex.types import F64, I64

__all__ = ["EngineFit", "Served", "fit_engine"]

#: Equally likely levels of wake-up times.
_LEVELS = 64
_MIN_BATCHES = 16
#: Weight, in batches, of the prior that a batch takes the time of its stages: fitted loads are short.
_PRIOR_BATCHES = 0.25


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """One load as a router served it, in order of arrival. Request i asked query ``first_query`` + i, modulo the
    pool."""

    #: (n,) float64 seconds on one clock: submitted, taken with its batch, answered.
    arrivals: F64
    started_s: F64
    done_s: F64
    #: (b,) int64 requests of each batch, in order.
    batches: I64
    #: (b,) float64 seconds of each batch in the engine, until its parts are submitted (split_s) and until its host part
    #: ends (engine_s; equal to split_s without one); seconds of its slowest device scan (0 without one).
    split_s: F64
    engine_s: F64
    device_s: F64
    first_query: int = 0

    @property
    def first(self) -> I64:
        """(b,) the first request of each batch."""
        return np.asarray(np.cumsum(self.batches) - self.batches, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineFit:
    """Time of served batches beyond the stages of their profile."""

    #: Served over predicted seconds of each stage: the machine's speed, and the cost of sharing it.
    coarse_ratio: float
    host_ratio: float
    device_ratio: float
    #: Added where a batch has a host scan.
    fixed_s: float
    per_query_s: float
    #: Scatter of the engine's part, and of device scans where there were any.
    scatter: BatchScatter
    device_scatter: BatchScatter | None
    #: (levels,) float64 ascending, equally likely seconds from an arrival at an idle engine to its batch.
    wake_s: F64
    #: Seconds from the engine's part of a batch to the next batch while requests wait.
    between_s: float

    def table(self, table: StageTable) -> StageTable:
        """``table`` with the stage times of served batches."""
        return replace(
            table,
            routing=RoutingModel(fixed_s=self.fixed_s, per_query_s=self.per_query_s),
            coarse_factor=self.coarse_ratio,
            host_factor=self.host_ratio,
            device_factor=self.device_ratio,
            scatter=self.scatter,
            device_scatter=self.device_scatter,
            _known={},
        )

    def of(self, system: System) -> System:
        """``system`` with the costs of this engine."""
        rules = replace(system.rules, wake_s=tuple(self.wake_s.tolist()), between_s=self.between_s)
        return replace(system, table=self.table(system.table), rules=rules)

    def ratio(self, table: StageTable, load: Served) -> float:
        """Median over the batches of ``load`` of the engine's seconds over those of this fit; above 1 where the machine
        was slower than during the fit. The queries of ``load`` are the pool of ``table``."""
        return float(np.median(load.engine_s / self._engine_s(_stages(table, load), load.batches)))

    def _engine_s(self, stages: _Stages, sizes: I64) -> F64:
        own = np.where(stages.host_s > 0, self.fixed_s + self.per_query_s * sizes, 0.0)
        return np.asarray(self.coarse_ratio * stages.coarse_s + self.host_ratio * stages.host_s + own)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stages:
    """(b,) float64 predicted seconds of each batch: coarse stage, host scan, slowest device scan."""

    coarse_s: F64
    host_s: F64
    device_s: F64


def fit_engine(table: StageTable, loads: Sequence[Served]) -> EngineFit:
    """Fits the batches of ``loads``, whose queries are the pool of ``table``.

    Raises:
        InvalidInputError: the loads have too few batches.
    """
    split, engine, device, sizes = (
        np.concatenate([getattr(one, name) for one in loads]) for name in ("split_s", "engine_s", "device_s", "batches")
    )
    if split.size < _MIN_BATCHES:
        raise InvalidInputError(f"loads have {split.size} batches; give {_MIN_BATCHES} at least")
    parts = [_stages(table, one) for one in loads]
    told = _Stages(**{name: np.concatenate([getattr(one, name) for one in parts]) for name in _Stages.__slots__})
    host = _fit_host(told.host_s, engine - split, sizes)
    scanned = (device > 0) & (told.device_s > 0)
    wakes, pauses = (np.concatenate(parts) for parts in zip(*(_idle(one) for one in loads), strict=True))
    found = EngineFit(
        coarse_ratio=_ratio(split, told.coarse_s),
        host_ratio=host.scale,
        device_ratio=_ratio(device, told.device_s),
        fixed_s=host.fixed_s,
        per_query_s=host.per_query_s,
        scatter=BatchScatter(told_s=[], ratios=[]),
        device_scatter=None,
        wake_s=np.quantile(wakes, (np.arange(_LEVELS) + 0.5) / _LEVELS) if wakes.size else np.zeros(1),
        between_s=max(0.0, float(np.median(pauses))) if pauses.size else 0.0,
    )
    found = replace(found, scatter=_scatter(found._engine_s(told, sizes), engine))
    if not scanned.any():
        return found
    return replace(found, device_scatter=_scatter(told.device_s[scanned] * found.device_ratio, device[scanned]))


def _ratio(took: F64, told: F64) -> float:
    known = (took > 0) & (told > 0)
    return float(np.median(took[known] / told[known])) if known.any() else 1.0


def _fit_host(told: F64, took: F64, sizes: I64) -> RoutingModel:
    """Ratio of the host scan and the costs beside it, from the batches (b,) that have one."""
    known = (told > 0) & (took > 0)
    told, took, sizes = told[known], took[known], sizes[known]
    if took.size < _MIN_BATCHES:
        return RoutingModel()
    # Take out the machine's speed first: it may differ from the profile's by more than fit_routing allows.
    ratio = float(np.median(took / told))
    columns = np.stack([told, np.zeros_like(told), np.ones_like(told), sizes.astype(np.float64)], axis=1)
    found = fit_routing(columns, took / ratio, prior_weight=_PRIOR_BATCHES / took.size)
    return RoutingModel(scale=found.scale * ratio, fixed_s=found.fixed_s * ratio, per_query_s=found.per_query_s * ratio)


def _scatter(told: F64, took: F64) -> BatchScatter:
    order = np.argsort(told, kind="stable")
    return BatchScatter(told_s=told[order].tolist(), ratios=(took / told)[order].tolist())


def _stages(table: StageTable, load: Served) -> _Stages:
    rows = np.empty((load.batches.size, 3))
    starts = (load.first_query + load.first) % table.n
    for number, (at, size) in enumerate(zip(starts.tolist(), load.batches.tolist(), strict=True)):
        times = table.of_batch(size)
        rows[number] = times.coarse_s, times.host_s[at], max((one[at] for one in times.device_s), default=0.0)
    # Undo the table's routing and factors: they are not part of the stage.
    scale = table.routing.scale
    rows /= (scale * table.coarse_factor, scale * table.host_factor, scale * table.device_factor)
    coarse, host, device = rows.T
    return _Stages(coarse_s=coarse, host_s=host, device_s=device)


def _idle(load: Served) -> tuple[F64, F64]:
    """Seconds of wake-ups of an idle engine; and of pauses while requests wait and a slot is free."""
    came, started = load.arrivals[load.first], load.started_s[load.first]
    free = (started + load.engine_s)[:-1]
    waited = came[1:] < free
    ended = np.maximum.accumulate(np.maximum.reduceat(load.done_s, load.first))
    slot = np.concatenate(([True], ended[:-2] < free[1:]))
    pauses = np.maximum(started[1:] - free, 0.0)[waited & slot]
    # An engine that still reports on its last batch is neither idle nor paused.
    idle = np.concatenate(([True], came[1:] > free + (np.median(pauses) if pauses.size else 0.0)))
    return (started - came)[idle], pauses
