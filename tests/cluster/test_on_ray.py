"""A cluster on real Ray, by the commands: start, search, kills, stops, changes, stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import hybridindex as hx
import hybridindex.cluster as hc
from hybridindex.client import Client
from hybridindex.cluster.local_ray import read_local, stop_local
from hybridindex.plans.current import make_current, save_plan
from hybridindex.router import Router
from tests.cluster.searches import NPROBE, K, Load, same, wait_until
from tests.clustered import clustered, small_index
from tests.coded import with_codes

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.slow

NLIST = 64


def run(*words, code=0):
    """What ``hybridindex cluster WORDS`` prints."""
    command = [sys.executable, "-W", "ignore", "-m", "hybridindex", "cluster", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if "--json" in words and not code else done.stdout + done.stderr


def processes_of(folder, words=" -m "):
    """Ids of processes that name a folder in their command, and ``words``."""
    found = subprocess.run(["ps", "-eww", "-o", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in found.splitlines() if str(folder) in line and words in line]


@contextmanager
def started(index, folder, n, **options):
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    status = run("start", index.path, "--local", n, "--data", folder / "data", "--json", *words)
    try:
        yield status
    finally:
        run("stop", index.path)


def pid_of_daemon(folder, name):
    [pid] = processes_of(folder, f"--node {name} ")
    return pid


def test_four_nodes_from_start_to_stop(tmp_path):
    """Nodes are killed, stopped, added and drained, and lists move under load: no answer is wrong or lost."""
    index = small_index(tmp_path / "idx", n=6000, nlist=NLIST)
    with Router(index) as router, started(index, tmp_path, 4, memory_per_node="400KiB", repair_after=1) as status:
        assert len(status["nodes"]) == 4
        assert run("status", index.path, "--json")["map_version"] >= 1
        url = status["nodes"][0]["url"]
        key = (index.path / "cluster" / "key").read_text()

        def one_machine(queries):
            return router.search(queries, K, NPROBE)

        def states():
            return [node["state"] for node in run("status", index.path, "--json")["nodes"]]

        wait_until(lambda: states() == ["up"] * 4)
        # No Ray is needed to search.
        with hc.connect(index.path, address=url, key=key) as cluster, cluster.router() as searched:
            assert {node["name"] for node in searched.status()} == {f"node-{i}" for i in range(4)}
            with Load(searched, one_machine) as load:
                load.more()
                os.kill(pid_of_daemon(tmp_path, "node-1"), signal.SIGKILL)
                load.more()
                stopped = pid_of_daemon(tmp_path, "node-2")
                os.kill(stopped, signal.SIGSTOP)
                try:
                    wait_until(lambda: states()[2] == "down")
                    load.more()
                finally:
                    with suppress(ProcessLookupError):  # it is killed where it hangs for long
                        os.kill(stopped, signal.SIGCONT)
                wait_until(lambda: states() == ["up"] * 4)
                load.more()
                moved = run("add-node", index.path, "--json")
                assert moved["node_bytes"]["node-4"] > 0
                load.more()
                run("drain", index.path, "node-0", "--json")
                assert run("repartition", index.path, "--json")["changed_lists"] == 0
                load.more()
            load.check()
        queries = tmp_path / "queries.npy"
        np.save(queries, clustered(7))
        found = run("search", index.path, "--queries", queries, "-k", K, "--nprobe", NPROBE, "--json")
        np.testing.assert_array_equal(found["ids"], one_machine(clustered(7)).ids)
        assert found["coverage"] is None
        fresh = clustered(3, seed=77)
        after = run("status", index.path, "--json")
        assert (after["lists_below_replicas"], after["lists_of_nobody"]) == (0, 0)
        url = after["nodes"][-1]["url"]
        with hc.connect(index.path, address=url) as cluster, cluster.router(writes=True) as written:
            assert written.add(fresh, [7001, 7002, 7003]).tolist() == [7001, 7002, 7003]
            assert written.delete([7002, 3]) == 2
            assert written.search(fresh, 1, NLIST).ids[[0, 2], 0].tolist() == [7001, 7003]
        assert "runs here; stop it first" in run("start", index.path, "--local", 2, code=8)
    assert not processes_of(tmp_path)
    with started(index, tmp_path, 2, memory_per_node="1MiB"):
        found = run("search", index.path, "--queries", queries, "-k", K, "--nprobe", NLIST, "--json")
        assert not np.isin(found["ids"], [3, 7002]).any()
        np.save(queries, fresh)
        found = run("search", index.path, "--queries", queries, "-k", 1, "--json")
        assert [found["ids"][i][0] for i in (0, 2)] == [7001, 7003]
    assert "no Ray cluster answers" in run("status", index.path, "--address", "127.0.0.1:1", code=8)


def test_codes_made_while_nodes_serve_come_by_a_restart_that_costs_no_search(tmp_path):
    index = small_index(tmp_path / "idx", n=6000, nlist=NLIST)
    with started(index, tmp_path, 3, memory_per_node="700KiB") as status:
        urls, key = [node["url"] for node in status["nodes"]], (index.path / "cluster" / "key").read_text()

        def precisions():
            found = []
            for url in urls:
                with Client(url, key=key) as client:
                    found.append(client.status()["router"]["precision"].partition(":")[0])
            return found

        assert precisions() == ["rows"] * 3
        pids = {pid_of_daemon(tmp_path, f"node-{i}") for i in range(3)}
        with with_codes(index) as coded:
            with (
                Router(coded, precision="rows") as rows,
                Router(coded, precision="codes", candidates=6000) as codes,
                hc.connect(index.path, address=urls[0], key=key) as cluster,
                cluster.router() as searched,
            ):
                queries = clustered(9, seed=5)
                wanted = rows.search(queries, K, NPROBE)
                # With all rows as candidates, a search by codes answers as one by rows, whoever is asked.
                np.testing.assert_array_equal(codes.search(queries, K, NPROBE).ids, wanted.ids)

                def all_candidates(queries):
                    return rows.search(queries, K, NPROBE)

                class Asked:
                    def search(self, queries, k, nprobe):
                        return searched.search(queries, k, nprobe, candidates=6000)

                with Load(Asked(), all_candidates) as load:
                    load.more()
                    assert run("restart", index.path, "--json") == {"nodes": [f"node-{i}" for i in range(3)]}
                    load.more()
                load.check()
                assert precisions() == ["codes"] * 3
                assert not pids & {pid_of_daemon(tmp_path, f"node-{i}") for i in range(3)}
                assert same(searched.search(queries, K, NPROBE, candidates=6000), codes.search(queries, K, NPROBE))
            assert "expected one of node-0, node-1, node-2" in run("restart", index.path, "node-9", code=3)
            before = pid_of_daemon(tmp_path, "node-1")
            assert run("restart", index.path, "node-1", "--json") == {"nodes": ["node-1"]}
            assert pid_of_daemon(tmp_path, "node-1") != before
    with started(index, tmp_path, 2, memory_per_node="2MiB", replicas=1):
        assert "each list is on one node" in run("restart", index.path, code=3)
        assert run("restart", index.path, "--force", "--json") == {"nodes": ["node-0", "node-1"]}


def apply_plan(path, coverage):
    with hx.open(path) as index, index.store() as store:
        plan, number = save_plan(store, index.plan(slo_ms=500, device_budget_bytes=1 << 20, coverage=coverage))
        make_current(store, plan, number, verified=False, why="applied")


def test_nodes_of_a_ray_that_runs_take_the_plan_and_its_manager_waits_for_its_state(tmp_path, monkeypatch):
    """As on several machines, where each node has a control store of its own."""
    path = tmp_path / "idx"
    state = path / "cluster" / "cluster.json"
    with hx.build(clustered(3000, seed=1), path, nlist=32, metric="l2") as index:
        index.profile(clustered(80, seed=7), nprobe=6, max_seconds=1, devices=0)
    apply_plan(path, 0.3)
    # As Ray 2.52 does by itself, it hides all GPUs from actors that ask for none.
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    program = "import sys, pathlib, hybridindex.cluster.local_ray as it; it.start_local(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, tmp_path], check=True)
    ray = read_local(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", ray.token)
    try:
        words = ("--data", tmp_path / "data", "--replicas", 1, "--memory-per-node", "4MiB", "--json")
        status = run("start", path, "--address", ray.address, *words, "--serve", "--device cpu --budget 1MiB")
        [url], key = [node["url"] for node in status["nodes"]], (path / "cluster" / "key").read_text()

        def plan():
            with Client(url, key=key) as client:
                said = client.status()
            assert [device["usable"] for device in said["devices"]] == [True]
            return said["plan_id"], said["note"]

        assert plan() == (1, None)
        [pid] = processes_of(tmp_path, "--node node-0 ")
        assert "CUDA_VISIBLE_DEVICES=3" in Path(f"/proc/{pid}/environ").read_text().split("\0")
        apply_plan(path, 0.6)
        run("restart", path, "--force", "--address", ray.address)
        assert plan() == (2, None)
        apply_plan(path, 0.9)
        [pid] = processes_of(tmp_path, "--node node-0 ")
        [node] = run("apply", path, "--address", ray.address, "--json")["nodes"]
        assert (node["name"], node["plan_id"], node["unplaced_lists"], node["problem"]) == ("node-0", 3, 0, None)
        assert node["moved_lists"] > 0 < node["moved_bytes"]
        assert plan() == (3, None)
        assert processes_of(tmp_path, "--node node-0 ") == [pid]
        assert "no plan 99" in run("apply", path, "--plan", "99", "--address", ray.address, code=5)
        assert "expected a plan id" in run("apply", path, "--plan", "none", "--address", ray.address, code=3)
        assert plan() == (3, None)

        # Its state cannot be read when the manager's process is lost.
        [manager] = processes_of("ManagerActor", "")
        content = state.read_text()
        state.write_text("")
        os.kill(manager, signal.SIGKILL)
        logs = Path(ray.folder) / "session_latest" / "logs"
        wait_until(lambda: any("cannot continue yet" in log.read_text() for log in logs.glob("worker-*.err")))
        with hc.connect(path, address=url, key=key) as cluster, cluster.router() as router:
            assert router.search(clustered(3, seed=3), K).coverage is None  # nodes need no manager
        state.write_text(content)

        def states():
            return [node["state"] for node in run("status", path, "--address", ray.address, "--json")["nodes"]]

        wait_until(lambda: states() == ["up"])
        run("stop", path, "--address", ray.address)
    finally:
        stop_local(tmp_path)
    assert not processes_of(tmp_path)
