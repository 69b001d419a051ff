"""A cluster on this machine for a measurement: real daemons, their manager, an index, and queries."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import import_lists, make_clusters, make_queries
from hybridindex.client import Client
from hybridindex.cluster.access import Access
from hybridindex.cluster.manager import Manager
from hybridindex.cluster.node_process import NodeProcess, NodeSpec
from hybridindex.cluster.nodes.calls import NodeCalls
from hybridindex.cluster.router import ClusterRouter
from hybridindex.cluster.state import ClusterRequest, NodeEntry
from hybridindex.errors import UnreachableError
from hybridindex.partitioner.nodes.node_plan import NodePlan, holders_of
from hybridindex.service.auth import new_key
from hybridindex.types import F32

__all__ = ["Nodes", "RandomManager", "Workload", "make_workload", "mixed_queries", "nodes", "until"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """An index on disk, and what it was made from."""

    path: Path
    #: (n, d).
    vectors: F32
    #: (nlist, d).
    centres: F32
    nprobe: int
    #: Of codes and ids of all lists, as nodes count them.
    index_bytes: int
    #: Of RaBitQ codes beside the rows, and rows that each search compares then; None: rows are scanned.
    code_bits: int | None = None
    candidates: int | None = None

    @property
    def dim(self) -> int:
        return int(self.vectors.shape[1])

    @property
    def nlist(self) -> int:
        return len(self.centres)


def make_workload(
    path: Path, *, nbytes: int, dim: int, nlist: int, nprobe: int, code_bits: int | None = None
) -> Workload:
    """Unit vectors under the inner product; with a profile of :func:`mixed_queries`, which placements are made from.

    ``code_bits``: of codes beside the rows; None: there are none.
    """
    clusters, candidates = make_clusters(dim, nbytes, nlist=nlist), None
    with import_lists(clusters.vectors, clusters.lists, clusters.centres, "flat", "ip", path) as index:
        if code_bits is not None:
            index.compress(code_bits, queries=mixed_queries(clusters.centres, 500, seed=3))
            assert index.ivf.rabitq is not None
            # Of all searches the same, also of one that asks for fewer places.
            candidates = index.ivf.rabitq.spec.candidates_for(10, nprobe)
        index.profile(mixed_queries(clusters.centres, 2000, seed=1), nprobe, devices=["cpu"], max_seconds=2)
        spans = index.ivf.integrity.spans
        index_bytes = int((spans[:, :, 1] - spans[:, :, 0]).sum())
    return Workload(
        path=path,
        vectors=clusters.vectors,
        centres=clusters.centres,
        nprobe=nprobe,
        index_bytes=index_bytes,
        code_bits=code_bits,
        candidates=candidates,
    )


def mixed_queries(centres: F32, n: int, seed: int) -> F32:
    """(n, d): seven of ten about popular centres, which are the same for every seed; in random order."""
    rng = np.random.default_rng(seed)
    n_hot = n * 7 // 10
    popular = centres[np.random.default_rng(99).permutation(len(centres))[:64]]
    weight = 1.0 / np.arange(1, len(popular) + 1)
    about = popular[rng.choice(len(popular), n_hot, p=weight / weight.sum())]
    noise = rng.standard_normal(about.shape, dtype=np.float32) / np.float32(np.sqrt(about.shape[1]))
    hot = about + noise
    hot /= np.linalg.norm(hot, axis=1, keepdims=True)
    queries = np.concatenate([hot, make_queries(centres, n - n_hot, "low", seed=seed)])
    return np.ascontiguousarray(queries[rng.permutation(n)])


class RandomManager(Manager):
    """Places lists at random, differently each time: ``replicas`` nodes for each, and one in ten places more."""

    def __init__(self, *args: Any, seed: int, **options: Any) -> None:
        self._rng = np.random.default_rng(seed)
        super().__init__(*args, **options)

    def _plan(self, access: Access) -> NodePlan:
        request = self._node_request(access)
        taking, nlist = request.taking, len(access.list_bytes)
        on = np.zeros((nlist, request.n_nodes), dtype=np.bool_)
        on[:, taking] = self._rng.random((nlist, taking.size)) < 0.1
        chosen = np.argsort(self._rng.random((nlist, taking.size)), axis=1)[:, : request.replicas]
        on[np.arange(nlist)[:, None], taking[chosen]] = True
        return NodePlan(request=request, list_bytes=access.list_bytes, work=access.work, holders=holders_of(on))


class Nodes:
    """Daemons and their manager."""

    def __init__(self, workload: Workload, processes: dict[str, NodeProcess], manager: Manager, key: str) -> None:
        self.workload, self.processes, self.manager, self._key = workload, processes, manager, key

    @property
    def names(self) -> list[str]:
        return list(self.processes)

    def router(self, *, by_locality: bool = True, **options: Any) -> ClusterRouter:
        """One that knows where lists are, where it is to choose by that."""
        urls = {name: process.url for name, process in self.processes.items()}
        router = ClusterRouter(urls, dim=self.workload.dim, key=self._key, by_locality=by_locality, **options)
        router.wait_until_known(60.0)
        return router

    def compact(self, name: str) -> int:
        """Has the node that writes compact the index; the generation that it made. ``name``: of any node."""
        with Client(self.processes[name].url, key=self._key, timeout_s=600.0) as client:
            return int(client.compact()["generation"])

    def serve_alone(self, generation: int) -> bool:
        """All nodes serve it, and have no other one open."""
        try:
            opened = [self.calls(name).node()["generations"] for name in self.names]
        except UnreachableError:  # one that was killed
            return False
        return all([each["generation"] for each in states] == [generation] for states in opened) and self.whole()

    def calls(self, name: str) -> NodeCalls:
        return NodeCalls(self.processes[name].url, self._key)

    def signal(self, name: str, number: int) -> None:
        """To the daemon that runs now."""
        os.kill(self.processes[name].pid, number)

    def state(self, name: str) -> str:
        """Of ``hybridindex.cluster.nodes.watch.NodeState``, as the manager sees it."""
        state: str = next(node["state"] for node in self.manager.status()["nodes"] if node["name"] == name)
        return state

    def whole(self) -> bool:
        """All nodes are up with the newest map, each list has its replicas, and nothing is under way."""
        status = self.manager.status()
        current = all(
            node["state"] == "up" and node["map_version"] == status["map_version"] for node in status["nodes"]
        )
        return current and not status["lists_below_replicas"] and not status["changing"] and self._serve()

    def _serve(self) -> bool:
        map_ = self.manager._state.map  # its status does not say who is asked
        return map_ is not None and all(node.serving for node in map_.nodes)

    def peers_up(self) -> bool:
        """All nodes see all others."""
        found = [self.calls(name).node()["peers"] for name in self.names]
        return all(len(peers) == len(self.names) - 1 and all(p["state"] != "down" for p in peers) for peers in found)


@contextmanager
def nodes(
    workload: Workload,
    folder: Path,
    n: int,
    *,
    replicas: int = 2,
    replicate: str = "none",
    memory_bytes: int | None = None,
    repair_after_s: float = 60.0,
    seed: int | None = None,
    options: Sequence[str] = (),
) -> Iterator[Nodes]:
    """``n`` nodes that hold their lists and see each other. ``memory_bytes``: of each; default twice the index.
    ``seed``: lists are placed at random."""
    memory_bytes = 2 * workload.index_bytes if memory_bytes is None else memory_bytes
    key = new_key()
    with ExitStack() as stack:
        processes = {}
        for i in range(n):
            name = f"node-{i}"
            spec = NodeSpec(
                name=name, index=str(workload.path), data=str(folder / name), memory_bytes=memory_bytes, key=key,
                options=tuple(options),
            )  # fmt: skip
            processes[name] = NodeProcess(spec)
            stack.callback(processes[name].close)
        request = ClusterRequest(replicas=replicas, replicate=replicate, repair_after_s=repair_after_s)  # type: ignore[arg-type]
        make: Callable[..., Manager] = Manager if seed is None else RandomManager
        more = {} if seed is None else {"seed": seed}
        manager = make(folder / "manager", cluster=folder.name, index=workload.path, request=request, key=key, **more)
        stack.callback(manager.close)
        manager.set_nodes(
            [NodeEntry(name=name, url=each.url, memory_bytes=memory_bytes) for name, each in processes.items()]
        )
        manager.repartition()
        found = Nodes(workload, processes, manager, key)
        until(lambda: found.whole() and found.peers_up(), 60.0)
        yield found


def until(holds: Callable[[], bool], limit_s: float) -> float:
    """Seconds until it holds; it is asked every 10 ms.

    Raises:
        TimeoutError: it does not hold within ``limit_s``.
    """
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > limit_s:
            raise TimeoutError(f"what was waited for did not come within {limit_s:g} s")
        time.sleep(0.01)
    return time.monotonic() - began
