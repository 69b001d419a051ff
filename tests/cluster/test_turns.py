"""Changes of a cluster that meet: a node joins, or another drain waits, while one is drained. No node answers here."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from hybridindex.cluster import manager as manager_module
from hybridindex.cluster.manager import Manager
from hybridindex.cluster.state import ClusterRequest, ClusterState, NodeEntry, read_state, write_state
from hybridindex.errors import BuildError
from hybridindex.router.remote.cluster_map import ClusterMap, MapNode
from tests.clustered import small_index

N_NODES, NLIST = 3, 16
NOWHERE = "http://127.0.0.1:1"


def entry(number):
    return NodeEntry(name=f"node-{number}", url=NOWHERE, memory_bytes=1 << 30)


@pytest.fixture
def manager(tmp_path, monkeypatch):
    """Of nodes that have taken whatever they are told to."""
    index, state = small_index(tmp_path / "idx", n=500, nlist=NLIST), tmp_path / "state"
    state.mkdir()
    nodes = [entry(i) for i in range(N_NODES)]
    map_ = ClusterMap(
        cluster="test", version=1, fingerprint=index.fingerprint, generation=index.generation,
        nodes=tuple(MapNode(name=node.name, url=node.url) for node in nodes),
        holders=np.full(NLIST, 0b111, dtype=np.uint64), replicas=2,
    )  # fmt: skip
    request = ClusterRequest(repair_after_s=86_400)
    write_state(state, ClusterState(
        cluster="test", index=str(index.path), request=request, nodes=tuple(nodes), map=map_,
    ))  # fmt: skip
    monkeypatch.setattr(Manager, "_wait_for_nodes", lambda *_: None)
    monkeypatch.setattr(Manager, "_take", lambda *_: SimpleNamespace(errors={}, total_bytes=0))
    it = Manager(state, cluster="test", index=index.path, request=request, key=None)
    yield it
    it.close()
    index.close()


def drains(manager):
    return [node.drains for node in read_state(manager._folder).nodes]


def test_a_node_that_joins_while_another_is_drained_changes_nothing_of_that(manager, monkeypatch):
    def take(manager, *_):
        manager.set_nodes([entry(N_NODES)])
        return SimpleNamespace(errors={}, total_bytes=0)

    monkeypatch.setattr(Manager, "_take", take)
    done = manager.drain("node-0")
    assert done["node_bytes"].keys() == {"node-0", "node-1", "node-2"}
    assert done["node_bytes"]["node-0"] == 0
    assert drains(manager) == [True, False, False, False]
    manager.forget("node-0")
    assert [node["name"] for node in manager.status()["nodes"]] == ["node-1", "node-2", "node-3"]


def test_a_node_is_drained_by_whose_turn_it_is(manager, monkeypatch):
    """One that had to wait, and gave up, must not take back what the next one has done."""
    waits = threading.Event()

    class Turn:
        def __init__(self):
            self._lock = threading.Lock()
            self.release, self.locked = self._lock.release, self._lock.locked

        def acquire(self, blocking=True, timeout=-1):
            if timeout > 0:
                waits.set()
            return self._lock.acquire(blocking, timeout)

    manager._changing = Turn()
    manager._changing.acquire()
    monkeypatch.setattr(manager_module, "_MOMENT_S", 0.01)
    with pytest.raises(BuildError, match="another change"):
        manager.drain("node-0")
    waits.clear()
    monkeypatch.setattr(manager_module, "_MOMENT_S", 60.0)
    draining = threading.Thread(target=manager.drain, args=("node-0",))
    draining.start()
    assert waits.wait(60)
    assert drains(manager) == [False] * N_NODES
    manager._changing.release()
    draining.join()
    assert drains(manager) == [True, False, False]
    assert not manager._state.map.held_by(0).any()
