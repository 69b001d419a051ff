"""The demo's third act: what the plan buys on a GPU that the reader chooses, simulated from the profile of this run.

Nothing here is measured on that GPU. Each assumption is a sentence of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from hybridindex.paging import format_bytes
from hybridindex.partitioner.analysis import analyse
from hybridindex.studies.hardware import model
from hybridindex.studies.simulator.arrivals import poisson
from hybridindex.studies.simulator.compare import compare_policies
from hybridindex.studies.simulator.other_machine import WhatIf, suppose
from hybridindex.studies.simulator.policies import Inputs
from hybridindex.studies.what_if.fleet import LLMService, parse_fleet
from hybridindex.types import Profile

__all__ = ["LLM", "POLICIES", "PROJECTION_RECIPE", "Projection", "check_hardware", "project"]

LLM = "llama3-8b"
#: Host alone, all on the GPU, HedraRAG's split, and the plan.
POLICIES = ("cpu-only", "all-gpu", "hedrarag", "ours")
#: Fractions of the rate of requests that the LLM alone sustains there.
RATES = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0)
#: Cores of the host over the one that was profiled, and the part of the GPU's usable bytes that the index takes.
CORES, INDEX_PART = 32, 1.5
#: The latency target: as in VectorLiteRAG, the first token of the LLM at its throughput limit, and the search.
SEARCH_MS = 100.0
_REQUESTS = 800
#: Of all of the above; another one makes kept projections stale.
PROJECTION_RECIPE = 2

Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Attainment by rate and policy; None where a policy is not possible."""

    hardware: str
    llm: str
    slo_ms: float
    index_bytes: int
    rates: tuple[float, ...]
    attainment: dict[str, tuple[float | None, ...]]
    #: Bytes of lists on the GPUs, at the highest rate.
    device_bytes: dict[str, int]
    refused: dict[str, str]
    assumptions: tuple[str, ...]

    def to_data(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def check_hardware(hardware: str) -> None:
    """Raises InvalidInputError: no such hardware is known, or it does not hold the LLM."""
    LLMService(model=model(LLM), fleet=parse_fleet(hardware))


def project(profile: Profile, hardware: str, progress: Progress) -> Projection:
    """Simulates the policies beside :data:`LLM` on ``hardware``.

    Raises:
        InvalidInputError: as :func:`check_hardware`.
    """
    fleet = parse_fleet(hardware)
    service = LLMService(model=model(LLM), fleet=fleet)
    llm = service.profile()
    assert llm.ttft_s is not None
    index_bytes = int(INDEX_PART * fleet.count * fleet.usable_bytes)
    threads = profile.threads or 1
    analysis, said = suppose(
        analyse(profile),
        WhatIf(
            device_bandwidth=fleet.chip.memory_bytes_per_s,
            host_speed=CORES / threads,
            index_scale=index_bytes / profile.nbytes,
        ),
    )
    slo_s = llm.ttft_s + SEARCH_MS / 1e3
    rates = tuple(round(part * llm.throughput_rps, 2) for part in RATES)
    attainment: dict[str, list[float | None]] = {name: [] for name in POLICIES}
    device_bytes: dict[str, int] = {}
    refused: dict[str, str] = {}
    configured = analysis.configured(page_bytes=analysis.curve.geometry.page_bytes, n_devices=fleet.count)
    for number, rate in enumerate(rates):
        progress(f"project {hardware}", number, len(rates))
        inputs = Inputs(
            analysis=configured,
            slo_s=slo_s,
            rate=rate,
            n_devices=fleet.count,
            budget_bytes=llm.kv_cache_bytes // fleet.count,
            llm=llm,
            kv_bytes_per_token=service.model.kv_bytes_per_token(),
        )
        for one in compare_policies(POLICIES, inputs, lambda rate: poisson(rate, _REQUESTS, seed=0), find_rate=False):
            attainment[one.policy].append(None if one.outcome is None else one.outcome.attainment)
            device_bytes[one.policy] = one.index_bytes
            if one.refused:
                refused[one.policy] = one.refused
    progress(f"project {hardware}", len(rates), len(rates))
    assumptions = (
        f"projected, not measured: {fleet} beside {LLM} in 16 bits, {llm.input_tokens} prompt and {llm.output_tokens} "
        f"answer tokens, kernels at {service.efficiency:g} of the peak rates: {llm.throughput_rps:.3g} requests/s",
        f"an index of {format_bytes(index_bytes)}: the one of this demo with lists {index_bytes / profile.nbytes:.0f} "
        f"times as long, and the skew of its query log",
        f"a host of {CORES} cores, each as fast as the {threads} profiled here",
        f"in time: first token within {slo_s * 1e3:.0f} ms, {SEARCH_MS:g} ms more than the LLM takes at its limit",
        *said,
    )
    return Projection(
        hardware=hardware,
        llm=LLM,
        slo_ms=slo_s * 1e3,
        index_bytes=index_bytes,
        rates=rates,
        attainment={name: tuple(values) for name, values in attainment.items()},
        device_bytes=device_bytes,
        refused=refused,
        assumptions=tuple(dict.fromkeys(assumptions)),
    )
