"""A client asks the node that holds what its queries are near to, and follows lists that move."""

from __future__ import annotations

import os
import signal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from hybridindex.api import Index
from hybridindex.cluster.nodes.calls import NodeCalls
from hybridindex.cluster.router import ClusterRouter
from hybridindex.errors import ServiceError
from hybridindex.router import Router
from hybridindex.router.remote.locality import LOCALITY_PATH, Locality
from hybridindex.service.auth import new_key
from tests.cluster.searches import K, same, wait_until
from tests.cluster.test_manager import KEY, running
from tests.clustered import DIM, clustered, small_index

NLIST, NPROBE, N_QUERIES = 128, 5, 120


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """With a profile: lists that are probed together come to the same nodes."""
    index = small_index(tmp_path_factory.mktemp("locality") / "idx", n=6000, nlist=NLIST)
    with Index(index) as opened:
        opened.profile(clustered(600, seed=3), NPROBE, devices=["cpu"], max_seconds=1)
        yield index


@pytest.fixture(scope="module")
def one_machine(index):
    with Router(index) as router:
        yield lambda queries: router.search(queries, K, NPROBE)


@pytest.fixture
def cluster(index, tmp_path):
    with running(index, tmp_path, n_nodes=3, share=0.5, replicas=1, replicate="none") as it:
        yield it


def router_of(it, **options):
    return ClusterRouter({f"node-{i}": node.url for i, node in enumerate(it.nodes)}, dim=DIM, key=KEY, **options)


def asked_of_others(it):
    return sum(peer["asked"] for node in it.nodes for peer in NodeCalls(node.url, KEY).node()["peers"])


def bytes_of_others(it):
    return sum(peer["asked_bytes"] for node in it.nodes for peer in NodeCalls(node.url, KEY).node()["peers"])


def fan_out(it, router, one_machine):
    """Other nodes that a query asks, each asked alone. Answers are one machine's."""
    queries, before = clustered(N_QUERIES, seed=11), asked_of_others(it)
    for query in queries:
        assert same(router.search(query, K, NPROBE), one_machine(query))
    return (asked_of_others(it) - before) / N_QUERIES


def nearest(locality, query):
    return locality.names[locality.of(query[None], NPROBE)[0].argmax()]


def table_of(node, key=KEY):
    with urlopen(Request(node.url + LOCALITY_PATH, headers={"authorization": f"Bearer {key}"}), timeout=20) as answer:
        return answer.read()


def test_fewer_nodes_are_asked(cluster, one_machine):
    planned = cluster.manager.plan()
    with router_of(cluster, by_locality=False) as router:
        anywhere = fan_out(cluster, router, one_machine)
        assert router.locality is None
    with router_of(cluster) as router:
        assert router.wait_until_known(60.0)
        chosen = fan_out(cluster, router, one_machine)
    assert anywhere == pytest.approx(planned.fan_out, rel=0.25)
    assert chosen == pytest.approx(planned.nearest_fan_out, rel=0.35)
    assert chosen < 0.85 * anywhere


def test_lists_that_move_are_followed(cluster, one_machine):
    queries = clustered(N_QUERIES, seed=12)
    with router_of(cluster) as router:
        assert router.wait_until_known(60.0)
        version = router.locality.version
        cluster.manager.drain("node-0")
        wait_until(lambda: router.locality.version > version)
        assert dict(zip(router.locality.names, router.locality.of(queries).T, strict=True))["node-0"].max() == 0
        assert same(router.search(queries, K, NPROBE), one_machine(queries))
        assert cluster.manager.status()["map_version"] == router.locality.version


