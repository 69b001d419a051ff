"""When the load leaves what a plan promised, and only then, an update is asked for."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.models.coverage import build_coverage_curve
from hybridindex.profiler.access import sample_access, split_halves
from hybridindex.refresh.drift import (
    DriftMonitor,
    DriftPolicy,
    DriftState,
    Expectation,
    HitRatePrediction,
    Served,
    Tick,
    Trigger,
    UpdateEnded,
    WindowClosed,
    pool_windows,
    predict_hit_rate,
)
from tests.clustered import small_index
from tests.moving_load import moving_queries
from tests.store.conftest import make_profile

POLICY = DriftPolicy(window_requests=100, window_s=10.0, min_queries=20, cool_down_s=50.0)
PROMISE = Expectation(slo_s=0.1, attainment=0.9, hit_rate=HitRatePrediction(mean=0.6, variance=0.04, n_held=1000))


def serve(monitor, now_s, *, latency_s=0.05, rates=(0.6,)):
    rates = np.asarray(rates, dtype=np.float64)
    return monitor.handle(
        Served(
            now_s=now_s,
            latency_s=latency_s,
            queries=rates.size,
            hit_rate_sum=float(rates.sum()),
            hit_rate_squares=float(rates @ rates),
        )
    )


def window_of(monitor, at_s, *, latency_s=0.05, rate=0.6, n=100):
    actions = []
    for i in range(n):
        actions += serve(monitor, at_s + i * 1e-3, latency_s=latency_s, rates=[rate])
    monitor.check_invariants()
    return actions


def kinds(actions):
    return [type(a) for a in actions]


def test_a_window_closes_after_so_many_requests_and_counts_them():
    monitor = DriftMonitor(PROMISE, POLICY, now_s=0.0)
    for i in range(99):
        assert serve(monitor, 0.01 * i, latency_s=0.2 if i < 20 else 0.05, rates=[0.5, 0.7]) == []
    (closed,) = serve(monitor, 1.0, rates=[0.5, 0.7])
    window = closed.window
    assert (window.requests, window.queries, window.within_slo) == (100, 200, 80)
    assert window.attainment == 0.8
    assert window.hit_rate == pytest.approx(0.6)
    assert window.hit_rate_variance == pytest.approx(0.01)
    assert window.late
    assert not window.outside
    assert not window.off


def test_a_window_closes_after_its_time_and_an_empty_one_is_none():
    monitor = DriftMonitor(PROMISE, POLICY, now_s=0.0)
    assert monitor.handle(Tick(now_s=10.0)) == []
    serve(monitor, 11.0)
    assert monitor.handle(Tick(now_s=19.9)) == []
    (closed,) = monitor.handle(Tick(now_s=20.0))
    assert closed.window.requests == 1
    assert closed.window.thin


def test_a_late_request_belongs_to_the_next_window():
    monitor = DriftMonitor(PROMISE, POLICY, now_s=0.0)
    serve(monitor, 1.0)
    (closed,) = serve(monitor, 30.0)
    assert closed.window.requests == 1
    (closed,) = monitor.handle(Tick(now_s=40.0))
    assert closed.window.requests == 1


@pytest.mark.parametrize(
    ("latency_s", "rate"),
    [(0.2, 0.6), (0.05, 0.3), (0.05, 0.6)],
    ids=["only late", "only another hit rate", "neither"],
)
def test_one_sign_alone_never_triggers(latency_s, rate):
    monitor = DriftMonitor(PROMISE, POLICY, now_s=0.0)
    for i in range(20):
        assert kinds(window_of(monitor, float(i), latency_s=latency_s, rate=rate)) == [WindowClosed]
    assert monitor.state is DriftState.STABLE


@pytest.mark.parametrize("rate", [0.3, 0.9])
def test_two_of_three_windows_with_both_signs_trigger_once(rate):
    monitor = DriftMonitor(PROMISE, POLICY, now_s=0.0)
    assert kinds(window_of(monitor, 0.0, latency_s=0.2, rate=rate)) == [WindowClosed]
    assert monitor.state is DriftState.SUSPECT
    assert kinds(window_of(monitor, 1.0)) == [WindowClosed]
    assert monitor.state is DriftState.SUSPECT
    closed, trigger = window_of(monitor, 2.0, latency_s=0.2, rate=rate)
    assert isinstance(trigger, Trigger)
    assert [w.number for w in trigger.windows] == [0, 2]
    assert f"{rate:.3f}" in trigger.reason
    assert trigger.windows[-1] is closed.window
    assert monitor.state is DriftState.DRIFTING
    for i in range(5):
        assert kinds(window_of(monitor, 3.0 + i, latency_s=0.2, rate=rate)) == [WindowClosed]


def test_a_suspicion_passes():
    monitor = DriftMonitor(PROMISE, POLICY, now_s=0.0)
    window_of(monitor, 0.0, latency_s=0.2, rate=0.3)
    for i in range(3):
        window_of(monitor, 1.0 + i)
    assert monitor.state is DriftState.STABLE
    assert kinds(window_of(monitor, 9.0, latency_s=0.2, rate=0.3)) == [WindowClosed]


def test_after_an_update_it_cools_down_and_the_new_promise_counts():
    monitor = DriftMonitor(PROMISE, POLICY, now_s=0.0)
    window_of(monitor, 0.0, latency_s=0.2, rate=0.3)
    window_of(monitor, 1.0, latency_s=0.2, rate=0.3)
    serve(monitor, 1.5, rates=[0.1])
    lower = dataclasses.replace(PROMISE, hit_rate=dataclasses.replace(PROMISE.hit_rate, mean=0.3))
    monitor.handle(UpdateEnded(now_s=2.0, expectation=lower))
    assert monitor.state is DriftState.COOLING_DOWN
    assert monitor.recent == ()
    for i in range(4):
        (closed,) = window_of(monitor, 3.0 + 5 * i, latency_s=0.2, rate=0.6)
        assert closed.window.off
    assert monitor.state is DriftState.COOLING_DOWN
    monitor.handle(Tick(now_s=52.0))
    assert monitor.state is DriftState.STABLE
    assert kinds(window_of(monitor, 53.0, latency_s=0.2, rate=0.3)) == [WindowClosed]
    assert monitor.state is DriftState.STABLE
    window_of(monitor, 54.0, latency_s=0.2, rate=0.6)
    assert kinds(window_of(monitor, 55.0, latency_s=0.2, rate=0.6)) == [WindowClosed, Trigger]


def test_thin_windows_say_nothing():
    monitor = DriftMonitor(PROMISE, POLICY, now_s=0.0)
    for i in range(10):
        window_of(monitor, 20.0 * i, latency_s=0.2, rate=0.0, n=19)
    assert monitor.state is DriftState.STABLE


def test_the_interval_is_what_the_formula_says():
    low, high = PROMISE.hit_rate.interval(400, POLICY)
    half = 3 * math.sqrt(0.04 * (2 / 400 + 1 / 1000)) + 0.01
    assert (low, high) == (pytest.approx(0.6 - half), pytest.approx(0.6 + half))


@given(n=st.integers(1, 10**6), mean=st.floats(0, 1), variance=st.floats(0, 0.25), n_held=st.integers(2, 10**4))
def test_more_queries_never_widen_the_interval(n, mean, variance, n_held):
    prediction = HitRatePrediction(mean=mean, variance=variance, n_held=n_held)
    low, high = prediction.interval(n, POLICY)
    assert 0 <= low <= mean <= high <= 1
    narrow_low, narrow_high = prediction.interval(2 * n, POLICY)
    assert low <= narrow_low
    assert narrow_high <= high


def test_the_interval_holds_means_of_samples_as_often_as_it_should():
    """Means of n of n_held + n draws of one skewed population; z = 2 and no slack: about 95 %."""
    rng = np.random.default_rng(5)
    bare = dataclasses.replace(POLICY, z=2.0, design_effect=1.0, tolerance=0.0)
    inside = 0
    for _ in range(2000):
        held, seen = rng.beta(2.0, 1.0, 150), rng.beta(2.0, 1.0, 200)
        prediction = HitRatePrediction(mean=held.mean(), variance=held.var(ddof=1), n_held=150)
        low, high = prediction.interval(200, bare)
        inside += low <= seen.mean() <= high
    assert 0.93 < inside / 2000 < 0.975


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """Real queries of an index: the prediction of a hot set, and hit rates of a stationary and of a moved load."""
    with small_index(tmp_path_factory.mktemp("drift") / "i") as index:
        queries = moving_queries(600, seed=1, moved=False)
        fit, held = split_halves(len(queries), 0)
        access = sample_access(index, queries[fit], queries[held], 4)
        profile = make_profile(
            nlist=index.nlist, nprobe=4, list_bytes=index.list_bytes, list_sizes=index.list_sizes, access=access
        )
        curve = build_coverage_curve(profile)
        hot = curve.order[:8]
        resident = np.zeros(index.nlist, dtype=np.bool_)
        resident[hot] = True

        def hit_rates(n, seed, *, moved):
            probes, _ = index.quantize(moving_queries(n, seed=seed, moved=moved), 4)
            work = index.list_bytes[probes]
            return np.where(resident[probes], work, 0).sum(axis=1) / work.sum(axis=1)

        yield predict_hit_rate(curve, hot), hit_rates


@pytest.mark.parametrize("seed", range(5))
def test_a_stationary_load_never_triggers_in_50_windows_however_late_it_is(sampled, seed):
    prediction, hit_rates = sampled
    monitor = DriftMonitor(dataclasses.replace(PROMISE, hit_rate=prediction), POLICY, now_s=0.0)
    windows = triggers = 0
    for i, rate in enumerate(hit_rates(5000, 100 + seed, moved=False)):
        for action in serve(monitor, i * 1e-3, latency_s=1.0, rates=[rate]):
            windows += isinstance(action, WindowClosed)
            triggers += isinstance(action, Trigger)
    assert (windows, triggers) == (50, 0)


def test_a_load_that_moved_triggers_within_three_windows(sampled):
    prediction, hit_rates = sampled
    monitor = DriftMonitor(dataclasses.replace(PROMISE, hit_rate=prediction), POLICY, now_s=0.0)
    actions = []
    for i, rate in enumerate(hit_rates(300, 7, moved=True)):
        actions += serve(monitor, i * 1e-3, latency_s=1.0, rates=[rate])
    assert Trigger in kinds(actions)


def test_pooled_windows_are_one_window_of_all_requests():
    monitor = DriftMonitor(PROMISE, POLICY, now_s=0.0)
    windows = tuple(window_of(monitor, float(i), rate=0.2 * i)[0].window for i in range(1, 4))
    pooled = pool_windows(windows)
    assert (pooled.requests, pooled.number) == (300, 2)
    assert pooled.hit_rate == pytest.approx(0.4)
    assert pool_windows(()) is None


@given(
    st.lists(
        st.tuples(st.sampled_from(["serve", "tick", "end"]), st.floats(0, 30), st.booleans(), st.floats(0, 1)),
        max_size=80,
    )
)
def test_whatever_happens_the_state_fits_the_windows(events):
    policy = dataclasses.replace(POLICY, window_requests=3, min_queries=2)
    monitor = DriftMonitor(PROMISE, policy, now_s=0.0)
    now, waiting = 0.0, False
    for kind, gap, late, rate in events:
        now += gap
        if kind == "end":
            monitor.handle(UpdateEnded(now_s=now))
            waiting = False
            actions = []
        elif kind == "tick":
            actions = monitor.handle(Tick(now_s=now))
        else:
            actions = serve(monitor, now, latency_s=1.0 if late else 0.0, rates=[rate])
        triggered = Trigger in kinds(actions)
        assert not (triggered and waiting), "a second trigger before the first was answered"
        waiting = waiting or triggered
        assert waiting == (monitor.state is DriftState.DRIFTING)
        monitor.check_invariants()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"window_requests": 0}, "window_requests"),
        ({"window_s": 0.0}, "window_s"),
        ({"z": math.inf}, "z is"),
        ({"tolerance": -0.1}, "tolerance"),
        ({"off_windows": 4}, "off_windows"),
        ({"cool_down_s": math.nan}, "cool_down_s"),
    ],
)
def test_policies_that_make_no_sense_are_refused(changes, field):
    with pytest.raises(InvalidInputError, match=field):
        DriftPolicy(**changes)
