"""Scans that a node is asked for, over its real HTTP server: how a channel begins, and what is refused."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from contextlib import contextmanager
from io import BufferedRWPair
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np
import pytest

from hybridindex.cluster.node_process import NodeProcess, NodeSpec
from hybridindex.cluster.nodes.calls import NodeCalls
from hybridindex.errors import ServiceError
from hybridindex.router import Router
from hybridindex.router.batch.request import GivenProbes
from hybridindex.router.remote.frames import ANSWER, ASK, HEAD_BYTES, REFUSAL, frame
from hybridindex.router.remote.scan_codec import decode_found, encode_scan
from hybridindex.service import searches as searches_module
from hybridindex.service.auth import new_key
from hybridindex.service.http.nodes.scans import Scans
from tests.cluster.searches import K, wait_until
from tests.clustered import clustered, small_index

KEY = new_key()
NLIST = 64
HELD = np.arange(NLIST) < NLIST // 2


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return small_index(tmp_path_factory.mktemp("scans") / "idx", n=6000, nlist=NLIST)


@pytest.fixture(scope="module")
def node(index, tmp_path_factory):
    data = tmp_path_factory.mktemp("node")
    spec = NodeSpec(name="one", index=str(index.path), data=str(data / "one"), memory_bytes=1 << 30, key=KEY)
    process = NodeProcess(spec)
    try:
        calls = NodeCalls(process.url, KEY)
        calls.hold(HELD, None)
        wait_until(lambda: not calls.node()["holding"]["running"])
        yield process
    finally:
        process.close()


class End:
    def __init__(self, file: BufferedRWPair) -> None:
        self._file = file

    def send(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()

    def line(self) -> bytes:
        """The first of an answer's head, which is read."""
        first = self._file.readline()
        while self._file.readline() not in {b"\r\n", b""}:
            pass
        return first

    def ask(self, options: str, body: bytes, number: int = 5) -> tuple[int, int, bytes]:
        self.send(frame(ASK, number, options.encode(), body, extra=len(options)))
        head = self._file.read(HEAD_BYTES)
        assert int.from_bytes(head[4:8], "little") == number
        payload = self._file.read(int.from_bytes(head[:4], "little"))
        return int.from_bytes(head[8:10], "little"), int.from_bytes(head[10:], "little"), payload


