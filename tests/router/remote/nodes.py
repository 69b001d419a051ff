"""Nodes of a cluster in one process: real routers and sockets, without a daemon; each may hang, be slow, or be away."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from hybridindex.index.ivf import IVFIndex
from hybridindex.index.opening import open_index
from hybridindex.index.share.share import create_share
from hybridindex.index.share.source import FolderSource
from hybridindex.router import Router
from hybridindex.router.batch.batch import GivenProbes
from hybridindex.router.remote.cluster_map import ClusterMap, MapNode
from hybridindex.router.remote.remote_lists import RemoteLists
from hybridindex.router.remote.scan_codec import decode_scan, encode_found
from tests.router.slow_copies import until

__all__ = ["Node", "cluster", "map_of"]


class Node:
    """One node, with a share of its own, and its server on a thread."""

    def __init__(self, path, folder, number: int, held: np.ndarray, **settings) -> None:
        source = FolderSource(path)
        create_share(folder, source)
        self.index: IVFIndex = open_index(folder)
        assert self.index.share is not None
        self.index.share.hold(np.flatnonzero(held).tolist(), source)
        self.name = f"node-{number}"
        self.remote = RemoteLists(self.index, self.name, timeout_s=20)
        # Lists that a test takes away stay away.
        self.router = Router(self.index, remote=self.remote, scrub_bytes_per_s=0, **settings)
        self.scans = 0
        #: Seconds before a scan; and whether it answers at all.
        self.delay_s, self.hangs, self.fails = 0.0, False, False
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
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
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

        self._run(listen())

    def go_away(self) -> None:
        """As a process that was killed: its connections end."""

        async def end() -> None:
            assert self._server is not None
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
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

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                _, target, _ = head[0].split(" ")
                length = next(int(line.partition(":")[2]) for line in head if line.startswith("content-length"))
                body = await reader.readexactly(length)
                while self.hangs:
                    await asyncio.sleep(0.01)
                status, answer = (204, b"") if target == "/v1/cluster/ping" else await self._scan(target, body)
                writer.write(f"HTTP/1.1 {status} .\r\ncontent-length: {len(answer)}\r\n\r\n".encode() + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _scan(self, target: str, body: bytes) -> tuple[int, bytes]:
        options = dict(parse_qsl(urlsplit(target).query))
        n, d, w, k = (int(options[name]) for name in "ndwk")
        assert options["of"] == f"{self.index.fingerprint}.{self.index.generation}"
        queries, probes, coarse = decode_scan(body, n=n, d=d, w=w, nlist=self.index.nlist)
        self.scans += 1
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.fails:
            return 500, b"{}"
        try:
            found = await self.router.ascan(queries, k, GivenProbes(probes, coarse))
        except Exception as error:  # noqa: BLE001 - the asking node says what it makes of it
            return 409, repr(error).encode()
        return 200, encode_found(found.distances, found.ids)


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
