"""What a request costs in each stage, in seconds of one chip, when every stage works at its most throughput per chip.

The paper's time breakdowns (RAGO, section 5): time times resources. Knows no schedules.
"""

from __future__ import annotations

from hybridindex.studies.schedule.resources import Resources, retrieval_servers
from hybridindex.studies.schedule.stages.decoding import decodings
from hybridindex.studies.schedule.stages.roofline import powers_of_two
from hybridindex.studies.schedule.stages.schema import RAGSchema
from hybridindex.studies.schedule.stages.stage_costs import RETRIEVAL, StageCosts, stage_names

__all__ = ["chip_seconds"]


def chip_seconds(schema: RAGSchema, resources: Resources) -> dict[str, float]:
    """Stage -> chip-seconds of one request, the last one "decode".

    A second of a retrieval server is ``server.chips`` chip-seconds: those of the chips that stand in it.
    """
    servers = retrieval_servers(schema, resources)
    costs = StageCosts(schema, resources.chip, resources.server, servers)
    batches = powers_of_two(resources.largest_batch)
    counts = powers_of_two(resources.chips)
    seconds = {}
    for stage in stage_names(schema):
        if stage == RETRIEVAL:
            held = servers * resources.server.chips
            found = [held * costs.retrieval_s(batch) / batch for batch in batches]
        else:
            found = [
                chips * cost.interval_s / batch
                for chips in counts
                for batch in batches
                for cost in costs.costs(stage, chips, batch)
            ]
        seconds[stage] = min(found, default=float("inf"))
    rates = [d.requests_per_s / d.chips for chips in counts for d in decodings(costs, chips)]
    seconds["decode"] = 1.0 / max(rates) if rates else float("inf")
    return seconds
