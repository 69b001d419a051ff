"""Configuration and status of a refresher, and the record of an update. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from hybridindex.config import Setting, check_number, check_whole
from hybridindex.errors import InvalidInputError
from hybridindex.refresh.drift import DriftPolicy, DriftState, Window
from hybridindex.refresh.planner import PlanningMode
from hybridindex.refresh.update_cycle import CycleStage, Outcome, UpdatePolicy
from hybridindex.tiers.contract.copy_queue import check_share

__all__ = ["RefreshConfig", "RefreshStatus", "UpdateRecord", "window_data"]

#: Of times; timers take no more.
_LONGEST = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshConfig:
    """How the load is watched, and what a new plan must bring."""

    drift: DriftPolicy = field(default_factory=DriftPolicy)
    update: UpdatePolicy = field(default_factory=UpdatePolicy)
    slo_ms: Annotated[float | None, Setting(help="Bound on a request's latency; default: the plan's SLO.")] = None
    attainment: Annotated[
        float | None, Setting(help="Fraction of the requests that should meet the SLO; default: the plan's percentile.")
    ] = None
    reservoir_queries: Annotated[
        int,
        Setting(
            help="Recent queries that are kept, in memory only, half of them the newest; at least twice "
            "`min_queries`. 0: none, and no plan is made from queries.",
            flag="--keep-queries",
        ),
    ] = 4096
    retention_s: Annotated[float, Setting(help="Seconds that a query is kept.")] = 3600.0
    min_queries: Annotated[int, Setting(help="Fewest recent queries that make a profile.")] = 256
    decay: Annotated[
        float | None,
        Setting(help="Weight of the accesses of earlier profiles, 0 to 1; default: chosen by cross-validation."),
    ] = None
    bandwidth_share: Annotated[
        float, Setting(help="Fraction of the time in which a device may copy for a refresh.")
    ] = 0.25
    tick_s: Annotated[float, Setting(help="Seconds between two checks of the load.")] = 1.0
    interval_s: Annotated[
        float | None, Setting(help="Seconds between two updates without a trigger; default: only drift begins one.")
    ] = None
    max_newer: Annotated[
        float,
        Setting(
            help="Fraction of the rows that may be newer than the measurement that the plan was made from; beyond it, "
            "an update measures anew. 1: never for that reason."
        ),
    ] = 0.5
    seed: Annotated[int, Setting(help="Seed of all random draws.")] = 0
    planning: Annotated[
        PlanningMode,
        Setting(
            help="Where plans are made. 'process': in a process of low priority, started for each plan. 'here': in "
            "the serving process, if no process may be started; searches then wait for the GIL."
        ),
    ] = "process"
    planning_timeout_s: Annotated[
        float, Setting(help="Seconds after which that process is killed, and no plan is made.")
    ] = 300.0
    planning_nice: Annotated[
        int, Setting(help="Niceness of that process, 0 to 19. At 19 it gets a few hundredths of a busy core.")
    ] = 19

    def __post_init__(self) -> None:
        for name in ("slo_ms", "retention_s", "tick_s", "interval_s", "planning_timeout_s"):
            value = getattr(self, name)
            if value is not None:
                check_number(name, value, _LONGEST)
        for name in ("reservoir_queries", "seed"):
            check_whole(name, getattr(self, name), 0, (1 << 31) - 1)
        if self.attainment is not None and not 0 < self.attainment <= 1:
            raise InvalidInputError(f"attainment is {self.attainment}; expected a fraction of requests in (0, 1]")
        if self.decay is not None and not 0 <= self.decay <= 1:
            raise InvalidInputError(f"decay is {self.decay}; expected 0 (forget) to 1 (never forget), or None")
        if not 0 <= self.max_newer <= 1:
            raise InvalidInputError(f"max_newer is {self.max_newer}; expected a fraction of rows, 0 to 1")
        if self.min_queries < 16:
            raise InvalidInputError(f"min_queries is {self.min_queries}; expected at least 16: half of them are held")
        if 0 < self.reservoir_queries < 2 * self.min_queries:
            raise InvalidInputError(
                f"reservoir_queries is {self.reservoir_queries}; expected at least twice min_queries, "
                f"{2 * self.min_queries}, so that an update finds enough, or 0 to keep none"
            )
        if self.planning not in ("process", "here"):
            raise InvalidInputError(f"planning is {self.planning!r}; expected 'process' or 'here'")
        if not 0 <= self.planning_nice <= 19:
            raise InvalidInputError(f"planning_nice is {self.planning_nice}; expected 0 to 19")
        check_share(self.bandwidth_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """One update, finished or running."""

    number: int
    reason: str
    #: ISO 8601, UTC.
    began_at: str
    #: "idle" when it is over.
    stage: CycleStage
    #: None while it runs.
    outcome: Outcome | None
    why: str
    #: Plans in the control store: the new one, and the one that served before. None without a store.
    plan_id: int | None
    base_plan_id: int | None
    #: :meth:`Proposal.to_data`; None before there is one.
    proposal: Mapping[str, Any] | None
    #: None before it is over; False: committed without having seen a request.
    verified: bool | None
    #: Stage -> seconds that it took.
    stage_seconds: Mapping[str, float]

    def to_data(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshStatus:
    """State of a refresher."""

    drift_state: DriftState
    stage: CycleStage
    #: Whether the schedule runs.
    running: bool
    #: Of the committed plan; None without a store.
    plan_id: int | None
    predicted_hit_rate: float
    attainment_target: float
    slo_ms: float
    #: Requests and queries observed, and observations that could not be used.
    requests: int
    queries_kept: int
    observe_errors: int
    #: Events that the store did not take.
    store_errors: int
    #: Outcome -> updates.
    updates: Mapping[str, int]
    triggers: int
    #: Seconds until the next update may begin; 0: now.
    back_off_s: float
    #: Oldest first.
    windows: tuple[Window, ...]
    last_update: UpdateRecord | None
    #: Rows of the schedule that are followed, by name; and why others are not.
    schedule: tuple[str, ...] = ()
    schedule_refused: tuple[str, ...] = ()

    def to_data(self) -> dict[str, Any]:
        """JSON-able."""
        data = asdict(replace(self, windows=()))
        data["windows"] = [window_data(w) for w in self.windows]
        return data


def window_data(window: Window) -> dict[str, Any]:
    """JSON-able."""
    rates = {"attainment": window.attainment, "hit_rate": window.hit_rate, "off": window.off}
    return {**asdict(window), **rates}
