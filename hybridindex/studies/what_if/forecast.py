"""A forecast: the curve, the designs, which one is chosen and why, sensitivities, and the nearest feasible goals.

Pure. Its sentences are written here; the command line only prints them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.studies.what_if.designs import Design, designs_of
from hybridindex.studies.what_if.residents import (
    CurvePoint,
    Resident,
    best_split,
    curve_of,
    least_split,
    split_residents,
)
from hybridindex.studies.what_if.setting import INPUTS, Setting

__all__ = ["Forecast", "Nearest", "forecast"]

#: Relative change of an input, up and down.
VARIATION = 0.1
#: Rates that differ by less count as equal; then fewer bytes decide.
_TIE = 0.01
#: Of the split, in the order in which they are shown.
_OUTCOMES = ("compliant_qps", "device_bytes", "ttft_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """Feasible goals near an infeasible one; None where there is none."""

    #: The highest rate at the requested SLO, and the smallest SLO at the requested rate.
    rate_qps: float | None
    slo_ms: float | None
    #: The field that prevents the goal, and how.
    binds: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forecast:
    """The answer to one what-if question. It is no plan: it cannot be applied."""

    setting: Setting
    designs: tuple[Design, ...]
    chosen: Design
    why: str
    curve: tuple[CurvePoint, ...]
    #: Input -> outcome -> elasticity: percent of outcome per percent of input; None where the goal cannot be met.
    sensitivity: Mapping[str, Mapping[str, float | None]]
    nearest: Nearest | None

    @property
    def feasible(self) -> bool:
        return self.nearest is None

    def to_data(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "feasible": self.feasible,
            "chosen": self.chosen.name,
            "why": self.why,
            "designs": [_design_data(design, self.setting) for design in self.designs],
            "curve": [_point_data(point) for point in self.curve],
            "sensitivity": {name: dict(outcomes) for name, outcomes in self.sensitivity.items()},
            "nearest": None if self.nearest is None else asdict(self.nearest),
        }


def forecast(setting: Setting) -> Forecast:
    """Answers one question. Takes about a thousand latency predictions: seconds."""
    residents = split_residents(setting)
    designs = designs_of(setting)
    chosen = _choose(designs, setting)
    nearest = None if chosen.meets(setting) else _nearest(designs, residents)
    return Forecast(
        setting=setting,
        designs=designs,
        chosen=chosen,
        why=_why(designs, chosen),
        curve=curve_of(residents),
        sensitivity=_sensitivity(setting, residents),
        nearest=nearest,
    )


def _choose(designs: tuple[Design, ...], setting: Setting) -> Design:
    """The design with the highest rate within the SLO, of those that meet the goal or else of all; on a tie the one
    with fewer bytes."""
    able = [d for d in designs if d.meets(setting)] or [d for d in designs if d.point is not None]
    top = max(d.compliant_qps for d in able)
    close = [d for d in able if d.compliant_qps >= top * (1.0 - _TIE)]
    return min(close, key=lambda d: d.point.device_bytes if d.point is not None else math.inf)


def _why(designs: tuple[Design, ...], chosen: Design) -> str:
    best = chosen.best
    assert best is not None
    others = []
    for other in designs:
        if other is chosen:
            continue
        if other.best is None:
            others.append(f"{other.name} is not possible: {other.refused}")
        elif other.compliant_qps == 0:
            others.append(f"{other.name} meets the SLO at no rate ({_limit(other.best)})")
        else:
            others.append(f"{other.name} sustains {other.compliant_qps:.4g} ({_limit(other.best)})")
    if chosen.compliant_qps == 0:
        return f"no design meets the SLO at any rate; {'; '.join(others)}"
    assert chosen.point is not None
    held = f"{chosen.name} sustains {chosen.compliant_qps:.4g} requests/s within the SLO at most"
    held += f", with {best.device_bytes / 1e9:.3g} GB of lists; the rate asked for takes"
    return f"{held} {chosen.point.device_bytes / 1e9:.3g} GB; {'; '.join(others)}"


def _limit(best: CurvePoint) -> str:
    if best.limited_by == "search":
        return "search limits it"
    return f"the LLM limits it, beside {best.device_bytes / 1e9:.3g} GB of index"


def _nearest(designs: tuple[Design, ...], residents: Resident) -> Nearest:
    rates = [design.compliant_qps for design in designs]
    points = [*curve_of(residents), *(d.point for d in designs if d.point is not None)]
    slos = [point.ttft_ms for point in points if point.ttft_ms is not None]
    binds, reason = _binding(residents)
    return Nearest(
        rate_qps=max(rates) or None,
        # Slightly more, so that asking for it succeeds despite rounding.
        slo_ms=min(slos) * (1 + 1e-6) if slos else None,
        binds=binds,
        reason=reason,
    )


def _binding(residents: Resident) -> tuple[str, str]:
    setting = residents.setting
    llm = setting.llm
    first_token_ms = 0.0 if llm is None or setting.slo_stage == "search" else llm.ttft_s * 1e3
    if first_token_ms >= setting.slo_ms:
        return "slo_ms", f"the LLM's first token alone takes {first_token_ms:.4g} of {setting.slo_ms:.4g} ms"
    points = curve_of(residents)
    if points[0].llm_qps < setting.rate_qps:
        return "llm", f"the LLM takes {points[0].llm_qps:.4g} requests/s with all of its KV cache"
    fast = [point for point in points if point.search_qps >= setting.rate_qps]
    if fast:
        return "kv_memory", (
            f"lists of {fast[0].device_bytes / 1e9:.3g} GB make search fast enough, and leave the LLM "
            f"{fast[0].llm_qps:.4g} requests/s"
        )
    quickest = max(points, key=lambda point: point.search_qps)
    held = f"with {quickest.coverage:.1%} of the lists search sustains {quickest.search_qps:.4g} requests/s"
    if residents.most < residents.problem.curve.useful_count():
        return "budget_bytes", f"devices hold no more than {residents.most} lists: {held}"
    return "slo_ms", f"{held} within the SLO, and more lists do not help"


def _sensitivity(setting: Setting, residents: Resident) -> dict[str, dict[str, float | None]]:
    kept = (least_split(residents) or best_split(residents)).device_bytes
    found = {}
    for name in INPUTS:
        down, up = (_varied_outcomes(setting, name, 1.0 + by, kept) for by in (-VARIATION, VARIATION))
        found[name] = {key: _elasticity(down[key], up[key]) for key in up}
    return found


def _varied_outcomes(setting: Setting, name: str, factor: float, kept: int) -> dict[str, float | None]:
    """None where the varied setting is not possible, as a machine is that no longer holds the LLM."""
    try:
        return _outcomes(setting.varied(name, factor), kept)
    except InvalidInputError:
        return dict.fromkeys(_OUTCOMES)


def _outcomes(setting: Setting, kept: int) -> dict[str, float | None]:
    """Outcomes of the split: rate within the SLO, bytes that the goal needs, TTFT with ``kept`` bytes of hot lists."""
    residents = split_residents(setting)
    problem = residents.problem
    pages = max(kept - problem.scratch_bytes, 0) // problem.curve.geometry.page_bytes
    count = int(np.searchsorted(problem.curve.prefix_pages, pages, side="right")) - 1
    least = least_split(residents)
    values = (
        best_split(residents).compliant_qps,
        None if least is None else float(least.device_bytes),
        residents.point(min(count, residents.most)).ttft_ms,
    )
    return dict(zip(_OUTCOMES, values, strict=True))


def _elasticity(down: float | None, up: float | None) -> float | None:
    if down is None or up is None or min(down, up) <= 0:
        return 0.0 if down == up == 0 else None
    return math.log(up / down) / math.log((1.0 + VARIATION) / (1.0 - VARIATION))


def _design_data(design: Design, setting: Setting) -> dict[str, Any]:
    return {
        "name": design.name,
        "refused": design.refused,
        "meets": design.meets(setting),
        "compliant_qps": design.compliant_qps,
        "at_rate": None if design.point is None else _point_data(design.point),
        "at_best": None if design.best is None else _point_data(design.best),
    }


def _point_data(point: CurvePoint) -> dict[str, Any]:
    data = asdict(point) | {"compliant_qps": point.compliant_qps, "limited_by": point.limited_by}
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in data.items()}
