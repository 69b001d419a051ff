"""What devices hold of a plan, or would: the plan as it is placed, which may be less than was planned. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hybridindex.partitioner.decision import Verdict
from hybridindex.partitioner.models.coverage import CoverageCurve
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.solver import problem_of
from hybridindex.types import I64

__all__ = ["Held", "as_placed", "expected_hit_rate", "forecast_placed", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Some lists, counted; empty ones take no page and do not count."""

    lists: int
    #: Of their pages; without scratch.
    bytes: int

    @classmethod
    def of(cls, curve: CoverageCurve, list_ids: I64) -> Self:
        pages = curve.pages_by_rank[curve.rank[list_ids]]
        return cls(lists=int(np.count_nonzero(pages)), bytes=int(pages.sum()) * curve.geometry.page_bytes)

    def to_data(self) -> dict[str, Any]:
        return {"lists": self.lists, "bytes": self.bytes}


def forecast_placed(plan: Plan, room_bytes: Sequence[int]) -> Plan:
    """``plan`` as devices with ``room_bytes`` each (without scratch) would hold it: hottest lists first, one that does
    not fit is skipped."""
    curve = plan.analysis.curve
    left = [room // curve.geometry.page_bytes for room in room_bytes]
    there = np.full(plan.nlist, -1, dtype=np.int16)
    pages = curve.pages_by_rank[curve.rank[plan.resident_lists]]
    for list_id, n_pages in zip(plan.resident_lists.tolist(), pages.tolist(), strict=True):
        device = int(plan.list_device[list_id])
        if n_pages <= left[device]:
            left[device] -= n_pages
            there[list_id] = device
    return as_placed(plan, there)


def judge(plan: Plan, lists: I64) -> tuple[bool, float]:
    """Whether ``lists`` (m,) int64 on devices meet what ``plan`` was asked for, and the most requests/s within its
    SLO."""
    curve, problem = plan.analysis.curve, problem_of(plan.analysis, plan.request)
    work, nbytes = problem.work_of(lists), Held.of(curve, lists).bytes
    nbytes += problem.scratch_bytes if nbytes else 0
    slo_s = max(plan.request.search_slo_s, 1e-12)
    step = problem.step(work, int(lists.size), nbytes, slo_s)
    met = step.accepted and plan.request.search_slo_s > 0
    return met, max(problem.max_qps(work, nbytes, slo_s), (step.rate_qps or 0.0) if met else 0.0)


def _there(plan: Plan, list_device: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
    """Of each list of ``plan``, whether a device holds it, or it is empty and takes no page."""
    curve, wanted = plan.analysis.curve, plan.resident_lists
    found: npt.NDArray[np.bool_] = (list_device[wanted] >= 0) | (curve.pages_by_rank[curve.rank[wanted]] == 0)
    return found


def expected_hit_rate(plan: Plan, list_device: npt.NDArray[np.int16]) -> float:
    """The hit rate of those lists of ``plan`` that ``list_device`` (nlist,) int16 has on a device; -1 is the host."""
    there = _there(plan, list_device)
    return plan.predicted_hit_rate if there.all() else _hit_rate_of(plan, there.tobytes())


@lru_cache(maxsize=8)  # whoever looks at a daemon asks every second
def _hit_rate_of(plan: Plan, there: bytes) -> float:
    lists = plan.resident_lists[np.frombuffer(there, dtype=np.bool_)]
    return float(plan.analysis.curve.of_lists(lists).hit_rate.mean())


def as_placed(plan: Plan, list_device: npt.NDArray[np.int16]) -> Plan:
    """``plan`` with only those of its lists that ``list_device`` (nlist,) int16 has on a device; -1 is the host.

    ``plan`` itself where none is missing. Otherwise its numbers, verdict and reason are those of the lists that are
    there.
    """
    curve, wanted = plan.analysis.curve, plan.resident_lists
    there = _there(plan, list_device)
    if there.all():
        return plan
    lists = wanted[there]
    placed = np.full_like(plan.list_device, -1)
    placed[lists] = plan.list_device[lists]
    pages = [Held.of(curve, lists[placed[lists] == device]).bytes for device in range(plan.n_devices)]
    each = tuple(nbytes + scratch if nbytes else 0 for nbytes, scratch in zip(pages, plan.request.scratch, strict=True))
    work = curve.of_lists(lists)
    accepted, max_qps = judge(plan, lists)
    met = plan.feasible and accepted
    words = f"{lists.size} of the {wanted.size} planned lists have room on the devices"
    judged = "with them search meets the SLO" if met else "too few for the SLO"
    code_bytes = int(curve.prefix_bytes[-1])
    return replace(
        plan,
        verdict=Verdict.FEASIBLE if met else Verdict.INFEASIBLE,
        reason=f"{words}: {judged}; planned: {plan.reason}",
        coverage=lists.size / plan.nlist,
        coverage_bytes_fraction=int(curve.bytes_by_rank[curve.rank[lists]].sum()) / code_bytes if code_bytes else 0.0,
        device_bytes=sum(each),
        device_bytes_each=each,
        resident_lists=lists,
        list_device=placed,
        n_unplaced=plan.n_unplaced + int(wanted.size - lists.size),
        predicted_hit_rate=float(work.hit_rate.mean()),
        max_sustainable_qps=max_qps,
        _work=problem_of(plan.analysis, plan.request).work_of(lists),
    )
