"""What a node's daemon says of its cluster: health, status, metrics; a node that is lost takes its lists with it."""

from __future__ import annotations

import json
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from hybridindex.client import Client
from tests.cluster.searches import wait_until
from tests.cluster.test_repairs import started
from tests.clustered import clustered


def ask(node, path, key):
    request = Request(f"{node.url}{path}", headers={"authorization": f"Bearer {key}"})
    try:
        with urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        with error:
            return error.code, error.read()


def test_lists_that_nobody_can_reach_are_reported(tmp_path):
    with started(tmp_path, 2, 1.1, "none", replicas=1, repair_after_s=3600.0) as (nodes, _):
        node, key, map_ = nodes.processes["node-0"], nodes.key, nodes.manager._state.map
        list_bytes = nodes.manager.access.list_bytes

        def check():
            status, body = ask(node, "/healthz", key)
            [found] = [check for check in json.loads(body)["checks"] if check["name"] == "cluster"]
            return status, found["ok"], found["detail"]

        def metrics():
            lines = ask(node, "/metrics", key)[1].decode().splitlines()
            return dict(line.removeprefix("hybridindex_").rsplit(" ", 1) for line in lines if line[0] != "#")

        def cluster():
            return json.loads(ask(node, "/v1/status", key)[1])["cluster"]

        wait_until(lambda: check() == (200, True, "every list is on a node that answers"))
        with Client(node.url, key=key) as client:
            client.search(clustered(4), 3, 64)
            wait_until(lambda: cluster()["fan_out"] == 1.0)
            before = cluster()
            assert (before["unreachable_lists"], before["lists_below_replicas"], before["replicas"]) == (0, 0, 1)
            bits = [map_.held_by(i) for i in range(2)]
            assert [(each["name"], each["lists"], each["bytes"], each["asked"]) for each in before["nodes"]] == [
                (f"node-{i}", held.sum(), list_bytes[held].sum(), i) for i, held in enumerate(bits)
            ]
            nodes.end("node-1")
            lost, part = int(bits[1].sum()), list_bytes[bits[1]].sum() / list_bytes.sum()
            words = f"{lost} lists, {part:.2%} of the bytes, are on no node that answers: searches that need them fail"
            wait_until(lambda: check() == (503, False, words))
            after = cluster()
            assert (after["unreachable_lists"], after["lists_below_replicas"]) == (lost, lost)
            assert after["unreachable_share"] == pytest.approx(part)
            assert after["nodes"][1]["state"] == "down"
            found = client.search(clustered(4), 3, 64, allow_partial=0.01)
            said = metrics()
            assert float(said["unreachable_lists"]) == float(said["lists_below_replicas"]) == lost
            assert float(said["unreachable_share"]) == pytest.approx(part)
            assert float(said["replicas"]) == 1.0
            # The manager tells nodes who serves, meanwhile or later.
            assert after["map_version"] <= float(said["map_version"]) <= cluster()["map_version"]
            assert float(said['node_up{node="node-1"}']) == 0.0
            assert float(said["partial_answers_total"]) == 1.0
            assert float(said["missing_coverage_total"]) == pytest.approx(float(np.sum(1 - found.coverage)), abs=1e-5)
