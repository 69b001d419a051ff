from __future__ import annotations

import numpy as np
import pytest

from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.partitioner.models import order_stats
from hybridindex.partitioner.models.hitrate import MODEL_NAMES, HitRateName, distribution
from hybridindex.partitioner.models.validate_hitrate import validate_hit_rate_models
from hybridindex.partitioner.plan import make_plan
from hybridindex.partitioner.request import PlanRequest
from tests.partitioner.synthetic import make_profile


def test_best_model_meets_the_target_on_unseen_queries(large_analysis: Analysis) -> None:
    validation = validate_hit_rate_models(large_analysis.curve)
    median, worst = validation.summary()[validation.best]
    assert median <= 0.05
    assert worst <= 0.10
    assert set(validation.summary()) == {"beta", "empirical", "beta_binomial"}
    scores = {name: validation.errors(name).mean() for name in validation.summary()}
    assert scores[validation.best] == min(scores.values())


@pytest.mark.parametrize(
    ("best", "sample"),
    [
        # One probe hits or misses: no bell.
        ("empirical", {"nprobe": 1, "n": 80, "skew": 0.5, "seed": 1}),
        # Hit rates of many unequal probes are smooth, and few queries say little of their tail.
        ("beta", {"nprobe": 16, "n": 200, "skew": 0.5, "seed": 0}),
        # Hit rates of few equal probes come in steps.
        ("beta_binomial", {"nprobe": 4, "n": 200, "skew": 0.5, "seed": 0}),
    ],
)
def test_a_plan_predicts_with_the_model_that_validates_best(best: HitRateName, sample: dict[str, float]) -> None:
    analysis = analyse(make_profile(nlist=64, batches=(1, 4), repeats=2, **sample))  # type: ignore[arg-type]
    validation = analysis.hit_rates
    scores = {name: validation.errors(name).mean() for name in MODEL_NAMES}
    others = [score for name, score in scores.items() if name != best]
    assert scores[best] < 0.9 * min(others)
    assert validation.best == best
    plan = make_plan(
        analysis.profile,
        PlanRequest.resolve(slo_ms=2.0, device_budget_bytes=64 << 20, coverage=0.25),
        analysis=analysis,
    )
    assert plan.hit_rate_model == best
    curve = analysis.curve
    predicted = {name: distribution(curve, curve.at(16), name).expected_min(4) for name in MODEL_NAMES}
    assert plan.predicted_min_hit_rate(4) == predicted[best]
    assert all(abs(predicted[name] - predicted[best]) > 1e-4 for name in MODEL_NAMES if name != best)


def test_measured_minimum_equals_random_batches() -> None:
    rng = np.random.default_rng(0)
    rates = rng.beta(2, 3, size=300)
    drawn = np.mean([rates[rng.permutation(300)[:16]].min() for _ in range(4000)])
    assert order_stats.expected_min(np.sort(rates), 16) == pytest.approx(drawn, abs=0.003)


def test_batches_larger_than_half_the_queries_are_left_out(analysis: Analysis) -> None:
    validation = validate_hit_rate_models(analysis.curve, batches=(4, 10_000))
    assert {point.batch for point in validation.points} == {4}
