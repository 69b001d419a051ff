"""The stages of a schema up to the first token, what a batch of each costs on some chips, and decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from hybridindex.partitioner.hardware import Chip, Server
from hybridindex.partitioner.schedule.iterative import decode_slowdown
from hybridindex.partitioner.schedule.pipeline import SIZES, Run
from hybridindex.partitioner.schedule.retrieval import retrieval_seconds
from hybridindex.partitioner.schedule.roofline import Cost, decode_costs, encode_costs, powers_of_two
from hybridindex.partitioner.schedule.schema import RAGSchema

__all__ = ["RETRIEVAL", "Decoding", "StageCosts", "stage_names"]

RETRIEVAL = "retrieval"
_LARGEST_DECODE_BATCH = 1024


def stage_names(schema: RAGSchema) -> list[str]:
    """Stages up to the first token, in order (RAGO, Figure 3)."""
    names = ["encode"] if schema.document_encoder is not None else []
    if schema.query_rewriter is not None:
        names += ["rewrite prefix", "rewrite decode"]
    names.append(RETRIEVAL)
    if schema.query_reranker is not None:
        names.append("rerank")
    return [*names, "prefix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """The main LLM's decoding on chips of its own."""

    chips: int
    batch: int
    #: Of the retrievals during decoding; 0 without any.
    iterative_batch: int
    requests_per_s: float
    #: Seconds per token, waiting for retrievals included.
    tpot_s: float
    how: str


class StageCosts:
    """Costs of one schema on one kind of chip and server, computed once per (stage, chips, batch)."""

    def __init__(
        self,
        schema: RAGSchema,
        chip: Chip,
        server: Server,
        servers: int,
        *,
        context: float = 1.0,
        cached_tokens: int | None = None,
    ) -> None:
        """
        Args:
            servers: for retrieval; 0: there is none.
            context: part of the prompt that a token of the main LLM attends to, averaged over its layers.
            cached_tokens: of the prompt, averaged over layers; None: all.
        """
        self.schema, self._chip, self._server, self._servers = schema, chip, server, servers
        self._attended = context
        self._cached = schema.prompt_tokens if cached_tokens is None else cached_tokens
        self.costs = cache(self._costs)
        self.retrieval_s = cache(self._retrieval_s)

    def runs(self, stage: str, chips: int, log2_batches: Sequence[int]) -> list[Run]:
        """Every way to run ``stage``: batch sizes times ways to share the chips. Empty where a model does not fit."""
        if stage == RETRIEVAL:
            times = [(b, self.retrieval_s(1 << b)) for b in log2_batches]
            return [Run(stage=stage, log2_batch=b, latency_s=t, interval_s=t, how="servers") for b, t in times]
        return [
            Run(
                stage=stage,
                log2_batch=b,
                latency_s=cost.latency_s,
                interval_s=cost.interval_s,
                how=str(cost.parallelism),
            )
            for b in log2_batches
            for cost in self.costs(stage, chips, 1 << b)
        ]

    def _costs(self, stage: str, chips: int, batch: int) -> tuple[Cost, ...]:
        schema, chip = self.schema, self._chip
        match stage:
            case "encode":
                assert schema.document_encoder is not None
                return encode_costs(
                    schema.document_encoder, chip, chips, sequences=batch * schema.chunks, tokens=schema.chunk_tokens
                )
            case "rewrite prefix":
                assert schema.query_rewriter is not None
                return encode_costs(
                    schema.query_rewriter, chip, chips, sequences=batch, tokens=schema.question_tokens
                )
            case "rewrite decode":
                assert schema.query_rewriter is not None
                return decode_costs(
                    schema.query_rewriter,
                    chip,
                    chips,
                    sequences=batch,
                    prompt=schema.question_tokens,
                    output=schema.rewritten_tokens,
                )
            case "rerank":
                assert schema.query_reranker is not None
                return encode_costs(
                    schema.query_reranker,
                    chip,
                    chips,
                    sequences=batch * schema.reranked_passages,
                    tokens=schema.question_tokens + schema.passage_tokens,
                )
            case "prefix":
                return encode_costs(
                    schema.generative_llm,
                    chip,
                    chips,
                    sequences=batch,
                    tokens=schema.prompt_tokens,
                    attended=self._attended,
                )
        raise AssertionError(stage)

    def _retrieval_s(self, batch: int) -> float:
        return retrieval_seconds(self.schema, self._server, self._servers, batch) if self._servers else 0.0

    def decodings(self, chips: int, iterative_batch: int, prefix_chips: int) -> list[Decoding]:
        """Undominated ways (throughput, time per token) to decode on ``chips`` chips.

        Args:
            iterative_batch: of retrievals during decoding; 0 for none.
            prefix_chips: where the prefixes of those run.
        """
        schema = self.schema
        found = []
        for batch in powers_of_two(_LARGEST_DECODE_BATCH):
            if batch < iterative_batch:
                continue
            costs = decode_costs(
                schema.generative_llm,
                self._chip,
                chips,
                sequences=batch,
                prompt=self._cached,
                output=schema.output_tokens,
            )
            for cost in costs:
                tpot = cost.latency_s / schema.output_tokens
                if iterative_batch:
                    again = min((c.latency_s for c in self.costs("prefix", prefix_chips, iterative_batch)), default=0.0)
                    stalls = (schema.retrieval_frequency - 1) * (self.retrieval_s(iterative_batch) + again)
                    slowdown = decode_slowdown(
                        batch,
                        iterative_batch,
                        retrievals=schema.retrieval_frequency,
                        tokens=schema.output_tokens,
                        rounds=60,
                    )
                    tpot = tpot * slowdown + stalls / schema.output_tokens
                rate = batch * (cost.latency_s / cost.interval_s) / (tpot * schema.output_tokens)
                found.append(
                    Decoding(
                        chips=chips,
                        batch=batch,
                        iterative_batch=iterative_batch,
                        requests_per_s=rate,
                        tpot_s=tpot,
                        how=str(cost.parallelism),
                    )
                )
        kept: list[Decoding] = []
        for option in sorted(found, key=lambda d: (-d.requests_per_s, d.tpot_s)):
            if not kept or option.tpot_s < kept[-1].tpot_s:
                kept.append(option)
        return kept

    @staticmethod
    def log2_batches(largest: int) -> list[int]:
        """Of batch sizes up to ``largest``, and to what bursts can have."""
        return list(range(min(largest.bit_length(), SIZES)))
