"""The comparison finds what differs, and takes equally near rows in any order."""

from __future__ import annotations

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.demo import same_answers
from hybridindex.demo.same_answers import _differ, _nearest, _random, compare_answers
from hybridindex.router.router import Router
from hybridindex.types import SearchResult
from tests.clustered import clustered

IDS = np.array([[4, 2, 9], [1, 5, 7]])
DISTANCES = np.array([[3.0, 2.0, 1.0], [3.0, 3.0, 1.0]], np.float32)


def result(ids=IDS, distances=DISTANCES):
    n = len(ids)
    return SearchResult(
        ids=np.array(ids), distances=np.array(distances, np.float32), nprobe_used=np.full(n, 4), hit_rate=np.zeros(n)
    )


def test_equal_answers_do_not_differ():
    assert _differ(IDS, DISTANCES, result()) == 0
    assert _differ(IDS, DISTANCES, result(distances=DISTANCES + 1e-6)) == 0


def test_equally_near_rows_come_in_any_order():
    assert _differ(IDS, DISTANCES, result(ids=[[4, 2, 9], [5, 1, 7]])) == 0
    assert _differ(IDS, DISTANCES, result(ids=[[2, 4, 9], [1, 5, 7]])) == 1


@pytest.mark.parametrize("at", [0, 1, 2])
def test_another_distance_differs(at):
    distances = DISTANCES.copy()
    distances[0, at] += 0.1
    assert _differ(IDS, DISTANCES, result(distances=distances)) == 1


def test_the_nearest_of_all_rows():
    rng = np.random.default_rng(0)
    rows, queries = (rng.standard_normal((n, 8)).astype(np.float32) for n in (300, 5))
    expected = np.argsort(-(queries @ rows.T), axis=1)[:, : same_answers.K]
    assert (np.sort(_nearest(queries, rows, block=64)) == np.sort(expected)).all()


def test_random_placements_keep_to_the_budget(planned_index):
    with hx.open(planned_index) as index:
        plan = index.current_plan()
        rng, counts = np.random.default_rng(0), set()
        for _ in range(20):
            found = _random(index, plan, rng)
            held = index.list_bytes[found.resident_lists].sum()
            assert held <= plan.request.budgets[0] - plan.request.scratch[0]
            counts.add(len(found.resident_lists))
        assert len(counts) > 3


def test_a_router_that_answers_wrongly_is_found(planned_index, monkeypatch):
    monkeypatch.setattr(same_answers, "SECONDS", 0.3)
    real = Router.search

    def search(router, queries, *args, **options):
        found = real(router, queries, *args, **options)
        found.ids[:, 0], found.distances[:, 0] = found.ids[:, 1], found.distances[:, 1]
        return found

    with hx.open(planned_index) as index:
        plan, rows = index.current_plan(), clustered(2500, seed=1)
        right = compare_answers(index, plan, "cpu", clustered(100, seed=2), rows, lambda *_: None)
        assert right.differences == 0 < right.queries
        monkeypatch.setattr(Router, "search", search)
        wrong = compare_answers(index, plan, "cpu", clustered(100, seed=2), rows, lambda *_: None)
        assert wrong.differences > 0
