"""A new plan beside the one in force: what changing to it would bring, and what it would move. Nothing moves here.

What it brings is told of the lists that devices have room for (:mod:`hybridindex.plans.placed`), before and after.

The daemon, the command line, the page and the refresh show one :class:`Proposal`. Computes of values only, so that
another process can do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hybridindex.errors import ProfileError
from hybridindex.partitioner.decision import Verdict, refuse_infeasible
from hybridindex.partitioner.models.transfer import fit_transfers
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.solver import problem_of
from hybridindex.plans.placed import Held, as_placed, forecast_placed, in_pages, judge, pieces_on
from hybridindex.plans.stored import plan_summary
from hybridindex.types import I64, Profile

__all__ = ["Comparison", "Proposal", "Served", "Weigh", "Weighed", "compare_plans", "held_now", "propose", "weigh_plan"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """What a new plan is compared with. Where searches scan codes, "lists" are pieces: see ``Plan.resident_pieces``."""

    #: (m,) int64 lists of the plan in force that devices hold, or shall hold where they are still empty.
    resident_lists: I64
    #: (nlist,) int16 with -1 = host: as the plan in force decided; (2 nlist,) of pieces.
    list_device: npt.NDArray[np.int16]
    #: The same: where lists really are. Without pieces of rows no device holds any.
    present: npt.NDArray[np.int16]
    #: (m,) int64 lists in page-locked host memory, from where copies are faster.
    page_locked: I64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    #: Most bytes of a page of the open devices; None: they open with the new plan, and have its pages.
    page_bytes: int | None = None

    @classmethod
    def by(
        cls, plan: Plan | None, present: npt.ArrayLike, page_locked: npt.ArrayLike = (), page_bytes: int | None = None
    ) -> Self:
        """``plan`` None: the host scans everything."""
        there = np.asarray(present, dtype=np.int16)
        return cls(
            resident_lists=np.empty(0, dtype=np.int64)
            if plan is None
            else plan.resident_pieces[pieces_on(there, plan.resident_pieces) >= 0],
            list_device=there if plan is None else plan.piece_device,
            present=there,
            page_locked=np.asarray(page_locked, dtype=np.int64),
            page_bytes=page_bytes,
        )

    @classmethod
    def nowhere(cls, plan: Plan | None, nlist: int) -> Self:
        """By devices that are still empty."""
        empty = np.full(nlist, -1, dtype=np.int16)
        lists = np.empty(0, dtype=np.int64) if plan is None else plan.resident_pieces
        return cls(resident_lists=lists, list_device=empty, present=empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two plans on the profile of the new one and at its SLO, and what it takes to go from one to the other."""

    hit_rate_before: float
    hit_rate_after: float
    #: Of a batch, at the SLO's percentile.
    latency_ms_before: float
    latency_ms_after: float
    #: Page bytes to copy; lists that a device already holds cost nothing.
    bytes_to_move: int
    #: None: copies were never timed.
    move_s: float | None
    #: Whether the lists of each meet the new plan's SLO, at its rate.
    feasible_before: bool = False
    feasible_after: bool = True
    #: Most requests/s within that SLO.
    max_qps_before: float = 0.0
    max_qps_after: float = 0.0

    @property
    def loses_feasibility(self) -> bool:
        return self.feasible_before and not self.feasible_after

    @property
    def hit_rate_gain(self) -> float:
        return self.hit_rate_after - self.hit_rate_before

    @property
    def latency_gain(self) -> float:
        """Fraction by which the predicted latency falls; negative where it rises."""
        before = self.latency_ms_before
        return (before - self.latency_ms_after) / before if before > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weighed:
    """What applying a plan would do."""

    #: The plan as the devices would hold it; the plan itself where all of it has room.
    placed: Plan
    #: Of what serves and ``placed``.
    comparison: Comparison
    #: (m,) int64 lists, or pieces, that come to a device, or to another one, hottest first; and that leave, ascending.
    lists_in: I64
    lists_out: I64


