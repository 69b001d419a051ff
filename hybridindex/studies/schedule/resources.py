"""The resources of a schedule, and the number of servers that a database needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridindex.errors import InvalidInputError
from hybridindex.studies.hardware import Chip, Server
from hybridindex.studies.schedule.stages.schema import RAGSchema
from hybridindex.studies.schedule.stages.stage_pipeline import SIZES
from hybridindex.studies.schedule.stages.tree_scan import MeasuredRetrieval

__all__ = ["Resources", "retrieval_servers"]

#: More chips or servers are a typing error, and a long search.
_MOST = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Chips and servers, and the limits of a search."""

    chip: Chip
    #: Chips of all stages, at most.
    chips: int
    server: Server
    #: Servers for retrieval; None: one for every ``server.chips`` chips, more where the database needs them.
    servers: int | None = None
    #: What one server took to retrieve; None: as its numbers say.
    retrieval: MeasuredRetrieval | None = None
    #: Largest batch of a stage up to the first token; batches are powers of two.
    largest_batch: int = 128
    #: Cost of one retrieval server, in chips. 0 divides the throughput by chips alone, as the paper does.
    server_cost_chips: float = 0.0
    #: Count all chips of the retrieval servers, used or not: servers are rented with their chips. The paper's sections
    #: 5.1 to 5.4 do so; its section 7 counts the chips that are used.
    whole_servers: bool = False
    #: Most seconds per token in decoding.
    largest_tpot_s: float | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.chips <= _MOST:
            raise InvalidInputError(f"chips is {self.chips}; expected 2 to {_MOST}: prefix and decoding stand apart")
        if self.servers is not None and not 1 <= self.servers <= _MOST:
            raise InvalidInputError(f"servers is {self.servers}; expected 1 to {_MOST}")
        if not 1 <= self.largest_batch < 1 << SIZES:
            raise InvalidInputError(f"largest_batch is {self.largest_batch}; expected 1 to {1 << (SIZES - 1)}")
        if not 0.0 <= self.server_cost_chips < math.inf:
            raise InvalidInputError(f"server_cost_chips is {self.server_cost_chips}; expected 0 or more")
        if self.largest_tpot_s is not None and not 0.0 < self.largest_tpot_s < math.inf:
            raise InvalidInputError(f"largest_tpot_s is {self.largest_tpot_s}; expected above 0")


def retrieval_servers(schema: RAGSchema, resources: Resources) -> int:
    """Servers that hold the database. It may fill their memory, as the paper's 5.6 TiB fill that of 16 servers.

    Raises:
        InvalidInputError: ``resources.servers`` have too little memory for it.
    """
    least = max(1, math.ceil(schema.database_bytes / resources.server.memory_bytes))
    if resources.servers is None:
        return max(least, resources.chips // resources.server.chips)
    if resources.servers < least:
        raise InvalidInputError(
            f"servers is {resources.servers}; the database of {schema.database_bytes / 1e9:,.0f} GB needs at least "
            f"{least} servers of {resources.server.memory_bytes / 1e9:,.0f} GB"
        )
    return resources.servers
