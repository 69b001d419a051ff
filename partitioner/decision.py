"""What a plan decides: the placement, its inputs and its predictions. The record form and the explanation are in
:mod:`hybridindex.partitioner.plan`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from hybridindex.errors import InfeasiblePlanError, InvalidInputError
from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.lookahead_budget import LookaheadBudget, lookahead_budget, miss_curve_of
from hybridindex.partitioner.models.coverage import QueryWork
from hybridindex.partitioner.models.hitrate import HitRateName, distribution
from hybridindex.partitioner.models.transfer import fit_transfers
from hybridindex.partitioner.request import PlanRequest, check_batch
from hybridindex.partitioner.solver import SolverStep
from hybridindex.types import I64

__all__ = ["Decision", "Verdict", "refuse_infeasible"]


class Verdict(StrEnum):
    """Whether the target can be met. Equal to its plain string."""

    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """A placement with its inputs. An infeasible one is the best effort within the budget, and can be routed."""

    verdict: Verdict
    #: One sentence: why this verdict, and every cap that took effect.
    reason: str
    request: PlanRequest
    profile_id: int | None
    index_fingerprint: str
    hardware_fingerprint: str
    nlist: int
    nprobe: int
    k: int
    #: Fractions of lists and of code bytes that are resident.
    coverage: float
    coverage_bytes_fraction: float
    #: Total over devices: pages of the resident lists, and scratch where anything is resident.
    device_bytes: int
    #: The same, per device.
    device_bytes_each: tuple[int, ...]
    page_bytes: int
    #: (m,) int64 list ids, hottest first.
    resident_lists: I64
    #: (nlist,) int16 device of each list, -1 = host. Of codes, where searches scan codes.
    list_device: npt.NDArray[np.int16]
    #: (m,) int64 lists whose rows a device holds beside codes, for exact distances; and (nlist,) int16 that device,
    #: -1 = their rows are on the host only. None in plans of rows.
    resident_rows: I64
    row_device: npt.NDArray[np.int16]
    #: Lists that were wanted but fit on no device.
    n_unplaced: int
    #: Access work of the most loaded device over the even share.
    imbalance: float
    #: Mean hit rate by bytes.
    predicted_hit_rate: float
    #: Seconds that search may take without its queueing, and the batch size that it then runs at.
    tau_s: float
    batch: int
    #: Requests/s the plan was solved for; ``None`` when neither rate nor LLM was given.
    rate_qps: float | None
    #: Highest requests/s that this placement serves within the SLO with the headroom asked for; beside an LLM at most
    #: the LLM's throughput. A plan is feasible exactly where this is no less than ``rate_qps``.
    max_sustainable_qps: float
    #: Epsilon that the batching model gives for this plan, and the coverage solved with it; ``None`` without a rate.
    epsilon_solved: float | None
    coverage_at_epsilon_solved: float | None
    #: Smallest SLO that could be met with the same budget; ``None`` when feasible, or when no SLO can.
    nearest_slo_ms: float | None
    trace: tuple[SolverStep, ...]
    #: Hit-rate model in use, and (median, worst) absolute error of each on unseen queries.
    hit_rate_model: HitRateName
    hit_rate_errors: Mapping[str, tuple[float, float]]
    #: Host scan model in use, and the median relative error of each on unseen samples.
    host_model: str
    host_model_errors: Mapping[str, float]
    analysis: Analysis = field(repr=False)
    #: Under the hit-rate model in use.
    _work: QueryWork = field(repr=False)

    @property
    def coverage_bytes(self) -> float:
        """Fraction of code bytes that are resident."""
        return self.coverage_bytes_fraction

    @property
    def bits(self) -> int | None:
        """Of a dimension, where devices hold RaBitQ codes; None: they hold rows."""
        return self.analysis.profile.bits

    @property
    def bytes_by_precision(self) -> dict[str, int]:
        """Device bytes of the pages: of codes and of the rows beside them, or of rows alone; without scratch."""
        curve = self.analysis.curve
        lists, beside = (
            int(curve.pages_of(pieces).sum()) * curve.geometry.page_bytes
            for pieces in (self.resident_lists, self.nlist + self.resident_rows)
        )
        return {"rows": lists} if self.bits is None else {"codes": lists, "rows": beside}

    @property
    def resident_pieces(self) -> I64:
        """(m,) int64 pieces that devices hold: of the resident lists what is scanned, and nlist + l where they hold the
        rows of list l beside codes; each hottest first."""
        return np.concatenate((self.resident_lists, self.nlist + self.resident_rows))

    @property
    def piece_device(self) -> npt.NDArray[np.int16]:
        """(nlist,) int16 device of each piece, -1 = host; (2 nlist,) where searches scan codes."""
        return self.list_device if self.bits is None else np.concatenate((self.list_device, self.row_device))

    @property
    def predicted_row_hit_rate(self) -> float:
        """Mean part of a query's candidates whose rows are on a device: their exact distances are computed there."""
        rows = self.analysis.curve.rows
        if rows is None or not self.resident_rows.size:
            return 0.0
        hits, _ = rows.of_lists(self.resident_rows)
        return float(hits.sum() / max(float(rows.every.sum()), 1e-300))

    @property
    def predicted_row_faults(self) -> float | None:
        """Mean pages of rows that a query reads from disk; None: all rows are in memory."""
        faults = self._work.row_faults
        return None if faults is None else float(faults.mean())

    @property
    def feasible(self) -> bool:
        return self.verdict is Verdict.FEASIBLE

    @property
    def n_devices(self) -> int:
        return self.request.n_devices

    def predicted_min_hit_rate(self, batch: int) -> float:
        """E[smallest hit rate by bytes in a batch], by the model in use (Eq. 2).

        Raises:
            InvalidInputError: ``batch`` is no integer >= 1.
        """
        check_batch(batch)
        curve = self.analysis.curve
        model = distribution(curve, curve.of_lists(self.resident_lists), self.hit_rate_model)
        return min(model.expected_min(batch), self.predicted_hit_rate)

    def predicted_latency_ms(self, batch: int, percentile: float | None = None) -> float:
        """Milliseconds of one routed batch, without queueing: the median, or another percentile.

        Raises:
            InvalidInputError: ``batch`` is no integer >= 1, or ``percentile`` not between 0 and 100.
        """
        check_batch(batch)
        return self.analysis.latency.predict(self.analysis.curve, self._work, batch, percentile).seconds * 1e3

    def extrapolated(self, batch: int) -> bool:
        """True when predictions at ``batch`` go beyond what was measured."""
        return self.analysis.latency.extrapolated(batch)

    def copy_bytes_per_s(self, *, pinned: bool = False) -> float:
        """Measured bandwidth to a device; ``pinned``: from page-locked memory, where that was timed.

        Raises:
            ProfileError: the profile has no timed copies.
        """
        samples = self.analysis.profile.transfers
        return fit_transfers(samples, pinned=pinned and any(sample.pinned for sample in samples)).bytes_per_s

    def lookahead_budget(
        self, window_ms: float, *, share_bytes: int, batch: int = 1, pinned: bool = False
    ) -> LookaheadBudget:
        """Bytes that a session should move ahead of its search while the LLM generates for ``window_ms``.

        Args:
            window_ms: generation time that copies can hide behind; see ``LLMProfile.generation_s``.
            share_bytes: most bytes of the arena that lookahead may take.
            batch: queries that will share the search.
            pinned: lists come from page-locked memory.

        Raises:
            InvalidInputError: a negative window or share, or ``batch`` below 1.
            ProfileError: the profile has no timed copies.
        """
        check_batch(batch)
        if not (math.isfinite(window_ms) and window_ms >= 0):
            raise InvalidInputError(f"window_ms is {window_ms}; give a finite number of milliseconds >= 0")
        latency, curve = self.analysis.latency, self.analysis.curve
        # Of lists alone: rows beside codes are no lists that are there.
        there = int(curve.pages_by_rank[curve.rank[self.resident_lists]].sum()) * curve.geometry.page_bytes
        return lookahead_budget(
            bandwidth_bytes_per_s=self.copy_bytes_per_s(pinned=pinned),
            t_llm_s=window_ms / 1e3,
            miss_curve=miss_curve_of(curve, resident_bytes=there),
            host_scan_s=float(latency.parts(curve, curve.at(0), batch).host_s.mean()),
            device_scan_s=float(latency.parts(curve, curve.at(curve.nlist), batch).device_s.mean()),
            share_bytes=share_bytes,
        )


def refuse_infeasible(plan: Decision, *, force: bool) -> None:
    """Holds the rule that nobody applies an infeasible plan by mistake.

    Raises:
        InfeasiblePlanError: the plan is infeasible, and ``force`` is false.
    """
    if not force and not plan.feasible:
        raise InfeasiblePlanError(
            f"the plan is infeasible and was not applied: {plan.reason}; force (--force) applies it all the same"
        )
