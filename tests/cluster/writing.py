"""A cluster of real daemons whose rows change, and searches compared with every state that they may see."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager

import numpy as np

from hybridindex.api import open_index
from hybridindex.cluster.keys import ClusterKeys
from hybridindex.cluster.manager import Manager
from hybridindex.cluster.node_process import NodeProcess, NodeSpec
from hybridindex.cluster.router import ClusterRouter
from hybridindex.cluster.state import ClusterRequest, NodeEntry
from hybridindex.service.auth import new_key
from tests.clustered import DIM, clustered

KEYS = ClusterKeys(admin=new_key(), write=new_key(), search=new_key())
KEY = KEYS.admin
N, NLIST, K = 3000, 32, 10


class Rows:
    """What the index holds after each change of one writer, and searches compared with every state that may be seen."""

    def __init__(self, rows=None) -> None:
        self._states = [dict(enumerate(clustered(N, seed=1) if rows is None else rows))]
        self.n_begun = self.n_done = 0
        self._lock = threading.Lock()

    @property
    def now(self):
        return self._states[-1]

    @contextmanager
    def changing(self, come, go=()):
        """``come``: id -> vector."""
        with self._lock:
            self._states.append({i: row for i, row in self.now.items() if i not in set(go)} | come)
            self.n_begun += 1
        yield
        with self._lock:
            self.n_done += 1

    def searching(self, search, query):
        """Raises AssertionError where an answer fits no state between what was done before and what was begun since."""
        with self._lock:
            first = self.n_done
        found = search(query)
        with self._lock:
            last = self.n_begun
            states = self._states[first : last + 1]
        assert found.coverage is None
        assert any(self._fits(state, query, found) for state in states), (first, last, found.ids[0])

    @staticmethod
    def _fits(state, query, found):
        ids = np.fromiter(state, dtype=np.int64)
        rows = np.stack(list(state.values()))
        distances = ((rows - query) ** 2).sum(axis=1)
        nearest = np.sort(distances)[:K]
        if not np.allclose(found.distances[0], nearest, rtol=1e-4, atol=1e-4):
            return False
        own = dict(zip(ids.tolist(), distances.tolist(), strict=True))
        return len(set(found.ids[0].tolist())) == K and all(
            np.isclose(own.get(i, np.inf), d, rtol=1e-4, atol=1e-4)
            for i, d in zip(found.ids[0].tolist(), found.distances[0].tolist(), strict=True)
        )


class Running:
    def __init__(self, path, folder, n_nodes, options, state, keys, memory, plans, request):
        index = open_index(path)
        with index:
            spans = index.ivf.integrity.spans
        self.path, self.folder, self.options, self.keys, self.request = path, folder, options, keys, request
        self.plans = None if plans is None else str(plans)
        self.memory_bytes = int(memory * (0.8 if n_nodes > 2 else 1.1) * (spans[:, :, 1] - spans[:, :, 0]).sum())
        self.nodes = [self.start(i) for i in range(n_nodes)]
        self.state = state or folder / "state"
        self.manager = self.managed()
        self.manager.set_nodes(
            [
                NodeEntry(name=f"node-{i}", url=node.url, memory_bytes=self.memory_bytes)
                for i, node in enumerate(self.nodes)
            ]
        )
        self.manager.repartition()

    def managed(self):
        return Manager(self.state, cluster="test", index=self.path, request=self.request, key=self.keys.admin)

    def start(self, number, generation=None):
        name = f"node-{number}"
        return NodeProcess(
            NodeSpec(
                name=name, index=str(self.path), data=str(self.folder / name), memory_bytes=self.memory_bytes,
                key=self.keys.admin, write_key=self.keys.write, search_key=self.keys.search, options=self.options,
                generation=generation, plans=self.plans,
            )
        )  # fmt: skip

    def router(self, *numbers, **options):
        chosen = list(numbers) or list(range(len(self.nodes)))
        return ClusterRouter({f"node-{i}": self.nodes[i].url for i in chosen}, dim=DIM, key=self.keys.admin, **options)

    def states(self):
        return [node["state"] for node in self.manager.status()["nodes"]]


@contextmanager
def running(path, folder, n_nodes=3, options=(), state=None, keys=KEYS, memory=1.0, plans=None, **request):
    with ExitStack() as ending:
        it = Running(path, folder, n_nodes, options, state, keys, memory, plans, ClusterRequest(**request))
        ending.callback(lambda: [node.close() for node in it.nodes])
        ending.callback(lambda: it.manager.close())
        yield it


def exact(router):
    return lambda query: router.search(query, K, NLIST)
