"""How exact distances of devices are: what the suite tells apart, and arithmetic of matrix units that it cannot run."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.index import build
from tests.oracle import ROUNDED, check_answer

#: Of a matrix unit: columns of one step; and of the kernel, columns that have a sum of their own.
STEP, COLS = 16, 64


def as_bfloat16(x):
    """Rounded to nearest, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def as_tf32(x):
    """Rounded to 10 bits behind the point."""
    return ((x.astype(np.float32).view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)


def cut(x, unit):
    """Towards zero, to multiples of ``unit``."""
    return np.trunc(x / unit) * unit


def step(total, products):
    """One step of a matrix unit, float64 in and out: all terms are cut at the last bit of the largest one, added, and
    the sum is cut to 24 bits. No bit more than float32 has is kept, which is the least that units were seen to do
    (Fasi et al. 2021, Numerical behavior of NVIDIA tensor cores)."""
    terms = np.concatenate((products, total[..., None]), axis=-1)
    largest = np.abs(terms).max(axis=-1, keepdims=True)
    unit = np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1.0))) - 23)
    added = cut(terms, unit).sum(axis=-1)
    unit = np.exp2(np.floor(np.log2(np.where(added != 0, np.abs(added), 1.0))) - 23)
    return cut(added, unit)


def heavy_products(x, q, kind, *, own_sums):
    """Inner products (n,) of rows ``x`` (n, d) with ``q`` (d,), as ``scan_heavy`` makes them on a GPU.

    ``own_sums``: COLS columns have a sum of their own; else one runs through all.
    """
    q1 = as_bfloat16(q)
    q2 = as_bfloat16(q - q1)
    q3 = as_bfloat16(q - q1 - q2)
    x1 = as_bfloat16(x)
    parts = [(x1, q3), (x1, q2), (x1, q1)]
    if kind == "f16":
        x2 = as_bfloat16(x - x1)
        parts = [(x2, q2), (x2, q1), *parts]
    total, part = np.zeros(len(x), np.float32), np.zeros(len(x))
    for first in range(0, x.shape[1], COLS):
        if own_sums:
            part = np.zeros(len(x))
        for rows, query in parts:
            for at in range(first, min(first + COLS, x.shape[1]), STEP):
                own = slice(at, at + STEP)
                part = step(part, rows[:, own].astype(np.float64) * query[own])
        if own_sums:
            total += part.astype(np.float32)
    return total if own_sums else part.astype(np.float32)


def errors(kind, dim, *, same_sign, own_sums):
    """Largest error over the sum of |x y|."""
    rng = np.random.default_rng(dim)
    x, q = rng.standard_normal((200, dim)), rng.standard_normal(dim).astype(np.float32)
    if same_sign:
        x, q = np.abs(x), np.abs(q)
    x = {
        "bf16": as_bfloat16,
        "f16": lambda x: x.astype(np.float16).astype(np.float32),
        "sq8": lambda x: np.clip(np.rint(x * 40 + 128), 0, 255).astype(np.float32),
    }[kind](x)
    exact = x.astype(np.float64) @ q
    return float((np.abs(heavy_products(x, q, kind, own_sums=own_sums) - exact) / (np.abs(x) @ np.abs(q))).max())


@pytest.mark.parametrize("same_sign", [False, True])
@pytest.mark.parametrize("dim", [20, 768, 1536, 3072, 4096])
@pytest.mark.parametrize("kind", ["bf16", "f16", "sq8"])
def test_matrix_units_that_cut_bits_off_are_as_exact_as_float32(kind, dim, same_sign):
    assert errors(kind, dim, same_sign=same_sign, own_sums=True) <= ROUNDED


def test_one_sum_through_all_columns_would_not_be():
    assert errors("bf16", 4096, same_sign=True, own_sums=False) > 10 * ROUNDED


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_tf32_is_seen(tmp_path, metric):
    dim = 384
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((300, dim), dtype=np.float32)
    with build(vectors, tmp_path / "i", nlist=1, metric=metric) as index:
        queries = rng.standard_normal((4, dim), dtype=np.float32)
        rows, all_ids = index.decode_list(0), index.list_ids(0)

        def answer(rounded):
            products = rounded(queries).astype(np.float64) @ rounded(rows).astype(np.float64).T
            squares = (queries.astype(np.float64) ** 2).sum(axis=1)[:, None] + (rows.astype(np.float64) ** 2).sum(
                axis=1
            )
            distances = (products if metric == "ip" else squares - 2 * products).astype(np.float32)
            order = np.argsort(-distances if metric == "ip" else distances, axis=1)[:, :10]
            return np.take_along_axis(distances, order, axis=1), all_ids[order]

        probes = np.zeros((4, 1), np.int64)
        check_answer(index, queries, probes, 10, *answer(lambda x: x), precise=ROUNDED)
        with pytest.raises(AssertionError):
            check_answer(index, queries, probes, 10, *answer(as_tf32), precise=ROUNDED)
