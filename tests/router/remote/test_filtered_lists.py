"""Searches with filters in a cluster: the answer of one machine, and exact over the rows that match, wherever lists lie
and whoever is away."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hybridindex.errors import IncompleteAnswerError, InvalidInputError
from hybridindex.index.filters.write_attributes import write_attributes
from hybridindex.index.share.source import FolderSource
from hybridindex.router import Router, filtered
from hybridindex.router.remote import remote_lists
from tests.clustered import NLIST, clustered, hand_made_plan, share_of_ids, small_index
from tests.oracle import TOLERANCE, candidate_distances
from tests.router.remote.nodes import cluster
from tests.router.slow_copies import until

N, K, NPROBE = 3000, 10, 6
RNG = np.random.default_rng(5)
YEAR, LANG = RNG.integers(1990, 2030, N), RNG.choice(["en", "de", "fr"], N, p=[0.7, 0.29, 0.01])
#: Condition, and the ids that meet it.
WHERE = {
    "year >= 2020": np.flatnonzero(YEAR >= 2020),
    "lang = 'fr'": np.flatnonzero(LANG == "fr"),
    "lang = 'de' AND year < 1995": np.flatnonzero((LANG == "de") & (YEAR < 1995)),
    "year > 3000": np.empty(0, np.int64),
}


def placed(n_nodes: int, replicas: int, seed: int) -> np.ndarray:
    """(n_nodes, NLIST) bool: every list on so many nodes, at random."""
    rng = np.random.default_rng(seed)
    holders = np.zeros((n_nodes, NLIST), dtype=np.bool_)
    for each in range(NLIST):
        holders[rng.choice(n_nodes, replicas, replace=False), each] = True
    return holders


@pytest.fixture(scope="module", params=["flat-l2", "sq8-ip", "pq8-l2"])
def index(request, tmp_path_factory):
    codec, metric = request.param.split("-")
    index = small_index(tmp_path_factory.mktemp("filtered") / "idx", codec=codec, metric=metric)
    write_attributes(index, {"year": YEAR, "lang": LANG})
    return index


@pytest.fixture(scope="module")
def whole(index):
    """One machine."""
    with Router(index) as router:
        yield router


def chosen(seed: int) -> tuple[dict, np.ndarray]:
    """A filter at random, and the ids that it leaves."""
    rng = np.random.default_rng(seed)
    given, left = {}, np.arange(N)
    if rng.random() < 0.6:
        given["allow_ids"] = allowed = share_of_ids(rng.choice([0.0, 0.002, 0.05, 0.5, 1.0]), seed)
        left = np.intersect1d(left, allowed)
    if rng.random() < 0.4:
        given["deny_ids"] = denied = share_of_ids(rng.choice([0.01, 0.5, 0.99]), seed + 1)
        left = np.setdiff1d(left, denied)
    if rng.random() < 0.5 or not given:
        given["where"] = condition = str(rng.choice(list(WHERE)))
        left = np.intersect1d(left, WHERE[condition])
    return given, left


def check_exact(index, queries, found, left, lists=None):
    """The answer is that of all rows with these ids, in these lists; None: in all."""
    keep_max = index.metric == "ip"
    lists = np.arange(index.nlist) if lists is None else lists
    for query, distances, ids in zip(index.transform(queries), found.distances, found.ids, strict=True):
        all_ids, exact = candidate_distances(index, query, lists)
        there = np.isin(all_ids, left)
        all_ids, exact = all_ids[there], exact[there]
        n = min(len(ids), len(all_ids))
        assert (ids[n:] == -1).all()
        assert len(np.unique(ids[:n])) == n
        at = {each: number for number, each in enumerate(all_ids.tolist())}
        own = exact[[at[each] for each in ids[:n].tolist()]]
        margin = TOLERANCE * (1 + np.abs(own))
        assert (np.abs(distances[:n] - own) <= margin).all()
        if n:
            kth = np.sort(exact)[::-1][n - 1] if keep_max else np.sort(exact)[n - 1]
            assert ((kth - own if keep_max else own - kth) <= margin).all()


def same(found, wanted):
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_allclose(found.distances, wanted.distances, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.nprobe_used, wanted.nprobe_used)
    assert found.coverage is None


@pytest.mark.parametrize(("n_nodes", "replicas"), [(2, 1), (4, 2), (3, 3)])
def test_any_node_answers_as_one_machine_does_and_exactly_at_nlist(index, whole, n_nodes, replicas):
    with cluster(index.path, placed(n_nodes, replicas, n_nodes)) as nodes:
        for seed in range(24):
            (given, left), queries = chosen(seed), clustered((1, 3, 17)[seed % 3], seed=seed)
            router = nodes[seed % n_nodes].router
            same(router.search(queries, K, NPROBE, **given), whole.search(queries, K, NPROBE, **given))
            check_exact(index, queries, router.search(queries, K, NLIST, **given), left)
        asked = sum(node.scans for node in nodes)
        assert asked == 0 if replicas == n_nodes else asked > 0


def test_a_prepared_filter_and_large_k(index, whole):
    with cluster(index.path, placed(3, 1, 0)) as nodes:
        queries, allowed = clustered(4, seed=2), share_of_ids(0.3)
        mine = nodes[1].router.filter(allow_ids=allowed, where="year >= 2020")
        assert mine.total == len(np.intersect1d(allowed, WHERE["year >= 2020"]))
        wanted = whole.search(queries, 400, NPROBE, allow_ids=allowed, where="year >= 2020")
        same(nodes[1].router.search(queries, 400, NPROBE, row_filter=mine), wanted)


@pytest.mark.parametrize(("replicas", "fails"), [(1, False), (2, True)])
def test_requests_with_different_filters_share_batches(index, whole, replicas, fails):
    with cluster(index.path, placed(3, replicas, 1)) as nodes, ThreadPoolExecutor(8) as pool:
        nodes[2].fails = fails  # others get parts of what it was asked
        asked = [(clustered(1 + seed % 3, seed=seed), chosen(seed // 2)[0] if seed % 4 else {}) for seed in range(60)]

        def search(number):
            queries, given = asked[number]
            return nodes[number % 3].router.search(queries, K, NPROBE, **given)

        for found, (queries, given) in zip(pool.map(search, range(len(asked))), asked, strict=True):
            same(found, whole.search(queries, K, NPROBE, **given))


def test_devices_scan_their_part(index, whole):
    plan = hand_made_plan(index, np.where(np.arange(NLIST) % 2, 0, -1).astype(np.int16))
    with cluster(index.path, placed(3, 2, 2), plan=plan, devices=["cpu"]) as nodes:
        for seed in range(3):
            queries = clustered(9, seed=seed)
            for share in (0.6, 0.01):
                given = {"allow_ids": share_of_ids(share, seed)}
                for node in nodes:
                    same(node.router.search(queries, K, NPROBE, **given), whole.search(queries, K, NPROBE, **given))
        assert sum(node.router.stats().device_work_bytes for node in nodes) > 0


def test_filters_of_many_bytes_are_sent_in_several_scans(index, whole, monkeypatch):
    monkeypatch.setattr(remote_lists, "_MOST_FILTERS", 200)
    with cluster(index.path, placed(2, 1, 3)) as nodes:
        queries, given = clustered(9, seed=1), {"allow_ids": share_of_ids(0.5)}
        same(nodes[0].router.search(queries, K, NPROBE, **given), whole.search(queries, K, NPROBE, **given))
        assert nodes[1].scans > 2


def test_many_queries_are_searched_in_batches_that_have_room(index, whole, monkeypatch):
    monkeypatch.setattr(filtered, "_MOST_CELLS", 8 * NLIST)
    with cluster(index.path, placed(2, 1, 3)) as nodes:
        # All rows of the first are compared, whatever is near.
        for given in ({"allow_ids": share_of_ids(0.02)}, {"where": "year >= 2020"}):
            queries = clustered(50, seed=1)
            same(nodes[0].router.search(queries, K, NPROBE, **given), whole.search(queries, K, NPROBE, **given))
        assert nodes[1].scans > 2 * 50 // 8


@pytest.mark.parametrize("how", ["goes away", "hangs", "fails", "is slow"])
def test_lost_nodes_are_replaced_with_the_same_filter(index, whole, how):
    with cluster(index.path, placed(3, 2, 4)) as nodes:
        first = nodes[0]
        for seed in range(30):
            first.router.search(clustered(3, seed=seed), K, NPROBE, where="year >= 2020")
        if how == "goes away":
            nodes[1].go_away()
        nodes[1].hangs, nodes[1].fails = how == "hangs", how == "fails"
        # Longer than any scan may take before another node is asked, too, however busy the machine was.
        nodes[1].delay_s = 1.5 if how == "is slow" else 0.0
        for seed in range(12):
            (given, left), queries = chosen(seed), clustered(3, seed=seed)
            same(first.router.search(queries, K, NPROBE, **given), whole.search(queries, K, NPROBE, **given))
            check_exact(index, queries, first.router.search(queries, K, NLIST, **given), left)
        told = first.remote.status()[0]
        if how == "is slow":
            assert told["hedged"] >= 1
        elif how == "hangs":
            assert told["hedged"] + told["failed"] >= 1


def test_without_a_replica_it_is_an_error_or_says_its_share(index):
    holders = placed(3, 1, 5)
    with cluster(index.path, holders) as nodes:
        first = nodes[0]
        nodes[2].go_away()
        until(lambda: first.remote.status()[1]["state"] == "down")
        queries, reachable = clustered(5), np.flatnonzero(~holders[2])
        for seed in range(12):
            given, left = chosen(seed)
            counts = first.router.filter(**given).counts
            np.testing.assert_array_equal(counts, [np.isin(index.list_ids(i), left).sum() for i in range(NLIST)])
            needed = np.flatnonzero(counts)
            work, done = (int(index.list_bytes[each].sum()) for each in (needed, np.intersect1d(needed, reachable)))
            if done == work:
                check_exact(index, queries, first.router.search(queries, K, NLIST, **given), left)
                continue
            with pytest.raises(IncompleteAnswerError, match="expected all of it, or allow_partial"):
                first.router.search(queries, K, NLIST, **given)
            found = first.router.search(queries, K, NLIST, allow_partial=1e-6, **given)
            np.testing.assert_allclose(found.coverage, done / work, rtol=1e-5)
            check_exact(index, queries, found, left, reachable)
        # What is left needs nothing of the node that is away.
        here = np.concatenate([index.list_ids(each) for each in reachable])
        check_exact(index, queries, first.router.search(queries, K, NLIST, allow_ids=here), here)


def test_a_deadline_ends_the_wait_where_a_part_is_enough(index):
    holders = placed(2, 1, 6)
    with cluster(index.path, holders) as nodes:
        nodes[1].delay_s = 5.0
        asked = {"deadline_ms": 100, "min_nprobe": NLIST, "allow_partial": 0.01, "deny_ids": [5]}
        found = nodes[0].router.search(clustered(4), K, NLIST, **asked)
        assert (found.coverage < 1).all()
        check_exact(index, clustered(4), found, np.setdiff1d(np.arange(N), [5]), np.flatnonzero(holders[0]))
        nodes[1].delay_s = 0.0


def test_lists_that_are_lost_here_are_asked_of_others(index, whole):
    with cluster(index.path, placed(2, 2, 7)) as nodes:
        first = nodes[0]
        before = first.router.filter(where="year >= 2020")
        first.index.integrity.quarantine([3, 5, 7])
        # Which rows these lists hold is known all the same.
        again = first.router.filter(where="year >= 2020")
        np.testing.assert_array_equal(before.counts, again.counts)
        for seed in range(8):
            given, queries = chosen(seed)[0], clustered(9, seed=seed)
            same(first.router.search(queries, K, NLIST, **given), whole.search(queries, K, NLIST, **given))
        assert nodes[1].scans


def test_lists_come_and_go_while_searches_with_filters_go_on(index, whole):
    with cluster(index.path, placed(3, 3, 0)) as nodes, ThreadPoolExecutor(1) as pool:
        moved, source, ending = nodes[0].index.share, FolderSource(index.path), threading.Event()

        def move():
            seed = 0
            while not ending.is_set():
                lists = np.random.default_rng(seed).choice(NLIST, 12, replace=False).tolist()
                moved.drop(lists)
                moved.hold(lists, source)
                seed += 1
            return seed

        moving = pool.submit(move)
        for seed in range(60):
            (given, left), queries = chosen(seed), clustered(1 + seed % 5, seed=seed)
            for node in nodes[:2]:
                same(node.router.search(queries, K, NPROBE, **given), whole.search(queries, K, NPROBE, **given))
            check_exact(index, queries, nodes[0].router.search(queries, K, NLIST, **given), left)
        ending.set()
        assert moving.result(60) > 3
        assert nodes[1].scans + nodes[2].scans > 0


def test_bad_filters_are_refused_as_on_one_machine(index):
    with cluster(index.path, placed(2, 1, 8)) as nodes:
        with pytest.raises(InvalidInputError, match="where"):
            nodes[0].router.search(clustered(1), K, where="DROP TABLE rows")
        with pytest.raises(InvalidInputError, match="allow_ids"):
            nodes[0].router.search(clustered(1), K, allow_ids=["a"])


def test_a_node_that_knows_no_filters_does_not_answer_without_one(index, whole):
    with cluster(index.path, placed(3, 2, 9)) as nodes:
        nodes[1].of_before_filters = True
        for seed in range(6):
            given, queries = chosen(seed)[0], clustered(5, seed=seed)
            same(nodes[0].router.search(queries, K, NPROBE, **given), whole.search(queries, K, NPROBE, **given))
        nodes[2].of_before_filters = True
        with pytest.raises(IncompleteAnswerError):
            nodes[0].router.search(clustered(5), K, NLIST, deny_ids=[1])
        assert nodes[0].router.search(clustered(5), K, NLIST).coverage is None
