"""Groups are a partition of near queries, devices get equal quotas, and overlaps are counted in unique lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.router.lookahead.grouping import (
    assign_greedily,
    group_queries,
    overlap_bytes,
    resident_on,
)
from tests.examples import examples


@st.composite
def query_batches(draw):
    n, dim = draw(st.integers(0, 30)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    queries = rng.integers(-2, 3, size=(n, dim)).astype(np.float32)  # duplicates and ties are common
    return queries * np.float32(draw(st.sampled_from([1.0, 1e-3, 1e17])))


@examples(200)
@given(query_batches(), st.integers(1, 9))
def test_every_query_is_in_one_group_and_all_groups_but_the_last_are_full(queries, size):
    group_of = group_queries(queries, size)
    assert group_of.dtype == np.int64
    assert len(group_of) == len(queries)
    counts = np.bincount(group_of) if len(group_of) else np.array([], int)
    assert (counts[:-1] == size).all()
    if len(counts):
        assert 1 <= counts[-1] <= size
    np.testing.assert_array_equal(group_of, group_queries(queries.copy(), size))


def tightest_first(queries, size):
    """The definition, one float64 distance at a time. Only for queries without ties."""
    distances = ((queries[:, None].astype(np.float64) - queries[None]) ** 2).sum(axis=2)
    free, groups = set(range(len(queries))), []
    while len(free) >= size:
        taken = min(
            (sorted(free, key=lambda other, seed=seed: distances[seed, other])[:size] for seed in sorted(free)),
            key=lambda members: sum(distances[members[0], member] for member in members),
        )
        groups.append(set(taken))
        free -= set(taken)
    return groups + ([free] if free else [])


@given(st.integers(0, 2**32 - 1), st.integers(1, 24), st.integers(2, 6), st.sampled_from([0.0, 1000.0]))
def test_the_tightest_group_is_made_first(seed, n, size, offset):
    queries = np.random.default_rng(seed).standard_normal((n, 6)).astype(np.float32)
    group_of = group_queries(queries + np.float32(offset), size)
    expected = tightest_first(queries + np.float32(offset), size)
    assert [set(np.flatnonzero(group_of == g).tolist()) for g in range(len(expected))] == expected


def test_topics_are_found_among_queries_far_from_the_origin():
    rng = np.random.default_rng(0)
    topics = rng.permutation(np.repeat(np.arange(16), 4))
    centres = rng.standard_normal((16, 64)).astype(np.float32)
    queries = 300 + centres[topics] + 0.01 * rng.standard_normal((64, 64)).astype(np.float32)
    group_of = group_queries(queries.astype(np.float32), 4)
    for group in range(16):
        assert len(set(topics[group_of == group].tolist())) == 1


@st.composite
def overlaps(draw):
    n_groups, n_devices = draw(st.integers(0, 20)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return rng.integers(0, draw(st.sampled_from([1, 3, 1000])), size=(n_groups, n_devices)).astype(np.float64)


@examples(300)
@given(overlaps())
def test_quotas_are_equal_and_no_group_would_rather_change_to_a_free_place(overlap):
    n_groups, n_devices = overlap.shape
    device_of = assign_greedily(overlap)
    assert ((device_of >= 0) & (device_of < n_devices)).all()
    counts = np.bincount(device_of, minlength=n_devices)
    assert counts.max() - counts.min() <= 1
    np.testing.assert_array_equal(device_of, assign_greedily(overlap.copy()))
    if n_groups and n_groups % n_devices == 0:
        # Where a group did not get the device it overlaps most, groups with no less overlap fill that device.
        for group, device in enumerate(device_of):
            for other in np.flatnonzero(overlap[group] > overlap[group, device]):
                assert (overlap[device_of == other, other] >= overlap[group, other]).all()


def test_the_largest_overlap_is_served_first():
    overlap = np.array([[5.0, 4.0], [9.0, 0.0], [7.0, 6.0], [1.0, 2.0]])
    assert assign_greedily(overlap).tolist() == [1, 0, 0, 1]


@examples(200)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(0, 6), st.integers(1, 20), st.integers(1, 4))
def test_overlap_counts_each_list_of_a_group_once(seed, n, width, nlist, n_devices):
    rng = np.random.default_rng(seed)
    probes = rng.integers(-1, nlist, size=(n, width))
    group_of = rng.integers(0, 3, size=n)
    resident = rng.random((n_devices, nlist)) < 0.5
    list_bytes = rng.integers(0, 1000, size=nlist)
    overlap = overlap_bytes(probes, group_of, 3, resident, list_bytes)
    for group in range(3):
        lists = {i for i in probes[group_of == group].reshape(-1).tolist() if i >= 0}
        for device in range(n_devices):
            assert overlap[group, device] == sum(list_bytes[i] for i in lists if resident[device, i])


def test_a_group_goes_where_its_lists_are():
    list_device = np.array([0, 0, 1, 1, -1], dtype=np.int16)
    probes = np.array([[2, 3, 4], [3, -1, -1], [0, 1, 4], [1, 4, -1]])
    resident = resident_on(list_device, 2)
    assert resident.tolist() == [[True, True, False, False, False], [False, False, True, True, False]]
    overlap = overlap_bytes(probes, np.array([0, 0, 1, 1]), 2, resident, np.full(5, 64))
    assert assign_greedily(overlap).tolist() == [1, 0]


def test_nothing_to_assign_is_nothing():
    empty = np.empty((0, 4), dtype=np.int64)
    none = np.empty(0, dtype=np.int64)
    overlap = overlap_bytes(empty, none, 0, np.ones((2, 3), bool), np.ones(3, np.int64))
    assert assign_greedily(overlap).tolist() == []


def test_nonsense_is_refused():
    queries = np.zeros((3, 2), dtype=np.float32)
    with pytest.raises(InvalidInputError, match="group_size is 0"):
        group_queries(queries, 0)
    with pytest.raises(InvalidInputError, match="group_size is -1"):
        group_queries(queries, -1)
    with pytest.raises(InvalidInputError, match="no device"):
        assign_greedily(np.empty((2, 0)))
