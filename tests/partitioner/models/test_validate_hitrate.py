from __future__ import annotations

import numpy as np
import pytest

from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.models import order_stats
from hybridindex.partitioner.models.validate_hitrate import validate_hit_rate_models


def test_best_model_meets_the_target_on_unseen_queries(large_analysis: Analysis) -> None:
    validation = validate_hit_rate_models(large_analysis.curve)
    median, worst = validation.summary()[validation.best]
    assert median <= 0.05
    assert worst <= 0.10
    assert set(validation.summary()) == {"beta", "empirical", "beta_binomial"}
    scores = {name: validation.errors(name).mean() for name in validation.summary()}
    assert scores[validation.best] == min(scores.values())


def test_measured_minimum_equals_random_batches() -> None:
    rng = np.random.default_rng(0)
    rates = rng.beta(2, 3, size=300)
    drawn = np.mean([rates[rng.permutation(300)[:16]].min() for _ in range(4000)])
    assert order_stats.expected_min(np.sort(rates), 16) == pytest.approx(drawn, abs=0.003)


def test_batches_larger_than_half_the_queries_are_left_out(analysis: Analysis) -> None:
    validation = validate_hit_rate_models(analysis.curve, batches=(4, 10_000))
    assert {point.batch for point in validation.points} == {4}
