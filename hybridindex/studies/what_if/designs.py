"""Three ways to use the devices and the rate that each sustains within the SLO: our split, a dedicated GPU, all-GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hybridindex.partitioner.models.throughput import throughput_model
from hybridindex.partitioner.solver import problem_of
from hybridindex.studies.what_if.residents import CurvePoint, Resident, best_split, least_split, split_residents
from hybridindex.studies.what_if.setting import Setting

__all__ = ["DESIGNS", "Design", "designs_of"]

DESIGNS = ("split", "dedicated-gpu", "all-gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """One way to use the devices; ``refused`` says why it is not possible here."""

    name: str
    refused: str = ""
    #: The design with the lists that it keeps for the requested rate.
    point: CurvePoint | None = None
    #: The design with the lists that allow the highest rate within the SLO; a split may keep others than in ``point``.
    best: CurvePoint | None = None

    @property
    def compliant_qps(self) -> float:
        return self.best.compliant_qps if self.best is not None else 0.0

    def meets(self, setting: Setting) -> bool:
        """Whether it meets rate and SLO."""
        return self.point is not None and self.point.compliant_qps >= setting.rate_qps


def designs_of(setting: Setting) -> tuple[Design, ...]:
    """All three, in the order of :data:`DESIGNS`."""
    return _split(setting), _dedicated(setting), _all_gpu(setting)


def _split(setting: Setting) -> Design:
    residents = split_residents(setting)
    best = best_split(residents)
    return Design(name="split", point=least_split(residents) or best, best=best)


def _dedicated(setting: Setting) -> Design:
    """One device holds the hottest lists that fit it; the others hold as many whole engines of the LLM as fit."""
    n, group = setting.n_devices, setting.llm_devices
    llm_qps = math.inf
    if setting.llm is not None:
        left, engines = (n - 1) // group, n // group
        if left < 1:
            return Design(
                name="dedicated-gpu",
                refused=f"{n} devices less one hold no engine of the LLM, which needs {group}",
            )
        llm_qps = throughput_model(setting.llm).at(0) * left / engines
    page_bytes = setting.analysis.curve.geometry.page_bytes
    analysis = setting.analysis.configured(page_bytes=page_bytes, n_devices=1)
    alone = replace(setting, analysis=analysis, n_devices=1, llm_devices=1, budget_bytes=setting.device_bytes)
    problem = problem_of(alone.analysis, alone.request()).at_rate(alone.rate_qps)
    residents = Resident(setting=alone, problem=problem, llm_qps=lambda nbytes: llm_qps)
    point = residents.point(residents.most)
    return Design(name="dedicated-gpu", point=point, best=point)


def _all_gpu(setting: Setting) -> Design:
    residents = split_residents(setting)
    problem = residents.problem
    needed = problem.prefix_bytes(problem.curve.nlist)
    held = problem.limit_pages * problem.curve.geometry.page_bytes + problem.scratch_bytes
    if needed > held or problem.cap_count() < problem.curve.nlist:
        return Design(
            name="all-gpu",
            refused=f"all lists take {needed / 1e9:,.3g} GB; {setting.n_devices} devices hold {held / 1e9:,.3g} GB "
            "beside the LLM",
        )
    point = residents.point(problem.curve.nlist)
    return Design(name="all-gpu", point=point, best=point)
