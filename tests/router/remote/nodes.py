"""Nodes of a cluster in one process: real routers and sockets, without a daemon; each may hang, be slow, or be away."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np

from hybridindex.index.ivf import IVFIndex
from hybridindex.index.opening import open_index
from hybridindex.index.share.share import create_share
from hybridindex.index.share.source import FolderSource
from hybridindex.router import Router
from hybridindex.router.remote.cluster_map import ClusterMap, MapNode
from hybridindex.router.remote.frames import CHANNEL_PATH
from hybridindex.router.remote.remote_lists import RemoteLists
from hybridindex.router.remote.scan_codec import decode_asked, decode_comparison, decode_scan, encode_found
from hybridindex.service.config import Limits
from hybridindex.service.http.nodes.channel import ScanChannel
from hybridindex.service.intake.request_memory import RequestMemory
from tests.router.slow_copies import until

__all__ = ["Node", "cluster", "map_of"]


class Node:
    """One node, with a share of its own, and its server on a thread."""

    def __init__(self, path, folder, number: int, held: np.ndarray, **settings) -> None:
        source = FolderSource(path, is_followed=True)
        create_share(folder, source)
        self.index: IVFIndex = open_index(folder, changes_of=path)
        assert self.index.share is not None
        self.index.share.hold(np.flatnonzero(held).tolist(), source)
        self.name = f"node-{number}"
        self.remote = RemoteLists(self.index, self.name, timeout_s=20)
        # Lists that a test takes away stay away.
        self.router = Router(self.index, remote=self.remote, scrub_bytes_per_s=0, **settings)
        #: Questions of other nodes; and those of them that are about candidates.
        self.scans = self.comparisons = 0
        #: Seconds before a scan; and whether it answers at all.
        self.delay_s, self.hangs, self.fails = 0.0, False, False
        #: Whether it is of a version that knows no filters.
        self.of_before_filters = False
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self.transports: set[asyncio.Transport] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = 0
        self.arrive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    def arrive(self) -> None:
        """Listens, on the port that it had."""

        async def listen() -> None:
            self._server = await self._loop.create_server(lambda: _Front(self), "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

        self._run(listen())

    def go_away(self) -> None:
        """As a process that was killed: its connections end."""

        async def end() -> None:
            assert self._server is not None
            self._server.close()
            await asyncio.sleep(0.01)  # who was accepted just now has a transport then
            for transport in list(self.transports):
                transport.abort()
            await self._server.wait_closed()

        self._run(end())

    def close(self) -> None:
        self.hangs = False
        self.router.close()
        self.remote.close()
        self.go_away()

        async def end() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()
        self.index.close()

    async def scan(self, options: str, body, _charge) -> bytes:
        """As a daemon does."""
        while self.hangs:
            await asyncio.sleep(0.01)
        given = dict(parse_qsl(options))
        n, d, w, k, n_filters, r = (int(given.get(name, 0)) for name in "ndwkfr")
        assert given["of"] == f"{self.index.fingerprint}.{self.index.generation}"
        if self.of_before_filters:
            decode_scan(body, n=n, d=d, w=w, nlist=self.index.nlist)
        self.scans += 1
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.fails:
            raise OSError("the test has it fail")
        if r:
            self.comparisons += 1
            queries, positions = decode_comparison(body, n=n, d=d, r=r, list_sizes=self.index.list_sizes)
            compared = await asyncio.to_thread(self.router.compare, queries, positions, k)
            assert compared is not None
            return encode_found(*compared)
        asked = decode_asked(body, n=n, d=d, w=w, n_filters=n_filters, index=self.index)
        found = await self.router.ascan(asked.queries, k, asked.given())
        return encode_found(found.distances, found.ids)


class _Front(asyncio.Protocol):
    """Answers pings, and begins channels."""

    def __init__(self, node: Node) -> None:
        self._node, self._received = node, b""

    def connection_made(self, transport) -> None:
        self._transport = transport
        self._node.transports.add(transport)

    def connection_lost(self, _error) -> None:
        self._node.transports.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        *heads, self._received = self._received.split(b"\r\n\r\n")
        for head in heads:
            if head.startswith(f"GET {CHANNEL_PATH} ".encode()):
                self._switch()
            else:
                asyncio.get_running_loop().create_task(self._answer_ping())

    async def _answer_ping(self) -> None:
        while self._node.hangs:
            await asyncio.sleep(0.01)
        self._transport.write(b"HTTP/1.1 204 .\r\ncontent-length: 0\r\n\r\n")

    def _switch(self) -> None:
        memory = RequestMemory(1 << 30, client_share=1.0)
        channel = ScanChannel(
            self._node.scan,
            lambda: memory.open("node"),
            Limits(),
            is_allowed=lambda: True,
            on_answer=lambda _status, _seconds: None,
        )
        channel.on_end = lambda _channel: self.connection_lost(None)
        self._transport.write(b"HTTP/1.1 101 .\r\n\r\n")
        self._transport.set_protocol(channel)
        channel.connection_made(self._transport)


def map_of(nodes: list[Node], holders: np.ndarray, version: int = 1, serving=None) -> ClusterMap:
    """``holders`` (n_nodes, nlist) bool."""
    index = nodes[0].index
    bits = np.zeros(index.nlist, dtype=np.uint64)
    for i, held in enumerate(holders):
        bits |= held.astype(np.uint64) << np.uint64(i)
    named = [
        MapNode(name=node.name, url=node.url, serving=serving is None or serving[i]) for i, node in enumerate(nodes)
    ]
    return ClusterMap(
        cluster="test",
        version=version,
        fingerprint=index.fingerprint,
        generation=index.generation,
        nodes=tuple(named),
        holders=bits,
        replicas=1,
    )


@contextmanager
def cluster(path, holders: np.ndarray, **settings) -> Iterator[list[Node]]:
    """Nodes that hold ``holders`` (n_nodes, nlist) bool, when all of them answer."""
    folder = Path(tempfile.mkdtemp(dir=path.parent))
    nodes = [Node(path, folder / f"node-{i}", i, held, **settings) for i, held in enumerate(holders)]
    try:
        for node in nodes:
            node.remote.apply(map_of(nodes, holders))
        until(lambda: all(peer["state"] == "up" for node in nodes for peer in node.remote.status()))
        yield nodes
    finally:
        for node in nodes:
            node.close()