@contextmanager
def connected(node, key=KEY, upgrade="hybridindex-scans"):
    address = urlsplit(node.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as raw, raw.makefile("rwb") as file:
        end = End(file)
        lines = [
            f"host: {address.netloc}",
            f"authorization: Bearer {key}",
            "connection: upgrade",
            f"upgrade: {upgrade}",
        ]
        end.send(("\r\n".join(["GET /v1/cluster/channel HTTP/1.1", *lines]) + "\r\n\r\n").encode())
        yield end


def options_of(index, **changed):
    given = {"of": f"{index.fingerprint}.{index.generation}", "n": 2, "d": index.scan_dim, "w": 3, "k": K, **changed}
    return "&".join(f"{name}={value}" for name, value in given.items() if value is not None)


def scan_of(index, lists):
    queries = clustered(2, seed=3)
    probes = np.array(lists, dtype=np.int64).reshape(2, 3)
    return queries, probes, np.zeros((2, 3), dtype=np.float32)


def test_a_scan_finds_what_one_machine_finds(index, node):
    scan = scan_of(index, [0, 1, -1, 5, 6, 7])
    with Router(index) as router, connected(node) as end:
        assert end.line() == b"HTTP/1.1 101 Switching Protocols\r\n"
        expected = router.scan_directly(scan[0], K, GivenProbes(*scan[1:]))
        for number in (1, 2):
            kind, _, payload = end.ask(options_of(index), encode_scan(*scan), number)
            assert kind == ANSWER
            distances, ids = decode_found(payload, n=2, k=K)
            np.testing.assert_array_equal(ids, expected.ids)
            np.testing.assert_array_equal(distances, expected.distances)


def test_the_event_loop_makes_short_scans_in_half_of_its_time(index, monkeypatch):
    monkeypatch.setattr(searches_module, "_SMALL_BYTES", 0)
    scan = scan_of(index, [0, 1, -1, 5, 6, 7])
    with Router(index) as router:
        serving = SimpleNamespace(index=SimpleNamespace(ivf=index), router=router)
        scans = Scans(SimpleNamespace(scanned=lambda _of: serving))
        charge = SimpleNamespace(hold=lambda _nbytes: None, most=1 << 30)

        def ask():
            return scans(options_of(index), encode_scan(*scan), charge)

        began_s = time.perf_counter()
        at_once = ask()
        assert isinstance(at_once, bytes)
        assert scans._loop_time._free_from_s > began_s
        scans._loop_time._free_from_s = math.inf
        assert asyncio.run(ask()) == at_once
        scans._loop_time._free_from_s = 0.0
        monkeypatch.setattr(searches_module, "_SHORT_BYTES", 0)
        assert asyncio.run(ask()) == at_once


def test_what_is_not_held_is_refused_and_the_channel_goes_on(index, node):
    with connected(node) as end:
        end.line()
        kind, status, payload = end.ask(options_of(index), encode_scan(*scan_of(index, [0, 1, NLIST - 1, 5, 6, 7])))
        assert (kind, status) == (REFUSAL, 503)
        assert json.loads(payload)["type"].endswith(":not-held")
        assert end.ask(options_of(index), encode_scan(*scan_of(index, [0, 1, 2, 5, 6, 7])))[0] == ANSWER


@pytest.mark.parametrize(
    ("changed", "status", "words"),
    [
        ({"of": "other.1"}, 409, "other.1 was asked"),
        ({"of": None}, 409, "None was asked"),
        ({"n": 0}, 400, "n is '0'; expected an integer 1.."),
        ({"n": "x"}, 400, "n is 'x'"),
        ({"n": 3}, 400, "the body has"),
        ({"w": 1 << 24}, 400, "w is"),
        ({"k": 5000}, 400, "k is '5000'"),
        ({"d": 1}, 400, "d is 1; expected"),
        ({"d": None}, 400, "d is ''"),
    ],
)
def test_what_is_no_scan_is_refused(index, node, changed, status, words):
    with connected(node) as end:
        end.line()
        kind, found, payload = end.ask(options_of(index, **changed), encode_scan(*scan_of(index, [0] * 6)))
        assert (kind, found) == (REFUSAL, status)
        assert words in json.loads(payload)["detail"]


@pytest.mark.parametrize("wrong", [-2, NLIST])
def test_lists_that_are_none_are_refused(index, node, wrong):
    with connected(node) as end:
        end.line()
        kind, status, payload = end.ask(options_of(index), encode_scan(*scan_of(index, [0, 1, 2, 3, 4, wrong])))
        assert (kind, status) == (REFUSAL, 400)
        assert f"outside -1..{NLIST - 1}" in json.loads(payload)["detail"]


def test_a_channel_needs_the_key_and_the_upgrade(node):
    with connected(node, key=new_key()) as end:
        assert b" 401 " in end.line()
    with connected(node, upgrade="h2c") as end:
        assert b" 426 " in end.line()
    asked = Request(f"{node.url}/v1/cluster/channel", headers={"authorization": f"Bearer {KEY}"})
    with pytest.raises(HTTPError) as refused:
        urlopen(asked)
    assert refused.value.code == 426
    refused.value.close()


def test_a_node_ends_while_channels_are_open(index, tmp_path):
    spec = NodeSpec(name="two", index=str(index.path), data=str(tmp_path / "two"), memory_bytes=1 << 30, key=KEY)
    process = NodeProcess(spec)
    try:
        with connected(process) as end:
            assert b" 101 " in end.line()
            process.close()
            assert end._file.read() == b""
    finally:
        process.close()


def test_a_node_that_is_out_of_memory_answers_pings(index, tmp_path):
    search_key = new_key()
    spec = NodeSpec(
        name="one", index=str(index.path), data=str(tmp_path / "one"), memory_bytes=1 << 30, key=KEY,
        search_key=search_key, options=("--request-memory", "256MiB"),
    )  # fmt: skip
    process = NodeProcess(spec)
    calls = NodeCalls(process.url, KEY)
    host, _, port = process.url.removeprefix("http://").rpartition(":")

    def hold(path, key, mib):
        """Memory, until the connection ends: of a body that does not come."""
        connected = socket.create_connection((host, int(port)), 10)
        lines = f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\nauthorization: Bearer {key}\r\n"
        lines += f"content-type: application/octet-stream\r\ncontent-length: {mib << 20}\r\n\r\n"
        connected.sendall(lines.encode())
        return connected

    try:
        held = [hold("/v1/cluster/hold", KEY, 27), *(hold("/v1/search?k=10&nprobe=4", search_key, 8) for _ in "12")]
        wait_until(lambda: is_refused(calls))
        calls.ping(5.0)
        for each in held:
            each.close()
        wait_until(lambda: not is_refused(calls))
    finally:
        process.close()


def is_refused(calls):
    try:
        calls.node()
    except ServiceError as error:
        return "memory" in str(error)
    return False
