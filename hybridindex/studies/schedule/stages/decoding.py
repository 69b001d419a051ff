"""Decoding of the main LLM on its own chips with continuous batching, with the delay of iterative retrieval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridindex.studies.schedule.stages.decode_slowdown import decode_slowdown
from hybridindex.studies.schedule.stages.roofline import decode_costs, powers_of_two
from hybridindex.studies.schedule.stages.stage_costs import StageCosts

__all__ = ["LARGEST_DECODE_BATCH", "Decoding", "decodings"]

#: As in the paper's Figure 9(a) and Table 4.
LARGEST_DECODE_BATCH = 1024
#: Retrieval batches to simulate for each pair of batch sizes; the slowdown is then within 2 %.
_ROUNDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """A way to decode."""

    chips: int
    batch: int
    #: Batch of the retrievals during decoding; 0 without any.
    iterative_batch: int
    requests_per_s: float
    #: Seconds per token, including the wait for retrievals.
    tpot_s: float
    #: How its chips share the work.
    how: str


def decodings(costs: StageCosts, chips: int, *, iterative_batch: int = 0) -> list[Decoding]:
    """The ways to decode on ``chips`` chips that no other beats in both throughput and time per token; most throughput
    first.

    Args:
        iterative_batch: batch of the retrievals during decoding; 0 for none. Their prefixes run on the prefix's chips,
            assumed to be as many as ``chips``.
    """
    found = [
        d for batch in powers_of_two(LARGEST_DECODE_BATCH) for d in _of_batch(costs, chips, batch, iterative_batch)
    ]
    kept: list[Decoding] = []
    for option in sorted(found, key=lambda d: (-d.requests_per_s, d.tpot_s)):
        if not kept or option.tpot_s < kept[-1].tpot_s:
            kept.append(option)
    return kept


def _of_batch(costs: StageCosts, chips: int, batch: int, iterative_batch: int) -> Iterator[Decoding]:
    schema = costs.schema
    if batch < iterative_batch:
        return
    slowdown, stall_s = 1.0, 0.0
    if iterative_batch:
        prefixes = costs.costs("prefix", chips, iterative_batch)
        if not prefixes:
            return
        each_s = costs.retrieval_s(iterative_batch) + min(c.latency_s for c in prefixes)
        stall_s = (schema.retrieval_frequency - 1) * each_s / schema.output_tokens
        slowdown = decode_slowdown(
            batch,
            iterative_batch,
            retrievals=schema.retrieval_frequency,
            tokens=schema.output_tokens,
            rounds=_ROUNDS,
        )
    for cost in decode_costs(
        schema.generative_llm,
        costs.chip,
        chips,
        sequences=batch,
        prompt=costs.cached_tokens,
        output=schema.output_tokens,
    ):
        tpot_s = cost.latency_s / schema.output_tokens * slowdown + stall_s
        # A pipeline of chips works on several batches at once.
        at_once = batch * cost.latency_s / cost.interval_s
        yield Decoding(
            chips=chips,
            batch=batch,
            iterative_batch=iterative_batch,
            requests_per_s=at_once / (tpot_s * schema.output_tokens),
            tpot_s=tpot_s,
            how=str(cost.parallelism),
        )
