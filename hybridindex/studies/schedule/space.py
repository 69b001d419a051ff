"""The space of one search: placements, numbers of chips, batch sizes, and the cost of each stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.studies.schedule.pareto import undominated
from hybridindex.studies.schedule.placements import Placement
from hybridindex.studies.schedule.resources import Resources
from hybridindex.studies.schedule.stages.decoding import Decoding, decodings
from hybridindex.studies.schedule.stages.roofline import MEMORY_SHARE, powers_of_two
from hybridindex.studies.schedule.stages.stage_costs import RETRIEVAL, StageCosts
from hybridindex.studies.schedule.stages.stage_pipeline import Run

__all__ = ["Space"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What a search chooses from."""

    costs: StageCosts
    resources: Resources
    #: Servers for retrieval; 0: no retrieval.
    servers: int
    placements: Sequence[Placement]
    #: One batch size for all stages up to the first token.
    same_batch: bool = False
    #: Chips of each group, and of decoding; None: the powers of two.
    group_chips: Sequence[int] | None = None
    decode_chips: Sequence[int] | None = None
    #: Drop parts that cannot reach the frontier; False tries everything.
    prune: bool = True

    @property
    def servers_cost(self) -> float:
        """Cost of all retrieval servers, in chips."""
        return self.servers * self.resources.server_cost_chips

    @property
    def least_chips(self) -> int:
        """Chips that are counted at least, used or not."""
        return self.servers * self.resources.server.chips if self.resources.whole_servers else 0

    @property
    def memory_bytes(self) -> float:
        """Bytes of one chip for weights and caches."""
        return MEMORY_SHARE * self.resources.chip.memory_bytes

    def batchings(self) -> list[list[int]]:
        """Sets of log2 batch sizes that the stages of a pipeline choose from. Equal batches come first: they find most
        of the frontier, which then rules out most other schedules."""
        sizes = list(range(self.resources.largest_batch.bit_length()))
        equal = [[size] for size in sizes]
        return equal if self.same_batch else [*equal, sizes]

    def iterative_batches(self) -> list[int]:
        """Batch sizes of retrievals during decoding; 0 where there are none."""
        again = self.costs.schema.retrieval_frequency > 1 and self.servers
        return powers_of_two(self.resources.largest_batch) if again else [0]

    def runs(self, group: Sequence[str], sizes: Sequence[int], most_chips: int) -> dict[int, list[list[Run]]]:
        """Chips -> the ways to run each stage of ``group`` on them, where every stage fits."""
        if tuple(group) == (RETRIEVAL,):
            return {0: [self.costs.runs(RETRIEVAL, 0, sizes)]}
        allowed = self.group_chips if self.group_chips is not None else powers_of_two(most_chips)
        found = {}
        for chips in allowed:
            runs = [self.costs.runs(stage, chips, sizes) for stage in group]
            if chips <= most_chips and all(runs):
                found[chips] = self._with_memory(group, runs)
        return found

    def _with_memory(self, group: Sequence[str], runs: list[list[Run]]) -> list[list[Run]]:
        """``runs``, with memory set to 0 where the models fit in every combination: then fewer runs differ."""
        if {"rewrite prefix", "rewrite decode"} <= set(group):
            # Both use one model, and decoding counts its weights.
            at = list(group).index("rewrite prefix")
            runs[at] = [replace(run, memory_bytes=0.0) for run in runs[at]]
        if sum(max(run.memory_bytes for run in stage) for stage in runs) > self.memory_bytes:
            return runs
        return [_quickest([replace(run, memory_bytes=0.0) for run in stage]) for stage in runs]

    def decodings(self, iterative_batch: int) -> list[Decoding]:
        """The decoding with the most throughput for each number of chips, within the time per token."""
        limit = self.resources.largest_tpot_s
        allowed = self.decode_chips if self.decode_chips is not None else powers_of_two(self.resources.chips - 1)
        best = []
        for chips in allowed:
            ways = decodings(self.costs, chips, iterative_batch=iterative_batch)
            if fit := [d for d in ways if limit is None or d.tpot_s <= limit]:
                best.append(fit[0])
        return best

    def later_s(self, stage: str, chips: int, iterative_batch: int) -> float:
        """Seconds of ``stage`` that retrievals and prefixes during decoding take for one request."""
        if not iterative_batch:
            return 0.0
        again = (self.costs.schema.retrieval_frequency - 1) / iterative_batch
        if stage == RETRIEVAL:
            return again * self.costs.retrieval_s(iterative_batch)
        if stage == "prefix":
            costs = self.costs.costs("prefix", chips, iterative_batch)
            return again * min((c.interval_s for c in costs), default=0.0)
        return 0.0

    def refusal(self) -> InvalidInputError:
        """Why nothing in the space fits."""
        schema, chip = self.costs.schema, self.resources.chip
        given = (schema.document_encoder, schema.query_rewriter, schema.query_reranker, schema.generative_llm)
        largest = max((model for model in given if model is not None), key=lambda model: model.parameters)
        limit = self.resources.largest_tpot_s
        tpot = f" with at most {limit * 1e3:g} ms per token" if limit is not None else ""
        return InvalidInputError(
            f"chips is {self.resources.chips}: no schedule fits that many {chip.name}{tpot}; {largest.name} alone "
            f"takes the memory of {largest.weight_bytes() / self.memory_bytes:.1f} of them for its prefix and again "
            "for decoding. Give more chips, a smaller model, or more time per token"
        )


def _quickest(runs: list[Run]) -> list[Run]:
    """For each batch size, the runs that no other beats in latency and interval."""
    kept = []
    for _, same in itertools.groupby(runs, key=lambda run: run.log2_batch):
        choices = list(same)
        rows = np.array([(run.latency_s, run.interval_s) for run in choices])
        kept += [choices[i] for i in undominated(rows)]
    return kept
