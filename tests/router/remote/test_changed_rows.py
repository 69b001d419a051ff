"""Rows that come and go in an index of which nodes have shares: any node answers as one machine does."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.api import open_index
from hybridindex.config import SearchParams
from hybridindex.errors import RouterClosedError
from hybridindex.index.share.source import FolderSource
from hybridindex.router import Router
from hybridindex.router.batch.replies import BlockingReply
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.router.remote.nodes import cluster
from tests.router.slow_copies import until

K = 10


@pytest.fixture(params=["flat-l2", "sq8-ip"])
def whole(request, tmp_path):
    codec, metric = request.param.split("-")
    path = small_index(tmp_path / "idx", codec=codec, metric=metric).path
    with open_index(path, write=True) as index:
        yield index


def halves():
    """(2, NLIST) bool: every other list on each node."""
    holders = np.zeros((2, NLIST), dtype=np.bool_)
    holders[0, ::2] = holders[1, 1::2] = True
    return holders


def change(index, seed):
    """Rows come, are replaced, and go: also the nearest of some queries, and hundreds."""
    rng = np.random.default_rng(seed)
    index.add(clustered(60, seed=seed), np.arange(10_000 * seed, 10_000 * seed + 60))
    index.upsert(clustered(20, seed=seed + 50), rng.choice(2000, 20, replace=False))
    index.delete(rng.choice(2000, 200, replace=False).tolist())


def check(index, nodes, seed, **options):
    queries = clustered(9, seed=seed)
    with index.router(scrub_bytes_per_s=0) as router:
        for nprobe in (5, NLIST):
            wanted = router.search(queries, K, nprobe, **options)
            for node in nodes:
                found = node.router.search(queries, K, nprobe, **options)
                np.testing.assert_array_equal(found.ids, wanted.ids)
                np.testing.assert_allclose(found.distances, wanted.distances, rtol=1e-5, atol=1e-5)
                assert found.coverage is None


def test_any_node_answers_as_one_machine_does(whole):
    with cluster(whole.path, halves()) as nodes:
        for seed in (1, 2, 3):
            change(whole, seed)
            check(whole, nodes, seed)
            check(whole, nodes, seed, deny_ids=np.arange(0, 3000, 2))
            check(whole, nodes, seed, allow_ids=np.arange(10_000 * seed, 10_000 * seed + 40))
        # Nearly all rows go: what is left is compared row by row, wherever it is.
        whole.delete(np.arange(2900).tolist())
        check(whole, nodes, 7)


def test_devices_have_no_part_in_lists_that_went_since(whole):
    """Rows that came to a list are scanned here, whoever scans the list."""
    plan = hand_made_plan(whole.ivf, np.zeros(NLIST, dtype=np.int16))
    with cluster(whole.path, np.ones((2, NLIST), dtype=np.bool_), plan=plan, devices=["cpu"]) as nodes:
        change(whole, 1)
        check(whole, nodes, 1)
        router = nodes[0].router
        added = router._served.searcher._engine.added_on_devices
        until(lambda: (router.search(clustered(2, seed=3), K, NLIST), added.count)[1])
        nodes[0].index.share.drop(range(0, NLIST, 3))
        check(whole, nodes, 2)
        nodes[0].index.share.hold(range(NLIST), FolderSource(whole.path, is_followed=True))
        change(whole, 2)
        check(whole, nodes, 3)


def test_a_search_that_was_too_short_asks_nobody_after_the_end(whole, monkeypatch):
    """Lists that are not here would be read as rows of zeros."""
    query = clustered(1, seed=1)
    with Router(whole.ivf) as router:
        nearest = router.search(query, 60, NLIST).ids[0]
    whole.delete(nearest[:50].tolist())
    with cluster(whole.path, halves()) as nodes:
        searcher = nodes[0].router._served.searcher
        engine, reply, params = searcher._engine, BlockingReply(), SearchParams(k=K, nprobe=NLIST)
        call = searcher._check(query, params, own=True)
        [request] = searcher._requests(reply, call, params, None, 0.0, may_wait=False)

        def is_closed(_request):
            raise RouterClosedError("the router is closed")

        monkeypatch.setattr(engine, "submit", is_closed)
        engine._search_what_is_left(request)
        with pytest.raises(RouterClosedError):
            reply.wait()
