"""What adapters keep between calls, beside doubles of the frameworks: nothing of theirs has to be installed."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from tests.benchmarks.test_adapters import K, nearest, recall
from tests.clustered import clustered


class Double(ModuleType):
    """A module whose every name is an empty class, but for those that are set."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


@pytest.fixture
def adapter(monkeypatch):
    """``adapter(name, modules)``: an adapter, imported anew beside doubles of these modules."""

    def load(name, **given):
        for module, names in given.items():
            inner = None
            for whole in reversed(list(itertools.accumulate(module.split("__"), "{}.{}".format))):
                if not isinstance(sys.modules.get(whole), Double):
                    monkeypatch.setitem(sys.modules, whole, Double(whole))
                sys.modules[whole].__dict__.update(names if inner is None else inner)
                inner = {whole.rpartition(".")[2]: sys.modules[whole]}
        full = f"benchmarks.adapters.{name}"
        monkeypatch.delitem(sys.modules, full, raising=False)
        found = importlib.import_module(full)
        monkeypatch.setitem(sys.modules, full, found)
        return found

    return load


@pytest.fixture(scope="module")
def vectors():
    return clustered(1200, seed=1)


def test_each_group_of_query_arguments_begins_with_an_empty_index(adapter, vectors, tmp_path):
    """big-ann-benchmarks sets up once, and plays the whole runbook for each group."""
    big_ann = adapter(
        "big_ann",
        benchmark__algorithms__base={},
        benchmark__datasets={"DATASETS": {}},
        neurips23__filter__base={},
        neurips23__streaming__base={},
    )
    algorithm = big_ann.Streaming("euclidean", {"nlist": 8, "folder": str(tmp_path / "stream")})
    algorithm.setup("float32", len(vectors), vectors.shape[1])
    queries = clustered(20, seed=2)
    for probed in (4, 8):
        algorithm.set_query_arguments({"nprobe": probed})
        algorithm.insert(vectors[:600], np.arange(600))
        algorithm.query(queries, K)
        assert (algorithm.res < 600).all(), "rows of the group before"
        algorithm.insert(vectors[600:], np.arange(600, 1200))
        algorithm.delete(np.arange(100))
        algorithm.query(queries, K)
    assert recall(algorithm.res, nearest(vectors, queries, np.arange(1200) >= 100)) == 1
    algorithm.done()


@pytest.fixture
def vectordb(adapter, tmp_path):
    found = adapter(
        "vectordbbench",
        vectordb_bench__backend__filter={"FilterOp": Enum("FilterOp", "NonFilter NumGE StrEqual")},
        vectordb_bench__backend__clients__api={"MetricType": Enum("MetricType", "COSINE L2")},
    )
    case = SimpleNamespace(index_param=lambda: {"metric": "l2", "codec": "flat", "nlist": 8}, devices=[], threads=0)
    return found, found.HybridIndex(4, {"path": str(tmp_path)}, case, with_scalar_labels=True)


@pytest.mark.parametrize("broken", ["ids", "labels"])
def test_an_insert_that_failed_and_is_tried_again_is_there_once(vectordb, monkeypatch, tmp_path, broken):
    _, db = vectordb
    folder = tmp_path / "vectordbbench"
    assert db.insert_embeddings([[0.0] * 4] * 2, [0, 1], ["a", "b"]) == (2, None)
    kept = {name: (folder / name).read_bytes() for name in ("rows", "ids", "labels")}
    opened = type(folder).open

    def failing(path, *args, **options):
        file = opened(path, *args, **options)
        if path.name != broken:
            return file

        class Full:
            """Takes a part of what it is given."""

            def write(self, data):
                file.write(data[:3])
                raise OSError(28, "No space left on device")

        @contextlib.contextmanager
        def entered():
            with file:
                yield Full()

        return entered()

    with monkeypatch.context() as patch:
        patch.setattr(type(folder), "open", failing)
        done, error = db.insert_embeddings([[1.0] * 4] * 3, [2, 3, 4], ["c", "d", "e"])
    assert (done, type(error)) == (0, OSError)
    assert {name: (folder / name).read_bytes() for name in kept} == kept
    assert db.insert_embeddings([[1.0] * 4] * 3, [2, 3, 4], ["c", "d", "e"]) == (3, None)
    assert np.fromfile(folder / "ids", dtype=np.int64).tolist() == [0, 1, 2, 3, 4]
    assert np.fromfile(folder / "rows", dtype=np.float32).tolist() == [0.0] * 8 + [1.0] * 12
    assert (folder / "labels").read_text().split() == ['"a"', '"b"', '"c"', '"d"', '"e"']


def test_a_kept_index_took_as_long_as_it_took(adapter, vectors, tmp_path):
    """cuvs-bench asks for a build before each search; a plot of build times must not show nothing for a kept one."""
    package = tmp_path / "cuvs_bench" / "orchestrator" / "__init__.py"
    cuvs = adapter(
        "cuvsbench",
        cuvs_bench__backends={"get_registry": lambda: SimpleNamespace(register=lambda *_: None)},
        cuvs_bench__backends__base={
            "BuildResult": lambda *fields: SimpleNamespace(seconds=fields[1], nbytes=fields[2])
        },
        cuvs_bench__orchestrator={"__file__": str(package), "register_config_loader": lambda *_: None},
        cuvs_bench__orchestrator__config_loaders={},
    )
    dataset = SimpleNamespace(training_vectors=vectors, distance_metric="euclidean")
    config = SimpleNamespace(file=str(tmp_path / "small" / "index"), build_param={"nlist": 8, "codec": "flat"})
    backend = cuvs.HybridIndexBackend()
    built, kept = (backend.build(dataset, [config]) for _ in range(2))
    assert built.seconds > 0
    assert (kept.seconds, kept.nbytes) == (built.seconds, built.nbytes)
    again = backend.build(dataset, [config], force=True)
    assert again.seconds > 0
    assert again.seconds != built.seconds
    # Of an index of an earlier version nobody knows: it is built again.
    next(path for path in (tmp_path / "small").iterdir() if path.is_file()).unlink()
    assert backend.build(dataset, [config]).seconds > 0
    assert backend.build(dataset, [config], dry_run=True).seconds == 0
