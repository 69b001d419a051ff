"""The rotation keeps lengths and angles, and is what its definition says."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.index.rabitq.rotation import dot, rotate, signs
from hybridindex.index.rabitq.spec import pad_dim
from tests.index.rabitq.forms import DIMS


def dense(dims, flips):
    """The rotation as one matrix, float64."""
    p = 1 << (dims.bit_length() - 1)
    hadamard = np.ones((1, 1))
    while len(hadamard) < p:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    whole = np.eye(dims)
    for i, row in enumerate(flips):
        step = np.eye(dims)
        part = slice(0, p) if i % 2 == 0 else slice(dims - p, dims)
        step[part, part] = hadamard / np.sqrt(p)
        whole = step @ np.diag(row.astype(np.float64)) @ whole
    return whole


@pytest.mark.parametrize("dim", DIMS)
def test_a_rotation_is_an_orthogonal_matrix(dim):
    dims = pad_dim(dim)
    flips = signs(dims, 3)
    matrix = dense(dims, flips)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dims), atol=1e-12)
    x = np.random.default_rng(0).standard_normal((9, dim)).astype(np.float32)
    rotated = rotate(x, flips)
    np.testing.assert_allclose(rotated, x @ matrix[:, :dim].T, atol=2e-5)
    assert np.array_equal(rotated[4:5], rotate(x[4:5], flips))


def test_signs_are_the_lowest_bits_of_the_published_stream():
    # First outputs of SplitMix64 from seed 1234567, by its authors.
    stream = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert signs(32, 1234567)[0, :5].tolist() == [-1.0 if z & 1 else 1.0 for z in stream]
    drawn = signs(384, 0)
    assert drawn.shape == (4, 384)
    assert set(np.unique(drawn)) == {-1.0, 1.0}
    assert abs(drawn.mean()) < 0.1
    assert not np.array_equal(drawn, signs(384, 1))


def test_scalar_products_add_up_in_their_fixed_order():
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 3, 96)).astype(np.float32)
    for x, y, found in zip(a, b, dot(a, b), strict=True):
        lanes = [np.float32(0)] * 16
        for i in range(96):
            lanes[i % 16] = lanes[i % 16] + x[i] * y[i]
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        assert found == lanes[0]
