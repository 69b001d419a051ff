"""A real node that is told to take lists: at a rate, instead of others, and no more."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from hybridindex.cluster.manager import Manager
from hybridindex.cluster.node_process import NodeProcess, NodeSpec
from hybridindex.cluster.nodes.calls import NodeCalls
from hybridindex.cluster.state import ClusterRequest, NodeEntry
from hybridindex.errors import ServiceError
from hybridindex.index.share.ranges import mask_of
from hybridindex.service.auth import new_key
from tests.cluster.searches import wait_until
from tests.clustered import small_index

NLIST, KEY = 32, new_key()
#: A byte a second: no list comes to its end.
NEVER = 1


@pytest.fixture
def node(tmp_path):
    small_index(tmp_path / "index", nlist=NLIST).close()
    with ExitStack() as ending:
        process = NodeProcess(NodeSpec(
            name="node-0", index=str(tmp_path / "index"), data=str(tmp_path / "node"), memory_bytes=1 << 30, key=KEY
        ))  # fmt: skip
        ending.callback(process.close)
        yield NodeCalls(process.url, KEY)


def lists(*ids):
    mask = np.zeros(NLIST, dtype=np.bool_)
    mask[list(ids)] = True
    return mask


def held(node):
    return mask_of(node.node()["held"], NLIST)


def test_lists_on_their_way_give_way_to_others(node):
    node.hold(lists(*range(10)), NEVER)
    with pytest.raises(ServiceError, match="is already taking lists"):
        node.hold(lists(20, 21), None)
    wait_until(lambda: node.node()["holding"]["lists_left"] == 9)
    node.hold(lists(20, 21), None, replace=True)
    wait_until(lambda: not node.node()["holding"]["running"])
    assert held(node)[[20, 21]].all()
    # The first of those before was written, and stays.
    assert held(node)[0]
    assert not held(node)[1:10].any()
    assert node.node()["holding"] == {"running": False, "lists_left": 0, "bytes_left": 0, "error": ""}


def test_lists_on_their_way_can_be_stopped_and_given_up(node):
    node.hold(lists(*range(10)), NEVER)
    wait_until(lambda: node.node()["holding"]["running"])
    node.hold(lists(), None, replace=True)
    node.drop(lists(*range(10)))
    assert not held(node).any()
    assert not node.node()["holding"]["running"]
    with pytest.raises(ServiceError, match="replace"):
        node._ask("POST", "hold", b'{"lists": [], "replace": 1}', 10.0)


def test_a_change_does_not_wait_for_what_a_node_was_told_before(node, tmp_path):
    """As after a manager that ended while a node took lists."""
    node.hold(lists(*range(NLIST)), NEVER)
    request = ClusterRequest(replicas=1)
    manager = Manager(tmp_path / "state", cluster="c", index=tmp_path / "index", request=request, key=KEY)
    try:
        manager.set_nodes([NodeEntry(name="node-0", url=node.url, memory_bytes=1 << 30)])
        manager.repartition()
        assert held(node).all()
    finally:
        manager.close()
