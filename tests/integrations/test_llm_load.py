"""What the engine beside the router tells, as numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.integrations.llm_load import EngineLoad


def test_there_is_no_window_before_a_request_finished() -> None:
    load = EngineLoad()
    load.note_first_tokens([0.1])
    assert load.window_ms() is None
    assert load.read().ttft_s == pytest.approx(0.1)


@given(st.lists(st.floats(1e-3, 100.0), min_size=1, max_size=50))
def test_the_window_is_the_mean_generation_time_within_a_tenth_below(seconds: list[float]) -> None:
    load = EngineLoad()
    load.note_finished(seconds)
    read = load.read()
    assert read.n_finished == len(seconds)
    assert min(seconds) * 0.999 <= read.generation_s <= max(seconds) * 1.001
    assert read.window_ms is not None
    assert read.generation_s * 1e3 / 1.1001 <= read.window_ms <= read.generation_s * 1e3 * 1.0001


def test_near_times_give_the_same_window() -> None:
    windows = set()
    for milliseconds in range(100, 200):
        load = EngineLoad()
        load.note_finished([milliseconds / 1e3])
        windows.add(load.window_ms())
    assert len(windows) <= 9


def test_the_last_requests_count_most_and_nonsense_not_at_all() -> None:
    load = EngineLoad()
    load.note_finished([10.0] * 5 + [1.0] * 60)
    assert load.read().generation_s == pytest.approx(1.0, rel=0.05)
    load.note_finished([math.nan, math.inf, -1.0])
    assert load.read().generation_s == pytest.approx(1.0, rel=0.05)
    load.note_queue(running=3, waiting=2, kv_usage=0.5)
    read = load.read()
    assert (read.running, read.waiting, read.kv_usage) == (3, 2, 0.5)