#: :func:`weigh_plan`, or the same in another process.
Weigh = Callable[[Plan, Served, float, Sequence[int] | None], Weighed]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proposal:
    """A plan that could be applied, and what is known of it. None: it was not asked."""

    reason: str
    #: What would serve, and what serves; None: the host alone.
    plan: Plan = field(repr=False)
    base: Plan | None = field(repr=False)
    #: ``plan`` as the devices hold it, or are going to.
    placed: Plan = field(repr=False)
    #: What they hold before it is applied, whoever brought it.
    resident: Held
    #: Of ``base`` and ``placed``.
    comparison: Comparison
    #: (m,) int64 list ids that come to a device, or to another one, hottest first; and that leave, ascending.
    lists_in: I64 = field(repr=False)
    lists_out: I64 = field(repr=False)
    #: Part of the time that its move may copy.
    bandwidth_share: float
    #: Number of the proposal in its refresher, from 1, and when it was made (ISO 8601, UTC).
    number: int | None = None
    created_at: str | None = None
    #: Recent queries that it rests on.
    n_queries: int | None = None
    #: Why the refresh would decline it by itself; empty where it is worth its move.
    objection: str | None = None
    #: Stage -> seconds that it took.
    stage_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def worthwhile(self) -> bool | None:
        return None if self.objection is None else not self.objection

    @property
    def bytes_to_move(self) -> int:
        return self.comparison.bytes_to_move

    def refuse_infeasible(self, *, force: bool) -> None:
        """Raises InfeasiblePlanError where it cannot meet its SLO with the lists that have room, unless ``force``."""
        refuse_infeasible(self.placed, force=force)

    def placed_as(self, piece_device: npt.NDArray[np.int16]) -> Proposal:
        """The proposal told of the pieces that devices hold after it was applied; as ``Router.piece_device``."""
        placed = as_placed(in_pages(self.plan, self.placed.request.page_bytes), piece_device)
        comparison = replace(
            self.comparison,
            hit_rate_after=placed.predicted_hit_rate,
            latency_ms_after=_latency_ms(self.plan, placed),
            feasible_after=placed.feasible,
            max_qps_after=placed.max_sustainable_qps,
        )
        return replace(self, placed=placed, comparison=comparison)

    def to_data(self) -> dict[str, Any]:
        """JSON-able; lists by number only."""
        both = self.comparison
        before = 0 if self.base is None else self.base.device_bytes
        return {
            "number": self.number,
            "reason": self.reason,
            "created_at": self.created_at,
            "n_queries": self.n_queries,
            "plan": plan_summary(self.plan),
            "current": None if self.base is None else plan_summary(self.base),
            "hit_rate_before": both.hit_rate_before,
            "hit_rate_after": both.hit_rate_after,
            "latency_ms_before": both.latency_ms_before,
            "latency_ms_after": both.latency_ms_after,
            "verdict_before": str(Verdict.FEASIBLE if both.feasible_before else Verdict.INFEASIBLE),
            "max_qps_before": both.max_qps_before,
            "max_qps_after": both.max_qps_after,
            "resident": self.resident.to_data(),
            "planned": _in_short(self.plan, self.plan),
            "placed": {**_in_short(self.plan, self.placed), "reason": self.placed.reason},
            "gain": {
                "latency_ms": both.latency_ms_before - both.latency_ms_after,
                "hit_rate": both.hit_rate_gain,
                "device_bytes": before - self.placed.device_bytes,
                "batch": max(1, self.plan.batch),
            },
            "lists_to_move": int(self.lists_in.size),
            "bytes_to_move": both.bytes_to_move,
            "lists_to_drop": int(self.lists_out.size),
            "move_s": both.move_s,
            "bandwidth_share": self.bandwidth_share,
            "worthwhile": self.worthwhile,
            "objection": self.objection,
            "stage_seconds": dict(self.stage_seconds),
        }


def propose(
    plan: Plan,
    base: Plan | None,
    served: Served,
    *,
    reason: str,
    bandwidth_share: float,
    room_bytes: Sequence[int] | None = None,
    weigh: Weigh | None = None,
) -> Proposal:
    """``plan`` beside ``base``, made without a refresh. ``weigh``: None: :func:`weigh_plan`, whose arguments the others
    are."""
    weighed = (weigh or weigh_plan)(plan, served, bandwidth_share, room_bytes)
    return Proposal(
        reason=reason,
        plan=plan,
        base=base,
        placed=weighed.placed,
        resident=held_now(weighed.placed, served.present),
        comparison=weighed.comparison,
        lists_in=weighed.lists_in,
        lists_out=weighed.lists_out,
        bandwidth_share=bandwidth_share,
    )