def test_a_busy_node_is_asked_less(cluster, one_machine):
    """All queries are near to the lists of one node: many at once go to others, too."""
    queries = clustered(400, seed=13)
    with router_of(cluster) as router:
        assert router.wait_until_known(60.0)
        own = [query for query in queries if nearest(router.locality, query) == "node-1"]
        for node in cluster.nodes:
            os.kill(node.pid, signal.SIGSTOP)
        try:
            found = [router.submit(query, K, NPROBE) for query in own]
            wait_until(lambda: sum(each["asked"] for each in router.status()) >= len(own))
        finally:
            for node in cluster.nodes:
                os.kill(node.pid, signal.SIGCONT)
        for query, each in zip(own, found, strict=True):
            assert same(each.result(60), one_machine(query))
        counts = {each["name"]: each["asked"] for each in router.status()}
    assert counts["node-1"] >= len(own) / 5
    assert min(counts.values()) > len(own) / 10


def test_a_batch_is_divided_between_the_nodes_that_its_queries_are_near_to(cluster, one_machine):
    queries = clustered(N_QUERIES, seed=15)
    elsewhere = {}
    for by_locality in (False, True):
        with router_of(cluster, by_locality=by_locality) as router:
            assert router.wait_until_known(60.0)
            assert (router.locality is not None) == by_locality
            before = bytes_of_others(cluster)
            assert same(router.search(queries, K, NPROBE), one_machine(queries))
            elsewhere[by_locality] = bytes_of_others(cluster) - before
            counts = [each["asked"] for each in router.status()]
            assert sum(map(bool, counts)) == (3 if by_locality else 1)
    assert elsewhere[True] < 0.7 * elsewhere[False]


def test_the_table_is_for_whoever_may_search(cluster):
    table = Locality.decode(table_of(cluster.nodes[0]))
    assert table.names == ("node-0", "node-1", "node-2")
    with pytest.raises(HTTPError) as refused:
        table_of(cluster.nodes[0], key=new_key())
    assert refused.value.code == 401
    refused.value.close()


@pytest.mark.parametrize(("wrong", "known"), [(b"", True), (b"HIXL", False), (b"no table", False)])
def test_nodes_without_a_table_are_asked_as_before(cluster, one_machine, monkeypatch, wrong, known):
    queries, asked = clustered(20, seed=14), []
    monkeypatch.setattr(ClusterRouter, "_get", answer_instead(ClusterRouter._get, wrong, asked=asked))
    with router_of(cluster) as router:
        wait_until(lambda: asked)
        assert router.wait_until_known(1.0) == known
        assert router.locality is None
        assert same(router.search(queries, K, NPROBE), one_machine(queries))


def test_what_a_node_refuses_once_is_asked_again(cluster, monkeypatch):
    get, refused = ClusterRouter._get, []

    async def found(router, path, most_bytes):
        if path == LOCALITY_PATH and not refused:
            refused.append(path)
            raise ServiceError("too busy")
        return await get(router, path, most_bytes)

    monkeypatch.setattr(ClusterRouter, "_get", found)
    with router_of(cluster) as router:
        assert router.wait_until_known(20.0)
        assert router.locality is not None
        assert refused


def answer_instead(get, wrong, instead_of=LOCALITY_PATH, asked=None):
    async def found(router, path, most_bytes):
        if path != instead_of:
            return await get(router, path, most_bytes)
        if asked is not None:
            asked.append(path)
        return wrong

    return found


def test_a_node_that_knows_of_no_other_takes_none_away(cluster, one_machine, monkeypatch):
    """It has just begun."""
    nothing = b'{"version": 0, "dim": 24, "nodes": []}'
    monkeypatch.setattr(ClusterRouter, "_get", answer_instead(ClusterRouter._get, nothing, "/v1/cluster/nodes"))
    queries = clustered(20, seed=16)
    with router_of(cluster) as router:
        assert router.wait_until_known(60.0)
        assert same(router.search(queries, K, NPROBE), one_machine(queries))


def test_nodes_that_have_all_lists_are_not_told_apart(index, one_machine, tmp_path):
    with running(index, tmp_path, n_nodes=2, share=1.1, replicas=2) as it, router_of(it) as router:
        assert router.wait_until_known(60.0)
        table = Locality.decode(table_of(it.nodes[0]))
        assert not table.tells_nodes_apart
        assert router.locality is None
        assert fan_out(it, router, one_machine) == 0
