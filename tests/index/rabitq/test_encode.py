"""Codes: what the blocks hold, that estimates follow the true products, and what has no residual."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.index.rabitq.encode import decode_blocks, encode_list, encode_reference, factors
from hybridindex.index.rabitq.estimate import estimates, prepare_queries
from hybridindex.index.rabitq.rotation import dot, pad, rotate, signs
from hybridindex.index.rabitq.spec import pad_dim
from tests.index.rabitq.forms import DIMS, form, list_of


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_blocks_hold_levels_and_factors(dim, bits, metric):
    rows, centroid, flips = list_of(37, dim)
    this = form(dim, bits=bits, metric=metric)
    raw = encode_reference(rows, centroid, flips, this)
    assert raw.shape == (3 * this.block_bytes,)
    blocks = decode_blocks(raw, 37, this)
    levels, f, towards, along = factors(rows, centroid, flips, bits)
    assert np.array_equal(blocks.levels, levels)
    assert set(np.unique(np.abs(levels))) <= set(range(1, 2**bits, 2))
    rotated = rotate(rows - centroid, flips)
    assert np.array_equal(levels > 0, rotated >= 0)
    np.testing.assert_allclose(blocks.f * this.f_scale, f, rtol=1e-3)
    g = towards - blocks.f * np.float32(this.f_scale) * along
    np.testing.assert_allclose(blocks.g * this.g_scale, g, rtol=1e-3, atol=1e-5)
    if metric == "l2":
        assert np.array_equal(blocks.h, dot(pad(rows, this.padded_dim), pad(rows, this.padded_dim)))
    # Rows that no list has are zeros.
    last = decode_blocks(raw[2 * this.block_bytes :], 16, this)
    assert (last.levels[5:] == -(2**bits - 1)).all()
    assert not last.f[5:].any()
    assert not last.g[5:].any()
    assert not last.h[5:].any()


def test_the_top_plane_lies_first_and_a_row_s_bits_are_little_endian():
    rows, centroid, flips = list_of(16, 64)
    this = form(64, bits=2)
    raw = encode_reference(rows, centroid, flips, this)
    levels = factors(rows, centroid, flips, 2)[0]
    for row, dim in [(0, 0), (3, 9), (15, 63), (7, 32)]:
        chunk, byte, bit = dim // 32, dim % 32 // 8, dim % 8
        plane = [int(raw[p * 128 + chunk * 64 + 4 * row + byte]) >> bit & 1 for p in (0, 1)]
        assert levels[row, dim] == 2 * (2 * plane[0] - 1) + (2 * plane[1] - 1)


def test_parts_of_a_list_are_coded_as_the_whole_is():
    rows, centroid, flips = list_of(50, 40)
    this = form(40, bits=4, metric="l2")
    parts = [encode_list(rows[a:b], centroid, flips, this) for a, b in [(0, 32), (32, 50)]]
    assert np.array_equal(np.concatenate(parts), encode_list(rows, centroid, flips, this))
    assert encode_list(rows[:0], centroid, flips, this).shape == (0,)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_the_extension_codes_as_the_reference_does(dim, bits, metric):
    rows, centroid, flips = list_of(45, dim, seed=dim + bits)
    rows[3] = centroid
    rows[5] = 0
    rows[7] *= 1e18  # beyond the halves
    rows[9] = centroid * (1 + 1e-6)
    for middle in (centroid, np.zeros_like(centroid)):
        this = form(dim, bits=bits, metric=metric)
        assert np.array_equal(encode_list(rows, middle, flips, this), encode_reference(rows, middle, flips, this))


@pytest.mark.parametrize("dim", [17, 100, 384])
@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_more_bits_estimate_better_and_none_is_biased(dim, metric):
    rows, centroid, flips = list_of(2000, dim, seed=1)
    queries = np.random.default_rng(2).standard_normal((20, dim)).astype(np.float32)
    products = queries @ rows.T
    true = -products if metric == "ip" else (rows**2).sum(axis=1) - 2 * products
    spread, before = true.std(axis=1, keepdims=True), np.inf
    for bits, most in [(1, 0.8), (2, 0.4), (4, 0.13)]:
        this = form(dim, bits=bits, metric=metric)
        found = _estimates(rows, centroid, flips, queries, this)
        wrong = (found - true) / spread
        assert abs(wrong.mean()) < 0.03
        assert wrong.std() < min(most, before)
        before = wrong.std()
        assert np.corrcoef(found[0], true[0])[0, 1] > 0.65


def _estimates(rows, centroid, flips, queries, this):
    blocks = decode_blocks(encode_reference(rows, centroid, flips, this), len(rows), this)
    square = float(centroid @ centroid)
    return estimates(prepare_queries(queries, flips, this), blocks, queries @ centroid, square, this)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("dim", [1, 3, 17])
def test_a_row_that_is_its_centroid_is_estimated_as_the_centroid(bits, dim):
    _, centroid, flips = list_of(1, dim)
    this = form(dim, bits=bits, metric="l2")
    queries = np.random.default_rng(3).standard_normal((4, dim)).astype(np.float32)
    found = _estimates(np.stack([centroid] * 3), centroid, flips, queries, this)
    true = centroid @ centroid - 2 * queries @ centroid
    np.testing.assert_allclose(found, np.stack([true] * 3, axis=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("bits", [1, 4])
def test_a_query_of_zeros_a_centre_of_zeros_and_tiny_numbers_give_numbers(dim, bits):
    flips = signs(pad_dim(dim), 7)
    zeros = np.zeros(dim, np.float32)
    rows = np.stack([zeros, zeros + 1, zeros + np.float32(1e-44), zeros + np.float32(1e-30)])
    queries = np.stack([zeros, zeros + 1, zeros + np.float32(1e-44)])
    for metric in ("ip", "l2"):
        this = form(dim, bits=bits, metric=metric)
        found = _estimates(rows, zeros, flips, queries, this)
        assert np.isfinite(found).all()
        assert not found[0, 0]


def test_factors_beyond_the_halves_are_the_largest_ones():
    rows, centroid, flips = list_of(4, 32)
    this = form(32, f_scale=2.0**-40, g_scale=2.0**-40)
    blocks = decode_blocks(encode_reference(rows, centroid, flips, this), 4, this)
    assert (blocks.f == 65504).all()
    assert (np.abs(blocks.g) == 65504).all()


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_the_best_by_estimate_hold_more_of_the_true_neighbours_with_more_bits(metric):
    rng = np.random.default_rng(5)
    centers = rng.standard_normal((8, 64)).astype(np.float32)
    lists = [c + 0.5 * rng.standard_normal((200, 64)).astype(np.float32) for c in centers]
    rows = np.concatenate(lists)
    queries = (rows[::80] + 0.2 * rng.standard_normal((20, 64))).astype(np.float32)
    products = queries @ rows.T
    true = -products if metric == "ip" else (rows**2).sum(axis=1) - 2 * products
    best = np.argsort(true, axis=1, kind="stable")[:, :10]
    flips, recalls = signs(64, 7), []
    for bits in (1, 2, 4):
        this = form(64, bits=bits, metric=metric)
        pairs = zip(lists, centers, strict=True)
        found = np.concatenate([_estimates(part, c, flips, queries, this) for part, c in pairs], axis=1)
        kept = np.argsort(found, axis=1, kind="stable")[:, :15]
        recalls.append(np.mean([len(set(a) & set(b)) / 10 for a, b in zip(best, kept, strict=True)]))
    assert recalls[0] < recalls[1] < recalls[2]
    assert recalls[2] > 0.98
