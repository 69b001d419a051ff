"""The manager over real daemons, without Ray: who serves, what is copied again, what changes and what is undone."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from hybridindex.cluster.manager import Manager
from hybridindex.cluster.node_process import NodeProcess, NodeSpec
from hybridindex.cluster.nodes.calls import NodeCalls
from hybridindex.cluster.router import ClusterRouter
from hybridindex.cluster.state import STATE_FILE, ClusterRequest, NodeEntry, read_state
from hybridindex.errors import BuildError, InvalidInputError, ServiceError, UnreachableError
from hybridindex.index.share.ranges import mask_of
from hybridindex.router import Router
from hybridindex.service.auth import new_key
from tests.cluster.searches import NPROBE, K, Load, same, wait_until
from tests.clustered import DIM, clustered, small_index

KEY = new_key()
N, NLIST = 6000, 64


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return small_index(tmp_path_factory.mktemp("cluster") / "idx", n=N, nlist=NLIST)


@pytest.fixture(scope="module")
def one_machine(index):
    with Router(index) as router:
        yield lambda queries: router.search(queries, K, NPROBE)


def spec_of(index, folder, number, memory_bytes):
    return NodeSpec(
        name=f"node-{number}",
        index=str(index.path),
        data=str(folder / f"node-{number}"),
        memory_bytes=memory_bytes,
        key=KEY,
    )


class Running:
    """Nodes and their manager."""

    def __init__(self, index, folder, n_nodes, share, request):
        self.index, self.folder, self.request = index, folder, request
        total = int((index.integrity.spans[:, :, 1] - index.integrity.spans[:, :, 0]).sum())
        self.memory_bytes = int(share * total)
        self.nodes = [NodeProcess(spec_of(index, folder, i, self.memory_bytes)) for i in range(n_nodes)]
        self.manager = self.managed()
        self.manager.set_nodes([self.entry(i) for i in range(n_nodes)])

    def managed(self):
        return Manager(self.folder / "state", cluster="test", index=self.index.path, request=self.request, key=KEY)

    def entry(self, number):
        return NodeEntry(name=f"node-{number}", url=self.nodes[number].url, memory_bytes=self.memory_bytes)

    def router(self):
        return ClusterRouter({f"node-{i}": node.url for i, node in enumerate(self.nodes)}, dim=DIM, key=KEY)

    def states(self):
        return [node["state"] for node in self.manager.status()["nodes"]]

    def until(self, **wanted):
        wait_until(lambda: {name: self.manager.status()[name] for name in wanted} == wanted)


@contextmanager
def running(index, folder, n_nodes=3, share=0.8, **request):
    with ExitStack() as ending:
        it = Running(index, folder, n_nodes, share, ClusterRequest(**request))
        ending.callback(lambda: [node.close() for node in it.nodes])
        ending.callback(lambda: it.manager.close())
        it.manager.repartition()
        yield it


def test_a_node_that_dies_costs_no_answer_and_comes_back(index, one_machine, tmp_path):
    with running(index, tmp_path) as it, it.router() as router, Load(router, one_machine) as load:
        load.more()
        pid = it.nodes[1].pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: it.states()[1] == "down")
        load.more()
        wait_until(lambda: it.nodes[1].n_starts == 2 and it.states() == ["up"] * 3)
        assert it.manager.status()["lists_below_replicas"] == 0
        load.more()
    load.check()


def is_ready(node):
    asked = Request(f"{node.url}/readyz", headers={"authorization": f"Bearer {KEY}"})
    with suppress(HTTPError), urlopen(asked, timeout=10) as answer:
        return answer.status < 300
    return False


def test_nodes_become_ready_that_lack_lists_and_whoever_has_them(index, tmp_path):
    """A load balancer asks no other ones."""
    with running(index, tmp_path, n_nodes=2, share=1.0, replicas=1, replicate="none") as it:
        wait_until(lambda: all(map(is_ready, it.nodes)))  # they began without a list, and with no other node
        for node in it.nodes:
            node.close()
        it.nodes[0] = NodeProcess(spec_of(index, tmp_path, 0, it.memory_bytes))
        wait_until(lambda: is_ready(it.nodes[0]))  # it began with half of the lists


def test_a_node_that_hangs_leaves_the_map_and_its_lists_are_copied(index, one_machine, tmp_path):
    with running(index, tmp_path, share=1.2, repair_after_s=0.5, replicate="none") as it, it.router() as router:
        before = it.manager.status()
        assert sum(node["lists"] for node in before["nodes"]) == 2 * NLIST
        with Load(router, one_machine) as load:
            load.more()
            os.kill(it.nodes[2].pid, signal.SIGSTOP)
            try:
                wait_until(lambda: it.states() == ["up", "up", "down"])
                # Two nodes are left, and each list is to be on both.
                it.until(lists_below_replicas=0, lists_of_nobody=0)
                assert all(node["lists"] == NLIST for node in it.manager.status()["nodes"][:2])
                load.more()
            finally:
                with suppress(ProcessLookupError):  # it is killed where it hangs for long
                    os.kill(it.nodes[2].pid, signal.SIGCONT)
            wait_until(lambda: it.states() == ["up"] * 3)
            load.more()
        load.check()


def test_nodes_come_and_go_while_searches_go_on(index, one_machine, tmp_path):
    with running(index, tmp_path, share=1.0) as it, it.router() as router, Load(router, one_machine) as load:
        load.more()
        it.nodes.append(NodeProcess(spec_of(index, tmp_path, 3, it.memory_bytes)))
        try:
            it.manager.set_nodes([it.entry(i) for i in range(4)])
            moved = it.manager.repartition()
            assert moved["taken_bytes"] > 0
            assert it.manager.status()["nodes"][3]["lists"] > 0
            load.more()
            it.manager.drain("node-0")
            status = it.manager.status()
            assert status["nodes"][0]["lists"] == 0
            assert status["lists_below_replicas"] == 0
            load.more()
            # Nobody asks it any more, once all have the map.
            with pytest.raises(InvalidInputError, match="was drained: node-0"):
                it.manager.forget("node-1")
            it.nodes[0].close()
            load.more(60)
            it.manager.forget("node-0")
            status = it.manager.status()
            assert [node["name"] for node in status["nodes"]] == ["node-1", "node-2", "node-3"]
            assert status["lists_below_replicas"] == 0
            load.more()
            wait_until(lambda: it.states() == ["up"] * 3)
            said = NodeCalls(it.nodes[3].url, KEY).node()
            assert [peer["name"] for peer in said["peers"]] == ["node-1", "node-2"]
            assert it.manager.repartition()["changed_lists"] == 0
        finally:
            it.nodes[3].close()
    load.check()


def test_a_node_that_returns_at_another_address_is_found_there(index, one_machine, tmp_path):
    with running(index, tmp_path) as it, it.router() as router, Load(router, one_machine) as load:
        load.more()
        was = it.nodes[0].url
        it.nodes[0].close()
        wait_until(lambda: it.states()[0] == "down")
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", int(was.rpartition(":")[2])))
            taken.listen()
            it.nodes[0] = NodeProcess(spec_of(index, tmp_path, 0, it.memory_bytes))
            assert it.nodes[0].url != was
            it.manager.has_moved("node-0", it.nodes[0].url)
            wait_until(lambda: it.states() == ["up"] * 3)
            calls = NodeCalls(it.nodes[1].url, KEY)
            wait_until(lambda: it.nodes[0].url in [node["url"] for node in calls.nodes()["nodes"]])
            wait_until(lambda: [peer["state"] for peer in calls.node()["peers"]] == ["up"] * 2)
            load.more()
    load.check()


def test_there_are_no_more_nodes_than_a_map_has(tmp_path, index):
    manager = Manager(tmp_path / "state", cluster="test", index=index.path, request=ClusterRequest(), key=KEY)
    try:
        many = [NodeEntry(name=f"node-{i}", url="http://127.0.0.1:1", memory_bytes=1 << 30) for i in range(65)]
        with pytest.raises(InvalidInputError, match="would have 65 nodes; expected 64 at most"):
            manager.set_nodes(many)
        assert manager.status()["nodes"] == []
    finally:
        manager.close()


def test_a_map_may_be_larger_than_what_clients_may_send(one_machine, tmp_path):
    many = small_index(tmp_path / "idx", n=N, nlist=512)
    options = ("--max-body", "1KiB")
    spec = replace(spec_of(many, tmp_path, 0, 1 << 30), options=options)
    node = NodeProcess(spec)
    request = ClusterRequest(replicas=1)
    manager = Manager(tmp_path / "state", cluster="test", index=many.path, request=request, key=KEY)
    try:
        manager.set_nodes([NodeEntry(name="node-0", url=node.url, memory_bytes=1 << 30)])
        manager.repartition()
        holders = np.where(np.arange(512) % 2, 1, 0).astype(np.uint64)
        larger = replace(manager._state.map, version=99, holders=holders)
        assert len(larger.to_json()) > 1024
        NodeCalls(node.url, KEY).apply(larger)
    finally:
        manager.close()
        node.close()


def test_a_daemon_that_the_system_could_not_start_is_tried_again(index, tmp_path, monkeypatch):
    node = NodeProcess(spec_of(index, tmp_path, 0, 1 << 30))
    try:
        start, failed = node._start, []

        def short_of_processes():
            if not failed:
                failed.append(1)
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return start()

        monkeypatch.setattr(node, "_start", short_of_processes)
        before = node.pid
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: failed and node.pid != before and is_there(node))
    finally:
        node.close()


def is_there(node):
    try:
        NodeCalls(node.url, KEY).ping(1.0)
    except (UnreachableError, ServiceError):
        return False
    return True


def test_a_manager_goes_on_where_it_was(index, one_machine, tmp_path):
    with running(index, tmp_path) as it, it.router() as router:
        before = it.manager.status()
        it.manager.close()
        with Load(router, one_machine) as load:
            load.more()  # nodes need no manager
        load.check()
        it.manager = it.managed()
        wait_until(lambda: it.states() == ["up"] * 3)
        after = it.manager.status()
        assert [node["lists"] for node in after["nodes"]] == [node["lists"] for node in before["nodes"]]
        assert it.manager.repartition()["taken_bytes"] == 0


def test_a_cluster_that_begins_anew_serves_by_its_own_map(index, one_machine, tmp_path):
    """Shares, and the maps in them, stay where a cluster was."""
    with running(index, tmp_path, share=1.1, replicas=3) as it:
        it.manager.repartition()
        before = it.manager.status()["map_version"]
        it.manager.close()
        (tmp_path / "state" / STATE_FILE).unlink()
        it.request = ClusterRequest(replicas=1, replicate="none")
        it.manager = it.managed()
        it.manager.set_nodes([it.entry(0), it.entry(1)])
        it.manager.repartition()
        it.nodes[2].close()
        status = it.manager.status()
        assert status["map_version"] > before
        said = [NodeCalls(node.url, KEY).node() for node in it.nodes[:2]]
        held = [mask_of(each["held"], NLIST) for each in said]
        assert (held[0] ^ held[1]).all()
        assert [each["map_version"] for each in said] == [status["map_version"]] * 2
        queries = clustered(20, seed=5)
        with ClusterRouter({f"node-{i}": it.nodes[i].url for i in range(2)}, dim=DIM, key=KEY) as router:
            assert same(router.search(queries, K, NPROBE), one_machine(queries))


def test_a_search_waits_for_nodes_that_say_nothing_while_no_other_is_left(index, one_machine, tmp_path):
    """Where others take the cores, all may be silent for a while."""
    queries = clustered(5, seed=6)
    with running(index, tmp_path, n_nodes=2, share=1.2) as it, it.router() as router:
        assert same(router.search(queries, K, NPROBE), one_machine(queries))
        for node in it.nodes:
            os.kill(node.pid, signal.SIGSTOP)
        try:
            found = router.submit(queries, K, NPROBE)
            wait_until(lambda: [node["state"] for node in router.status()] == ["silent"] * 2)
            assert not found.done()
            urls = {f"node-{i}": node.url for i, node in enumerate(it.nodes)}
            with ClusterRouter(urls, dim=DIM, key=KEY, timeout_s=1.5) as hasty, pytest.raises(UnreachableError):
                hasty.search(queries, K, NPROBE)
        finally:
            for node in it.nodes:
                os.kill(node.pid, signal.SIGCONT)
        assert same(found.result(30), one_machine(queries))


def test_lists_that_are_damaged_on_a_node_come_from_others(index, one_machine, tmp_path):
    with running(index, tmp_path, n_nodes=2, share=1.0) as it, it.router() as router:
        it.nodes[0].close()
        [file] = (tmp_path / "node-0" / "share").glob("gen-*/lists.bin")
        spans = index.integrity.spans
        at = int(spans[5, 0, 0])
        with file.open("r+b") as opened:
            opened.seek(at)
            opened.write(bytes(64))
        it.nodes[0] = NodeProcess(spec_of(index, tmp_path, 0, it.memory_bytes))
        it.manager.set_nodes([it.entry(0), it.entry(1)])
        with Load(router, one_machine) as load:
            wait_until(lambda: it.states() == ["up"] * 2)
            load.more()
        load.check()
        assert file.read_bytes()[at : at + 64] != bytes(64)


def test_a_change_that_a_node_cannot_do_is_undone(index, one_machine, tmp_path):
    with running(index, tmp_path, share=0.8, replicate="none") as it, it.router() as router:
        before, state = it.manager.status(), read_state(tmp_path / "state")
        os.kill(it.nodes[2].pid, signal.SIGKILL)
        it.nodes[2].close()
        with pytest.raises(InvalidInputError, match="memory are missing"):
            it.manager.drain("node-1")
        with pytest.raises(InvalidInputError, match="expected one of node-0, node-1, node-2"):
            it.manager.drain("node-7")
        after = read_state(tmp_path / "state")
        assert [node.drains for node in after.nodes] == [False] * 3
        np.testing.assert_array_equal(after.map.holders, state.map.holders)
        assert [node["lists"] for node in it.manager.status()["nodes"]] == [node["lists"] for node in before["nodes"]]
        with Load(router, one_machine) as load:
            load.more()
        load.check()


def test_one_change_at_a_time(index, tmp_path):
    with running(index, tmp_path, n_nodes=2, share=1.0) as it:
        with it.manager._changing, pytest.raises(BuildError, match="another change"):
            it.manager.repartition()
        assert it.manager.repartition()["changed_lists"] == 0


def test_what_no_cluster_can_be_made_of(index, tmp_path):
    with pytest.raises(ServiceError, match="did not start: No such option: --nonsense"):
        NodeProcess(NodeSpec(
            name="node-0", index=str(index.path), data=str(tmp_path / "node"), memory_bytes=1, key=KEY,
            options=("--nonsense",),
        ))  # fmt: skip
