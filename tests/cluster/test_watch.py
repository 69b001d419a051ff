"""What the manager takes from a node that is out of its mind, or of another version."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from hybridindex.cluster.nodes.calls import NodeCalls
from hybridindex.cluster.nodes.watch import Watch
from hybridindex.cluster.state import NodeEntry
from hybridindex.router.remote.cluster_map import ClusterMap, MapNode
from tests.cluster.searches import wait_until


@contextmanager
def node_that_says(answers):
    """A node that answers pings, and whatever else it is asked with the first of ``answers``; its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            ping = self.path.endswith("/ping")
            content = b"" if ping else answers[0]
            self.send_response(204 if ping else 200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("nonsense", [b"{}", b"not json", b"[]", b'{"generations": 3}', b'{"generations": [{}]}'])
def test_a_node_that_talks_nonsense_is_looked_at_further(nonsense):
    map_ = ClusterMap(
        cluster="c",
        version=1,
        fingerprint="f",
        generation=1,
        nodes=(MapNode(name="a", url="http://127.0.0.1:1"),),
        holders=np.ones(3, dtype=np.uint64),
        replicas=1,
    )
    answers = [nonsense]
    with node_that_says(answers) as url:
        watch = Watch(
            NodeEntry(name="a", url=url, memory_bytes=1), NodeCalls(url, None), lambda: (map_, None), lambda: None
        )
        try:
            wait_until(lambda: watch.state == "refused", 10)
            assert "what it says cannot be read" in watch.problem
            answers[0] = (
                b'{"generations": [{"fingerprint": "f", "generation": 1, "state": "serves", "held": [[0, 3]], '
                b'"map_version": 1, "holding": null}], "peers": []}'
            )
            wait_until(lambda: watch.state == "up")
            assert watch.problem == ""
        finally:
            watch.stop(wait=True)
