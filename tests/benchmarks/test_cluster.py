"""What the measurements of a cluster count as wrong, and that the cluster which they measure is one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.service.cluster.answers import Oracle, judge
from benchmarks.service.cluster.failures import attainment_back
from benchmarks.service.cluster.load import Load, Taken
from benchmarks.service.cluster.nodes import make_workload, nodes
from hybridindex.types import SearchResult

VECTORS = np.eye(6, dtype=np.float32)
QUERY = np.array([[0.9, 0.5, 0.5, 0.2, 0.1, 0.0]], dtype=np.float32)
EXPECTED = np.array([[0, 1, 2]]), np.array([[0.9, 0.5, 0.5]], dtype=np.float32)


def verdict(ids, distances, coverage=None, allow_partial=None, nprobe_used=4):
    found = SearchResult(
        ids=np.array([ids]),
        distances=np.array([distances], dtype=np.float32),
        nprobe_used=np.array([nprobe_used], dtype=np.int32),
        hit_rate=np.zeros(1, dtype=np.float32),
        coverage=None if coverage is None else np.array([coverage], dtype=np.float32),
    )
    (one,) = judge(found, EXPECTED, QUERY, VECTORS, nprobe=4, allow_partial=allow_partial)
    return one


@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 2, 1]])
def test_the_answers_of_one_machine_are_right_and_so_are_ties(ids):
    assert verdict(ids, [0.9, 0.5, 0.5]) == "right"


@pytest.mark.parametrize("coverage", [None, 1.0])
def test_a_neighbour_that_is_missing_is_silent(coverage):
    assert verdict([0, 1, 3], [0.9, 0.5, 0.2], coverage) == "silent"
    assert verdict([0, 1, -1], [0.9, 0.5, -np.inf], coverage) == "silent"


def test_a_part_is_told_and_allowed_or_wrong():
    part = [0, 1, 3], [0.9, 0.5, 0.2]
    assert verdict(*part, 0.7, 0.5) == "partial"
    assert verdict(*part, 0.4, 0.5) == "wrong"
    assert verdict(*part, 0.7) == "wrong"


@pytest.mark.parametrize(
    ("ids", "distances", "nprobe_used"),
    [
        ([0, 1, 2], [0.9, 0.5, 0.4], 4),
        ([0, 1, 5], [0.9, 0.5, 0.5], 4),
        ([0, 1, 1], [0.9, 0.5, 0.5], 4),
        ([1, 0, 2], [0.5, 0.9, 0.5], 4),
        ([0, 1, 6], [0.9, 0.5, 0.5], 4),
        ([0, 1, 2], [0.9, 0.5, 0.5], 3),
    ],
)
def test_what_is_no_neighbour_is_wrong(ids, distances, nprobe_used):
    assert verdict(ids, distances, nprobe_used=nprobe_used) == "wrong"


def taken(late: list[tuple[float, float]]) -> Taken:
    """100 searches a second for ten seconds; ``late``: when searches take too long."""
    due = np.arange(0, 10, 0.01)
    seconds = np.full(len(due), 0.001)
    for start, stop in late:
        seconds[(due >= start) & (due < stop)] = np.inf
    return Taken(due_s=due, seconds=seconds, errors=Counter())


def test_attainment_is_back_after_the_last_search_that_is_late():
    assert attainment_back(taken([]), 0.01, 2.0, 10.0, 1.0) == 0.0
    assert attainment_back(taken([(2.0, 2.5), (3.0, 3.2)]), 0.01, 2.0, 10.0, 1.0) == pytest.approx(1.2, abs=0.011)
    # One in ten may be late.
    assert attainment_back(taken([(2.0, 2.5)]), 0.01, 2.0, 10.0, 0.9) == pytest.approx(0.4, abs=0.011)
    assert attainment_back(taken([(2.0, 10.0)]), 0.01, 2.0, 10.0, 1.0) is None


def test_a_cluster_with_random_placements_answers_as_one_machine(tmp_path):
    workload = make_workload(tmp_path / "index", nbytes=1 << 20, dim=32, nlist=64, nprobe=4)
    oracle = Oracle(workload, (4,))
    with nodes(workload, tmp_path / "nodes", 2, replicas=1, seed=3) as cluster, cluster.router() as router:
        held = [node["lists"] for node in cluster.manager.status()["nodes"]]
        assert all(0 < lists < 64 for lists in held)
        rows = np.arange(64)
        found = router.search(oracle.queries[rows], 10, 4)
        verdicts = judge(found, oracle.expected(rows, 10, 4), oracle.queries[rows], oracle.vectors, nprobe=4)
        load = Load(router, oracle.queries, 100.0, 4)
        cluster.manager.repartition()
        loaded = load.end()
        asked = sum(peer["asked"] for name in cluster.names for peer in cluster.calls(name).node()["peers"])
    assert set(verdicts) == {"right"}
    assert asked
    assert not loaded.errors
    assert np.isfinite(loaded.seconds).all()
