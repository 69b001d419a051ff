"""One what-if question, and the same question with one input varied."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.models.throughput import throughput_model
from hybridindex.partitioner.request import PlanRequest, SloStage
from hybridindex.studies.what_if.fleet import LLMService
from hybridindex.types import DEFAULT_HEADROOM, HitRateChoice, LLMProfile

__all__ = ["INPUTS", "Setting"]

#: Inputs that a forecast varies.
INPUTS = ("rate", "slo", "hbm_bandwidth", "kv_memory", "skew", "host_latency")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """Machine, load and goal. Raises InvalidInputError, which names the field."""

    #: Analysis of the profile, scaled to ``n_devices`` of the machine in question.
    analysis: Analysis
    rate_qps: float
    slo_ms: float
    n_devices: int
    #: Bytes of each device for the index, scratch included: beside the LLM, and on a device without the LLM.
    budget_bytes: int
    device_bytes: int
    llm: LLMProfile | None = None
    #: What the LLM's profile was computed from; None where it was measured.
    service: LLMService | None = None
    #: Devices that one engine of the LLM needs.
    llm_devices: int = 1
    slo_stage: SloStage = "search"
    percentile: float = 90.0
    epsilon: float | None = None
    hit_rate_model: HitRateChoice = "best"
    headroom: float = DEFAULT_HEADROOM

    def __post_init__(self) -> None:
        self.request()
        if not 1 <= self.llm_devices <= self.n_devices:
            raise InvalidInputError(f"llm_devices is {self.llm_devices}; n_devices is {self.n_devices}")
        if self.device_bytes < self.budget_bytes:
            raise InvalidInputError(f"device_bytes is {self.device_bytes}, budget_bytes {self.budget_bytes}: give more")

    def request(self) -> PlanRequest:
        """The goal as the request of a plan."""
        return PlanRequest.resolve(
            slo_ms=self.slo_ms,
            device_budget_bytes=self.budget_bytes,
            rate_qps=self.rate_qps,
            llm=self.llm,
            n_devices=self.n_devices,
            epsilon=self.epsilon,
            percentile=self.percentile,
            slo_stage=self.slo_stage,
            hit_rate_model=self.hit_rate_model,
            headroom=self.headroom,
            page_bytes=self.analysis.curve.geometry.page_bytes,
        )

    def varied(self, name: str, factor: float) -> Setting:
        """The same with one of :data:`INPUTS` ``factor`` times as large.

        Skew: the hits of the first part p of the hot order come from the first part p ** factor. HBM bandwidth: of
        device scans, and of the LLM where its profile was computed.
        """
        if name not in INPUTS:
            raise InvalidInputError(f"input is {name!r}; expected one of {', '.join(INPUTS)}")
        if not (math.isfinite(factor) and factor > 0):
            raise InvalidInputError(f"factor is {factor}; expected a finite number > 0")
        return _VARY[name](self, factor)


def _hbm_bandwidth(setting: Setting, factor: float) -> Setting:
    latency = setting.analysis.latency
    if latency.device is not None:
        device = replace(
            latency.device,
            per_work_byte_s=latency.device.per_work_byte_s / factor,
            per_unique_byte_s=latency.device.per_unique_byte_s / factor,
        )
        latency = replace(latency, device=device)
    changed = replace(setting, analysis=replace(setting.analysis, latency=latency))
    if setting.service is None:
        return changed
    chip = setting.service.fleet.chip
    fleet = replace(setting.service.fleet, chip=replace(chip, memory_bytes_per_s=chip.memory_bytes_per_s * factor))
    service = replace(setting.service, fleet=fleet)
    return replace(changed, service=service, llm=service.profile())


def _kv_memory(setting: Setting, factor: float) -> Setting:
    budget = int(setting.budget_bytes * factor)
    changed = replace(setting, budget_bytes=budget, device_bytes=max(setting.device_bytes, budget))
    if setting.service is not None:
        service = replace(setting.service, kv_factor=setting.service.kv_factor * factor)
        return replace(changed, service=service, llm=service.profile())
    if setting.llm is None:
        return changed
    model = throughput_model(setting.llm)
    if model.kv_bytes.size < 2:
        return changed  # there is no KV cache
    total = int(model.total_bytes * factor)
    # Beyond the last measured point the last slope continues.
    slope = (model.rps[-1] - model.rps[-2]) / (model.kv_bytes[-1] - model.kv_bytes[-2])
    more = max(total - float(model.kv_bytes[-1]), 0.0)
    rps = float(np.interp(total, model.kv_bytes, model.rps)) + slope * more
    known = (*setting.llm.points, (setting.llm.kv_cache_bytes, setting.llm.throughput_rps))
    return replace(
        changed,
        llm=replace(setting.llm, kv_cache_bytes=total, throughput_rps=rps, points=known),
    )


def _skew(setting: Setting, factor: float) -> Setting:
    curve = setting.analysis.curve
    held = np.round(curve.nlist * (np.arange(curve.nlist + 1) / curve.nlist) ** factor).astype(np.int64)
    pages = curve.prefix_pages[held]
    warped = replace(curve, prefix_pages=pages, prefix_bytes=curve.prefix_bytes[held], pages_by_rank=np.diff(pages))
    return replace(setting, analysis=replace(setting.analysis, curve=warped))


def _host_latency(setting: Setting, factor: float) -> Setting:
    latency = setting.analysis.latency
    # Every prediction of a host scan is multiplied by one of these ratios.
    host = replace(latency.host, ratios=latency.host.ratios * factor)
    coarse, merge = (fit and fit.scaled(factor) for fit in (latency.coarse, latency.merge))
    rerank = latency.rerank and latency.rerank.scaled(factor)
    latency = replace(latency, coarse=coarse, merge=merge, rerank=rerank, host=host)
    return replace(setting, analysis=replace(setting.analysis, latency=latency))


_VARY: Mapping[str, Callable[[Setting, float], Setting]] = {
    "rate": lambda setting, factor: replace(setting, rate_qps=setting.rate_qps * factor),
    "slo": lambda setting, factor: replace(setting, slo_ms=setting.slo_ms * factor),
    "hbm_bandwidth": _hbm_bandwidth,
    "kv_memory": _kv_memory,
    "skew": _skew,
    "host_latency": _host_latency,
}
