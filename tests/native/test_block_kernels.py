"""Every set of kernels that this CPU runs, over every code, metric and awkward shape, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex import _native
from tests.examples import examples
from tests.native.lists import CODES, check, make_lists, make_probes, make_queries, scan

KERNELS = _native.kernels_here()
DIMS = [1, 3, 16, 17, 63, 64, 100, 384]
POOLS = [_native.ThreadPool(helpers) for helpers in (0, 1, 2, 4)]
METRICS = ("ip", "l2")


def test_portable_kernels_run_everywhere_and_the_best_come_first():
    assert KERNELS[-1] == "portable"
    assert make_lists(np.random.default_rng(0), [3], 4, "f32").scanner("ip").kernels == KERNELS[0]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("kernels", KERNELS)
@examples(20)
@given(
    dim=st.sampled_from(DIMS),
    sizes=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 31, 33, 100, 250]), min_size=1, max_size=6),
    n=st.sampled_from([0, 1, 2, 3, 4, 5, 9, 16, 17, 33]),
    k=st.sampled_from([1, 2, 7, 100, 2048]),
    residual=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_whole_numbers_are_answered_to_the_bit(kernels, code, metric, dim, sizes, n, k, residual, seed):
    rng = np.random.default_rng(seed)
    lists = make_lists(rng, sizes, dim, code, exact=True, residual=residual, duplicates=0.3)
    queries = make_queries(rng, n, dim, exact=True)
    probes = make_probes(rng, n, min(4, len(sizes)), len(sizes))
    scanner = lists.scanner(metric, kernels)
    assert scanner.kernels == kernels
    for pool in (POOLS[0], POOLS[2]):
        check(lists, metric, queries, probes, scan(scanner, queries, probes, k, pool), exact=True)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("code", CODES)
@examples(12)
@given(
    dim=st.sampled_from(DIMS),
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    n=st.integers(1, 24),
    k=st.sampled_from([1, 5, 40]),
    residual=st.booleans(),
    centre=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 10_000),
)
def test_any_numbers_are_right_and_threads_change_no_bit(code, metric, dim, sizes, n, k, residual, centre, seed):
    rng = np.random.default_rng(seed)
    lists = make_lists(rng, sizes, dim, code, residual=residual, centre=centre, duplicates=0.1)
    queries = make_queries(rng, n, dim, centre=centre)
    probes = make_probes(rng, n, min(4, len(sizes)), len(sizes))
    per_set = []
    for kernels in KERNELS:
        scanner = lists.scanner(metric, kernels)
        first = scan(scanner, queries, probes, k, POOLS[0])
        check(lists, metric, queries, probes, first)
        per_set.append(first)
        for pool in POOLS[1:]:
            distances, ids = scan(scanner, queries, probes, k, pool)
            np.testing.assert_array_equal(distances, first[0])
            np.testing.assert_array_equal(ids, first[1])
    # Sets round differently; ids may differ only where distances are that close.
    for distances, ids in per_set[1:]:
        differs = ids != per_set[0][1]
        size = np.abs(lists.rows).max(initial=0) + np.abs(queries).max()
        np.testing.assert_allclose(distances[differs], per_set[0][0][differs], rtol=1e-5, atol=2e-6 * dim * size**2)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dim", [63, 64, 384])
def test_l2_of_bytes_far_from_the_origin_is_the_distance_of_decoded_vectors(kernels, dim):
    rng = np.random.default_rng(dim)
    lists = make_lists(rng, [500, 37, 0, 16], dim, "sq8", centre=1000.0)
    queries = make_queries(rng, 20, dim, centre=1000.0)
    probes = np.tile(np.arange(4), (20, 1))
    distances, ids = answer = scan(lists.scanner("l2", kernels), queries, probes, 10, POOLS[2])
    check(lists, "l2", queries, probes, answer)
    # The differences are small and exact in float32: so must the distances be, however far the origin.
    position = {int(i): at for at, i in enumerate(lists.ids)}
    own = lists.rows[[position[int(i)] for i in ids.ravel()]].reshape(20, 10, dim).astype(np.float64)
    exact = ((own - queries[:, None].astype(np.float64)) ** 2).sum(axis=2)
    np.testing.assert_allclose(distances, exact, rtol=2e-6 * dim)
    all_rows = ((lists.rows[None].astype(np.float64) - queries[:, None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(distances, np.sort(all_rows, axis=1)[:, :10], rtol=2e-6 * dim)


@pytest.mark.parametrize("kernels", KERNELS)
def test_products_of_bytes_that_do_not_fit_32_bits(kernels):
    dim = 70_016
    lists = make_lists(np.random.default_rng(3), [20], dim, "sq8", exact=True)
    data = lists.data.copy()
    at, capacity = int(lists.extents[0, 2]), int(lists.extents[0, 1])
    codes = np.linspace(200, 255, 20).astype(np.uint8)
    data[at : at + 20 * dim] = codes.repeat(dim)
    data[at + capacity * dim :][:160] = np.arange(20).view(np.uint8)
    scanner = lists.scanner("ip", kernels, data=data, offset=np.zeros(dim, np.float32))
    _, ids = scan(scanner, np.ones((1, dim), np.float32), np.zeros((1, 1), np.int64), 3, POOLS[0])
    assert ids.tolist() == [[19, 18, 17]]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("tiny", [1e-12, 1e-18, 1e-20])
def test_very_small_numbers_lose_no_row(kernels, metric, tiny):
    rng = np.random.default_rng(4)
    lists = make_lists(rng, [200], 32, "sq8")
    queries = make_queries(rng, 6, 32) * np.float32(tiny)
    scanner = lists.scanner(
        metric, kernels, scale=lists.scale * np.float32(tiny), offset=lists.offset * np.float32(tiny)
    )
    distances, ids = scan(scanner, queries, np.zeros((6, 1), np.int64), 200, POOLS[0])
    assert (np.sort(ids, axis=1) == np.sort(lists.ids)).all()
    assert np.isfinite(distances).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("code", ["f32", "f16", "bf16"])
def test_what_is_no_number_is_no_candidate(kernels, code):
    lists = make_lists(np.random.default_rng(5), [40], 16, code, exact=True)
    data = lists.data.copy()
    at, width = int(lists.extents[0, 2]), 16 * (4 if code == "f32" else 2)
    nan = {"f32": np.array([np.nan, np.inf], "f4"), "f16": np.array([np.nan, np.inf], "f2")}
    bad = nan[code].view(np.uint8) if code in nan else np.array([0x7FC0, 0x7F80], np.uint16).view(np.uint8)
    data[at : at + len(bad) // 2] = bad[: len(bad) // 2]
    data[at + width : at + width + len(bad) // 2] = bad[len(bad) // 2 :]
    queries = -np.ones((2, 16), np.float32)
    for metric in METRICS:
        distances, ids = scan(lists.scanner(metric, kernels, data=data), queries, np.zeros((2, 1), int), 40, POOLS[0])
        assert (np.sort(ids[:, :38], axis=1) == np.sort(lists.ids[2:])).all()
        assert (ids[:, 38:] == -1).all()
        assert not np.isnan(distances).any()


# On AMX tiles groups of queries are compared through a filter of rounded numbers, on AVX-512 without one; exact
# distances are summed alike.
needs_tiles = pytest.mark.skipif(not {"amx", "avx512"} <= set(KERNELS), reason="this CPU has no AMX tiles")


def _same_to_the_bit(lists, metric, queries, probes, k):
    with_filter, without = (
        scan(lists.scanner(metric, name), queries, probes, k, POOLS[2]) for name in ("amx", "avx512")
    )
    np.testing.assert_array_equal(with_filter[1], without[1])
    np.testing.assert_array_equal(with_filter[0], without[0])


@needs_tiles
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("code", ["f32", "f16", "bf16"])
@examples(25)
@given(
    dim=st.sampled_from([1, 16, 33, 48, 100, 384]),
    sizes=st.lists(st.sampled_from([0, 5, 16, 300, 1000]), min_size=1, max_size=4),
    n=st.sampled_from([6, 7, 16, 17, 33, 70, 300]),
    k=st.sampled_from([1, 10, 100]),
    centre=st.sampled_from([0.0, 1.0, 30.0]),
    residual=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_a_filter_of_halves_changes_no_bit(code, metric, dim, sizes, n, k, centre, residual, seed):
    rng = np.random.default_rng(seed)
    lists = make_lists(rng, sizes, dim, code, centre=centre, residual=residual, duplicates=0.2)
    queries = make_queries(rng, n, dim, centre=centre)
    _same_to_the_bit(lists, metric, queries, make_probes(rng, n, len(sizes), len(sizes)), k)


@needs_tiles
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e-3, 1e6, 1e15])
def test_a_filter_of_halves_survives_numbers_of_any_size(metric, size):
    rng = np.random.default_rng(6)
    lists = make_lists(rng, [2000], 64, "f32")
    data = lists.data.copy()
    at = int(lists.extents[0, 2])
    rows = data[at : at + 2000 * 64 * 4].view(np.float32).reshape(2000, 64)
    rows[:1000] *= np.float32(size)
    queries = make_queries(rng, 40, 64)
    queries[:20] *= np.float32(size)
    probes = np.zeros((40, 1), np.int64)
    answers = [
        scan(lists.scanner(metric, name, data=data), queries, probes, 10, POOLS[0]) for name in ("amx", "avx512")
    ]
    np.testing.assert_array_equal(answers[0][1], answers[1][1])
    np.testing.assert_array_equal(answers[0][0], answers[1][0])


@needs_tiles
@pytest.mark.parametrize("metric", METRICS)
def test_errors_of_rounding_that_all_point_one_way_lose_no_row(metric):
    # Just below the middle between two halves: each number of a row is rounded down as far as it can be, and the
    # filter sees rows that are equal or worse than those it holds already, while every one is better.
    dim, n = 128, 16
    lists = make_lists(np.random.default_rng(7), [640], dim, "f32")
    data = lists.data.copy()
    at = int(lists.extents[0, 2])
    rows = data[at : at + 640 * dim * 4].view(np.float32).reshape(640, dim)
    rows[:] = np.linspace(1.0, 1.0 + 2.0**-8 - 2.0**-16, 640, dtype=np.float32)[:, None]
    queries = np.full((n, dim), 1.0 if metric == "ip" else 1.5, np.float32)
    for name in ("amx", "avx512"):
        _, ids = scan(lists.scanner(metric, name, data=data), queries, np.zeros((n, 1), np.int64), 5, POOLS[0])
        assert (ids == lists.ids[[639, 638, 637, 636, 635]]).all(), name


@needs_tiles
@pytest.mark.parametrize("row", [-70, -80, -100, -126])
def test_rows_so_short_that_their_squares_vanish_are_not_ruled_out(row):
    rng = np.random.default_rng(8)
    lists = make_lists(rng, [3000], 64, "f32")
    data = lists.data.copy()
    at = int(lists.extents[0, 2])
    base = rng.standard_normal((1, 64))
    rows = data[at : at + 3000 * 64 * 4].view(np.float32).reshape(3000, 64)
    rows[:] = (base + rng.standard_normal((3000, 64)) * 1e-3) * 2.0**row
    queries = ((base + rng.standard_normal((32, 64)) * 0.1) * 2.0**50).astype(np.float32)
    probes = np.zeros((32, 1), np.int64)
    answers = [scan(lists.scanner("ip", name, data=data), queries, probes, 10, POOLS[0]) for name in ("amx", "avx512")]
    np.testing.assert_array_equal(answers[0][1], answers[1][1])


@pytest.mark.parametrize("kernels", KERNELS)
def test_bytes_whose_scaled_squares_overflow_are_not_ruled_out(kernels):
    rng = np.random.default_rng(9)
    dim = 256
    lists = make_lists(rng, [400], dim, "sq8")
    scale = np.full(dim, 1.2e16, np.float32)
    offset = np.full(dim, -127.5 * 1.2e16, np.float32)
    at = int(lists.extents[0, 2])
    codes = lists.data[at : at + 400 * dim].reshape(400, dim)
    decoded = offset + scale * codes.astype(np.float32)
    assert ((1.2e16 * codes.astype(np.float64)) ** 2).sum(axis=1).max() > np.finfo(np.float32).max
    scanner = lists.scanner("l2", kernels, scale=scale, offset=offset)
    _, ids = scan(scanner, decoded[:20].copy(), np.zeros((20, 1), np.int64), 1, POOLS[0])
    np.testing.assert_array_equal(ids[:, 0], lists.ids[:20])
