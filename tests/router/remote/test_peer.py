"""When a node that was down is asked again, and what it says of the one that asks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from hybridindex.router.remote.cluster_map import MapNode
from hybridindex.router.remote.peer import Peer
from tests.router.remote.server import Server, loop_thread
from tests.router.slow_copies import until

SEEN, NOT_SEEN, FAILED = b"204 No Content", b"202 Accepted", b"500 Internal Server Error"


@pytest.fixture
def one():
    """A node, and another that asks it."""
    with loop_thread() as thread:
        server = Server(thread)

        async def begin():
            node = MapNode(name="b", url=f"http://127.0.0.1:{server.port}")
            return Peer(thread.loop, node, None, None, own="a b")

        peer = thread.run(begin())
        yield SimpleNamespace(server=server, peer=peer, thread=thread)

        async def end():
            await asyncio.gather(peer.close(), return_exceptions=True)
            server.server.close()
            await asyncio.sleep(0.01)

        thread.run(end())


def test_a_node_says_whether_it_sees_the_one_that_asks(one):
    one.server.ping_answer = NOT_SEEN
    until(lambda: one.peer.up and not one.peer.status()["sees_this"])
    assert one.server.pings[0] == "/v1/cluster/ping?of=a%20b"
    one.server.ping_answer = SEEN
    until(lambda: one.peer.sees_this)
    one.server.ping_answer = NOT_SEEN
    until(lambda: not one.peer.sees_this)
    one.server.hangs = True
    until(lambda: one.peer.state == "silent")
    assert one.peer.sees_this  # it cannot be asked: nobody waits for it


@pytest.mark.parametrize("status", [b"429 Too Many Requests", b"503 Service Unavailable"])
def test_a_node_that_has_too_much_to_do_is_there(one, status):
    until(lambda: one.peer.sees_this)
    one.server.ping_answer = status
    until(lambda: not one.peer.sees_this)
    before = len(one.server.pings)
    until(lambda: len(one.server.pings) > before + 2)
    assert one.peer.state == "up"


def test_a_silent_node_that_refuses_connections_is_down(one):
    until(lambda: one.peer.up)
    told = []

    async def wait():
        one.peer._waiting.add(told.append)

    one.thread.run(wait())
    one.server.hangs = True
    until(lambda: one.peer.state == "silent" and told)
    assert [type(error) for error in told] == [TimeoutError]
    one.server.server.close()
    one.server.ping_answer = FAILED
    one.server.hangs = False
    # Nobody waits any longer.
    until(lambda: one.peer.state == "down" and not isinstance(told[-1], TimeoutError))


@pytest.mark.parametrize("has_pinged", [False, True])
def test_a_node_that_was_down_is_up_after_two_pings_of_which_one_may_be_its_own(one, has_pinged):
    one.server.ping_answer = FAILED
    until(lambda: len(one.server.pings) > 2)
    assert one.peer.state == "down"
    pings = len(one.server.pings)

    async def come_back():
        while len(one.server.pings) == pings:
            await asyncio.sleep(1e-3)
        await asyncio.sleep(0.02)  # that one is told
        one.server.ping_answer = SEEN
        if has_pinged:
            one.peer.pinged()
        before = len(one.server.pings)
        while not one.peer.up:
            await asyncio.sleep(1e-4)
        return len(one.server.pings) - before

    assert one.thread.run(come_back()) == (1 if has_pinged else 2)


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_node_that_leaves_the_map_is_forgotten_in_the_next_turn(one, is_paused):
    until(lambda: one.peer.up)
    one.server.hangs = not is_paused

    async def leave():
        pings = len(one.server.pings)
        while len(one.server.pings) == pings and is_paused:
            await asyncio.sleep(1e-3)
        await asyncio.sleep(0.02 if is_paused else 0.4)  # in the pause behind a ping, or in a ping
        task = one.peer.close()
        await asyncio.sleep(0)
        return task.done()

    assert one.thread.run(leave())
