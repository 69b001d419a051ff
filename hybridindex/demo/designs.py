"""What the demo serves under load: the host alone and the plan; on a GPU also what the plan is compared with.

There the third act is measured, and nothing is projected.
"""

from __future__ import annotations

from dataclasses import dataclass

import hybridindex as hx
from hybridindex.demo.projection import LLM
from hybridindex.partitioner.plan import Plan
from hybridindex.studies.hardware import model
from hybridindex.studies.simulator.policies import Inputs, hedrarag_lists
from hybridindex.studies.what_if.fleet import LLMService, parse_fleet

__all__ = ["Design", "compared_designs", "served_designs"]

#: For all lists, in bytes of the lists: pages are not full, and scans need scratch memory.
_WHOLE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """One use of the device."""

    name: str
    plan: Plan
    devices: tuple[str, ...]


def served_designs(index: hx.Index, plan: Plan, device: str) -> list[Design]:
    """The host alone, and the plan."""
    host = index.plan(1e6, 0, plan.analysis.profile, coverage=0.0)
    return [Design(name="host", plan=host, devices=()), Design(name="hybrid", plan=plan, devices=(device,))]


def compared_designs(index: hx.Index, plan: Plan, device: str, hardware: str) -> tuple[list[Design], str]:
    """All lists on the device, and HedraRAG's split; and words for them.

    Args:
        hardware: whose rate of :data:`~hybridindex.demo.projection.LLM` the split balances search against.
    """
    profile, request = plan.analysis.profile, plan.request
    nbytes = _WHOLE * int(profile.list_bytes.sum())
    whole = index.plan(1e6, nbytes, profile, coverage=1.0)
    designs = [Design(name="all on the device", plan=whole, devices=(device,))]
    service = LLMService(model=model(LLM), fleet=parse_fleet(hardware))
    llm = service.profile()
    inputs = Inputs(
        analysis=plan.analysis,
        slo_s=request.slo_ms / 1e3,
        rate=plan.rate_qps or llm.throughput_rps,
        budget_bytes=nbytes,
        llm=llm,
        kv_bytes_per_token=service.model.kv_bytes_per_token(),
    )
    count = hedrarag_lists(inputs)
    words = (
        f"HedraRAG's split balances search with {LLM}, which answers {llm.throughput_rps:.3g} requests/s on {hardware}"
    )
    if not count:
        return designs, f"{words}: the host alone searches as fast, so the split places nothing and equals the host."
    split = index.plan(1e6, nbytes, profile, coverage=count / profile.nlist)
    designs.append(Design(name="HedraRAG's split", plan=split, devices=(device,)))
    return designs, f"{words}: it places {count:,} of {profile.nlist:,} lists."
