"""Schedules of whole RAG pipelines: which stages share chips, on how many chips, in which batches (RAGO,
arXiv:2503.14649).

A :class:`RAGSchema` describes the pipeline; :func:`search` finds the Pareto frontier of time to first token against
throughput per chip, from hardware and model profiles. Nothing here serves a request.
"""

from hybridindex.studies.schedule.baselines import llm_extension, llm_only, long_context
from hybridindex.studies.schedule.frontier import Frontier, Schedule
from hybridindex.studies.schedule.frontier_search import fastest_decoding, search
from hybridindex.studies.schedule.resources import Resources
from hybridindex.studies.schedule.stages.decode_slowdown import decode_slowdown
from hybridindex.studies.schedule.stages.schema import RAGSchema, case, case_names, read_schema, schema_from
from hybridindex.studies.schedule.stages.tree_scan import TreeLevel, tree_levels, tree_seconds

__all__ = [
    "Frontier",
    "RAGSchema",
    "Resources",
    "Schedule",
    "TreeLevel",
    "case",
    "case_names",
    "decode_slowdown",
    "fastest_decoding",
    "llm_extension",
    "llm_only",
    "long_context",
    "read_schema",
    "schema_from",
    "search",
    "tree_levels",
    "tree_seconds",
]
