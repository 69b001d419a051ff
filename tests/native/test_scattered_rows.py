"""Rows that a filter chooses, by a mask in a scan of lists and one by one wherever they lie: both against the oracle,
and against each other to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex import _native
from tests.native.lists import CODES, check, make_lists, make_probes, make_queries, scan

POOLS = {"alone": _native.ThreadPool(0), "helped": _native.ThreadPool(2)}
SIZES = [0, 5, 3000, 64, 17, 1, 1200, 33]
#: Kernels of this CPU, all of which answer the same.
KERNELS = _native.kernels_here()


def case(code, dim=33, seed=7, n=50):
    rng = np.random.default_rng(seed)
    lists = make_lists(rng, SIZES, dim, code, exact=True, duplicates=0.2)
    return lists, make_queries(rng, n, dim, exact=True), make_probes(rng, n, 4, len(SIZES))


def mask_of(lists, share, seed=8):
    """(mask, first row of each list, ids of the rows that are left)."""
    first = lists.starts.astype(np.int64)
    left = np.zeros(-(-int(first[-1]) // 64) * 64, np.bool_)
    left[: first[-1]] = np.random.default_rng(seed).random(int(first[-1])) < share
    return np.packbits(left, bitorder="little"), first, lists.ids[left[: first[-1]]]


def positions_of(lists, mask, probes):
    first = lists.starts.astype(np.int64)
    left = np.unpackbits(mask, bitorder="little")
    found = [
        np.concatenate(
            [np.empty(0, np.int64)]
            + [(each << 32) + np.flatnonzero(left[first[each] : first[each + 1]]) for each in own[own >= 0].tolist()]
        )
        for own in probes
    ]
    positions = np.full((len(probes), max(map(len, found))), -1)
    for row, own in enumerate(found):
        positions[row, : len(own)] = own
    return positions


def scattered(lists, metric, queries, positions, k, pool, kernels=""):
    scanner = lists.scanner(metric, kernels, kind="ScatteredScanner")
    distances, ids = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
    scanner.scan(queries, positions, distances, ids, pool)
    return distances, ids


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_rows_that_a_mask_leaves_are_found_both_ways(code, metric, share, pool):
    lists, queries, probes = case(code)
    probes = np.array([np.unique(row).tolist() + [-1] * (4 - len(np.unique(row))) for row in probes])
    mask, first, allowed = mask_of(lists, share)
    for k in (1, 9, 300):
        by_list = scan(lists.scanner(metric), queries, probes, k, pool, mask=mask, first_rows=first)
        check(lists, metric, queries, probes, by_list, allowed=allowed, exact=True)
        one_by_one = scattered(lists, metric, queries, positions_of(lists, mask, probes), k, pool)
        for a, b in zip(by_list, one_by_one, strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dim", [1, 16, 33, 128])
def test_all_queries_may_be_compared_with_the_same_rows(code, dim):
    lists, queries, _ = case(code, dim, n=300)
    everywhere = np.arange(len(SIZES))[None]
    mask, _, allowed = mask_of(lists, 0.1)
    positions = positions_of(lists, mask, everywhere)
    probes = np.repeat(everywhere, 300, axis=0)
    expected = scan(lists.scanner("l2"), queries, probes, 7, POOLS["alone"], sorted=np.sort(allowed))
    for kernels in KERNELS:
        for pool in POOLS.values():
            found = scattered(lists, "l2", queries, positions, 7, pool, kernels)
            assert found[1].tolist() == expected[1].tolist()
            assert found[0].tolist() == expected[0].tolist()
    one = scattered(lists, "l2", queries[:1], positions, 7, POOLS["alone"])
    assert one[1].tolist() == expected[1][:1].tolist()


def test_what_is_no_row_is_refused_before_anything_is_read():
    lists, queries, _ = case("sq8", n=2)
    for wrong in (-2, 1 << 33 | 3000, 8 << 32, 1 << 62, 0):
        with pytest.raises(IndexError, match=f"position {wrong} is no row"):
            scattered(lists, "ip", queries, np.array([[2 << 32, wrong]]), 1, POOLS["alone"])
    with pytest.raises(ValueError, match="must agree on n and k"):
        scattered(lists, "ip", queries, np.empty((3, 1), np.int64), 1, POOLS["alone"])
    with pytest.raises(ValueError, match="k must be at least 1"):
        scattered(lists, "ip", queries, np.empty((2, 1), np.int64), 0, POOLS["alone"])
    residual = make_lists(np.random.default_rng(0), [5], 8, "f16", residual=True)
    with pytest.raises(ValueError, match="rows have centroids added"):
        residual.scanner("ip", kind="ScatteredScanner")


@pytest.mark.parametrize("kind", ["short mask", "odd mask", "short first", "other sizes", "no first"])
def test_a_mask_has_a_bit_for_each_row(kind):
    lists, queries, probes = case("f32", n=3)
    mask, first, _ = mask_of(lists, 0.5)
    wrong = {
        "short mask": (mask[:-8].copy(), first),
        "odd mask": (mask[:-1].copy(), first),
        "short first": (mask, first[:-1].copy()),
        "other sizes": (mask, np.roll(first, 1)),
        "no first": (mask, None),
    }[kind]
    with pytest.raises(ValueError, match="mask"):
        scan(lists.scanner("ip"), queries, probes, 3, POOLS["alone"], mask=wrong[0], first_rows=wrong[1])
