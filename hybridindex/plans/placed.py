"""What devices hold of a plan, or would: the plan as it is placed, which may be less than was planned. Pure.

Where searches scan codes, a list has two pieces, its code and its rows: see ``Plan.resident_pieces``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hybridindex.paging import PageGeometry
from hybridindex.partitioner.decision import Verdict
from hybridindex.partitioner.models.coverage import CoverageCurve
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.solver import problem_of
from hybridindex.types import I64

__all__ = ["Held", "as_placed", "expected_hit_rate", "forecast_placed", "in_pages", "judge", "pieces_on"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Some pieces of lists, counted; empty ones take no page and do not count."""

    #: What is scanned of so many lists, and the rows of so many beside codes.
    lists: int
    rows: int
    #: Of their pages; without scratch.
    bytes: int

    @classmethod
    def of(cls, curve: CoverageCurve, pieces: I64) -> Self:
        pages, beside = curve.pages_of(pieces), pieces >= curve.nlist
        lists, rows = np.count_nonzero(pages[~beside]), np.count_nonzero(pages[beside])
        return cls(lists=int(lists), rows=int(rows), bytes=int(pages.sum()) * curve.geometry.page_bytes)

    def to_data(self) -> dict[str, Any]:
        return {"lists": self.lists, "rows": self.rows, "bytes": self.bytes}


def forecast_placed(plan: Plan, room_bytes: Sequence[int]) -> Plan:
    """``plan`` as devices with ``room_bytes`` each (without scratch) would hold it: hottest lists first, one that does
    not fit is skipped."""
    curve = plan.analysis.curve
    left = [room // curve.geometry.page_bytes for room in room_bytes]
    there, planned = np.full_like(plan.piece_device, -1), plan.piece_device
    pieces = plan.resident_pieces
    for piece, n_pages in zip(pieces.tolist(), curve.pages_of(pieces).tolist(), strict=True):
        device = int(planned[piece])
        if n_pages <= left[device]:
            left[device] -= n_pages
            there[piece] = device
    return as_placed(plan, there)


def in_pages(plan: Plan, page_bytes: int) -> Plan:
    """``plan`` on devices that are open with pages of at most ``page_bytes`` bytes: the same lists, and the bytes that
    they take there. ``plan`` itself where it was made for such pages."""
    now = plan.analysis.curve.geometry
    geometry = PageGeometry.for_code_size(now.code_size, page_bytes, group_rows=now.group_rows)
    if geometry == now:
        return plan
    request = replace(plan.request, page_bytes=page_bytes)
    analysis = plan.analysis.configured_for(request)
    there = replace(plan, request=request, analysis=analysis, page_bytes=geometry.page_bytes)
    each = _bytes_each(there, plan.resident_pieces)
    accepted, max_qps = judge(there, plan.resident_pieces)
    words = f"made for pages of {plan.page_bytes:,} bytes, and the open devices have {geometry.page_bytes:,}"
    return replace(
        there,
        verdict=Verdict.FEASIBLE if plan.feasible and accepted else Verdict.INFEASIBLE,
        reason=f"{plan.reason}; {words}",
        device_bytes=sum(each),
        device_bytes_each=each,
        max_sustainable_qps=max_qps,
    )


def judge(plan: Plan, pieces: I64) -> tuple[bool, float]:
    """Whether ``pieces`` (m,) int64 on devices meet what ``plan`` was asked for, and the most requests/s within its
    SLO."""
    curve, problem = plan.analysis.curve, problem_of(plan.analysis, plan.request)
    lists, rows = _by_form(plan, pieces)
    work, nbytes = problem.work_of(lists, rows), Held.of(curve, pieces).bytes
    nbytes += problem.scratch_bytes if nbytes else 0
    slo_s = max(plan.request.search_slo_s, 1e-12)
    step = problem.step(work, int(lists.size), nbytes, slo_s, int(rows.size))
    met = step.accepted and plan.request.search_slo_s > 0
    return met, max(problem.max_qps(work, nbytes, slo_s), (step.rate_qps or 0.0) if met else 0.0)


def pieces_on(piece_device: npt.NDArray[np.int16], pieces: I64) -> npt.NDArray[np.int16]:
    """Devices of ``pieces`` (m,) by an array that may end with the scanned ones: no device holds the others."""
    return np.append(piece_device, np.int16(-1))[np.minimum(pieces, len(piece_device))]


def _bytes_each(plan: Plan, pieces: I64) -> tuple[int, ...]:
    """Bytes of ``pieces`` on each device where ``plan`` puts them, scratch included."""
    devices = pieces_on(plan.piece_device, pieces)
    pages = [Held.of(plan.analysis.curve, pieces[devices == device]).bytes for device in range(plan.n_devices)]
    return tuple(nbytes + scratch if nbytes else 0 for nbytes, scratch in zip(pages, plan.request.scratch, strict=True))


def _by_form(plan: Plan, pieces: I64) -> tuple[I64, I64]:
    """The lists of which ``pieces`` are what is scanned, and those of which they are the rows."""
    return pieces[pieces < plan.nlist], pieces[pieces >= plan.nlist] - plan.nlist


def _there(plan: Plan, wanted: I64, piece_device: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
    """Of each of the pieces ``wanted``, whether a device holds it, or it is empty and takes no page."""
    found: npt.NDArray[np.bool_] = (pieces_on(piece_device, wanted) >= 0) | (plan.analysis.curve.pages_of(wanted) == 0)
    return found


def expected_hit_rate(plan: Plan, list_device: npt.NDArray[np.int16]) -> float:
    """The hit rate of those lists of ``plan`` that ``list_device`` (nlist,) int16 has on a device; -1 is the host."""
    there = _there(plan, plan.resident_lists, list_device)
    return plan.predicted_hit_rate if there.all() else _hit_rate_of(plan, there.tobytes())


@lru_cache(maxsize=8)  # whoever looks at a daemon asks every second
def _hit_rate_of(plan: Plan, there: bytes) -> float:
    lists = plan.resident_lists[np.frombuffer(there, dtype=np.bool_)]
    return float(plan.analysis.curve.of_lists(lists).hit_rate.mean())


def as_placed(plan: Plan, piece_device: npt.NDArray[np.int16]) -> Plan:
    """``plan`` with only those of its pieces that ``piece_device`` int16 has on a device; -1 is the host.

    ``plan`` itself where none is missing. Otherwise its numbers, verdict and reason are those of the pieces that are
    there.

    Args:
        piece_device: (nlist,), or (2 nlist,) where rows lie beside codes.
    """
    curve, wanted = plan.analysis.curve, plan.resident_pieces
    there = _there(plan, wanted, piece_device)
    if there.all():
        return plan
    pieces = wanted[there]
    lists, rows = _by_form(plan, pieces)
    placed, beside = np.full_like(plan.list_device, -1), np.full_like(plan.row_device, -1)
    placed[lists] = plan.list_device[lists]
    beside[rows] = plan.row_device[rows]
    each = _bytes_each(plan, pieces)
    work = curve.of_lists(lists)
    accepted, max_qps = judge(plan, pieces)
    met = plan.feasible and accepted
    words = f"{lists.size} of the {plan.resident_lists.size} planned lists have room on the devices"
    if plan.resident_rows.size:
        words += f", and the rows of {rows.size} of {plan.resident_rows.size}"
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
        resident_rows=rows,
        row_device=beside,
        n_unplaced=plan.n_unplaced + int(wanted.size - pieces.size),
        predicted_hit_rate=float(work.hit_rate.mean()),
        max_sustainable_qps=max_qps,
        _work=problem_of(plan.analysis, plan.request).work_of(lists, rows),
    )
