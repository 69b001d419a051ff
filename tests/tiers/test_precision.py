"""How exact distances of devices are: what the suite tells apart, and arithmetic of matrix units that it cannot run."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.index import build
from hybridindex.index.codec import DeviceCodec
from hybridindex.tiers.paged.launch_shapes import split_shape, split_sizes
from tests.oracle import ROUNDED, check_answer
from tests.tiers.triton_here import require_triton

#: Of a matrix unit: columns of one step; and of the kernel, columns that have a sum of their own.
STEP, COLS = 16, 64
KINDS = ("f32", "bf16", "f16", "sq8")


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


def parts_of(x, count):
    """bfloat16 numbers that add up to ``x``, as far as so many can, the largest first."""
    parts = []
    for _ in range(count):
        parts.append(as_bfloat16(x))
        x = x - parts[-1]
    return parts


def heavy_products(x, q, kind, *, own_sums):
    """Inner products (n,) of rows ``x`` (n, d) with ``q`` (d,), as ``scan_heavy`` makes them on a GPU.

    ``own_sums``: COLS columns have a sum of their own; else one runs through all.
    """
    rows = parts_of(x, {"f32": 3, "f16": 2}.get(kind, 1))[::-1]
    totals = []
    for query in parts_of(q, 3):
        total, part = np.zeros(len(x), np.float32), np.zeros(len(x))
        for first in range(0, x.shape[1], COLS):
            if own_sums:
                part = np.zeros(len(x))
            for row in rows:
                for at in range(first, min(first + COLS, x.shape[1]), STEP):
                    own = slice(at, at + STEP)
                    part = step(part, row[:, own].astype(np.float64) * query[own])
            if own_sums:
                total += part.astype(np.float32)
        totals.append(total if own_sums else part.astype(np.float32))
    return totals[0] + (totals[1] + totals[2])


def as_rows(kind, x):
    """Numbers around 0 as rows of a codec hold them; bytes of sq8."""
    return {
        "f32": lambda x: x.astype(np.float32),
        "bf16": as_bfloat16,
        "f16": lambda x: x.astype(np.float16).astype(np.float32),
        "sq8": lambda x: np.clip(np.rint(x * 40 + 128), 0, 255).astype(np.float32),
    }[kind](x)


def largest_error(x, q, kind, *, own_sums):
    """Over the sum of |x y|."""
    exact, terms = x.astype(np.float64) @ q, np.abs(x).astype(np.float64) @ np.abs(q)
    return float((np.abs(heavy_products(x, q, kind, own_sums=own_sums) - exact) / terms).max())


def errors(kind, dim, *, same_sign, own_sums):
    rng = np.random.default_rng(dim)
    x, q = rng.standard_normal((200, dim)), rng.standard_normal(dim).astype(np.float32)
    if same_sign:
        x, q = np.abs(x), np.abs(q)
    return largest_error(as_rows(kind, x), q, kind, own_sums=own_sums)


@pytest.mark.parametrize("same_sign", [False, True])
@pytest.mark.parametrize("dim", [20, 768, 1536, 3072, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_matrix_units_that_cut_bits_off_are_as_exact_as_float32(kind, dim, same_sign):
    assert errors(kind, dim, same_sign=same_sign, own_sums=True) <= ROUNDED


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_number_lose_the_same_bits_everywhere_and_are_as_exact(kind):
    """float32 rows beyond 1,024 dimensions are not for matrix units: a page holds too few."""
    dim = 1024 if kind == "f32" else 4096
    rng = np.random.default_rng(0)
    for number in rng.uniform(1, 2, 8).astype(np.float32):
        x = as_rows(kind, np.repeat(rng.uniform(1, 2, (200, 1)), dim, axis=1))
        assert largest_error(x, np.full(dim, number), kind, own_sums=True) <= ROUNDED


def test_one_sum_through_all_columns_would_not_be():
    assert errors("bf16", 4096, same_sign=True, own_sums=False) > 10 * ROUNDED


def test_a_query_is_the_sum_of_its_parts():
    """Of sq8 times its scale; what its offset adds stands behind the parts, and what pads them is 0. The interpreter of
    triton 3.6 cuts off where GPUs round to bfloat16, which leaves nothing of 24 bits, too."""
    require_triton("cpu")
    import torch

    codec = DeviceCodec(kind="sq8", dim=100, code_size=100, by_residual=False)
    shape = split_shape(codec)
    rng = np.random.default_rng(0)
    n, (split, words) = 3, split_sizes(100)
    q, scale, offset = (rng.standard_normal(size).astype(np.float32) for size in ((n, 100), 100, 100))
    ints = torch.full((1024 + n * words,), 0x7FC00000, dtype=torch.int32)
    floats, halves = ints.view(torch.float32), ints.view(torch.int16)
    for at, values in ((0, q), (512, scale), (640, offset)):
        floats[at : at + values.size] = torch.from_numpy(values.reshape(-1))
    shape.kernel[(n, 1, 1)](floats, halves, 0, 512, 640, 1024, **shape.constants)
    made = ints.numpy()[1024:].reshape(n, words)
    parts = (made.view(np.uint16)[:, : 3 * split].astype(np.uint32) << 16).view(np.float32).reshape(n, 3, split)
    np.testing.assert_array_equal(parts[:, :, :100].sum(axis=1, dtype=np.float64), (q * scale).astype(np.float64))
    assert not parts[:, :, 100:].any()
    np.testing.assert_allclose(made.view(np.float32)[:, 3 * split // 2], q @ offset, rtol=1e-5, atol=1e-5)


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
