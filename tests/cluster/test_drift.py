"""A cluster whose queries ask for other lists than before moves them by itself, and answers as before."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from hybridindex.cluster.manager import Manager
from hybridindex.cluster.node_process import NodeProcess
from hybridindex.cluster.state import STATE_FILE, ClusterRequest, read_state
from hybridindex.errors import InvalidInputError
from hybridindex.router import Router
from tests.cluster.searches import NPROBE, K, same, wait_until
from tests.cluster.test_manager import KEY, NLIST, running, spec_of
from tests.clustered import clustered, small_index


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return small_index(tmp_path_factory.mktemp("drift") / "idx", n=6000, nlist=NLIST, nprobe=6)


def test_lists_move_to_where_they_are_asked_for(index, tmp_path):
    about = index.centroids[:3]
    rng = np.random.default_rng(3)
    queries = np.ascontiguousarray(
        about[rng.integers(0, 3, 400)] + 0.01 * rng.standard_normal((400, index.dim)), dtype=np.float32
    )
    with (
        Router(index) as whole,
        running(index, tmp_path, n_nodes=3, share=0.8) as it,
        it.router() as router,
        ExitStack() as ending,
    ):
        assert it.manager.refresh() is None
        assert it.manager.status()["drift"]["queries"] == 0
        for start in range(0, 400, 4):
            router.search(queries[start : start + 4], K)
        before = it.manager.status()["map_version"]
        done = it.manager.refresh()
        assert done is not None
        status = it.manager.status()
        assert status["map_version"] > before
        drift = status["drift"]
        assert drift["queries"] >= 400  # those that were hedged count twice
        assert drift["refreshes"] == 1
        assert drift["best_local_share"] - drift["local_share"] >= 0.05
        assert done["local_share"] == pytest.approx(drift["best_local_share"], abs=0.02)
        assert it.manager.refresh() is None
        assert it.manager.status()["lists_below_replicas"] == 0
        for some in (queries[:9], clustered(9, seed=4)):
            assert same(router.search(some, K, NPROBE), whole.search(some, K, NPROBE))
        # One that was drained, and has ended, keeps nothing where it is.
        it.nodes.append(NodeProcess(spec_of(index, tmp_path, 3, it.memory_bytes)))
        ending.callback(it.nodes[3].close)
        it.manager.set_nodes([it.entry(i) for i in range(4)])
        it.manager.repartition()
        it.manager.drain("node-3")
        it.nodes[3].close()
        wait_until(lambda: it.states()[3] == "down")
        for start in range(0, 400, 4):
            router.search(queries[start : start + 4], K)
        assert it.manager.refresh() is not None
        # With a node away lists stay: they must not leave for it.
        it.nodes[2].close()
        wait_until(lambda: it.states()[2] == "down")
        assert it.manager.refresh() is None


def test_it_looks_by_itself_where_it_is_asked_to(index, tmp_path):
    with running(index, tmp_path, n_nodes=2, share=1.1, refresh_s=1.0) as it, it.router() as router:
        router.search(clustered(8, seed=1), K)
        wait_until(lambda: it.manager.status()["drift"]["queries"] > 0)
        assert read_state(it.folder / "state").request.refresh_s == 1.0
    kept = (tmp_path / "state" / STATE_FILE).read_text()
    assert '"refresh_s": 1.0' in kept
    # What an older version wrote has none.
    (tmp_path / "state" / STATE_FILE).write_text(kept.replace(',\n  "refresh_s": 1.0', ""))
    manager = Manager(tmp_path / "state", cluster="test", index=index.path, request=ClusterRequest(), key=KEY)
    try:
        assert manager._state.request.refresh_s is None
    finally:
        manager.close()


@pytest.mark.parametrize("wrong", [0, -1, 1e9, float("nan")])
def test_seconds_that_are_none_are_refused(wrong):
    with pytest.raises(InvalidInputError, match="refresh_s"):
        ClusterRequest(refresh_s=wrong)
