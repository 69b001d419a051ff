"""What the next plan is asked for: one rule for the library, the daemon, the command line and the refresh.

Pure. What the user set stays set until the user says otherwise, and a new SLO or budget always decides the placement:

=====================  ==================  ======================================================
value                  asked for now       not asked for
=====================  ==================  ======================================================
SLO                    the new value       as in force; without a plan in force an error
budget                 the new value       as in force; else as configured; else an error
rate, LLM, epsilon,    the new value       as in force; else the default of :class:`PlanRequest`
percentile, SLO stage,
hit-rate model,
headroom, row cache
coverage               the table below
devices and pages      never               as configured; a refresh keeps those that are open
=====================  ==================  ======================================================

===================  =====================  ===========================  ==============================
coverage in force    coverage asked for     SLO or budget asked for      coverage of the next plan
===================  =====================  ===========================  ==============================
no plan in force     nothing, or "solve"    (needed anyway)              solved
no plan in force     a fraction             (needed anyway)              fixed at the fraction
solved or fixed      "solve"                yes or no                    solved
solved or fixed      a fraction             no                           fixed at the fraction
solved or fixed      a fraction             yes                          an error that names both
solved               nothing                yes or no                    solved
fixed                nothing                no                           fixed as before
fixed                nothing                yes                          an error that names both
===================  =====================  ===========================  ==============================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from hybridindex.errors import InvalidInputError, PlanConflictError
from hybridindex.paging import DEFAULT_PAGE_BYTES
from hybridindex.partitioner.request import PlanRequest, SloStage
from hybridindex.types import HitRateChoice, LLMProfile

__all__ = ["ALL_IN_MEMORY", "SOLVE", "PlanChanges", "PlanDevices", "replan"]

#: The coverage that is not fixed.
SOLVE: Final = "solve"
#: The row cache of rows that are all in memory.
ALL_IN_MEMORY: Final = "all"
#: What decides the placement wherever it is asked for.
_DECIDING: Final = ("slo_ms", "device_budget_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChanges:
    """What a user asks for now; None: nothing. :func:`replan` checks the values."""

    slo_ms: float | None = None
    device_budget_bytes: int | Sequence[int] | None = None
    rate_qps: float | None = None
    llm: LLMProfile | None = None
    epsilon: float | None = None
    percentile: float | None = None
    #: A fraction of lists to fix, or "solve".
    coverage: float | Literal["solve"] | None = None
    slo_stage: SloStage | None = None
    hit_rate_model: HitRateChoice | None = None
    headroom: float | None = None
    #: Memory for rows on disk, or "all": they are in memory.
    row_cache_bytes: int | Literal["all"] | None = None

    def given(self) -> dict[str, Any]:
        """What is asked for, by name."""
        return _given(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDevices:
    """What the configuration gives: devices, and how their tier stores lists; see :meth:`PlanRequest.resolve`."""

    n_devices: int = 1
    #: Where neither the user nor a plan in force says any.
    device_budget_bytes: int | Sequence[int] | None = None
    page_bytes: int = DEFAULT_PAGE_BYTES
    scratch_bytes: int | Sequence[int] | None = None
    fixed_bytes: int = 0
    centroid_bytes: int = 0
    code_bytes: int = 0
    scannable: bool = True
    unscannable: str = ""


def replan(current: PlanRequest | None, changes: PlanChanges, devices: PlanDevices | None) -> PlanRequest:
    """The request of the next plan.

    Args:
        current: of the plan in force; None without one.
        devices: None: those of ``current``, as they are open.

    Raises:
        InvalidInputError: a value is missing or out of its range.
        PlanConflictError: an SLO or budget beside a fixed coverage.
    """
    asked = changes.given()
    if devices is None:
        assert current is not None, "without a plan in force, the devices have to be given"
        devices = PlanDevices(
            n_devices=current.n_devices,
            page_bytes=current.page_bytes,
            # It follows from the budget.
            scratch_bytes=None if "device_budget_bytes" in asked else current.scratch,
            fixed_bytes=current.fixed_bytes,
            centroid_bytes=current.centroid_bytes,
            code_bytes=current.code_bytes,
            scannable=current.scannable,
            unscannable=current.unscannable,
        )
    values = {**_given(devices), **({} if current is None else _kept(current)), **asked}
    for name in _DECIDING:
        if name not in values:
            raise InvalidInputError(f"{name} is missing; it is required without a plan in force")
    if isinstance(coverage := values.get("coverage"), str):
        if coverage != SOLVE:
            raise InvalidInputError(f"coverage is {coverage!r}; give a fraction of lists in [0, 1], or {SOLVE!r}")
        values["coverage"] = None
    if values.get("row_cache_bytes") == ALL_IN_MEMORY:
        values["row_cache_bytes"] = None
    request = PlanRequest.resolve(**values)
    new = [f"{name} {asked[name]!r}" for name in _DECIDING if name in asked]
    if current is not None and request.coverage is not None and new:
        whose = "" if "coverage" in asked else ", fixed by the plan in force"
        raise PlanConflictError(
            f"coverage is {request.coverage!r}{whose}, so {' and '.join(new)} would not decide the placement; give "
            f"coverage {SOLVE!r} with it, or change coverage alone"
        )
    return request


def _given(values: PlanChanges | PlanDevices) -> dict[str, Any]:
    return {f.name: value for f in fields(values) if (value := getattr(values, f.name)) is not None}


def _kept(current: PlanRequest) -> dict[str, Any]:
    same = ("slo_ms", "rate_qps", "llm", "epsilon", "percentile", "coverage", "slo_stage", "hit_rate_model", "headroom")
    also = (*same, "fill_bytes", "row_cache_bytes")
    return {"device_budget_bytes": current.budgets, **{name: getattr(current, name) for name in also}}
