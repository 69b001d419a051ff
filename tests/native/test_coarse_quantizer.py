"""Coarse quantization by every set of kernels: against float64, to the bit whatever the batch, and bad input."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex import _native
from tests.examples import examples

KERNELS = _native.kernels_here()
METRICS = ("ip", "l2")
native: Any = _native


def make(centroids, metric, kernels=""):
    return native.CoarseQuantizer(centroids, metric == "ip", kernels)


def quantize(quantizer, queries, p):
    lists = np.full((len(queries), p), 77, np.int64)
    distances = np.full((len(queries), p), 77, np.float32)
    quantizer.quantize(queries, lists, distances)
    return lists, distances


def exact(centroids, queries, metric):
    """Distances in float64, smaller is nearer: (n, nlist)."""
    c, q = centroids.astype(np.float64), queries.astype(np.float64)
    return -q @ c.T if metric == "ip" else ((q[:, None] - c[None]) ** 2).sum(axis=2)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kernels", KERNELS)
@examples(40)
@given(
    nlist=st.sampled_from([1, 2, 15, 16, 17, 33, 100, 257, 900]),
    dim=st.sampled_from([1, 3, 16, 17, 63, 64, 100]),
    n=st.sampled_from([0, 1, 2, 3, 5, 16, 17, 63, 64, 65, 130]),
    share=st.sampled_from([0.0, 0.01, 0.05, 0.2, 0.3, 0.5, 1.0]),
    values=st.sampled_from([1, 8]),
    seed=st.integers(0, 10_000),
)
def test_whole_numbers_are_ordered_by_distance_and_list(kernels, metric, nlist, dim, n, share, values, seed):
    """Small whole numbers: distances are exact, and many are equal."""
    rng = np.random.default_rng(seed)
    centroids = rng.integers(-values, values + 1, (nlist, dim)).astype(np.float32)
    queries = rng.integers(-values, values + 1, (n, dim)).astype(np.float32)
    p = max(1, int(share * nlist))
    quantizer = make(centroids, metric, kernels)
    assert quantizer.kernels == kernels
    lists, distances = quantize(quantizer, queries, p)
    want = exact(centroids, queries, metric)
    order = np.argsort(want, axis=1, kind="stable")[:, :p]
    np.testing.assert_array_equal(lists, order)
    found = np.take_along_axis(want, order, axis=1)
    np.testing.assert_array_equal(distances, -found if metric == "ip" else found)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("nlist", "dim", "p"), [(1300, 48, 25), (700, 31, 300), (700, 16, 700), (9000, 16, 1500)])
def test_a_query_gets_the_same_in_every_batch(kernels, metric, nlist, dim, p):
    rng = np.random.default_rng(nlist + p)
    centroids = rng.standard_normal((nlist, dim), dtype=np.float32)
    queries = rng.standard_normal((300, dim), dtype=np.float32)
    quantizer = make(centroids, metric, kernels)
    lists, distances = quantize(quantizer, queries, p)

    want = exact(centroids, queries, metric)
    nearest = np.sort(want, axis=1)[:, :p]
    np.testing.assert_allclose(np.take_along_axis(want, lists, axis=1), nearest, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(-distances if metric == "ip" else distances, nearest, rtol=1e-5, atol=1e-4)
    assert all(len(set(row)) == p for row in lists.tolist())

    def check(rows):
        found = quantize(quantizer, np.ascontiguousarray(queries[rows]), p)
        np.testing.assert_array_equal(found[0], lists[rows])
        np.testing.assert_array_equal(found[1].view(np.int32), distances[rows].view(np.int32))

    sizes = range(1, 301) if p == 25 else [1, 2, 3, 7, 16, 19, 20, 33, 64, 65, 200]
    for size in sizes:
        check(rng.permutation(300)[:size])
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(check, [rng.permutation(300)[:size] for size in (1, 5, 64, 120) * 3]))


@pytest.mark.parametrize("kernels", KERNELS)
def test_zeros_of_both_signs_are_equal(kernels):
    """The product is too small for a float: -0 or 0."""
    centroids = np.array([[-1e-30], [1e-30], [-1e-30], [1e-30]], np.float32)
    for query in (1e-30, -1e-30):
        lists, distances = quantize(make(centroids, "ip", kernels), np.array([[query]], np.float32), 4)
        np.testing.assert_array_equal(lists, [[0, 1, 2, 3]])
        np.testing.assert_array_equal(distances, np.zeros((1, 4)))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("p", [2, 5, 40])
def test_a_centroid_that_is_no_number_is_never_found(metric, p):
    rng = np.random.default_rng(0)
    centroids = rng.standard_normal((40, 8), dtype=np.float32)
    centroids[[0, 3, 17, 39], [0, 1, 2, 3]] = [np.nan, np.inf, -np.nan, np.nan]
    queries = np.abs(rng.standard_normal((3, 8), dtype=np.float32))
    lists, distances = quantize(make(centroids, metric), queries, p)
    if metric == "ip":  # infinitely similar
        np.testing.assert_array_equal(lists[:, 0], [3, 3, 3])
    good = np.setdiff1d(np.arange(40), [0, 17, 39] if metric == "ip" else [0, 3, 17, 39])
    for row, found in zip(lists, distances, strict=True):
        kept = row >= 0
        assert set(row[kept].tolist()) <= set(good.tolist())
        assert kept.sum() == min(p, len(good))
        assert (np.abs(found[~kept]) > 1e38).all()


@pytest.mark.parametrize("metric", METRICS)
def test_the_same_distance_everywhere_is_ordered_by_list(metric):
    centroids = np.ones((2000, 16), np.float32)
    for p in (1, 30, 499, 500, 2000):
        lists, _ = quantize(make(centroids, metric), np.zeros((3, 16), np.float32), p)
        np.testing.assert_array_equal(lists, np.tile(np.arange(p), (3, 1)))


def test_all_of_very_many_lists_come_in_order():
    """So many keys that the queries come in several groups."""
    rng = np.random.default_rng(0)
    centroids = rng.integers(-500, 500, (70_000, 1)).astype(np.float32)
    queries = rng.integers(-500, 500, (20, 1)).astype(np.float32)
    lists, _ = quantize(make(centroids, "l2"), queries, len(centroids))
    np.testing.assert_array_equal(lists, np.argsort(exact(centroids, queries, "l2"), axis=1, kind="stable"))


def test_arrays_that_do_not_fit_are_refused():
    quantizer = make(np.zeros((5, 3), np.float32), "l2")
    lists, distances = np.zeros((2, 4), np.int64), np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match=r"queries must be \(n, 3\)"):
        quantizer.quantize(np.zeros((2, 4), np.float32), lists, distances)
    with pytest.raises(ValueError, match="agree on n and p"):
        quantizer.quantize(np.zeros((3, 3), np.float32), lists, distances)
    with pytest.raises(ValueError, match="agree on n and p"):
        quantizer.quantize(np.zeros((2, 3), np.float32), lists, distances[:, :3].copy())
    for p in (0, 6):
        with pytest.raises(ValueError, match=f"p is {p}; expected 1 to 5"):
            quantize(quantizer, np.zeros((2, 3), np.float32), p)
    with pytest.raises(TypeError):
        quantizer.quantize(np.zeros((2, 3), np.float64), lists, distances)
    with pytest.raises(ValueError, match="nlist is 0; expected 1 to"):
        make(np.zeros((0, 3), np.float32), "l2")
    with pytest.raises(ValueError, match="dim is 0; expected 1 to"):
        make(np.zeros((3, 0), np.float32), "l2")
    with pytest.raises(ValueError, match='kernels "sse" do not run'):
        make(np.zeros((3, 3), np.float32), "l2", "sse")
