"""The engine's own costs, fitted to batches that a router served: what a profile, which times whole batches of one
caller, does not have.

A profile says how long stages take. A served batch also merges and answers each of its requests, wakes its thread, and
shares the machine with whoever sends. Covers batches of single queries. Which load to measure, and when, is the
caller's choice: one that is not the load that shall be predicted.
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

#: Equally likely levels of wake-ups.
_LEVELS = 64
_MIN_BATCHES = 16
#: For how many batches it counts that a batch takes what its stages take: loads that are fitted are short.
_PRIOR_BATCHES = 0.25


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """One load as a router served it, in order of arrival. Request i asked query ``first_query`` + i, around and
    around the pool."""

    #: (n,) float64 seconds on one clock: handed over, taken with its batch, answered.
    arrivals: F64
    started_s: F64
    done_s: F64
    #: (b,) int64 requests of each batch, in order.
    batches: I64
    #: (b,) float64 seconds of the engine for each batch, up to where its parts are handed over and up to the end of its
    #: host part; seconds of its slowest device scan. Equal and 0 where there is no such part.
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
    """What served batches take over the stages of their profile."""

    #: Each stage over its prediction: the machine's speed, and what sharing it costs.
    coarse_ratio: float
    host_ratio: float
    device_ratio: float
    #: Beside a host scan.
    fixed_s: float
    per_query_s: float
    #: Of the engine's parts, and of device scans, where there were some.
    scatter: BatchScatter
    device_scatter: BatchScatter | None
    #: (levels,) float64 ascending, equally likely seconds from an arrival at an idle engine to its batch.
    wake_s: F64
    #: Between the engine's part of a batch and the next batch, where requests wait.
    between_s: float

    def table(self, table: StageTable) -> StageTable:
        """The same lists and stages, as served."""
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
        """The system with this engine."""
        rules = replace(system.rules, wake_s=tuple(self.wake_s.tolist()), between_s=self.between_s)
        return replace(system, table=self.table(system.table), rules=rules)

    def ratio(self, table: StageTable, load: Served) -> float:
        """Median over the batches of ``load``, whose queries are the pool of ``table``, of what they took the engine
        over what this fit says: above 1 where the machine was slower than when it was fitted."""
        return float(np.median(load.engine_s / self._engine_s(_stages(table, load), load.batches)))

    def _engine_s(self, stages: _Stages, sizes: I64) -> F64:
        own = np.where(stages.host_s > 0, self.fixed_s + self.per_query_s * sizes, 0.0)
        return np.asarray(self.coarse_ratio * stages.coarse_s + self.host_ratio * stages.host_s + own)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stages:
    """(b,) float64 seconds of each batch alone: coarse stage, host scan, slowest device scan."""

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
    """Ratio of the host scan and what comes with it, from batches (b,) that have one."""
    known = (told > 0) & (took > 0)
    told, took, sizes = told[known], took[known], sizes[known]
    if took.size < _MIN_BATCHES:
        return RoutingModel()
    # The machine may be slower than when it was profiled, by more than is plausible of a scan in a router.
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
    # What a table's routing and factors add is not the stage's own; its work, which takes long, is looked up once.
    scale = table.routing.scale
    rows /= (scale * table.coarse_factor, scale * table.host_factor, scale * table.device_factor)
    coarse, host, device = rows.T
    return _Stages(coarse_s=coarse, host_s=host, device_s=device)


def _idle(load: Served) -> tuple[F64, F64]:
    """Seconds of wake-ups of an idle engine, and of pauses of one for which requests wait and a slot is free."""
    came, started = load.arrivals[load.first], load.started_s[load.first]
    free = (started + load.engine_s)[:-1]
    waited = came[1:] < free
    ended = np.maximum.accumulate(np.maximum.reduceat(load.done_s, load.first))
    slot = np.concatenate(([True], ended[:-2] < free[1:]))
    pauses = np.maximum(started[1:] - free, 0.0)[waited & slot]
    # Right after a batch an engine still reports: that is neither.
    idle = np.concatenate(([True], came[1:] > free + (np.median(pauses) if pauses.size else 0.0)))
    return (started - came)[idle], pauses
