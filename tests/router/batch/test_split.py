"""The probe split: the native kernel answers what the numpy reference answers, and both lose no probe."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.router.batch import split as split_module
from hybridindex.router.batch.split import (
    HOST,
    ProbeSplit,
    split_among_nodes,
    split_among_nodes_reference,
    split_probes,
    split_probes_reference,
)
from tests.examples import examples


@st.composite
def batches(draw):
    nlist = draw(st.integers(1, 40))
    n, p = draw(st.integers(0, 12)), draw(st.integers(0, 9))
    n_devices = draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    probes = rng.integers(-1, nlist, size=(n, p))
    coarse = rng.standard_normal((n, p)).astype(np.float32)
    list_device = rng.integers(-1, n_devices, size=nlist).astype(np.int16)
    list_bytes = rng.integers(0, 1000, size=nlist)
    return probes, coarse, list_device, list_bytes, n_devices


def test_native_kernel_is_built():
    assert split_module.native is not None


@examples(200)
@given(batches())
def test_native_equals_reference(batch):
    compare(split_probes(*batch), split_probes_reference(*batch))


def compare(native: ProbeSplit, reference: ProbeSplit) -> None:
    assert len(native.parts) == len(reference.parts)
    for a, b in zip(native.parts, reference.parts, strict=True):
        assert a.device == b.device
        np.testing.assert_array_equal(a.rows, b.rows)
        np.testing.assert_array_equal(a.probes, b.probes)
        np.testing.assert_array_equal(a.coarse_distances, b.coarse_distances)
        assert a.total_bytes == b.total_bytes
    np.testing.assert_array_equal(native.n_parts, reference.n_parts)
    np.testing.assert_array_equal(native.n_probes, reference.n_probes)
    np.testing.assert_allclose(native.hit_rate, reference.hit_rate, rtol=1e-6)


@examples(200)
@given(batches(), st.integers(0, 63), st.integers(0, 2**32 - 1))
def test_native_equals_reference_among_nodes(batch, most, seed):
    probes, coarse, *places = batch
    rng = np.random.default_rng(seed)
    where = rng.choice([-2, -1, 0, most // 2, most], size=probes.shape).astype(np.int16)
    split, work, lost = split_among_nodes(probes, coarse, where, *places)
    expected, work_expected, lost_expected = split_among_nodes_reference(probes, coarse, where, *places)
    compare(split, expected)
    np.testing.assert_array_equal(work, work_expected)
    np.testing.assert_array_equal(lost, lost_expected)


@pytest.mark.parametrize("function", [split_among_nodes, split_among_nodes_reference])
@pytest.mark.parametrize("node", [-3, 64])
def test_a_node_that_is_none_is_refused(function, node):
    places = np.array([-1], np.int16), np.array([1]), 0
    with pytest.raises(InvalidInputError, match=r"is for (a )?node"):
        function(np.array([[0]]), np.zeros((1, 1), np.float32), np.array([[node]], np.int16), *places)


@examples(100)
@given(batches())
def test_every_probe_goes_to_exactly_one_tier(batch):
    probes, coarse, list_device, list_bytes, _n_devices = batch
    split: ProbeSplit = split_probes(*batch)
    gathered: list[list[tuple[int, float]]] = [[] for _ in probes]
    for part in split.parts:
        for row, lists, distances in zip(part.rows, part.probes, part.coarse_distances, strict=True):
            mine = [(int(i), float(d)) for i, d in zip(lists, distances, strict=True) if i >= 0]
            assert all(list_device[i] == part.device for i, _ in mine)
            gathered[row] += mine
        assert part.total_bytes == int(list_bytes[part.probes[part.probes >= 0]].sum())
    for row, expected in enumerate(probes):
        wanted = [(int(i), float(d)) for i, d in zip(expected, coarse[row], strict=True) if i >= 0]
        assert sorted(gathered[row]) == sorted(wanted)


def test_hit_rate_is_weighted_by_bytes():
    split = split_probes(
        np.array([[0, 1]]), np.zeros((1, 2), np.float32), np.array([0, -1], np.int16), np.array([30, 10]), 1
    )
    assert split.hit_rate.tolist() == [0.75]
    assert [part.device for part in split.parts] == [HOST, 0]


@pytest.mark.parametrize("function", [split_probes, split_probes_reference])
@pytest.mark.parametrize("bad", [-2, 5])
def test_foreign_list_id_is_refused(function, bad):
    with pytest.raises(InvalidInputError):
        function(np.array([[0, bad]]), np.zeros((1, 2), np.float32), np.full(5, -1, np.int16), np.ones(5, np.int64), 0)


@pytest.mark.parametrize("function", [split_probes, split_probes_reference])
def test_foreign_device_is_refused(function):
    with pytest.raises(InvalidInputError):
        function(np.array([[0]]), np.zeros((1, 1), np.float32), np.array([1], np.int16), np.ones(1, np.int64), 1)
