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
from hybridindex.partitioner.latency import RoutingModel, fit_routing
from hybridindex.simulator.serve import System
from hybridindex.simulator.stages import BatchScatter, StageTable
from hybridindex.types import F64, I64

__all__ = ["EngineFit", "Served", "fit_engine"]

#: Equally likely levels of wake-ups.
_LEVELS = 64
_MIN_BATCHES = 16
#: For how many batches it counts that a batch takes what its stages take: loads that are fitted are short.
_PRIOR_BATCHES = 4.0


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
    #: (b,) float64 seconds of the engine for each batch, up to the end of its host part; of its slowest device scan.
    engine_s: F64
    device_s: F64
    first_query: int = 0

    @property
    def first(self) -> I64:
        """(b,) the first request of each batch."""
        return np.asarray(np.cumsum(self.batches) - self.batches, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineFit:
    """What served batches take beyond the stages of their profile."""

    #: Of the engine's part of a batch: coarse stage and host scan.
    routing: RoutingModel
    #: Device scans over their prediction; 1 where there were none.
    device_pace: float
    #: (b,) float64 seconds that batches should have taken the engine, ascending, and what each took over that.
    told_s: F64
    ratios: F64
    #: (levels,) float64 ascending, equally likely seconds from an arrival at an idle engine to its batch.
    wake_s: F64
    #: Between the engine's part of a batch and the next batch, where requests wait.
    between_s: float

    def pace(self, table: StageTable, load: Served) -> float:
        """Median over the batches of ``load``, whose queries are the pool of ``table``, of what they took the engine
        over what this fit says: above 1 where the machine was slower than when it was fitted."""
        stages, _ = _stages(table, load)
        return float(np.median(load.engine_s / _told(self.routing, stages, load.batches)))

    def of(self, system: System) -> System:
        """The system with this engine: same lists, same stages."""
        scatter = BatchScatter(told_s=self.told_s.tolist(), ratios=self.ratios.tolist())
        factor = system.table.device_factor * self.device_pace / self.routing.scale
        return replace(
            system,
            table=replace(system.table, routing=self.routing, device_factor=factor, scatter=scatter, _known={}),
            rules=replace(system.rules, wake_s=tuple(self.wake_s.tolist()), between_s=self.between_s),
        )


def fit_engine(table: StageTable, loads: Sequence[Served]) -> EngineFit:
    """Fits the batches of ``loads``, whose queries are the pool of ``table``.

    Raises:
        InvalidInputError: the loads have too few batches.
    """
    seconds, sizes = (np.concatenate([getattr(one, name) for one in loads]) for name in ("engine_s", "batches"))
    if seconds.size < _MIN_BATCHES:
        raise InvalidInputError(f"loads have {seconds.size} batches; give {_MIN_BATCHES} at least")
    stages, devices = (np.concatenate(parts) for parts in zip(*(_stages(table, one) for one in loads), strict=True))
    # The machine may be slower than when it was profiled, by more than routing alone explains.
    pace = float(np.median(seconds / np.maximum(stages, 1e-12)))
    columns = np.stack([stages, np.zeros_like(stages), np.ones_like(stages), sizes.astype(np.float64)], axis=1)
    fitted = fit_routing(columns, seconds / pace, prior_weight=_PRIOR_BATCHES / seconds.size)
    routing = RoutingModel(
        scale=fitted.scale * pace, fixed_s=fitted.fixed_s * pace, per_query_s=fitted.per_query_s * pace
    )
    told = _told(routing, stages, sizes)
    order = np.argsort(told)
    scanned = np.concatenate([one.device_s for one in loads])
    known = (scanned > 0) & (devices > 0)
    wakes, gaps = (np.concatenate(parts) for parts in zip(*(_idle(one) for one in loads), strict=True))
    return EngineFit(
        routing=routing,
        device_pace=float(np.median(scanned[known] / devices[known])) if known.any() else 1.0,
        told_s=told[order],
        ratios=(seconds / told)[order],
        wake_s=np.quantile(wakes, (np.arange(_LEVELS) + 0.5) / _LEVELS) if wakes.size else np.zeros(1),
        between_s=max(0.0, float(np.median(gaps))) if gaps.size else 0.0,
    )


def _told(routing: RoutingModel, stages: F64, sizes: I64) -> F64:
    return routing.scale * stages + (routing.fixed_s + routing.per_query_s * sizes)


def _stages(table: StageTable, load: Served) -> tuple[F64, F64]:
    """(b,) seconds of the engine's stages of each batch, and of its slowest device scan, before any routing."""
    raw = replace(table, routing=RoutingModel(), _known={})
    engine, device = np.empty(load.batches.size), np.empty(load.batches.size)
    starts = (load.first_query + load.first) % raw.n
    for number, (at, size) in enumerate(zip(starts.tolist(), load.batches.tolist(), strict=True)):
        times = raw.of_batch(size)
        engine[number] = times.coarse_s + times.host_s[at]
        device[number] = max((one[at] for one in times.device_s), default=0.0)
    return engine, device


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
