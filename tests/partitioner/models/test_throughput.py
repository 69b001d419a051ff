from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.models.throughput import throughput_model, waiting_factor
from hybridindex.types import LLMProfile


def test_one_point_is_the_papers_linear_rule() -> None:
    model = throughput_model(LLMProfile(kv_cache_bytes=1000, throughput_rps=50.0))
    assert model.at(0) == 50.0
    assert model.at(250) == pytest.approx(37.5)
    assert model.at(1000) == model.at(5000) == 0.0
    assert not model.measured


def test_measured_points_win_over_the_linear_rule() -> None:
    points = ((125, 67.0), (250, 542.0), (500, 809.0), (2000, 1559.0))
    model = throughput_model(LLMProfile(kv_cache_bytes=4000, throughput_rps=3706.0, points=points))
    assert model.measured
    assert model.at(3500) == pytest.approx(809.0)
    assert model.at(4000 - 60) == pytest.approx(67.0 * 60 / 125)


def test_what_was_not_measured_is_said() -> None:
    linear = throughput_model(LLMProfile(kv_cache_bytes=1000, throughput_rps=50.0))
    assert linear.unmeasured(0) == []
    assert "linear rule" in linear.unmeasured(10)[0]
    measured = throughput_model(LLMProfile(kv_cache_bytes=1000, throughput_rps=50.0, points=((400, 5.0),)))
    assert measured.unmeasured(600) == []
    assert measured.extrapolated(601)
    assert "less than 400 bytes" in measured.unmeasured(601)[0]
    assert not measured.extrapolated(1000)


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 100)), max_size=8), st.floats(0, 100))
def test_throughput_never_rises_as_the_index_grows(points: list[tuple[int, float]], top: float) -> None:
    model = throughput_model(LLMProfile(kv_cache_bytes=1000, throughput_rps=top, points=tuple(points)))
    rates = [model.at(b) for b in range(0, 1100, 50)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0.0


def test_bad_points_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="llm point"):
        throughput_model(LLMProfile(kv_cache_bytes=10, throughput_rps=float("nan")))


def test_waiting_factor_at_full_load_is_what_the_paper_saw() -> None:
    assert waiting_factor(1e6, 1.0, 90) == pytest.approx(0.9)
    assert waiting_factor(0.01, 1.0, 90) == 0.0
    assert waiting_factor(0.0, 1.0, 90) == 0.0


@given(st.floats(0, 1e4), st.floats(0, 10), st.floats(1, 99))
def test_waiting_factor_rises_with_load(rate: float, seconds: float, percentile: float) -> None:
    low, high = waiting_factor(rate, seconds, percentile), waiting_factor(rate * 2, seconds, percentile)
    assert 0.0 <= low <= high <= percentile / 100 + 1e-9
