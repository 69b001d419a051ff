from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.partitioner.models import order_stats

VALUES = st.lists(st.integers(0, 20), min_size=2, max_size=8)


@given(VALUES, st.integers(1, 8))
def test_expected_min_equals_the_mean_over_all_batches(values: list[int], batch: int) -> None:
    b = min(batch, len(values))
    every = [min(chosen) for chosen in itertools.combinations(values, b)]
    ascending = np.sort(np.array(values, dtype=np.float64))
    assert order_stats.expected_min(ascending, batch) == pytest.approx(np.mean(every))


def test_avoid_probability_is_hypergeometric() -> None:
    table = order_stats.avoid_probability(10, 3)
    expected = [math.comb(10 - k, 3) / math.comb(10, 3) for k in range(11)]
    assert table == pytest.approx(expected)


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=30), st.integers(1, 70))
def test_window_sum_and_max_describe_the_same_windows(values: list[int], batch: int) -> None:
    x = np.array(values, dtype=np.float64)
    n = x.size
    starts = order_stats.window_starts(n)
    rows = (starts[:, None] + np.arange(batch)) % n
    assert (order_stats.window_sum(x, batch, starts) == x[rows].sum(axis=1)).all()
    assert (order_stats.window_max(x, batch, starts) == x[rows].max(axis=1)).all()


@pytest.mark.parametrize("limit", [37, 1000])
@pytest.mark.parametrize("batch", [1, 2, 3, 7, 19, 64, 65, 200, 201, 999, 1000, 2500])
def test_few_or_many_windows_over_many_values(batch: int, limit: int) -> None:
    x = np.random.default_rng(0).integers(0, 1 << 30, size=1000).astype(np.float64)
    starts = order_stats.window_starts(1000, limit=limit)
    rows = (starts[:, None] + np.arange(batch)) % 1000
    assert (order_stats.window_sum(x, batch, starts) == x[rows].sum(axis=1)).all()
    assert (order_stats.window_max(x, batch, starts) == x[rows].max(axis=1)).all()


def test_window_starts_are_limited_and_spread() -> None:
    starts = order_stats.window_starts(10_000, limit=100)
    assert starts.size == 100
    assert (np.diff(starts) == 100).all()
