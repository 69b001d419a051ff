"""Nodes whose machine was restarted, by what Ray says of machines; and with a real Ray that loses one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from hybridindex.cluster.keys import ClusterKeys
from hybridindex.cluster.local_ray import read_local, stop_local
from hybridindex.cluster.node_process import NodeProcess, NodeSpec
from hybridindex.cluster.returning import Returning, keep_machines
from hybridindex.service.auth import new_key
from tests.cluster.searches import wait_until
from tests.clustered import small_index

PLACE = {"NodeID": "a", "NodeManagerHostname": "host", "NodeManagerAddress": "10.0.0.7"}
KEYS = ClusterKeys(admin=new_key(), write=new_key(), search=new_key())


class Machines:
    """What Ray would say, and what was started."""

    def __init__(self, folder, start):
        self.places, self.actors, self.silent, self.started = [], set(), [], []
        self._start = start
        self.returning = Returning(
            folder, KEYS, lambda: self.silent, lambda: self.places, self.actors.__contains__, self.start,
            lambda spec, url: self.silent.remove(spec.name),
        )  # fmt: skip

    def start(self, spec, place):
        self.started.append((spec, place))
        return self._start(spec)

    def problem(self):
        return self.returning.problems.get("node-0", "")


@contextmanager
def machines(folder, start=lambda _spec: "http://10.0.0.7:1"):
    it = Machines(folder, start)
    try:
        yield it
    finally:
        it.returning.close()


@pytest.fixture
def spec(tmp_path):
    small_index(tmp_path / "index").close()
    return NodeSpec(
        name="node-0", index=str(tmp_path / "index"), data=str(tmp_path / "node"), memory_bytes=1 << 30,
        key=KEYS.admin, write_key=KEYS.write, search_key=KEYS.search,
        options=("--threads", "1"),
    )  # fmt: skip


def test_a_node_returns_with_its_machine_and_its_keys_are_in_no_other_file(tmp_path, spec):
    keep_machines(tmp_path, [spec], [PLACE])
    kept = (tmp_path / "machines.json").read_text()
    assert KEYS.admin not in kept
    assert KEYS.search not in kept
    with machines(tmp_path) as it:
        it.silent.append("node-0")
        wait_until(lambda: "its machine, host at 10.0.0.7, is none of Ray's" in it.problem())
        it.places = [{**PLACE, "NodeID": "c", "NodeManagerAddress": "10.0.0.8"}, {**PLACE, "NodeID": "b"}]
        wait_until(lambda: not it.silent)
        [(started, place)] = it.started
        assert replace(started, returns=False) == spec
        assert (started.returns, place["NodeID"]) == (True, "b")
        wait_until(lambda: not it.problem())


def test_a_node_whose_actor_lives_is_left_to_it(tmp_path, spec):
    keep_machines(tmp_path, [spec], [PLACE])
    with machines(tmp_path) as it:
        it.actors.add("node-0")
        it.places = [PLACE]
        it.silent.append("node-0")
        it.returning.look()
        assert not it.started
        assert not it.problem()


def test_a_machine_without_the_share_is_another_one(tmp_path, spec):
    keep_machines(tmp_path, [spec], [PLACE])
    with machines(tmp_path, lambda spec: NodeProcess(spec).url) as it:
        it.places = [PLACE]
        it.silent.append("node-0")
        wait_until(lambda: "is not there; without it: hybridindex cluster drain INDEX node-0" in it.problem())
        assert not (tmp_path / "node").exists()


def let_in(ray):
    return {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ray.token}


@contextmanager
def second_machine(ray):
    """Of a Ray, under an address of its own. Lost when it is left."""
    words = (
        *("start", "--address", ray.address, "--block", "--node-ip-address", "127.0.0.3", "--num-cpus", "1"),
        *("--object-store-memory", str(80 << 20), "--disable-usage-stats"),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=let_in(ray),
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def machines_of(ray):
    """How many are alive. In a process of its own: it is let in by what it has when Ray is imported."""
    words = f"import ray; ray.init({ray.address!r}, log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, timeout=60, check=True, env=let_in(ray)
    )
    return int(done.stdout)


@pytest.mark.slow
def test_a_machine_that_ray_lost_comes_back_with_its_lists(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    index = small_index(tmp_path / "idx", n=6000, nlist=64)
    state = index.path / "cluster"
    state.mkdir()
    words = f"import pathlib, hybridindex.cluster.local_ray as ray; ray.start_local(pathlib.Path({str(state)!r}))"
    subprocess.run([sys.executable, "-c", words], timeout=120, check=True)
    local = read_local(state)

    def cluster(*words, or_else=None):
        command = [sys.executable, "-W", "ignore", "-m", "hybridindex", "cluster", words[0], str(index.path)]
        done = subprocess.run([*command, *words[1:]], capture_output=True, text=True, timeout=300, check=False)
        if or_else is not None and done.returncode and or_else[0] in done.stderr:
            return or_else[1]
        assert not done.returncode, done.stderr
        return done.stdout

    def nodes():
        # The manager may have been on the machine that is lost.
        starting = ("Ray is restarting an actor of the cluster", '{"nodes": []}')
        said = cluster("status", "--json", or_else=starting)
        assert said.startswith("{"), said
        return json.loads(said)["nodes"]

    def away():
        return [node["name"] for node in nodes() if "is none of Ray's now" in node["problem"]]

    with ExitStack() as ending:
        ending.callback(stop_local, state)
        with second_machine(local):
            wait_until(lambda: machines_of(local) == 2)
            cluster(
                *("start", "--data", str(tmp_path / "data"), "--memory-per-node", "1GiB"),
                *("--repair-after", "3600", "--replicate", "none", "--replicas", "1"),
            )
            before = nodes()
            assert len(before) == 2
        wait_until(lambda: len(away()) == 1, 110)
        [lost] = away()
        [file] = (tmp_path / "data").glob(f"*/{lost}/share/gen-*/lists.bin")
        was = file.stat().st_ino
        with second_machine(local):
            wait_until(lambda: [node["state"] for node in nodes()] == ["up", "up"], 110)
            after = nodes()
            assert [node["lists"] for node in after] == [node["lists"] for node in before]
            assert not any(node["problem"] for node in after)
            assert file.stat().st_ino == was  # its share, not a new one
            cluster("stop")
