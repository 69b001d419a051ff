"""A new plan beside the one that serves: how it is made for the same devices, and what the change would bring.

Computes only, of values, so that another process can do it (:mod:`hybridindex.refresh.planner`);
:mod:`hybridindex.refresh.refresher` decides and applies.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InvalidInputError, ProfileError
from hybridindex.partitioner.models.transfer import fit_transfers
from hybridindex.partitioner.plan import Plan, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.refresh.update_cycle import Comparison
from hybridindex.types import I64, Profile

if TYPE_CHECKING:
    from hybridindex.router.router import Router

__all__ = ["CHANGES", "Arenas", "Proposal", "Served", "change_request", "compare_plans", "plan_again"]

#: What a request may change: what is decided anew. Devices, pages and scratch are those of the open arenas.
CHANGES = ("slo_ms", "device_budget_bytes", "rate_qps", "llm", "epsilon", "percentile", "coverage", "slo_stage")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proposal:
    """A plan that could be applied, and what is known of it. Nothing has moved yet."""

    #: Number of the proposal in its refresher, from 1.
    number: int
    reason: str
    #: ISO 8601, UTC.
    created_at: str
    #: What would serve, and what serves.
    plan: Plan = field(repr=False)
    base: Plan = field(repr=False)
    #: Recent queries that it rests on.
    n_queries: int
    #: Both plans on the new profile's held-back queries.
    comparison: Comparison
    #: (m,) int64 list ids that come to a device, or to another one, hottest first; and that leave, ascending.
    lists_in: I64 = field(repr=False)
    lists_out: I64 = field(repr=False)
    #: Part of the time that its move may copy.
    bandwidth_share: float
    #: Why the configured gate would decline it; empty where it is worth its move.
    objection: str
    #: Stage -> seconds that it took.
    stage_seconds: Mapping[str, float]

    @property
    def worthwhile(self) -> bool:
        return not self.objection

    @property
    def bytes_to_move(self) -> int:
        return self.comparison.bytes_to_move

    def to_data(self) -> dict[str, Any]:
        """JSON-able; lists by number only."""
        return {
            "number": self.number,
            "reason": self.reason,
            "created_at": self.created_at,
            "n_queries": self.n_queries,
            "verdict": str(self.plan.verdict),
            "plan_reason": self.plan.reason,
            "slo_ms": self.plan.request.slo_ms,
            "coverage_before": self.base.coverage,
            "coverage_after": self.plan.coverage,
            "batch": self.plan.batch,
            "hit_rate_before": self.comparison.hit_rate_before,
            "hit_rate_after": self.comparison.hit_rate_after,
            "hit_rate_gain": self.comparison.hit_rate_gain,
            "latency_ms_before": self.comparison.latency_ms_before,
            "latency_ms_after": self.comparison.latency_ms_after,
            "latency_gain": self.comparison.latency_gain,
            "bytes_to_move": self.bytes_to_move,
            "move_s": self.comparison.move_s,
            "bandwidth_share": self.bandwidth_share,
            "n_lists_in": int(self.lists_in.size),
            "n_lists_out": int(self.lists_out.size),
            "worthwhile": self.worthwhile,
            "objection": self.objection,
            "stage_seconds": dict(self.stage_seconds),
        }


def change_request(request: PlanRequest, changes: Mapping[str, Any]) -> PlanRequest:
    """``request`` with some of :data:`CHANGES`, checked.

    Raises:
        InvalidInputError: another name, or a value out of its range.
    """
    for name in changes:
        if name not in CHANGES:
            raise InvalidInputError(f"{name} cannot be changed by a refresh; expected one of {', '.join(CHANGES)}")
    values = {
        "device_budget_bytes": request.budgets,
        "n_devices": request.n_devices,
        "page_bytes": request.page_bytes,
        "scratch_bytes": request.scratch,
        "fixed_bytes": 0,  # in that scratch
        **{name: getattr(request, name) for name in CHANGES if name != "device_budget_bytes"},
        "scannable": request.scannable,
        "unscannable": request.unscannable,
        **changes,
    }
    assert set(values) == set(inspect.signature(PlanRequest.resolve).parameters), "a new argument of plans"
    return PlanRequest.resolve(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arenas:
    """Bytes of the open arenas, by device."""

    scratch: tuple[int, ...]
    #: Scratch included.
    room: tuple[int, ...]

    @classmethod
    def of(cls, router: Router) -> Arenas:
        return cls(
            scratch=tuple(tier.reserved_bytes for tier in router.devices),
            room=tuple(tier.capacity_bytes + tier.reserved_bytes for tier in router.devices),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """What a new plan is compared with."""

    #: (m,) int64, and (nlist,) int16 with -1 = host: as the plan in force decided.
    resident_lists: I64
    list_device: npt.NDArray[np.int16]
    #: (nlist,) int16: where lists really are.
    present: npt.NDArray[np.int16]

    @classmethod
    def by(cls, router: Router, plan: Plan) -> Served:
        return cls(
            resident_lists=plan.resident_lists,
            list_device=plan.list_device,
            present=np.asarray(router.residency.list_device, dtype=np.int16),
        )


def plan_again(profile: Profile, request: PlanRequest, arenas: Arenas) -> Plan:
    """What ``request`` asks for, decided from ``profile`` within the open arenas, which keep their size.

    The plan keeps the request's own budgets, so that a router opened with it later has room for lookahead again; its
    reason says where the arenas are smaller.
    """
    plan = make_plan(
        profile,
        PlanRequest.resolve(
            slo_ms=request.slo_ms,
            device_budget_bytes=tuple(min(pair) for pair in zip(request.budgets, arenas.room, strict=True)),
            rate_qps=request.rate_qps,
            llm=request.llm,
            n_devices=request.n_devices,
            epsilon=request.epsilon,
            percentile=request.percentile,
            coverage=request.coverage,
            slo_stage=request.slo_stage,
            page_bytes=request.page_bytes,
            scratch_bytes=arenas.scratch,
            scannable=request.scannable,
            unscannable=request.unscannable,
        ),
    )
    if plan.request == request:
        return plan
    small = any(have < asked for have, asked in zip(arenas.room, request.budgets, strict=True))
    note = f"; decided for open arenas of {sum(arenas.room):,} bytes, scratch included" if small else ""
    return replace(plan, request=request, reason=plan.reason + note)


def compare_plans(plan: Plan, base: Served, *, bandwidth_share: float) -> tuple[Comparison, I64, I64]:
    """``plan`` against ``base`` on ``plan``'s own profile; the lists that would come, hottest first, and leave."""
    curve, latency = plan.analysis.curve, plan.analysis.latency
    old = curve.of_lists(base.resident_lists)
    percentile = plan.request.percentile
    wanted = plan.resident_lists[plan.analysis.profile.list_sizes[plan.resident_lists] > 0]
    lists_in = wanted[base.present[wanted] != plan.list_device[wanted]]
    nbytes = int(curve.pages_by_rank[curve.rank[lists_in]].sum()) * curve.geometry.page_bytes
    comparison = Comparison(
        hit_rate_before=float(old.hit_rate.mean()),
        hit_rate_after=plan.predicted_hit_rate,
        latency_ms_before=latency.predict(curve, old, plan.batch, percentile).seconds * 1e3,
        latency_ms_after=plan.predicted_latency_ms(plan.batch, percentile),
        bytes_to_move=nbytes,
        move_s=_move_s(plan.analysis.profile, nbytes, bandwidth_share),
    )
    lists_out = np.flatnonzero((base.list_device >= 0) & (plan.list_device < 0))
    return comparison, lists_in, lists_out


def _move_s(profile: Profile, nbytes: int, bandwidth_share: float) -> float | None:
    try:
        transfer = fit_transfers(profile.transfers, pinned=False)
    except ProfileError:
        return None
    return nbytes / transfer.bytes_per_s / bandwidth_share
