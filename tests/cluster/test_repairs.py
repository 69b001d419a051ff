"""What a manager does after a node has left, and what a node's process lives through, with real daemons."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from hybridindex.cluster.access import read_access
from hybridindex.cluster.manager import Manager
from hybridindex.cluster.node_process import NodeProcess, NodeSpec
from hybridindex.cluster.nodes.calls import NodeCalls
from hybridindex.cluster.nodes.taking import side_by_side
from hybridindex.cluster.state import ClusterRequest, NodeEntry
from hybridindex.errors import UnreachableError
from hybridindex.index.share.ranges import mask_of
from hybridindex.service.auth import new_key
from hybridindex.types import I64
from tests.clustered import small_index

NAMES = ("node-0", "node-1", "node-2", "node-3")


def until(holds) -> None:
    ends = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < ends, "it does not come"
        time.sleep(0.05)


class Nodes:
    def __init__(self, processes: dict[str, NodeProcess], manager: Manager, key: str) -> None:
        self.processes, self.manager, self.key = processes, manager, key

    def end(self, name: str) -> None:
        os.kill(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].close()

    def held_bytes(self, name: str) -> int:
        return NodeCalls(self.processes[name].url, self.key).node()["held_bytes"]

    def states(self) -> list[str]:
        return [node["state"] for node in self.manager.status()["nodes"]]

    def said(self, name: str) -> dict[str, Any]:
        return NodeCalls(self.processes[name].url, self.key).node()

    def lists_to_take(self, *names: str) -> int:
        jobs = [self.said(name)["holding"] for name in names]
        return sum(job["lists_left"] for job in jobs if job is not None and job["running"])

    def is_down(self, name: str) -> bool:
        return any(node["name"] == name and node["state"] == "down" for node in self.manager.status()["nodes"])


def spec_of(tmp_path, name: str, memory_bytes: int, key: str) -> NodeSpec:
    return NodeSpec(
        name=name, index=str(tmp_path / "index"), data=str(tmp_path / name), memory_bytes=memory_bytes, key=key
    )


def managed(tmp_path, request: ClusterRequest, key: str) -> Manager:
    return Manager(tmp_path / "state", cluster="c", index=tmp_path / "index", request=request, key=key)


@contextmanager
def started(tmp_path, n: int, of_index: float, replicate: str, **changes) -> Iterator[tuple[Nodes, int]]:
    """``n`` nodes with two replicas; ``of_index``: the memory of each, in indexes. And its bytes. ``changes``: of the
    request."""
    small_index(tmp_path / "index", n=6000, nlist=64).close()
    memory_bytes = int(of_index * read_access(tmp_path / "index").list_bytes.sum())
    key = new_key()
    with ExitStack() as stack:
        processes = {name: NodeProcess(spec_of(tmp_path, name, memory_bytes, key)) for name in NAMES[:n]}
        stack.callback(lambda: [process.close() for process in processes.values()])
        request = ClusterRequest(**{"replicas": 2, "replicate": replicate, "repair_after_s": 0.5, **changes})
        manager = managed(tmp_path, request, key)
        stack.callback(manager.close)
        manager.set_nodes(
            [NodeEntry(name=name, url=node.url, memory_bytes=memory_bytes) for name, node in processes.items()]
        )
        manager.repartition()
        yield Nodes(processes, manager, key), memory_bytes


def copies(manager: Manager, names: tuple[str, ...]) -> I64:
    """(nlist,) of these nodes."""
    map_ = manager._state.map
    return sum(map_.held_by(map_.index_of(name)).astype(np.int64) for name in names)


def test_hot_lists_make_room_for_what_is_copied_again(tmp_path):
    with started(tmp_path, 4, 0.8, "hot") as (nodes, memory_bytes):
        assert (copies(nodes.manager, NAMES) == 4).any()
        nodes.end("node-3")
        until(lambda: (copies(nodes.manager, NAMES[:3]) >= 2).all())
        until(lambda: not nodes.manager.status()["changing"])
        assert all(nodes.held_bytes(name) <= memory_bytes for name in NAMES[:3])


def test_where_memory_is_short_lists_are_copied_once(tmp_path):
    with started(tmp_path, 3, 0.8, "none") as (nodes, memory_bytes):
        until(lambda: not nodes.manager.status()["changing"])
        nodes.end("node-2")
        until(lambda: nodes.is_down("node-2") and (copies(nodes.manager, NAMES[:2]) >= 1).all())
        sums: list[int] = []

        def settled() -> bool:
            sums.append(nodes.manager.status()["map_version"])
            return len(sums) > 20 and len(set(sums[-20:])) == 1 and (copies(nodes.manager, NAMES[:2]) == 2).any()

        until(settled)
        status = nodes.manager.status()
        assert status["lists_below_replicas"]
        assert not status["lists_of_nobody"]
        assert not status["problem"]
        assert all(nodes.held_bytes(name) <= memory_bytes for name in NAMES[:2])


def test_a_node_that_was_drained_and_ended_is_not_waited_for(tmp_path):
    with started(tmp_path, 3, 1.1, "none") as (nodes, _):
        nodes.manager.drain("node-2")
        nodes.processes["node-2"].close()
        until(lambda: nodes.is_down("node-2"))
        # Who is asked is a change of its own.
        until(lambda: not nodes.manager._state.map.nodes[2].serving and not nodes.manager.status()["changing"])
        done: list[dict[str, object]] = []
        moving = threading.Thread(target=lambda: done.append(nodes.manager.repartition()))
        moving.start()
        moving.join(60)
        assert len(done) == 1
        assert (copies(nodes.manager, NAMES[:2]) == 2).all()


def test_a_daemon_outlives_the_thread_that_asked_for_it(tmp_path):
    small_index(tmp_path / "index").close()
    spec = NodeSpec(
        name="node-0", index=str(tmp_path / "index"), data=str(tmp_path / "node"), memory_bytes=1 << 30, key=new_key()
    )
    made: list[NodeProcess] = []
    making = threading.Thread(target=lambda: made.append(NodeProcess(spec)))
    making.start()
    making.join()
    (process,) = made
    try:
        # A daemon that was told to end refuses connections within a second, and another one is started.
        ends = time.monotonic() + 2
        while time.monotonic() < ends:
            NodeCalls(process.url, spec.key).ping(20)
            time.sleep(0.05)
        assert process.n_starts == 1
    finally:
        process.close()


def test_only_lists_of_nodes_that_are_lost_are_copied_and_a_new_plan_replaces_the_old(tmp_path):
    """Copies come at a byte a second: what nodes were told to take is what they take."""
    with started(tmp_path, 4, 1.5, "none", repair_after_s=3600.0, copy_bytes_per_s=1) as (nodes, memory_bytes):
        manager, key = nodes.manager, nodes.key
        map_ = manager._state.map
        nlist = len(map_.holders)

        def begin_again(name: str) -> None:
            nodes.processes[name] = process = NodeProcess(spec_of(tmp_path, name, memory_bytes, key))
            manager.set_nodes([NodeEntry(name=name, url=process.url, memory_bytes=memory_bytes)])

        # One that came back without its lists answers, and takes them again.
        nodes.end("node-2")
        shutil.rmtree(tmp_path / "node-2" / "share")
        begin_again("node-2")
        until(lambda: nodes.states()[2] == "starting" and nodes.lists_to_take("node-2"))
        manager._save(request=replace(manager._state.request, repair_after_s=0.0))
        nodes.end("node-3")
        until(lambda: nodes.lists_to_take("node-0", "node-1") > 0)
        # Each had one other holder, or node-2, which has it still as far as anybody knows.
        lost = int(map_.held_by(3).sum())
        until(lambda: lost - 2 <= nodes.lists_to_take("node-0", "node-1") <= lost)
        assert nodes.states() == ["up", "up", "starting", "down"]
        # It returns, and nothing has to be copied.
        begin_again("node-3")
        until(lambda: nodes.states() == ["up", "up", "starting", "up"] and not manager.status()["changing"])
        assert not nodes.lists_to_take("node-0", "node-1")
        # One after the other hangs, the second while it takes lists of the first.
        stopped = [nodes.processes[name].pid for name in NAMES[2:]]
        try:
            os.kill(stopped[0], signal.SIGSTOP)
            until(lambda: nodes.lists_to_take("node-0", "node-1", "node-3"))
            os.kill(stopped[1], signal.SIGSTOP)

            def both_take_all() -> bool:
                told = [(nodes.lists_to_take(name), mask_of(nodes.said(name)["held"], nlist)) for name in NAMES[:2]]
                return all(0 <= nlist - left - held.sum() <= 1 for left, held in told)

            until(both_take_all)
            watches = list(manager._nodes.values())
            said = side_by_side(watches, lambda node: node.calls.node(3600.0)["name"])
            assert [said[name] for name in NAMES[:2]] == list(NAMES[:2])
            assert all(isinstance(said[name], UnreachableError) for name in NAMES[2:])
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):  # it is killed where it hangs for long
                    os.kill(pid, signal.SIGCONT)


def test_a_node_that_refuses_the_managers_key_serves_as_before(tmp_path):
    with started(tmp_path, 2, 1.1, "none", repair_after_s=0.0) as (nodes, _):
        request, before = nodes.manager._state.request, nodes.manager.status()
        nodes.manager.close()
        stranger = managed(tmp_path, request, new_key())
        try:
            nodes.manager = stranger
            until(lambda: nodes.states() == ["refused"] * 2)
            status = stranger.status()
            assert "refused ping" in status["problem"]
            assert status["problem"].startswith("node node-0: ")
            assert status["lists_of_nobody"] == 0
        finally:
            stranger.close()
            nodes.manager = managed(tmp_path, request, nodes.key)
        until(lambda: nodes.states() == ["up"] * 2)
        after = nodes.manager.status()
        assert (after["map_version"], after["problem"]) == (before["map_version"], "")
        nodes.manager.close()