def weigh_plan(plan: Plan, served: Served, bandwidth_share: float, room_bytes: Sequence[int] | None = None) -> Weighed:
    """``plan`` against what serves. ``room_bytes``: of each device, without scratch; None: as much as it needs."""
    if served.page_bytes is not None:
        plan = in_pages(plan, served.page_bytes)
    placed = plan if room_bytes is None else forecast_placed(plan, room_bytes)
    comparison, lists_in, lists_out = compare_plans(placed, served, bandwidth_share=bandwidth_share)
    return Weighed(placed=placed, comparison=comparison, lists_in=lists_in, lists_out=lists_out)


def held_now(plan: Plan, present: npt.NDArray[np.int16]) -> Held:
    """What devices hold by ``present``, as in :class:`Served`; ``plan``: any of this index, for the size of pages."""
    return Held.of(plan.analysis.curve, np.flatnonzero(present >= 0))


def compare_plans(plan: Plan, base: Served, *, bandwidth_share: float) -> tuple[Comparison, I64, I64]:
    """``plan`` against ``base`` on ``plan``'s own profile; the lists that would come, hottest first, and leave."""
    curve, latency = plan.analysis.curve, plan.analysis.latency
    of_rows = base.resident_lists >= plan.nlist
    old = base.resident_lists[~of_rows], base.resident_lists[of_rows] - plan.nlist
    # Under the hit-rate model that predicted the plan's latency.
    old_work = problem_of(plan.analysis, plan.request).work_of(*old)
    batch, percentile = max(1, plan.batch), plan.request.percentile
    wanted, planned = plan.resident_pieces, plan.piece_device
    wanted = wanted[plan.analysis.profile.list_sizes[wanted % plan.nlist] > 0]
    lists_in = wanted[pieces_on(base.present, wanted) != planned[wanted]]
    pages = curve.pages_of(lists_in)
    nbytes, locked = (
        int(some.sum()) * curve.geometry.page_bytes for some in (pages, pages[np.isin(lists_in, base.page_locked)])
    )
    meets_before, max_qps_before = judge(plan, base.resident_lists)
    comparison = Comparison(
        hit_rate_before=float(curve.of_lists(old[0]).hit_rate.mean()),
        hit_rate_after=plan.predicted_hit_rate,
        latency_ms_before=latency.predict(curve, old_work, batch, percentile).seconds * 1e3,
        latency_ms_after=plan.predicted_latency_ms(batch, percentile),
        bytes_to_move=nbytes,
        move_s=_move_s(plan.analysis.profile, nbytes - locked, locked, bandwidth_share),
        feasible_before=meets_before,
        feasible_after=plan.feasible,
        max_qps_before=max_qps_before,
        max_qps_after=plan.max_sustainable_qps,
    )
    had = np.flatnonzero(base.list_device >= 0)
    lists_out = had[(pieces_on(base.present, had) >= 0) & (pieces_on(planned, had) < 0)]
    return comparison, lists_in, lists_out


def _latency_ms(plan: Plan, placed: Plan) -> float:
    """Of a batch as ``plan`` expects it, at its percentile, with the lists of ``placed``."""
    return placed.predicted_latency_ms(max(1, plan.batch), plan.request.percentile)


def _in_short(plan: Plan, placed: Plan) -> dict[str, Any]:
    return {
        **Held.of(placed.analysis.curve, placed.resident_pieces).to_data(),
        "verdict": str(placed.verdict),
        "hit_rate": placed.predicted_hit_rate,
        "latency_ms": _latency_ms(plan, placed),
    }


def _move_s(profile: Profile, nbytes: int, locked_bytes: int, bandwidth_share: float) -> float | None:
    """Seconds for ``nbytes`` from ordinary memory and ``locked_bytes`` from page-locked memory; None: copies were never
    timed."""
    try:
        plain = fit_transfers(profile.transfers, pinned=False)
    except ProfileError:
        return None
    timed = any(sample.pinned for sample in profile.transfers)
    locked = fit_transfers(profile.transfers, pinned=True) if timed else plain
    return (nbytes / plain.bytes_per_s + locked_bytes / locked.bytes_per_s) / bandwidth_share
