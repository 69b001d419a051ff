"""Changes between nodes: sent once, told to all that answer, by the one node that most agree on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from hybridindex.errors import UnreachableError
from hybridindex.router.remote.changes import PeerChanges
from hybridindex.router.remote.cluster_map import ClusterMap, MapNode
from hybridindex.router.remote.loop_thread import LoopThread
from hybridindex.router.remote.peer import Peer
from tests.router.slow_copies import until


class Server:
    """A node to its peers. ``answers``: of a path's last part, what it does instead of 200 with ``{}``."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self.answers: dict[str, object] = {}
        self.asked: list[str] = []
        self.hangs = False
        self.server = thread.run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self.server.sockets[0].getsockname()[1]

    async def _serve(self, reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                while self.hangs:
                    await asyncio.sleep(0.01)
                target = head.split(b" ")[1].decode()
                if target.endswith("/ping"):
                    writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                    continue
                self.asked.append(target)
                answer = self.answers.get(target.split("?")[0].rpartition("/")[2], b"{}")
                if answer == "dies":
                    self.server.close()
                if answer in ("dies", "breaks"):
                    writer.transport.abort()
                    return
                content = answer() if callable(answer) else answer
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()


@pytest.fixture
def thread():
    loop = LoopThread(name="test-nodes")
    yield loop

    async def end():
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop.run(end())
    loop.close()


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
