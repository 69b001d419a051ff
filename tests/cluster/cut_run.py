"""A cluster of three machines whose network is cut; run by ``test_cuts.py`` in a network of its own.

Says in JSON what was seen, as the last line.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from hybridindex.cluster.manager import Manager
from hybridindex.cluster.node_process import NodeProcess, NodeSpec
from hybridindex.cluster.nodes.calls import NodeCalls
from hybridindex.cluster.router import ClusterRouter
from hybridindex.cluster.state import ClusterRequest, NodeEntry
from hybridindex.errors import HybridIndexError
from hybridindex.router import Router
from hybridindex.service.auth import new_key
from hybridindex.types import SearchResult
from tests.cluster.namespaces import Machine, make_bridge
from tests.cluster.searches import NPROBE, K, Load, same, wait_until
from tests.clustered import DIM, clustered, small_index

N, NLIST, KEY = 4000, 64, new_key()


class Cut:
    def __init__(self, folder: Path, ending: ExitStack) -> None:
        make_bridge()
        self.index = small_index(folder / "idx", n=N, nlist=NLIST)
        spans = self.index.integrity.spans
        memory_bytes = int(0.8 * (spans[:, :, 1] - spans[:, :, 0]).sum())
        self.machines = [Machine(i) for i in range(3)]
        self.nodes: list[NodeProcess] = []
        for i, machine in enumerate(self.machines):
            spec = NodeSpec(
                name=f"node-{i}", index=str(self.index.path), data=str(folder / f"node-{i}"), key=KEY,
                memory_bytes=memory_bytes, host=machine.host,
            )  # fmt: skip
            self.nodes.append(machine.do(NodeProcess, spec))
            ending.callback(self.nodes[-1].close)
        request = ClusterRequest(replicas=2, replicate="none", repair_after_s=600.0)
        self.manager = Manager(folder / "state", cluster="cut", index=self.index.path, request=request, key=KEY)
        ending.callback(self.manager.close)
        self.manager.set_nodes(
            [NodeEntry(name=f"node-{i}", url=node.url, memory_bytes=memory_bytes) for i, node in enumerate(self.nodes)]
        )
        self.manager.repartition()
        self.said: dict[str, Any] = {}
        self._whole = ending.enter_context(Router(self.index))

    def one_machine(self, queries: np.ndarray) -> SearchResult:
        return self._whole.search(queries, K, NPROBE)

    def router(self, *numbers: int) -> ClusterRouter:
        return ClusterRouter({f"node-{i}": self.nodes[i].url for i in numbers}, dim=DIM, key=KEY)

    def states(self) -> list[str]:
        return [node["state"] for node in self.manager.status()["nodes"]]

    def peers(self, number: int) -> dict[str, str]:
        """What a node says of the others, asked on its own machine, from which no cut separates it."""
        calls = NodeCalls(self.nodes[number].url, KEY)
        try:
            said = self.machines[number].do(calls.node)
        finally:
            calls.close()
        return {peer["name"]: peer["state"] for peer in said["peers"]}

    def all_joined(self) -> bool:
        return self.states() == ["up"] * 3 and all(
            state == "up" for number in range(3) for state in self.peers(number).values()
        )

    def right(self, router: ClusterRouter, seed: int) -> bool:
        queries = clustered(3, seed=seed)
        return same(router.search(queries, K, NPROBE), self.one_machine(queries))


def one_is_cut_off(it: Cut) -> None:
    """Those who see each other go on; the one that sees nobody says so, and lets nobody write."""
    with it.router(0, 1) as router, Load(router, it.one_machine) as load:
        load.more()
        it.machines[2].cut()
        wait_until(lambda: it.states() == ["up", "up", "down"])
        load.more(100)

        def alone() -> dict[str, Any]:
            with it.router(2) as own:
                queries = clustered(3, seed=5)
                part = own.search(queries, K, NPROBE, allow_partial=0.01)
                assert part.coverage is not None
                said = {"coverage": part.coverage.tolist(), "search": "", "write": ""}
                for name, ask in (
                    ("search", lambda: own.search(queries, K, NPROBE)),
                    ("write", lambda: own.upsert(queries[:1], [N + 1])),
                ):
                    try:
                        ask()
                    except HybridIndexError as error:
                        said[name] = f"{type(error).__name__}: {error}"
            return said

        wait_until(lambda: set(it.peers(2).values()) <= {"silent", "down"})
        it.said["alone"] = it.machines[2].do(alone)
        it.machines[2].join()
        began = time.monotonic()
        wait_until(it.all_joined)
        it.said["joined_s"] = time.monotonic() - began
        load.more()
    load.check()
    it.said["right"] = load.n_right
    with it.router(2) as router:
        assert all(it.right(router, seed) for seed in range(5))


def two_are_cut_from_each_other(it: Cut) -> None:
    """Both see the third: searches are whole wherever they are asked, and rows that either takes are on all."""
    first, _, last = it.machines
    with it.router(0, 1, 2) as router, Load(router, it.one_machine) as load:
        load.more()
        first.cut_from(last)
        last.cut_from(first)
        wait_until(lambda: it.peers(0)["node-2"] != "up" and it.peers(2)["node-0"] != "up")
        load.more(100)
    load.check()
    it.said["right_between"] = load.n_right
    fresh = clustered(6, seed=77)
    with ExitStack() as routers:
        each = [routers.enter_context(it.router(i)) for i in range(3)]
        for turn, writer in enumerate((each[0], each[2], each[0], each[2], each[1], each[2])):
            writer.upsert(fresh[turn : turn + 1], [N + turn])
            for reader in each:
                wait_until(lambda: reader.search(fresh[turn : turn + 1], 1, NLIST).ids[0, 0] == N + turn)  # noqa: B023
        first.join_with(last)
        last.join_with(first)
        wait_until(it.all_joined)
        for reader in each:
            np.testing.assert_array_equal(reader.search(fresh, 1, NLIST).ids[:, 0], np.arange(N, N + 6))


def main(folder: Path) -> None:
    with ExitStack() as ending:
        it = Cut(folder, ending)
        one_is_cut_off(it)
        two_are_cut_from_each_other(it)
        print(json.dumps(it.said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
