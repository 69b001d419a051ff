"""The table that clients choose nodes by: how well it knows where a query's lists are, its bytes, and what has none."""

from __future__ import annotations

from dataclasses import replace

import faiss
import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.index import from_faiss
from hybridindex.router.remote.cluster_map import ClusterMap, MapNode
from hybridindex.router.remote.locality import Locality, landmarks_of, locality_of
from tests.clustered import DIM, clustered, small_index

NLIST, NPROBE, N_NODES = 64, 8, 4
X, QUERIES = clustered(4000), clustered(200, seed=7)


def imported(folder, factory, metric):
    index = faiss.index_factory(DIM, factory, faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2)
    index.train(X)
    index.add(X)
    faiss.write_index(index, str(folder / "a.faiss"))
    return from_faiss(folder / "a.faiss", folder / "imported")


def neighbours_together(index):
    """A map that has lists with near centroids on one node: parts of the space."""
    centroids = np.asarray(index.open_faiss().quantizer.reconstruct_n(0, index.nlist))
    first = np.random.default_rng(5).permutation(index.nlist)[:N_NODES]
    node = ((centroids[:, None] - centroids[first]) ** 2).sum(axis=2).argmin(axis=1)
    nodes = [MapNode(name=f"node-{i}", url=f"http://127.0.0.1:{7000 + i}") for i in range(N_NODES)]
    return ClusterMap(
        cluster="c",
        version=3,
        fingerprint=index.fingerprint,
        generation=index.generation,
        nodes=tuple(nodes),
        holders=np.uint64(1) << node.astype(np.uint64),
        replicas=1,
    )


def parts_on_nodes(index, map_, queries):
    """(n, N_NODES) part of the bytes of each query's lists on each node."""
    probes = index.quantize(index.transform(queries), NPROBE)[0]
    nbytes = index.list_bytes[probes]
    on = np.stack([map_.held_by(i) for i in range(N_NODES)], axis=1)
    return (nbytes[:, :, None] * on[probes]).sum(axis=1) / nbytes.sum(axis=1, keepdims=True)


def check_table(index, least=0.85):
    """A query's node by the table has nearly as much of its lists as the best one."""
    map_ = neighbours_together(index)
    table = locality_of(landmarks_of(index), index.list_bytes, map_)
    assert (table.version, table.names) == (3, tuple(f"node-{i}" for i in range(N_NODES)))
    truly = parts_on_nodes(index, map_, QUERIES)
    said = np.concatenate([table.of(query[None], NPROBE) for query in QUERIES])
    assert said.sum(axis=1) == pytest.approx(np.ones(len(QUERIES)), abs=1e-5)
    rows = np.arange(len(QUERIES))
    best = truly.max(axis=1).mean()
    assert truly[rows, said.argmax(axis=1)].mean() > truly.mean() + least * (best - truly.mean())
    assert table.of(QUERIES, NPROBE) == pytest.approx(said, abs=1e-5)
    return map_, table


@pytest.mark.parametrize(("metric", "normalize"), [("ip", True), ("ip", False), ("l2", False)])
def test_the_node_of_a_query_is_known(tmp_path, metric, normalize):
    index = small_index(tmp_path / "idx", metric=metric, nlist=NLIST, normalize=normalize)
    _, table = check_table(index)
    if normalize:
        assert table.of(5 * QUERIES[:3]) == pytest.approx(table.of(QUERIES[:3]))


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize(
    "factory", ["PCA12,IVF64,Flat", "OPQ4,IVF64,PQ4", "L2norm,PCA12,IVF64,Flat", "IVF64_HNSW16,Flat"]
)
def test_queries_are_compared_as_they_come(tmp_path, factory, metric):
    check_table(imported(tmp_path, factory, metric))


def test_an_index_whose_transform_has_no_inverse_has_no_table(tmp_path):
    assert landmarks_of(imported(tmp_path, "ITQ12,IVF64,Flat", "l2")) is None


def test_large_indexes_have_few_landmarks(tmp_path, monkeypatch):
    monkeypatch.setattr("hybridindex.router.remote.locality._LANDMARK_BYTES", 4 * DIM * 40)
    index = small_index(tmp_path / "idx", nlist=NLIST)
    _, table = check_table(index)
    assert table.vectors.shape == (40, DIM)


def test_of_very_many_lists_some_stand_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr("hybridindex.router.remote.locality._MOST_LISTS", 48)
    monkeypatch.setattr("hybridindex.router.remote.locality._AT_ONCE", 10)
    monkeypatch.setattr("hybridindex.router.remote.locality._MOST_LANDMARKS", 24)
    index = small_index(tmp_path / "idx", nlist=NLIST)
    assert len(landmarks_of(index).lists) == 48
    check_table(index, least=0.6)


def test_a_table_knows_the_nodes_that_are_asked(tmp_path):
    index = small_index(tmp_path / "idx", nlist=NLIST)
    map_ = neighbours_together(index)
    map_ = replace(map_, nodes=(*map_.nodes[:1], replace(map_.nodes[1], serving=False), *map_.nodes[2:]))
    table = locality_of(landmarks_of(index), index.list_bytes, map_)
    assert table.names == ("node-0", "node-2", "node-3")
    assert table.shares.shape[1] == 3


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    index = small_index(tmp_path_factory.mktemp("locality") / "idx", nlist=NLIST)
    return locality_of(landmarks_of(index), index.list_bytes, neighbours_together(index)).encode()


def test_a_table_comes_as_it_went(encoded):
    table = Locality.decode(encoded)
    assert table.encode() == encoded
    assert table.names == tuple(f"node-{i}" for i in range(N_NODES))


def damaged(encoded, at, value):
    return encoded[:at] + value + encoded[at + len(value) :]


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, b"HIXA", "begins otherwise"),
        (4, b"\2", "has format 2"),
        (16, b"\0\0\0\0", "0 landmarks"),
        (16, b"\xff\xff\xff\xff", "4294967295 landmarks"),
        (24, b"\3", "3 nodes"),
        (28, b"\0\0\0\0", "expected"),
        (32, b"\0\0\0\0", "expected"),
        (36, b"\2", "expected"),
        (44, b"\0\0\xc0\x7f", "or holds no numbers"),
        (-9, b"\n", "names 5 of 4 nodes"),
    ],
)
def test_what_is_no_table_is_refused(encoded, at, value, words):
    with pytest.raises(InvalidInputError, match=words):
        Locality.decode(damaged(encoded, at % len(encoded), value))


@pytest.mark.parametrize("length", [0, 3, 43, 44, -1])
def test_what_ends_early_or_late_is_refused(encoded, length):
    with pytest.raises(InvalidInputError, match="table of localities"):
        Locality.decode(encoded[:length])
    with pytest.raises(InvalidInputError, match="table of localities"):
        Locality.decode(encoded + b"x")
