"""Rows that come and go in a cluster: any node takes a change, all show it, and none ever shows a part of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack

import numpy as np
import pytest

from hybridindex.api import open_index
from hybridindex.client import Client
from hybridindex.cluster import node_process
from hybridindex.cluster.keys import make_keys
from hybridindex.cluster.router import ClusterRouter
from hybridindex.errors import AccessDeniedError, BuildError, DuplicateIdError, InvalidInputError
from hybridindex.index import build
from tests.cluster.searches import wait_until
from tests.cluster.writing import KEY, NLIST, K, N, Rows, exact, running
from tests.clustered import DIM, clustered, small_index


@pytest.fixture
def path(tmp_path):
    return small_index(tmp_path / "idx", n=N, nlist=NLIST).path


def test_any_node_takes_changes_and_every_node_shows_them_at_once(path, tmp_path):
    rows, rng = Rows(), np.random.default_rng(5)
    with running(path, tmp_path) as it, ExitStack() as routers:
        each = [routers.enter_context(it.router(i)) for i in range(3)]
        for turn in range(24):
            fresh, writer = clustered(4, seed=100 + turn), each[turn % 3]
            ids = np.arange(10_000 + 4 * turn, 10_004 + 4 * turn)
            if turn % 4 == 1:
                ids = rng.choice(list(rows.now), 4, replace=False)
                with rows.changing(dict(zip(ids.tolist(), fresh, strict=True))):
                    assert writer.upsert(fresh, ids) == 4
            elif turn % 4 == 2:
                ids = rng.choice(list(rows.now), 30, replace=False)
                with rows.changing({}, ids.tolist()):
                    assert writer.delete(ids) == 30
            else:
                with rows.changing(dict(zip(ids.tolist(), fresh, strict=True))):
                    np.testing.assert_array_equal(writer.add(fresh, ids), ids)
            for router in each:
                rows.searching(exact(router), fresh[:1])
                rows.searching(exact(router), clustered(1, seed=turn))
        with pytest.raises(DuplicateIdError, match="exist already"):
            each[1].add(fresh, ids)
        with pytest.raises(InvalidInputError, match="vectors"):
            each[2].add(np.zeros((1, DIM + 1), np.float32))
        kept = rng.choice(list(rows.now), 50, replace=False)
        found = each[2].search(clustered(3, seed=1), K, allow_ids=kept)
        assert set(found.ids.ravel().tolist()) <= set(kept.tolist())
        # A change of one key is made once, whichever nodes are asked.
        for i in (2, 0, 1):
            with Client(it.nodes[i].url, key=KEY) as client:
                assert client.add(fresh, ids + 100, idempotency_key="once").tolist() == (ids + 100).tolist()
        first = each[0].add(clustered(2, seed=9))
        assert first.min() > max(rows.now)
        with Client(it.nodes[2].url, key=KEY) as client:
            changes = client.status()["cluster"]["changes"]
            assert changes["writer"] == "node-0"
            assert changes["problem"] == ""


def test_searches_see_whole_changes_while_the_node_that_writes_is_killed(path, tmp_path):
    rows, wrong, stop = Rows(), [], threading.Event()
    with running(path, tmp_path) as it, it.router() as router, it.router(1, 2) as others:

        def search(seed):
            while not stop.is_set():
                seed += 2
                try:
                    rows.searching(exact(router), clustered(1, seed=seed))
                except Exception as error:  # noqa: BLE001 - told at the end
                    wrong.append(error)

        threads = [threading.Thread(target=search, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        try:
            for turn in range(60):
                if turn == 20:
                    pid = it.nodes[0].pid
                    os.kill(pid, signal.SIGKILL)
                fresh, ids = clustered(3, seed=500 + turn), [20_000 + turn, 20_001 + turn, turn]
                with rows.changing(dict(zip(ids, fresh, strict=True))):
                    others.upsert(fresh, ids)
                with rows.changing({}, [20_000 + turn]):
                    others.delete([20_000 + turn])
            wait_until(lambda: it.states() == ["up"] * 3)
            for i in range(3):
                with it.router(i) as own:
                    for seed in range(5):
                        rows.searching(exact(own), clustered(1, seed=seed))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert wrong == []
    with open_index(path) as index:
        assert index.n_live == len(rows.now)


def test_a_node_that_hangs_while_it_writes_is_ended_and_another_one_writes(path, tmp_path, monkeypatch):
    monkeypatch.setattr(node_process, "HUNG_AFTER_S", 1.0)
    with running(path, tmp_path) as it, it.router(1, 2) as others:
        fresh = clustered(6, seed=3)
        others.add(fresh[:2], [9000, 9001])
        pid = it.nodes[0].pid
        os.kill(pid, signal.SIGSTOP)
        others.upsert(fresh[2:4], [9002, 9003])  # waits for the lock of the one that hangs
        wait_until(lambda: it.nodes[0].pid != pid)
        wait_until(lambda: it.states() == ["up"] * 3)
        others.upsert(fresh[4:], [9004, 9005])
        with it.router(0) as first:
            found = first.search(fresh, 1, NLIST)
        np.testing.assert_array_equal(found.ids[:, 0], np.arange(9000, 9006))


def test_a_change_waits_for_whoever_writes_beside_the_nodes_and_is_made_then(path, tmp_path):
    """A node asks now and then which of them writes, and goes on waiting where it is still that one."""
    fresh = clustered(2, seed=3)
    with running(path, tmp_path, n_nodes=2) as it, it.router(1) as router:
        with open_index(path, write=True) as index:
            index.add(fresh[:1], [9000])
            made = threading.Thread(target=router.add, args=(fresh[1:], [9001]))
            made.start()
            made.join(2.5)
            assert made.is_alive()
        made.join()
        np.testing.assert_array_equal(router.search(fresh, 1, NLIST).ids[:, 0], [9000, 9001])


def test_nodes_begin_with_what_was_changed_before_and_keep_it(path, tmp_path):
    rows, fresh = Rows(), clustered(5, seed=4)
    with open_index(path, write=True) as index, rows.changing(dict(zip(range(7000, 7005), fresh, strict=True)), [1, 2]):
        index.add(fresh, np.arange(7000, 7005))
        index.delete([1, 2])
    with running(path, tmp_path) as it:
        with it.router() as router:
            rows.searching(exact(router), fresh[:1])
            with rows.changing({}, [7001]):
                router.delete([7001])
        for i, node in enumerate(it.nodes):
            node.close()
            it.nodes[i] = it.start(i)
        wait_until(lambda: it.states() == ["up"] * 3)
        with it.router() as router:
            for row in fresh:
                rows.searching(exact(router), row[None])


def test_an_index_that_was_built_anew_takes_no_changes_of_nodes_that_serve_the_old_one(path, tmp_path):
    with running(path, tmp_path, n_nodes=2) as it, it.router() as router:
        build(clustered(N, seed=2), path, nlist=NLIST, replace=True).close()
        with Client(it.nodes[1].url, key=KEY) as client, pytest.raises(BuildError, match="rebuilt after"):
            client.upsert(clustered(1, seed=1), [1])
        router.search(clustered(2, seed=1), K)
        with open_index(path) as index:
            assert index.n_added == 0


def test_nodes_that_take_no_changes_say_so(path, tmp_path):
    with (
        running(path, tmp_path, n_nodes=2, options=("--no-write",)) as it,
        Client(it.nodes[1].url, key=KEY) as client,
        pytest.raises(AccessDeniedError, match="refuses changes of rows"),
    ):
        client.delete([1])


def test_the_command_line_changes_rows_through_the_nodes(path, tmp_path):
    (path / "cluster").mkdir()
    keys, fresh = make_keys(path / "cluster"), clustered(40, seed=11)
    np.save(tmp_path / "rows.npy", fresh)
    np.save(tmp_path / "ids.npy", np.arange(6000, 6040))
    np.save(tmp_path / "gone.npy", np.arange(6000, 6010))

    def run(*words):
        command = [sys.executable, "-m", "hybridindex", *words, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, json.loads(done.stdout)

    with running(path, tmp_path, n_nodes=2, state=path / "cluster", keys=keys) as it:
        code, said = run("add", str(path), str(tmp_path / "rows.npy"), "--ids", str(tmp_path / "ids.npy"))
        assert (code, said["rows"], said["live"]) == (0, 40, N + 40)
        code, said = run("delete", str(path), "--ids", str(tmp_path / "gone.npy"))
        assert (code, said["deleted"]) == (0, 10)
        code, said = run("compact", str(path))
        assert (code, said["compacted"], said["generation"]) == (0, True, 2)
        wait_until(lambda: it.manager.status()["generation"] == 2)
        with it.router(0) as first, it.router(1) as second:
            for router in (first, second):
                assert router.search(fresh[10:], 1, NLIST).ids[:, 0].tolist() == list(range(6010, 6040))
        with (
            ClusterRouter({"node-0": it.nodes[0].url}, dim=DIM, key=keys.search) as router,
            pytest.raises(AccessDeniedError, match="write"),
        ):
            router.delete([1])
        for node in it.nodes:
            node.close()
        code, said = run("delete", str(path), "--ids", str(tmp_path / "gone.npy"))
        assert (code, "none of its nodes answers" in said["error"]["message"]) == (8, True)
