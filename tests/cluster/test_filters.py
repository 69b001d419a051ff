"""Searches with filters through the daemons of a cluster: by its router, plain HTTP and commands."""

from __future__ import annotations

import json
import os
import signal
import socket

import numpy as np
import pytest

from hybridindex.cli.main import run
from hybridindex.client import Client
from hybridindex.cluster.node_process import NodeProcess
from hybridindex.errors import InvalidInputError
from hybridindex.index.filters.write_attributes import write_attributes
from hybridindex.router import Router
from hybridindex.router.remote.frames import ASK, CHANNEL_PATH, REFUSAL, UPGRADE, FrameReader, frame
from tests.cluster.searches import NPROBE, K, same, wait_until
from tests.cluster.test_manager import KEY, running, spec_of
from tests.clustered import clustered, share_of_ids, small_index

N, NLIST = 6000, 64
YEARS = np.random.default_rng(1).integers(1990, 2030, N)
ALLOWED = share_of_ids(0.4, n=N)
FILTERS = [
    {"where": "year >= 2020"},
    {"allow_ids": ALLOWED, "where": "year < 1995"},
    {"deny_ids": ALLOWED},
    {"allow_ids": [3, 4, 5, 6], "deny_ids": [4]},
    {"allow_ids": []},
]


@pytest.fixture
def index(tmp_path):
    with small_index(tmp_path / "idx", n=N, nlist=NLIST) as index:
        write_attributes(index, {"year": YEARS})
        yield index


def test_answers_are_those_of_one_machine_also_while_a_node_is_away(index, tmp_path):
    with Router(index) as one_machine, running(index, tmp_path, share=0.8) as it, it.router() as router:

        def check(search):
            for seed, given in enumerate(FILTERS):
                queries = clustered(1 + seed % 4, seed=seed)
                assert same(search(queries, **given), one_machine.search(queries, K, NPROBE, **given)), given

        for _ in it.nodes:  # each of them in turn
            check(lambda queries, **given: router.search(queries, K, NPROBE, **given))
        for node in it.nodes:
            with Client(node.url, key=KEY) as client:
                check(lambda queries, client=client, **given: client.search(queries, K, NPROBE, **given))
        with pytest.raises(InvalidInputError, match="nowhere"):
            router.search(clustered(1), K, where="nowhere = 1")
        os.kill(it.nodes[1].pid, signal.SIGKILL)
        wait_until(lambda: it.states()[1] == "down")
        check(lambda queries, **given: router.search(queries, K, NPROBE, **given))
        wait_until(lambda: it.states() == ["up"] * 3)
        check(lambda queries, **given: router.search(queries, K, NPROBE, **given))


def test_the_command_takes_filters(index, tmp_path, monkeypatch, capsys):
    queries, ids = tmp_path / "queries.npy", tmp_path / "ids.txt"
    np.save(queries, clustered(3))
    ids.write_text("\n".join(map(str, ALLOWED)))
    with Router(index) as one_machine, running(index, tmp_path) as it:
        words = ["cluster", "search", index.path, "--address", it.nodes[0].url, "--key", KEY, "--queries", queries]
        words += ["-k", K, "--nprobe", NPROBE, "--where", "year >= 2000", "--allow-ids", ids, "--json"]
        monkeypatch.setattr("sys.argv", ["hybridindex", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run()
        assert not ended.value.code
        found = json.loads(capsys.readouterr().out)
        wanted = one_machine.search(clustered(3), K, NPROBE, where="year >= 2000", allow_ids=ALLOWED)
    np.testing.assert_array_equal(found["ids"], wanted.ids)
    assert found["coverage"] is None


def test_a_node_that_starts_again_has_the_attributes_that_the_index_has_now(index, tmp_path):
    with running(index, tmp_path, n_nodes=2, share=1.1) as it:
        for node in it.nodes:
            node.close()
        later = np.roll(YEARS, 7)
        write_attributes(index, {"year": later})
        it.nodes = [NodeProcess(spec_of(index, tmp_path, i, it.memory_bytes)) for i in range(2)]
        it.manager.set_nodes([it.entry(i) for i in range(2)])
        wait_until(lambda: it.states() == ["up"] * 2)
        with it.router() as router:
            found = router.search(clustered(5), 50, NLIST, where="year = 2001")
        assert set(found.ids[0][found.ids[0] >= 0]) <= set(np.flatnonzero(later == 2001))
        assert (found.ids >= 0).sum() == 5 * min(50, (later == 2001).sum())


def refusal(url: str, options: str, nbytes: int) -> tuple[int, str]:
    """Status and detail of what a node says to a scan."""
    host, _, port = url.removeprefix("http://").partition(":")
    told: list[tuple[int, int, bytes]] = []
    reader = FrameReader(lambda *_: True, lambda kind, _, extra, payload: told.append((kind, extra, bytes(payload))))
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        head = f"GET {CHANNEL_PATH} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEY}\r\nconnection: upgrade\r\n"
        connection.sendall(f"{head}upgrade: {UPGRADE}\r\n\r\n".encode())
        came = b""
        while b"\r\n\r\n" not in came:
            came += connection.recv(1 << 16)
        connection.sendall(frame(ASK, 1, options.encode(), bytes(nbytes), extra=len(options)))
        reader.feed(came.partition(b"\r\n\r\n")[2])
        while not told:
            reader.feed(connection.recv(1 << 16))
    [(kind, status, payload)] = told
    assert kind == REFUSAL
    return status, json.loads(payload)["detail"]


def test_scans_with_wrong_filters_or_options_that_a_node_does_not_know_are_refused(index, tmp_path):
    node = NodeProcess(spec_of(index, tmp_path, 0, 1 << 30))
    try:
        plain = f"of={index.fingerprint}.{index.generation}&n=1&d={index.scan_dim}&w=1&k=1"
        arrays = 4 * (index.scan_dim + 2)

        def refused(more: str, nbytes: int) -> str:
            status, detail = refusal(node.url, plain + more, nbytes)
            assert status == 400
            return detail

        assert "filter is not an option of a scan" in refused("&filter=1", arrays)
        for wrong in ("0", "2", "-1", "x", ""):
            assert "f is" in refused(f"&f={wrong}", arrays)
        assert "bytes of filters" in refused("&f=1", arrays)
        assert "the body has" in refused("", arrays + 32)
        # Of list 0, whose filter has no lists.
        assert "of which its filters say nothing" in refused("&f=1", arrays + 4 + 24)
        status, detail = refusal(node.url, plain.replace(".1&", ".2&"), arrays)
        assert (status, f"{index.fingerprint}.2 was asked" in detail) == (409, True)
    finally:
        node.close()
