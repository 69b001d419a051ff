"""Builds pipelines group by group of stages, and drops early what cannot reach the frontier.

A part is dropped when another part is no worse in every column that later stages depend on, or when even the best
continuation stays behind a known schedule. Both are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from hybridindex.studies.schedule.bounds import Bounds, Ceiling, Worth
from hybridindex.studies.schedule.frontier import Incumbents, Schedule
from hybridindex.studies.schedule.pareto import undominated
from hybridindex.studies.schedule.placements import Placement
from hybridindex.studies.schedule.space import Space
from hybridindex.studies.schedule.stages.stage_costs import RETRIEVAL
from hybridindex.studies.schedule.stages.stage_pipeline import SIZES, Run, Subsystem, Ways, before, no_stage, through
from hybridindex.types import F64, I64

__all__ = ["extend_frontier"]


def extend_frontier(
    space: Space, placement: Placement, sizes: Sequence[int], iterative_batch: int, worth: Worth, best: Incumbents
) -> None:
    """Tries every pipeline of one placement with batch sizes 2**``sizes``, and adds new schedules to ``best``."""
    on_chips = sum(group != (RETRIEVAL,) for group in placement)
    most = space.resources.chips - on_chips
    runs = [space.runs(group, sizes, most) for group in placement]
    bounds = [_bounds(space, group, by, iterative_batch) for group, by in zip(placement, runs, strict=True)]
    groups = []
    for at, (group, by_chips) in enumerate(zip(placement, runs, strict=True)):
        others = worth.ceiling(Bounds.of_all(bounds[:at] + bounds[at + 1 :], space.resources.chips))
        ways = {
            chips: _ways(space, group, chips, choices, iterative_batch, others, best)
            for chips, choices in by_chips.items()
        }
        behind = worth.ceiling(Bounds.of_all(bounds[at + 1 :], space.resources.chips))
        groups.append(_Group(runs=by_chips, ways=ways, behind=behind))
    if all(len(group) for group in groups):
        _join(space, groups, worth, best)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Group:
    """Stages that share chips: chips -> the runs of each stage, and the ways to combine them."""

    runs: dict[int, list[list[Run]]]
    ways: dict[int, Ways]
    #: Ceiling of pipelines that are built up to this group.
    behind: Ceiling

    def __len__(self) -> int:
        return sum(len(ways) for ways in self.ways.values())

    def options(self) -> Iterator[tuple[int, Ways, int]]:
        """(chips, ways, row) of every option; options are numbered in this order."""
        for chips, ways in self.ways.items():
            for row in range(len(ways)):
                yield chips, ways, row

    def subsystem(self, number: int) -> Subsystem:
        """The option with that number."""
        for chips, ways in self.ways.items():
            if number < len(ways):
                chosen = zip(self.runs[chips], ways.choices[number].tolist(), strict=True)
                return Subsystem(
                    chips=chips,
                    runs=tuple(choices[i] for choices, i in chosen),
                    period_s=float(ways.period_s[number]),
                )
            number -= len(ways)
        raise AssertionError(number)


def _bounds(space: Space, group: Sequence[str], runs: dict[int, list[list[Run]]], iterative_batch: int) -> Bounds:
    latencies = [sum(min(r.latency_s for r in stage) for stage in choices) for choices in runs.values()]
    periods = {
        chips: sum(
            min(r.interval_s / r.batch for r in stage) + space.later_s(name, chips, iterative_batch)
            for name, stage in zip(group, choices, strict=True)
        )
        for chips, choices in runs.items()
    }
    return Bounds(latency_s=min(latencies, default=0.0), rates={chips: 1.0 / s for chips, s in periods.items()})


def _ways(
    space: Space,
    group: Sequence[str],
    chips: int,
    runs: list[list[Run]],
    iterative_batch: int,
    others: Ceiling,
    best: Incumbents,
) -> Ways:
    """The ways to run a group on ``chips`` chips, built from its last stage to its first."""
    ways = no_stage()
    later = [space.later_s(stage, chips, iterative_batch) for stage in group]
    for depth in range(len(group) - 1, -1, -1):
        ways = before(runs[depth], ways)
        ways = replace(ways, period_s=ways.period_s + later[depth])
        ways = ways.take(np.flatnonzero(ways.memory_bytes <= space.memory_bytes))
        if not space.prune:
            continue
        # The least that earlier stages add.
        latency_s = others.latency_s + sum(min(r.latency_s for r in choices) for choices in runs[:depth])
        front_s = sum(min(r.interval_s / r.batch for r in choices) for choices in runs[:depth]) + sum(later[:depth])
        most = others.value(np.full(len(ways), float(chips)), 1.0 / (ways.period_s + front_s))
        ways = ways.take(np.flatnonzero(~best.beat(ways.ttft_s() + latency_s, most)))
        ways = ways.take(undominated(ways.columns()))
    return ways


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """Partly built pipelines, one row each."""

    #: (n,) of all groups so far.
    chips: F64
    #: (n,) seconds per request of the slowest group.
    period: F64
    #: (n,) log2 of the largest batch.
    largest: I64
    #: (n, SIZES) as in :mod:`hybridindex.studies.schedule.stages.stage_pipeline`.
    times: F64
    #: (n, groups so far) option of each group.
    choices: I64

    def take(self, rows: I64) -> _Parts:
        return _Parts(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def ttft_s(self) -> F64:
        return self.times[np.arange(len(self.times)), self.largest]


_NOTHING = _Parts(
    chips=np.zeros(1),
    period=np.zeros(1),
    largest=np.zeros(1, dtype=np.int64),
    times=np.zeros((1, SIZES)),
    choices=np.empty((1, 0), dtype=np.int64),
)


def _join(space: Space, groups: Sequence[_Group], worth: Worth, best: Incumbents) -> None:
    parts = _NOTHING
    for depth, group in enumerate(groups):
        found = [part for part in _joined(space, parts, group, best) if len(part.chips)]
        if not found:
            return
        parts = _Parts(**{f.name: np.concatenate([getattr(p, f.name) for p in found]) for f in fields(_Parts)})
        if space.prune and depth + 1 < len(groups):
            parts = parts.take(undominated(np.column_stack([parts.chips, parts.period, parts.largest, parts.times])))
    ttft_s = parts.ttft_s()
    value, which = worth.of(parts.chips, 1.0 / parts.period)
    rows = np.flatnonzero((value > 0) & ~best.beat(ttft_s, value))
    rows = rows[undominated(np.column_stack([ttft_s[rows], -value[rows]]))]
    best.add([_schedule(space, groups, parts, int(row), worth, int(which[row])) for row in rows])


def _joined(space: Space, parts: _Parts, group: _Group, best: Incumbents) -> Iterator[_Parts]:
    """Every option of ``group`` after every part."""
    for number, (chips, ways, way) in enumerate(group.options()):
        joint = _Parts(
            chips=parts.chips + chips,
            period=np.maximum(parts.period, ways.period_s[way]),
            largest=np.maximum(parts.largest, ways.log2_largest[way]),
            times=through(ways, way, parts.times, parts.largest),
            choices=np.hstack([parts.choices, np.full((len(parts.chips), 1), number, dtype=np.int64)]),
        )
        keep = joint.chips < space.resources.chips
        if space.prune:
            most = group.behind.value(joint.chips, 1.0 / joint.period)
            keep &= ~best.beat(joint.ttft_s() + group.behind.latency_s, most)
        yield joint.take(np.flatnonzero(keep))


def _schedule(space: Space, groups: Sequence[_Group], parts: _Parts, row: int, worth: Worth, decoding: int) -> Schedule:
    options = zip(groups, parts.choices[row].tolist(), strict=True)
    subsystems = tuple(group.subsystem(number) for group, number in options)
    chosen = worth.decodings[decoding]
    return Schedule(
        subsystems=subsystems,
        decoding=chosen,
        servers=space.servers,
        ttft_s=float(parts.ttft_s()[row]),
        requests_per_s=min(1.0 / float(parts.period[row]), chosen.requests_per_s),
        cost_chips=max(space.least_chips, sum(s.chips for s in subsystems) + chosen.chips) + space.servers_cost,
    )
