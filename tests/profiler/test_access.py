from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError, ProfileMismatchError
from hybridindex.profiler.access import (
    access_counts,
    hot_order,
    sample_access,
    sample_size_error,
    skew_summary,
    smooth,
    split_halves,
)
from hybridindex.types import AccessSample
from tests.partitioner.synthetic import make_profile, zipf_probes


@given(n=st.integers(2, 500), seed=st.integers(0, 99))
def test_halves_are_disjoint_and_complete(n, seed):
    fit, held = split_halves(n, seed)
    assert sorted([*fit, *held]) == list(range(n))
    assert 0 <= len(held) - len(fit) <= 1


def test_sample_holds_the_index_s_probes_of_each_half(index, queries):
    x = index.transform(queries)
    ticks = []
    access = sample_access(index, x[:80], x[80:], 5, progress=lambda done, total: ticks.append((done, total)))
    np.testing.assert_array_equal(access.fit_probes, index.quantize(x[:80], 5)[0])
    np.testing.assert_array_equal(access.held_probes, index.quantize(x[80:], 5)[0])
    np.testing.assert_array_equal(access.list_accesses, access_counts(access.fit_probes, index.nlist))
    assert access.list_accesses.sum() == 80 * 5
    assert ticks[-1] == (200, 200)


def test_history_adds_decayed_counts_scaled_to_this_nprobe(index, queries):
    x = index.transform(queries)
    past = replace(make_profile(nlist=index.nlist, nprobe=10), index_fingerprint=index.fingerprint)
    plain = sample_access(index, x[:80], x[80:], 5)
    smoothed = sample_access(index, x[:80], x[80:], 5, history=past, decay=0.25)
    np.testing.assert_allclose(smoothed.list_accesses - plain.list_accesses, past.access.list_accesses * 0.25 * 0.5)
    np.testing.assert_array_equal(smoothed.held_probes, plain.held_probes)


def test_history_of_another_index_is_refused(index, queries):
    x = index.transform(queries)
    with pytest.raises(ProfileMismatchError, match=f"index-1.*{index.fingerprint}"):
        sample_access(index, x[:80], x[80:], 5, history=make_profile(nlist=index.nlist))


@given(decay=st.floats(0, 1), days=st.integers(1, 6))
def test_smoothing_day_by_day_weighs_old_days_by_powers_of_decay(decay, days):
    fresh = np.random.default_rng(days).integers(0, 50, (days, 7)).astype(np.float64)
    total = fresh[0]
    for day in fresh[1:]:
        total = smooth(total, day, decay=decay)
    weights = decay ** np.arange(days - 1, -1, -1.0)
    np.testing.assert_allclose(total, (weights[:, None] * fresh).sum(axis=0), atol=1e-9)


@pytest.mark.parametrize(
    ("options", "said"), [({"decay": 1.5}, "decay is 1.5"), ({"decay": -0.1}, "decay"), ({"scale": 0.0}, "scale")]
)
def test_smoothing_refuses_senseless_weights(options, said):
    with pytest.raises(InvalidInputError, match=said):
        smooth(np.ones(3), np.ones(3), **options)


def test_smoothing_refuses_another_number_of_lists():
    with pytest.raises(InvalidInputError, match=r"4 lists.*3"):
        smooth(np.ones(4), np.ones(3))


def test_hot_order_breaks_ties_by_id():
    np.testing.assert_array_equal(hot_order(np.array([1.0, 3.0, 3.0, 0.0])), [1, 2, 0, 3])


def test_skew_is_told_by_count_and_by_bytes_in_and_out_of_sample():
    fit = np.array([[0, 1], [0, 2], [0, 1], [0, 3]], dtype=np.int32)
    held = np.array([[0, 3], [3, 2]], dtype=np.int32)
    profile = replace(
        make_profile(nlist=4, nprobe=2),
        access=AccessSample(fit_probes=fit, held_probes=held, list_accesses=access_counts(fit, 4)),
        list_bytes=np.array([100, 10, 10, 280], dtype=np.int64),
    )
    (row,) = skew_summary(profile, [0.25])
    assert row["lists"] == 0.25
    assert row["bytes"] == 100 / 400
    assert row["accesses_fit"] == 4 / 8
    assert row["accesses_held"] == 1 / 4
    assert row["work_fit"] == 400 / (400 + 20 + 10 + 280)
    assert row["work_held"] == 100 / (100 + 280 + 280 + 10)


def test_in_sample_skew_flatters():
    profile = make_profile(nlist=256, n=60, skew=0.6)
    for row in skew_summary(profile):
        assert row["accesses_fit"] >= row["accesses_held"]


def test_larger_calibration_samples_err_less():
    rng = np.random.default_rng(0)
    probes = zipf_probes(rng, 4000, 128, 8, 1.0)
    list_bytes = rng.integers(100, 1000, 128)
    fit, held = probes[:2000], probes[2000:]
    access = AccessSample(fit_probes=fit, held_probes=held, list_accesses=access_counts(fit, 128))
    small, large = sample_size_error(access, list_bytes, [0.005, 0.5])
    assert small["n_queries"] == 20
    assert large["n_queries"] == 2000
    assert 0 <= large["order_loss"] < small["order_loss"] < 0.3
    assert large["curve_error"] < small["curve_error"] < 0.3
    (everything,) = sample_size_error(access, list_bytes, [1.0])
    assert everything["order_loss"] == 0
    assert everything["curve_error"] == 0
