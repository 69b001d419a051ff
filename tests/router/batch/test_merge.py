"""Merging: native equals reference equals sorting everything at once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.router.batch import merge as merge_module
from hybridindex.router.batch.merge import empty_topk, finish_topk, merge_topk, merge_topk_reference
from tests.examples import examples


@st.composite
def parts(draw):
    n, k = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    keep_max = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pool = rng.permutation(1000)
    made = []
    for _ in range(draw(st.integers(0, 4))):
        m = draw(st.integers(1, n))
        rows = rng.permutation(n)[:m].astype(np.int32)
        # Few distinct values: ties everywhere, within and across parts.
        distances = rng.integers(0, 4, size=(m, k)).astype(np.float32)
        distances = -np.sort(-distances, axis=1) if keep_max else np.sort(distances, axis=1)
        ids, pool = pool[: m * k].reshape(m, k).astype(np.int64), pool[m * k :]
        filled = rng.integers(0, k + 1, size=m)
        empty = np.arange(k) >= filled[:, None]
        ids[empty] = -1
        distances[empty] = np.finfo(np.float32).min if keep_max else np.finfo(np.float32).max
        made.append((rows, distances, ids))
    return n, k, keep_max, made


def everything_sorted(n, k, keep_max, made):
    distances, ids = empty_topk(n, k, keep_max=keep_max)
    for row in range(n):
        found = []
        for rows, part_distances, part_ids in made:
            for i in np.flatnonzero(rows == row):
                found += [(d, j) for d, j in zip(part_distances[i], part_ids[i], strict=True) if j >= 0]
        found.sort(key=lambda hit: (-hit[0] if keep_max else hit[0], hit[1]))
        for place, (distance, found_id) in enumerate(found[:k]):
            distances[row, place], ids[row, place] = distance, found_id
    return distances, ids


@examples(300)
@given(parts())
def test_merging_part_by_part_equals_sorting_everything(case):
    n, k, keep_max, made = case
    expected = everything_sorted(n, k, keep_max, made)
    for merge in (merge_topk, merge_topk_reference):
        distances, ids = empty_topk(n, k, keep_max=keep_max)
        for rows, part_distances, part_ids in made:
            merge(distances, ids, rows, part_distances, part_ids, keep_max=keep_max)
        np.testing.assert_array_equal(ids, expected[1])
        np.testing.assert_array_equal(distances, expected[0])


@examples(200)
@given(parts())
def test_finishing_a_whole_answer_equals_merging_it_into_nothing(case):
    n, k, keep_max, made = case
    for rows, distances, ids in made:
        expected = everything_sorted(n, k, keep_max, [(rows, distances, ids)])
        for built in (merge_module.native, None):
            saved, merge_module.native = merge_module.native, built
            try:
                d, i = distances.copy(), ids.copy()
                finish_topk(d, i, keep_max=keep_max)
            finally:
                merge_module.native = saved
            np.testing.assert_array_equal(i, expected[1][rows])
            np.testing.assert_array_equal(d, expected[0][rows])
