"""Scan times against the public sweep and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.schedule_cases import paper_levels
from hybridindex.errors import InvalidInputError
from hybridindex.studies.schedule import TreeLevel, case, tree_levels, tree_seconds
from hybridindex.studies.schedule.stages.tree_scan import MeasuredRetrieval, retrieval_seconds

SWEEP = {16: 45.08e-3, 32: 64.37e-3, 64: 128.24e-3, 256: 512.95e-3}


@pytest.mark.parametrize(("batch", "seconds"), SWEEP.items())
def test_the_public_sweep_of_64_billion_vectors_on_16_servers(batch, seconds):
    found = tree_seconds(paper_levels(), batch, servers=16, cores=96, memory_bytes_per_s=400e9)
    assert found == pytest.approx(seconds, rel=0.01)


def test_the_papers_own_inputs_scan_the_leaves_in_half_the_time(milan):
    """0.1 % of 64e9 vectors of 96 bytes: 6.1 GB of leaves; the sweep reads 12.3 GB there, and more in three levels."""
    leaves = tree_levels(case("case1"), milan)[-1]
    assert leaves.nbytes == pytest.approx(64e9 * 0.001 * 96)
    found = tree_seconds((leaves,), 16, servers=16, cores=96, memory_bytes_per_s=0.8 * 460e9)
    assert found == pytest.approx(6.144e9 / 18e9 / 16)
    assert 0.45 < found / SWEEP[16] < 0.55


def test_a_level_takes_the_longer_of_computing_and_reading():
    level = (TreeLevel(nbytes=1e9, bytes_per_core_s=1e9),)
    # By hand: one query on one of 4 cores computes 1 s; 8 queries take two rounds, and read 8 GB at 10 GB/s.
    assert tree_seconds(level, 1, servers=1, cores=4, memory_bytes_per_s=10e9) == pytest.approx(1.0)
    assert tree_seconds(level, 8, servers=1, cores=4, memory_bytes_per_s=10e9) == pytest.approx(2.0)
    assert tree_seconds(level, 8, servers=1, cores=4, memory_bytes_per_s=1e9) == pytest.approx(8.0)
    assert tree_seconds(level, 8, servers=2, cores=4, memory_bytes_per_s=1e9) == pytest.approx(4.0)


@given(
    batch=st.integers(1, 512),
    cores=st.integers(1, 128),
    servers=st.integers(1, 64),
    bandwidth=st.floats(1e9, 1e12),
    more=st.floats(1.0, 10.0),
)
def test_more_of_anything_never_scans_slower(batch, cores, servers, bandwidth, more):
    def seconds(**changes):
        given = {"servers": servers, "cores": cores, "memory_bytes_per_s": bandwidth} | changes
        return tree_seconds(paper_levels(), batch, **given)

    limit = seconds() * (1 + 1e-12)
    assert seconds(servers=servers + 1) <= limit
    assert seconds(cores=cores + 1) <= limit
    assert seconds(memory_bytes_per_s=bandwidth * more) <= limit


def test_brute_force_reads_all_of_it(milan):
    schema = case("case2")
    (level,) = tree_levels(schema, milan)
    assert level.nbytes == schema.database_vectors * 768 * 2 == schema.database_bytes


def test_queries_of_a_request_are_one_batch(milan):
    schema = case("case1")
    four = replace(schema, queries_per_retrieval=4)
    assert retrieval_seconds(four, milan, 16, 8) == retrieval_seconds(schema, milan, 16, 32)


@pytest.mark.parametrize("field", ["servers", "cores", "memory_bytes_per_s", "batch"])
def test_numbers_that_are_not_positive_are_named(field):
    values = {"batch": 1, "servers": 1, "cores": 1, "memory_bytes_per_s": 1e9} | {field: 0}
    with pytest.raises(InvalidInputError, match=f"{field} is 0"):
        tree_seconds(paper_levels(), values.pop("batch"), **values)


def test_measured_retrieval_takes_the_place_of_the_model(milan):
    schema = replace(case("case1"), queries_per_retrieval=2)
    measured = MeasuredRetrieval(batches=(1, 4, 16), seconds=(0.01, 0.02, 0.08), nbytes=schema.database_bytes / 2)
    # Twice the bytes on four servers; two query vectors each; between sizes and beyond the largest in proportion.
    expected = {1: 0.01 + 0.01 / 3, 2: 0.02, 8: 0.08, 12: 0.08 + 8 * 0.06 / 12}
    for requests, seconds in expected.items():
        assert retrieval_seconds(schema, milan, 4, requests, measured) == pytest.approx(seconds * 2 / 4)


@pytest.mark.parametrize(
    ("batches", "seconds", "word"),
    [((1,), (1.0,), "two"), ((2, 1), (1.0, 2.0), "two"), ((1, 2), (0.0, 1.0), "above 0")],
)
def test_what_was_not_measured_is_refused(batches, seconds, word):
    with pytest.raises(InvalidInputError, match=word):
        MeasuredRetrieval(batches=batches, seconds=seconds, nbytes=1.0)
