"""Lists on other nodes: same answers, wherever they are and whoever is away; a part only where it is asked for."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hybridindex.errors import IncompleteAnswerError, InvalidInputError, RouterClosedError
from hybridindex.index.share.source import FolderSource
from hybridindex.router import Router
from hybridindex.router.remote import peer, remote_lists
from hybridindex.router.remote.loop_thread import HedgeBudget
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.router.remote.nodes import cluster, map_of
from tests.router.slow_copies import until

K, NPROBE = 10, 12


def spread(n_nodes: int, replicas: int, seed: int = 0) -> np.ndarray:
    """(n_nodes, nlist) bool: every list on so many nodes, at random."""
    rng = np.random.default_rng(seed)
    holders = np.zeros((n_nodes, NLIST), dtype=np.bool_)
    for each in range(NLIST):
        holders[rng.choice(n_nodes, replicas, replace=False), each] = True
    return holders


@pytest.fixture(scope="module", params=["flat-l2", "sq8-ip"])
def index(request, tmp_path_factory):
    codec, metric = request.param.split("-")
    return small_index(tmp_path_factory.mktemp("remote") / "idx", codec=codec, metric=metric)


@pytest.fixture(scope="module")
def whole(index):
    """What one machine answers."""
    with Router(index) as router:
        yield lambda queries, k=K, nprobe=NPROBE: router.search(queries, k, nprobe)


def same(found, wanted):
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_allclose(found.distances, wanted.distances, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.nprobe_used, wanted.nprobe_used)
    assert found.coverage is None


@pytest.mark.parametrize(("n_nodes", "replicas"), [(2, 1), (4, 2), (3, 3)])
def test_any_node_answers_as_one_machine_does(index, whole, n_nodes, replicas):
    with cluster(index.path, spread(n_nodes, replicas)) as nodes:
        for seed, n in enumerate((1, 7, 64)):
            queries = clustered(n, seed=seed)
            for node in nodes:
                same(node.router.search(queries, K, NPROBE), whole(queries))
                same(node.router.search(queries, 3, NLIST), whole(queries, 3, NLIST))
        asked = sum(node.scans for node in nodes)
        assert asked == 0 if replicas == n_nodes else asked > 0


def test_devices_scan_their_part(index, whole):
    holders = spread(3, 2)
    plan = hand_made_plan(index, np.where(np.arange(NLIST) % 2, 0, -1).astype(np.int16))
    with cluster(index.path, holders, plan=plan, devices=["cpu"]) as nodes:
        for seed in range(3):
            queries = clustered(9, seed=seed)
            for node in nodes:
                same(node.router.search(queries, K, NPROBE), whole(queries))
        assert sum(node.router.stats().device_work_bytes for node in nodes) > 0


def test_requests_that_share_a_batch_are_answered_as_alone(index, whole):
    with cluster(index.path, spread(3, 1)) as nodes, ThreadPoolExecutor(8) as pool:
        asked = [(clustered(1 + seed % 3, seed=seed), 1 + seed % 7, 4 + seed % 9) for seed in range(60)]

        def search(number):
            queries, k, nprobe = asked[number]
            return nodes[number % 3].router.search(queries, k, nprobe)

        for number, found in enumerate(pool.map(search, range(len(asked)))):
            same(found, whole(*asked[number]))


def test_a_node_that_goes_away_is_replaced_by_those_that_have_its_lists(index, whole):
    with cluster(index.path, spread(3, 2)) as nodes:
        first = nodes[0]
        first.remote.settle(5)
        nodes[1].go_away()
        for seed in range(20):
            queries = clustered(3, seed=seed)
            same(first.router.search(queries, K, NPROBE), whole(queries))
        until(lambda: [peer["state"] for peer in first.remote.status()] == ["down", "up"])
        nodes[1].arrive()
        until(lambda: [peer["state"] for peer in first.remote.status()] == ["up", "up"])
        before = nodes[1].scans
        for seed in range(20):
            first.router.search(clustered(5, seed=seed), K, NPROBE)
        assert nodes[1].scans > before


def test_a_node_that_hangs_holds_nobody_up(index, whole):
    with cluster(index.path, spread(3, 2)) as nodes:
        first = nodes[0]
        for seed in range(40):
            first.router.search(clustered(3, seed=seed), K, NPROBE)
        nodes[1].hangs = True
        for seed in range(20):
            queries = clustered(3, seed=seed)
            same(first.router.search(queries, K, NPROBE), whole(queries))
        until(lambda: [peer["state"] for peer in first.remote.status()] == ["silent", "up"])
        told = first.remote.status()[0]
        assert told["hedged"] + told["failed"] >= 1  # what the busiest machine takes for late is nearly down
        nodes[1].hangs = False
        until(lambda: [peer["state"] for peer in first.remote.status()] == ["up", "up"])


def test_a_node_that_fails_is_asked_no_second_time_for_the_same(index, whole):
    with cluster(index.path, spread(3, 2)) as nodes:
        nodes[2].fails = True
        queries = clustered(8)
        same(nodes[0].router.search(queries, K, NPROBE), whole(queries))
        assert nodes[0].remote.status()[1]["failed"] <= nodes[2].scans


def test_without_a_replica_it_is_an_error_or_says_its_share(index, whole):
    holders = spread(3, 1)
    with cluster(index.path, holders) as nodes:
        first = nodes[0]
        nodes[2].go_away()
        until(lambda: first.remote.status()[1]["state"] == "down")
        queries = clustered(6)
        with pytest.raises(IncompleteAnswerError, match="expected all of it, or allow_partial"):
            first.router.search(queries, K, NLIST)
        found = first.router.search(queries, K, NLIST, allow_partial=0.01)
        wanted = float(index.list_bytes[~holders[2]].sum() / index.list_bytes.sum())
        np.testing.assert_allclose(found.coverage, wanted, rtol=1e-5)
        # What it answers is what is nearest among the lists that were scanned.
        left = np.concatenate([index.list_ids(each) for each in np.flatnonzero(holders[2])])
        assert not np.isin(found.ids, left).any()
        exact = whole(queries, 1000, NLIST)
        for row in range(len(queries)):
            kept = exact.ids[row][~np.isin(exact.ids[row], left)][:K]
            np.testing.assert_array_equal(found.ids[row], kept)
        with pytest.raises(IncompleteAnswerError, match=r"allow_partial is 0\.99"):
            first.router.search(queries, K, NLIST, allow_partial=0.99)
        np.testing.assert_array_equal(first.remote.nobody_has(), np.flatnonzero(holders[2]))


def test_a_deadline_ends_the_wait_where_a_part_is_enough(index):
    holders = spread(2, 1)
    with cluster(index.path, holders) as nodes:
        nodes[1].delay_s = 5.0
        began = time.monotonic()
        found = nodes[0].router.search(clustered(4), K, NLIST, deadline_ms=100, min_nprobe=NLIST, allow_partial=0.01)
        assert time.monotonic() - began < 4  # less than the other node takes
        wanted = float(index.list_bytes[holders[0]].sum() / index.list_bytes.sum())
        np.testing.assert_allclose(found.coverage, wanted, rtol=1e-5)
        nodes[1].delay_s = 0.0


def test_lists_that_are_lost_here_are_asked_of_others(index, whole):
    holders = spread(2, 2)
    with cluster(index.path, holders) as nodes:
        nodes[0].index.integrity.quarantine([3, 5, 7])
        for seed in range(5):
            queries = clustered(9, seed=seed)
            same(nodes[0].router.search(queries, K, NLIST), whole(queries, K, NLIST))
        assert nodes[1].scans


def test_what_maps_and_searches_are_refused(index):
    with cluster(index.path, spread(2, 1)) as nodes:
        first = nodes[0]
        with pytest.raises(InvalidInputError, match="allow_partial"):
            first.router.search(clustered(1), K, NPROBE, allow_partial=1.5)
        assert first.remote.apply(map_of(nodes, spread(2, 1), version=1))
        assert first.remote.apply(map_of(nodes, spread(2, 2), version=3))
        assert not first.remote.apply(map_of(nodes, spread(2, 1), version=2))


def test_lists_that_move_while_they_are_asked_for_are_found_where_they_are(index, whole):
    before = np.zeros((3, NLIST), dtype=bool)
    before[1] = True
    after = before[[0, 2, 1]]
    queries = clustered(5, seed=3)
    with cluster(index.path, before) as (asking, old, new), ThreadPoolExecutor() as pool:
        old.delay_s = 1.0
        found = pool.submit(asking.router.search, queries, K, NPROBE)
        until(lambda: old.scans)
        new.index.share.hold(list(range(NLIST)), FolderSource(index.path))
        moved = map_of([asking, old, new], after, version=2)
        for node in (asking, old, new):
            node.remote.apply(moved)
        old.index.share.drop(list(range(NLIST)))
        same(found.result(30), whole(queries))
        assert new.scans


def test_another_map_of_the_same_version_is_not_taken_for_the_one_in_force(index):
    holders = spread(2, 1)
    with cluster(index.path, holders) as nodes:
        remote = nodes[0].remote
        assert remote.apply(map_of(nodes, holders))
        assert not remote.apply(map_of(nodes, holders[::-1]))
        assert (remote.map.held_by(0) == holders[0]).all()


def test_closing_answers_what_is_under_way(index, whole):
    with cluster(index.path, spread(2, 1)) as nodes:
        nodes[1].delay_s = 0.3
        queries = clustered(5)
        futures = [nodes[0].router.submit(queries, K, NPROBE) for _ in range(3)]
        nodes[0].router.close()
        for future in futures:
            same(future.result(5), whole(queries))


def test_no_list_is_merged_twice(index, whole):
    """Where the node and those who scan in its place both answer."""
    with cluster(index.path, spread(3, 2)) as nodes:
        nodes[1].delay_s = 0.06
        for seed in range(25):
            queries = clustered(4, seed=seed)
            found = nodes[0].router.search(queries, K, NPROBE)
            same(found, whole(queries))
            for row in found.ids:
                assert len(np.unique(row)) == len(row)


def test_a_node_that_is_only_busy_is_waited_for_where_nobody_else_has_its_lists(index, whole):
    with cluster(index.path, spread(2, 1)) as nodes:
        first = nodes[0]
        nodes[1].hangs = True
        until(lambda: first.remote.status()[0]["state"] == "silent")
        queries = clustered(4)
        future = first.router.submit(queries, K, NLIST)
        time.sleep(0.2)
        assert not future.done()
        nodes[1].hangs = False
        same(future.result(20), whole(queries, K, NLIST))


def test_lists_of_a_node_that_hangs_are_those_of_nobody(index):
    holders = spread(2, 1)
    with cluster(index.path, holders) as (asking, other):
        assert not len(asking.remote.nobody_has())
        other.hangs = True
        until(lambda: asking.remote.status()[0]["state"] == "silent")
        np.testing.assert_array_equal(asking.remote.nobody_has(), np.flatnonzero(holders[1]))
        other.hangs = False
        until(lambda: not len(asking.remote.nobody_has()))


def test_a_node_that_hangs_is_given_up_where_nobody_else_has_its_lists(index):
    with cluster(index.path, spread(2, 1)) as nodes:
        nodes[1].hangs = True
        with pytest.raises(IncompleteAnswerError):
            nodes[0].router.search(clustered(4), K, NLIST)
        nodes[1].hangs = False


def test_a_late_scan_is_not_asked_of_a_node_that_is_as_busy(index, whole, monkeypatch):
    monkeypatch.setattr(peer, "DOWN_AFTER_S", 60.0)  # it does not count as silent meanwhile
    with cluster(index.path, spread(3, 2)) as nodes, ThreadPoolExecutor(1) as pool:
        first = nodes[0]
        for seed in range(40):
            first.router.search(clustered(3, seed=seed), K, NPROBE)
        slow, other = first.remote.peers()
        until(lambda: not slow.late)  # on a busy machine it may have been
        before = slow.n_hedged
        first.remote.call(lambda: setattr(other, "n_open", other.n_open + 100))
        nodes[1].hangs = True
        queries = clustered(3, seed=1)
        found = pool.submit(first.router.search, queries, K, NPROBE)
        until(lambda: slow.late)
        assert first.remote.hedges.spend(0, 0)  # there would be hedges left
        assert (slow.n_hedged, found.done()) == (before, False)
        # It has time now, and the scan is looked at again.
        first.remote.call(lambda: setattr(other, "n_open", other.n_open - 100))
        same(found.result(20), whole(queries))
        nodes[1].hangs = False


def test_other_nodes_are_asked_before_a_long_scan_begins(index, whole, monkeypatch):
    """Also where their thread gets no core at first."""
    monkeypatch.setattr(remote_lists, "_WAITED_FOR", 0)
    monkeypatch.setattr(remote_lists, "_ASKED_WITHIN_S", 20)
    with cluster(index.path, spread(2, 1)) as nodes:
        first = nodes[0]
        host = first.router._served.parts.host
        scan, asked = host.scan_checked, []

        def scans(*args, **options):
            asked.append(first.remote.status()[0]["asked"])
            return scan(*args, **options)

        monkeypatch.setattr(host, "scan_checked", scans)
        for seed in range(3):
            first.remote.call(lambda: time.sleep(0.1))
            queries = clustered(3, seed=seed)
            same(first.router.search(queries, K, NPROBE), whole(queries))
        assert asked == [1, 2, 3]


def test_hedges_are_few_and_go_to_nodes_with_less_to_do():
    budget = HedgeBudget()
    assert [budget.spend(late, other) for late, other in ((1, 0), (1, 1), (2, 2), (10, 5), (10, 6), (100, 99))] == [
        True, True, False, True, False, False
    ]  # fmt: skip
    # 20 at once, of which 3 are gone, and one for ten requests.
    assert sum(budget.spend(1, 0) for _ in range(40)) == 17
    for _ in range(25):
        budget.earn()
    assert sum(budget.spend(1, 0) for _ in range(40)) == 2


@pytest.mark.parametrize("is_there", [True, False])
def test_a_map_is_in_force_when_nodes_that_are_new_have_answered(index, is_there):
    """Before, nobody would be asked for lists that others may have given up by it."""
    holders = spread(2, 2)
    with cluster(index.path, holders) as nodes:
        if not is_there:
            nodes[1].go_away()
        remote = remote_lists.RemoteLists(nodes[0].index, "node-0")
        try:
            assert remote.apply(map_of(nodes, holders))
            assert [each.up for each in remote.peers()] == [is_there]
        finally:
            remote.close()
        with pytest.raises(RouterClosedError):
            remote.apply(map_of(nodes, holders))
