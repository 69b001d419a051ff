"""Nodes go on to another generation of the index, while searches and changes go on, whoever fails meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from hybridindex.api import open_index, rollback
from hybridindex.client import Client
from hybridindex.cluster import manager
from hybridindex.cluster.nodes.calls import NodeCalls
from hybridindex.errors import BuildError, HybridIndexError, ServiceError
from hybridindex.index import build, read_manifest, remove_replaced
from hybridindex.router.remote.cluster_map import IndexGeneration
from tests.cluster.searches import wait_until
from tests.cluster.writing import KEY, NLIST, N, Rows, exact, running
from tests.clustered import clustered, small_index


@pytest.fixture
def path(tmp_path):
    return small_index(tmp_path / "idx", n=N, nlist=NLIST).path


def generations(node):
    """State of each generation that a node has open."""
    return {each["generation"]: each["state"] for each in NodeCalls(node.url, KEY).node()["generations"]}


def all_serve(it, generation):
    """Whether every node serves it, and has no other one open."""
    with suppress(HybridIndexError):  # one that was killed
        alone = [generations(node) == {generation: "serves"} for node in it.nodes]
        return all(alone) and it.states() == ["up"] * len(it.nodes)
    return False


class Load:
    """Searches of each node, and changes, until it is left. A context manager."""

    def __init__(self, it, rows, each):
        self.rows, self.wrong, self.failed = rows, [], []
        self._it, self._each, self._ending = it, each, threading.Event()
        self._threads = [threading.Thread(target=self._search, args=(own, 20 + i)) for i, own in enumerate(each)]
        self._threads.append(threading.Thread(target=self._change))

    def _search(self, own, seed):
        for query in clustered(100_000, seed=seed):
            if self._ending.is_set():
                return
            try:
                self.rows.searching(exact(own), query[None])
            except AssertionError as error:
                self.wrong.append(error)
            except HybridIndexError as error:
                self.failed.append(error)

    def _change(self):
        fresh = clustered(5000, seed=6)
        with self._it.router() as router:
            for number in range(N):
                if self._ending.wait(0.01):
                    return
                try:
                    with self.rows.changing({5000 + number: fresh[number]}):
                        router.upsert(fresh[number][None], [5000 + number])
                    with self.rows.changing({}, [number]):
                        router.delete([number])
                except HybridIndexError as error:
                    self.failed.append(error)
                    raise

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._ending.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def loaded(it, rows):
    with ExitStack() as routers:
        each = [routers.enter_context(it.router(i)) for i in range(len(it.nodes))]
        with Load(it, rows, each) as load:
            yield load


def test_nodes_go_on_to_what_the_index_was_compacted_into(path, tmp_path):
    """Whichever node is asked to compact it."""
    rows = Rows()
    with running(path, tmp_path) as it:
        with loaded(it, rows) as load:
            for generation in (2, 3):
                wait_until(lambda done=rows.n_done: rows.n_done > done + 10)
                with Client(it.nodes[generation - 1].url, key=KEY) as client:
                    assert client.compact(wait=True)["generation"] == generation
                wait_until(lambda now=generation: all_serve(it, now))
            wait_until(lambda done=rows.n_done: rows.n_done > done + 10)
        assert load.wrong == load.failed == []
        said = it.manager.status()
        assert (said["generation"], said["problem"]) == (3, "")
        for i in range(3):
            assert [folder.name for folder in (tmp_path / f"node-{i}" / "share").glob("gen-*")] == ["gen-000003"]
        with Client(it.nodes[2].url, key=KEY) as client:
            assert client.status()["changes"]["added"] < rows.n_done / 2  # what came before is in the lists
        it.nodes[2].close()
        it.nodes[2] = it.start(2, generation=1)  # as Ray does, which knows no other one
        wait_until(lambda: it.states() == ["up"] * 3)
        assert generations(it.nodes[2]) == {3: "serves"}
        with it.router(2) as own:
            for query in clustered(5, seed=3):
                rows.searching(exact(own), query[None])


def test_the_node_that_writes_compacts_by_itself_and_lists_are_split(path, tmp_path):
    rows, fresh = Rows(), clustered(12_000, n_centers=2, seed=9)
    with running(path, tmp_path, memory=6.0) as it:
        with it.router() as router:
            for start in range(0, len(fresh), 2000):
                some = dict(enumerate(fresh[start : start + 2000], 10_000 + start))
                with rows.changing(some):
                    router.add(np.stack(list(some.values())), list(some))
            wait_until(lambda: read_manifest(path).generation > 1)
            wait_until(lambda: all_serve(it, read_manifest(path).generation))
        said = it.manager.status()
        assert said["nlist"] > NLIST
        assert said["lists_below_replicas"] == 0
        for i in range(3):
            with it.router(i) as own:
                for query in clustered(5, seed=i):
                    rows.searching(lambda each, own=own: own.search(each, 10, said["nlist"]), query[None])


@pytest.mark.parametrize("seed", range(2))
def test_whoever_fails_meanwhile_no_answer_is_wrong(path, tmp_path, seed, monkeypatch):
    monkeypatch.setattr(manager, "_NEWER_AGAIN_S", 1.0)
    rng, rows = np.random.default_rng(seed), Rows()
    with running(path, tmp_path, copy_bytes_per_s=100_000) as it:
        with loaded(it, rows) as load:
            for generation, fault in enumerate(rng.permutation(["kill", "stop", "manager", "kill"]).tolist(), 2):
                wait_until(lambda done=rows.n_done: rows.n_done > done + 10)
                with Client(it.nodes[rng.integers(3)].url, key=KEY) as client:
                    client.compact(wait=True)
                threading.Event().wait(rng.uniform(0.2, 4.0))
                node = it.nodes[rng.integers(3)]
                if fault == "kill":
                    os.kill(node.pid, signal.SIGKILL)
                elif fault == "stop":
                    os.kill(node.pid, signal.SIGSTOP)
                    threading.Event().wait(2.0)
                    os.kill(node.pid, signal.SIGCONT)
                else:
                    it.manager.close()
                    it.manager = it.managed()
                wait_until(lambda now=generation: all_serve(it, now))
        assert load.wrong == []
        for i in range(3):
            with it.router(i) as own:
                for query in clustered(5, seed=i):
                    rows.searching(exact(own), query[None])


def test_what_nodes_cannot_take_leaves_them_as_they_were(path, tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "_NEWER_AGAIN_S", 0.5)
    rows = Rows()
    with running(path, tmp_path) as it:
        it.manager.close()
        fresh = clustered(400, seed=2)
        with open_index(path, write=True) as index, rows.changing(dict(enumerate(fresh, 5000))):
            index.add(fresh, np.arange(5000, 5400))
            index.compact()
        lists = path / "gen-000002" / "lists.bin"
        good = lists.read_bytes()
        lists.write_bytes(good[:100] + bytes(len(good) - 200) + good[-100:])
        it.manager = it.managed()
        wait_until(lambda: "could not" in it.manager.status()["problem"])
        assert it.manager.status()["generation"] == 1
        wait_until(lambda: all_serve(it, 1))
        with it.router() as router:
            rows.searching(exact(router), fresh[:1])
            lists.write_bytes(good)
            wait_until(lambda: all_serve(it, 2))
            rows.searching(exact(router), fresh[:1])
        assert it.manager.status()["problem"] == ""


def test_a_node_that_was_drained_or_is_lost_keeps_nobody(path, tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "_NEWER_AGAIN_S", 0.2)
    rows, fresh = Rows(), clustered(4, seed=2)
    with running(path, tmp_path, n_nodes=4, memory=2.0) as it, it.router(0, 1) as router:
        it.manager.drain("node-3")
        it.nodes.pop().close()
        with rows.changing({5000: fresh[0]}):
            router.add(fresh[:1], [5000])
        with Client(it.nodes[1].url, key=KEY) as client:
            client.compact(wait=True)
        wait_until(lambda: it.manager.status()["generation"] == 2)
        wait_until(lambda: all(generations(node) == {2: "serves"} for node in it.nodes))
        it.nodes.pop().close()
        wait_until(lambda: it.states()[2] == "down")
        with rows.changing({5001: fresh[1]}):
            router.add(fresh[1:2], [5001])
        with Client(it.nodes[1].url, key=KEY) as client:
            client.compact(wait=True)
        wait_until(lambda: "node-2 is down" in it.manager.status()["problem"])
        it.manager.drain("node-2")  # and goes on with it
        wait_until(lambda: all(generations(node) == {3: "serves"} for node in it.nodes))
        rows.searching(exact(router), fresh[:1])
        rows.searching(exact(router), fresh[1:2])


def mapped_lists(node):
    """Files of lists that a daemon has in its memory."""
    lines = Path(f"/proc/{node.pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/lists.bin" in line}


def test_nothing_of_a_generation_that_left_stays(path, tmp_path):
    with running(path, tmp_path, n_nodes=2) as it, it.router() as router:
        for generation in (2, 3, 4):
            router.upsert(clustered(1, seed=generation), [9000])
            with Client(it.nodes[0].url, key=KEY) as client:
                client.compact(wait=True)
            wait_until(lambda now=generation: all_serve(it, now))
        own = f"{tmp_path}/node-1/share/gen-000004/lists.bin"
        wait_until(lambda: {each for each in mapped_lists(it.nodes[1]) if "/share/" in each} == {own}, 10)


def test_nodes_go_on_where_the_generation_that_they_serve_was_removed(path, tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "_NEWER_AGAIN_S", 0.2)
    rows = Rows(clustered(N, seed=3))
    with running(path, tmp_path, memory=2.0) as it, it.router() as router:
        for seed in (2, 3):
            build(clustered(N, seed=seed), path, nlist=NLIST, metric="l2", replace=True).close()
        remove_replaced(path)
        it.manager.close()
        it.manager = it.managed()
        wait_until(lambda: "has no generation 1 any more" in it.manager.status()["problem"])
        it.nodes[1].close()
        it.nodes[1] = it.start(1, generation=1)
        wait_until(lambda: it.states() == ["up", "refused", "up"])
        it.manager.repartition()
        wait_until(lambda: all_serve(it, 3))
        rows.searching(exact(router), clustered(1, seed=9))


def test_no_change_is_lost_to_searches_where_the_index_goes_back_first(path, tmp_path):
    rows, fresh = Rows(), clustered(4, seed=2)
    with running(path, tmp_path) as it, it.router() as router:
        with open_index(path) as index, rows.changing({5000: fresh[0]}):
            index.add(fresh[:1], [5000])
        with open_index(path) as index:
            index.compact()
        wait_until(lambda: all_serve(it, 2))
        it.manager.close()
        rollback(path)
        with pytest.raises(BuildError, match="went back to an older generation"), it.router(timeout_s=3.0) as hasty:
            hasty.add(fresh[1:2], [5001])
        rows.searching(exact(router), fresh[:1])
        it.manager = it.managed()
        with rows.changing({5001: fresh[1]}):
            router.add(fresh[1:2], [5001])  # waits until they have gone back
        rows.searching(exact(router), fresh[1:2])
        wait_until(lambda: all_serve(it, 1))
        rows.searching(exact(router), fresh[1:2])


def test_a_node_is_not_put_in_charge_of_lists_that_it_lost_while_others_took_theirs(path, tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "_NEWER_AGAIN_S", 0.2)
    with running(path, tmp_path, copy_bytes_per_s=40_000) as it:
        with it.router() as router:
            router.upsert(clustered(1, seed=2), [9000])
        it.manager.close()
        with Client(it.nodes[1].url, key=KEY) as client:
            client.compact(wait=True)
        # The first node has all before the others begin.
        first, index = NodeCalls(it.nodes[0].url, KEY), read_manifest(path)
        first.open(IndexGeneration(index.fingerprint, 2))
        wait_until(lambda: generations(it.nodes[0]).get(2) == "beside")
        first.hold(np.ones(NLIST, dtype=np.bool_), None, generation=2)
        wait_until(lambda: not first.node()["generations"][1]["holding"]["running"])
        it.manager = it.managed()
        wait_until(lambda: generations(it.nodes[1]).get(2) == generations(it.nodes[2]).get(2) == "beside")
        os.kill(it.nodes[0].pid, signal.SIGKILL)
        wait_until(lambda: it.manager.status()["generation"] == 2)
        [own] = [each for each in first.node()["generations"] if each["generation"] == 2]
        assert sum(stop - start for start, stop in own["held"]) >= it.manager.status()["nodes"][0]["lists"] > 0
        wait_until(lambda: all_serve(it, 2))


def test_nodes_go_back_where_the_index_does(path, tmp_path):
    rows, fresh = Rows(), clustered(4, seed=2)
    with running(path, tmp_path) as it, it.router() as router:
        with rows.changing({5000: fresh[0]}):
            router.add(fresh[:1], [5000])
        with Client(it.nodes[0].url, key=KEY) as client:
            client.compact(wait=True)
        wait_until(lambda: all_serve(it, 2))
        rollback(path)
        wait_until(lambda: all_serve(it, 1))
        rows.searching(exact(router), fresh[:1])
        with rows.changing({5001: fresh[1]}):
            router.add(fresh[1:2], [5001])
        for i in range(3):
            with it.router(i) as own:
                rows.searching(exact(own), fresh[1:2])


def test_nodes_go_on_to_an_index_that_was_built_anew_when_they_are_told_to(path, tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "_NEWER_AGAIN_S", 0.2)
    rows, fresh = Rows(), clustered(2, seed=4)
    with running(path, tmp_path, memory=3.0) as it, it.router() as router:
        with rows.changing({5000: fresh[0]}):
            router.add(fresh[:1], [5000])
        build(clustered(2 * N, seed=2), path, nlist=NLIST // 2, metric="l2", replace=True).close()
        wait_until(lambda: "the index was built anew" in it.manager.status()["problem"])
        rows.searching(exact(router), fresh[:1])
        assert all_serve(it, 1)
        with pytest.raises(BuildError, match=r"built anew since|was replaced"):
            router.add(fresh[1:], [5001])
        it.manager.repartition()
        wait_until(lambda: all_serve(it, 2))
        wait_until(lambda: it.manager.status()["problem"] == "")
        now = Rows(clustered(2 * N, seed=2))
        with now.changing({20_000: fresh[1]}):
            router.add(fresh[1:], [20_000])
        for i in range(3):
            with it.router(i) as own:
                now.searching(lambda query, own=own: own.search(query, 10, NLIST // 2), fresh[1:])


def test_an_index_of_another_dimension_is_refused(path, tmp_path):
    rows = Rows()
    with running(path, tmp_path, n_nodes=2) as it, it.router() as router:
        build(clustered(N, 8, seed=2), path, nlist=NLIST, metric="l2", replace=True).close()
        with pytest.raises(ServiceError, match="dim is 8 where clients of this daemon expect 24"):
            it.manager.repartition()
        rows.searching(exact(router), clustered(1, seed=5))
        wait_until(lambda: all_serve(it, 1))


def test_sessions_and_devices_go_on(path, tmp_path):
    """A session that was opened before searches what serves, and devices hold lists of that."""
    rows, fresh = Rows(), clustered(6, seed=4)
    with running(path, tmp_path, options=("--device", "cpu", "--budget", "1MiB")) as it, it.router() as router:
        for generation in (2, 3):
            with ExitStack() as ending:
                clients = [ending.enter_context(Client(node.url, key=KEY)) for node in it.nodes]
                sessions = [ending.enter_context(client.session(lookahead_bytes=1 << 18)) for client in clients]
                for session in sessions:
                    session.lookahead(fresh[0])
                    rows.searching(lambda query, session=session: session.search(query, 10, NLIST), fresh[:1])
                row = fresh[generation][None]
                with rows.changing({5000 + generation: row[0]}):
                    router.add(row, [5000 + generation])
                clients[1].compact(wait=True)
                wait_until(lambda now=generation: all_serve(it, now))
                for session in sessions:
                    session.lookahead(row[0])
                    rows.searching(lambda query, session=session: session.search(query, 10, NLIST), row)
                for client in clients:
                    said = client.status()
                    assert said["index"]["generation"] == generation
                    assert [device["usable"] for device in said["devices"]] == [True]
