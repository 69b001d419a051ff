"""Adapters beside the real frameworks, run by their own code where they have some for it.

VectorDBBench is a package; of the others ANN_BENCHMARKS, BIG_ANN_BENCHMARKS and CUVS_BENCH name checkouts.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import numpy as np
import pytest

from tests.clustered import clustered

K = 10


def framework(module, variable=None):
    """Skips where it is not there. What is there has to work."""
    if variable is None:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed; make test-ecosystem does")
    elif variable not in os.environ:
        pytest.skip(f"no package index has it: {variable} has to name a checkout whose requirements are installed")
    else:
        sys.path.insert(0, os.environ[variable])
    importlib.import_module(module)


def nearest(vectors, queries, among=None):
    """(n, k) by brute force; ``among``: rows that may be found."""
    distances = ((queries[:, None] - vectors[None]) ** 2).sum(axis=2)
    if among is not None:
        distances[:, ~among] = np.inf
    return np.argsort(distances, axis=1)[:, :K]


@pytest.fixture(scope="module")
def vectors():
    return clustered(3000, seed=1)


@pytest.fixture(scope="module")
def queries():
    return clustered(40, seed=2)


def recall(found, wanted):
    return np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found, wanted, strict=True)])


def test_vectordbbench_measures_it(vectors, queries, tmp_path, monkeypatch):
    monkeypatch.setenv("LOG_FILE", str(tmp_path / "theirs.log"))  # else they begin one where pytest was started
    framework("vectordb_bench")
    from vectordb_bench.backend.clients.api import MetricType
    from vectordb_bench.backend.filter import IntFilter, non_filter
    from vectordb_bench.backend.runner.serial_runner import SerialSearchRunner

    adapter = importlib.import_module("benchmarks.adapters.vectordbbench")
    config = adapter.HybridIndexConfig(path=str(tmp_path)).to_dict()
    case = adapter.HybridIndexCaseConfig(metric_type=MetricType.L2, nlist=16, nprobe=16)
    db = adapter.HybridIndex(vectors.shape[1], config, case, drop_old=True)
    with db.init():
        for at in range(0, len(vectors), 1000):
            rows = vectors[at : at + 1000]
            assert db.insert_embeddings(rows.tolist(), list(range(at, at + len(rows)))) == (len(rows), None)
        with pytest.raises(RuntimeError, match="no index yet"):
            db.search_embedding(queries[0].tolist(), K)
        db.optimize(len(vectors))
    for filters, among in ((non_filter, None), (IntFilter(int_value=1500), np.arange(3000) >= 1500)):
        assert db.filter_supported(filters)
        wanted = nearest(vectors, queries, among)
        db.prepare_filter(filters)
        # Their runner, in a process of its own.
        runner = SerialSearchRunner(db, [q.tolist() for q in queries], wanted.tolist(), k=K, filters=filters)
        measured, _seconds = runner.run()
        assert measured[0] == 1.0, "recall"


def test_ann_benchmarks_asks_it(vectors, queries):
    framework("ann_benchmarks.algorithms.base.module", "ANN_BENCHMARKS")
    adapter = importlib.import_module("benchmarks.adapters.ann_benchmarks")
    with pytest.raises(ValueError, match="jaccard"):
        adapter.HybridIndex("jaccard", "flat", 16)
    algorithm = adapter.HybridIndex("euclidean", "flat", 16)
    algorithm.fit(vectors)
    wanted = nearest(vectors, queries)
    algorithm.set_query_arguments(16)
    algorithm.batch_query(queries, K)
    assert recall(algorithm.get_batch_results(), wanted) == 1
    assert recall([algorithm.query(q, K) for q in queries], wanted) == 1
    algorithm.set_query_arguments(1)
    assert recall([algorithm.query(q, K) for q in queries], wanted) < 1
    assert algorithm.get_memory_usage() > 0
    assert str(algorithm) == "hybridindex(flat, nlist=16, nprobe=1)"
    algorithm.done()


@pytest.fixture
def big_ann():
    framework("benchmark.algorithms.base", "BIG_ANN_BENCHMARKS")
    framework("neurips23.filter.base", "BIG_ANN_BENCHMARKS")
    return importlib.import_module("benchmarks.adapters.big_ann")


class Dataset:
    """As one of theirs answers."""

    def __init__(self, vectors, tags):
        self._vectors, self._tags = vectors, tags

    def get_dataset(self):
        return self._vectors

    def get_dataset_metadata(self):
        return self._tags


def test_big_ann_benchmarks_filters_with_it(big_ann, vectors, queries, tmp_path, monkeypatch):
    from scipy.sparse import csr_matrix

    rng = np.random.default_rng(3)
    tags = csr_matrix(rng.random((len(vectors), 12)) < 0.3)
    asked = np.zeros((len(queries), 12), dtype=bool)
    for number, row in enumerate(asked):
        row[rng.choice(12, 1 + number % 2, replace=False)] = True
    monkeypatch.setitem(big_ann.DATASETS, "small", lambda: Dataset(vectors, tags))
    wanted = np.stack(
        [
            nearest(vectors, query[None], (tags.toarray()[:, row]).all(axis=1))[0]
            for query, row in zip(queries, asked, strict=True)
        ]
    )
    for attempt in range(2):
        algorithm = big_ann.Filter("euclidean", {"nlist": 16, "folder": str(tmp_path)})
        assert algorithm.load_index("small") is bool(attempt)
        if not attempt:
            algorithm.fit("small")
        algorithm.set_query_arguments({"nprobe": 16})
        algorithm.filtered_query(queries, csr_matrix(asked), K)
        assert recall(algorithm.get_results(), wanted) == 1
        algorithm.query(queries, K)
        assert recall(algorithm.get_results(), nearest(vectors, queries)) == 1
        algorithm.done()


def test_big_ann_benchmarks_streams_through_it(big_ann, vectors, queries, tmp_path):
    algorithm = big_ann.Streaming("euclidean", {"nlist": 16, "folder": str(tmp_path / "stream")})
    algorithm.setup("float32", 3000, vectors.shape[1])
    for _group in range(2):
        algorithm.set_query_arguments({"nprobe": 16})
        algorithm.insert(vectors[:2000], np.arange(2000))
        algorithm.delete(np.arange(500))
        algorithm.insert(vectors[2000:], np.arange(2000, 3000))
        algorithm.query(queries, K)
        assert recall(algorithm.get_results(), nearest(vectors, queries, np.arange(3000) >= 500)) == 1
    algorithm.done()


@pytest.mark.parametrize(("distance", "codec"), [("euclidean", "flat"), ("cosine", "sq8")])
def test_cuvs_bench_runs_it(distance, codec, vectors, queries, tmp_path):
    framework("cuvs_bench.orchestrator", "CUVS_BENCH")
    from cuvs_bench.orchestrator import BenchmarkOrchestrator

    importlib.import_module("benchmarks.adapters.cuvsbench")
    if distance == "cosine":
        vectors, queries = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (vectors, queries))
    wanted = nearest(vectors, queries).astype(np.int32)
    for name, rows in (("base.fbin", vectors), ("query.fbin", queries), ("nearest.ibin", wanted)):
        (tmp_path / name).write_bytes(np.array(rows.shape, dtype=np.uint32).tobytes() + rows.tobytes())
    datasets, algorithms = tmp_path / "datasets.yaml", tmp_path / "algorithms.yaml"
    datasets.write_text(
        f"- {{name: small, base_file: base.fbin, query_file: query.fbin, groundtruth_neighbors_file: nearest.ibin, "
        f"distance: {distance}, dims: {vectors.shape[1]}}}\n"
    )
    algorithms.write_text(
        f"groups: {{base: {{build: {{nlist: [16], codec: [{codec}]}}, search: {{nprobe: [1, 16]}}}}}}\n"
    )
    asked = {
        "dataset": "small", "dataset_path": str(tmp_path), "dataset_configuration": str(datasets),
        "algorithm_configuration": str(algorithms), "algorithms": "hybridindex", "count": K, "batch_size": 16,
    }  # fmt: skip
    orchestrator = BenchmarkOrchestrator(backend_type="hybridindex")
    built, few, again, all_ = orchestrator.run_benchmark(**asked)
    assert built.success
    assert built.build_time_seconds > 0
    assert built.index_size_bytes > 0
    assert again.build_time_seconds == built.build_time_seconds  # it is there
    assert few.recall < all_.recall
    assert all_.recall == 1 if codec == "flat" else all_.recall > 0.9
    assert all_.queries_per_second > 0
    assert all_.latency_percentiles["p99"] >= all_.latency_percentiles["p50"] > 0
    with pytest.raises(ValueError, match="groups: 'other'"):
        orchestrator.run_benchmark(**asked, groups="other")
    assert orchestrator.run_benchmark(**asked, dry_run=True)[1].success
