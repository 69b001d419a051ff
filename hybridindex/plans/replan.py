"""What the next plan is asked for: one rule for the library, the daemon, the command line and the refresh.

Pure. What the user set stays set until the user says otherwise, and a new SLO or budget always decides the placement:

=====================  ==================  ======================================================
value                  asked for now       not asked for
=====================  ==================  ======================================================
SLO                    the new value       as in force; without a plan in force an error
budget                 the new value       as in force; else as configured; else an error
rate, LLM, epsilon,    the new value       as in force; else the default of :class:`PlanRequest`
percentile, SLO stage
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

from hybridindex.errors import InvalidInputError
from hybridindex.paging import DEFAULT_PAGE_BYTES
from hybridindex.partitioner.request import PlanRequest, SloStage
from hybridindex.types import LLMProfile

__all__ = ["SOLVE", "PlanChanges", "PlanDevices", "replan"]

#: The coverage that is not fixed.
SOLVE: Final = "solve"
#: What decides the placement wherever it is asked for.
_DECIDING: Final = ("slo_ms", "device_budget_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChanges:
    """What a user asks for now; None: nothing. The values are checked by :func:`replan`."""

    slo_ms: float | None = None
    device_budget_bytes: int | Sequence[int] | None = None
    rate_qps: float | None = None
    llm: LLMProfile | None = None
    epsilon: float | None = None
    percentile: float | None = None
    #: A fraction of lists to fix, or "solve".
    coverage: float | Literal["solve"] | None = None
    slo_stage: SloStage | None = None

    def given(self) -> dict[str, Any]:
        """What is asked for, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDevices:
    """What the configuration gives: devices, and how their tier stores lists."""

    n_devices: int = 1
    #: Budgets where neither the user nor a plan in force says any.
    device_budget_bytes: int | Sequence[int] | None = None
    page_bytes: int = DEFAULT_PAGE_BYTES
    #: What the tier takes of each budget besides lists and scratch.
    fixed_bytes: int = 0
    #: Whether the tier can scan the codec, and why not.
    scannable: bool = True
    unscannable: str = ""


def replan(current: PlanRequest | None, changes: PlanChanges, devices: PlanDevices | None) -> PlanRequest:
    """The request of the next plan.

    Args:
        current: of the plan in force; None without one.
        devices: None: those of ``current``, as they are open.

    Raises:
        InvalidInputError: a value that is missing, out of its range, or in contradiction to a fixed coverage.
    """
    given = changes.given()
    coverage = _coverage(current, given)
    if current is not None:
        given = {**_kept(current), **given}
    if devices is not None:
        configured = devices.device_budget_bytes
        if configured is not None:
            given.setdefault("device_budget_bytes", configured)
        given.update(
            n_devices=devices.n_devices,
            page_bytes=devices.page_bytes,
            fixed_bytes=devices.fixed_bytes,
            scannable=devices.scannable,
            unscannable=devices.unscannable,
        )
    else:
        assert current is not None, "without a plan in force somebody has to say which devices"
        given.update(
            n_devices=current.n_devices,
            page_bytes=current.page_bytes,
            scratch_bytes=current.scratch,
            scannable=current.scannable,
            unscannable=current.unscannable,
        )
    for name in _DECIDING:
        if name not in given:
            raise InvalidInputError(f"{name} is missing; without a plan in force it has to be given")
    return PlanRequest.resolve(**{**given, "coverage": coverage})


def _kept(current: PlanRequest) -> dict[str, Any]:
    return {
        "slo_ms": current.slo_ms,
        "device_budget_bytes": current.budgets,
        "rate_qps": current.rate_qps,
        "llm": current.llm,
        "epsilon": current.epsilon,
        "percentile": current.percentile,
        "slo_stage": current.slo_stage,
    }


def _coverage(current: PlanRequest | None, given: dict[str, Any]) -> float | None:
    """By the table above."""
    asked = given.get("coverage")
    if isinstance(asked, str):
        if asked != SOLVE:
            raise InvalidInputError(f"coverage is {asked!r}; give a fraction of lists in [0, 1], or {SOLVE!r}")
        return None
    if current is None:
        return asked
    fixed, whose = (asked, "") if asked is not None else (current.coverage, ", fixed by the plan in force")
    new = [name for name in _DECIDING if name in given]
    if fixed is not None and new:
        said = " and ".join(f"{name} {given[name]!r}" for name in new)
        raise InvalidInputError(
            f"coverage is {fixed!r}{whose}, so {said} would not decide the placement; give coverage {SOLVE!r} with it, "
            "or change coverage alone"
        )
    return fixed
