"""Reports on a schedule: its stages, what limits it, and the cost of the next one on the frontier."""

from __future__ import annotations

from dataclasses import dataclass

from hybridindex.errors import InvalidInputError
from hybridindex.studies.schedule.frontier import Frontier, Schedule

__all__ = ["StageReport", "compare_with_next", "limiting_stage", "report_stages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """One stage of a schedule."""

    stage: str
    #: Number of its subsystem: stages of one subsystem share chips. Retrieval alone has no chips.
    subsystem: int
    chips: int
    batch: int
    how: str
    #: Milliseconds of one batch; in decoding, of one token.
    latency_ms: float
    #: Part of the subsystem's time that this stage takes at the schedule's throughput.
    busy: float


def report_stages(schedule: Schedule) -> tuple[StageReport, ...]:
    """Every stage in order, "decode" last."""
    found = []
    for number, subsystem in enumerate(schedule.subsystems):
        own = {run.stage: run.interval_s / run.batch for run in subsystem.runs}
        # Retrievals and prefixes during decoding count in the period, but in no run.
        extra = subsystem.period_s - sum(own.values())
        again = [name for name in own if name in ("retrieval", "prefix")]
        for run in subsystem.runs:
            later = extra / len(again) if run.stage in again else 0.0
            found.append(
                StageReport(
                    stage=run.stage,
                    subsystem=number,
                    chips=subsystem.chips,
                    batch=run.batch,
                    how=run.how,
                    latency_ms=run.latency_s * 1e3,
                    busy=schedule.requests_per_s * (own[run.stage] + later),
                )
            )
    decoding = schedule.decoding
    found.append(
        StageReport(
            stage="decode",
            subsystem=len(schedule.subsystems),
            chips=decoding.chips,
            batch=decoding.batch,
            how=decoding.how,
            latency_ms=decoding.tpot_s * 1e3,
            busy=schedule.requests_per_s / decoding.requests_per_s,
        )
    )
    return tuple(found)


def limiting_stage(schedule: Schedule) -> StageReport:
    """The stage that takes most of the time of the busiest subsystem: it limits the throughput."""
    stages = report_stages(schedule)
    busy: dict[int, float] = {}
    for stage in stages:
        busy[stage.subsystem] = busy.get(stage.subsystem, 0.0) + stage.busy
    busiest = max(busy, key=lambda number: busy[number])
    return max((stage for stage in stages if stage.subsystem == busiest), key=lambda stage: stage.busy)


def compare_with_next(frontier: Frontier, point: int) -> str:
    """The next point after ``point`` (from 1) on the frontier: its gain in throughput and its cost in TTFT.

    Raises:
        InvalidInputError: no such point.
    """
    if not 1 <= point <= len(frontier.schedules):
        raise InvalidInputError(f"point is {point}; expected 1 to {len(frontier.schedules)}")
    here = frontier.schedules[point - 1]
    if point == len(frontier.schedules):
        return "no schedule gives more requests/s per chip"
    other = frontier.schedules[point]
    more = other.qps_per_chip / here.qps_per_chip - 1.0
    slower_ms = (other.ttft_s - here.ttft_s) * 1e3
    return f"point {point + 1} gives {more:.1%} more requests/s per chip for {slower_ms:.1f} ms more to the first token"
