from __future__ import annotations

import itertools

import numpy as np
import pytest

import hybridindex.profiler.recall as recall_module
from hybridindex.errors import ProfileError
from hybridindex.index import from_faiss
from hybridindex.profiler.recall import (
    MIN_QUERIES,
    Reference,
    _dcg,
    recall_at,
    recall_grid,
    recommend_nprobe,
    search_exhaustively,
)
from hybridindex.tiers.host.faiss_scanner import HostFaissScanner
from hybridindex.types import RecallPoint
from tests.clustered import clustered, small_index


def searched_recall(index, scanner, reference: Reference, nprobe: int) -> float:
    """Recall by really searching at ``nprobe`` and at nlist."""
    x = reference.queries
    exact = scanner.scan(x, *index.quantize(x, index.nlist), reference.k)[1]
    found = scanner.scan(x, *index.quantize(x, nprobe), reference.k)[1]
    return float(np.mean([len(np.intersect1d(a, b)) / reference.k for a, b in zip(exact, found, strict=True)]))


@pytest.mark.parametrize("codec", ["flat", "sq8", "pq", "pqfs"])
@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_recall_from_one_exhaustive_search_is_that_of_real_searches(tmp_path, codec, metric):
    index = small_index(tmp_path / "idx", codec=codec, metric=metric, n=1500, nlist=20)
    with index:
        scanner = HostFaissScanner(index, threads=1)
        x = index.transform(clustered(40, seed=5))
        reference = search_exhaustively(index, scanner, x, 10, max_seconds=60)
        for nprobe in (1, 3, 20):
            point = recall_at(index, reference, nprobe)
            # Lossy codes have ties, and either of two equal vectors may take the last place.
            slack = 1e-9 if codec == "flat" else 0.02
            assert point.recall == pytest.approx(searched_recall(index, scanner, reference, nprobe), abs=slack)
            assert (point.nprobe, point.k, point.n_queries) == (nprobe, 10, 40)
        assert recall_at(index, reference, 20).recall == recall_at(index, reference, 20).ndcg == 1.0


def test_recall_and_ndcg_rise_with_nprobe(index, queries):
    scanner = HostFaissScanner(index, threads=1)
    reference = search_exhaustively(index, scanner, index.transform(queries), 5, max_seconds=60)
    points = [recall_at(index, reference, n) for n in recall_grid(index.nlist)]
    assert all(a.recall <= b.recall and a.ndcg <= b.ndcg + 1e-12 for a, b in itertools.pairwise(points))
    assert points[0].recall < 0.95
    assert all(0 < p.ndcg <= 1 for p in points)


def test_places_beyond_the_vectors_do_not_count_as_missed(tmp_path):
    with small_index(tmp_path / "idx", n=30, nlist=3, nprobe=1) as index:
        scanner = HostFaissScanner(index, threads=1)
        reference = search_exhaustively(index, scanner, clustered(10, seed=4), 50, max_seconds=60)
        assert reference.filled.sum() == 10 * 30
        assert recall_at(index, reference, 3).recall == 1.0
        assert recall_at(index, reference, 3).ndcg == 1.0


def test_losing_the_best_costs_more_ndcg_than_losing_the_last():
    gains = np.array([3.0, 2.0, 1.0])
    without_best, without_last = _dcg(np.array([[False, True, True], [True, True, False]]), gains)
    assert without_best < without_last < _dcg(np.ones((1, 3), dtype=bool), gains)[0]
    # Found vectors move up: 2/log2(2) + 1/log2(3).
    assert without_best == pytest.approx(2 + 1 / np.log2(3))


def test_gains_fall_from_the_best_to_the_last(index):
    x = clustered(1, seed=8)
    first, second = index.quantize(x, 2)[0][0]
    reference = Reference(
        queries=x,
        k=3,
        ids=np.arange(3)[None],
        filled=np.ones((1, 3), dtype=bool),
        rows=np.zeros(3, dtype=np.int64),
        places=np.arange(3),
        lists=np.array([second, first, first]),
    )
    point = recall_at(index, reference, 1)
    assert point.recall == pytest.approx(2 / 3)
    assert point.ndcg == pytest.approx((2 + 1 / np.log2(3)) / (3 + 2 / np.log2(3) + 1 / 2))
    assert recall_at(index, reference, 2).ndcg == 1.0


def test_ids_are_located_whatever_the_chunk(index, monkeypatch):
    ids = np.array([[int(index.list_ids(5)[0]), int(index.list_ids(31)[-1])], [int(index.list_ids(0)[1]), -1]])
    for chunk in (1, 100, 1 << 20):
        monkeypatch.setattr(recall_module, "_CHUNK_IDS", chunk)
        rows, places, lists = recall_module._locate(index, ids)
        assert [*zip(rows.tolist(), places.tolist(), lists.tolist(), strict=True)] == [(0, 0, 5), (0, 1, 31), (1, 0, 0)]


def test_an_id_that_was_imported_twice_is_found_by_either_list(tmp_path):
    import faiss

    vectors = clustered(400, seed=1)
    made = faiss.index_factory(vectors.shape[1], "IVF8,Flat")
    made.train(vectors)
    made.add_with_ids(vectors, np.arange(400) % 300)
    faiss.write_index(made, str(tmp_path / "twice.faiss"))
    with from_faiss(tmp_path / "twice.faiss", tmp_path / "idx") as index:
        rows, places, lists = recall_module._locate(index, np.array([[5, 250]]))
        holders = [i for i in range(8) for n in index.list_ids(i) if n == 5]
        assert sorted(lists[places == 0].tolist()) == holders
        assert len(holders) == 2
        assert (places == 1).sum() == 1
        assert (rows == 0).all()


def test_exhaustive_search_stops_in_time_but_not_before_the_minimum(index, monkeypatch):
    scanner = HostFaissScanner(index, threads=1)
    x = clustered(200, seed=3)
    ticking = iter(range(1000))
    late = search_exhaustively(index, scanner, x, 3, max_seconds=0.5, clock=lambda: float(next(ticking)))
    assert len(late.queries) == MIN_QUERIES
    monkeypatch.setattr(recall_module, "MAX_QUERIES", 20)
    few = search_exhaustively(index, scanner, x, 3, max_seconds=60)
    assert len(few.queries) == 20


@pytest.mark.parametrize(
    ("nlist", "grid"), [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12]), (3, [1, 2, 3])]
)
def test_grid_doubles_up_to_nlist(nlist, grid):
    assert recall_grid(nlist) == grid


def point(nprobe: int) -> RecallPoint:
    return RecallPoint(nprobe=nprobe, recall=1 - 1 / (nprobe + 1), ndcg=1.0, k=10, n_queries=64)


@pytest.mark.parametrize(("target", "smallest"), [(0.5, 1), (0.51, 2), (0.9, 9), (0.95, 19), (0.97, 33), (0.9845, 64)])
def test_recommends_the_smallest_nprobe_that_reaches_the_target(target, smallest):
    asked = []

    def measure(nprobe: int) -> RecallPoint:
        asked.append(nprobe)
        return point(nprobe)

    nprobe, points = recommend_nprobe([point(n) for n in recall_grid(64)], target, measure)
    assert nprobe == smallest
    assert {p.nprobe for p in points} == {*recall_grid(64), *asked}
    assert [p.nprobe for p in points] == sorted(p.nprobe for p in points)
    assert len(asked) <= 5


def test_unreachable_recall_names_the_best():
    with pytest.raises(ProfileError, match=r"0\.999.*0\.98.* nprobe 64"):
        recommend_nprobe([point(n) for n in recall_grid(64)], 0.999, point)
