"""The exhaustive search for schedules: placements x chips x batch sizes (RAGO, section 6).

Covers every schedule of the space. Most are dropped early, in parts, which never changes the frontier.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hybridindex.errors import InvalidInputError
from hybridindex.studies.schedule.assembly import extend_frontier
from hybridindex.studies.schedule.bounds import Worth
from hybridindex.studies.schedule.frontier import Frontier, Incumbents
from hybridindex.studies.schedule.placements import is_of_kind, placements
from hybridindex.studies.schedule.resources import Resources, retrieval_servers
from hybridindex.studies.schedule.space import Space
from hybridindex.studies.schedule.stages.decoding import decodings
from hybridindex.studies.schedule.stages.roofline import powers_of_two
from hybridindex.studies.schedule.stages.schema import RAGSchema
from hybridindex.studies.schedule.stages.stage_costs import StageCosts, stage_names

__all__ = ["fastest_decoding", "frontier_of", "search"]


def search(schema: RAGSchema, resources: Resources, *, kind: str = "all", same_batch: bool = False) -> Frontier:
    """The Pareto frontier of time to first token against throughput per chip.

    Args:
        kind: placements: "all", "collocated" (all stages up to the prefix share chips) or "disaggregated" (none do).
        same_batch: one batch size for all stages up to the first token: no micro-batches.

    Raises:
        InvalidInputError: no schedule fits; says why.
    """
    servers = retrieval_servers(schema, resources)
    return frontier_of(
        Space(
            costs=StageCosts(schema, resources.chip, resources.server, servers, measured=resources.retrieval),
            resources=resources,
            servers=servers,
            placements=[p for p in placements(stage_names(schema)) if is_of_kind(p, kind)],
            same_batch=same_batch,
        )
    )


def frontier_of(space: Space) -> Frontier:
    """The frontier of a space.

    Raises:
        InvalidInputError: it is empty.
    """
    best = Incumbents()
    for iterative_batch in space.iterative_batches():
        ways = space.decodings(iterative_batch)
        if not ways:
            continue
        worth = Worth(
            ways,
            most_chips=space.resources.chips,
            least_chips=space.least_chips,
            servers_cost=space.servers_cost,
        )
        for sizes in space.batchings():
            for placement in space.placements:
                extend_frontier(space, placement, sizes, iterative_batch, worth, best)
    if not best.schedules:
        raise space.refusal()
    return Frontier(schedules=tuple(best.schedules), servers=space.servers)


def fastest_decoding(schema: RAGSchema, resources: Resources) -> Frontier:
    """The frontier at the smallest time per token that any schedule reaches: the nearest to a limit that none meets.

    Raises:
        InvalidInputError: nothing fits at any speed.
    """
    servers = retrieval_servers(schema, resources)
    costs = StageCosts(schema, resources.chip, resources.server, servers, measured=resources.retrieval)
    # Retrievals in batches of one stall decoding least.
    again = 1 if schema.retrieval_frequency > 1 else 0
    every = (
        min((d.tpot_s for d in decodings(costs, chips, iterative_batch=again)), default=math.inf)
        for chips in powers_of_two(resources.chips - 1)
    )
    for limit in sorted({tpot_s for tpot_s in every if tpot_s < math.inf}):
        try:
            return search(schema, replace(resources, largest_tpot_s=limit))
        except InvalidInputError:
            # Too many chips for decoding leave too few for the prefix.
            continue
    return search(schema, replace(resources, largest_tpot_s=None))
