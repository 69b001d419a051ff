"""A cluster of an index with codes: each node scans the codes of all lists, and has others compare what it lacks."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.cli.main import run
from hybridindex.client import Client
from hybridindex.cluster.access import read_access
from hybridindex.cluster.node_process import NodeProcess, NodeSpec
from hybridindex.cluster.nodes.calls import NodeCalls
from hybridindex.errors import InvalidInputError
from hybridindex.router import Router
from hybridindex.router.remote.frames import ANSWER, REFUSAL
from hybridindex.router.remote.scan_codec import decode_found, encode_comparison
from hybridindex.service.auth import new_key
from tests.cluster.searches import NPROBE, K, Load, wait_until
from tests.cluster.test_manager import KEY, running
from tests.cluster.test_scans import connected
from tests.clustered import clustered, small_index
from tests.coded import with_codes
from tests.router.code_searches import differences

N, NLIST = 6000, 64
HELD = np.arange(NLIST) < NLIST // 2


@pytest.fixture
def index(tmp_path):
    with with_codes(small_index(tmp_path / "idx", n=N, nlist=NLIST)) as index:
        yield index


def test_answers_are_those_of_one_machine_also_while_a_node_dies(index, tmp_path):
    with Router(index, precision="codes") as one, running(index, tmp_path, share=0.8) as it, it.router() as router:

        def check(search):
            for seed in range(12):
                queries = clustered(1 + seed % 4, seed=seed)
                for candidates in (None, 25):
                    found = search(queries, K, NPROBE, candidates=candidates)
                    assert differences(found, one.search(queries, K, NPROBE, candidates=candidates)) == 0
                    assert found.coverage is None

        check(router.search)
        for node in it.nodes:
            with Client(node.url, key=KEY) as client:
                check(client.search)
                assert client.status()["router"]["precision"].startswith("codes")
        with pytest.raises(InvalidInputError, match="expected candidates of k at least"):
            router.search(clustered(1), K, candidates=K - 1)
        with Load(router, lambda queries: one.search(queries, K, NPROBE)) as load:
            load.more()
            os.kill(it.nodes[1].pid, signal.SIGKILL)
            wait_until(lambda: it.states()[1] == "down")
            load.more()
            wait_until(lambda: it.states() == ["up"] * 3)
            load.more()
        load.check()
        check(router.search)
        said = it.manager.describe_plan()
        assert "Beside its lists each node holds the codes of all" in said["explanation"]


def test_rows_come_and_go_and_the_next_generation_has_its_codes(index, tmp_path):
    with running(index, tmp_path, share=0.8) as it, it.router() as router:
        router.upsert(clustered(400, seed=9), np.arange(N, N + 400))
        router.delete(np.arange(0, 1500, 3))
        queries = clustered(20, seed=4)

        def check():
            with hx.open(index.path) as whole, whole.router(precision="codes") as one:
                found = [Client(node.url, key=KEY) for node in it.nodes]
                for client in found:
                    with client:
                        assert differences(client.search(queries, K, NPROBE), one.search(queries, K, NPROBE)) == 0

        check()
        with Client(it.nodes[0].url, key=KEY) as client:
            assert client.compact(wait=True)["compacted"]
        wait_until(lambda: it.manager.status()["generation"] == 2 and it.states() == ["up"] * 3)
        wait_until(lambda: all(NodeCalls(node.url, KEY).node()["generation"] == 2 for node in it.nodes))
        check()
        for node in it.nodes:
            with Client(node.url, key=KEY) as client:
                assert client.status()["router"]["precision"].startswith("codes")


def test_a_plan_of_nodes_knows_the_codes_and_their_profiles(index, tmp_path, monkeypatch, capsys):
    assert read_access(index.path).code_bytes == index.rabitq.spec.file_bytes
    assert read_access(index.path).probes is None
    with hx.open(index.path) as whole:
        profile = whole.profile(clustered(300, seed=2), max_seconds=2, precision="codes")
    access = read_access(index.path)
    assert access.profile_id == profile.id
    assert access.probes is not None
    monkeypatch.setattr("sys.argv", ["hybridindex", "cluster", "start", str(index.path), "--dry-run", "3"])
    with pytest.raises(SystemExit) as ended:
        run()
    assert not ended.value.code
    assert "the codes of all" in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def node(index, tmp_path):
    key = new_key()
    spec = NodeSpec(name="one", index=str(index.path), data=str(tmp_path / "one"), memory_bytes=1 << 30, key=key)
    process = NodeProcess(spec)
    try:
        calls = NodeCalls(process.url, key)
        calls.hold(HELD, None)
        wait_until(lambda: not calls.node()["holding"]["running"])
        yield process, key
    finally:
        process.close()


def test_a_comparison_over_http_and_what_is_none(index, node):
    process, key = node
    queries = clustered(2, seed=3)
    lists, rows = np.array([[0, 1, -1, 5], [3, 3, 3, -1]]), np.array([[0, 1, 0, 2], [0, 1, 2, 0]])
    given = {"of": f"{index.fingerprint}.{index.generation}", "n": 2, "d": index.scan_dim, "r": 4, "k": 3}

    def options(**changed):
        return "&".join(f"{name}={value}" for name, value in {**given, **changed}.items() if value is not None)

    body = encode_comparison(queries, lists, rows)
    with connected(process, key=key) as end, Router(index) as router:
        end.line()
        kind, _, payload = end.ask(options(), body)
        assert kind == ANSWER
        expected = router.compare(queries, np.where(lists < 0, -1, lists << 32 | rows), 3)
        for found, wanted in zip(decode_found(payload, n=2, k=3), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
        for changed, wrong, status, words in (
            ({}, encode_comparison(queries, np.where(lists == 5, NLIST - 1, lists), rows), 503, "does not hold"),
            ({}, encode_comparison(queries, lists, rows + 100000), 400, "rows that their lists have not"),
            ({}, encode_comparison(queries, lists + NLIST, rows), 400, "lists outside"),
            ({"w": 4}, body, 400, "r is given with w"),
            ({"f": 1}, body, 400, "r is given with f"),
            ({"r": 0}, body, 400, "r is '0'; expected an integer 1.."),
            ({"r": 1 << 20}, body, 400, "r is '1048576'"),
            ({"r": None}, body, 400, "w is ''"),
            ({"of": "other.1"}, body, 409, "other.1 was asked"),
        ):
            kind, found, payload = end.ask(options(**changed), wrong)
            assert (kind, found) == (REFUSAL, status), words
            assert words in json.loads(payload)["detail"]
        assert end.ask(options(), body)[0] == ANSWER
