"""A client's router over nodes that a test plays: deadlines, and calls from where they would wait for themselves."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from hybridindex.answer_codec import encode_answer
from hybridindex.cluster import router as router_module
from hybridindex.cluster.router import ClusterRouter
from hybridindex.errors import DeadlineExceededError, InvalidInputError, RouterError, ServiceError
from hybridindex.router.remote import peer
from hybridindex.types import SearchResult
from tests.cluster.test_batches import APART, along
from tests.router.remote.server import Server, loop_thread
from tests.router.slow_copies import until

QUERY = np.ones((1, 4), dtype=np.float32)
FOUND = SearchResult(
    distances=np.zeros((1, 3), dtype=np.float32),
    ids=np.arange(3, dtype=np.int64)[None],
    nprobe_used=np.ones(1, dtype=np.int32),
    hit_rate=np.zeros(1, dtype=np.float32),
)


@contextmanager
def playing(n):
    with loop_thread() as thread:
        servers = [Server(thread) for _ in range(n)]
        urls = {f"node-{i}": f"http://127.0.0.1:{server.port}" for i, server in enumerate(servers)}
        nodes = json.dumps({"version": 1, "dim": 4, "nodes": [{"name": k, "url": v} for k, v in urls.items()]}).encode()
        for server in servers:
            server.answers["nodes"] = nodes
        try:
            with ClusterRouter(urls, dim=4, by_locality=False) as router:
                until(lambda: all(node["state"] == "up" for node in router.status()))
                yield servers, router
        finally:
            for server in servers:
                thread.run(_close(server))


async def _close(server):
    server.server.close()


def searches(servers):
    return [target for server in servers for target in server.asked if target.startswith("/v1/search")]


def test_a_deadline_that_has_passed_is_not_asked_of_others():
    with playing(3) as (servers, router):
        for server in servers:
            server.status["search"] = b"504 Gateway Timeout"
            server.answers["search"] = b'{"type": "urn:hybridindex:problem:deadline", "detail": "too late"}'
        with pytest.raises(DeadlineExceededError, match="too late"):
            router.search(QUERY, 3, deadline_ms=500)
        assert len(searches(servers)) == 1


def test_whoever_is_asked_next_gets_what_is_left_of_the_deadline():
    with playing(2) as (servers, router):

        def breaks():
            time.sleep(0.1)
            return b"{}"

        for server in servers:
            server.status["search"] = b"500 Internal Server Error"
            server.answers["search"] = breaks
        with pytest.raises(Exception, match="500"):
            router.search(QUERY, 3, deadline_ms=5000)
        first, second = sorted(float(t.split("deadline_ms=")[1].split("&")[0]) for t in searches(servers))[::-1]
        assert first == 5000
        assert 4000 < second < 4960  # where it was hedged, or broke


def test_a_node_that_says_nothing_is_waited_for_until_the_deadline_alone():
    with playing(2) as (servers, router):
        for server in servers:
            server.hangs = True
        began = time.monotonic()
        with pytest.raises(DeadlineExceededError, match="no node answered before the deadline"):
            router.search(QUERY, 3, deadline_ms=100)
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("call", ["search", "upsert", "close"])
def test_a_callback_that_would_wait_for_itself_is_refused(call):
    with playing(1) as (servers, router):
        servers[0].answers["search"] = encode_answer(FOUND)
        told, ended = [], threading.Event()

        def calls_back(_future):
            try:
                {
                    "search": lambda: router.search(QUERY, 3),
                    "upsert": lambda: router.upsert(QUERY, [1]),
                    "close": router.close,
                }[call]()
            except RouterError as error:
                told.append(str(error))
            ended.set()

        router.submit(QUERY, 3).add_done_callback(calls_back)
        assert ended.wait(30)
        assert "from a callback on the router's own thread" in told[0]
        assert router.search(QUERY, 3).ids.tolist() == [[0, 1, 2]]  # it goes on


def test_a_node_that_answers_pings_and_no_searches_is_asked_last(monkeypatch):
    monkeypatch.setattr(peer, "LATE_FOR_S", 60.0)
    with playing(2) as (servers, router):
        slow, other = servers
        slow.answers["search"], other.answers["search"] = "waits", encode_answer(FOUND)

        def search_and_wait_for_pings():
            router.search(QUERY, 3)
            pings = len(slow.pings)
            until(lambda: len(slow.pings) > pings + 2)

        # Once it may be chance, and a ping ends that.
        while len(searches([slow])) < 2:
            search_and_wait_for_pings()
        assert router.status()[0]["state"] == "late"
        for _ in range(4):
            search_and_wait_for_pings()
        assert len(searches([slow])) == 2
        # Nobody asks it, so nothing would end that.
        monkeypatch.setattr(peer, "LATE_FOR_S", 0.0)
        until(lambda: router.status()[0]["state"] == "up")
        slow.answers["search"] = encode_answer(FOUND)
        until(lambda: router.search(QUERY, 3) and len(searches([slow])) > 2)


def test_what_a_node_says_of_the_nodes_replaces_them_only_where_all_of_it_can_be_used(monkeypatch):
    monkeypatch.setattr(router_module, "_REFRESH_S", 0.1)
    with playing(2) as (servers, router):
        right = servers[0].answers["nodes"]
        there = {"name": "node-0", "url": f"http://127.0.0.1:{servers[0].port}"}
        nonsense = [
            json.dumps({"version": 2, "dim": 4, "nodes": [there, {"name": "node-1", "url": wrong}]}).encode()
            for wrong in ("ftp://h:1", "http://h:65536", 3)
        ]
        for wrong in (*nonsense, b"[]", b"[" * 200_000):
            for server in servers:
                server.answers["nodes"] = wrong
            n_asked = sum(target.endswith("/nodes") for server in servers for target in server.asked)
            until(lambda n=n_asked: sum(t.endswith("/nodes") for s in servers for t in s.asked) > n + 2)
            assert [node["name"] for node in router.status()] == ["node-0", "node-1"]
        # And it is followed further.
        for server in servers:
            server.answers["nodes"] = json.dumps({"version": 3, "dim": 4, "nodes": [there]}).encode()
        until(lambda: [node["name"] for node in router.status()] == ["node-0"])
        servers[0].answers["nodes"] = right
        until(lambda: len(router.status()) == 2)


@pytest.mark.parametrize("shape", [(1, 4), (0, 3), (2, 3)])
def test_an_answer_to_something_else_is_none(shape):
    n, k = shape
    other = SearchResult(
        distances=np.zeros(shape, np.float32), ids=np.zeros(shape, np.int64),
        nprobe_used=np.ones(n, np.int32), hit_rate=np.zeros(n, np.float32),
    )  # fmt: skip
    with playing(1) as (servers, router):
        servers[0].answers["search"] = encode_answer(other)
        with pytest.raises(ServiceError, match=rf"node-0 cannot be read: it has shape \({n}, {k}\)"):
            router.search(QUERY, 3)
        # Where a batch is divided, the parts are put together by their rows.
        router.dim, router.locality = 3, dataclasses.replace(APART, names=("node-0", "node-1", "node-2"))
        with pytest.raises(ServiceError, match="cannot be read"):
            router.submit(along(0, 2, 0, 2, 2), 3).result(30)


@pytest.mark.parametrize("queries", [QUERY, along(0, 2)], ids=["whole", "divided"])
def test_what_is_cancelled_is_asked_no_longer(queries):
    with playing(1) as (servers, router):
        servers[0].answers["search"] = "waits"
        router.dim, router._timeout_s = queries.shape[1], 3600
        if router.dim == 3:
            router.locality = dataclasses.replace(APART, names=("node-0", "node-1", "node-2"))
        [asked] = router._peers
        found = router.submit(queries, 3)
        until(lambda: asked.n_open == len(queries))
        assert found.cancel()
        until(lambda: asked.n_open == 0 and not router._searches)
        servers[0].answers["search"] = encode_answer(FOUND)


def test_what_is_no_query_is_refused():
    with ClusterRouter({"node-0": "http://127.0.0.1:1"}, dim=2) as router:
        for wrong in ("ab", [[1, 2], [3]], None, np.zeros((0, 2), np.float32)):
            with pytest.raises(InvalidInputError, match="queries"):
                router.search(wrong)


@pytest.mark.parametrize(("url", "key"), [("nonsense", None), ("http://127.0.0.1:1", "two\nlines")])
def test_a_router_that_cannot_be_made_leaves_no_thread(url, key):
    with pytest.raises(InvalidInputError):
        ClusterRouter({"node-0": url}, dim=4, key=key)
    assert "hybridindex-cluster" not in [thread.name for thread in threading.enumerate()]


_FORK = """
import os, signal
import numpy as np
from hybridindex.cluster import ClusterRouter
from hybridindex.errors import ForkedError

router = ClusterRouter({"node-0": "http://127.0.0.1:1"}, dim=4)
child = os.fork()
if not child:
    signal.alarm(30)
    try:
        router.search(np.ones(4, np.float32))
    except ForkedError:
        router.close()
        os._exit(0)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
router.close()
"""


def test_a_fork_is_refused_and_does_not_hang():
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORK], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
