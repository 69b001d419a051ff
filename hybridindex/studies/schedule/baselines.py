"""The paper's baselines: an extended LLM system, an LLM alone, a long context (RAGO, sections 5 and 7.1)."""

from __future__ import annotations

from dataclasses import replace

from hybridindex.errors import InvalidInputError
from hybridindex.studies.schedule.frontier import Frontier, Incumbents
from hybridindex.studies.schedule.frontier_search import frontier_of
from hybridindex.studies.schedule.placements import is_of_kind, placements
from hybridindex.studies.schedule.resources import Resources, retrieval_servers
from hybridindex.studies.schedule.space import Space
from hybridindex.studies.schedule.stages.roofline import powers_of_two
from hybridindex.studies.schedule.stages.schema import RAGSchema
from hybridindex.studies.schedule.stages.stage_costs import StageCosts, stage_names

__all__ = ["llm_extension", "llm_only", "long_context"]

#: Layers that attend to the whole long context: one of four (RAGO, section 5.2); the others to the last 128 tokens.
_GLOBAL_LAYERS, _LOCAL_TOKENS = 0.25, 128


def llm_extension(schema: RAGSchema, resources: Resources, *, chips: str = "all") -> Frontier:
    """The tuned baseline: everything up to the first token shares chips with the prefix, as many as decoding has.

    Args:
        chips: "all": half of the chips each, as in the paper's Table 4 (64 + 64 of 128). "any": also fewer chips, in
            halves; a stronger baseline, because throughput per chip often falls with more chips.

    Raises:
        InvalidInputError: another choice, an odd number of chips, or no schedule fits.
    """
    if chips not in ("all", "any"):
        raise InvalidInputError(f"chips is {chips!r}; expected all or any")
    if chips == "all" and resources.chips % 2:
        raise InvalidInputError(f"chips is {resources.chips}; expected an even number: the baseline gives halves")
    halves = [resources.chips // 2] if chips == "all" else powers_of_two(resources.chips // 2)
    servers = retrieval_servers(schema, resources)
    costs = StageCosts(schema, resources.chip, resources.server, servers, measured=resources.retrieval)
    together = [p for p in placements(stage_names(schema)) if is_of_kind(p, "collocated")]
    best = Incumbents()
    refusal = None
    for half in halves:
        space = Space(
            costs=costs,
            resources=resources,
            servers=servers,
            placements=together,
            group_chips=[half],
            decode_chips=[half],
        )
        try:
            best.add(frontier_of(space).schedules)
        except InvalidInputError as error:
            refusal = error
    if not best.schedules:
        assert refusal is not None
        raise refusal
    return Frontier(schedules=tuple(best.schedules), servers=servers)


def llm_only(schema: RAGSchema, resources: Resources, *, prompt_tokens: int | None = None) -> Frontier:
    """The LLM without retrieval.

    Args:
        prompt_tokens: None: the question alone.
    """
    prompt = schema.question_tokens if prompt_tokens is None else prompt_tokens
    return _without_retrieval(replace(schema, prompt_tokens=prompt), resources, attended=1.0)


def long_context(schema: RAGSchema, resources: Resources) -> Frontier:
    """The LLM with the whole text as its prompt, one of four layers attending to all of it (section 5.2)."""
    prompt = schema.context_tokens + schema.question_tokens
    local = min(1.0, 2.0 * _LOCAL_TOKENS / prompt)
    attended = _GLOBAL_LAYERS + (1.0 - _GLOBAL_LAYERS) * local
    # The cache holds all tokens in global layers, and the last ones in the others.
    kept = int(_GLOBAL_LAYERS * prompt + (1.0 - _GLOBAL_LAYERS) * min(prompt, _LOCAL_TOKENS))
    return _without_retrieval(replace(schema, prompt_tokens=prompt), resources, attended=attended, cached=kept)


def _without_retrieval(
    schema: RAGSchema, resources: Resources, *, attended: float, cached: int | None = None
) -> Frontier:
    plain = replace(
        schema,
        document_encoder=None,
        query_rewriter=None,
        query_reranker=None,
        retrieval_frequency=1,
    )
    costs = StageCosts(plain, resources.chip, resources.server, 0, context=attended, cached_tokens=cached)
    return frontier_of(Space(costs=costs, resources=resources, servers=0, placements=[(("prefix",),)]))
