"""Changes between nodes: sent once, told to all that answer, by the one node that most agree on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from hybridindex.errors import UnreachableError
from hybridindex.router.remote.changes import PeerChanges
from hybridindex.router.remote.cluster_map import ClusterMap, MapNode
from hybridindex.router.remote.peer import Peer
from tests.router.remote.server import Server, loop_thread
from tests.router.slow_copies import until


@pytest.fixture
def thread():
    with loop_thread() as loop:
        yield loop


@pytest.fixture
def several(thread):
    """Two other nodes, and what this one asks of them."""
    servers = [Server(thread) for _ in range(2)]
    made = []

    async def peers():
        return [
            Peer(thread.loop, MapNode(name=f"n{i}", url=f"http://127.0.0.1:{each.port}"), None, None, up=True)
            for i, each in enumerate(servers, 1)
        ]

    found = thread.run(peers())
    nodes = (MapNode(name="n0", url="http://127.0.0.1:1"), *(peer.node for peer in found))
    map_ = ClusterMap(
        cluster="c", version=1, fingerprint="f", generation=1, nodes=nodes, replicas=1,
        holders=np.ones(4, dtype=np.uint64),
    )  # fmt: skip
    lists = SimpleNamespace(
        timeout_s=20.0, loop=thread.loop, name="n0", call=thread.call, peers=lambda: found, map=map_
    )
    made.append(PeerChanges(lists))
    yield made[0], servers, found, lists

    async def end():
        await asyncio.gather(*(peer.close() for peer in found), return_exceptions=True)
        for server in servers:
            server.server.close()
        await asyncio.sleep(0.01)  # what was aborted tells its protocol in the loop's next turns

    thread.run(end())


def test_a_change_is_sent_once_also_where_its_answer_is_lost(several):
    changes, (server, _), _, _ = several
    assert changes.ask("n1", "/v1/warm", b"", kind="a/b", lines="").result(20) == (200, b"{}")
    for what in ("breaks", "dies"):
        server.answers["vectors"], before = what, len(server.asked)
        with pytest.raises(ConnectionError):  # not UnreachableError, which says that nothing was sent
            changes.ask("n1", "/v1/vectors", b"x", kind="a/b", lines="").result(20)
        assert server.asked[before:] == ["/v1/vectors"]
    with pytest.raises(UnreachableError):
        changes.ask("n1", "/v1/vectors", b"x", kind="a/b", lines="").result(20)
    with pytest.raises(UnreachableError, match="n9 does not answer"):
        changes.ask("n9", "/v1/vectors", b"x", kind="a/b", lines="").result(20)


def test_who_gives_a_change_up_harms_nobody(several):
    changes, (server, _), (peer, _), _ = several
    server.hangs = True
    asked = changes.ask("n1", "/v1/vectors", b"", kind="", lines="")
    until(lambda: peer._waiting)
    asked.cancel()
    until(lambda: peer.state == "silent")
    server.hangs = False
    until(lambda: peer.state == "up")


def test_it_waits_until_all_that_answer_know_of_a_change(several):
    changes, (first, second), _, _ = several
    known = iter([4, 4, 5])
    first.answers["changed"] = b"5"
    second.answers["changed"] = lambda: str(next(known)).encode()
    changes.tell(5).result(20)
    assert [target.rpartition("=")[2] for target in second.asked] == ["5"] * 3
    # What they know they are not asked again.
    changes.tell(5).result(20)
    assert len(second.asked) == 3
    first.answers["changed"] = second.answers["changed"] = b"2"
    changes.tell(2).result(20)  # the index was taken back
    assert (first.asked[-1], second.asked[-1]) == ("/v1/cluster/changed?number=2",) * 2


def test_a_change_waits_no_longer_for_nodes_that_never_know(several):
    changes, (first, second), _, _ = several
    first.answers["changed"], second.answers["changed"] = b"1", b"7"
    changes.tell(7).result(20)
    first.answers["changed"] = "breaks"
    changes.tell(8).result(20)


def test_most_nodes_that_serve_have_to_answer_whoever_writes(several):
    changes, _, (one, two), lists = several
    assert changes.writer() == "n0"
    one.up = False
    assert changes.writer() == "n0"
    two.up = False
    assert changes.writer() is None
    lists.name = "n2"
    lists.peers = lambda: [one]
    one.up = True
    assert changes.writer() == "n1"
    lists.map = None
    assert changes.writer() is None
