"""Epsilon of Eq. 3 from the batching model, instead of the paper's worst case."""

from __future__ import annotations

from hybridindex.partitioner.models.coverage import QueryWork
from hybridindex.partitioner.models.throughput import waiting_factor
from hybridindex.partitioner.request import PlanRequest
from hybridindex.partitioner.solver import Problem, solve

__all__ = ["self_consistent_epsilon"]


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
        solution = solve(problem.at_epsilon(epsilon), request.search_slo_s / (1.0 + epsilon))
        seconds = problem.timing(problem.work_at(solution.count), max(solution.batch, 1))[1]
        before, epsilon = epsilon, waiting_factor(rate, seconds, request.percentile)
        if abs(epsilon - before) < 0.02:
            break
    return epsilon, solution.count / problem.curve.nlist
