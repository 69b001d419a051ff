"""The random rotation of vectors before they are coded: rounds of random signs and a fast Hadamard transform."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybridindex.index.rabitq.spec import ROUNDS
from hybridindex.types import F32

__all__ = ["dot", "pad", "rotate", "signs"]

#: Partial sums of a scalar product.
_LANES = 16


def signs(padded_dim: int, seed: int, rounds: int = ROUNDS) -> F32:
    """(rounds, padded_dim) float32, each +1 or -1: the lowest bits of SplitMix64's stream, 0 for +1."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, rounds * padded_dim + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    low = (z ^ (z >> np.uint64(31))) & np.uint64(1)
    return np.where(low == 0, np.float32(1), np.float32(-1)).reshape(rounds, padded_dim)


def pad(x: F32, padded_dim: int) -> F32:
    """(n, d) float32 with zeros behind: (n, padded_dim)."""
    out = np.zeros((len(x), padded_dim), dtype=np.float32)
    out[:, : x.shape[1]] = x
    return out


def rotate(x: F32, signs: F32) -> F32:
    """(n, d) float32 -> (n, padded_dim) float32, the same for every n.

    An even round transforms the first p elements, an odd one the last p; p is the largest power of two that fits.
    """
    rounds, dims = signs.shape
    p = 1 << (dims.bit_length() - 1)
    norm = np.float32(1 / np.sqrt(np.float64(p)))
    out = pad(x, dims)
    for i in range(rounds):
        out *= signs[i]
        part = out[:, :p] if i % 2 == 0 else out[:, dims - p :]
        part[...] = _hadamard(np.ascontiguousarray(part)) * norm
    return out


def _hadamard(x: F32) -> F32:
    n, p = x.shape
    h = 1
    while h < p:
        pairs = x.reshape(n, p // (2 * h), 2, h)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        x = np.stack([a + b, a - b], axis=2).reshape(n, p)
        h *= 2
    return x


def dot(a: F32, b: F32) -> F32:
    """Scalar products of rows: (n, D) and (n, D) or (D,) float32 -> (n,) float32. D is a multiple of 16.

    Sixteen partial sums, each from +0 over every sixteenth product in order; then halves are added: 8 to 8, 4 to 4...
    """
    products = (a * b).reshape(len(a), a.shape[1] // _LANES, _LANES)
    sums: npt.NDArray[np.float32] = np.zeros((len(a), _LANES), dtype=np.float32)
    for i in range(products.shape[1]):
        sums += products[:, i]
    half = _LANES // 2
    while half:
        sums = sums[:, :half] + sums[:, half:]
        half //= 2
    return sums[:, 0]
