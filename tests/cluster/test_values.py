"""Maps, scans between nodes, requests and states: their forms, and what is refused."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybridindex.cluster as hc
from hybridindex.cluster import NodeOptions, ray_actors
from hybridindex.cluster.local_ray import read_local, stop_local
from hybridindex.cluster.reach import client_of
from hybridindex.cluster.state import ClusterRequest, ClusterState, NodeEntry, hold_state, read_state, write_state
from hybridindex.errors import CorruptIndexError, InvalidInputError, ServiceError
from hybridindex.router.remote.cluster_map import ClusterMap, MapNode
from hybridindex.router.remote.scan_codec import decode_found, decode_scan, encode_found, encode_scan


def a_map(holders=(1, 3, 2), n_nodes=2, **changes):
    values = {
        "cluster": "c",
        "version": 1,
        "fingerprint": "f",
        "generation": 1,
        "nodes": tuple(MapNode(name=f"node-{i}", url=f"http://127.0.0.1:{9000 + i}") for i in range(n_nodes)),
        "holders": np.array(holders, dtype=np.uint64),
        "replicas": 1,
    }
    return ClusterMap(**{**values, **changes})


@given(st.integers(1, 64).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, 2**n - 1), min_size=1))))
def test_maps_survive_json(drawn):
    n_nodes, holders = drawn
    map_ = a_map(holders, n_nodes)
    again = ClusterMap.from_json(map_.to_json())
    np.testing.assert_array_equal(again.holders, map_.holders)
    assert (again.nodes, again.version, again.replicas) == (map_.nodes, map_.version, map_.replicas)
    for node in range(n_nodes):
        np.testing.assert_array_equal(again.held_by(node), [bool(h >> node & 1) for h in holders])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format 2; expected 1"),
        ({"nlist": 0}, "nlist of a map is 0"),
        ({"version": "3"}, "version of a map is '3'"),
        ({"nodes": {}}, "nodes of a map are no list"),
        ({"nodes": [{"name": "a b", "url": "http://h:1", "lists": []}]}, "a node's name is 'a b'"),
        ({"nodes": [{"name": "a", "url": "ftp://h:1", "lists": []}]}, "the url of node a is 'ftp://h:1'"),
        ({"nodes": [{"name": "a", "url": "http://h:65536", "lists": []}]}, "the url of node a is 'http://h:65536'"),
        ({"nodes": [{"name": "a", "url": "http://h:1", "lists": [[2, 9]]}]}, "lists holds [2, 9]; expected"),
        ({"nodes": [{"name": "a", "url": "http://h:1", "lists": [[0, 1]]}] * 2}, "different names"),
    ],
)
def test_what_is_no_map_is_refused(change, words):
    data = json.loads(a_map().to_json()) | change
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        ClusterMap.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(InvalidInputError):
        ClusterMap.from_json(text)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_scans_survive_the_wire(n, d, w, seed):
    rng = np.random.default_rng(seed)
    queries, coarse = rng.random((n, d), np.float32), rng.random((n, w), np.float32)
    probes = rng.integers(-1, 9, (n, w))
    found = decode_scan(encode_scan(queries, probes, coarse), n=n, d=d, w=w, nlist=9)
    for there, here in zip(found, (queries, probes, coarse), strict=True):
        np.testing.assert_array_equal(there, here)
    distances, ids = rng.random((n, w), np.float32), rng.integers(-1, 1 << 62, (n, w))
    for there, here in zip(decode_found(encode_found(distances, ids), n=n, k=w), (distances, ids), strict=True):
        np.testing.assert_array_equal(there, here)


def test_scans_that_are_none_are_refused():
    queries, probes, coarse = np.ones((2, 3), np.float32), np.zeros((2, 4), np.int64), np.ones((2, 4), np.float32)
    body = encode_scan(queries, probes, coarse)
    with pytest.raises(InvalidInputError, match="has 87 bytes; expected 88"):
        decode_scan(body[:-1], n=2, d=3, w=4, nlist=9)
    with pytest.raises(InvalidInputError, match=r"outside -1\.\.8"):
        decode_scan(encode_scan(queries, probes + 9, coarse), n=2, d=3, w=4, nlist=9)
    with pytest.raises(InvalidInputError, match="not finite"):
        decode_scan(encode_scan(queries * np.nan, probes, coarse), n=2, d=3, w=4, nlist=9)
    with pytest.raises(InvalidInputError, match="a node's answer has 3 bytes"):
        decode_found(b"abc", n=2, k=4)


def test_a_state_is_read_as_it_was_written(tmp_path):
    assert read_state(tmp_path) is None
    state = ClusterState(
        cluster="c",
        index="/idx",
        request=ClusterRequest(replicas=1, copy_bytes_per_s=None),
        nodes=(NodeEntry(name="node-0", url="http://h:1", memory_bytes=7, drains=True),),
        map=a_map(),
    )
    write_state(tmp_path, state)
    again = read_state(tmp_path)
    assert again == state
    np.testing.assert_array_equal(again.map.holders, state.map.holders)
    for content in ("{", "{}", '{"format": 9}', json.dumps({"format": 1, "cluster": "c"})):
        (tmp_path / "cluster.json").write_text(content)
        with pytest.raises(CorruptIndexError, match=r"cluster\.json"):
            read_state(tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replicas": 0}, "replicas is 0"),
        ({"replicate": "warm"}, "replicate is 'warm'"),
        ({"repair_after_s": -1}, "repair_after_s is -1"),
        ({"copy_bytes_per_s": 0}, "copy_bytes_per_s is 0"),
    ],
)
def test_bad_requests_name_the_field(values, words):
    with pytest.raises(InvalidInputError, match=words):
        ClusterRequest(**values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"host": "0.0.0.0"}, "tls_cert is missing"),
        ({"host": "auto"}, "insecure_network"),
        ({"tls_cert": "a"}, "belong together"),
    ],
)
def test_nodes_that_others_could_reach_need_a_certificate(values, words, tmp_path):
    with pytest.raises(InvalidInputError, match=words):
        NodeOptions(**{"memory_bytes": 1, "data": tmp_path, **values})


def test_a_map_without_a_node_says_the_same_of_all_others():
    rng = np.random.default_rng(0)
    nodes = tuple(MapNode(name=f"n{i}", url=f"http://h:{i + 1}") for i in range(64))
    for at in (0, 5, 63):
        holders = rng.integers(0, 1 << 63, 50, dtype=np.uint64, endpoint=True) & ~np.uint64(1 << at)
        map_ = ClusterMap(
            cluster="c", version=1, fingerprint="f", generation=1, nodes=nodes, holders=holders, replicas=1
        )
        left, among = map_.without(f"n{at}")
        assert [node.name for node in left] == [node.name for i, node in enumerate(nodes) if i != at]
        after = ClusterMap(cluster="c", version=2, fingerprint="f", generation=1, nodes=left, holders=among, replicas=1)
        for i, node in enumerate(left):
            np.testing.assert_array_equal(after.held_by(i), map_.held_by(map_.index_of(node.name)))


def test_a_ray_that_has_ended_is_forgotten_and_nothing_else_is_killed(tmp_path):
    """As after a restart of the machine, where another process has its id."""
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        left = {"address": "127.0.0.2:1", "token": "t", "pid": other.pid, "folder": "/tmp/hix-0123456789ab"}
        (tmp_path / "ray.json").write_text(json.dumps({**left, "host": socket.gethostname()}))
        assert not read_local(tmp_path).runs()
        stop_local(tmp_path)
        assert other.poll() is None
        assert read_local(tmp_path) is None
        (tmp_path / "ray.json").write_text(json.dumps({**left, "host": "elsewhere"}))
        with pytest.raises(ServiceError, match="started on elsewhere"):
            stop_local(tmp_path)
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("wrong", [{"folder": "/home/somebody"}, {"folder": "/tmp/hix-0123456789ab/.."}, {"pid": 1}])
def test_nothing_is_removed_or_ended_that_an_index_from_somebody_else_names(tmp_path, wrong):
    left = {"address": "a:1", "token": "t", "pid": 1 << 30, "folder": "/tmp/hix-0123456789ab", **wrong}
    (tmp_path / "ray.json").write_text(json.dumps({**left, "host": socket.gethostname()}))
    with pytest.raises(CorruptIndexError, match="none of ours"):
        stop_local(tmp_path)


@pytest.mark.parametrize("what", ["copied", "writable"])
def test_keys_are_shown_to_nobody_that_a_copied_or_shared_folder_names(tmp_path, what, monkeypatch):
    index = tmp_path / "idx"
    (index / "cluster").mkdir(parents=True)
    node = NodeEntry(name="node-0", url="http://127.0.0.1:1", memory_bytes=1)
    of = tmp_path / "other" if what == "copied" else index
    write_state(index / "cluster", ClusterState(cluster="x", index=str(of), request=ClusterRequest(), nodes=(node,)))
    if what == "writable":
        (index / "cluster" / "cluster.json").chmod(0o666)
    monkeypatch.setattr("hybridindex.cluster.reach.Client", None)  # nobody is asked
    with pytest.raises(InvalidInputError, match="a copy" if what == "copied" else "others may write"):
        client_of(index, key="secret")


def test_somebody_elses_ray_is_not_asked_for_a_cluster_that_was_not_started(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("hybridindex.cluster.cluster.attach", asked.append)
    for call in (hc.connect, hc.stop):
        with pytest.raises(ServiceError, match=r"no cluster of .* was started, as .*cluster says"):
            call(tmp_path)
    assert not asked


def test_a_ray_without_the_cluster_is_named():
    class Stranger:
        gcs_address = "10.0.0.5:6379"

        def get_actor(self, name, namespace):
            raise ValueError(name, namespace)

        def get_runtime_context(self):
            return self

    with pytest.raises(ServiceError, match=r"no cluster idx-1 runs on the Ray at 10\.0\.0\.5:6379"):
        ray_actors.manager_of(Stranger(), "idx-1")


def test_a_state_has_one_manager(tmp_path):
    folder = tmp_path / "state"
    refused = pytest.raises(ServiceError, match=r"manager.lock is held: a manager of this cluster runs")
    with hold_state(folder, timeout_s=0), refused:
        hold_state(folder, timeout_s=0.3)
    hold_state(folder, timeout_s=0).close()


def test_a_manager_waits_for_the_one_before_to_be_gone(tmp_path):
    before = hold_state(tmp_path, timeout_s=0)
    ending = threading.Timer(0.3, before.close)
    ending.start()
    hold_state(tmp_path, timeout_s=30).close()
    ending.join()
