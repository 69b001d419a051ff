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
@pytest.mark.parametrize("helpers", [0, 1, 3])
@pytest.mark.parametrize(
    ("nlist", "dim", "p"), [(4000, 128, 3), (4000, 128, 200), (3999, 100, 1000), (4001, 128, 4001)]
)
def test_helpers_change_nothing(metric, helpers, nlist, dim, p):
    rng = np.random.default_rng(p)
    # Whole numbers: many distances are equal.
    centroids = rng.integers(-3, 4, (nlist, dim)).astype(np.float32)
    centroids[7, 0] = np.nan
    queries = rng.integers(-3, 4, (130, dim)).astype(np.float32)
    quantizer, pool = make(centroids, metric), native.ThreadPool(helpers)
    expected = quantize(quantizer, queries, p)

    def differs(some):
        lists, distances = np.empty((len(some), p), np.int64), np.empty((len(some), p), np.float32)
        quantizer.quantize(some, lists, distances, pool)
        at = slice((130 - len(some)) // 2, (130 + len(some)) // 2)
        return (lists != expected[0][at]).any() or (distances != expected[1][at]).any()

    batches = [queries[(130 - n) // 2 : (130 + n) // 2] for n in (130, 64, 16, 2)]
    with ThreadPoolExecutor(3) as callers:
        assert not any(callers.map(differs, batches * 6))
    if p == nlist:
        assert (expected[0][:, -1] == -1).all()


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


def device_keys(centroids, queries, metric, rounding, rng):
    """(n, nlist) float32: how far centroids are as a device computes it, smaller is nearer; "tf32" cuts the factors of
    each product to 10 bits, "worst" adds as much as is allowed."""
    half = (centroids.astype(np.float64) ** 2).sum(axis=1) / 2 if metric == "l2" else np.zeros(len(centroids))
    half = half.astype(np.float32)
    if rounding == "tf32":
        short = [(x.view(np.int32) & ~0x1FFF).view(np.float32) for x in (queries.copy(), centroids.copy())]
        return half - (short[0] @ short[1].T).astype(np.float32)
    keys = half - queries.astype(np.float64) @ centroids.astype(np.float64).T
    most = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(centroids, axis=1).max()
    return (keys + rng.choice([-1, 1], keys.shape) * most / 512).astype(np.float32)


def nearest_of(quantizer, queries, keys, m, p):
    candidates = np.argpartition(keys, m - 1, axis=1)[:, :m].astype(np.int32)
    farthest = np.take_along_axis(keys, candidates.astype(np.int64), axis=1).max(axis=1)
    lists, distances = np.full((len(queries), p), 77, np.int64), np.full((len(queries), p), 77, np.float32)
    settled = np.ones(len(queries), np.bool_)
    quantizer.nearest_of(queries, candidates, farthest, lists, distances, settled)
    return lists, distances, settled


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kernels", KERNELS)
@examples(60)
@given(
    nlist=st.sampled_from([40, 257, 900]),
    dim=st.sampled_from([1, 3, 17, 64, 100]),
    p=st.sampled_from([1, 3, 20]),
    spare=st.sampled_from([0, 1, 5, 20]),
    kind=st.sampled_from(["normal", "whole", "far"]),
    rounding=st.sampled_from(["tf32", "worst"]),
    scale=st.sampled_from([1e-22, 1.0, 1e6]),
    seed=st.integers(0, 10_000),
)
def test_what_a_device_chose_is_proven(kernels, metric, nlist, dim, p, spare, kind, rounding, scale, seed):
    """However a device rounds within the bound, what is settled is what is found among all lists."""
    rng = np.random.default_rng(seed)
    make_rows = whole if kind == "whole" else normal
    centroids, queries = make_rows(rng, nlist, dim), make_rows(rng, 16, dim)
    if kind == "far":
        centroids, queries = centroids + 50, queries + 50
    centroids, queries = (np.ascontiguousarray(x * np.float32(scale)) for x in (centroids, queries))
    quantizer = make(centroids, metric, kernels)
    lists, distances = quantize(quantizer, queries, p)
    keys = device_keys(centroids, queries, metric, rounding, rng)
    *found, settled = nearest_of(quantizer, queries, keys, p + spare, p)
    same_bits([x[settled] for x in found], [x[settled] for x in (lists, distances)])


@pytest.mark.parametrize("metric", METRICS)
def test_enough_candidates_settle_every_query(metric):
    rng = np.random.default_rng(0)
    centroids, queries = normal(rng, 3000, 64), normal(rng, 50, 64)
    quantizer = make(centroids, metric)
    keys = device_keys(centroids, queries, metric, "tf32", rng)
    *found, settled = nearest_of(quantizer, queries, keys, 136, 64)
    assert settled.all()
    same_bits(found, quantize(quantizer, queries, 64))
    # With none to spare the last ones might be others.
    assert not nearest_of(quantizer, queries, keys, 64, 64)[2].any()


@pytest.mark.parametrize("metric", METRICS)
def test_a_device_that_lies_settles_nothing(metric):
    rng = np.random.default_rng(0)
    centroids, queries = normal(rng, 300, 16), normal(rng, 6, 16)
    quantizer = make(centroids, metric)
    keys = device_keys(centroids, queries, metric, "tf32", rng)
    candidates = np.argsort(keys, axis=1)[:, :200].astype(np.int32)
    farthest = np.sort(keys, axis=1)[:, 199].copy()
    lists, distances = np.empty((6, 5), np.int64), np.empty((6, 5), np.float32)
    settled = np.zeros(6, np.bool_)
    quantizer.nearest_of(queries, candidates, farthest, lists, distances, settled)
    assert settled.all()
    candidates[0, 7], candidates[1, 7], candidates[2, 7] = -1, 300, candidates[2, 8]
    farthest[3], farthest[4] = np.nan, -np.inf
    quantizer.nearest_of(queries, candidates, farthest, lists, distances, settled)
    assert settled.tolist() == [False] * 5 + [True]
    centroids[5, 3] = np.nan
    make(centroids, metric).nearest_of(queries, candidates, farthest, lists, distances, settled)
    assert not settled.any()
    wrong = [
        (queries[:, :8].copy(), candidates, farthest, "queries must be"),
        (queries, candidates[:, :4].copy(), farthest, "p is 5; expected 1 to 4"),
        (queries, np.zeros((6, 301), np.int32), farthest, "candidates is 301; expected 1 to 300"),
        (queries, candidates[:3], farthest, "must agree"),
        (queries, candidates, farthest[:3].copy(), "must agree"),
    ]
    for *given_, words in wrong:
        with pytest.raises(ValueError, match=words):
            quantizer.nearest_of(*given_, lists, distances, settled)


def same_bits(found, right):
    """Lists and distances, to the bit."""
    np.testing.assert_array_equal(found[0], right[0])
    np.testing.assert_array_equal(found[1].view(np.int32), right[1].view(np.int32))


def check_few_as_in_a_batch(quantizer, queries, p, starts=(0, 7, 18, 38)):
    """One query and two, which rounded centroids may answer, against more, which are compared with all centroids."""
    assert len(queries) > 2
    lists, distances = quantize(quantizer, queries, p)
    if p == 1:
        # Centroids in bytes are filtered for these; for two lists none is.
        right = quantize(quantizer, queries, 2)
        same_bits((lists[:, 0], distances[:, 0]), (right[0][:, 0].copy(), right[1][:, 0].copy()))
        for n in (3, 4, 17):
            same_bits(quantize(quantizer, queries[:n], 1), (lists[:n], distances[:n]))
    for n in (1, 2):
        for first in starts:
            few = slice(first, first + n)
            same_bits(quantize(quantizer, queries[few], p), (lists[few], distances[few]))
    return lists, distances


def normal(rng, n, dim):
    return rng.standard_normal((n, dim), dtype=np.float32)


def whole(rng, n, dim):
    return rng.integers(-3, 4, (n, dim)).astype(np.float32)


def scaled(scale):
    return lambda rng, nlist, dim: (
        normal(rng, nlist, dim) * np.float32(scale),
        normal(rng, 40, dim) * np.float32(scale),
    )


def with_copies(rng, nlist, dim):
    return normal(rng, 300, dim)[rng.integers(0, 300, nlist)], normal(rng, 40, dim)


def far_from_the_origin(rng, nlist, dim):
    return normal(rng, nlist, dim) + 1000, normal(rng, 40, dim) + 1000


def near_each_other(rng, nlist, dim):
    middle = normal(rng, 1, dim)
    return middle + normal(rng, nlist, dim) * np.float32(1e-3), middle + normal(rng, 40, dim)


def of_many_lengths(rng, nlist, dim):
    lengths = np.exp(rng.uniform(-12, 12, (nlist, 1))).astype(np.float32)
    return normal(rng, nlist, dim) * lengths, normal(rng, 40, dim)


def of_few_large_numbers(rng, nlist, dim):
    """What is rounded to 127 is a hundred times as large as most, and differs from one to the next."""
    centroids, queries = normal(rng, nlist, dim), normal(rng, 40, dim)
    for rows in (centroids, queries):
        rows[np.arange(len(rows)), rng.integers(0, dim, len(rows))] *= 100
    return centroids, queries


def rounded_all_one_way(rng, nlist, dim):
    """A centroid's numbers are equal, and so are their errors, but for one number that is the step: of any size."""
    centroids = np.tile(rng.uniform(0.8, 1.2, (nlist, 1)), dim)
    centroids[:, 0] = rng.uniform(1, 12, nlist)
    queries = np.tile(rng.uniform(0.5, 2, (40, 1)) * rng.choice([-1, 1], (40, 1)), dim)
    queries[:, 0] = 0
    return centroids.astype(np.float32), queries.astype(np.float32)


def queries_rounded_both_ways(rng, nlist, dim):
    """Half of a query's numbers are rounded up and half down, and each centroid has one half."""
    half = dim // 2
    centroids = np.tile(rng.uniform(0.8, 1.2, (nlist, 1)), dim)
    centroids[:, -1] = 0
    centroids[::2, :half] = centroids[1::2, half:] = 0
    queries = np.full((40, dim), 1.49)
    queries[:, half:] = 1.51
    queries[:, -1] = 127
    return centroids.astype(np.float32), (queries * rng.uniform(0.5, 2, (40, 1))).astype(np.float32)


def of_whole_steps(rng, nlist, dim):
    """Rounding loses nothing, and distances differ by less than sums in float do."""
    signs = rng.choice([-1, 1], dim)
    centroids = np.tile(rng.integers(60, 120, dim) * signs, (nlist, 1))
    for change in (-1, 1):
        centroids[np.arange(nlist), rng.integers(1, dim, nlist)] += change
    queries = -rng.integers(60, 127, (40, dim)) * signs
    centroids[:, 0], queries[:, 0] = 127, -127
    return (centroids * 0.1234567).astype(np.float32), (queries * 0.7654321).astype(np.float32)


def with_zeros(rng, nlist, dim):
    centroids, queries = normal(rng, nlist, dim), normal(rng, 40, dim)
    centroids[rng.permutation(nlist)[: nlist // 10]] = 0
    queries[[0, 8]] = 0
    queries[39] = -0.0
    return centroids, queries


def at_centroids(rng, nlist, dim):
    centroids = normal(rng, nlist, dim)
    return centroids, centroids[rng.integers(0, nlist, 40)]


def with_one_that_is(value):
    def make_both(rng, nlist, dim):
        centroids = normal(rng, nlist, dim)
        centroids[nlist // 2, dim - 1] = value
        return centroids, normal(rng, 40, dim)

    return make_both


FEW = {
    "random": scaled(1),
    "whole": lambda rng, nlist, dim: (whole(rng, nlist, dim), whole(rng, 40, dim)),
    "copies": with_copies,
    "far from the origin": far_from_the_origin,
    "near each other": near_each_other,
    "of many lengths": of_many_lengths,
    "of few large numbers": of_few_large_numbers,
    "rounded all one way": rounded_all_one_way,
    "queries rounded both ways": queries_rounded_both_ways,
    "of whole steps": of_whole_steps,
    "zeros": with_zeros,
    "at centroids": at_centroids,
    "1e-40": scaled(1e-40),
    "1e-25": scaled(1e-25),
    "1e-19": scaled(1e-19),
    "1e13": scaled(1e13),
    "1e14": scaled(1e14),
    "1e18": scaled(1e18),
    "one is no number": with_one_that_is(np.nan),
    "one is infinite": with_one_that_is(np.inf),
}


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", FEW)
def test_few_queries_get_what_they_get_in_a_batch(kind, kernels, metric):
    """Values of all kinds. Centroids are no whole blocks, and dimensions no whole steps of what compares them."""
    rng = np.random.default_rng(list(FEW).index(kind))
    nlist, dim = (501, 1000) if kind == "of whole steps" else (2001, 100)
    centroids, queries = FEW[kind](rng, nlist, dim)
    quantizer = make(centroids, metric, kernels)
    for p in (1, 20, nlist // 3):
        check_few_as_in_a_batch(quantizer, queries, p)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("nlist", [3999, 4000, 4001])
@pytest.mark.parametrize("dim", [100, 256, 384])
def test_few_queries_get_what_they_get_in_a_batch_in_every_shape(nlist, dim, kernels, metric):
    rng = np.random.default_rng(nlist + dim)
    quantizer = make(normal(rng, nlist, dim), metric, kernels)
    queries = normal(rng, 40, dim)
    # The last is beyond what rounding is used for.
    for p in (1, 20, nlist // 3, nlist // 3 + 1):
        check_few_as_in_a_batch(quantizer, queries, p, starts=(0, 17))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("nlist", "dim"), [(8191, 16), (8192, 16), (1310, 100), (1311, 100), (3, 43_691), (12, 11_000)]
)
def test_few_queries_get_what_they_get_in_a_batch_where_rounding_begins(nlist, dim, metric):
    rng = np.random.default_rng(nlist)
    for p in (1, nlist // 3):
        check_few_as_in_a_batch(make(normal(rng, nlist, dim), metric), normal(rng, 40, dim), p)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dim", [130_000, 140_000])
def test_few_queries_get_what_they_get_in_a_batch_of_very_many_dimensions(dim, kernels, metric):
    """All numbers of a centroid are equal: products of whole numbers are as large as can be, of either sign."""
    lengths = np.random.default_rng(dim).uniform(0.5, 1, (12, 1)) * np.where(np.arange(12) % 2, 1, -1)[:, None]
    centroids = np.ones((12, dim), np.float32) * lengths.astype(np.float32)
    queries = np.ones((40, dim), np.float32)
    queries[::3] *= -1
    for p in (1, 4):
        check_few_as_in_a_batch(make(centroids, metric, kernels), queries, p, starts=(0, 7))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("nlist", "dim"), [(300, 8192), (100, 32_768)])
def test_few_queries_get_what_they_get_in_a_batch_where_products_of_steps_are_hardly_numbers(nlist, dim, metric):
    """Centroids of two shapes with the same products, of which one has twice the step: rounding favours either."""
    rng = np.random.default_rng(dim)
    shapes = np.ones((nlist, dim), np.float32)
    shapes[::2] = np.tile(np.float32([2, 0]), dim // 2)
    for exponent in np.arange(-20.4, -19.4, 0.1):
        scale = np.float32(10**exponent)
        sizes = rng.uniform(0.8, 1.2, (nlist, 1)) * rng.choice([-1, 1], (nlist, 1))
        queries = np.full((4, dim), scale) * rng.uniform(0.5, 1, (4, 1)).astype(np.float32)
        quantizer = make(shapes * sizes.astype(np.float32) * scale, metric)
        for p in (1, 20, nlist // 3):
            check_few_as_in_a_batch(quantizer, queries, p, starts=(0, 17))


@pytest.mark.parametrize("metric", METRICS)
def test_a_query_that_is_no_number_changes_nothing_for_the_one_beside_it(metric):
    rng = np.random.default_rng(3)
    quantizer, queries = make(normal(rng, 2001, 100), metric), normal(rng, 40, 100)
    for first, value in ((0, np.nan), (8, np.inf), (18, 1e30), (39, -np.nan)):
        queries[first, first] = value
    for p in (1, 20):
        lists, _ = check_few_as_in_a_batch(quantizer, queries, p, starts=(0, 7, 8, 17, 18, 38))
        assert (lists[[0, 39]] == -1).all()


@pytest.mark.parametrize("metric", METRICS)
def test_few_queries_of_many_callers_get_what_they_get_in_a_batch(metric):
    rng = np.random.default_rng(4)
    # Whole numbers: many distances are equal.
    quantizer, queries = make(whole(rng, 2001, 100), metric), whole(rng, 40, 100)
    right = {p: quantize(quantizer, queries, p) for p in (1, 20, 600)}

    def check(call):
        first, p = call % 39, (1, 20, 600)[call % 3]
        few = slice(first, first + 1 + call // 3 % 2)
        same_bits(quantize(quantizer, queries[few], p), (right[p][0][few], right[p][1][few]))

    with ThreadPoolExecutor(4) as callers:
        list(callers.map(check, range(600)))


@pytest.mark.parametrize("metric", METRICS)
def test_few_queries_get_the_nearest_lists(metric):
    rng = np.random.default_rng(5)
    centroids, queries = whole(rng, 4001, 100), whole(rng, 12, 100)
    want, quantizer = exact(centroids, queries, metric), make(centroids, metric)
    order = np.argsort(want, axis=1, kind="stable")
    for first in range(0, 12, 3):
        for few in (slice(first, first + 1), slice(first + 1, first + 3)):
            for p in (1, 20, 1333):
                lists, distances = quantize(quantizer, queries[few], p)
                np.testing.assert_array_equal(lists, order[few, :p])
                found = np.take_along_axis(want[few], lists, axis=1)
                np.testing.assert_array_equal(distances, -found if metric == "ip" else found)


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
