"""The keys of a cluster: of its nodes, and of clients that only search."""

from __future__ import annotations

import stat

import numpy as np
import pytest

import hybridindex.cluster as hc
from hybridindex.client import Client
from hybridindex.cluster.keys import key_for_searches, make_keys, read_keys
from hybridindex.cluster.manager import Manager
from hybridindex.cluster.node_process import NodeProcess, NodeSpec
from hybridindex.cluster.nodes.calls import NodeCalls
from hybridindex.cluster.state import ClusterRequest, NodeEntry
from hybridindex.errors import AccessDeniedError, ServiceError
from hybridindex.router import Router
from tests.cluster.searches import NPROBE, K, same
from tests.clustered import clustered, small_index

FOR_CLIENTS = (("GET", "ping"), ("GET", "nodes"))
FOR_NODES = (
    *(("GET", "node"), ("PUT", "map"), ("POST", "hold"), ("POST", "drop"), ("POST", "lists"), ("POST", "scan")),
    *(("GET", "files/manifest.json"), ("GET", "files/lists.idx.npy")),
)


def test_keys_are_made_once_and_for_their_owner_alone(tmp_path):
    assert read_keys(tmp_path) is None
    assert key_for_searches(tmp_path) is None
    keys = make_keys(tmp_path)
    assert keys.admin != keys.search
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("key", "search-key")] == [0o600] * 2
    assert make_keys(tmp_path) == read_keys(tmp_path) == keys
    assert key_for_searches(tmp_path) == keys.search
    # As of a cluster that was started when there was one key.
    (tmp_path / "search-key").unlink()
    assert read_keys(tmp_path) is None
    assert key_for_searches(tmp_path) == keys.admin
    assert make_keys(tmp_path).admin == keys.admin


def test_the_search_key_searches_and_does_nothing_else(tmp_path):
    index, keys = small_index(tmp_path / "index"), make_keys(tmp_path)
    spec = NodeSpec(
        name="node-0", index=str(index.path), data=str(tmp_path / "node"), memory_bytes=1 << 30,
        key=keys.admin, search_key=keys.search,
    )  # fmt: skip
    node = NodeProcess(spec)
    manager = Manager(
        tmp_path / "state", cluster="c", index=index.path, request=ClusterRequest(replicas=1), key=keys.admin
    )
    try:
        manager.set_nodes([NodeEntry(name="node-0", url=node.url, memory_bytes=1 << 30)])
        manager.repartition()
        queries = clustered(5, seed=7)
        with (
            Router(index) as one_machine,
            hc.connect(index.path, address=node.url, key=keys.search) as cluster,
            cluster.router() as router,
        ):
            assert same(router.search(queries, K, NPROBE), one_machine.search(queries, K, NPROBE))
        with Client(node.url, key=keys.search) as client:
            np.testing.assert_array_equal(client.search(queries, K, NPROBE).ids.shape, (5, K))
            with pytest.raises(AccessDeniedError):
                client.repartition()
        calls = NodeCalls(node.url, keys.search)
        for method, name in FOR_CLIENTS:
            calls._ask(method, name, None, 10.0)
        for method, name in FOR_NODES:
            with pytest.raises(ServiceError, match=f"refused {name}: this needs a key with the role admin"):
                calls._ask(method, name, None if method == "GET" else b"{}", 10.0)
    finally:
        manager.close()
        node.close()
