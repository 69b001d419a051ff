"""VectorLiteRAG's own rule: Eq. 1 solved for the smallest hit rate of a batch, and HitRate2Coverage of its Beta.

Eq. 1 holds where every query has a core of its own and the device takes no time.
:mod:`hybridindex.partitioner.solver` decides with the models that were fitted; this stands beside it in explanations.
"""

from __future__ import annotations

from hybridindex.partitioner.models.hitrate import hit_rate_to_coverage
from hybridindex.partitioner.solver import Problem

__all__ = ["coverage_of_eq1"]


def coverage_of_eq1(problem: Problem, tau_s: float) -> float | None:
    """Smallest coverage with T_CQ(B) + (1 - eta_min) T_scan(B) <= tau at B = tau mu; ``None`` when none suffices."""
    rate = problem.rate_at(0)
    top = max(problem.latency.max_batch, 1)
    batch = 1 if rate is None else int(min(max(tau_s * rate, 1.0), top))
    parts = problem.latency.parts(problem.curve, problem.curve.at(0), batch)
    scan_s = float(parts.host_s.mean())
    fixed_s = parts.coarse_s + float(parts.rerank_s.mean())
    if fixed_s >= tau_s:
        return None
    needed = 1.0 - (tau_s - fixed_s) / scan_s if scan_s > 0 else 0.0
    return hit_rate_to_coverage(problem.curve, batch, needed, "beta")
