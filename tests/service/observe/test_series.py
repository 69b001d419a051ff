"""Samples: what they count, how long they are kept, and that memory and answers stay bounded."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.service.observe.series import Series, _Counts
from hybridindex.service.searches import Observation
from hybridindex.types import SearchResult
from tests.service.conftest import ask


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def series(service, clock):
    return Series(service, clock)


def answered(latency_s, hit_rates):
    rates = np.asarray(hit_rates, dtype=np.float32)
    result = SearchResult(
        ids=np.zeros((len(rates), 1), np.int64),
        distances=np.zeros((len(rates), 1), np.float32),
        hit_rate=rates,
        nprobe_used=np.full(len(rates), 6, np.int32),
    )
    queries = np.zeros((len(rates), 24), np.float32)
    return Observation(queries=queries, queue_s=latency_s / 2, search_s=latency_s / 2, result=result, lowered=False)


def test_a_sample_sums_its_span_up(series, service, clock):
    for latency_s, rates in ((0.01, [1.0, 0.0]), (0.02, [0.5]), (0.2, [0.5])):
        series.observe(answered(latency_s, rates))
    clock.now_s += 1
    sample = series.sample()
    assert (sample.at_s, sample.span_s) == (1001, 1)
    assert (sample.requests, sample.queries) == (3, 4)
    assert sample.hit_rate == pytest.approx(0.5)
    assert sample.expected_hit_rate == service.router.plan.predicted_hit_rate
    assert (sample.slo_ms, sample.judged, sample.met) == (50, 3, 2)
    assert sample.p50_ms == pytest.approx(20, rel=0.026)
    assert sample.p99_ms == pytest.approx(200, rel=0.026)
    [device] = sample.devices
    assert device.pinned_bytes > 0
    clock.now_s += 1
    empty = series.sample()
    assert (empty.requests, empty.p50_ms, empty.hit_rate) == (0, None, None)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=200), st.sampled_from([1, 50, 90, 99, 100]))
def test_a_percentile_is_off_by_half_a_bucket_at_most(latencies, percent):
    counts = _Counts(0.0)
    for latency_s in latencies:
        counts.requests += 1
        counts.latencies[int(math.log(latency_s / 1e-6) / math.log(1.05))] += 1
    exact = sorted(latencies)[math.ceil(len(latencies) * percent / 100) - 1]
    assert counts.percentile_ms(percent) == pytest.approx(exact * 1e3, rel=0.026)


def test_an_hour_is_kept_in_bounded_memory_and_older_samples_are_merged(series, clock):
    for second in range(8000):
        series.observe(answered(0.01, [1.0]))
        if second == 7990:
            series.observe(answered(0.01, [1.0]))
        clock.now_s += 1
        series.sample()
    samples = series.samples()
    assert len(samples) <= 901
    assert [s.span_s for s in samples[-600:]] == [1] * 600
    older = samples[:-600]
    assert {s.span_s for s in older} == {10}
    assert {s.requests for s in older} == {10}
    ends = [s.at_s for s in samples]
    # Nothing twice, nothing left out.
    assert ends == sorted(set(ends))
    assert all(b.at_s - b.span_s == a.at_s for a, b in itertools.pairwise(samples))
    assert ends[-1] - ends[0] >= 3500
    assert sum(s.requests for s in series.samples(since_s=ends[-1] - 100)) == 101
    assert series.samples(ends[-1]) == []
    assert len(json.dumps(series.read(), allow_nan=False)) < 400_000


def test_a_time_that_is_none_is_a_problem(service):
    for bad in ("x", "nan", "inf"):
        answer = ask(service, "GET", "/v1/series", params={"since": bad})
        assert (answer.status_code, answer.json()["field"]) == (400, "since")


def test_without_devices_plan_and_refresher_there_is_still_an_answer(make_service, clock):
    service = make_service(router={"devices": ()}, plan="none")
    series = Series(service, clock)
    clock.now_s += 1
    series.sample()
    read = series.read()
    assert (read["devices"], read["plan_id"], read["refresher"]) == ([], None, None)
    assert read["samples"]["expected_hit_rate"] == [None]
    assert ask(service, "GET", "/v1/plan/tradeoff").json() is None
