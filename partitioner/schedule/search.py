"""The exhaustive search for schedules: placements x chips x batch sizes (RAGO, section 6).

Every schedule of the space is considered; most are dropped early, in parts, without changing the frontier.
"""

from __future__ import annotations

from hybridindex.partitioner.schedule.assembly import extend_frontier
from hybridindex.partitioner.schedule.bounds import Worth
from hybridindex.partitioner.schedule.frontier import Frontier, Incumbents
from hybridindex.partitioner.schedule.placements import is_of_kind, placements
from hybridindex.partitioner.schedule.resources import Resources, retrieval_servers
from hybridindex.partitioner.schedule.schema import RAGSchema
from hybridindex.partitioner.schedule.space import Space
from hybridindex.partitioner.schedule.stages import StageCosts, stage_names

__all__ = ["frontier_of", "search"]


def search(schema: RAGSchema, resources: Resources, *, kind: str = "all", same_batch: bool = False) -> Frontier:
    """The Pareto frontier of time to first token against throughput per chip.

    Args:
        kind: of placements: "all", "collocated" (all stages up to the prefix share chips) or "disaggregated" (none do).
        same_batch: the same batch size for all stages up to the first token: no micro-batches.

    Raises:
        InvalidInputError: no schedule fits; the message says what does not.
    """
    servers = retrieval_servers(schema, resources)
    return frontier_of(
        Space(
            costs=StageCosts(schema, resources.chip, resources.server, servers),
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
        decodings = space.decodings(iterative_batch)
        if not decodings:
            continue
        worth = Worth(decodings, most_chips=space.resources.chips, servers_cost=space.servers_cost)
        for sizes in space.batchings():
            for placement in space.placements:
                extend_frontier(space, placement, sizes, iterative_batch, worth, best)
    if not best.schedules:
        raise space.refusal()
    return Frontier(schedules=tuple(best.schedules), servers=space.servers)
