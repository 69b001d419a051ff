"""Makes a plan, of an update or on request, in a process of its own or in the serving one.

Renewing a profile and planning hold the GIL for much of their time, and searches wait for it. Therefore
:class:`hybridindex.refresh.planner_process.PlanningProcess` does both in another process. :class:`PlanningHere` works
on the calling thread, where no process may be started. Both give the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hybridindex.index.ivf import IVFIndex
from hybridindex.paging import PageGeometry
from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.models.coverage import CoverageCurve, QueryWork
from hybridindex.partitioner.models.fits import PiecewiseLinear
from hybridindex.partitioner.models.latency import (
    DeviceScanModel,
    LatencyModel,
    RerankModel,
    RoutingModel,
    RowFaultModel,
)
from hybridindex.partitioner.models.row_cache import CachedPages, RowCache
from hybridindex.partitioner.models.rows import RowCurve
from hybridindex.partitioner.models.scan_models import (
    CalibratedScanModel,
    HostScanModelChoice,
    ListMajorScanModel,
    PaperScanModel,
    QueryParallelScanModel,
)
from hybridindex.partitioner.models.validate_hitrate import HitRateError, HitRateValidation
from hybridindex.partitioner.plan import Plan, Verdict
from hybridindex.partitioner.request import PlanRequest
from hybridindex.partitioner.solver import SolverStep
from hybridindex.plans.planner import Arenas, plan_again
from hybridindex.plans.proposal import Comparison, Served, Weighed, weigh_plan
from hybridindex.profiler.recent import renew_profile
from hybridindex.refresh.pipe_codec import PipeCodec
from hybridindex.types import (
    F32,
    AccessSample,
    HardwareInfo,
    LLMProfile,
    Profile,
    RecallPoint,
    StageSample,
    TransferSample,
)

__all__ = ["CODEC", "Planner", "PlanningHere", "PlanningMode", "RenewOptions"]

#: Where plans are made. "process": in a process that is started for each plan.
PlanningMode = Literal["process", "here"]

#: Classes that go through the pipe to the planning process and back.
CODEC = PipeCodec(
    (
        *(AccessSample, HardwareInfo, LLMProfile, Profile, RecallPoint, StageSample, TransferSample),
        *(Analysis, CoverageCurve, PageGeometry, Plan, PlanRequest, QueryWork, SolverStep, Verdict),
        *(HitRateError, HitRateValidation, PiecewiseLinear, DeviceScanModel, LatencyModel, RoutingModel),
        *(CachedPages, RerankModel, RowCache, RowCurve, RowFaultModel),
        *(CalibratedScanModel, HostScanModelChoice, ListMajorScanModel, PaperScanModel, QueryParallelScanModel),
        *(Arenas, Comparison, Served, Weighed),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewOptions:
    """Arguments of :func:`hybridindex.profiler.recent.renew_profile`."""

    n_hot: int
    decay: float | None
    seed: int
    min_queries: int
    notes: Mapping[str, Any]


class Planner(Protocol):
    """Makes one plan: prepare, renew, solve and weigh follow each other on one thread, the first two only where the
    profile is to be renewed; :meth:`stop` from any.
    """

    def prepare(self) -> None:
        """Returns when :meth:`renew` could begin at once.

        Raises:
            PlanningError: as :meth:`renew`.
        """

    def renew(self, profile: Profile, queries: F32, options: RenewOptions) -> Profile:
        """``profile`` with the accesses of ``queries`` (n, dim) float32, checked.

        Raises:
            ProfileError: too few queries.
            PlanningError: the process that plans ended, was stopped, or took too long.
        """

    def solve(self, profile: Profile, request: PlanRequest, arenas: Arenas | None) -> Plan:
        """See :func:`hybridindex.plans.planner.plan_again`; ``profile`` as :meth:`renew` gave it, or a stored one.
        Raises as it does, and as :meth:`renew`.
        """

    def weigh(
        self, plan: Plan, served: Served, bandwidth_share: float, room_bytes: Sequence[int] | None = None
    ) -> Weighed:
        """See :func:`hybridindex.plans.proposal.weigh_plan`; ``plan`` as :meth:`solve` gave it."""

    def stop(self) -> None:
        """Ends the running call, where that is possible."""

    def close(self) -> None:
        """Frees everything; calling twice is harmless."""


class PlanningHere:
    """On the calling thread. Meanwhile searches wait for the GIL, up to its switch interval of 5 ms each time."""

    def __init__(self, index: IVFIndex) -> None:
        self._index = index

    def prepare(self) -> None:
        """Nothing to wait for."""

    def renew(self, profile: Profile, queries: F32, options: RenewOptions) -> Profile:
        return renew_profile(
            profile,
            self._index,
            queries,
            n_hot=options.n_hot,
            decay=options.decay,
            seed=options.seed,
            min_queries=options.min_queries,
            notes=options.notes,
        )

    def solve(self, profile: Profile, request: PlanRequest, arenas: Arenas | None) -> Plan:
        return plan_again(profile, request, arenas)

    def weigh(
        self, plan: Plan, served: Served, bandwidth_share: float, room_bytes: Sequence[int] | None = None
    ) -> Weighed:
        return weigh_plan(plan, served, bandwidth_share, room_bytes)

    def stop(self) -> None:
        """The running call is finished."""

    def close(self) -> None:
        """Nothing to free."""
