"""The highest rate that a resident set sustains at measured batch sizes, and epsilon from the batching model."""

from __future__ import annotations

import numpy as np

from hybridindex.partitioner.models.coverage import QueryWork
from hybridindex.partitioner.models.throughput import waiting_factor
from hybridindex.partitioner.request import PlanRequest
from hybridindex.partitioner.solver import Problem, solve

__all__ = ["max_sustainable_qps", "self_consistent_epsilon"]


def max_sustainable_qps(problem: Problem, work: QueryWork, device_bytes: int, tau_s: float) -> float:
    """Highest requests/s of any batch size up to the largest measured one that stays within ``tau_s``; 0 when a single
    query takes longer. Beside an LLM, at most what the LLM takes next to ``device_bytes``."""
    best = 0.0
    top = max(problem.latency.max_batch, 1)
    for batch in np.unique(np.round(np.geomspace(1, top, 12)).astype(int)).tolist():
        slowest, mean = problem.timing(work, batch)
        if slowest <= tau_s and mean > 0:
            best = max(best, batch / mean)
    return min(best, problem.llm.at(device_bytes)) if problem.llm is not None else best


def self_consistent_epsilon(
    problem: Problem, request: PlanRequest, work: QueryWork, batch: int, rate: float | None
) -> tuple[float | None, float | None]:
    """Epsilon from the batching model at ``rate``, and the coverage solved with it (one refinement); ``None`` each
    where there is no rate, or the coverage is fixed."""
    if rate is None or rate <= 0 or request.search_slo_s <= 0:
        return None, None
    epsilon = waiting_factor(rate, problem.timing(work, batch)[1], request.percentile)
    if request.coverage is not None:
        return epsilon, None
    for _ in range(2):
        solution = solve(problem, request.search_slo_s / (1.0 + epsilon))
        seconds = problem.timing(problem.work_at(solution.count), solution.batch)[1]
        before, epsilon = epsilon, waiting_factor(rate, seconds, request.percentile)
        if abs(epsilon - before) < 0.02:
            break
    return epsilon, solution.count / problem.curve.nlist
