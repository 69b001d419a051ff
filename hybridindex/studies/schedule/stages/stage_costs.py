"""The stages of a schema up to the first token, and the cost of a batch of each. Does not cover decoding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from hybridindex.studies.hardware import Chip, Server
from hybridindex.studies.schedule.stages.roofline import Cost, decode_costs, encode_costs
from hybridindex.studies.schedule.stages.schema import RAGSchema
from hybridindex.studies.schedule.stages.stage_pipeline import Run
from hybridindex.studies.schedule.stages.tree_scan import MeasuredRetrieval, retrieval_seconds

__all__ = ["RETRIEVAL", "StageCosts", "stage_names"]

RETRIEVAL = "retrieval"


def stage_names(schema: RAGSchema) -> list[str]:
    """Stages up to the first token, in order (RAGO, Figure 3)."""
    names = ["encode"] if schema.document_encoder is not None else []
    if schema.query_rewriter is not None:
        names += ["rewrite prefix", "rewrite decode"]
    names.append(RETRIEVAL)
    if schema.query_reranker is not None:
        names.append("rerank")
    return [*names, "prefix"]


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
        measured: MeasuredRetrieval | None = None,
    ) -> None:
        """
        Args:
            servers: for retrieval; 0: no retrieval.
            context: part of the prompt that a token of the main LLM attends to, averaged over its layers.
            cached_tokens: prompt tokens in the cache, averaged over layers; None: all.
            measured: what a server took to retrieve; None: modelled.
        """
        self.schema, self.chip, self._server, self._servers = schema, chip, server, servers
        self._attended, self._measured = context, measured
        self.cached_tokens = schema.prompt_tokens if cached_tokens is None else cached_tokens
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
                memory_bytes=cost.memory_bytes,
                how=str(cost.parallelism),
            )
            for b in log2_batches
            for cost in self.costs(stage, chips, 1 << b)
        ]

    def _costs(self, stage: str, chips: int, batch: int) -> tuple[Cost, ...]:
        schema, chip = self.schema, self.chip
        match stage:
            case "encode":
                assert schema.document_encoder is not None
                return encode_costs(
                    schema.document_encoder, chip, chips, sequences=batch * schema.chunks, tokens=schema.chunk_tokens
                )
            case "rewrite prefix":
                assert schema.query_rewriter is not None
                return encode_costs(schema.query_rewriter, chip, chips, sequences=batch, tokens=schema.question_tokens)
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
        if not self._servers:
            return 0.0
        return retrieval_seconds(self.schema, self._server, self._servers, batch, self._measured)
